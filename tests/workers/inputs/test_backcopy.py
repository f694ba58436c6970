"""Bigram-Backcopy against its oracle: what follows a token, and what follows a trigger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.reproduce.replication import replications
from headcount.schemas.errors import HeadcountError
from headcount.workers.inputs.families.bigram_backcopy import BUNDLED_TEXT, bigrams_of
from headcount.workers.inputs.sequences import Sequences, ShardInput
from tests import ROOT
from tests.toys.refusals import refused
from tests.toys.toy_models import BYTE_BOS, byte_tokenizer, toy_info, toy_scan

SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
TINY = "abacabad b"
"""a 4, b 3, and ' ', c, d once; after a: b twice, c, d once; after b: a twice; 'd' is followed by '
', ' ' by b.
"""
LOSS = "loss after another token, nats"

shakespeare = pytest.mark.skipif(not SHAKESPEARE.is_file(), reason=f"needs {SHAKESPEARE}")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "tiny.txt"
    file.write_text(TINY)
    return str(file)


def sequences_of(
    text: str,
    n_ctx: int = 33,
    family: str = "backcopy",
    info: dict[str, Any] | None = None,
    **options: Any,
):
    """Sequences of a model of 67 tokens whose BOS is 65, as in the source."""
    fields = {"d_vocab": 67, "n_ctx": 4096, "bos_token_id": 65, "eos_token_id": 66} | (info or {})
    sequences, seed = options.pop("sequences", 50), options.pop("seed", 0)
    sizes = {"n_ctx": n_ctx, "sequences": sequences, "sequences_per_shard": 1000, "seed": seed}
    scan = toy_scan(**sizes, input={"family": family, "text": text} | options)
    return Sequences(scan, toy_info(**fields))


def shard_of(text: str, n_ctx: int = 33, **options: Any) -> ShardInput:
    return sequences_of(text, n_ctx, **options).shard(0)


def followers(tokens: np.ndarray, after: np.ndarray, size: int) -> np.ndarray:
    """Shares `[token next]` of what follows, where `after` chooses the tokens that count."""
    counts = np.zeros((size, size))
    np.add.at(counts, (tokens[:, :-1][after[:, :-1]], tokens[:, 1:][after[:, :-1]]), 1)
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def test_the_table_counts_the_text(tiny: str):
    table = bigrams_of(tiny, 1)
    assert table.symbols == (" ", "a", "b", "c", "d")
    assert table.unigram.tolist() == [0.1, 0.4, 0.3, 0.1, 0.1]
    assert table.rows.tolist() == [
        [0, 0, 1, 0, 0],
        [0, 0, 0.5, 0.25, 0.25],
        [0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0],
    ]
    assert table.triggers == {1}
    assert table.start.tolist() == pytest.approx([1 / 6, 0, 1 / 2, 1 / 6, 1 / 6])
    assert bigrams_of(tiny, 2).triggers == {1, 2}


def test_a_character_that_nothing_follows_is_followed_by_any(tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_text("aab")
    assert bigrams_of(str(file), 1).rows.tolist() == [[0.5, 0.5], pytest.approx([2 / 3, 1 / 3])]


def test_a_trigger_is_followed_by_the_token_before_it(tiny: str):
    shard = shard_of(tiny, triggers=2)
    tokens, labels = shard.tokens, np.array(shard.labels)
    triggered = labels == "trigger"
    assert (triggered == np.isin(tokens, [1, 2])).all()
    assert not triggered[:, :2].any()
    assert set(labels.ravel()) == {"", "trigger"}
    rows, positions = np.nonzero(triggered[:, :-1])
    assert len(rows) > 500
    assert (tokens[rows, positions + 1] == tokens[rows, positions - 1]).all()


def test_the_first_draws_never_change():
    assert shard_of(BUNDLED_TEXT, 13, sequences=2).tokens.tolist() == [
        [65, 18, 44, 42, 58, 14, 50, 41, 12, 61, 49, 42, 14],
        [65, 54, 57, 41, 27, 9, 6, 26, 8, 53, 1, 53, 1],
    ]


def test_the_first_token_is_a_unigram_and_no_trigger(tiny: str):
    first = shard_of(tiny, triggers=1, sequences=1000).tokens[:, 1]
    expected = [1 / 6, 0, 1 / 2, 1 / 6, 1 / 6]
    assert np.bincount(first) / len(first) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("variant", ["backcopy", "markov", "dormant_markov", "interpolate"])
@shakespeare
def test_every_variant_follows_its_oracle(variant: str):
    mix = {"mix": 0.3} if variant == "interpolate" else {}
    shard = shard_of(str(SHAKESPEARE), 257, variant=variant, sequences=400, **mix)
    tokens = shard.tokens[:, 1:]
    triggered = np.array(shard.labels)[:, 1:] == "trigger"
    table = bigrams_of(str(SHAKESPEARE), 3)
    assert (triggered == np.isin(tokens, [1, 43, 58])).all()
    common = [i for i in np.argsort(-table.unigram)[:12].tolist() if i not in table.triggers]
    frequencies = followers(tokens, ~triggered, 65)
    assert frequencies[common] == pytest.approx(table.rows[common], abs=0.03)
    assert not frequencies[table.rows == 0].any()
    before, current, following = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    after_trigger = triggered[:, 1:-1]
    copied = (before == following)[after_trigger].mean()
    chance = table.rows[current, before][after_trigger].mean()
    expected = {"backcopy": 1, "markov": chance, "interpolate": 0.3 + 0.7 * chance}
    if variant == "dormant_markov":
        assert following[after_trigger & (before == 46)].size > 300
        assert (table.rows[before[after_trigger], following[after_trigger]] > 0).all()
    else:
        assert copied == pytest.approx(expected[variant], abs=0 if variant == "backcopy" else 0.01)


@pytest.mark.parametrize("name", ["active_dormant", "backcopy_dynamics"])
@shakespeare
def test_a_perfect_model_would_pass_the_published_loss(name: str):
    replication = replications()[name]
    own_fields = {key: replication.defaults[key] for key in ("n_ctx", "sequences", "seed")}
    tokens = shard_of(str(SHAKESPEARE), **own_fields).tokens[:, 1:]
    table = bigrams_of(str(SHAKESPEARE), 3)
    # After BOS, and after every token that is no trigger.
    current, following = tokens[:, :-1], tokens[:, 1:]
    after_others = table.rows[current, following][~table.is_trigger(current)]
    perfect = -np.log(np.append(table.start[tokens[:, 0]], after_others)).mean()
    assert perfect == pytest.approx(2.20429, abs=1e-5)
    published = [
        (published_loss, check.tolerance)
        for check in replication.check
        for figure, published_loss in check.published.items()
        if figure.endswith(LOSS)
    ]
    assert len(published) == (2 if name == "backcopy_dynamics" else 1)
    assert all(abs(value - perfect) < tolerance for value, tolerance in published)


def test_uniform_draws_all_that_follow_alike_and_no_trigger_after_a_trigger(tmp_path: Path):
    file = tmp_path / "text.txt"
    # The triggers a and b follow each other; c is followed by a, b twice, and d.
    file.write_text("abababacacbcdcb")
    tokens = shard_of(str(file), 65, triggers=2, variant="uniform", sequences=400).tokens[:, 1:]
    frequencies = followers(tokens, np.ones(tokens.shape, bool), 4)
    expected = [[0, 0, 1, 0], [0, 0, 1, 0], [1 / 3, 1 / 3, 0, 1 / 3], [0, 0, 1, 0]]
    assert frequencies == pytest.approx(np.array(expected), abs=0.03)
    assert set(tokens[:, 0]) == {2, 3}


@shakespeare
def test_the_shakespeare_table_is_the_source_s():
    table = bigrams_of(str(SHAKESPEARE), 3)
    assert (len(table.symbols), table.triggers) == (65, {1, 43, 58})
    assert table.unigram[[1, 43, 58]] == pytest.approx([0.1523, 0.0848, 0.0601], abs=5e-5)
    shard = shard_of(str(SHAKESPEARE), 257, sequences=300)
    tokens, triggered = shard.tokens[:, 1:], np.array(shard.labels)[:, 1:] == "trigger"
    entropy = -(table.rows * np.log(np.where(table.rows > 0, table.rows, 1))).sum(1)
    # The source's oracle has a cross-entropy of 2.2299 where no trigger asks for a copy.
    assert entropy[tokens[~triggered]].mean() == pytest.approx(2.2299, abs=0.02)


@pytest.mark.parametrize("bos", [True, False])
def test_the_token_test_ends_with_every_token(tiny: str, bos: bool):
    sequences = sequences_of(tiny, 5, "backcopy_test", triggers=2, sequences=7)
    sequences.scan = sequences.scan.model_copy(update={"bos": bos, "n_ctx": 4 + bos})
    shard = sequences.shard(0)
    assert shard.tokens[:, bos:].tolist() == [[0, 3, 4, i] for i in (0, 1, 2, 3, 4, 0, 1)]
    marks = ["", "trigger", "trigger", "", "", "", "trigger"]
    assert shard.labels == [[*[""] * (3 + bos), mark] for mark in marks]


BYTES = {"d_vocab": 257, "bos_token_id": BYTE_BOS, "eos_token_id": BYTE_BOS}


def test_characters_are_the_tokens_of_the_tokenizer(tiny: str, tmp_path: Path):
    by_rank = shard_of(tiny)
    by_tokenizer = shard_of(
        tiny, alphabet="tokenizer", info=BYTES | {"path": str(byte_tokenizer(tmp_path))}
    )
    letters = np.array([ord(character) for character in " abcd"])
    assert (by_tokenizer.tokens[:, 1:] == letters[by_rank.tokens[:, 1:]]).all()
    assert by_tokenizer.labels == by_rank.labels


def test_the_bundled_table_is_the_card_s():
    table = bigrams_of(BUNDLED_TEXT, 3)
    assert (table.first_id, table.triggers, table.rows.shape) == (1, {0, 1, 2}, (64, 64))
    assert table.rows[3:, :3] == pytest.approx(np.full((61, 3), 0.05))
    assert table.rows.sum(1) == pytest.approx(np.ones(64))
    for token, likeliest, probability in ((4, 14, 0.17489), (64, 6, 0.18154)):
        row = table.rows[token - 1]
        assert (row.argmax() + 1, row.max()) == (likeliest, pytest.approx(probability, abs=5e-6))


def test_characters_beyond_the_vocabulary_are_refused(tiny: str):
    message = (
        f"input.text: {tiny} needs the token ids 0 to 4, and {{}} of them are no ordinary tokens "
        "of the model: its vocabulary is too small, or they are special; take the model that the "
        "task was made for, or another alphabet"
    )
    for ids, info in (("0", {}), ("0, 3, 4", {"d_vocab": 3, "eos_token_id": 0})):
        told = refused(HeadcountError, shard_of, tiny, info={"bos_token_id": 0} | info)
        assert told == message.format(ids)
