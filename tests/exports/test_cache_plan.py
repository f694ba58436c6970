"""Plans of a cache: their bytes, what engines are told, and what is chosen for planted models."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headcount.exports.cache_plan.engines import ENGINES
from headcount.exports.cache_plan.plans import CachePlan, CacheShape, Choice, HeadCache
from headcount.exports.cache_plan.search import not_undercut, p_alike, window_costs
from headcount.schemas.scans.intervention import parse_intervention
from headcount.workers.cache_trial import CacheTrial, Pieces
from headcount.workers.head_gates import Predictions, Round
from headcount.workers.inputs.families.needles import VALUES
from headcount.workers.interventions import bind
from headcount.workers.model.info.description import find_model
from tests.toys.commands import error_of, printed
from tests.toys.gguf_files import write_gguf
from tests.toys.toy_models import change_weights, copy_of, family, save_model
from tests.toys.windowed_models import (
    N_CTX,
    RECENT,
    SINK,
    check_moves,
    cut_to_windows,
    reading_model,
)

SHAPE = CacheShape(
    kv_heads=((0, 0), (0, 1), (2, 0), (2, 1)),
    n_kv_heads=2,
    d_head=8,
    n_ctx=100,
    sink=4,
    recent=16,
    end=90,
    whole=4,
    own_windows={0: 100, 2: 50},
)
PLAN = CachePlan(
    (
        HeadCache(window=True),
        HeadCache(keys="mlx4", values="mlx2"),
        HeadCache(),
        HeadCache(window=True, keys="fp8"),
    )
)


# Without a model


def test_the_bytes_of_a_plan():
    window = 20 * 8 * 2 * 2
    # A block of 8 numbers has 32 bits more: 8 bits a key, 6 a value, and four positions of 16 bits.
    bits = (4 * 16 * 8 + 96 * 8 * 8 + 4 * 16 * 8 + 96 * 6 * 8) / 8
    own_window = 50 * 8 * 2 * 2
    window_in_fp8 = (4 * 2 + 16 * 1) * 8 + 20 * 2 * 8
    total = window + bits + own_window + window_in_fp8
    assert total == 640 + 1472 + 1600 + 512
    assert PLAN.bytes_per_token(SHAPE) == pytest.approx(total / 100)
    assert CachePlan.untouched(SHAPE).bytes_per_token(SHAPE) == (100 + 50) * 2 * 8 * 2 * 2 / 100


def test_a_plan_is_one_intervention():
    text = PLAN.intervention(SHAPE)
    assert text == (
        "stream_groups(4,16,2,x102)+store_keys(fp8,4,90,2,x002)+store_keys(mlx4,4,90,2,x2)"
        "+store_values(mlx2,4,90,2,x2)"
    )
    parts = bind(parse_intervention(text)).parts
    assert [part.target for part in parts] == ["attn_scores", "rot_k", "rot_k", "v"]
    assert CachePlan.untouched(SHAPE).intervention(SHAPE) == "none"


def test_a_format_never_takes_the_place_of_a_smaller_one():
    wide, narrow = (Choice(name, SHAPE.kv_heads, keys=name) for name in ("affine8", "rotated4"))
    plan = CachePlan.untouched(SHAPE).with_choices(SHAPE, [narrow, wide])
    assert {cache.keys for cache in plan.caches} == {"rotated4"}
    assert plan == CachePlan.untouched(SHAPE).with_choices(SHAPE, [wide, narrow])


def test_what_keeps_a_part_of_another_plan():
    def of(*caches: HeadCache) -> CachePlan:
        return CachePlan(caches)

    wide, narrow, cut = (
        HeadCache(keys="affine8"),
        HeadCache(keys="rotated4"),
        HeadCache(window=True),
    )
    assert of(narrow, cut).keeps_part_of(of(wide, HeadCache()), SHAPE)
    assert of(narrow, cut).keeps_part_of(of(narrow, cut), SHAPE)
    assert not of(wide, cut).keeps_part_of(of(narrow, cut), SHAPE)
    assert not of(narrow, HeadCache()).keeps_part_of(of(wide, cut), SHAPE)


def told(engine: str, *choices: Choice) -> str:
    flags = ENGINES[engine].flags
    assert flags is not None
    return flags(CachePlan.untouched(SHAPE).with_choices(SHAPE, choices), SHAPE)


def test_what_engines_are_told():
    fp8 = partial(Choice, "", keys="fp8", values="fp8")
    assert told("vllm", fp8(SHAPE.kv_heads)) == "--kv-cache-dtype fp8"
    layer_2 = told("vllm", fp8(SHAPE.kv_heads[2:]))
    assert layer_2 == "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0"
    assert told("vllm") == "--kv-cache-dtype auto"
    values = told("llama.cpp", Choice("", SHAPE.kv_heads, values="q4_0"))
    assert values == "--flash-attn on --cache-type-k f16 --cache-type-v q4_0"
    of_all = told("mlx", Choice("", SHAPE.kv_heads, keys="mlx4", values="mlx4"))
    assert of_all == "--kv-bits 4 --kv-group-size 64 --quantized-kv-start 0"


def test_single_choices_and_plans_for_all_heads():
    assert len(ENGINES["duo"].choices(SHAPE)) == 4
    assert [choice.heads for choice in ENGINES["vllm"].choices(SHAPE)] == [
        ((0, 0), (0, 1)), ((2, 0), (2, 1)),
    ]  # fmt: skip
    assert ENGINES["llama.cpp"].choices(SHAPE) == []
    # 16, 8 or 4 bits for keys and for values, but not both of 16.
    assert len(ENGINES["llama.cpp"].uniform(SHAPE)) == 8
    assert len(ENGINES["mlx"].uniform(SHAPE)) == 3


def test_windows_share_what_was_lost_until_their_heads_were_opened():
    gains = np.zeros((2, 1, 4))  # [sequence layer kv_head]
    gains[:, 0] = [[2, 1, 0.5, -1], [4, 1, 0.5, 0]]
    opened = ((0, 0), (0, 1))
    rounds = [Round((), 0, 1.0, gains), Round(opened, 0, 0.25, 0.1 * gains)]
    costs = window_costs(rounds, [(0, head) for head in range(4)])
    # 0.75 was gained by the first two, six parts of eight by head 0: two of them in sequence 0.
    assert costs[0, 0].tolist() == pytest.approx([2 * 2 * 0.75 / 8, 2 * 4 * 0.75 / 8])
    assert costs[0, 1].tolist() == pytest.approx([2 * 0.75 / 8, 2 * 0.75 / 8])
    # 0.25 is still lost, by the head that would gain.
    assert costs[0, 2].tolist() == pytest.approx([0.25, 0.25])
    assert costs[0, 3].tolist() == [0, 0]
    # Together they cost what all windows do.
    assert sum(each.mean() for each in costs.values()) == pytest.approx(1.0)


def test_plans_that_another_undercuts_are_left_out():
    assert not_undercut([4, 2, 3, 3, 1], [0, 5, 1, 2, 5]) == [4, 2, 0]


def test_costs_that_differ_by_chance_are_alike():
    rng = np.random.default_rng(3)
    of_sequences = rng.normal(size=8)
    noise = 0.1 * rng.normal(size=(60, 12, 8))
    p = [p_alike(of_sequences + each) for each in noise[:, :6]]
    # Of twenty, about one has p of 0.05 or less.
    assert np.mean(np.array(p) <= 0.05) < 0.1
    assert p_alike(of_sequences + noise[0] + 0.1 * np.arange(12)[:, None]) == 0.001


def test_the_pattern_of_duo_splits_where_its_reader_does():
    files = ENGINES["duo"].files
    assert files is not None
    written = files(PLAN, SHAPE)
    scores = np.loadtxt(written["full_attention_heads.tsv"].decode().splitlines(), ndmin=2)
    # Layer 1 does not attend.
    assert scores.tolist() == [[0, 1], [0, 0], [1, 0]]
    config = json.loads(written["config.json"])
    assert (config["sink_size"], config["recent_size"]) == (4, 16)
    keeps = scores >= np.quantile(scores, config["sparsity"])
    assert keeps.tolist() == (scores == 1).tolist()


def test_divergences_of_many_tokens_are_exact_to_float32():
    rng = np.random.default_rng(0)
    # Logits about 20, as models have them, of as many tokens as Gemma knows.
    before = 20 + 3 * rng.normal(size=(3, 2**18))
    after = before + [[0.0], [0.01], [0.1]] * rng.normal(size=before.shape)
    logprobs = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (before, after)]
    expected = (np.exp(logprobs[0]) * (logprobs[0] - logprobs[1])).sum(-1)
    whole, other = (torch.from_numpy(x).float() for x in (before, after))
    divergences = Predictions.of(whole).divergences(other)
    np.testing.assert_allclose(divergences, expected, atol=5e-6)


# With a model


def test_sequences_ask_for_words_and_for_numbers():
    trial = CacheTrial("bundled:llama-mini", [], n_ctx=256, sequences=4)
    pieces = trial.pieces["chooses"]
    # A tokenizer of bytes, with BOS first.
    answers = [
        bytes(row[where].tolist()).decode().strip()
        for row, where in zip(pieces.tokens, pieces.is_answer, strict=True)
    ]
    assert all(answer in VALUES for answer in answers[0::2])
    assert all(len(answer) == 5 and answer.isdigit() for answer in answers[1::2])
    texts = [bytes(row[1:].tolist()).decode() for row in trial.pieces["chooses"].tokens]
    assert all(text.count(answer) == 2 for text, answer in zip(texts, answers, strict=True))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


WORDS = ("--n-ctx", 256, "--sequences", 4, "--window", 24)


def planned(model: object, folder: Path, *words: object) -> tuple[str, dict[str, Any]]:
    """What the command says, and plan.json."""
    said = printed("cache-plan", model, "-o", folder, *WORDS, *words)
    return said, json.loads((folder / "plan.json").read_text())


@pytest.mark.long
def test_a_layer_that_must_not_be_quantised_is_left(home: Path):
    def enlarge_keys(tensors: dict[str, Tensor]) -> None:
        """Keys beyond the largest float of 8 bits; the model computes what it did."""
        tensors["model.layers.1.self_attn.k_proj.weight"] *= 512
        tensors["model.layers.1.self_attn.q_proj.weight"] /= 512

    model = copy_of(
        find_model("bundled:llama-mini"),
        home / "large-keys",
        partial(change_weights, change=enlarge_keys),
    )
    said, plan = planned(model, home / "vllm", "--engine", "vllm", "--loss", 0.02)
    assert "vllm: --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 1\n" in said
    assert sorted(plan["heads"]) == [f"{layer}-{h}" for layer in (0, 2, 3) for h in range(4)]
    assert plan["plan"]["share"] == pytest.approx(5 / 8)
    assert abs(plan["plan"]["delta_nll"]) < 0.02
    # Another goal is answered by what is known already.
    _, looser = planned(model, home / "vllm", "--engine", "vllm", "--loss", 20)
    assert looser["plan"]["share"] == 0.5
    assert looser["plan"]["delta_nll"] > 0.05
    assert looser["answers"].items() >= plan["answers"].items()


@pytest.mark.long
def test_a_model_whose_heads_are_all_alike_leaves_no_choice(home: Path):
    def silence(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("o_proj.weight"):
                tensor.zero_()

    model = copy_of(
        find_model("bundled:llama-mini"), home / "silent", partial(change_weights, change=silence)
    )
    said, plan = planned(model, home / "alike", "--engine", "duo", "--loss", 0.05)
    assert "cannot choose: heads and layers cost the same within their errors (p 1 " in said
    assert not plan["can_choose"]
    assert set(plan["heads"].values()) == {"window"}
    assert len(plan["heads"]) == 16
    assert plan["plan"]["share"] == pytest.approx(28 / 256)


def losses_of_text(model: Any, pieces: Pieces) -> np.ndarray:
    """The mean loss of the text of each sequence in transformers: `[sequence]`."""
    tokens = torch.from_numpy(pieces.tokens)
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    chosen = pieces.is_text[:, 1:]
    return np.array(
        [row[of_row].mean() for row, of_row in zip(losses.numpy(), chosen, strict=True)]
    )


@pytest.mark.long
def test_transformers_loads_the_fields_of_its_config_and_loses_what_they_say(home: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    path = home / "qwen3"
    sizes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 257}
    save_model(path, family("Qwen3Config", **sizes, max_position_embeddings=512))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(find_model("bundled:llama-mini"), name), path / name)
    words = ("--engine", "transformers", "--bytes", 0.75, "--n-ctx", 248)
    _, plan = planned(path, home / "layers", *words)
    fields = json.loads((home / "layers" / "config.json").read_text())
    windows = [f"{layer}-0" in plan["heads"] for layer in range(3)]
    assert [kind == "sliding_attention" for kind in fields["layer_types"]] == windows
    assert any(windows)
    pieces = CacheTrial(str(path), [], n_ctx=248, sequences=4).pieces["reports"]
    untouched, changed = (
        losses_of_text(
            AutoModelForCausalLM.from_pretrained(
                path, config=AutoConfig.from_pretrained(path, **more), attn_implementation="eager"
            ).double(),
            pieces,
        )
        for more in ({}, fields)
    )
    assert (changed - untouched).mean() == pytest.approx(plan["plan"]["delta_nll"], abs=1e-6)
    assert abs(plan["plan"]["delta_nll"]) > 1e-5


@pytest.mark.long
def test_a_plan_of_windows_is_what_its_files_say(home: Path):
    said, plan = planned("bundled:llama-mini", home / "duo", "--engine", "duo", "--bytes", 0.5)
    assert plan["plan"]["share"] <= 0.5
    windows = {tuple(map(int, name.split("-"))) for name in plan["heads"]}
    scores = np.loadtxt(home / "duo" / "full_attention_heads.tsv")
    assert windows == {*map(tuple, np.argwhere(scores == 0).tolist())}
    # One head of this model does all that needs distant keys, and it is left.
    assert (1, 0) not in windows
    assert abs(plan["plan"]["delta_nll"]) < 1e-4
    points = plan["pareto"]
    assert [row["share"] for row in points] == sorted(
        (row["share"] for row in points), reverse=True
    )
    assert "duo plan of llama-mini" in said


@pytest.mark.long
def test_a_model_without_a_tokenizer_is_planned_by_random_tokens(home: Path):
    words = ("--engine", "duo", "--bytes", 0.3, "--n-ctx", 128, "--window", 16)
    said, plan = planned("bundled:needle-mini", home / "random", *words)
    # The model was trained to recall, and to go on with repeats, by two of its twelve heads.
    heads = {f"{layer}-{head}" for layer in range(3) for head in range(4)}
    assert {*plan["heads"]} == heads - {"1-2", "1-3"}
    assert (plan["texts"], plan["plan"]["recall"]) == ([], 1)
    assert plan["plan"]["delta_nll"] < 0.02
    assert said.count("random tokens: needles in blocks that are repeated") == 1


@pytest.mark.long
def test_transformers_loses_what_windows_cost():
    """By masks of every head in float64, and by nothing of ours."""
    windows = ((0, 2), (1, 0), (3, 1))
    trial = CacheTrial("bundled:llama-mini", [], n_ctx=N_CTX, sequences=4)
    shape = CacheShape(
        kv_heads=tuple((layer, head) for layer in range(4) for head in range(4)),
        n_kv_heads=4,
        d_head=16,
        n_ctx=N_CTX,
        sink=SINK,
        recent=RECENT,
        end=N_CTX,
        whole=0,
        own_windows={},
    )
    plan = CachePlan.untouched(shape).with_choices(shape, [Choice("", windows, window=True)])
    text = plan.intervention(shape)
    untouched, cut = reading_model(), reading_model()
    cut_to_windows(cut, windows)
    pieces = trial.pieces["reports"]
    rises = losses_of_text(cut, pieces) - losses_of_text(untouched, pieces)
    measured, whole = (trial.measure("reports", name) for name in (text, "none"))
    np.testing.assert_allclose(measured.text - whole.text, rises, atol=1e-5)
    assert abs(rises).max() > 1e-3
    assert np.isnan(measured.text_moved).all()

    # How far predictions have moved, where plans are chosen.
    tokens = torch.from_numpy(trial.pieces["chooses"].tokens)
    with torch.no_grad():
        before, after = (
            each(tokens, use_cache=False).logits.log_softmax(-1) for each in (untouched, cut)
        )
    check_moves(trial, trial.measure("chooses", text), before, after)


@pytest.mark.long
@pytest.mark.parametrize(("words", "message"), [
    ("", "expected --loss NATS or --bytes SHARE; say one"),
    ("--loss 1 --engine duo --n-ctx 64 --window 60", "keeps all of 64 tokens; expected less"),
    ("--loss 1 --engine transformers", "models of type llama take no layer_types"),
    ("--loss 1 --engine mlx", "heads of 16 numbers are not made of blocks of 64"),
    ("--loss 1 --n-ctx 513", "is beyond the 512 positions of llama-mini"),
    ("--loss 1 --n-ctx 64 --window 24", "raise n_ctx"),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(words: str, message: str, home: Path):
    refused = error_of("cache-plan", "bundled:llama-mini", "-o", home / "refused", *words.split())
    assert message in refused
    assert not (home / "refused").exists()


@pytest.mark.long
@pytest.mark.parametrize("engine", ["mlx", "transformers"])
def test_engines_that_read_directories_are_given_no_gguf_file(engine: str, home: Path):
    file = write_gguf(home / f"{engine}.gguf", find_model("bundled:llama-mini"))
    words = ("-o", home / "refused", "--loss", 1, "--engine", engine)
    refused = error_of("cache-plan", file, *words)
    assert "expected a directory with a config.json, as this engine reads it, got a GGUF" in refused


@pytest.mark.long
def test_mlx_lm_is_given_no_model_with_windows(home: Path):
    sizes = {"num_hidden_layers": 2, "head_dim": 64, "vocab_size": 257, "sliding_window": 32}
    types = ["sliding_attention", "full_attention"]
    save_model(home / "gemma", family("Gemma3TextConfig", layer_types=types, **sizes))
    words = ("-o", home / "refused", "--loss", 1, "--engine", "mlx")
    refused = error_of("cache-plan", home / "gemma", *words)
    assert "mlx-lm refuses to quantise the cache of layers with a window" in refused


@pytest.mark.long
def test_a_plan_of_other_questions_is_kept(home: Path):
    folder = home / "other"
    folder.mkdir()
    (folder / "plan.json").write_text('{"model": "another"}')
    refused = error_of("cache-plan", "bundled:llama-mini", "-o", folder, "--loss", 1)
    assert "is a plan of other questions" in refused
    assert (folder / "plan.json").read_text() == '{"model": "another"}'


@pytest.mark.long
def test_what_was_measured_before_an_interrupt_is_not_measured_again(home: Path):
    words = ("bundled:llama-mini", home / "begun", "--engine", "duo", "--bytes", 0.9)
    _, plan = planned(*words)
    answers = dict(list(plan["answers"].items())[:5])
    begun = {name: plan[name] for name in plan if name != "answers"} | {"unfinished": "its search"}
    # As it is left behind: some answers, and the first of one that has more.
    name, rows = next(item for item in plan["answers"].items() if item[0] not in answers)
    invented = [9.0, 9.0, 0.0, 0.5, 0.5]
    kept = answers | {name: [invented, *rows[1:2]]}
    (home / "begun" / "plan.json").write_text(json.dumps(begun | {"answers": kept}))
    _, again = planned(*words)
    assert "unfinished" not in again
    assert again["answers"][name] == [invented, *rows[1:]]
    assert again["answers"].items() >= answers.items()
