"""Texts that figures of the sink circuit were published for, built again from their sources.

We ship no text of others. A recipe says how the authors drew their texts from public data sets.
Fingerprints say whether the result is what they published.
"""

from __future__ import annotations

import csv
import hashlib
import io
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headcount.schemas.errors import CorpusError, ModelError, RunError, counted
from headcount.schemas.files.places import reason
from headcount.workers.model.files.model_info import find_model
from headcount.workers.model.files.text_tokenizer import TextTokenizer

GPT2_TOKENS = 50257
"""Size of GPT-2's vocabulary, whose tokenizer cut the published texts."""

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
"""What is fetched of a model of the Hub, without its weights."""


@dataclass(frozen=True)
class DataSet:
    """A public data set, and which of its fields is read."""

    name: str
    """Its name in the published tables, and the name of a local copy."""
    hub: str
    configuration: str | None
    split: str
    field: str


DATA_SETS = (
    DataSet("sst2", "stanfordnlp/sst2", None, "train", "sentence"),
    DataSet("gsm8k", "openai/gsm8k", "main", "train", "question"),
    DataSet("humaneval", "openai/openai_humaneval", None, "test", "prompt"),
)
"""In the order of the source: one generator draws from all three in turn."""

PER_DATA_SET = 100
"""Texts of each data set."""

SHORT = 40
"""Tokens of a short text."""

LONG = 1024
"""Tokens of a long text, at least."""

SENTENCE = "It was the best of times, it was the worst of times, it was the age of wisdom."
"""The sentence of figure 5 (Dickens 1859): 21 tokens of GPT-2."""


class Text(NamedTuple):
    """One text of a data set."""

    dataset: str
    source_index: int
    """Number of the row that it is, or begins with."""
    text: str


class Piece(NamedTuple):
    """A row of a data set with its tokens."""

    index: int
    text: str
    tokens: list[int]


ReadRows = Callable[[DataSet], Iterable[Any]]
"""What gives the values of a data set's field, in the order of its rows."""

Tell = Callable[[str], None]
"""What takes a line that says what was done."""


@dataclass(frozen=True)
class Sources:
    """What texts are built from."""

    read_rows: ReadRows
    load_tokenizer: Callable[[], TextTokenizer]
    tell: Tell


def short_texts(sources: Sources, seed: int) -> list[Text]:
    """The first 40 tokens of 100 rows of each data set, drawn by one generator for all three."""
    tokenizer = sources.load_tokenizer()
    generator = random.Random(seed)
    texts: list[Text] = []
    for data_set in DATA_SETS:
        pieces = _pieces(data_set, sources.read_rows, tokenizer)
        candidates = _long_enough(data_set, pieces, sources.tell)
        generator.shuffle(candidates)
        texts += [
            Text(data_set.name, piece.index, tokenizer.text(piece.tokens[:SHORT]))
            for piece in candidates[:PER_DATA_SET]
        ]
    return texts


def long_texts(sources: Sources, seed: int) -> list[Text]:
    """100 texts of each data set, each a row that is continued by other rows of the same data set.

    Texts of the three data sets alternate, so that the first 150 are 50 of each.
    """
    tokenizer = sources.load_tokenizer()
    by_data_set = [
        _continued_texts(number, data_set, sources, tokenizer, seed)
        for number, data_set in enumerate(DATA_SETS)
    ]
    return [text for texts in zip(*by_data_set, strict=True) for text in texts]


def the_sentence(sources: Sources, seed: int) -> list[Text]:
    """The one sentence of figure 5."""
    return [Text("sentence", 0, SENTENCE)]


def _continued_texts(
    number: int, data_set: DataSet, sources: Sources, tokenizer: TextTokenizer, seed: int
) -> list[Text]:
    """The long texts of one data set; `number` is its place among the three."""
    pieces = _pieces(data_set, sources.read_rows, tokenizer)
    # The seeds are the source's: one draw for the beginnings, and one for each continuation.
    beginnings = _long_enough(data_set, pieces, sources.tell)
    random.Random(seed * 1009 + number * 9176).shuffle(beginnings)
    texts: list[Text] = []
    for order, beginning in enumerate(beginnings[:PER_DATA_SET]):
        generator = random.Random(seed * 1000003 + number * 9176 + order * 7919)
        text = _continued(beginning, pieces, tokenizer, generator)
        texts.append(Text(data_set.name, beginning.index, text))
    return texts


def _continued(
    beginning: Piece, pieces: list[Piece], tokenizer: TextTokenizer, generator: random.Random
) -> str:
    """A row, continued by rows in random order until it is long enough.

    The source joins tokens, and we join the texts without a space. Where two words meet, the text
    may have fewer tokens than its parts, so it is counted again.
    """
    parts = [beginning.text]
    count = len(beginning.tokens)
    while True:
        order = list(pieces)
        generator.shuffle(order)
        for piece in order:
            if count >= LONG and len(tokenizer.encode("".join(parts))) >= LONG:
                return "".join(parts)
            parts.append(piece.text)
            count += len(piece.tokens)


def _pieces(data_set: DataSet, read_rows: ReadRows, tokenizer: TextTokenizer) -> list[Piece]:
    """The rows of a data set that have text, with white space collapsed to single spaces."""
    cleaned = [" ".join(str(value or "").split()) for value in read_rows(data_set)]
    rows = [(index, text) for index, text in enumerate(cleaned) if text]
    tokens = tokenizer.encode_many([text for _, text in rows])
    return [Piece(index, text, ids) for (index, text), ids in zip(rows, tokens, strict=True)]


def _long_enough(data_set: DataSet, pieces: Sequence[Piece], tell: Tell) -> list[Piece]:
    """The rows of at least 40 tokens, of which the authors drew 100."""
    candidates = [piece for piece in pieces if len(piece.tokens) >= SHORT]
    tell(
        f"{data_set.name}: {counted(len(pieces), 'row')} with text, {len(candidates):,} of at "
        f"least {SHORT} tokens, {PER_DATA_SET} drawn"
    )
    if len(candidates) < PER_DATA_SET:
        raise CorpusError(
            f"{data_set.name}: expected {PER_DATA_SET} rows or more with at least {SHORT} tokens "
            f"in the field {data_set.field}, got {len(candidates)}; is this the whole data set?"
        )
    return candidates


# What can be built


@dataclass(frozen=True)
class Recipe:
    """Texts that can be built again."""

    what: str
    """A phrase that says what they are."""
    file: str
    """The file that the replications read."""
    build: Callable[[Sources, int], list[Text]]
    seed: int
    """The seed of the published texts."""
    fingerprints: dict[str, str]
    """Of the published texts, by data set. Empty if the authors published none."""


RECIPES = {
    "sink_circuit": Recipe(
        "the 300 texts of 40 tokens",
        "sink_circuit_300_texts.csv",
        short_texts,
        42,
        {
            "sst2": "b74b88ed596ebb53",
            "gsm8k": "d8138d61c433bd05",
            "humaneval": "2606383b1cd0185a",
        },
    ),
    "sink_circuit_long": Recipe(
        "300 texts of 1024 tokens, rows of one data set joined",
        "sink_circuit_long_texts.csv",
        long_texts,
        0,
        {},
    ),
    "sink_circuit_sentence": Recipe(
        "the sentence of figure 5",
        "sink_circuit_sentence.csv",
        the_sentence,
        0,
        {},
    ),
}
"""By the name that `headcount reproduce texts` takes."""


def how_to_get(message: str) -> str:
    """How to get the file that a message names, if it can be built. Otherwise empty.

    >>> how_to_get("no file matches 'sink_circuit_sentence.csv'")
    'headcount reproduce texts sink_circuit_sentence -o sink_circuit_sentence.csv'
    """
    for name, recipe in RECIPES.items():
        if recipe.file in message:
            return f"headcount reproduce texts {name} -o {recipe.file}"
    return ""


def fingerprints(texts: Iterable[Text]) -> dict[str, str]:
    """A fingerprint of the texts of each data set, in their order.

    >>> fingerprints([Text("sst2", 7, "a"), Text("sst2", 8, "b")])
    {'sst2': '7dc2784f68637e81'}
    """
    by_data_set: dict[str, Any] = {}
    for text in texts:
        digest = by_data_set.setdefault(text.dataset, hashlib.sha256())
        # The length keeps the texts "a", "b" apart from "ab".
        content = text.text.encode()
        digest.update(f"{len(content)} ".encode() + content)
    return {name: digest.hexdigest()[:16] for name, digest in by_data_set.items()}


def as_csv(texts: Iterable[Text]) -> bytes:
    """The texts as the family `csv_texts` reads them."""
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(Text._fields)
    writer.writerows(texts)
    return lines.getvalue().encode()


# Sources


def gpt2_tokenizer(spec: str) -> TextTokenizer:
    """GPT-2's tokenizer, in a model's directory or from the Hub (without the model's weights)."""
    if Path(spec).expanduser().is_dir() or spec.startswith("bundled:"):
        return TextTokenizer(find_model(spec), GPT2_TOKENS)
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(spec, allow_patterns=TOKENIZER_FILES)
    except Exception as error:
        raise ModelError(
            f"--tokenizer {spec}: neither a directory, nor to be had from the Hub "
            f"({reason(error)}); expected a directory with GPT-2's tokenizer.json, or a Hub id"
        ) from None
    return TextTokenizer(Path(directory), GPT2_TOKENS)


def rows_of_hub(data_set: DataSet) -> Iterable[Any]:
    """The values of a data set of the Hub."""
    return _read(data_set, data_set.hub, data_set.configuration)


def rows_below(directory: Path) -> ReadRows:
    """What reads local copies: directories below this one, with the names of the data sets."""

    def read_rows(data_set: DataSet) -> Iterable[Any]:
        names = [data_set.name, data_set.hub.rpartition("/")[2]]
        copies = [directory / name for name in names if (directory / name).is_dir()]
        if not copies:
            raise CorpusError(
                f"{directory}: expected a directory {' or '.join(dict.fromkeys(names))} with a "
                f"copy of {data_set.hub}, got none"
            )
        copy = copies[0]
        configuration = data_set.configuration
        # A copy may hold its configurations as directories, or only the one that is needed.
        if configuration and (copy / configuration).is_dir():
            copy = copy / configuration
        return _read(data_set, str(copy), None)

    return read_rows


SAVED = ("state.json", "dataset_dict.json")
"""Files of a directory that the library `datasets` saved."""


def _read(data_set: DataSet, source: str, configuration: str | None) -> Iterable[Any]:
    """The values of the field, from a Hub id or a directory."""
    from datasets import load_dataset, load_from_disk

    try:
        if any((Path(source) / name).is_file() for name in SAVED):
            saved: Any = load_from_disk(source)
            rows = saved[data_set.split] if isinstance(saved, dict) else saved
        else:
            rows = load_dataset(source, configuration, split=data_set.split, streaming=True)
        return [row[data_set.field] for row in rows]
    except KeyError as error:
        raise CorpusError(
            f"{source}: expected the split {data_set.split} and the field {data_set.field}, and "
            f"{error} is missing; is this {data_set.hub}?"
        ) from None
    except Exception as error:
        raise CorpusError(
            f"{source}: the split {data_set.split} cannot be read ({reason(error)}); without the "
            "network, give local copies of the three data sets with --from DIR"
        ) from None


def check_published(recipe: Recipe, texts: Sequence[Text], seed: int) -> str:
    """A line that says whether these are the published texts. An error if they should be."""
    if not recipe.fingerprints or seed != recipe.seed:
        return "no texts were published to compare these with"
    measured = fingerprints(texts)
    for name, published in recipe.fingerprints.items():
        # One generator draws for all data sets, so those after a different one differ, too.
        if measured.get(name) != published:
            raise RunError(
                f"the texts of {name} are not the published ones; expected a whole copy of the "
                "data set with its rows in their order, and GPT-2's tokenizer"
            )
    return f"exactly the {len(texts)} published texts"
