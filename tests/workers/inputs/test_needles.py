"""Needles and passages: where they stand, and what is labelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headcount
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE
from headcount.workers.inputs.sequences import Sequences
from tests.toys.toy_corpora import byte_info
from tests.toys.toy_models import BOS, EOS, toy_info, toy_scan


def sequences_of(family: str = "needle", n_ctx: int = 40, **options: Any) -> Sequences:
    """Twelve sequences of a family for a model without a tokenizer."""
    scan = toy_scan(n_ctx=n_ctx, input={"family": family} | options, sequences=12)
    return Sequences(scan, toy_info())


def labelled(sequences: Sequences) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of every sequence."""
    shard = sequences.shard(0)
    assert shard.labels is not None
    return [
        (tokens, np.array(labels))
        for tokens, labels in zip(shard.tokens, shard.labels, strict=True)
    ]


def text_sequences(tmp_path: Path, text: str, family: str, n_ctx: int, **options: Any) -> Sequences:
    """Sequences in a text, which may be that of a bundled file. Each byte of it is a token."""
    path = tmp_path / "text.txt"
    path.write_text(text)
    source = text if text == BUNDLED_LICENSE else str(path)
    options = {"family": family, "text": source} | options
    return Sequences(toy_scan(n_ctx=n_ctx, input=options, sequences=12), byte_info(tmp_path))


def runs_of(labels: np.ndarray, label: str) -> list[list[int]]:
    """Positions of a label, those that follow one another together."""
    positions = np.flatnonzero(labels == label)
    breaks = np.flatnonzero(np.diff(positions) > 1) + 1
    return [run.tolist() for run in np.split(positions, breaks) if len(run)]


def test_every_question_has_its_answer_and_the_other_needles_have_none():
    for tokens, labels in labelled(sequences_of(key=2, value=3, needles=3, questions=2)):
        assert tokens[0] == BOS
        assert not np.isin(tokens[1:], [BOS, EOS]).any()
        fact = tokens[-5:]
        # No token of a fact occurs anywhere else.
        assert len(set(fact.tolist())) == 5
        assert np.isin(tokens, fact).sum() == 10
        gold, other = runs_of(labels, "gold"), runs_of(labels, "other")
        assert [len(run) for run in gold + other] == [3, 3, 3]
        facts = {tuple(tokens[run[0] - 2 : run[-1] + 1].tolist()) for run in gold}
        assert labels[-10:].tolist() == (["query"] * 2 + ["answer"] * 3) * 2
        assert facts == {tuple(tokens[-10:-5].tolist()), tuple(tokens[-5:].tolist())}
        distractor = tokens[other[0][0] - 2 : other[0][-1] + 1]
        assert np.isin(tokens, distractor).sum() == 5


def first_golds(count: int = 12, **options: Any) -> list[int]:
    """Where the value of the first needle stands in some sequences."""
    return [runs_of(row, "gold")[0][0] for _, row in labelled(sequences_of(**options))[:count]]


def test_needles_stand_where_their_depths_say():
    # BOS, 27 tokens of haystack, and the needle and its question of 6 tokens each.
    for depth, first_gold in ((0.0, 3), (0.5, 17), (1, 30)):
        assert set(first_golds(key=2, value=4, depth=depth)) == {first_gold}
    # Without a depth they are spread evenly, however many sequences there are. The haystack has 35
    # tokens: no gap is longer than twice the mean.
    for count in (5, 12):
        in_order = np.sort(first_golds(count, key=1, value=1))
        assert np.diff(in_order, prepend=2, append=37).max() <= 2 * 35 / count + 1
    # Other needles stand evenly around the first, at 0, 7, 14 or 15, and 22 of 29 tokens.
    for _, labels in labelled(sequences_of(key=1, value=1, needles=4, depth=0.25)):
        starts = sorted([*runs_of(labels, "gold"), *runs_of(labels, "other")])
        assert [run[0] for run in starts] == [2, 11, 20, 30]
        assert runs_of(labels, "gold")[0][0] == 11


def test_a_haystack_of_text_is_a_piece_of_it_without_the_tokens_of_needles(tmp_path: Path):
    text = "".join(f"{number} is a number. " for number in range(300))
    sequences = text_sequences(tmp_path, text, "needle", 60, key=3, value=4, needles=2)
    starts: set[str] = set()
    for tokens, labels in labelled(sequences):
        gold, other = runs_of(labels, "gold")[0], runs_of(labels, "other")[0]
        is_needle = np.isin(np.arange(60), [0, *range(53, 60)])
        for run in (gold, other):
            is_needle[run[0] - 3 : run[-1] + 1] = True
        haystack = bytes(tokens[~is_needle].tolist()).decode()
        assert haystack in text
        assert not np.isin(tokens[gold], tokens[~is_needle]).any()
        starts.add(haystack)
    assert len(starts) > 6
    assert sequences.record["text"]["name"] == "text.txt"
    assert sequences.reads_text


@pytest.mark.parametrize("family", ["needle", "passages"])
def test_a_piece_of_text_is_of_one_document(tmp_path: Path, family: str):
    documents = ["abc" * 20, "short", "ABC" * 20, "DEF" * 30]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(f'{{"text": "{document}"}}\n' for document in documents) + "bad\n")
    # No letter is a token of a needle.
    options = {"family": family, "text": str(file)} | ({"low": 128} if family == "needle" else {})
    scan = toy_scan(n_ctx=61, input=options, sequences=12)
    sequences = Sequences(scan, byte_info(tmp_path))
    seen: set[str] = set()
    for tokens, labels in labelled(sequences):
        if family == "needle":
            pieces = [tokens[tokens < 128]]
        else:
            pieces = np.split(tokens[labels != "query"][1:], 4)
        read = [bytes(piece.tolist()).decode() for piece in pieces]
        assert all(any(piece in document for document in documents) for piece in read)
        seen |= {piece[0] for piece in read}
    assert {letter.upper() for letter in seen} & set("ABC")
    assert seen & set("DEF")


def test_a_sentence_in_a_text_answers_the_question_behind_it(tmp_path: Path):
    options = {"fact": "{key} has {value}.", "question": "Who has what? {key} has", "needles": 2}
    options |= {"keys": ["Ann", "Bob"], "values": ["a cat", "a dog", "a hen"]}
    text = "".join(f"{number} and " for number in range(100))
    sequences = text_sequences(tmp_path, text, "text_needle", 100, **options)
    questions: set[str] = set()
    for tokens, labels in labelled(sequences):
        gold, other, query, answer = (
            bytes(tokens[labels == label].tolist()).decode()
            for label in ("gold", "other", "query", "answer")
        )
        assert gold == answer != other
        name = query.removeprefix(" Who has what? ").removesuffix(" has")
        read = bytes(tokens[1:].tolist()).decode()
        assert read.endswith(query + answer)
        haystack = read.removesuffix(query + answer)
        assert f" {name} has{gold}." in haystack
        rest = haystack.replace(f" {name} has{gold}.", "")
        other_name = {"Ann": "Bob", "Bob": "Ann"}[name]
        assert rest.replace(f" {other_name} has{other}.", "") in text
        questions.add(query)
    assert len(questions) == 2


def test_the_default_sentences_stand_in_the_licence(tmp_path: Path):
    sequences = text_sequences(tmp_path, BUNDLED_LICENSE, "text_needle", 400, needles=3)
    for tokens, labels in labelled(sequences):
        assert tokens[labels == "gold"].tolist() == tokens[labels == "answer"].tolist()
        read = bytes(tokens[1:].tolist()).decode()
        assert read.count("The lighthouse of ") == 4
        assert len(runs_of(labels, "other")) == 2


PASSAGES = (range(1, 10), range(10, 19), range(19, 28), range(28, 36))
"""Four passages in 39 tokens with a query of 4: the first three have one token more."""


@pytest.mark.parametrize("gold", [None, 2])
def test_the_query_is_a_part_of_the_gold_passage(gold: int | None):
    options = {} if gold is None else {"gold": gold}
    sequences = sequences_of("passages", query=4, **options)
    for number, (tokens, labels) in enumerate(labelled(sequences)):
        gold_passage = PASSAGES[number % 4 if gold is None else gold]
        assert runs_of(labels, "gold") == [list(gold_passage)]
        assert (labels[1:36] == "other").sum() == 35 - len(gold_passage)
        assert labels[36:].tolist() == ["query"] * 4
        passage, query = tokens[list(gold_passage)].tolist(), tokens[36:].tolist()
        assert query in [passage[i : i + 4] for i in range(len(passage) - 3)]


def test_a_shuffled_query_has_tokens_of_the_gold_passage_in_another_order():
    drawn = labelled(sequences_of("passages", query=6, shuffled=True, distinct=True))
    orders: set[tuple[int, ...]] = set()
    for tokens, labels in drawn:
        assert len(set(tokens[labels != "query"].tolist())) == 34
        passage = tokens[labels == "gold"].tolist()
        order = [passage.index(token) for token in tokens[labels == "query"].tolist()]
        assert len(set(order)) == 6
        orders.add(tuple(order))
    assert len(orders) == 12


def test_passages_of_text_do_not_overlap(tmp_path: Path):
    # Every two bytes in a row occur once, so a piece says where it is from.
    text = "".join(f"{chr(33 + i)}{chr(34 + i)}" for i in range(0, 90, 2))
    sequences = text_sequences(tmp_path, text, "passages", 41, passages=4, query=8)
    orders: set[tuple[int, ...]] = set()
    for tokens, _ in labelled(sequences):
        pieces = [bytes(piece.tolist()).decode() for piece in np.split(tokens[1:33], 4)]
        starts = [text.index(piece) for piece in pieces]
        assert np.diff(sorted(starts)).min() >= 8
        orders.add(tuple(starts))
    assert len(orders) == 12


@pytest.mark.long
def test_heads_that_repeat_what_they_saw_find_needles(tmp_path: Path):
    fields = {"n_ctx": 64, "sequences": 16, "out": str(tmp_path)}
    for model in ("attn-only-2l-mini", "gpt2-mini"):
        for family, column in (("repeated_random", "induction"), ("needle", "retrieval")):
            scan = fields | {"input": {"family": family}, "statistics": [f"{column}_score"]}
            scan["model"] = f"bundled:{model}"
            headcount.scan(scan, name=f"{model}-{family}", quiet=True).close()
    with headcount.open(tmp_path) as runs:
        rows = runs.sql(
            "SELECT model, avg(induction_score), avg(retrieval_score) "
            "FROM heads JOIN runs USING (run_id) GROUP BY model, layer, head"
        ).rows()
    models, induction, retrieval = (np.array(column) for column in zip(*rows, strict=True))
    of_models = (("bundled:attn-only-2l-mini", 6, 0.65), ("bundled:gpt2-mini", 5, 0.85))
    for model, induction_heads, least in of_models:
        is_induction_head = (models == model) & (induction > 0.5)
        assert is_induction_head.sum() == induction_heads
        assert retrieval[is_induction_head].min() > least
    # One head is between the two kinds, at 0.17 and 0.29.
    assert retrieval[induction < 0.15].max() < 0.1
    assert np.corrcoef(induction, retrieval)[0, 1] > 0.97
