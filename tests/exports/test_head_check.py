"""The ablation behind a choice of heads: against an independent model, and on trained ones."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headcount.exports.shared.registry import ranked
from headcount.schemas.errors import ScanError
from headcount.workers.head_check import Answers, HeadTrial, verdict
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.info.description import describe
from tests.reference.reference_changes import run_changed
from tests.reference.weights import read_weights
from tests.toys import toy_models as toy
from tests.toys.commands import error_of, printed

SINK, RECENT = 2, 5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, four query heads on two heads of keys."""
    config = toy.family("LlamaConfig", num_key_value_heads=2)
    return toy.save_model(tmp_path_factory.mktemp("check") / "llama", config)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(("LlamaConfig", {}), id="llama"),
        # A cap changes losses, and not which token is first.
        pytest.param(("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 3.0}), id="cap"),
    ],
)
def test_the_table_says_what_an_independent_model_says(
    config: tuple[str, dict[str, object]], tmp_path: Path
):
    name, options = config
    path = toy.save_model(tmp_path / "model", toy.family(name, **toy.GQA, **options))
    trial = HeadTrial(str(path), SINK, RECENT, sequences=3)
    table = trial.table([(1, 0)], random_seeds=(0,), seed=4).to_pylist()
    weights = read_weights(path)
    scans = (
        toy.toy_scan(n_ctx=toy.N_CTX, sequences=3, seed=4, input={"family": family})
        for family in ("needle", "repeated_random")
    )
    needles, repeats = (Sequences(scan, describe(path)).shard(0) for scan in scans)
    # 39 tokens besides the first are a block of 20 and the first 19 of its copy.
    np.testing.assert_array_equal(repeats.tokens[:, 1:20], repeats.tokens[:, 21:40])

    every = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    whole_by_row = {"every head": every, "chosen heads": ["L1H0", "L1H1"], "no head": []}
    rows = {row["kept_whole"]: row for row in table}
    losses: set[float] = set()
    for kept, whole in whole_by_row.items():
        intervention = f"stream_other_heads({','.join(map(str, (SINK, RECENT, *whole)))})"
        recalled: list[bool] = []
        for tokens, names in zip(needles.tokens.tolist(), needles.labels or [], strict=True):
            logits = run_changed(weights, tokens, intervention, tokens).logits
            answer = [place for place, name in enumerate(names) if name == "answer"]
            recalled += [int(logits[place - 1].argmax()) == tokens[place] for place in answer]
        token_losses: list[float] = []
        for tokens in repeats.tokens.tolist():
            logits = run_changed(weights, tokens, intervention, tokens).logits
            for place in range(22, 40):
                row = logits[place - 1]
                token_losses.append(np.log(np.exp(row).sum()) - row[tokens[place]])
        assert rows[kept]["recall"] == pytest.approx(np.mean(recalled), abs=1e-12)
        assert rows[kept]["loss_after_repeats"] == pytest.approx(np.mean(token_losses), abs=1e-5)
        losses.add(round(rows[kept]["loss_after_repeats"], 4))
    assert len(losses) == 3


def test_the_table_counts_heads_and_what_is_kept_of_the_cache(llama: Path):
    trial = HeadTrial(str(llama), SINK, RECENT, sequences=2)
    table = trial.table([(1, 0), (0, 1), (1, 0)], random_seeds=range(6))
    kept_whole = ["every head", "chosen heads", *["random heads"] * 6, "no head"]
    assert table["kept_whole"].to_pylist() == kept_whole
    assert table["seed"].to_pylist() == [None, None, 0, 1, 2, 3, 4, 5, None]
    # A head that is named twice is one head.
    assert table["kv_heads"].to_pylist() == [4, *[2] * 7, 0]
    half = 100 * (2 * 40 + 2 * 7) / (4 * 40)
    assert table["cache_percent"].to_pylist() == pytest.approx([100, *[half] * 7, 100 * 7 / 40])
    full, chosen, *random, nothing = table["of_the_chosen"].to_pylist()
    assert (full, chosen, nothing) == (2, 2, 0)
    assert len(set(random)) > 1


@pytest.mark.parametrize(("heads", "recent", "message"), [
    ([(2, 0)], 5, "KV head 0 of layer 2: llama has 2 layers of 2 KV heads"),
    ([(0, 2)], 5, "KV head 2 of layer 0: llama has 2 layers of 2 KV heads"),
    ([(0, 0)], 20, "expected recent below 20, half of 40 tokens"),
])  # fmt: skip
def test_a_check_that_would_say_nothing_is_refused(
    llama: Path, heads: list[tuple[int, int]], recent: int, message: str
):
    with pytest.raises(ScanError, match=message):
        HeadTrial(str(llama), SINK, recent, sequences=2).table(heads)


@pytest.mark.parametrize(("name", "fewest", "most", "cache_percent"), [
    # Two of its heads attend to no copy, and are found by what a repeat changes in them.
    pytest.param("gpt2-mini", 4, 7, 52, marks=pytest.mark.long),
    ("needle-mini", 2, 2, 30),
    pytest.param("llama-mini", 1, 1, 21, marks=pytest.mark.long),
])  # fmt: skip
def test_the_heads_with_the_highest_scores_lose_nothing(
    name: str, fewest: int, most: int, cache_percent: int, tmp_path: Path
):
    words = ["duo", str(tmp_path / "runs"), "--model", f"bundled:{name}", "--recent", "16"]
    words += ["-o", str(tmp_path / "duo"), "--set", "sequences=8", "--set", "n_ctx=128"]
    printed("export", *words)
    scores = np.loadtxt(tmp_path / "duo" / "full_attention_heads.tsv", delimiter="\t")
    heads = ranked(scores)
    if name == "gpt2-mini":
        assert {(2, 1), (2, 6)} < {*heads[:7]}
    trial = HeadTrial(f"bundled:{name}", 4, 16, n_ctx=128, sequences=8)
    kept = trial.fewest(heads, seed=1)
    assert fewest <= kept <= most
    table = trial.table(heads[:kept], random_seeds=range(4 if name == "needle-mini" else 2), seed=3)
    full, with_chosen, *random, nothing = table.to_pylist()
    assert full["recall"] > 0.95
    assert with_chosen["recall"] >= 0.98 * full["recall"]
    without, whole = nothing["loss_after_repeats"], full["loss_after_repeats"]
    assert with_chosen["loss_after_repeats"] <= whole + 0.02 * (without - whole)
    assert with_chosen["cache_percent"] < cache_percent
    for row in [*random, nothing]:
        assert row["recall"] < 0.9 * full["recall"], row
        assert row["loss_after_repeats"] > 2 * full["loss_after_repeats"], row
    lines = verdict(table)
    assert lines[0].startswith("chosen heads: within 2 % of the full cache (recall ")
    if name == "needle-mini":
        assert {row["of_the_chosen"] for row in random} == {0, 1}
        assert lines[1].endswith(" of the 2 chosen heads among them")


def test_recall_opens_heads_in_rounds_and_goes_on_where_it_was_stopped(tmp_path: Path):
    words = ["export", "duo", str(tmp_path / "runs"), "--model", "bundled:needle-mini"]
    words += ["--score", "recall", "--recent", "16", "-o", str(tmp_path / "duo")]
    words += ["--set", "input.family=needle", "--set", "sequences=4", "--set", "n_ctx=128"]
    expected = "with 2 of 12 KV heads whole the needles of the run are recalled as with all (1.00)"
    assert f"{expected}; --sparsity 0.8333 chooses them" in printed(*words)
    file = tmp_path / "duo" / "config.json"
    config, scores = (
        json.loads(file.read_text()),
        np.loadtxt(file.parent / "full_attention_heads.tsv"),
    )
    # Of twelve heads of this model two are enough.
    assert ranked(scores)[:2] == [(1, 2), (1, 3)]
    opening = config["headcount"]["opening"]
    assert sorted(opening["ranking"]) == [[layer, head] for layer in range(3) for head in range(4)]
    assert "unfinished" not in config["headcount"]
    assert opening["whole_cache"]["recall"] == 1
    assert [one["recall"] == 1 for one in opening["rounds"]][:3] == [False, False, True]
    # As it is after two rounds, with a loss that nobody measured.
    begun = {name: value for name, value in opening.items() if name != "ranking"}
    begun["rounds"] = [opening["rounds"][0] | {"loss": 9.0}, opening["rounds"][1]]
    config["headcount"] |= {"opening": begun, "unfinished": "what was not measured"}
    file.write_text(json.dumps(config))
    printed(*words)
    assert np.array_equal(np.loadtxt(file.parent / "full_attention_heads.tsv"), scores)
    again = json.loads(file.read_text())["headcount"]
    assert again["opening"]["rounds"] == [*begun["rounds"], *opening["rounds"][2:]]
    assert "unfinished" not in again
    # What a model does not recall with its whole cache ranks no heads.
    begun["whole_cache"] = {"recall": 0.25, "loss": 3.0}
    file.write_text(json.dumps(config))
    assert "the model recalls 0.25 of the needles of run export-duo-" in error_of(*words)


def test_sentences_in_a_text_judge_a_model_that_recalls_no_random_needles():
    every = "xffffff"[: 1 + 2 * 3]  # 8 KV heads in each of 3 layers
    known = {f"needles 1 {every}": 0.125, f"repeats 1 {every}": 0.5}

    def trial(n_ctx: int, recalled: float) -> HeadTrial:
        answers = known | {f"text_needles 1 {every}": recalled}
        return HeadTrial("bundled:gpt2-mini", 4, 16, n_ctx=n_ctx, sequences=2, known=answers)

    able = trial(256, 0.75)
    assert (able.n_kv_heads, len(able.kv_heads)) == (8, 24)
    assert able.tasks == ("text_needles", "repeats")
    (line,) = able.task_lines
    assert line == (
        "needles: with its whole cache the model recalls 0.125 of them, and 0.750 of sentences in "
        "bundled:LICENSE, which judge instead"
    )
    assert trial(256, 0.25).tasks == ("repeats", "text")
    # No sentence has room in so few tokens, so nobody is asked.
    assert trial(48, 0.75).tasks == ("repeats", "text")


def test_another_tokenizer_reads_the_text_that_judges(tmp_path: Path):
    model = toy.save_model(tmp_path / "llama", toy.family("LlamaConfig", vocab_size=300))
    trial = HeadTrial(str(model), SINK, RECENT, sequences=2)
    assert trial.tasks == ()
    trial = HeadTrial(str(model), SINK, RECENT, tokenizer="bundled:llama-mini", sequences=2)
    assert trial.tasks == ("text",)


def test_a_loss_may_rise_by_a_share_of_what_whole_heads_lower_it():
    full, none = Answers(recall=1.0, loss=0.01), Answers(recall=0.5, loss=1.01)
    assert Answers(loss=0.03).loses_nothing(full, none)
    assert not Answers(loss=0.0301).loses_nothing(full, none)
    assert Answers(recall=0.98, loss=0.01).loses_nothing(full, none)
    assert not Answers(recall=0.979, loss=0.01).loses_nothing(full, none)
    # Where no head whole is as good as all of them, none may be worse than these.
    alike = Answers(loss=0.01)
    assert (alike.loses_nothing(full, alike), none.loses_nothing(full, alike)) == (True, False)


def test_a_verdict_says_what_is_lost_and_what_cannot_be_told(llama: Path):
    """A model of random weights knows nothing with any cache."""
    trial = HeadTrial(str(llama), SINK, RECENT, sequences=3)
    table = trial.table([(0, 0), (0, 1), (1, 0)], random_seeds=(0,))
    full, *rest = table.to_pylist()
    worse = {"recall": 0.9, "loss_after_repeats": 9.0}
    known = [full | {"recall": 1.0, "loss_after_repeats": 0.1}, *(row | worse for row in rest)]
    lost, random, many = verdict(pa.Table.from_pylist(known, schema=table.schema))
    expected = "(recall 0.900 of 1.000, loss 9.000 against 0.100)"
    assert lost == f"chosen heads: not within 2 % of the full cache {expected}"
    assert random.startswith("random heads: recall 0.900, loss 9.000, with ")
    assert many.startswith("more than half of the heads are chosen")
    alike = [row | worse for row in [full, *rest]]
    *_, recall, loss = verdict(pa.Table.from_pylist(alike, schema=table.schema))
    assert ("so recall says nothing" in recall, "so the loss says nothing" in loss) == (True, True)
