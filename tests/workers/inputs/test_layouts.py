"""Labelled layouts: which token stands where, what the labels say, and that both reach the
sequences table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from headcount.workers.inputs.sequences import Sequences, ShardInput
from tests.toys.runs_here import begun, measured
from tests.toys.toy_models import BOS, toy_info, toy_scan
from tests.toys.toy_runs import data_file

Options = dict[str, Any]

LAYOUTS: list[tuple[str, dict[str, Any], str]] = [
    ("abac", {"second": 4}, ". . A B A C . . . . . . A"),
    ("abac", {"second": 7}, ". . A B . . . A C . . . A"),
    ("abac", {"second": 10}, ". . A B . . . . . . A C A"),
    ("induction_pos0", {}, ". A B . . . . . . A"),
    ("induction_pos0", {}, ". A B A"),
    ("ngram_overlap", {"n": 2}, ". A B C D A"),
    ("ngram_overlap", {}, ". A X1 B C X1 D A X1"),
    ("ngram_overlap", {"n": 4}, ". A X1 X2 B C X1 X2 D A X1 X2"),
    ("ngram_corrupt", {}, ". A X1 B C X1 D C X1"),
    ("ngram_corrupt", {"n": 4}, ". A X1 X2 B C X1 X2 D C X1 X2"),
    ("ngram_reversed", {}, ". C X1 D A X1 B A X1"),
    ("ngram_order", {}, ". A . X1 B C X1 X2 D A . X1 B C X1 X2 D . A X1"),
    ("ngram_order", {"random_context": True}, ". A . X1 B C X1 X2 D A . X1 B C X1 X2 D . . X1"),
]
"""Family, options and the labels with BOS; a dot has none."""


def shard_of(family: str, n_ctx: int, options: Options | None = None, **changes: Any) -> ShardInput:
    scan = toy_scan(n_ctx=n_ctx, input={"family": family} | (options or {}), **changes)
    return Sequences(scan, toy_info()).shard(0)


def positions(labels: list[str], label: str) -> list[int]:
    return [i for i, label_here in enumerate(labels) if label_here == label]


@pytest.mark.parametrize(("family", "options", "expected"), LAYOUTS)
def test_a_layout_is_as_its_source_says(family: str, options: Options, expected: str):
    for bos in (True, False):
        symbols = expected.split()[1 - bos :]
        labels = [symbol.replace(".", "") for symbol in symbols]
        shard = shard_of(family, len(symbols), options, bos=bos, sequences=20)
        assert shard.labels == [labels] * 20
        for row in shard.tokens.tolist():
            by_label = {
                label: {row[i] for i in positions(labels, label)} for label in labels if label
            }
            assert {len(tokens) for tokens in by_label.values()} == {1}
            assert len(set[int]().union(*by_label.values())) == len(by_label)
            # Unlabelled tokens are fresh.
            fresh = len(by_label) + symbols.count(".")
            assert family == "ngram_order" or len(set(row)) == fresh
            assert (row[0] == BOS) == bos
        assert len({tuple(row) for row in shard.tokens.tolist()}) == 20
    # A sequence does not depend on its shard.
    parts = shard_of(family, len(symbols), options, bos=False, sequences=20, sequences_per_shard=3)
    assert parts.tokens.tolist() == shard.tokens[:3].tolist()


def test_the_order_test_has_the_reference_positions():
    tokens_in_order = shard_of("ngram_order", 20, sequences=20).tokens
    # A X2 X1 B C X1 X2 D, twice, then X2 A X1, with BOS at 0.
    assert (tokens_in_order[:, [2, 7, 10, 15]] == tokens_in_order[:, [17]]).all()
    assert (tokens_in_order[:, [1, 9]] == tokens_in_order[:, [18]]).all()
    assert (tokens_in_order[:, 1:9] == tokens_in_order[:, 9:17]).all()
    random = shard_of("ngram_order", 20, {"random_context": True}, sequences=20).tokens
    assert (random[:, :17] == tokens_in_order[:, :17]).all()
    assert (random[:, 19] == tokens_in_order[:, 19]).all()
    assert all(not set(row[17:19]) & set(row[:17] + row[19:]) for row in random.tolist())


def test_the_reversed_layout_exchanges_the_first_two_sub_sequences():
    clean, reverse = (
        shard_of(family, 12, {"n": 4}, sequences=20).tokens
        for family in ("ngram_overlap", "ngram_reversed")
    )
    assert (reverse[:, [0, 5, 6, 7, 8, 1, 2, 3, 4, 9, 10, 11]] == clean).all()


def test_with_replacement_tokens_may_meet():
    shard = shard_of("abac", 13, {"second": 6, "low": 2, "high": 5, "distinct": False})
    assert set(shard.tokens[:, 1:].ravel().tolist()) <= {2, 3, 4}
    assert (shard.tokens[:, [2, 6]] == shard.tokens[:, [12]]).all()


def test_labels_stand_beside_the_tokens_in_the_sequences_table(tmp_path: Path):
    labels = ["", "", "A", "B", "", "", "", "", "A", "C", "", "", "A"]
    abac, unlabelled = {"family": "abac", "second": 8}, {"family": "uniform_random"}
    for number, (family, bos) in enumerate([(abac, 1), (abac, 0), (unlabelled, 1)]):
        fields: dict[str, Any] = {"model": "bundled:attn-only-2l-mini", "statistics": ["sink_mass"]}
        fields |= {"n_ctx": 12 + bos, "bos": bool(bos), "sequences": 3, "sequences_per_shard": 2}
        fields |= {"input": family, "out": str(tmp_path / str(number))}
        run = measured(begun(fields)).run
        files = [data_file(run, "sequences", "none", shard) for shard in range(2)]
        rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
        assert [row["sequence"] for row in rows] == [0, 1, 2]
        assert list(rows[0]).index("labels") == list(rows[0]).index("tokens") + 1
        for row in rows:
            assert row["labels"] == (labels[1 - bos :] if family is abac else None)
