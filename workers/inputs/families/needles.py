"""A needle in a haystack, a fact that is asked for at the end; and passages, one of which is asked
for.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from headcount.schemas.errors import ScanError, counted
from headcount.schemas.values import Count, Index, Share
from headcount.workers.inputs.corpus.corpus import Tokenizer
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE, read_texts
from headcount.workers.inputs.input_registry import Draw, Labelled, input_family, token_range

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

CODE_FACT = "The door of {key} opens with the code {value}."
CODE_QUESTION = "Which code opens the door of {key}? The door of {key} opens with the code"
FIVE_DIGITS = range(10_000, 100_000)

GOLDEN_RATIO = (np.sqrt(5) - 1) / 2  # its multiples modulo 1 fill 0 to 1 evenly

Passages = Annotated[int, Field(ge=2)]


class Fact(NamedTuple):
    """The tokens of a needle, and of the question that its value answers."""

    before: np.ndarray  # what stands before the value
    value: np.ndarray
    after: np.ndarray
    question: np.ndarray


@input_family(draws=token_range)
def needle(
    draw: Draw,
    *,
    key: Count = 4,
    value: Count = 4,
    needles: Count = 1,
    questions: Count = 1,
    depth: Share | None = None,
    text: str | None = None,
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
      tokens. Of a .jsonl, .parquet or .csv file (also compressed) it is a piece of one document.
      Every replica reads the whole file, so some megabytes of a corpus will do.
    """
    length = _haystack_length(draw, needles, questions, (needles + questions) * (key + value))
    n_tokens = needles * (key + value)
    # Needles and haystack share no token id.
    if text is None:
        drawn = draw.tokens(n_tokens, distinct=True)
        haystack = draw.tokens(length, without=drawn)
    else:
        haystack = _text_window(draw, text, length)
        drawn = draw.tokens(n_tokens, distinct=True, without=haystack)
    facts = [
        Fact(before=tokens[:key], value=tokens[key:], after=tokens[:0], question=tokens[:key])
        for tokens in drawn.reshape(needles, key + value)
    ]
    return _lay_out(draw, haystack, facts, questions, depth)


@input_family
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
    if fact.count("{key}") != 1 or fact.count("{value}") != 1:
        raise ScanError(f"input.fact: expected {{key}} and {{value}} once each, got {fact!r}")
    if "{key}" not in question or "{value}" in question:
        raise ScanError(
            "input.question: expected {key} and no {value}, which follows it, got " + repr(question)
        )
    key_words = _drawn_words(draw, "keys", keys or KEYS, needles)
    value_words = _drawn_words(draw, "values", values or VALUES, needles)
    facts = [
        _fact_of_text(
            draw.load_tokenizer(), fact.replace("{key}", key), question.replace("{key}", key), value
        )
        for key, value in zip(key_words, value_words, strict=True)
    ]
    others = sum(len(each.before) + len(each.value) + len(each.after) for each in facts)
    others += sum(len(each.question) + len(each.value) for each in facts[:questions])
    length = _haystack_length(draw, needles, questions, others)
    return _lay_out(draw, _text_window(draw, text, length), facts, questions, depth)


def needle_in(draw: Draw, tokens: np.ndarray) -> Labelled:
    """A sentence in the first of some tokens, and a question, as `text_needle` has them; every
    other sequence is asked for a number of five digits. Heads that find words may miss numbers.
    """
    tokenizer = draw.load_tokenizer()
    sentence, question, values = (
        (FACT, QUESTION, VALUES)
        if draw.sequence % 2 == 0
        else (CODE_FACT, CODE_QUESTION, FIVE_DIGITS)
    )
    key, value = (str(draw.rng.choice(words)) for words in (KEYS, values))
    question = question.replace("{key}", key)
    fact = _fact_of_text(tokenizer, sentence.replace("{key}", key), question, value)
    parts = (fact.before, fact.value, fact.after, fact.question, fact.value)
    length = _haystack_length(draw, 1, 1, sum(map(len, parts)))
    return _lay_out(draw, tokens[:length], [fact], 1, None)


def needle_in_copies(draw: Draw) -> Labelled:
    """A needle of random tokens, as `needle` has it, in a block that is repeated. What no earlier
    copy foretells is labelled "new".
    """
    key = value = 4
    # Half of the block is left where the needle stands in the copy.
    draw.check_room("a needle in a block that is repeated needs", 4 * (key + value))
    drawn = draw.tokens(key + value, distinct=True)
    length = draw.length - 2 * len(drawn)
    block = draw.tokens(-(-length // 2), without=drawn)
    fact = Fact(before=drawn[:key], value=drawn[key:], after=drawn[:0], question=drawn[:key])
    laid = _lay_out(draw, np.resize(block, length), [fact], 1, None)
    # What follows a token as it did before goes on with a copy.
    pairs = laid.tokens[:-1] * (1 + laid.tokens.max()) + laid.tokens[1:]
    _, first = np.unique(pairs, return_index=True)
    new = np.setdiff1d([0, *(1 + first)], np.concatenate([*laid.labels.values()]))
    return Labelled(laid.tokens, {**laid.labels, "new": new})


def _lay_out(
    draw: Draw, haystack: np.ndarray, facts: list[Fact], questions: int, depth: float | None
) -> Labelled:
    """Facts in a haystack, then the questions about the first facts, each with its answer."""
    # Multiples of the golden ratio spread evenly, however many sequences there are.
    first_depth = (draw.sequence * GOLDEN_RATIO) % 1 if depth is None else depth
    # The others stand at equal distances behind it, in random order; the end is followed by the
    # beginning.
    order = 1 + draw.rng.permutation(len(facts) - 1)
    depths = np.append(first_depth, (first_depth + order / len(facts)) % 1)
    # Behind how many tokens of the haystack each needle stands.
    gaps = np.rint(depths * len(haystack)).astype(int)
    parts: list[tuple[str, np.ndarray]] = []  # Tokens, and their label.
    used = 0
    for number in np.argsort(gaps, kind="stable").tolist():
        fact = facts[number]
        label = "gold" if number < questions else "other"
        parts += [("", haystack[used : gaps[number]]), ("", fact.before)]
        parts += [(label, fact.value), ("", fact.after)]
        used = gaps[number]
    parts.append(("", haystack[used:]))
    for fact in facts[:questions]:
        parts += [("query", fact.question), ("answer", fact.value)]
    names = np.repeat([label for label, _ in parts], [len(tokens) for _, tokens in parts])
    labels = {
        label: np.flatnonzero(names == label) for label in ("gold", "other", "query", "answer")
    }
    return Labelled(np.concatenate([tokens for _, tokens in parts]), labels)


def _drawn_words(draw: Draw, option: str, words: Sequence[str], count: int) -> list[str]:
    """Some of the words, each of which counts once."""
    different = [*dict.fromkeys(words)]
    if len(different) < count:
        raise ScanError(
            f"input.{option}: expected {count} or more, as many as needles, got {len(different)} "
            "different ones"
        )
    return draw.rng.choice(different, count, replace=False).tolist()


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
    if questions > needles:
        raise ScanError(
            f"input.questions: expected at most {needles}, the number of needles, got {questions}"
        )
    what = f"{counted(needles, 'needle')}, {counted(questions, 'question')} and a haystack need"
    # Each needle has at least one token of haystack to stand in.
    draw.check_room(what, others + needles, ", or take fewer or shorter ones")
    return draw.length - others


def _text_window(draw: Draw, text: str, length: int) -> np.ndarray:
    """Some tokens of a text in their order, each place of the text equally likely."""
    documents = _text_tokens(text, draw.load_tokenizer())
    windows = [max(0, len(tokens) - length + 1) for tokens in documents]
    if not any(windows):
        longest = max(map(len, documents), default=0)
        raise ScanError(
            f"input.text: expected {length} tokens in a row, the longest text of {text} has "
            f"{longest}; lower n_ctx, or take a longer text"
        )
    document, start = _place_of(int(draw.rng.integers(sum(windows))), windows)
    return documents[document][start : start + length]


def _place_of(number: int, counts: Sequence[int]) -> tuple[int, int]:
    """Which document holds a place of a text, and its number there; each has so many places.

    >>> _place_of(3, [2, 0, 5])
    (2, 1)
    """
    ends = np.cumsum(counts)
    document = int(np.searchsorted(ends, number, side="right"))
    return document, number - int(ends[document]) + counts[document]


@lru_cache(maxsize=4)
def _text_tokens(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, ...]:
    """The tokens of each text in a file. A process reads it whole, and once."""
    return tuple(np.array(tokens, int) for tokens in tokenizer.encode_many(read_texts(text)))


@input_family(draws=token_range)
def passages(
    draw: Draw,
    *,
    passages: Passages = 4,
    query: Count = 8,
    gold: Index | None = None,
    shuffled: bool = False,
    text: str | None = None,
    distinct: bool = False,
) -> Labelled:
    """Several passages, then a query made of tokens of one of them (after Zhang et al. 2025,
    query-focused retrieval heads).

    Labels: "gold" on the passage that the query is from, "other" on the other passages, "query" on
    the query. The lengths of passages differ by one token at most.

    * `passages`: how many there are.
    * `query`: tokens of the query.
    * `gold`: the number of the gold passage, from 0. Default: the number of the sequence modulo
      `passages`.
    * `shuffled`: whether the query is random tokens of the gold passage in random order, instead of
      a part of it.
    * `text`: a file, or `bundled:LICENSE`, of which the passages are pieces that do not overlap,
      instead of random tokens.
    * `distinct`: whether no token of the passages occurs twice. Like `low` and `high`, not allowed
      with a `text`.
    """
    if gold is not None and gold >= passages:
        raise ScanError(
            f"input.gold: expected 0 to {passages - 1}, the numbers of the passages, got {gold}"
        )
    for name, is_given in (("low", draw.low), ("high", draw.high), ("distinct", distinct)):
        if text is not None and is_given:
            raise ScanError(
                f"input.{name}: expected without a text only, got text = {text!r}; leave out one"
            )
    what = f"{counted(passages, 'passage')} that hold a query of {counted(query, 'token')}"
    least = (passages + 1) * query
    draw.check_room(f"{what} and the query need", least, ", or lower passages or query")
    # The first `extra` passages are one token longer.
    length, extra = divmod(draw.length - query, passages)
    lengths = [length + (number < extra) for number in range(passages)]
    ends = np.cumsum(lengths).tolist()
    if text is None:
        blocks = np.split(draw.tokens(ends[-1], distinct=distinct), ends[:-1])
    else:
        blocks = _pieces_of_text(draw, text, lengths)
    gold_number = draw.sequence % passages if gold is None else gold
    gold_passage = blocks[gold_number]
    if shuffled:
        question = draw.rng.choice(gold_passage, query, replace=False)
    else:
        first = int(draw.rng.integers(len(gold_passage) - query + 1))
        question = gold_passage[first : first + query]
    is_gold = np.repeat(np.arange(passages) == gold_number, lengths)
    labels = {"gold": np.flatnonzero(is_gold), "other": np.flatnonzero(~is_gold)}
    labels["query"] = np.arange(ends[-1], draw.length)
    return Labelled(np.concatenate([*blocks, question]), labels)


def _pieces_of_text(draw: Draw, text: str, lengths: list[int]) -> list[np.ndarray]:
    """Pieces of a text that do not overlap, each within one text of the file."""
    longest = max(lengths)
    documents = _text_tokens(text, draw.load_tokenizer())
    # Every text is cut into pieces of one length, of which some are chosen.
    counts = [len(tokens) // longest for tokens in documents]
    if sum(counts) < len(lengths):
        raise ScanError(
            f"input.text: expected {len(lengths)} pieces of {longest} tokens, {text} has "
            f"{sum(counts)}; lower n_ctx, or take a longer text"
        )
    numbers = draw.rng.choice(sum(counts), len(lengths), replace=False).tolist()
    places = [_place_of(number, counts) for number in numbers]
    return [
        documents[document][piece * longest :][:length]
        for (document, piece), length in zip(places, lengths, strict=True)
    ]
