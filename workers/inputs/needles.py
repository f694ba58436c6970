"""A needle in a haystack: a fact among other tokens, which is asked for at the end."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from schemas.errors import ScanError, counted
from schemas.values import Count, TokenId
from workers.inputs.corpus import Tokenizer
from workers.inputs.input_registry import Draw, Labelled, input_family
from workers.inputs.text_files import read_texts

Depth = Annotated[float, Field(ge=0, le=1)]

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
    depth: Depth | None = None,
    text: str | None = None,
    low: TokenId = 0,
    high: Count | None = None,
) -> Labelled:
    """A fact in a haystack: `key value` stands in other tokens, and at the end the key comes again,
    then the value (after Wu et al. 2024, retrieval heads).

    The key at the end is the question, the value behind it the answer, so that a model that
    retrieves can say every token of it. Labels: "gold" on the value in the haystack, "query" on the
    question, "answer" on the answer. With more `needles` than `questions`, the values that nobody
    asks for are labelled "other". All tokens of needles are random, differ from one another, and
    occur nowhere else in the haystack.

    The haystack is random tokens, or a piece of a `text`. The gold needle's depth in it can be read
    off its label: `list_position(labels, 'gold') / len(labels)`.

    * `key`: tokens of a key.
    * `value`: tokens of a value.
    * `needles`: how many facts stand in the haystack, each with a key of its own. They stand at
      equal distances, in random order behind the first; the end is followed by the beginning.
    * `questions`: how many of them are asked for, one after the other.
    * `depth`: where the needle of the first question stands: 0 is the beginning of the haystack, 1
      its end. Without it the depths of all sequences are spread evenly.
    * `text`: a file, or `bundled:LICENSE`; a piece of it, as the model's tokenizer reads it, is the
      haystack.
    """
    needle_length = key + value
    haystack_length = draw.length - (needles + questions) * needle_length
    if haystack_length < needles:
        raise _no_room(draw, needles, questions, needle_length)
    facts, haystack = _facts_and_haystack(
        draw, (needles, needle_length), haystack_length, text, low, high
    )
    gaps = _gaps(draw, needles, haystack_length, depth)

    labels: dict[str, list[int]] = {"gold": [], "other": [], "query": [], "answer": []}
    tokens: list[int] = []
    haystack_used = 0
    for fact in np.argsort(gaps, kind="stable").tolist():
        tokens += haystack[haystack_used : gaps[fact]].tolist()
        haystack_used = gaps[fact]
        label = "gold" if fact < questions else "other"
        labels[label] += range(len(tokens) + key, len(tokens) + needle_length)
        tokens += facts[fact].tolist()
    tokens += haystack[haystack_used:].tolist()

    for fact in range(questions):
        labels["query"] += range(len(tokens), len(tokens) + key)
        labels["answer"] += range(len(tokens) + key, len(tokens) + needle_length)
        tokens += facts[fact].tolist()
    return Labelled(np.array(tokens), labels)


def _no_room(draw: Draw, needles: int, questions: int, needle_length: int) -> ScanError:
    """The error of needles that do not fit into a sequence."""
    # Each needle has at least one token of haystack to stand in.
    needed = (needles + questions) * needle_length + needles
    return ScanError(
        f"n_ctx: {counted(needles, 'needle')} and {counted(questions, 'question')} of "
        f"{needle_length} tokens and a haystack need {needed} tokens besides the "
        f"beginning-of-sequence token, got {draw.length}; raise n_ctx, or lower key, value, "
        "needles or questions"
    )


def _facts_and_haystack(
    draw: Draw,
    shape: tuple[int, int],
    haystack_length: int,
    text: str | None,
    low: int,
    high: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of needles, `[needle token]`, and those of the haystack. They share no id."""
    n_facts = shape[0] * shape[1]
    if text is None:
        facts = draw.tokens(n_facts, low, high, distinct=True)
        other_ids = _without(draw.ids(low, high), facts)
        _check_ids(other_ids, 1, f"for a haystack without the {n_facts} of its needles")
        haystack = draw.rng.choice(other_ids, haystack_length)
    else:
        haystack = text_window(draw, text, haystack_length)
        other_ids = _without(draw.ids(low, high), haystack)
        _check_ids(other_ids, n_facts, "for needles, which are not in the haystack")
        facts = draw.rng.choice(other_ids, n_facts, replace=False)
    return facts.reshape(shape), haystack


def _without(ids: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """The ids that are not taken."""
    return ids[~np.isin(ids, taken)]


def _check_ids(ids: np.ndarray, least: int, purpose: str) -> None:
    """Refuse a choice of too few token ids."""
    if len(ids) < least:
        raise ScanError(
            f"input: ordinary token ids {purpose}: expected {least} or more, got {len(ids)}; widen "
            "low and high, or lower key, value or needles"
        )


def _gaps(draw: Draw, needles: int, haystack_length: int, depth: float | None) -> np.ndarray:
    """Behind how many tokens of the haystack each needle stands, the first gold one first."""
    first_depth = (draw.sequence * GOLDEN_RATIO) % 1 if depth is None else depth
    places = 1 + draw.rng.permutation(needles - 1)
    other_depths = (first_depth + places / needles) % 1
    depths = np.concatenate([[first_depth], other_depths])
    return np.rint(depths * haystack_length).astype(int)


def text_window(draw: Draw, text: str, length: int) -> np.ndarray:
    """Some tokens of a text in their order, each place of the text equally likely."""
    documents = text_tokens(text, draw.load_tokenizer())
    windows = np.array([max(0, len(tokens) - length + 1) for tokens in documents])
    if not windows.any():
        longest = max(map(len, documents), default=0)
        raise ScanError(
            f"input.text: expected {length} tokens in a row, the longest text of {text} has "
            f"{longest}; lower n_ctx, or take a longer text"
        )
    ends = np.cumsum(windows)
    number = int(draw.rng.integers(ends[-1]))
    document = int(np.searchsorted(ends, number, side="right"))
    start = number - int(ends[document] - windows[document])
    return documents[document][start : start + length]


@lru_cache(maxsize=4)
def text_tokens(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, ...]:
    """The tokens of each text in a file."""
    return tuple(np.array(tokens, int) for tokens in tokenizer.encode_many(read_texts(text)))
