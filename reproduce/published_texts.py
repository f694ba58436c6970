"""Texts that figures of the sink circuit were published for, built again from their sources.

We ship no text of others. A recipe says how the authors drew their texts from public data sets.
Fingerprints say whether the result is what they published.
"""

import csv
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from headcount.schemas.errors import CorpusError, ModelError, RunError, ScanError, counted
from headcount.schemas.files.input_files import open_input, read_input
from headcount.schemas.reasons import reason
from headcount.workers.inputs.corpus.documents import checked_builder
from headcount.workers.model.info.description import find_model
from headcount.workers.model.info.text_tokenizer import TextTokenizer

GPT2, GPT2_TOKENS = "openai-community/gpt2", 50257
QWEN, QWEN_TOKENS = "Qwen/Qwen2.5-0.5B", 151936
"""Models whose tokenizers cut the published texts, and the sizes of their vocabularies."""

PER_DATA_SET = 100
"""Texts of each data set."""

SHORT, LONG = 40, 1024
"""Tokens of a short text, and of a long text at least."""

SAVED = "state.json"
"""What lies beside the Arrow files of a data set that `save_to_disk` has written."""

SENTENCE = "It was the best of times, it was the worst of times, it was the age of wisdom."
"""The sentence of figure 5 (Dickens 1859): 21 tokens of GPT-2."""


class DataSet(NamedTuple):
    """A public data set, and which of its fields is read."""

    name: str
    """Its name in the published tables, and the name of a local copy."""
    hub: str
    configuration: str | None
    split: str
    field: str
    candidates: int
    """Its rows of at least 40 tokens of GPT-2. A draw shuffles so many also where there is no copy
    of it.
    """


DATA_SETS = (
    DataSet("sst2", "stanfordnlp/sst2", None, "train", "sentence", 986),
    DataSet("gsm8k", "openai/gsm8k", "main", "train", "question", 5671),
    DataSet("humaneval", "openai/openai_humaneval", None, "test", "prompt", 159),
)
"""In the order of the source: one generator draws from all three in turn."""


class Text(NamedTuple):
    """One text of a data set."""

    dataset: str
    source_index: int
    """Number of the row that it is, or begins with."""
    text: str


class TokenizedRow(NamedTuple):
    """A row of a data set with its tokens."""

    index: int
    text: str
    tokens: Sequence[int]


Rows = Mapping[str, Sequence[TokenizedRow]]
"""The rows of each data set that is at hand, by its name, in the order of the source."""


def short_texts(rows_by_name: Rows, tokenizer: TextTokenizer, seed: int) -> list[Text]:
    """The first 40 tokens of 100 rows of each data set, drawn by one generator for all three."""
    generator = random.Random(seed)
    texts: list[Text] = []
    for data_set in DATA_SETS:
        rows = rows_by_name.get(data_set.name)
        if rows is None:
            # What is drawn from the next one depends on how many were shuffled here.
            generator.shuffle([None] * data_set.candidates)
            continue
        candidates = _long_enough(rows)
        generator.shuffle(candidates)
        texts += [
            Text(data_set.name, row.index, tokenizer.text([*row.tokens[:SHORT]]))
            for row in candidates[:PER_DATA_SET]
        ]
    return texts


def long_texts(rows_by_name: Rows, tokenizer: TextTokenizer, seed: int) -> list[Text]:
    """100 texts of each data set, each a row that is continued by other rows of the same data set.

    Texts of the three data sets alternate, so that the first 150 are 50 of each.
    """
    texts_by_data_set: list[list[Text]] = []
    for number, name in enumerate(data_set.name for data_set in DATA_SETS):
        if name not in rows_by_name:
            continue
        rows = rows_by_name[name]
        # The seeds are the source's: one draw for the beginnings, and one for each continuation.
        beginnings = _long_enough(rows)
        random.Random(seed * 1009 + number * 9176).shuffle(beginnings)
        texts: list[Text] = []
        for order, beginning in enumerate(beginnings[:PER_DATA_SET]):
            generator = random.Random(seed * 1000003 + number * 9176 + order * 7919)
            text = _continued(beginning, rows, tokenizer, generator)
            texts.append(Text(name, beginning.index, text))
        texts_by_data_set.append(texts)
    return [text for texts in zip(*texts_by_data_set, strict=True) for text in texts]


def _continued(
    beginning: TokenizedRow,
    rows: Sequence[TokenizedRow],
    tokenizer: TextTokenizer,
    generator: random.Random,
) -> str:
    """A row, continued by rows in random order until it is long enough.

    The source joins tokens, and we join the texts without a space. Where two words meet, the text
    may have fewer tokens than its parts, so it is counted again.
    """
    parts = [beginning.text]
    count = len(beginning.tokens)
    while True:
        order = list(rows)
        generator.shuffle(order)
        for row in order:
            if count >= LONG and len(tokenizer.encode("".join(parts))) >= LONG:
                return "".join(parts)
            parts.append(row.text)
            count += len(row.tokens)


def _long_enough(rows: Iterable[TokenizedRow]) -> list[TokenizedRow]:
    """The rows of at least 40 tokens, of which the authors drew 100."""
    return [row for row in rows if len(row.tokens) >= SHORT]


# What can be built


@dataclass(frozen=True)
class Recipe:
    """Texts that can be built again."""

    what: str
    """A phrase that says what they are."""
    file: str
    """The file that the replications read."""
    draw: Callable[[Rows, TextTokenizer, int], list[Text]] | None
    """What draws them with a seed. None is for the sentence, which is drawn from nothing."""
    seed: int = 0
    """The seed of the published texts."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of the source's texts, by data set. The long ones were not published, and are what the recipe
    makes of the same copies that give the published short ones.
    """
    tokenizer: str = GPT2
    """The model whose tokenizer counts and cuts."""
    tokens: int = GPT2_TOKENS
    """The size of its vocabulary."""


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
    "sink_circuit_qwen": Recipe(
        "300 texts of 40 tokens of Qwen2.5, the first of the source's three draws",
        "sink_circuit_qwen_texts.csv",
        short_texts,
        tokenizer=QWEN,
        tokens=QWEN_TOKENS,
    ),
    "sink_circuit_long": Recipe(
        "300 texts of 1024 tokens, rows of one data set joined",
        "sink_circuit_long_texts.csv",
        long_texts,
        0,
        {
            "sst2": "c521a12e47f09a1b",
            "gsm8k": "2a483ec02557a897",
            "humaneval": "ea2a23c5673ffd20",
        },
    ),
    "sink_circuit_sentence": Recipe("the sentence of figure 5", "sink_circuit_sentence.csv", None),
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


def build_texts(
    recipe: Recipe, directory: Path | None, tokenizer: str, seed: int, tell: Callable[[str], None]
) -> list[Text]:
    """The texts of a recipe, from local copies of the data sets below a directory, or from the Hub.

    `tell` takes a line for each data set that was read.
    """
    if recipe.draw is None:
        return [Text("sentence", 0, SENTENCE)]
    cutter = recipe_tokenizer(recipe, tokenizer)
    rows_by_name: dict[str, list[TokenizedRow]] = {}
    for data_set in DATA_SETS:
        values = _values(data_set, directory)
        if values is None and recipe.tokenizer != GPT2:
            raise CorpusError(
                f"{data_set.name}: no copy in {directory}; {recipe.file} needs all three data "
                "sets, because one generator draws from them in turn"
            )
        if values is None:
            tell(f"{data_set.name}: no copy in {directory}; its {PER_DATA_SET} texts are left out")
            continue
        # White space is collapsed to single spaces, and rows without text are left out.
        cleaned = [" ".join(str(value or "").split()) for value in values]
        numbered = [(index, text) for index, text in enumerate(cleaned) if text]
        tokens = cutter.encode_many([text for _, text in numbered])
        rows = [TokenizedRow(*row, ids) for row, ids in zip(numbered, tokens, strict=True)]
        candidates = len(_long_enough(rows))
        tell(
            f"{data_set.name}: {counted(len(rows), 'row')} with text, {candidates:,} of at "
            f"least {SHORT} tokens, {PER_DATA_SET} drawn"
        )
        if candidates < PER_DATA_SET:
            raise CorpusError(
                f"{data_set.name}: expected {PER_DATA_SET} rows or more with at least {SHORT} "
                f"tokens in the field {data_set.field}, got {candidates}; is this the whole data "
                "set?"
            )
        rows_by_name[data_set.name] = rows
    if not rows_by_name:
        names = ", ".join(data_set.name for data_set in DATA_SETS)
        raise CorpusError(
            f"{directory}: expected directories {names} with copies of the data sets, got none"
        )
    return recipe.draw(rows_by_name, cutter, seed)


def recipe_tokenizer(recipe: Recipe, spec: str) -> TextTokenizer:
    """A recipe's tokenizer, in a model's directory or from the Hub (without its weights)."""
    if Path(spec).expanduser().is_dir() or spec.startswith("bundled:"):
        return TextTokenizer(find_model(spec), recipe.tokens)
    from huggingface_hub import snapshot_download

    files = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]
    try:
        directory = snapshot_download(spec, allow_patterns=files)
    except Exception as error:
        raise ModelError(
            f"--tokenizer {spec}: neither a directory, nor to be had from the Hub "
            f"({reason(error)}); expected a directory with the tokenizer.json of "
            f"{recipe.tokenizer}, or a Hub id"
        ) from None
    return TextTokenizer(Path(directory), recipe.tokens)


def _values(data_set: DataSet, directory: Path | None) -> list[Any] | None:
    """The values of the field that is read, in the order of the rows. None if there is no copy."""
    source, configuration = data_set.hub, data_set.configuration
    if directory is not None:
        names = dict.fromkeys([data_set.name, data_set.hub.rpartition("/")[2]])
        copies = [directory / name for name in names if (directory / name).is_dir()]
        if not copies:
            return None
        # A copy may hold its configurations as directories, or only the one that is needed.
        inner = copies[0] / (configuration or "")
        source, configuration = str(inner if inner.is_dir() else copies[0]), None
    try:
        for folder in (Path(source), Path(source) / data_set.split):
            if (folder / SAVED).is_file():
                return _saved_values(folder, data_set.field)
        builder = checked_builder(source, data_set.split, configuration)
        rows = builder.as_streaming_dataset(split=data_set.split)
        return [row[data_set.field] for row in rows]
    except ScanError:
        raise
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


def _saved_values(folder: Path, field: str) -> list[Any]:
    """The values of a field of a data set that the library `datasets` has saved to a disk."""
    values: list[Any] = []
    for file in json.loads(read_input(folder / SAVED))["_data_files"]:
        with open_input(folder / file["filename"]) as content:
            values += pa.ipc.open_stream(content).read_all()[field].to_pylist()
    return values


# What was built


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


def check_published(recipe: Recipe, texts: Sequence[Text], seed: int) -> str:
    """A line that says which share of the source's texts these are. An error if they are others."""
    if not recipe.fingerprints or seed != recipe.seed:
        return "the source has published no such texts to compare these with"
    measured = fingerprints(texts)
    for name, published in recipe.fingerprints.items():
        # One generator draws for all data sets, so those after a different one differ, too.
        if measured.get(name, published) != published:
            raise RunError(
                f"the texts of {name} are not those of the source, and nothing was written; "
                "expected a whole copy of the data set with its rows in their order, and GPT-2's "
                "tokenizer"
            )
    of_all = len(DATA_SETS) * PER_DATA_SET
    share = "" if len(texts) == of_all else f" {len(texts)} of"
    return f"exactly{share} the {of_all} texts of the source"
