"""The ablation behind a choice of heads: against an independent model, and on trained ones."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.exports.cache_plan.head_check import HeadCheck, verdict
from headcount.exports.shared.registry import ranked
from headcount.schemas.errors import ScanError
from headcount.workers.cache_trial import CacheTrial
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


def check_of(model: Path | str, recent: int = RECENT, **words: Any) -> HeadCheck:
    return HeadCheck(CacheTrial(str(model), [], **{"n_ctx": 40, **words}), SINK, recent)


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
    check = check_of(path, sequences=3)
    rows = {row["kept_whole"]: row for row in check.table([(1, 0)], random_seeds=(0,))}
    weights, pieces = read_weights(path), check.trial.pieces["reports"]

    every = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    whole_by_row = {"every head": every, "chosen heads": ["L1H0", "L1H1"], "no head": []}
    found: dict[str, tuple[float, float]] = {}
    for kept, whole in whole_by_row.items():
        intervention = f"stream_other_heads({','.join(map(str, (SINK, RECENT, *whole)))})"
        losses, recalls = list[float](), list[float]()
        for row, tokens in enumerate(pieces.tokens.tolist()):
            logits = run_changed(weights, tokens, intervention, tokens).logits
            of_text, answers = (
                np.flatnonzero(each[row]).tolist() for each in (pieces.is_text, pieces.is_answer)
            )
            logs = [np.log(np.exp(logits[place - 1]).sum()) for place in of_text]
            known = [logits[place - 1][tokens[place]] for place in of_text]
            losses.append(float(np.mean(np.subtract(logs, known))))
            recalls.append(float(np.mean([logits[p - 1].argmax() == tokens[p] for p in answers])))
        found[kept] = float(np.mean(losses)), float(np.mean(recalls))
    for kept, (loss, recall) in found.items():
        assert rows[kept]["recall"] == pytest.approx(recall, abs=1e-12)
        assert rows[kept]["delta_nll"] == pytest.approx(loss - found["every head"][0], abs=1e-5)
    assert len({round(loss, 4) for loss, _ in found.values()}) == 3


def test_the_table_counts_heads_and_what_is_kept_of_the_cache(llama: Path):
    table = check_of(llama, sequences=2).table([(1, 0), (0, 1), (1, 0)], random_seeds=range(6))
    columns = {name: [row[name] for row in table] for name in table[0]}
    assert columns["kept_whole"] == [
        "every head", "chosen heads", *["random heads"] * 6, "no head"
    ]  # fmt: skip
    assert columns["seed"] == [None, None, 0, 1, 2, 3, 4, 5, None]
    # A head that is named twice is one head.
    assert columns["kv_heads"] == [4, *[2] * 7, 0]
    half = 100 * (2 * 40 + 2 * 7) / (4 * 40)
    assert columns["cache_percent"] == pytest.approx([100, *[half] * 7, 100 * 7 / 40])
    full, chosen, *random, nothing = columns["of_the_chosen"]
    assert (full, chosen, nothing) == (2, 2, 0)
    assert len(set(random)) > 1


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ((2, 0), "KV head 0 of layer 2: llama has 2 layers of 2 KV heads"),
        ((0, 2), "KV head 2 of layer 0: llama has 2 layers of 2 KV heads"),
    ],
    ids=["layer", "head"],
)
def test_heads_that_are_not_there_are_refused(llama: Path, head: tuple[int, int], message: str):
    with pytest.raises(ScanError, match=message):
        check_of(llama, sequences=2).table([head])


@pytest.mark.parametrize(("name", "fewest", "most", "cache_percent"), [
    # Two of its heads attend to no copy, and are found by what a repeat changes in them.
    pytest.param("gpt2-mini", 4, 9, 45, marks=pytest.mark.long),
    ("needle-mini", 2, 2, 30),
    pytest.param("attn-only-2l-mini", 8, 9, 65, marks=pytest.mark.long),
    pytest.param("llama-mini", 1, 1, 21, marks=pytest.mark.long),
])  # fmt: skip
def test_the_heads_with_the_highest_scores_lose_nothing(
    name: str, fewest: int, most: int, cache_percent: int, tmp_path: Path
):
    # Our licence, read by two of them, needs keys from far away in long pieces alone.
    n_ctx = {"gpt2-mini": 256, "llama-mini": 512}.get(name, 128)
    words = ["duo", str(tmp_path / "runs"), "--model", f"bundled:{name}", "--recent", "16"]
    words += ["-o", str(tmp_path / "duo"), "--set", "sequences=8", "--set", f"n_ctx={n_ctx}"]
    printed("export", *words)
    scores = np.loadtxt(tmp_path / "duo" / "full_attention_heads.tsv", delimiter="\t")
    heads = ranked(scores)
    if name == "gpt2-mini":
        assert {(2, 1), (2, 6)} < {*heads[:7]}
    check = HeadCheck(CacheTrial(f"bundled:{name}", [], n_ctx=n_ctx, sequences=16), 4, 16)
    kept = check.fewest(heads)
    assert fewest <= kept <= most
    table = check.table(heads[:kept], random_seeds=range(4 if name == "needle-mini" else 2))
    full, with_chosen, *random, nothing = table
    assert with_chosen["recall"] >= 0.95 * full["recall"]
    assert with_chosen["cost"] <= 0.02 * nothing["cost"]
    assert with_chosen["cache_percent"] < cache_percent
    for row in [*random, nothing]:
        assert row["cost"] > 0.2 * nothing["cost"], row
    lines = verdict(table)
    assert lines[0].startswith("chosen heads: within 2 % of the full cache (cost ")
    if name == "needle-mini":
        assert full["recall"] > 0.95
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


def test_random_tokens_stand_in_for_the_text_of_a_model_without_a_tokenizer(llama: Path):
    trial = CacheTrial(str(llama), [], n_ctx=40, sequences=8)
    for half in ("chooses", "reports"):
        pieces = trial.pieces[half]
        assert pieces.documents.tolist() == [*dict.fromkeys(pieces.documents.tolist())]
        for tokens, *masks in zip(pieces.tokens.tolist(), *pieces[1:4], strict=True):
            is_text, is_question, is_answer = masks
            # At the end the key of a needle, then its value, which stand somewhere before.
            assert np.flatnonzero(is_question).tolist() == [32, 33, 34, 35]
            assert np.flatnonzero(is_answer).tolist() == [36, 37, 38, 39]
            first = tokens.index(tokens[32])
            assert tokens[first : first + 8] == tokens[32:]
            haystack = tokens[1:first] + tokens[first + 8 : 32]
            # 39 tokens besides the first are 16 of needles, a block of 12 and 11 of its copy.
            assert haystack[:11] == haystack[12:]
            assert not {*haystack} & {*tokens[32:]}
            # Of the copy all but its first token is asked for, and not where a needle stands.
            assert 9 <= is_text.sum() <= 11
            for place in np.flatnonzero(is_text).tolist():
                assert (tokens[place - 1], tokens[place]) in pairwise(tokens[:place])
    with pytest.raises(ScanError, match="a needle in a block that is repeated needs 32 tokens"):
        _ = CacheTrial(str(llama), [], n_ctx=32, sequences=2).pieces


def test_another_tokenizer_reads_the_texts(tmp_path: Path):
    model = toy.save_model(
        tmp_path / "llama", toy.family("LlamaConfig", vocab_size=300, max_position_embeddings=256)
    )
    trial = CacheTrial(str(model), [], n_ctx=40, sequences=2)
    assert (trial.reads_texts, trial.identity["texts"]) == (False, [])
    trial = CacheTrial(str(model), [], n_ctx=256, sequences=2, tokenizer="bundled:llama-mini")
    assert bytes(trial.pieces["reports"].tokens[0, 1:].tolist()).decode().count("lighthouse") == 3


def row_of(**costs: float) -> dict[str, Any]:
    return {"kv_heads": 0, "of_the_chosen": 1, "recall": 1.0, "cost": 0.0, "cost_error": 0} | costs


def test_a_verdict_says_what_is_lost_and_what_cannot_be_told():
    full, none = row_of(kv_heads=8), row_of(recall=0.5, cost=1.0, cost_error=0.1)
    chosen, random = row_of(kv_heads=4, cost=0.02), row_of(recall=0.75, cost=0.5)
    assert verdict([full, chosen, random, none]) == [
        "chosen heads: within 2 % of the full cache (cost 0.0200 of 1.0000 with no head, recall "
        "1.00 of 1.00)",
        "random heads: cost 0.5000, recall 0.75, with 1 of the 4 chosen heads among them",
    ]
    lost = chosen | row_of(cost=0.0201, kv_heads=5)
    expected, many = verdict([full, lost, none])
    assert expected.startswith("chosen heads: not within 2 % of the full cache (cost 0.0201 of ")
    assert many.startswith("more than half of the heads are chosen")
    unable, unsure = row_of(recall=0.25, kv_heads=8), none | {"cost_error": 0.6}
    _, no_recall, nothing = verdict([unable, chosen, unsure])
    assert no_recall == (
        "with its whole cache the model recalls 0.25 of the answers, expected 0.5 or more, so only "
        "the loss of text judges"
    )
    assert nothing.startswith("no head whole costs 1.0000 ± 0.6, which may be nothing")
    _, alike = verdict([full, chosen, none | {"recall": 1.0}])
    assert alike == "every head recalls no more than none does, so recall says nothing here"


def test_a_fall_of_one_loss_makes_up_for_no_rise_of_the_other(llama: Path):
    check = check_of(llama, sequences=2)
    cut = check._plan([(1, 0)]).intervention(check.shape)
    # By sequence: loss of text, of answers, recall.
    rest = [float("nan")] * 2
    check.trial.known = {
        "reports none": [[1.0, 2.0, 0.5, *rest], [1.0, 2.0, 0.75, *rest]],
        f"reports {cut}": [[1.5, 1.0, 0.5, *rest], [1.25, 1.0, 0.75, *rest]],
    }
    assert check._cost("reports", [(1, 0)])[0] == pytest.approx(0.375)
    row = check._reported([(1, 0)])
    assert (row["delta_nll"], row["standard_error"]) == pytest.approx((0.375, 0.125))
    assert (row["recall"], row["recall_error"]) == pytest.approx((0.625, 0.125))
    # Answers count a fifth, and nothing if they are not known with the whole cache.
    check.trial.known[f"reports {cut}"] = [[1.0, 3.0, 0.5, *rest], [1.0, 4.0, 0.75, *rest]]
    assert check._cost("reports", [(1, 0)])[0] == pytest.approx(0.2 * 1.5)
    check.trial.known["reports none"][1][2] = 0.25
    assert check._cost("reports", [(1, 0)])[0] == 0
