"""`headcount reproduce texts`: published texts are built again from their data sets."""

import csv
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headcount.reproduce.published_texts import (
    DATA_SETS,
    GPT2_TOKENS,
    QWEN_TOKENS,
    RECIPES,
    Text,
    TokenizedRow,
    check_published,
    fingerprints,
    recipe_tokenizer,
    short_texts,
)
from headcount.schemas.errors import RunError
from headcount.schemas.files.input_files import ROOTS
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from tests.toys import published
from tests.toys.commands import error_of, printed
from tests.toys.toy_models import byte_tokenizer

ROWS = 200
"""Rows of each toy data set. A few are too short to be drawn."""


def toy_rows(name: str) -> list[str]:
    """Texts with untidy white space, of 20 to 89 bytes when they are tidied."""
    letters = random.Random(name)
    rows: list[str] = []
    for length in (letters.randrange(20, 90) for _ in range(ROWS)):
        words = "".join(letters.choice("abcdefgh   ") for _ in range(length))
        rows.append(f"\n {words}\t\n")
    return rows


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local copies of the three data sets, each in another format."""
    from datasets import Dataset, DatasetDict

    directory = tmp_path_factory.mktemp("copies")
    (directory / "sst2").mkdir()
    table = pa.table({"sentence": toy_rows("sst2"), "label": [0] * ROWS})
    pq.write_table(table, directory / "sst2" / "train-00000-of-00001.parquet")
    (directory / "gsm8k" / "main").mkdir(parents=True)
    lines = [json.dumps({"question": text, "answer": "1"}) for text in toy_rows("gsm8k")]
    (directory / "gsm8k" / "main" / "train.jsonl").write_text("\n".join(lines))
    code = Dataset.from_dict({"prompt": toy_rows("humaneval")})
    DatasetDict({"test": code}).save_to_disk(str(directory / "openai_humaneval"))
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes with as many tokens as GPT-2's."""
    return tokenizer_of_size(tmp_path_factory.mktemp("tokenizer"), GPT2_TOKENS)


def tokenizer_of_size(directory: Path, size: int) -> Path:
    byte_tokenizer(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    # The end of text is a token beside the vocabulary.
    vocabulary |= {f"<{number}>": number for number in range(257, size)}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


TEXTS = ("reproduce", "texts")


def tokenizer_of_gpt2(directory: Path) -> TextTokenizer:
    return recipe_tokenizer(RECIPES["sink_circuit"], str(directory))


def tidied(name: str) -> list[str]:
    return [" ".join(row.split()) for row in toy_rows(name)]


def read_csv(file: Path) -> list[Text]:
    with file.open(newline="") as lines:
        return [
            Text(row["dataset"], int(row["source_index"]), row["text"])
            for row in csv.DictReader(lines)
        ]


@pytest.mark.long
def test_short_texts_come_from_all_three(copies: Path, tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    options = ["--from", copies, "--tokenizer", tokenizer, "-o", file]
    output = printed(*TEXTS, "sink_circuit", *options, "--seed", 7)
    assert "the source has published no such texts to compare these with" in output
    generator = random.Random(7)
    expected: list[Text] = []
    for name in ("sst2", "gsm8k", "humaneval"):
        places = [place for place, row in enumerate(tidied(name)) if len(row) >= 40]
        assert f"{name}: {ROWS} rows with text, {len(places)} of at least 40 tokens" in output
        generator.shuffle(places)
        expected += [Text(name, place, tidied(name)[place][:40]) for place in places[:100]]
    assert read_csv(file) == expected
    # What a scan reads is what was written.
    documents = list(Source("csv", str(file), 0).documents())
    assert [(document.text, document.pile_set_name) for document in documents] == [
        (text.text, text.dataset) for text in expected
    ]
    file.unlink()
    error = error_of(*TEXTS, "sink_circuit", *options)
    assert "the texts of sst2 are not those of the source, and nothing was written" in error
    assert not file.exists()


def test_copies_are_read_as_the_input_of_a_scan_is(
    copies: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--from", tmp_path, "--tokenizer", tokenizer, "-o", tmp_path / "texts.csv"]
    (tmp_path / "sst2").mkdir()
    inside, saved = tmp_path / "sst2" / "train.csv", tmp_path / "sst2" / "state.json"
    card = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
    inside.symlink_to("/proc/self/environ")
    assert "lies in /proc" in error_of(*TEXTS, "sink_circuit", *options)
    inside.rename(tmp_path / "link.csv")
    (tmp_path / "sst2" / "README.md").write_text(card.format(tmp_path / "link.csv"))
    assert "lies in /proc" in error_of(*TEXTS, "sink_circuit", *options)
    saved.write_text('{"_data_files": [{"filename": "../../../../../../proc/self/environ"}]}')
    assert "lies in /proc" in error_of(*TEXTS, "sink_circuit", *options)
    saved.unlink()
    saved.symlink_to("/proc/self/environ")
    assert "lies in /proc" in error_of(*TEXTS, "sink_circuit", *options)
    monkeypatch.setenv(ROOTS, f"{tmp_path}:{tokenizer}")
    for name in ("sst2", "gsm8k", "openai_humaneval"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        (tmp_path / name).symlink_to(copies / name)
        error = error_of(*TEXTS, "sink_circuit", *options)
        assert "lies outside of the directories" in error
        (tmp_path / name).unlink()


@pytest.mark.long
def test_qwen_reads_texts_that_its_own_tokenizer_counts(
    copies: Path, tokenizer: Path, tmp_path: Path
) -> None:
    file, own = tmp_path / "texts.csv", tmp_path / "own"
    own.mkdir()
    tokenizer_of_size(own, QWEN_TOKENS)
    # Each of its tokens is two bytes where they are the same, so texts of 40 tokens are longer.
    content = json.loads((own / "tokenizer.json").read_text())
    vocabulary, letters = content["model"]["vocab"], "abcdefgh"
    for number, letter in enumerate(letters):
        del vocabulary[f"<{257 + number}>"]
        vocabulary[letter * 2] = 257 + number
    content["model"]["merges"] = [[letter, letter] for letter in letters]
    (own / "tokenizer.json").write_text(json.dumps(content))
    options = ["--from", copies, "-o", file, "--tokenizer"]
    printed(*TEXTS, "sink_circuit_qwen", *options, own)
    texts = read_csv(file)
    cutter = recipe_tokenizer(RECIPES["sink_circuit_qwen"], str(own))
    assert {len(tokens) for tokens in cutter.encode_many([text.text for text in texts])} == {40}
    generator = random.Random(0)
    for name in ("sst2", "gsm8k", "humaneval"):
        counts = [len(tokens) for tokens in cutter.encode_many(tidied(name))]
        places = [place for place, count in enumerate(counts) if count >= 40]
        assert len(places) < sum(len(row) >= 40 for row in tidied(name))
        generator.shuffle(places)
        assert [each.source_index for each in texts if each.dataset == name] == places[:100]
    # GPT-2's tokenizer would cut others, and one generator draws from all three data sets.
    error = error_of(*TEXTS, "sink_circuit_qwen", *options, tokenizer)
    assert "tokenizer has 50,257 tokens and the model 151,936" in error
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "sst2").symlink_to(copies / "sst2")
    options[1] = tmp_path / "some"
    error = error_of(*TEXTS, "sink_circuit_qwen", *options, own)
    assert "sink_circuit_qwen_texts.csv needs all three data sets" in error


@pytest.mark.parametrize("name", ["sink_circuit", "sink_circuit_long"])
def test_of_copies_of_some_data_sets_the_texts_are_those_of_all_and_the_share_is_said(
    name: str, copies: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {n: sum(len(row) >= 40 for row in tidied(n)) for n in ("sst2", "gsm8k", "humaneval")}
    toys = tuple(each._replace(candidates=sizes[each.name]) for each in DATA_SETS)
    monkeypatch.setattr("headcount.reproduce.published_texts.DATA_SETS", toys)
    options = ["--tokenizer", tokenizer, "--seed", 7]
    whole, part = tmp_path / "whole.csv", tmp_path / "part.csv"
    printed(*TEXTS, name, "--from", copies, "-o", whole, *options)
    some = tmp_path / "copies"
    some.mkdir()
    (some / "gsm8k").symlink_to(copies / "gsm8k")
    output = printed(*TEXTS, name, "--from", some, "-o", part, *options)
    assert "sst2: no copy in" in output
    assert read_csv(part) == [text for text in read_csv(whole) if text.dataset == "gsm8k"]
    # What is there are the source's, if its fingerprint says so.
    recipe = replace(RECIPES[name], seed=7, fingerprints=fingerprints(read_csv(whole)))
    line = check_published(recipe, read_csv(part), 7)
    assert line == "exactly 100 of the 300 texts of the source"
    assert check_published(recipe, read_csv(whole), 7) == "exactly the 300 texts of the source"
    with pytest.raises(RunError, match="the texts of gsm8k are not those of the source"):
        check_published(recipe, read_csv(part)[1:], 7)


def test_long_texts_are_rows_of_one_data_set(copies: Path, tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    options = ["--from", copies, "--tokenizer", tokenizer, "-o", file]
    printed(*TEXTS, "sink_circuit_long", *options, "--seed", 3)
    texts = read_csv(file)
    names = ["sst2", "gsm8k", "humaneval"]
    assert [text.dataset for text in texts] == names * 100
    assert all(len(text.text) >= 1024 for text in texts)
    for number, name in enumerate(names):
        rows = tidied(name)
        beginnings = [place for place, row in enumerate(rows) if len(row) >= 40]
        random.Random(3 * 1009 + number * 9176).shuffle(beginnings)
        assert [text.source_index for text in texts[number::3]] == beginnings[:100]
        for place in (0, 57):
            order = list(range(ROWS))
            random.Random(3 * 1000003 + number * 9176 + place * 7919).shuffle(order)
            joined = "".join(rows[row] for row in [beginnings[place], *order])
            text = texts[3 * place + number].text
            assert joined.startswith(text)
            # No row is added to what is long enough.
            assert len(text) < 1024 + 90


def test_the_sentence_needs_no_data_set(tmp_path: Path) -> None:
    file = tmp_path / "sentence.csv"
    words = (*TEXTS, "sink_circuit_sentence", "-o", file)
    output = printed(*words, "--tokenizer", "no/model")
    assert str(file) in output
    (text,) = read_csv(file)
    assert text.text.startswith("It was the best of times")


@pytest.mark.parametrize(("folder", "line"), [
    ("nowhere", "expected directories sst2, gsm8k, humaneval"),
    ("odd", "'sentence' is missing"),
    ("few", "expected 100 rows or more"),
])  # fmt: skip
def test_data_sets_that_are_not_those_are_lines(
    folder: str, line: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, field in (("odd", "text"), ("few", "sentence")):
        (tmp_path / name / "sst2").mkdir(parents=True)
        (tmp_path / name / "sst2" / "train.jsonl").write_text(json.dumps({field: "word " * 60}))
    words = (*TEXTS, "sink_circuit", "--from", folder)
    assert line in error_of(*words, "--tokenizer", tokenizer)


def test_rows_are_drawn_in_the_published_order(tokenizer: Path) -> None:
    with published.data_file("sink_circuit_300_texts.csv").open(newline="") as lines:
        rows = [(row["dataset"], int(row["source_index"])) for row in csv.DictReader(lines)]
    # Only these numbers give the published order.
    counts = {data_set.name: data_set.candidates for data_set in DATA_SETS}
    rows_by_name = {
        name: [TokenizedRow(place, "", [0] * 40) for place in range(count)]
        for name, count in counts.items()
    }
    seed = RECIPES["sink_circuit"].seed
    drawn = short_texts(rows_by_name, tokenizer_of_gpt2(tokenizer), seed)
    for name in counts:
        # A row that comes later in the data set comes later among those of 40 tokens.
        published_places = np.argsort([index for dataset, index in rows if dataset == name])
        places = np.argsort([text.source_index for text in drawn if text.dataset == name])
        assert places.tolist() == published_places.tolist()


@pytest.mark.long
def test_the_published_texts_have_their_fingerprints() -> None:
    tokenizer = tokenizer_of_gpt2(published.data_file("gpt2-tokenizer/tokenizer.json").parent)
    texts = read_csv(published.data_file("sink_circuit_300_texts.csv"))
    assert fingerprints(texts) == RECIPES["sink_circuit"].fingerprints
    assert {len(tokens) for tokens in tokenizer.encode_many([text.text for text in texts])} == {40}
