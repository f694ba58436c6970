"""Tokens that are drawn as often as a corpus has them, held against counts made by hand."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.schemas.errors import ScanError
from headcount.workers.model.files.model_info import ModelInfo
from tests.toys.toy_corpora import Row, all_tokens, byte_info, open_corpus, problems, write_jsonl
from tests.toys.toy_models import BYTE_BOS

SEED, LENGTH, SEQUENCES = 5, 12, 9

ROWS: list[Row] = [("aab", "ArXiv"), ("", "ArXiv"), ("bca" * 300, "Github"), ("aaaa,", "ArXiv")]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return byte_info(tmp_path_factory.mktemp("bytes"))


def drawn_tokens(info: ModelInfo, files: Path, **options: Any) -> list[list[int]]:
    """The tokens of a scan that counts some files."""
    input_options = {"family": "unigram_text", "files": str(files), **options}
    fields = {"seed": SEED, "n_ctx": LENGTH, "sequences": SEQUENCES, "input": input_options}
    return all_tokens(open_corpus(info, files, **fields))


def expected_tokens(text: str, ids: range = range(BYTE_BOS)) -> list[list[int]]:
    """The same from counts of bytes, each sequence drawn from its own stream."""
    occurrences = Counter(text.encode())
    counts = np.array([occurrences[i] for i in ids])
    stream = zlib.crc32(b"unigram_random")
    rows = [
        np.random.default_rng(np.random.SeedSequence([SEED, i, stream])).choice(
            np.array(ids), size=LENGTH, p=counts / counts.sum()
        )
        for i in range(SEQUENCES)
    ]
    return np.array(rows).tolist()


def test_tokens_are_as_frequent_as_in_all_documents(info: ModelInfo, tmp_path: Path):
    file = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    assert drawn_tokens(info, file) == expected_tokens("".join(text for text, _ in ROWS))
    # More sequences than documents, and longer ones than most: nothing is too short.
    assert drawn_tokens(info, file, high=99) == expected_tokens(
        "".join(text for text, _ in ROWS), range(99)
    )


def test_only_documents_that_are_chosen_are_counted(info: ModelInfo, tmp_path: Path):
    file = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    assert drawn_tokens(info, file, where={"pile_set_name": "ArXiv"}) == expected_tokens("aabaaaa,")


def test_bad_rows_are_not_counted_but_named(info: ModelInfo, tmp_path: Path):
    file = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    file.write_text(file.read_text() + "{\n")
    options = {"family": "unigram_text", "files": str(file)}
    fields = {"seed": SEED, "n_ctx": LENGTH, "sequences": SEQUENCES, "input": options}
    sequences = open_corpus(info, file, bad_rows=1.0, **fields)
    assert all_tokens(sequences) == expected_tokens("".join(text for text, _ in ROWS))
    assert len(problems(sequences)) == 1
    assert sequences.fates is not None
    assert sequences.fates.all == {"used": 3, "empty": 1, "bad": 1}


def test_a_table_is_counted_by_its_texts(info: ModelInfo, tmp_path: Path):
    table = tmp_path / "texts.csv"
    table.write_text("dataset,text,length\n" + 'xyz,"aab,",40\nxyz,ab,40\n' * 5)
    assert drawn_tokens(info, table) == expected_tokens("aab,ab" * 5)


def test_a_corpus_has_no_end_and_needs_a_token_to_draw(info: ModelInfo, tmp_path: Path):
    file = write_jsonl(tmp_path / "texts.jsonl", ROWS)
    with pytest.raises(ScanError) as caught:
        drawn_tokens(info, file, low=200)
    assert str(caught.value) == (
        "input: the corpus has no ordinary token from low = 200 on; widen low and high"
    )
    options = {"family": "unigram_text", "files": str(file)}
    with pytest.raises(ScanError, match="got 'all'; the family unigram_text has no end"):
        open_corpus(info, file, input=options, sequences="all")
