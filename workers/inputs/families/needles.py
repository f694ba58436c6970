"""A needle in a haystack: a fact among other tokens, which is asked for at the end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from headcount.schemas.errors import ScanError, counted
from headcount.schemas.scans.values import Count, Share, TokenId
from headcount.workers.inputs.corpus.corpus import Tokenizer
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE, read_texts
from headcount.workers.inputs.input_registry import Draw, Labelled, input_family

FACT = "The lighthouse of {key} was built from {value}."
QUESTION = "What was the lighthouse of {key} built from? The lighthouse of {key} was built from"
KEYS = (
    "Aldermouth", "Brinhaven", "Corviston", "Dunwater", "Eastmarrow", "Fallowby", "Garnholm",
    "Hesterwick", "Ironsey", "Jessamy", "Kelderport", "Lindisfold",
)  # fmt: skip
VALUES = tuple(
    f"{colour} {material}"
    for colour in ("black", "white", "red", "green", "blue", "yellow", "silver", "purple")
    for material in ("granite", "marble", "copper", "glass", "oak", "slate", "clay", "ivory")
)

GOLDEN_RATIO = (np.sqrt(5) - 1) / 2
"""Its multiples, modulo 1, fill 0 to 1 evenly, however many there are."""


def _too_many_questions(options: dict[str, Any]) -> str | None:
    """Why there cannot be more questions than needles; None if there are not."""
    if options["questions"] <= options["needles"]:
        return None
    return (
        f"input.questions: expected at most {options['needles']}, the number of needles, got "
        f"{options['questions']}"
    )


@input_family(refuse=_too_many_questions)
def needle(
    draw: Draw,
    *,
    key: Count = 4,
    value: Count = 4,
    needles: Count = 1,
    questions: Count = 1,
    depth: Share | None = None,
    text: str | None = None,
    low: TokenId = 0,
    high: Count | None = None,
) -> Labelled:
    """A fact in a haystack: `key value` stands in other tokens, and at the end the key comes again,
    then the value (after Wu et al. 2024, retrieval heads).

    The key at the end is the question, the value behind it the answer. Labels: "gold" on the value
    in the haystack, "query" on the question, "answer" on the answer, "other" on values that nobody
    asks for. All tokens of needles are random, differ from one another, and occur nowhere else in
    the haystack. The depth of the gold needle is `list_position(labels, 'gold') / len(labels)`.

    * `key`: tokens of a key.
    * `value`: tokens of a value.
    * `needles`: how many facts stand in the haystack, each with a key of its own, at equal
      distances, in random order behind the first; the end is followed by the beginning.
    * `questions`: how many of them are asked for, one after the other.
    * `depth`: where the needle of the first question stands: 0 is the beginning of the haystack, 1
      its end. Without it the depths of all sequences are spread evenly.
    * `text`: a file, or `bundled:LICENSE`, of which the haystack is a piece, instead of random
      tokens. Of a .jsonl, .parquet or .csv file (also .zst, .gz) it is a piece of one document.
      Every replica reads the whole file, so some megabytes of a corpus will do.
    """
    length = _haystack_length(draw, needles, questions, (needles + questions) * (key + value))
    n_tokens = needles * (key + value)
    # Needles and haystack share no token id.
    if text is None:
        drawn = draw.tokens(n_tokens, low, high, distinct=True)
        haystack = draw.tokens(length, low, high, without=drawn)
    else:
        haystack = text_window(draw, text, length)
        drawn = draw.tokens(n_tokens, low, high, distinct=True, without=haystack)
    facts = [
        Fact(before=tokens[:key], value=tokens[key:], after=tokens[:0], question=tokens[:key])
        for tokens in drawn.reshape(needles, key + value)
    ]
    return _lay_out(draw, haystack, facts, questions, depth)


def _wrong_sentences(options: dict[str, Any]) -> str | None:
    """What is wrong with the sentences of a text needle, or with how many there are."""
    fact, question = options["fact"], options["question"]
    if fact.count("{key}") != 1 or fact.count("{value}") != 1:
        return f"input.fact: expected {{key}} and {{value}} once each, got {fact!r}"
    if "{key}" not in question or "{value}" in question:
        return (
            f"input.question: expected {{key}} and no {{value}}, which follows it, got {question!r}"
        )
    for name, default in (("keys", KEYS), ("values", VALUES)):
        n_different = len(_different(options[name] or default))
        if n_different < options["needles"]:
            return (
                f"input.{name}: expected {options['needles']} or more, as many as needles, got "
                f"{n_different} different ones"
            )
    return _too_many_questions(options)


@input_family(refuse=_wrong_sentences)
def text_needle(
    draw: Draw,
    *,
    text: str = BUNDLED_LICENSE,
    fact: str = FACT,
    question: str = QUESTION,
    keys: list[str] | None = None,
    values: list[str] | None = None,
    needles: Count = 1,
    questions: Count = 1,
    depth: Share | None = None,
) -> Labelled:
    """A sentence in a text, then a question whose answer is in the sentence (after Kamradt 2023 and
    Wu et al. 2024, with a sentence of our own).

    Labels as in `needle`. The sentence may stand in the middle of another one. The answer has the
    same tokens at both places. Facts of one sequence differ in key and value.

    * `text`: the haystack, as in `needle`.
    * `fact`: the sentence, with the places {key} and {value}.
    * `question`: what stands before the answer, with the place {key}.
    * `keys`: what may stand at {key}. By default twelve names of towns that do not exist.
    * `values`: what may stand at {value}, the answer. By default 64 building materials.
    """
    key_words = draw.rng.choice(_different(keys or KEYS), needles, replace=False).tolist()
    value_words = draw.rng.choice(_different(values or VALUES), needles, replace=False).tolist()
    tokenizer = draw.load_tokenizer()
    facts = [
        _fact_of_text(tokenizer, fact.replace("{key}", key), question.replace("{key}", key), value)
        for key, value in zip(key_words, value_words, strict=True)
    ]
    others = sum(len(fact.needle) for fact in facts)
    others += sum(len(fact.question) + len(fact.value) for fact in facts[:questions])
    length = _haystack_length(draw, needles, questions, others)
    return _lay_out(draw, text_window(draw, text, length), facts, questions, depth)


class Fact(NamedTuple):
    """The tokens of a needle and of the question about it."""

    before: np.ndarray
    """What stands before the value."""
    value: np.ndarray
    after: np.ndarray
    """What stands behind the value."""
    question: np.ndarray
    """The question, which the value answers."""

    @property
    def needle(self) -> np.ndarray:
        """What stands in the haystack."""
        return np.concatenate([self.before, self.value, self.after])


def _lay_out(
    draw: Draw, haystack: np.ndarray, facts: list[Fact], questions: int, depth: float | None
) -> Labelled:
    """Facts in a haystack, then the questions about the first facts, each with its answer."""
    # Multiples of the golden ratio spread evenly, however many sequences there are.
    first_depth = (draw.sequence * GOLDEN_RATIO) % 1 if depth is None else depth
    # The others stand at equal distances behind it, in random order; the end is followed by the
    # beginning.
    order = 1 + draw.rng.permutation(len(facts) - 1)
    other_depths = (first_depth + order / len(facts)) % 1
    depths = np.concatenate([[first_depth], other_depths])
    # Behind how many tokens of the haystack each needle stands.
    gaps = np.rint(depths * len(haystack)).astype(int)
    labels: dict[str, list[int]] = {"gold": [], "other": [], "query": [], "answer": []}
    tokens: list[int] = []
    haystack_used = 0
    for number in np.argsort(gaps, kind="stable").tolist():
        fact = facts[number]
        tokens += haystack[haystack_used : gaps[number]].tolist()
        haystack_used = gaps[number]
        # Labels are on the value alone, which stands in the middle of its needle.
        start = len(tokens) + len(fact.before)
        labels["gold" if number < questions else "other"] += range(start, start + len(fact.value))
        tokens += fact.needle.tolist()
    tokens += haystack[haystack_used:].tolist()

    for fact in facts[:questions]:
        start = len(tokens) + len(fact.question)
        labels["query"] += range(len(tokens), start)
        labels["answer"] += range(start, start + len(fact.value))
        tokens += [*fact.question.tolist(), *fact.value.tolist()]
    return Labelled(np.array(tokens), labels)


def _different(words: Sequence[str]) -> list[str]:
    """Words in their order, each once."""
    return list(dict.fromkeys(words))


def _fact_of_text(tokenizer: Tokenizer, sentence: str, question: str, value: str) -> Fact:
    """A fact from a sentence with the place {value}, and the question about it."""
    before, _, after = sentence.partition("{value}")
    # Tokenizers join a space to the word behind it. Each part is read alone, so that the value has
    # the same tokens in the needle and in the answer.
    if before.endswith(" "):
        before, value = before.removesuffix(" "), f" {value}"
        question = question.removesuffix(" ")
    parts = (f" {before}", value, after, f" {question}")
    return Fact(*(np.array(tokenizer.encode(part), int) for part in parts))


def _haystack_length(draw: Draw, needles: int, questions: int, others: int) -> int:
    """The tokens that are left for a haystack beside the `others`."""
    what = f"{counted(needles, 'needle')}, {counted(questions, 'question')} and a haystack need"
    # Each needle has at least one token of haystack to stand in.
    draw.check_room(what, others + needles, ", or take fewer or shorter ones")
    return draw.length - others


def text_window(draw: Draw, text: str, length: int) -> np.ndarray:
    """Some tokens of a text in their order, each place of the text equally likely."""
    documents = text_tokens(text, draw.load_tokenizer())
    windows = [max(0, len(tokens) - length + 1) for tokens in documents]
    if not any(windows):
        longest = max(map(len, documents), default=0)
        raise ScanError(
            f"input.text: expected {length} tokens in a row, the longest text of {text} has "
            f"{longest}; lower n_ctx, or take a longer text"
        )
    document, start = place_of(int(draw.rng.integers(sum(windows))), windows)
    return documents[document][start : start + length]


def place_of(number: int, counts: Sequence[int]) -> tuple[int, int]:
    """Which document holds a place of a text, and its number there; each has so many places.

    >>> place_of(3, [2, 0, 5])
    (2, 1)
    """
    ends = np.cumsum(counts)
    document = int(np.searchsorted(ends, number, side="right"))
    return document, number - int(ends[document]) + counts[document]


@lru_cache(maxsize=4)
def text_tokens(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, ...]:
    """The tokens of each text in a file. A process reads it whole, and once."""
    return tuple(np.array(tokens, int) for tokens in tokenizer.encode_many(read_texts(text)))
