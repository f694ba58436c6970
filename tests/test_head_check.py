"""The ablation behind a choice of heads: against an independent model, and on trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.head_check import check_heads
from schemas.errors import ScanError
from schemas.scan import parse_scan
from tests import toy_models as toy
from tests.reference.reference_edits import run_edited
from tests.reference.weights import read_weights
from workers.inputs.sequences import Sequences
from workers.model.model_info import describe, find_model

N_CTX = toy.N_CTX
SINK, RECENT = 2, 5

Row = dict[str, Any]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, four query heads on two heads of keys."""
    config = toy.family("LlamaConfig", num_key_value_heads=2)
    return toy.save_model(tmp_path_factory.mktemp("check") / "llama", config)


def sequences(path: Path, family: str) -> tuple[np.ndarray, list[list[str]] | None]:
    scan = parse_scan(
        {"model": "m", "n_ctx": N_CTX, "sequences": 3, "seed": 4, "input": {"family": family}}
    )
    shard = Sequences(scan, describe(path)).shard(0)
    return shard.tokens, shard.labels


def test_the_table_says_what_an_independent_model_says(llama: Path) -> None:
    table = check_heads(
        str(llama), [(1, 0)], SINK, RECENT, sequences=3, random_seeds=(0,), seed=4
    ).to_pylist()
    weights = read_weights(llama)
    needles, labels = sequences(llama, "needle")
    assert labels is not None
    # 39 tokens besides the first are a block of 20 and the first 19 of its copy.
    repeats, _ = sequences(llama, "repeated_random")
    np.testing.assert_array_equal(repeats[:, 1:20], repeats[:, 21:40])

    every = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]
    whole_by_row = {"every head": every, "chosen heads": ["L1H0", "L1H1"], "no head": []}
    rows = {row["kept_whole"]: row for row in table}
    losses: set[float] = set()
    for kept, whole in whole_by_row.items():
        edit = f"stream_other_heads({','.join(map(str, (SINK, RECENT, *whole)))})"
        recalled: list[bool] = []
        for tokens, names in zip(needles.tolist(), labels, strict=True):
            logits = run_edited(weights, tokens, edit, tokens).logits
            answer = [place for place, name in enumerate(names) if name == "answer"]
            recalled += [int(logits[place - 1].argmax()) == tokens[place] for place in answer]
        token_losses: list[float] = []
        for tokens in repeats.tolist():
            logits = run_edited(weights, tokens, edit, tokens).logits
            for place in range(22, 40):
                row = logits[place - 1]
                token_losses.append(np.log(np.exp(row).sum()) - row[tokens[place]])
        assert rows[kept]["recall"] == pytest.approx(np.mean(recalled), abs=1e-12)
        assert rows[kept]["loss_after_repeats"] == pytest.approx(np.mean(token_losses), abs=1e-5)
        losses.add(round(rows[kept]["loss_after_repeats"], 4))
    assert len(losses) == 3


def test_the_table_counts_heads_and_what_is_kept_of_the_cache(llama: Path) -> None:
    table = check_heads(
        str(llama), [(1, 0), (0, 1), (1, 0)], SINK, RECENT, sequences=2, random_seeds=range(6)
    )
    kept_whole = ["every head", "chosen heads", *["random heads"] * 6, "no head"]
    assert table["kept_whole"].to_pylist() == kept_whole
    assert table["seed"].to_pylist() == [None, None, 0, 1, 2, 3, 4, 5, None]
    # A head that is named twice is one head.
    assert table["kv_heads"].to_pylist() == [4, *[2] * 7, 0]
    half = 100 * (2 * 40 + 2 * 7) / (4 * 40)
    assert table["cache_percent"].to_pylist() == pytest.approx([100, *[half] * 7, 100 * 7 / 40])
    overlap = table["of_the_chosen"].to_pylist()
    assert overlap[:2] == [2, 2]
    assert overlap[-1] == 0
    assert len(set(overlap[2:8])) > 1


@pytest.mark.parametrize(
    ("heads", "recent", "message"),
    [
        ([(2, 0)], 5, "KV head 0 of layer 2: llama has 2 layers of 2 KV heads"),
        ([(0, 2)], 5, "KV head 2 of layer 0: llama has 2 layers of 2 KV heads"),
        ([(0, 0)], 20, "expected recent below 20, half of 40 tokens"),
    ],
)
def test_a_check_that_would_say_nothing_is_refused(
    llama: Path, heads: list[tuple[int, int]], recent: int, message: str
) -> None:
    with pytest.raises(ScanError, match=message):
        check_heads(str(llama), heads, SINK, recent, sequences=2)


def induction_heads(name: str) -> list[tuple[int, int]]:
    """Heads that attend to what followed an earlier copy, measured on other texts."""
    path = find_model(name)
    info = describe(path)
    scan = {"model": name, "n_ctx": 100, "sequences": 8, "seed": 77}
    scan |= {"input": {"family": "repeated_random"}}
    tokens = Sequences(parse_scan(scan), info).shard(0).tokens
    replica = toy.replica(path, n_ctx=100, statistics=["induction_score"])
    score = replica.measure(tokens).heads["induction_score"].mean(0)
    return [(int(layer), int(head)) for layer, head in np.argwhere(score > 0.5)]


def test_gpt2_mini_recalls_needles_with_its_induction_heads_alone() -> None:
    name = "bundled:gpt2-mini"
    chosen = induction_heads(name)
    assert 3 <= len(chosen) <= 8
    table = check_heads(name, chosen, 4, 16, n_ctx=128, sequences=16).to_pylist()
    full, with_chosen, *random, nothing = table
    assert full["recall"] > 0.95
    assert with_chosen["recall"] >= 0.98 * full["recall"]
    assert with_chosen["cache_percent"] < 40
    for row in [*random, nothing]:
        assert row["recall"] < 0.6 * full["recall"], row
        assert row["loss_after_repeats"] > 10 * full["loss_after_repeats"], row
