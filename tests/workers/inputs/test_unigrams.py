"""Tokens that are drawn as often as a corpus has them, held against counts made by hand."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.schemas.errors import ScanError
from headcount.workers.inputs.sequences import Sequences
from tests.toys.refusals import refused
from tests.toys.toy_corpora import Row, all_tokens, fates_of, open_corpus, problems, write_jsonl
from tests.toys.toy_models import BYTE_BOS

SEED, LENGTH, SEQUENCES = 5, 12, 9

ROWS: list[Row] = [("aab", "ArXiv"), ("", "ArXiv"), ("bca" * 300, "Github"), ("aaaa,", "ArXiv")]
ALL = "".join(text for text, _ in ROWS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of the rows."""
    return write_jsonl(tmp_path / "texts.jsonl", ROWS)


def counted(files: Path, options: dict[str, Any] | None = None, **changes: Any) -> Sequences:
    """The sequences of a scan that counts some files."""
    fields: dict[str, Any] = {"seed": SEED, "n_ctx": LENGTH, "sequences": SEQUENCES} | changes
    fields["input"] = {"family": "unigram_text", "files": str(files)} | (options or {})
    return open_corpus(files, **fields)


def drawn_tokens(files: Path, **options: Any) -> list[list[int]]:
    return all_tokens(counted(files, options))


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


def test_tokens_are_as_frequent_as_in_all_documents(file: Path):
    assert drawn_tokens(file) == expected_tokens(ALL)
    # More sequences than documents, and longer ones than most: nothing is too short.
    assert drawn_tokens(file, high=99) == expected_tokens(ALL, range(99))


def test_only_documents_that_are_chosen_are_counted(file: Path):
    assert drawn_tokens(file, where={"pile_set_name": "ArXiv"}) == expected_tokens("aabaaaa,")


def test_bad_rows_are_not_counted_but_named(file: Path):
    file.write_text(file.read_text() + "{\n")
    sequences = counted(file, bad_rows=1.0)
    assert all_tokens(sequences) == expected_tokens(ALL)
    assert len(problems(sequences)) == 1
    assert fates_of(sequences).all == {"used": 3, "empty": 1, "bad": 1}


def test_a_table_is_counted_by_its_texts(tmp_path: Path):
    table = tmp_path / "texts.csv"
    table.write_text("dataset,text,length\n" + 'xyz,"aab,",40\nxyz,ab,40\n' * 5)
    assert drawn_tokens(table) == expected_tokens("aab,ab" * 5)


def test_a_corpus_has_no_end_and_needs_a_token_to_draw(file: Path):
    assert refused(ScanError, drawn_tokens, file, low=200) == (
        "input: the corpus has no ordinary token from low = 200 on; widen low and high"
    )
    with pytest.raises(ScanError, match="got 'all'; the family unigram_text has no end"):
        counted(file, sequences="all")
