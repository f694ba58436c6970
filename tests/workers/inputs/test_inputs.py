"""Synthetic input families: what is drawn and on what it depends, which token of a layout stands
where, and that labels reach the sequences table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from headcount.schemas.errors import ModelError, ScanError
from headcount.workers.inputs import Draw, InputFamily, Labelled
from headcount.workers.inputs.corpus.text_files import read_text
from headcount.workers.inputs.families import sentences
from headcount.workers.inputs.sequences import Sequences, ShardInput
from tests import ROOT
from tests.toys.refusals import refused
from tests.toys.runs_here import begun, measured
from tests.toys.toy_corpora import byte_info
from tests.toys.toy_models import BOS, D_VOCAB, EOS, toy_info, toy_scan
from tests.toys.toy_runs import data_file

Options = dict[str, Any]


def sequences_of(
    family: str = "uniform_random", n_ctx: int = 9, options: Options | None = None, **changes: Any
):
    scan = toy_scan(n_ctx=n_ctx, input={"family": family} | (options or {}), **changes)
    return Sequences(scan, toy_info())


def shard_of(*values: Any, **changes: Any) -> ShardInput:
    return sequences_of(*values, **changes).shard(0)


def all_tokens(sequences: Sequences) -> np.ndarray:
    return np.concatenate([sequences.shard(i).tokens for i in range(sequences.shards)])


def drawn(*values: Any, **changes: Any) -> np.ndarray:
    """The tokens of a family."""
    return all_tokens(sequences_of(*values, **changes))


DRAWN: list[tuple[str, Options, list[list[int]]]] = [
    ("uniform_random", {},
     [[0, 10, 26, 34, 41, 34, 19, 43, 24], [0, 11, 6, 4, 35, 51, 29, 10, 58]]),
    ("uniform_random", {"distinct": True, "low": 50},
     [[0, 50, 54, 57, 58, 59, 52, 60, 53], [0, 58, 51, 53, 56, 60, 54, 55, 50]]),
    ("repeated_random", {"period": 3},
     [[0, 52, 44, 32, 52, 44, 32, 52, 44], [0, 13, 44, 16, 13, 44, 16, 13, 44]]),
    ("repeated_random", {"distinct": True},
     [[0, 16, 42, 31, 50, 16, 42, 31, 50], [0, 16, 11, 13, 42, 16, 11, 13, 42]]),
    ("corrupted_repeat", {"period": 3, "rate": 0.5, "replacement": 60},
     [[0, 52, 44, 32, 52, 44, 32, 60, 44], [0, 13, 44, 16, 13, 60, 60, 13, 60]]),
    ("single_token_repeat", {},
     [[0, 10, 10, 10, 10, 10, 10, 10, 10], [0, 37, 37, 37, 37, 37, 37, 37, 37]]),
    ("unigram_random", {"exponent": 2.0},
     [[0, 3, 2, 2, 5, 2, 2, 2, 2], [0, 2, 2, 2, 2, 2, 17, 6, 2]]),
]  # fmt: skip
"""Families, options, and the first two sequences of seed 1."""


@pytest.mark.parametrize(("family", "options", "first"), DRAWN)
def test_the_draws_never_change_whatever_the_shards_and_their_order(
    family: str, options: dict[str, Any], first: list[list[int]]
):
    whole = sequences_of(family, options=options, seed=1, sequences=7).shard(0)
    tokens = whole.tokens.tolist()
    assert tokens[:2] == first
    assert (whole.tokens.dtype, whole.tokens.shape) == (np.int32, (7, 9))
    for per_shard in (1, 3):
        sizes = {"seed": 1, "sequences": 20, "sequences_per_shard": per_shard}
        parts = sequences_of(family, options=options, **sizes)
        assert parts.shards == -(-20 // per_shard)
        for number in (1, 0):
            shard = parts.shard(number)
            stop = per_shard * (number + 1)
            assert (shard.shard, shard.start) == (number, per_shard * number)
            assert shard.tokens.tolist() == tokens[per_shard * number : stop]
    assert drawn(family, options=options, sequences=7).tolist() != tokens
    assert len({tuple(row) for row in tokens}) > 5


@pytest.mark.parametrize(
    ("n_ctx", "bos"), [(9, True), (10, True), (8, False), (2, True), (1, False)]
)
def test_repeated_random_repeats_with_its_period_or_twice(n_ctx: int, bos: bool):
    length = n_ctx - bos
    for period in {1, length // 2, length} - {0}:
        options = {"period": period, "distinct": True}
        text = drawn("repeated_random", n_ctx, options, bos=bos)[:, bos:]
        assert (text[:, period:] == text[:, :-period]).all()
        assert all(len(set(row[:period])) == period for row in text.tolist())
    twice, half = (
        drawn("repeated_random", n_ctx, options, bos=bos).tolist()
        for options in ({}, {"period": -(-length // 2)})
    )
    assert twice == half


ORDINARY = range(2, D_VOCAB)


@pytest.mark.parametrize(("options", "special", "expected"), [
    ({}, (BOS, EOS), ORDINARY), ({}, (30, 31), [*range(30), *range(32, D_VOCAB)]),
    ({"low": 50}, (BOS, EOS), range(50, 61)), ({"high": 7}, (BOS, EOS), range(2, 7)),
    ({"low": 20, "high": 23}, (BOS, EOS), range(20, 23)),
])  # fmt: skip
def test_every_ordinary_token_within_the_bounds_is_drawn_and_no_special_one(
    options: dict[str, int], special: tuple[int, int], expected: range
):
    info = toy_info(bos_token_id=special[0], eos_token_id=special[1])
    for family in ("uniform_random", "repeated_random"):
        scan = toy_scan(n_ctx=64, sequences=40, input={"family": family} | options)
        tokens = all_tokens(Sequences(scan, info))
        assert (tokens[:, 0] == special[0]).all()
        assert sorted(set(tokens[:, 1:].ravel().tolist())) == list(expected)
    assert not (drawn(bos=False)[:, 0] == BOS).any()


def test_a_corrupted_repeat_replaces_tokens_of_the_copies_at_the_given_rate():
    whole = drawn("repeated_random", 61, {"period": 20}, sequences=50)
    options = {"period": 20, "rate": 0.25, "replacement": 60}
    sequences = sequences_of("corrupted_repeat", 61, options, sequences=50)
    tokens, labels = sequences.shard(0).tokens, sequences.shard(0).labels
    replaced = np.array(labels) == "replaced"
    assert (tokens[~replaced] == whole[~replaced]).all()
    assert (tokens[replaced] == 60).all()
    assert not replaced[:, :21].any()
    assert replaced[:, 21:].mean() == pytest.approx(0.25, abs=0.03)
    for rate, replaced_tokens in [(0, 0), (0.0, 0), (1.0, 40)]:
        shard = sequences_of("corrupted_repeat", 61, {"period": 20, "rate": rate}).shard(0)
        assert (shard.tokens.tolist() == whole[:4].tolist()) == (rate == 0)
        counts = [row.count("replaced") for row in shard.labels or []]
        assert counts == [replaced_tokens] * 4


def test_zipf_draws_ids_by_their_rank():
    fields = {"bos": False, "sequences": 400}
    tokens = drawn("unigram_random", 64, {"low": 10, "high": 14}, **fields)
    shares = np.bincount(tokens.ravel(), minlength=14)[10:] / tokens.size
    assert shares == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.012)
    tokens = drawn("unigram_random", 64, {"exponent": 0.0, "high": 4}, **fields)
    shares = np.bincount(tokens.ravel()) / tokens.size
    assert shares == pytest.approx([0, 0, 0.5, 0.5], abs=0.02)


TEMPLATE = "{1} and {2}: {3}>"
"""A sentence of 11 bytes, whose names are one letter each."""


def ioi_of(tmp_path: Path, n_ctx: int = 12, **options: Any) -> Sequences:
    """Sentences of bytes."""
    info = byte_info(tmp_path)
    options = {"family": "ioi", "template": TEMPLATE, "names": list("PQRSTUV")} | options
    return Sequences(toy_scan(n_ctx=n_ctx, sequences=40, input=options), info, partners=True)


def test_sentences_name_the_subject_twice_and_its_partner_nobody(tmp_path: Path):
    shard = ioi_of(tmp_path).shard(0)
    other_shard = ioi_of(tmp_path, family="ioi_other_names").shard(0)
    assert shard.labels is not None
    rows, partners = shard.tokens.tolist(), np.array(shard.partner).tolist()
    assert partners == other_shard.tokens.tolist()
    assert np.array(other_shard.partner).tolist() == rows
    orders: set[str] = set()
    for tokens, labels, others in zip(rows, shard.labels, partners, strict=True):
        io, s1, s2 = (bytes([tokens[labels.index(label)]]).decode() for label in ("IO", "S1", "S2"))
        first, second = (io, s1) if labels.index("IO") < labels.index("S1") else (s1, io)
        assert bytes(tokens[1:]).decode() == f"{first} and {second}: {s2}>"
        assert s1 == s2 != io
        names = {chr(token) for token in others[1:] if chr(token).isupper()}
        assert len(names) == 3
        assert not names & {io, s1}
        orders.add("ABBA" if first == io else "BABA")
    assert orders == {"ABBA", "BABA"}


def test_an_order_of_names_changes_no_name(tmp_path: Path):
    abba, baba = (ioi_of(tmp_path, order=order).shard(0) for order in ("ABBA", "BABA"))
    assert {tuple(labels) for labels in abba.labels or []} == {
        ("", "IO", "", "", "", "", "", "S1", "", "", "S2", "")
    }
    swapped = abba.tokens[:, [0, 7, *range(2, 7), 1, *range(8, 12)]]
    assert swapped.tolist() == baba.tokens.tolist()


GPT2_TOKENIZER = ROOT.parent / "shared" / "data" / "gpt2-tokenizer"


@pytest.mark.skipif(not GPT2_TOKENIZER.is_dir(), reason=f"{GPT2_TOKENIZER} is not there")
def test_gpt2_takes_every_default_name_for_one_token_and_the_licence_for_text():
    info = toy_info(path=str(GPT2_TOKENIZER), d_vocab=50257, bos_token_id=50256, eos_token_id=50256)
    scan = toy_scan(n_ctx=15, input={"family": "ioi", "order": "ABBA"}, sequences=1)
    sequences = Sequences(scan, info)
    labels = ["", "", "IO", "", "S1", *[""] * 5, "S2", "", "", "", ""]
    assert sequences.shard(0).labels == [labels]
    names = [f" {name}" for name in sentences.NAMES]
    assert {len(tokens) for tokens in sequences.tokenizer.encode_many(names)} == {1}
    # What the documentation of the family `text` says.
    assert white_space(sequences, (ROOT / "LICENSE").read_text()) == (1104, 3169)
    assert white_space(sequences, read_text("bundled:LICENSE")) == (0, 2066)


def white_space(sequences: Sequences, text: str) -> tuple[int, int]:
    """How many tokens of a text are white space, and how many there are."""
    tokenizer = Tokenizer.from_file(str(GPT2_TOKENIZER / "tokenizer.json"))
    tokens = sequences.tokenizer.encode(text)
    return sum(not tokenizer.decode([token]).strip() for token in tokens), len(tokens)


def labels_of(returned: object) -> list[list[str]] | None:
    """The labels of a scan whose family returns that."""
    sequences = sequences_of(n_ctx=5, sequences=1)

    def toy(draw: Draw, **options: object) -> object:
        return returned

    sequences.family = InputFamily(function=toy, stream="toy")
    return sequences.shard(0).labels


def test_labels_count_bos():
    labelled = Labelled(np.array([9, 8, 9, 7]), {"A": (0, 2), "B": 3, "C": [], "D": np.array([1])})
    assert labels_of(labelled) == [["", "A", "D", "A", "B"]]
    assert labels_of(np.array([9, 8, 9, 7])) is None
    assert labels_of(Labelled(np.array([9, 8, 9, 7]), {})) == [[""] * 5]


@pytest.mark.parametrize(("tokens", "labels", "message"), [
    (4, {"A": [1, 1]}, "label 'A' at [1, 1]: expected a name, and positions from 0 to 3 w"),
    (4, {"A": 0, "B": [1, 0]}, "label 'B' at [1, 0]: "), (4, {"A": 4}, "label 'A' at 4: "),
    (4, {"A": [0, -1]}, "label 'A' at [0, -1]: "), (4, {"A": "0"}, "label 'A' at '0': "),
    (4, {"A": [1.0]}, "label 'A' at [1.0]: "), (4, {"A": True}, "label 'A' at True: "),
    (4, {"A": [[0, 1]]}, "label 'A' at [[0, 1]]: "), (4, {"": 1}, "label '' at 1: "),
    (4, {3: 1}, "label 3 at 1: "), (2, {"A": 0}, "returned shape (2,), expected (4,)"),
])  # fmt: skip
def test_what_a_family_returns_wrong_is_one_line(tokens: int, labels: dict[Any, Any], message: str):
    told = refused(ScanError, labels_of, Labelled(np.arange(7, 7 + tokens), labels))
    assert told.startswith(f"input family toy: {message}")


def test_a_model_without_a_bos_token_cannot_begin_sequences_with_one():
    info = toy_info(bos_token_id=None)
    told = "toy names no beginning-of-sequence token; set bos = false"
    assert refused(ModelError, Sequences, toy_scan(), info) == told
    assert Sequences(toy_scan(bos=False), info).shard(0).tokens.shape == (4, 8)


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


@pytest.mark.parametrize(("family", "options", "expected"), LAYOUTS)
def test_a_layout_is_as_its_source_says(family: str, options: Options, expected: str):
    for bos in (True, False):
        symbols = expected.split()[1 - bos :]
        labels = [symbol.replace(".", "") for symbol in symbols]
        shard = shard_of(family, len(symbols), options, bos=bos, sequences=20)
        assert shard.labels == [labels] * 20
        for row in shard.tokens.tolist():
            by_label = {
                label: {row[i] for i, name in enumerate(labels) if name == label}
                for label in labels
                if label
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
