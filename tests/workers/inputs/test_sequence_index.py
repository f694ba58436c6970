"""Sequences do not depend on how a corpus is cut into portions and pieces, nor on what lies in the
token store beside what a scan needs.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.workers.inputs.corpus.sequence_reader import moved_sequence
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store import portions, preparation
from headcount.workers.model.files.model_info import ModelInfo
from tests.toys.toy_corpora import (
    LENGTH,
    Row,
    all_origins,
    all_tokens,
    as_json,
    byte_info,
    cut,
    document,
    make_index,
    open_corpus,
    problems,
    write_jsonl,
    write_lines,
)  # fmt: skip
from tests.toys.toy_models import toy_scan

CUTS = [(1 << 20, 1 << 20, 1 << 20), (250, 7, 3)]
"""Bytes of a portion, tokens of a piece, documents of a piece."""


@pytest.fixture(scope="session")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return byte_info(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(params=CUTS, ids=lambda cuts: "-".join(map(str, cuts)))
def cuts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every corpus of a test in one way."""
    range_bytes, piece_tokens, piece_documents = request.param
    monkeypatch.setattr(portions, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(preparation, "PIECE_TOKENS", piece_tokens)
    monkeypatch.setattr(preparation, "PIECE_DOCUMENTS", piece_documents)


def random_files(seed: int) -> list[list[Row]]:
    """Files of documents of random lengths, many of them empty and one longer than any piece."""
    rng = np.random.default_rng(seed)
    lengths = [rng.choice([0, 1, 3, 6, 7, 13, 40], size) for size in (10, 1, 12, 4)]
    numbers = iter(range(1000))
    return [[document(next(numbers), int(length)) for length in file] for file in lengths]


def expected_cut(files: list[list[Row]], packing: str) -> list[list[int]]:
    """The sequences of some files. Documents without a token are followed by no separator."""
    return cut([[row for row in rows if row[0]] for rows in files], packing)


def main_documents(files: list[list[Row]], packing: str) -> list[int]:
    """The document with most tokens of each sequence, the first of equal ones."""
    first = np.cumsum([0, *map(len, files)])
    numbers = [[first[i] + row for row in range(len(rows))] for i, rows in enumerate(files)]
    if packing == "document":
        return [
            number
            for rows, own in zip(files, numbers, strict=True)
            for (text, _), number in zip(rows, own, strict=True)
            if len(text.encode()) >= LENGTH
        ]
    found: list[int] = []
    for rows, own in zip(files, numbers, strict=True):
        # Whose each token is; None is a separator.
        owners: list[int | None] = []
        for (text, _), number in zip(rows, own, strict=True):
            owners += [*[number] * len(text.encode()), *[None] * bool(text)]
        for start in range(0, len(owners) - LENGTH + 1, LENGTH):
            counts = Counter(one for one in owners[start : start + LENGTH] if one is not None)
            # Of equal counts, the first that was met.
            found.append(counts.most_common(1)[0][0])
    return found


def write_files(path: Path, files: list[list[Row]]) -> Path:
    for i, rows in enumerate(files):
        write_jsonl(path / f"{i}.jsonl", rows)
    return path / "*.jsonl"


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_pieces_of_any_size_make_the_same_sequences(
    tmp_path: Path, info: ModelInfo, packing: str, cuts: None
):
    files = random_files(1)
    sequences = open_corpus(info, write_files(tmp_path, files), packing, sequences_per_shard=4)
    expected = expected_cut(files, packing)
    assert all_tokens(sequences) == expected
    # Read alone and backwards, each shard is the same.
    for number in reversed(range(sequences.shards)):
        alone = Sequences(sequences.scan, info, sequences.index)
        assert alone.shard(number).tokens.tolist() == expected[4 * number : 4 * number + 4]
    origins = all_origins(sequences)
    assert origins["document"] == main_documents(files, packing)
    for file, row, offset, part, tokens in zip(
        *(origins[name] for name in ("file", "row", "offset", "pile_set_name")),
        expected,
        strict=True,
    ):
        text, pile_set_name = files[int(Path(file).stem)][row]
        ids = list(text.encode())
        assert tokens[: len(ids) - offset] == ids[offset : offset + LENGTH]
        assert part == pile_set_name


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_chosen_documents_are_the_same_however_they_are_stored(
    tmp_path: Path, info: ModelInfo, packing: str, cuts: None
):
    files = random_files(2)
    pattern = write_files(tmp_path, files)
    chosen = [[row for row in rows if row[1] == "ArXiv"] for rows in files]
    where = {"pile_set_name": "ArXiv"}
    assert all_tokens(open_corpus(info, pattern, packing, where=where)) == expected_cut(
        chosen, packing
    )
    first_file = chosen[0]
    assert len(first_file) > 2
    sequences = open_corpus(info, pattern, packing, where=where, skip=2)
    assert all_tokens(sequences) == expected_cut([first_file[2:], *chosen[1:]], packing)
    assert sequences.fates is not None
    assert sequences.fates.all["skipped"] == 2
    assert sum(sequences.fates.all.values()) == sum(len(rows) for rows in files)


def test_the_shuffled_order_does_not_depend_on_the_pieces(
    tmp_path: Path, info: ModelInfo, cuts: None
):
    files = random_files(3)
    pattern = write_files(tmp_path, files)
    sequences = open_corpus(info, pattern, "concat", shuffle=4, sequences_per_shard=3)
    rows = [row for rows in files for row in rows]
    order = np.random.default_rng([4, 872307057]).permutation(len(rows))
    shuffled = [rows[i] for i in order]
    assert all_tokens(sequences) == expected_cut([shuffled], "concat")
    skipped = open_corpus(info, pattern, "document", shuffle=4, skip=9)
    assert all_tokens(skipped) == expected_cut([shuffled[9:]], "document")


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_what_a_run_says_of_its_corpus_ends_with_its_last_sequence(
    tmp_path: Path, info: ModelInfo, packing: str, cuts: None
):
    rows = [document(i, 9) for i in range(40)]
    lines = [line.encode() for line in as_json(rows)]
    lines[5] = b"{"
    lines[30] = b"{}"
    path = write_lines(tmp_path / "a.jsonl", lines)
    few = open_corpus(info, path, packing, sequences=12, sequences_per_shard=5, bad_rows=0.5)
    # Another scan needs more of the corpus, and prepares it.
    everything = open_corpus(info, path, packing, sequences_per_shard=5, bad_rows=0.5)
    again = open_corpus(info, path, packing, sequences=12, sequences_per_shard=5, bad_rows=0.5)
    used = {"document": 13, "concat": 8}[packing]
    for sequences in (few, again):
        assert sequences.fates is not None
        # Documents 0 to 12, or 0 to 8, without the bad one: 12 times 6 tokens of 10 a document.
        assert sequences.fates.all == {"used": used - 1 + (packing == "concat"), "bad": 1}
        assert problems(sequences) == [f"{path}, line 6 (invalid JSON)"]
        assert all_tokens(sequences) == all_tokens(everything)[:12]
        bad_rows = [row for i in range(3) for row in sequences.shard(i).bad_rows]
        assert bad_rows == problems(sequences)
    assert len(problems(everything)) == 2


@pytest.mark.parametrize("packing", ["document", "concat"])
def test_a_changed_corpus_is_compared_sequence_by_sequence(
    tmp_path: Path, info: ModelInfo, packing: str, cuts: None
):
    files = random_files(5)
    pattern = write_files(tmp_path, files)
    before = open_corpus(info, pattern, packing)
    total = len(before)
    # Documents behind the others change nothing of what was there.
    write_jsonl(tmp_path / "3.jsonl", [*files[3], *[document(i, 13) for i in range(5)]])
    longer = open_corpus(info, pattern, packing)
    assert len(longer) > total
    assert moved_sequence(before.reader, longer.reader, range(total)) is None
    # Another text in the second document that has tokens in a sequence of the third file.
    changed = [*files[2]]
    number = next(i for i, (text, _) in enumerate(changed) if i > 3 and len(text) > 12)
    changed[number] = ("z" * len(changed[number][0].encode()), changed[number][1])
    write_jsonl(tmp_path / "2.jsonl", changed)
    moved = open_corpus(info, pattern, packing)
    reason = moved_sequence(before.reader, moved.reader, range(total))
    assert reason is not None
    assert reason.startswith(f"{tmp_path}/2.jsonl, line {number + 1} is another text")
    # Until the text, nothing differs.
    same = expected_cut(files[:2], packing)
    assert moved_sequence(before.reader, moved.reader, range(len(same))) is None


def test_a_document_far_longer_than_a_sequence_is_not_read_whole(
    tmp_path: Path, info: ModelInfo, monkeypatch: pytest.MonkeyPatch
):
    from headcount.workers.inputs.corpus import document_block

    text = "0123456789" * 100_000
    (tmp_path / "a.txt").write_text(text)
    sequences = open_corpus(
        info, tmp_path / "a.txt", "concat", family="text", n_ctx=100, sequences_per_shard=10
    )
    read: list[int] = []
    read_tokens = document_block.read_tokens

    def watched(store: Any, piece: Any, start: int, stop: int) -> np.ndarray:
        read.append(stop - start)
        return read_tokens(store, piece, start, stop)

    monkeypatch.setattr(document_block, "read_tokens", watched)
    assert sequences.shard(500).tokens.tolist() == [list(text[:100].encode())] * 10
    assert read == [1000]


def test_an_index_has_a_few_numbers_for_each_piece(tmp_path: Path, info: ModelInfo):
    import pickle

    rows = [document(i, 40) for i in range(3000)]
    sequences = Sequences(
        toy_scan(
            bos=False,
            n_ctx=LENGTH,
            sequences="all",
            input={"family": "pile", "files": str(write_jsonl(tmp_path / "a.jsonl", rows))},
        ),
        info,
    )
    make_index(sequences)
    assert len(pickle.dumps(sequences.index)) < 3000
