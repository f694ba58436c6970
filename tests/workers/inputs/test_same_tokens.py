"""The same tokens, however a corpus is cut, sharded and ordered, and whatever else is stored."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store import extents, preparation
from headcount.workers.inputs.store.token_store import PortionFile
from tests.toys.toy_corpora import (
    LENGTH,
    Row,
    all_origins,
    all_tokens,
    byte_model,
    cut,
    document,
    fates_of,
    open_corpus,
    packed,
    plain_bytes,
    problems,
    texts_of,
    write_jsonl,
    write_lines,
    write_parquet,
)  # fmt: skip

WHOLE = (1 << 20, 1 << 20)
SMALL = (100, 30)
"""Bytes that a range of a file covers, letters of a portion."""


def cut_all(patch: pytest.MonkeyPatch, range_bytes: int, letters: int) -> None:
    patch.setattr(extents, "PORTION_BYTES", range_bytes)
    patch.setattr(preparation, "PORTION_LETTERS", letters)


GOLDEN_FILES: dict[str, list[Row]] = {
    "0.jsonl": [("abc", None), ("", "A"), ("defghij", "B"), ("k", None), ("lmnopqrs", "A")],
    "1.jsonl.gz": [("The_quick_brown_fox", "B")],
    "2.parquet": [("tuvwxyz", "A"), ("01", "B"), ("234567", "A"), ("890123456", None)],
}

GOLDEN: list[tuple[dict[str, Any], str, str, list[int]]] = [
    ({"packing": "document"}, "defghi lmnopq The_qu tuvwxy 234567 890123",
     "0:2+0 0:4+0 1:0+0 2:0+0 2:2+0 2:3+0", [2, 4, 5, 6, 8, 9]),
    ({"packing": "concat"},
     "abc|de fghij| k|lmno pqrs|T he_qui ck_bro wn_fox |tuvwx yz|01| 234567 |89012",
     "0:0+0 0:2+2 0:3+0 0:4+4 1:0+1 1:0+7 1:0+13 1:0+19 2:0+5 2:2+0 2:2+6",
     [0, 2, 4, 4, 5, 5, 5, 6, 6, 8, 9]),
    ({"packing": "concat", "where": {"pile_set_name": "A"}}, "lmnopq rs|tuv wxyz|2 34567|",
     "0:4+0 0:4+6 2:0+3 2:2+1", [4, 6, 6, 8]),
    ({"packing": "document", "where": {"pile_set_name": ["A", "B"]}, "skip": 3},
     "The_qu tuvwxy 234567", "1:0+0 2:0+0 2:2+0", [5, 6, 8]),
    ({"packing": "concat", "skip": 8}, "234567 |89012", "2:2+0 2:2+6", [8, 9]),
    ({"packing": "document", "shuffle": 1}, "234567 lmnopq 890123 defghi The_qu tuvwxy",
     "2:2+0 0:4+0 2:3+0 0:2+0 1:0+0 2:0+0", [8, 4, 9, 2, 5, 6]),
    ({"packing": "concat", "shuffle": True, "skip": 2, "seed": 1},
     "abc|lm nopqrs |89012 3456|d efghij |The_q uick_b rown_f ox|tuv wxyz|k",
     "0:0+0 0:4+2 0:4+8 2:3+5 0:2+1 0:2+7 1:0+5 1:0+11 1:0+17 2:0+3",
     [0, 4, 9, 9, 2, 5, 5, 5, 6, 6]),
]  # fmt: skip
"""Options; sequences, with a bar for the end of text; file, row and offset at which each begins;
and the document with most of its tokens, the first of equal ones.
"""


@pytest.mark.parametrize("cuts", [WHOLE, SMALL])
@pytest.mark.parametrize(("options", "texts", "begins", "main"), GOLDEN)
def test_tokens_and_origins_are_those_written_here_in_shards_of_any_size_and_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuts: tuple[int, int],
    options: dict[str, Any],
    texts: str,
    begins: str,
    main: list[int],
):
    if options["packing"] == "concat" and "shuffle" not in options and cuts != WHOLE:
        pytest.skip("joined documents are cut anew in each portion")
    cut_all(monkeypatch, *cuts)
    paths = [tmp_path / name for name in GOLDEN_FILES]
    for path, rows in zip(paths, GOLDEN_FILES.values(), strict=True):
        if path.suffix == ".parquet":
            write_parquet(path, rows, row_group_size=2)
        else:
            path.write_bytes(packed(path.name, plain_bytes(rows)))
    expected = texts.split()
    for bos in (False, True):
        fields = {"n_ctx": LENGTH + bos, "bos": bos, "sequences_per_shard": 4}
        sequences = open_corpus(paths, **fields, **options)
        assert texts_of(sequences) == ["|" * bos + text for text in expected]
    tokens = all_tokens(sequences)
    origins = all_origins(sequences)
    files = [Path(file).name for file in origins["file"]]
    places = list(zip(files, origins["row"], origins["offset"], strict=True))
    assert [f"{file[0]}:{row}+{offset}" for file, row, offset in places] == begins.split()
    assert origins["pile_set_name"] == [GOLDEN_FILES[file][row][1] for file, row, _ in places]
    assert origins["document"] == main
    assert sum(fates_of(sequences).all.values()) == 10
    assert fates_of(sequences).all.get("skipped", 0) == options.get("skip", 0)
    # Read alone and backwards, each shard is the same, whatever its size.
    for per_shard in (1, 3):
        scan = sequences.scan.model_copy(update={"sequences_per_shard": per_shard})
        for number in reversed(range(-(-len(expected) // per_shard))):
            alone = Sequences(scan, byte_model(), sequences.index).shard(number).tokens.tolist()
            assert alone == tokens[number * per_shard : (number + 1) * per_shard]
    few = open_corpus(paths, sequences=2, **options)
    assert texts_of(few) == expected[:2]


def test_every_token_of_a_portion_but_those_at_its_end_is_in_one_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut_all(monkeypatch, 300, 60)
    files = [[document(40 * i + j, 5 + (i + j) % 13) for j in range(40)] for i in range(3)]
    for i, rows in enumerate(files):
        path = tmp_path / f"{i}.jsonl{'.zst' * (i == 1)}"
        path.write_bytes(packed(path.name, plain_bytes(rows)))
    sequences = open_corpus(tmp_path / "*", "concat")
    index = sequences.index
    assert index is not None
    ends = [place.documents_before for place in index.places[1:]]
    documents = [row for rows in files for row in rows]
    portions = [documents[first:end] for first, end in pairwise([0, *ends])]
    assert len(portions) > 12
    assert all_tokens(sequences) == cut(portions, "concat")
    joined = sum(len(text.encode()) + 1 for text, _ in documents)
    assert index.unmeasured == joined - LENGTH * len(sequences)
    assert 0 < index.unmeasured < LENGTH * len(portions)
    # Rows count from the beginning of each file, wherever a range or a portion begins.
    origins = all_origins(sequences)
    names = [int(Path(file).name[0]) for file in origins["file"]]
    begins = list(zip(names, origins["row"], origins["pile_set_name"], strict=True))
    assert all(name == files[file][row][1] for file, row, name in begins)
    assert [max(row for file, row, _ in begins if file == i) for i in range(3)] == [39, 39, 39]


# What else is stored


@pytest.mark.parametrize(("packing", "used"), [("document", 5), ("concat", 3)])
def test_a_run_tells_of_its_corpus_up_to_its_last_sequence(tmp_path: Path, packing: str, used: int):
    lines = plain_bytes(document(i, 9) for i in range(16)).splitlines()
    lines[2], lines[13] = b"{", b"{}"
    path = write_lines(tmp_path / "a.jsonl", lines)
    fields = {"sequences_per_shard": 3, "bad_rows": 0.5}
    few = open_corpus(path, packing, sequences=5, **fields)
    # Another scan needs more of the corpus, and prepares it.
    everything = open_corpus(path, packing, **fields)
    again = open_corpus(path, packing, sequences=5, **fields)
    assert len(problems(everything)) == 2
    for sequences in (few, again):
        # Five documents, or those of 5 times 6 tokens, of which each document has 9 + 1.
        assert fates_of(sequences).all == {"used": used, "bad": 1}
        assert problems(sequences) == [f"{path}, line 3 (invalid JSON)"]
        assert all_tokens(sequences) == all_tokens(everything)[:5]
        assert [row for i in range(2) for row in sequences.shard(i).bad_rows] == problems(sequences)


def test_a_corpus_is_indexed_as_far_as_needed_with_a_few_numbers_a_portion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preparation, "PORTION_DOCUMENTS", 100)
    rows = [document(i, 9) for i in range(800)]
    path = write_jsonl(tmp_path / "0.jsonl", rows)
    sequences = open_corpus(path, sequences=550)
    assert sequences.index is not None
    assert len(sequences.index.portions) == 6
    assert len(pickle.dumps(sequences.index)) < 3000
    # The corpus is not read again.
    path.unlink()
    assert all_tokens(sequences) == cut([rows], "document")[:550]


def test_a_document_far_longer_than_a_sequence_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = "0123456789" * 20_000
    (tmp_path / "a.txt").write_text(text)
    fields = {"family": "text", "n_ctx": 100, "sequences_per_shard": 10}
    sequences = open_corpus(tmp_path / "a.txt", "concat", **fields)
    read: list[int] = []
    tokens = PortionFile.tokens

    def watched(file: PortionFile, start: int, stop: int) -> np.ndarray:
        read.append(stop - start)
        return tokens(file, start, stop)

    monkeypatch.setattr(PortionFile, "tokens", watched)
    assert sequences.shard(100).tokens.tolist() == [list(text[:100].encode())] * 10
    assert read == [1000]
