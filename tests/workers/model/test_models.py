"""Models of several architectures: both engines agree, and what cannot be right is refused."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headcount.schemas.errors import MeasureError, ModelError
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.scans.scan import Scan
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.fused_engine import FusedEngine
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import describe, find_model
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from headcount.workers.replica import InterventionMeasurements, Replica
from tests import ROOT
from tests.reference.weights import read_weights
from tests.toys import toy_models as toy
from tests.workers.engine.test_reference import reference_of

pytestmark = pytest.mark.usefixtures("one_thread")

GQA = {"num_key_value_heads": 2}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: toy.gpt2(),
    "gpt2-inverse-layer": lambda: toy.gpt2(scale_attn_by_inverse_layer_idx=True),
    "gpt2-reordered": lambda: toy.gpt2(reorder_and_upcast_attn=True),
    "llama-gqa": lambda: toy.family("LlamaConfig", **GQA),
    "llama-wide-heads": lambda: toy.family("LlamaConfig", head_dim=12),
    "mistral": lambda: toy.family("MistralConfig", sliding_window=None, **GQA),
    "mistral-window-20": lambda: toy.family("MistralConfig", sliding_window=20, **GQA),
    "gemma2-capped": lambda: toy.family("Gemma2Config", head_dim=8, sliding_window=64, **GQA),
    "opt": lambda: toy.family("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "gpt-neo": lambda: toy.family(
        "GPTNeoConfig", attention_types=[[["global", "local"], 1]], window_size=20
    ),
    "bloom": lambda: toy.family("BloomConfig", n_layer=2, n_head=4),
}

AGREEING = ["gpt2-reordered", "llama-wide-heads", "mistral", "gemma2-capped", "legacy-safetensors"]
"""Those that `test_reference` does not recompute."""


class Shelf:
    """Models on disk and their replicas, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._replicas: dict[tuple[str, str], toy.TextReplica] = {}

    def path(self, name: str) -> Path:
        path = self.root / name
        if not path.exists():
            if name.startswith("legacy-"):
                toy.save_legacy(path, name.removeprefix("legacy-"))
            elif name == "bytes":
                toy.save_byte_model(path)
            else:
                toy.save_model(path, CONFIGS[name]())
        return path

    def replica(self, name: str, engine: str = "fused") -> toy.TextReplica:
        key = (name, engine)
        if key not in self._replicas:
            self._replicas[key] = toy.replica(self.path(name), engine=engine)
        return self._replicas[key]


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("models"))


def differences(
    first: InterventionMeasurements, second: InterventionMeasurements
) -> dict[str, float]:
    """Largest difference of each statistic, relative where values are large; both must be undefined
    together.
    """
    largest_differences: dict[str, float] = {}
    for name in STATISTICS:
        x, y = first.heads[name], second.heads[name]
        assert (np.isnan(x) == np.isnan(y)).all(), name
        largest_differences[name] = float(
            np.nanmax(np.abs(x - y) / np.maximum(1, np.abs(y)), initial=0)
        )
    return largest_differences


def problem_of(path: Path | str, **changes: Any) -> str:
    """The one line with which a model is refused, somewhere between its description and its first
    measurement.
    """
    with pytest.raises(ModelError) as caught:
        toy.measure(find_model(str(path)), toy.repeating_tokens(4), **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Agreement


@pytest.mark.parametrize("name", AGREEING)
@pytest.mark.parametrize("n_ctx", [1, 17, 40])
def test_both_engines_agree_on_every_statistic(shelf: Shelf, name: str, n_ctx: int):
    tokens = toy.repeating_tokens(n_ctx, batch=1 if n_ctx in (1, 17) else 3)
    fused, dense = (shelf.replica(name, engine).measure(tokens) for engine in ("fused", "dense"))
    assert (fused.method.engine, dense.method.engine) == ("fused", "dense")
    worst = differences(fused, dense)
    assert {
        statistic: difference for statistic, difference in worst.items() if not difference < 1e-5
    } == {}
    layers = 3 if name.startswith("gpt2") else 2
    assert fused.heads["sink_mass"].shape == (len(tokens), layers, 4)


def test_engines_agree_beyond_one_tile_of_queries(tmp_path: Path):
    path = toy.save_model(
        tmp_path / "long", toy.gpt2(n_positions=200, n_layer=2, n_embd=16, n_head=2)
    )
    tokens = toy.repeating_tokens(131, batch=2, distinct=20)
    worst = differences(toy.measure(path, tokens), toy.measure(path, tokens, engine="dense"))
    assert {
        statistic: difference for statistic, difference in worst.items() if not difference < 1e-5
    } == {}


def test_a_legacy_pth_and_its_safetensors_measure_the_same(shelf: Shelf):
    tokens = toy.repeating_tokens(17, batch=2)
    pth, safetensors = (
        shelf.replica(f"legacy-{ending}").measure(tokens) for ending in ("pth", "safetensors")
    )
    for name in STATISTICS:
        np.testing.assert_array_equal(pth.heads[name], safetensors.heads[name])


# The scale of scores


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("gpt2", [8**-0.5] * 3),
        ("gpt2-inverse-layer", [8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3]),
        ("gpt2-reordered", [8**-0.5] * 3),
        ("llama-wide-heads", [12**-0.5] * 2),
        ("opt", [8**-0.5] * 2),
        ("gpt-neo", [1.0] * 2),
        ("gemma2-capped", [256**-0.5] * 2),
        ("bloom", [8**-0.5] * 2),
        ("legacy-pth", [8**-0.5] * 2),
    ],
)
def test_the_scale_of_scores_is_what_the_attention_module_says(
    shelf: Shelf, name: str, factors: list[float]
) -> None:
    model = load_model(describe(shelf.path(name)), "raw", "cpu")
    scales = [model.scale(layer) for layer in range(model.info.n_layers)]
    assert scales == pytest.approx(factors, rel=1e-7)
    # OPT, GPT-Neo and the legacy models do not hand out the scores behind their patterns.
    assert model.shows_scores(0) == (name not in ("opt", "gpt-neo", "legacy-pth"))


def test_a_scale_that_is_not_the_model_s_own_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # TransformerLens scales the scores of this model although its files say not to.
    path = toy.save_model(tmp_path / "unscaled", toy.gpt2(scale_attn_weights=False))
    problem = (
        r"^unscaled: the scores of layer 2 could not be made as 1 · q·k: their softmax differs by "
        r"0\.\d+ from the pattern \(allowed 0.0001\); TransformerLens computes other scores$"
    )
    with pytest.raises(ModelError, match=problem):
        load_model(describe(path), "raw", "cpu").scale(2)
    assert "could not be made as 1 · q·k" in problem_of(path, engine="dense")

    # The fused engine runs the model's own modules, whose attention agrees with the files.
    own = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    tokens = toy.repeating_tokens(17, batch=2)
    with torch.inference_mode():
        patterns = own(torch.from_numpy(tokens).long(), output_attentions=True).attentions
    measured = toy.measure(path, tokens, predictions=["position_cosine_layer"])
    sink_mass = measured.heads["sink_mass"]
    for layer, pattern in enumerate(patterns):
        np.testing.assert_allclose(sink_mass[:, layer], pattern[..., 1:, 0].mean(-1), atol=1e-5)
    # So does a prediction that runs the first layer once more, with positions and without.
    weights = read_weights(path)
    layers = [replace(layer, scale=1.0) for layer in weights.layers]
    reference = reference_of(replace(weights, layers=layers), tokens)
    np.testing.assert_allclose(
        measured.sequences["position_cosine_layer"],
        reference.predictions["position_cosine_layer"],
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpt2", lambda facts: {"scale": facts.scale * 1.01}),
        ("mistral-window-20", lambda facts: {"window": facts.window and facts.window - 1}),
        ("gemma2-capped", lambda facts: {"soft_cap": None}),
        ("bloom", lambda facts: {"slopes": facts.slopes * 1.01}),
    ],
)
def test_facts_that_are_not_the_model_s_own_are_refused(
    shelf: Shelf,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    wrong: Callable[[AttentionFacts], dict[str, Any]],
) -> None:
    from headcount.workers.model import attention_layers, attention_modules

    right = attention_layers.attend_to

    def attend_wrongly(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: AttentionFacts
    ) -> torch.Tensor:
        return right(q, k, v, replace(facts, **wrong(facts)))

    for module in (attention_layers, attention_modules):
        monkeypatch.setattr(module, "attend_to", attend_wrongly)
    problem = load_model(describe(shelf.path(name)), "raw", "cpu").attention_problem
    # A window that no mask has is named at once. Everything else shows in the stream.
    expected = "its attention has a mask" if name == "mistral-window-20" else "the stream after"
    assert problem is not None
    assert problem.startswith(expected)


# Attention that the fused engine does not know


@pytest.mark.parametrize("n_ctx", [20, 21])
def test_a_window_is_measured_by_both_engines(shelf: Shelf, n_ctx: int) -> None:
    tokens = toy.repeating_tokens(n_ctx, batch=2)
    fused, dense = (
        shelf.replica("mistral-window-20", engine).measure(tokens) for engine in ("fused", "dense")
    )
    assert max(differences(fused, dense).values()) < 1e-5


def test_attention_that_is_not_a_window_is_refused(tmp_path: Path) -> None:
    # Llama 4's queries see the keys of their own chunk.
    config = toy.family(
        "Llama4TextConfig",
        head_dim=8,
        num_local_experts=2,
        intermediate_size_mlp=48,
        attention_chunk_size=8,
        **GQA,
    )
    assert problem_of(toy.save_model(tmp_path / "chunks", config)) == (
        "chunks: its attention has a mask that is not a window of the latest keys, which the fused "
        "engine does not know; use engine = 'dense'"
    )


def test_a_model_that_its_library_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    # Every token wants four experts, and there are two.
    config = toy.family("GptOssConfig", head_dim=8, num_local_experts=2, **GQA)
    path = toy.save_model(tmp_path / "broken", config)
    for engine in ("fused", "dense"):
        assert "transformers cannot run it" in problem_of(path, engine=engine)


@pytest.mark.parametrize("name", ["gpt2", "legacy-pth"])
def test_folded_weights_keep_the_patterns_and_change_the_values(shelf: Shelf, name: str):
    tokens = toy.repeating_tokens(17)
    raw, folded = (
        toy.measure(
            shelf.path(name),
            tokens,
            weight_processing=weights,
            predictions=["losses", "final_probabilities"],
        )
        for weights in ("raw", "folded")
    )
    assert folded.method.engine == "dense"
    for output, values in raw.sequences.items():
        np.testing.assert_allclose(folded.sequences[output], values, rtol=1e-4, atol=1e-7)
    # What a folded MLP makes of positions is not known; the legacy model has none.
    for column in [
        name_of_statistic
        for name_of_statistic, statistic in STATISTICS.items()
        if "effective" in statistic.parameters
    ]:
        if name == "gpt2":
            assert np.isnan(folded.heads[column]).all()
            raw.heads[column][:] = np.nan
    worst = differences(raw, folded)
    assert {
        statistic_name: worst[statistic_name]
        for statistic_name in ("sink_mass", "entropy", "induction_score")
        if not worst[statistic_name] < 1e-5
    } == {}
    assert worst["value_norm"] > 1e-3


# Finding, describing and loading


def test_a_model_is_described_without_loading_it(shelf: Shelf):
    info = describe(shelf.path("llama-gqa"))
    assert (info.layout, info.n_layers, info.n_heads, info.d_model, info.d_head) == (
        "huggingface",
        2,
        4,
        32,
        8,
    )
    assert (info.n_ctx, info.d_vocab, info.bos_token_id, info.eos_token_id) == (40, 61, 0, 1)
    legacy = describe(shelf.path("legacy-pth"))
    assert (legacy.layout, legacy.n_layers, legacy.n_heads, legacy.d_model, legacy.d_head) == (
        "legacy",
        2,
        4,
        32,
        8,
    )
    assert (legacy.n_ctx, legacy.d_vocab, legacy.bos_token_id, legacy.eos_token_id) == (
        40,
        61,
        0,
        0,
    )


def test_the_description_knows_the_weights_and_not_their_place(shelf: Shelf, tmp_path: Path):
    description = describe(shelf.path("gpt2")).record
    assert describe(toy.copy_of(shelf.path("gpt2"), tmp_path / "gpt2")).record == description
    toy.change_weights(
        tmp_path / "gpt2", lambda tensors: tensors["transformer.wpe.weight"].view(-1)[5].add_(1e-3)
    )
    changed = describe(tmp_path / "gpt2")
    assert {key for key in description if changed.record[key] != description[key]} == {
        "sha256",
        "files",
    }
    assert changed.files[0] == ("config.json", description["files"]["config.json"])
    assert changed.files[1][1] != description["files"]["model.safetensors"]
    assert "files" not in changed.identity


def test_a_special_token_outside_the_vocabulary_is_none(shelf: Shelf, tmp_path: Path):
    path = toy.copy_of(
        shelf.path("gpt2"),
        tmp_path / "m",
        lambda p: toy.change_config(p, bos_token_id=61, eos_token_id=[7, 8]),
    )
    info = describe(path)
    assert (info.bos_token_id, info.eos_token_id) == (None, 7)


@pytest.mark.parametrize(
    ("fields", "bos"),
    [
        ({"tokenizer_name": "NeelNanda/gpt-neox-tokenizer-digits"}, 1),
        ({"tokenizer_name": "NeelNanda/gpt-neox-tokenizer-digits", "bos_token_id": 5}, 5),
        ({"tokenizer_name": "another"}, None),
        ({}, None),
    ],
)
def test_the_first_token_of_a_legacy_model_is_its_own_or_that_of_its_tokenizer(
    tmp_path: Path, fields: dict[str, Any], bos: int | None
):
    path = toy.save_legacy(tmp_path / "m", "safetensors")
    config = {key: value for key, value in toy.LEGACY_CONFIG.items() if key != "bos_token_id"}
    toy.write_config(path, config | fields)
    assert describe(path).bos_token_id == bos


def test_a_hub_id_without_the_network_fails_at_once_on_one_line():
    problem_of("nobody/imports-all-that-is-needed")
    spec = "nobody/no-such-model"
    start_time = time.perf_counter()
    line = problem_of(spec)
    assert time.perf_counter() - start_time < 5
    assert line.startswith(
        f"model {spec!r}: neither a directory, nor bundled:NAME, nor to be had from the Hub ("
    )


def config_with(**changes: Any) -> Callable[[Path], object]:
    return lambda path: toy.change_config(path, **changes)


class Payload:
    """Pickles into a call: whoever unpickles it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pth_is_refused_and_not_run(shelf: Shelf, tmp_path: Path):
    file_of_payload = tmp_path / "made-by-the-payload"
    path = toy.copy_of(shelf.path("legacy-pth"), tmp_path / "m")
    torch.save(toy.legacy_state() | {"code": Payload(file_of_payload)}, path / "toy_final.pth")
    assert problem_of(path).startswith(
        f"{path}/toy_final.pth: the weights cannot be read (Weights only load failed"
    )
    assert not file_of_payload.exists()


# Tokenizers


def text_scan(**changes: Any) -> Scan:
    any_text = str(ROOT / "LICENSE")
    return toy.toy_scan(
        **{"sequences": "all", "input": {"family": "text", "files": any_text}} | changes
    )


def tokenizer_problem(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        Sequences(text_scan(bos=False), describe(path)).tokenizer.encode("text")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_tokenizer_gives_the_same_tokens_one_by_one_and_together(shelf: Shelf):
    tokenizer = TextTokenizer(shelf.path("bytes"), 257)
    texts = ["To be", "", "ä€😀", "<|endoftext|>", "a" * 5000]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == [list(text.encode()) for text in texts]


def test_truncation_and_padding_of_the_tokenizer_file_are_off(shelf: Shelf, tmp_path: Path):
    from tokenizers import Tokenizer

    path = toy.copy_of(shelf.path("bytes"), tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(path / "tokenizer.json"))
    assert TextTokenizer(path, 257).encode_many(["abcdef", "a"]) == [list(b"abcdef"), list(b"a")]


def test_text_needs_a_tokenizer(shelf: Shelf):
    path = shelf.path("gpt2")
    expected = "no tokenizer files; text needs one (tokenizer.json, or vocab.json and merges.txt)"
    assert tokenizer_problem(path) == f"{path}: {expected}"


def test_a_tokenizer_that_is_none_is_named(shelf: Shelf, tmp_path: Path):
    path = toy.copy_of(
        shelf.path("bytes"), tmp_path / "m", lambda p: (p / "tokenizer.json").write_text("{}")
    )
    assert tokenizer_problem(path).startswith(f"{path}/tokenizer.json: not a tokenizer (")


def test_a_tokenizer_of_one_token_is_refused(shelf: Shelf, tmp_path: Path):
    from tokenizers import Tokenizer, models

    path = toy.copy_of(shelf.path("bytes"), tmp_path / "m")
    Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")).save(str(path / "tokenizer.json"))
    assert tokenizer_problem(path).startswith(
        f"{path}: its tokenizer has 1 tokens and the model 257; "
    )


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(shelf: Shelf, tmp_path: Path):
    path = toy.copy_of(shelf.path("gpt2"), tmp_path / "m", toy.byte_tokenizer)
    assert tokenizer_problem(path).startswith(
        f"{path}: its tokenizer has 257 tokens and the model 61; "
    )


def test_a_slow_tokenizer_s_files_are_read(shelf: Shelf, tmp_path: Path):
    path = toy.copy_of(shelf.path("bytes"), tmp_path / "m")
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert TextTokenizer(path, 257).encode("abba") == [2, 1, 0]


# Numbers that are none


def spoil(path: Path) -> None:
    toy.change_weights(
        path, lambda tensors: tensors["transformer.h.1.attn.c_attn.weight"][3].fill_(float("nan"))
    )


@pytest.mark.parametrize(
    "engine",
    [
        "fused",
        "dense",
    ],
)
def test_nan_in_a_weight_names_layer_and_statistic(shelf: Shelf, tmp_path: Path, engine: str):
    path = toy.copy_of(shelf.path("gpt2"), tmp_path / "m", spoil)
    with pytest.raises(MeasureError) as caught:
        toy.measure(path, toy.repeating_tokens(4, batch=2), engine=engine)
    assert str(caught.value) == (
        "layer 1, head 0: sink_mass is not finite for sequence 0 of the shard; expected a finite "
        "number: look at the model's weights and precision: transformer.h.1.attn.c_attn.weight "
        "holds numbers that are NaN or infinite"
    )


@pytest.mark.parametrize(
    ("n_ctx", "output", "place"),
    [
        (4, "loss", ""),
        (4, "losses", ", position 1"),
        (4, "final_logits", ", position 0"),
        (1, "final_logits", ", position 0"),
    ],
)
def test_nan_after_the_last_layer_names_the_output(
    shelf: Shelf, tmp_path: Path, n_ctx: int, output: str, place: str
) -> None:
    def spoil_last_norm(path: Path) -> None:
        toy.change_weights(
            path, lambda tensors: tensors["transformer.ln_f.weight"][3].fill_(float("nan"))
        )

    path = toy.copy_of(shelf.path("gpt2"), tmp_path / "m", spoil_last_norm)
    with pytest.raises(MeasureError) as caught:
        toy.measure(path, toy.repeating_tokens(n_ctx, batch=2), predictions=[output])
    assert str(caught.value) == (
        f"{output} is not finite for sequence 0 of the shard{place}; "
        "expected a finite number: look at the model's weights and precision: "
        "transformer.ln_f.weight holds numbers that are NaN or infinite"
    )


def test_an_output_without_a_value_is_null_and_no_error(shelf: Shelf) -> None:
    measurements = toy.measure(
        shelf.path("gpt2"), toy.repeating_tokens(1, batch=2), predictions=list(PREDICTIONS)
    ).sequences
    undefined = {"loss", "loss_early", "loss_late", "losses"}
    assert {name for name in PREDICTIONS if np.isnan(measurements[name]).any()} == undefined


def test_a_second_replica_leaves_the_first_alone(shelf: Shelf):
    tokens = toy.repeating_tokens(17)
    first = shelf.replica("gpt2").measure(tokens).heads
    toy.measure(shelf.path("llama-gqa"), tokens)
    assert isinstance(shelf.replica("gpt2").engine, FusedEngine)
    for statistic, values in shelf.replica("gpt2").measure(tokens).heads.items():
        np.testing.assert_array_equal(values, first[statistic])


def run_once(path: Path, **changes: Any) -> InterventionMeasurements:
    """What a replica measures of a model that no other test has loaded."""
    scan = toy.toy_scan(model=str(path), **changes)
    return Replica(describe(path), scan, "cpu").measure(toy.repeating_tokens(scan.n_ctx))


def test_weights_that_the_configuration_does_not_use_are_refused_unless_a_scan_ignores_them(
    shelf: Shelf, tmp_path: Path
) -> None:
    path = toy.copy_of(shelf.path("gpt2"), tmp_path / "deep", config_with(n_layer=2))
    # A twelfth is c_attn.bias, which the library takes for a mask that it once stored.
    with pytest.raises(ModelError) as caught:
        run_once(path)
    assert str(caught.value) == (
        f"{path}: 11 tensors of the weights have no place in the model of config.json: "
        "transformer.h.2.attn.c_attn.weight, transformer.h.2.attn.c_proj.bias, "
        "transformer.h.2.attn.c_proj.weight, …; correct config.json, or set unused_weights = "
        '"ignore" to measure without them'
    )
    assert run_once(path, unused_weights="ignore").heads["entropy"].shape[1] == 2


MASK = torch.ones(1, 1, 40, 40, dtype=torch.bool)
STORED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "gpt2": (toy.gpt2(), ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias")),
    "gpt_neo": (
        toy.family(
            "GPTNeoConfig", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
        ),
        ("transformer.h.{}.attn.attention.bias", "transformer.h.{}.attn.attention.masked_bias"),
    ),
    "gpt_neox": (
        toy.family("GPTNeoXConfig"),
        ("gpt_neox.layers.{}.attention.bias", "gpt_neox.layers.{}.attention.rotary_emb.inv_freq"),
    ),
    "llama": (toy.family("LlamaConfig"), ("model.layers.{}.self_attn.rotary_emb.inv_freq",)),
}


@pytest.mark.parametrize("name", STORED)
def test_masks_and_angles_that_older_libraries_stored_are_no_unused_weights(
    tmp_path: Path, name: str
) -> None:
    config, stored = STORED[name]
    path = toy.save_model(tmp_path / name, config)

    def add(weights: dict[str, torch.Tensor]) -> None:
        for layer, place in itertools.product(range(2), stored):
            weights[place.format(layer)] = MASK.clone()

    toy.change_weights(path, add)
    assert np.isfinite(run_once(path).heads["entropy"]).all()


def test_legacy_weights_that_the_configuration_does_not_use_are_refused(tmp_path: Path) -> None:
    path = toy.save_legacy(tmp_path / "legacy", ".pth", n_layers=1)
    with pytest.raises(ModelError, match=r"the weights do not fit config.json \("):
        run_once(path)
