"""Synthetic input families: what is drawn, on what it depends, and which options are refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from headcount.schemas.errors import HeadcountError, ModelError, ScanError
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs import INPUTS, InputFamily, Labelled
from headcount.workers.inputs.corpus.text_files import read_text
from headcount.workers.inputs.families import sentences
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.files.model_info import describe
from tests import ROOT
from tests.toys.toy_corpora import make_index
from tests.toys.toy_models import (
    BOS,
    BYTE_BOS,
    D_VOCAB,
    EOS,
    byte_tokenizer,
    save_byte_model,
    toy_info,
    toy_scan,
)


def sequences_of(
    family: str = "uniform_random",
    n_ctx: int = 9,
    options: dict[str, Any] | None = None,
    **changes: Any,
):
    return Sequences(
        toy_scan(n_ctx=n_ctx, input={"family": family} | (options or {}), **changes), toy_info()
    )


def all_tokens(sequences: Sequences) -> np.ndarray:
    return np.concatenate([sequences.shard(i).tokens for i in range(sequences.shards)])


@pytest.mark.parametrize("family", ["uniform_random", "repeated_random"])
@pytest.mark.parametrize("per_shard", [1, 2, 3, 7, 100])
def test_shards_of_any_size_hold_the_same_sequences(family: str, per_shard: int):
    whole = sequences_of(family, sequences=10)
    parts = sequences_of(family, sequences=10, sequences_per_shard=per_shard)
    assert all_tokens(parts).tolist() == all_tokens(whole).tolist()
    assert parts.shards == -(-10 // per_shard)


def test_a_shard_alone_gives_the_same_sequences_in_any_order():
    inorder = all_tokens(sequences_of(sequences=10, sequences_per_shard=3))
    sequences = sequences_of(sequences=10, sequences_per_shard=3)
    for number in (3, 0, 2, 1):
        shard = sequences.shard(number)
        assert (shard.shard, shard.start) == (number, 3 * number)
        assert shard.tokens.tolist() == inorder[3 * number : 3 * number + 3].tolist()


def test_more_sequences_leave_the_first_ones_alone():
    assert (
        all_tokens(sequences_of(sequences=20))[:5].tolist()
        == all_tokens(sequences_of(sequences=5)).tolist()
    )


def test_another_process_draws_the_same_tokens():
    # It is told what to draw, because it would have to import PyTorch to make it.
    code = (
        "import pickle, sys\n"
        "from headcount.workers.inputs.sequences import Sequences\n"
        "scan, info = pickle.load(sys.stdin.buffer)\n"
        "print(Sequences(scan, info).shard(0).tokens.tolist())\n"
    )
    sequences = sequences_of("repeated_random", options={"period": 3}, seed=5)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        input=pickle.dumps((sequences.scan, sequences.info)),
        capture_output=True,
        check=True,
    )
    assert run.stdout.decode().strip() == str(all_tokens(sequences).tolist())


def test_the_draws_never_change():
    drawn = all_tokens(sequences_of(sequences=2, seed=1))
    assert drawn.tolist() == [
        [0, 10, 26, 34, 41, 34, 19, 43, 24],
        [0, 11, 6, 4, 35, 51, 29, 10, 58],
    ]


def test_seeds_families_and_sequences_draw_differently():
    tokens_by_seed = [all_tokens(sequences_of(seed=seed, n_ctx=33, sequences=2)) for seed in (0, 1)]
    tokens_by_seed.append(
        all_tokens(sequences_of("repeated_random", options={"period": 32}, n_ctx=33, sequences=2))
    )
    rows = {tuple(row) for tokens in tokens_by_seed for row in tokens.tolist()}
    assert len(rows) == 6


@pytest.mark.parametrize(("n_ctx", "period"), [(9, 1), (9, 3), (9, 4), (9, 8), (10, 4)])
def test_repeated_random_repeats_with_its_period(n_ctx: int, period: int):
    tokens = all_tokens(
        sequences_of("repeated_random", n_ctx, {"period": period, "distinct": True})
    )
    text = tokens[:, 1:]
    assert (text[:, period:] == text[:, :-period]).all()
    assert all(len(set(row[:period])) == period for row in text.tolist())


@pytest.mark.parametrize(
    ("n_ctx", "bos", "period"),
    [(9, True, 4), (10, True, 5), (8, False, 4), (2, True, 1), (1, False, 1)],
)
def test_without_a_period_the_block_comes_twice(n_ctx: int, bos: bool, period: int):
    repeated = sequences_of("repeated_random", n_ctx, {"distinct": True}, bos=bos)
    with_period = sequences_of(
        "repeated_random", n_ctx, {"distinct": True, "period": period}, bos=bos
    )
    assert repeated.options["period"] is None
    assert all_tokens(repeated).tolist() == all_tokens(with_period).tolist()


@pytest.mark.parametrize("bos", [True, False])
def test_every_sequence_has_n_ctx_tokens_and_bos_first_where_wanted(bos: bool):
    tokens = all_tokens(sequences_of(n_ctx=50, sequences=30, bos=bos))
    assert tokens.shape == (30, 50)
    assert tokens.dtype == np.int32
    assert (tokens[:, 0] == BOS).all() == bos
    assert not np.isin(tokens[:, int(bos) :], [BOS, EOS]).any()


def test_every_ordinary_token_is_drawn_and_no_special_one():
    tokens = all_tokens(sequences_of(n_ctx=64, sequences=60, bos=False))
    assert sorted(set(tokens.ravel().tolist())) == [
        token for token in range(D_VOCAB) if token not in (BOS, EOS)
    ]


def test_special_tokens_in_the_middle_of_the_vocabulary_are_left_out_too():
    info = toy_info(bos_token_id=30, eos_token_id=31)
    tokens = all_tokens(Sequences(toy_scan(n_ctx=64, sequences=60, bos=False), info))
    assert sorted(set(tokens.ravel().tolist())) == [
        token for token in range(D_VOCAB) if token not in (30, 31)
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"low": 50}, range(50, 61)),
        ({"high": 7}, range(2, 7)),
        ({"low": 20, "high": 23}, range(20, 23)),
        ({"low": 0, "high": 3}, range(2, 3)),
        ({"high": 61, "low": 58}, range(58, 61)),
    ],
)
@pytest.mark.parametrize("family", ["uniform_random", "repeated_random"])
def test_low_and_high_bound_the_tokens(family: str, options: dict[str, int], expected: range):
    tokens = all_tokens(sequences_of(family, 33, options, sequences=20))[:, 1:]
    assert sorted(set(tokens.ravel().tolist())) == list(expected)


def test_distinct_tokens_occur_once():
    tokens = all_tokens(sequences_of(n_ctx=60, options={"distinct": True}, sequences=3))
    # 59 ordinary tokens in 59 places: every sequence is a permutation.
    assert [sorted(row) for row in tokens[:, 1:].tolist()] == [list(range(2, 61))] * 3


def test_one_token_over_and_over():
    tokens = all_tokens(sequences_of("single_token_repeat", sequences=30))[:, 1:]
    assert (tokens == tokens[:, :1]).all()
    assert len(set(tokens[:, 0].tolist())) > 10
    chosen_token = all_tokens(sequences_of("single_token_repeat", options={"token": 7}, bos=False))
    assert (chosen_token == 7).all()


def test_a_corrupted_repeat_replaces_tokens_of_the_copies_at_the_given_rate():
    whole = all_tokens(sequences_of("repeated_random", 61, {"period": 20}, sequences=50))
    options = {"period": 20, "rate": 0.25, "replacement": 60}
    sequences = sequences_of("corrupted_repeat", 61, options, sequences=50)
    tokens, labels = sequences.shard(0).tokens, sequences.shard(0).labels
    replaced = np.array(labels) == "replaced"
    assert (tokens[~replaced] == whole[~replaced]).all()
    assert (tokens[replaced] == 60).all()
    assert not replaced[:, :21].any()
    assert replaced[:, 21:].mean() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(("rate", "same"), [(0, True), (0.0, True), (1.0, False)])
def test_a_rate_of_nothing_leaves_the_repeat_alone(rate: float, same: bool):
    whole = all_tokens(sequences_of("repeated_random", 41))
    sequences = sequences_of("corrupted_repeat", 41, {"rate": rate})
    assert (all_tokens(sequences).tolist() == whole.tolist()) == same
    assert [row.count("replaced") for row in sequences.shard(0).labels or []] == [
        0 if same else 20
    ] * 4


def test_zipf_draws_ids_by_their_rank():
    tokens = all_tokens(
        sequences_of("unigram_random", 64, {"low": 10, "high": 14}, bos=False, sequences=400)
    )
    shares = np.bincount(tokens.ravel(), minlength=14)[10:] / tokens.size
    assert shares == pytest.approx(np.array([12, 6, 4, 3]) / 25, abs=0.012)
    uniform_tokens = all_tokens(
        sequences_of("unigram_random", 64, {"exponent": 0.0, "high": 4}, bos=False, sequences=100)
    )
    assert np.bincount(uniform_tokens.ravel()) / uniform_tokens.size == pytest.approx(
        [0, 0, 0.5, 0.5], abs=0.02
    )


TEMPLATE = "{1} and {2}: {3}>"
"""A sentence of 11 bytes, whose names are one letter each."""


def ioi_of(tmp_path: Path, n_ctx: int = 12, **options: Any) -> Sequences:
    """Sentences of bytes."""
    info = toy_info(
        path=str(byte_tokenizer(tmp_path)), d_vocab=257, bos_token_id=256, eos_token_id=256
    )
    options = {"family": "ioi", "template": TEMPLATE, "names": list("PQRSTUV")} | options
    return Sequences(toy_scan(n_ctx=n_ctx, sequences=40, input=options), info, partners=True)


def test_sentences_name_the_subject_twice_and_its_partner_nobody(tmp_path: Path):
    shard = ioi_of(tmp_path).shard(0)
    other_shard = ioi_of(tmp_path, family="ioi_other_names").shard(0)
    assert shard.partner is not None
    assert shard.labels is not None
    assert other_shard.partner is not None
    assert shard.partner.tolist() == other_shard.tokens.tolist()
    assert other_shard.partner.tolist() == shard.tokens.tolist()
    orders: set[str] = set()
    for tokens, labels, others in zip(
        shard.tokens.tolist(), shard.labels, shard.partner.tolist(), strict=True
    ):
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


@pytest.mark.parametrize(
    ("n_ctx", "options", "message"),
    [
        (
            13,
            {},
            "n_ctx: the sentence has 11 tokens besides the beginning-of-sequence token, the "
            "sequence has room for 12; change n_ctx by -1",
        ),
        (
            12,
            {"names": ["Pat", "Quinn", "Ray", "Sam", "Tim", "Una"]},
            "input.names: expected 5 or more names that the model's tokenizer takes for one token "
            "each in '{1} and {2}: {3}>', got too few in Pat, Quinn, Ray, Sam, Tim, Una",
        ),
        (
            12,
            {"names": ["P", "Q", "R", "S"]},
            "input.names: expected 5 or more names that the model's tokenizer takes for one token "
            "each in '{1} and {2}: {3}>', got too few in P, Q, R, S",
        ),
    ],
)
def test_sentences_that_do_not_fit_are_refused(
    tmp_path: Path, n_ctx: int, options: dict[str, Any], message: str
):
    with pytest.raises(ScanError) as caught:
        ioi_of(tmp_path, n_ctx, **options).shard(0)
    assert str(caught.value) == message


GPT2_TOKENIZER = ROOT.parent / "shared" / "data" / "gpt2-tokenizer"


@pytest.mark.skipif(not GPT2_TOKENIZER.is_dir(), reason=f"{GPT2_TOKENIZER} is not there")
def test_gpt2_takes_every_default_name_for_one_token_and_the_licence_for_text():
    info = toy_info(path=str(GPT2_TOKENIZER), d_vocab=50257, bos_token_id=50256, eos_token_id=50256)
    scan = toy_scan(n_ctx=15, input={"family": "ioi", "order": "ABBA"}, sequences=1)
    sequences = Sequences(scan, info)
    labels = ["", "", "IO", "", "S1", *[""] * 5, "S2", "", "", "", ""]
    assert sequences.shard(0).labels == [labels]
    fitting = sentences._fitting(sentences.TEMPLATE, sentences.NAMES, sequences.tokenizer)  # pyright: ignore[reportPrivateUsage]
    assert fitting.names == sentences.NAMES
    # What the documentation of the family `text` says.
    assert white_space(sequences, (ROOT / "LICENSE").read_text()) == (1104, 3169)
    assert white_space(sequences, read_text("bundled:LICENSE")) == (0, 2066)


def white_space(sequences: Sequences, text: str) -> tuple[int, int]:
    """How many tokens of a text are white space, and how many there are."""
    tokenizer = Tokenizer.from_file(str(GPT2_TOKENIZER / "tokenizer.json"))
    tokens = sequences.tokenizer.encode(text)
    return sum(not tokenizer.decode([token]).strip() for token in tokens), len(tokens)


def labels_of(family: str, returned: object, n_ctx: int = 5) -> list[list[str]] | None:
    """The labels of a scan whose family returns that."""
    sequences = sequences_of(n_ctx=n_ctx, sequences=1)
    sequences.family = InputFamily(family, lambda draw, **_: returned, "", True, family)
    return sequences.shard(0).labels


def test_labels_count_bos():
    labelled = Labelled(np.array([9, 8, 9, 7]), {"A": (0, 2), "B": 3, "C": [], "D": np.array([1])})
    assert labels_of("toy", labelled) == [["", "A", "D", "A", "B"]]
    assert labels_of("toy", np.array([9, 8, 9, 7])) is None
    assert labels_of("toy", Labelled(np.array([9, 8, 9, 7]), {})) == [[""] * 5]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"A": 0, "B": [1, 0]}, "position 0 has two labels, 'A' and 'B'; expected one"),
        ({"A": [1, 1]}, "position 1 has two labels, 'A' and 'A'; expected one"),
        ({"A": 4}, "label 'A' at position 4, expected 0 to 3"),
        ({"A": [0, -1]}, "label 'A' at position -1, expected 0 to 3"),
        ({"A": "0"}, "label 'A' needs whole positions, got '0'"),
        ({"A": [1.0]}, "label 'A' needs whole positions, got 1.0"),
        ({"A": True}, "label 'A' needs whole positions, got True"),
        ({"A": [[0, 1]]}, "label 'A' needs whole positions, got [0, 1]"),
        ({"": 1}, "a label is a string with something in it, got ''"),
        ({3: 1}, "a label is a string with something in it, got 3"),
    ],
)
def test_wrong_labels_are_one_line(labels: dict[Any, Any], message: str):
    with pytest.raises(ScanError) as caught:
        labels_of("toy", Labelled(np.array([9, 8, 9, 7]), labels))
    assert str(caught.value) == f"input family toy: {message}"


def test_a_family_that_returns_too_little_is_named():
    with pytest.raises(
        ScanError, match=r"input family toy: returned shape \(2,\), expected \(4,\)"
    ):
        labels_of("toy", Labelled(np.array([9, 8]), {"A": 0}))


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("uniform_random", {"low": "3"}, "input.low: expected an integer, got '3'"),
        ("uniform_random", {"high": 2.5}, "input.high: expected an integer, got 2.5"),
        ("uniform_random", {"low": True}, "input.low: expected an integer, got true"),
        (
            "uniform_random",
            {"distinct": 1},
            "input.distinct: expected true or false, got 1",
        ),
        (
            "uniform_random",
            {"hihg": 4},
            "input.hihg: unknown option of uniform_random 'hihg': did you mean 'high'? Known: "
            "distinct, high, low",
        ),
        (
            "uniform_random",
            {"period": 4},
            "input.period: unknown option of uniform_random 'period': Known: distinct, high, low",
        ),
        (
            "repeated_random",
            {"period": "4"},
            "input.period: expected an integer, got '4'",
        ),
        ("text", {}, "input.files: missing; the family text needs it"),
        (
            "text",
            {"files": 3},
            "input.files: expected a string or an array, got 3",
        ),
        ("text", {"files": ["a", 3]}, "input.files.1: expected a string, got 3"),
        (
            "pile",
            {"files": "a", "packing": "x"},
            "input.packing: expected 'document' or 'concat', got 'x'",
        ),
        (
            "ioi",
            {"template": "{2} and {1}: {3}"},
            "input.template: expected the places {1}, {2}, {3} in this order, got {2} and {1}: {3}",
        ),
        (
            "ioi",
            {"order": "ABAB"},
            "input.order: expected 'ABBA', 'BABA' or 'both', got 'ABAB'",
        ),
        ("abac", {}, "input.second: missing; the family abac needs it"),
        ("corrupted_repeat", {"rate": "1"}, "input.rate: expected a number, got '1'"),
        ("backcopy", {}, "input.text: missing; the family backcopy needs it"),
        (
            "backcopy",
            {"text": "a", "variant": "icl"},
            "input.variant: expected 'backcopy', 'markov', 'dormant_markov', 'interpolate' "
            "or 'uniform', got 'icl'",
        ),
        (
            "pile",
            {"files": "a", "split": None},
            "input.split: expected a string, got None",
        ),
        (
            "uniform_randon",
            {},
            "input.family: unknown input family 'uniform_randon': did you mean 'uniform_random'? "
            f"Known: {', '.join(sorted(INPUTS))}",
        ),
    ],
)
def test_a_wrong_option_is_one_line(family: str, options: dict[str, Any], message: str):
    with pytest.raises(ScanError) as caught:
        sequences_of(family, options=options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "repeated_random",
            {"period": 9},
            "input.period: expected 1 to 8, the tokens in a sequence, got 9",
        ),
        (
            "repeated_random",
            {"period": 0},
            "input.period: expected 1 to 8, the tokens in a sequence, got 0",
        ),
        (
            "repeated_random",
            {"period": -1},
            "input.period: expected 1 to 8, the tokens in a sequence, got -1",
        ),
        ("corrupted_repeat", {"rate": 1.5}, "input.rate: expected a probability, 0 to 1, got 1.5"),
        (
            "corrupted_repeat",
            {"rate": 0.5, "replacement": 1},
            "input.replacement: expected an ordinary token id of the model (2 to 60), got 1",
        ),
        (
            "single_token_repeat",
            {"token": 61},
            "input.token: expected an ordinary token id of the model (2 to 60), got 61",
        ),
        (
            "unigram_random",
            {"low": 61},
            "input.low: expected 0 to 60, the token ids of toy, got 61",
        ),
        (
            "unigram_random",
            {"high": 2},
            "input: no token to draw from low = 0 on and below high = 2; widen low and high",
        ),
        (
            "uniform_random",
            {"high": 2},
            "input: ordinary token ids from low = 0 on and below high = 2: expected 1 or more, got "
            "0; widen low and high",
        ),
        (
            "uniform_random",
            {"high": 9, "distinct": True},
            "input: ordinary token ids from low = 0 on and below high = 9: expected 8 or more, got "
            "7; widen low and high",
        ),
        (
            "repeated_random",
            {"high": 5, "distinct": True},
            "input: ordinary token ids from low = 0 on and below high = 5: expected 4 or more, got "
            "3; widen low and high",
        ),
    ],
)
def test_an_impossible_option_is_refused_by_the_first_draw(
    family: str, options: dict[str, Any], message: str
):
    with pytest.raises(HeadcountError) as caught:
        sequences_of(family, options=options).shard(0)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_ctx": 65}, "n_ctx: 65 is beyond the 64 positions of toy"),
        (
            {"n_ctx": 1},
            "n_ctx: 1 leaves no room for a token beside the beginning-of-sequence token",
        ),
        (
            {"sequences": "all"},
            "sequences: expected a number, got 'all'; the family uniform_random has no end",
        ),
    ],
)
def test_a_scan_that_does_not_fit_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ScanError) as caught:
        Sequences(toy_scan(**changes), toy_info())
    assert str(caught.value) == message


def test_a_model_without_a_bos_token_cannot_begin_sequences_with_one():
    info = toy_info(bos_token_id=None)
    with pytest.raises(ModelError) as caught:
        Sequences(toy_scan(), info)
    assert str(caught.value) == "toy names no beginning-of-sequence token; set bos = false"
    assert Sequences(toy_scan(bos=False), info).shard(0).tokens.shape == (4, 8)


def test_the_longest_context_of_the_model_is_allowed():
    scan: Scan = toy_scan(n_ctx=64, sequences=1)
    assert Sequences(scan, toy_info()).shard(0).tokens.shape == (1, 64)


@pytest.mark.parametrize("bos", [True, False])
def test_a_chunk_may_be_repeated_with_its_bos(tmp_path: Path, bos: bool) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    info = describe(save_byte_model(tmp_path / "model"))
    options = {"family": "repeated_text", "files": str(tmp_path / "a.txt"), "chunk": 3}
    tokens: list[list[int]] = []
    for repeat_bos in (True, False) if bos else (False,):
        scan = toy_scan(n_ctx=9, bos=bos, sequences=1, input=options | {"repeat_bos": repeat_bos})
        sequences = Sequences(scan, info)
        make_index(sequences)
        tokens.append(sequences.shard(0).tokens[0].tolist())
    a, b, c = b"abc"
    if bos:
        first = BYTE_BOS
        assert tokens == [[first, a, b, c, first, a, b, c, first], [first, a, b, c, a, b, c, a, b]]
    else:
        assert tokens == [[a, b, c] * 3]
