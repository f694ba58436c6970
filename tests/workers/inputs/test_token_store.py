"""The token store: the same tokens, whoever prepares and is killed, and no damage is read."""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from headcount.schemas.errors import CorpusError, RunError
from headcount.schemas.places import place
from headcount.workers.inputs.corpus.documents import Reading, Source
from headcount.workers.inputs.store.extents import Extent, extents_of, sources_now
from headcount.workers.inputs.store.preparation import damaged_portions, is_whole, prepare_extent
from headcount.workers.inputs.store.stored_corpora import (
    remove_corpus,
    store_folder,
    stored_corpora,
    stored_corpus,
    stored_files,
)
from headcount.workers.inputs.store.token_store import (
    Portion,
    TokenStore,
    forget_open_files,
    open_portion,
)
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from tests.toys.object_stores import object_store
from tests.toys.refusals import refused
from tests.toys.small_portions import cut_portions
from tests.toys.toy_corpora import packed, write_parquet
from tests.toys.toy_models import byte_tokenizer

READING = Reading(fields=("meta.year",))

TEXTS = [f"text {i} ä " * (i % 7) for i in range(100)]
"""Some are empty. One letter of each repetition has two bytes."""

LETTERS = 300
"""Letters of a portion in these tests."""


class CountingTokenizer(TextTokenizer):
    """A tokenizer of bytes that notes what it tokenises, and may be slow."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(byte_tokenizer(folder), 257)
        self.pause = 0.0
        self.texts: list[str] = []

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        time.sleep(self.pause * len(texts))
        self.texts += texts
        return super().encode_many(texts)


@dataclass
class Corpus:
    """Sources that are not prepared yet."""

    store: TokenStore
    tokenizer: CountingTokenizer
    extents: list[Extent]

    @property
    def folder(self) -> Path:
        """Where the portions lie."""
        assert isinstance(self.store.folder, Path)
        return self.store.folder

    def prepare(self) -> list[Portion]:
        """Prepare what is missing; returns all portions."""
        for extent in self.extents:
            list(prepare_extent(self.store, extent, self.tokenizer))
            assert is_whole(self.store.portions()[extent.key])
        return self.portions()

    def portions(self) -> list[Portion]:
        """The committed portions, in the order of the corpus."""
        there = self.store.portions()
        return [
            portion
            for extent in self.extents
            for _, portion in sorted(there.get(extent.key, {}).items())
        ]

    def rows(self) -> list[tuple[int, int, str | None]]:
        """Number of the source, row and text of every document; None if it is bad."""
        rows: list[tuple[int, int, str | None]] = []
        for extent in self.extents:
            for _, portion in sorted(self.store.portions()[extent.key].items()):
                table = open_portion(self.store, portion).documents()
                ends = np.cumsum(np.maximum(table["n_tokens"].to_numpy(), 0)).tolist()
                tokens = open_portion(self.store, portion).tokens(0, ends[-1] if ends else 0)
                for row, part in zip(table.to_pylist(), np.split(tokens, ends[:-1]), strict=False):
                    text = None if row["problem"] else part.astype(np.uint8).tobytes().decode()
                    rows.append((extent.first_source + row["source"], row["row"], text))
        return rows

    def files(self) -> dict[str, bytes]:
        """The content of every file of the store."""
        return {file.name: file.read_bytes() for file in self.folder.iterdir()}


def lines_of(texts: list[str]) -> bytes:
    rows = [
        {"text": text, "meta": {"pile_set_name": "Greek", "year": 1900 + i}}
        for i, text in enumerate(texts)
    ]
    return b"".join(b"%s\n" % json.dumps(row).encode() for row in rows)


def source_of(path: Path, kind: str = "jsonl") -> Source:
    return Source(kind, str(path), path.stat().st_size)


def corpus_of(folder: Path, *sources: Source, reading: Reading = READING) -> Corpus:
    tokenizer = CountingTokenizer(folder / "tokenizer")
    store = TokenStore.of(folder / "corpora", tokenizer, reading)
    store.create()
    return Corpus(store, tokenizer, extents_of(sources))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Texts in one compressed file, which has several portions."""
    file = tmp_path / "texts.jsonl.zst"
    file.write_bytes(packed(file.name, lines_of(TEXTS)))
    return corpus_of(tmp_path, source_of(file))


@pytest.fixture(autouse=True)
def _small_portions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Portions, row groups and batches of little; nothing stays open between tests."""
    cut_portions(monkeypatch, letters=LETTERS, letters_at_once=100, group_tokens=64)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    yield
    forget_open_files()


# Portions


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_a_file_becomes_portions_that_hold_all_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    texts: list[str | None] = [*TEXTS]
    rows = [*range(100)]
    if name == "a.parquet":
        write_parquet(tmp_path / name, [(text, None) for text in TEXTS], row_group_size=40)
    else:
        lines = lines_of(TEXTS).split(b"\n")
        lines[7:7] = [b"{", b"", b'{"text": 3}', b" \t"]
        (tmp_path / name).write_bytes(packed(name, b"\n".join(lines)))
        texts[7:7], rows = [None, None], [*range(8), 9, *range(11, 104)]
    source = source_of(tmp_path / name, name.split(".")[1])
    for letters, size in ((LETTERS, 500), (1 << 20, 1 << 20)):
        cut_portions(monkeypatch, letters=letters, file_bytes=size)
        corpus = corpus_of(tmp_path / str(letters), source)
        # A packed file is read by one worker, from its beginning.
        is_cut = letters == LETTERS
        has_ranges = is_cut and source.can_be_entered
        assert (len(corpus.extents) > 1) == has_ranges
        portions = corpus.prepare()
        assert (len(portions) > 5) == is_cut
        assert corpus.tokenizer.texts == TEXTS
        assert [text for _, _, text in corpus.rows()] == texts
        # A row of a range counts from its beginning.
        assert has_ranges or [row for _, row, _ in corpus.rows()] == rows
        # A document more than the letters of a portion at most.
        for portion in portions:
            assert open_portion(corpus.store, portion).record.tokens < 2 * (letters + 100)


def test_small_files_are_read_together_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cut_portions(monkeypatch, file_bytes=100, files=5)
    lengths = [30, 30, 0, 30, 200, 10, 10, 10, 10, 10, 10, 0, 90, 15]
    sources: list[Source] = []
    for number, length in enumerate(lengths):
        (tmp_path / f"{number:02}.txt").write_text("t" * length)
        sources.append(source_of(tmp_path / f"{number:02}.txt", "text"))
    corpus = corpus_of(tmp_path, *sources, reading=Reading())
    assert [(e.first_source, len(e.sources), e.bytes) for e in corpus.extents] == [
        (0, 4, 90), (4, 1, 200), (5, 5, 50), (10, 3, 100), (13, 1, 15),
    ]  # fmt: skip
    assert len(corpus.prepare()) == 5
    assert corpus.rows() == [(i, 0, "t" * length) for i, length in enumerate(lengths)]
    assert extents_of([]) == []


def test_the_key_of_an_extent_says_what_is_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut_portions(monkeypatch, file_bytes=4000)
    monkeypatch.chdir(tmp_path)

    def keys(name: str, content: bytes, changed: int = 7) -> list[str]:
        Path(name).write_bytes(content)
        os.utime(name, ns=(changed, changed))
        return [extent.key for extent in extents_of([source_of(Path(name))])]

    lines = lines_of(TEXTS)
    same = [keys(name, lines) for name in ("a.jsonl", "./a.jsonl", str(tmp_path / "a.jsonl"))]
    assert same == [same[0]] * 3
    others = [keys("a.jsonl", lines, 8), keys("a.jsonl", lines + b"\n"), keys("b.jsonl", lines)]
    assert len({key for found in [same[0], *others] for key in found}) == 4 * len(same[0])


def test_documents_keep_what_was_read_of_them(corpus: Corpus):
    portions = corpus.prepare()
    rows = [row for p in portions for row in open_portion(corpus.store, p).documents().to_pylist()]
    (source,) = corpus.extents[0].sources
    for i, document in enumerate(source.documents(READING)):
        del rows[i]["offset"]
        assert rows[i] == {
            "source": 0, "row": i, "n_tokens": len(TEXTS[i].encode()),
            "content": document.content_hash, "pile_set_name": "Greek", "problem": None,
            "field:meta.year": str(1900 + i),
        }  # fmt: skip
    # Other programs read the tokens, too.
    files = f"{corpus.folder}/*.parquet"
    of_one = duckdb.execute(
        f"SELECT tokens FROM '{files}' WHERE \"field:meta.year\" = 1903"
    ).fetchall()
    assert of_one == [(list(TEXTS[3].encode()),)]


def test_any_range_of_tokens_is_read_and_the_callers_own(corpus: Corpus):
    portion = corpus.prepare()[1]
    file = open_portion(corpus.store, portion)
    first = open_portion(corpus.store, corpus.prepare()[0]).record.tokens
    expected = np.frombuffer("".join(TEXTS).encode(), np.uint8)[first:][: file.record.tokens]
    for start in (0, 1, 63, 64, 65, 250, len(expected) - 1, len(expected)):
        for length in (0, 1, 64, 130, 640):
            stop = min(start + length, len(expected))
            tokens = open_portion(corpus.store, portion).tokens(start, stop)
            assert tokens.tolist() == expected[start:stop].tolist()
            assert tokens.dtype == np.uint16
            # What was read before must not change by this.
            tokens += 1


# Who prepares, and what is lost


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_preparation_goes_on_behind_its_last_portion(
    corpus: Corpus, tmp_path: Path, kills: int
):
    alone = replace(corpus, store=replace(corpus.store, folder=tmp_path / corpus.store.key))
    alone.store.create()
    alone.prepare()
    rng = random.Random(kills)
    corpus.tokenizer.pause = 0.004
    context = multiprocessing.get_context("fork")
    for _ in range(kills):
        process = context.Process(target=corpus.prepare)
        process.start()
        time.sleep(rng.uniform(0.05, 0.25))
        process.kill()
        process.join(60)
        # What is there is whole, and the first of all documents.
        texts = [text for _, _, text in corpus.rows()] if corpus.portions() else []
        assert texts == TEXTS[: len(texts)]
    there = len(texts)
    assert there or kills < 5
    corpus.tokenizer.texts = []
    corpus.prepare()
    # Only what was not committed is tokenised again.
    assert corpus.tokenizer.texts == TEXTS[there:]
    kept = {name: content for name, content in corpus.files().items() if name[0] != "."}
    assert kept == alone.files()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_that_prepare_at_once_write_the_same(corpus: Corpus, tmp_path: Path):
    alone = replace(corpus, store=replace(corpus.store, folder=tmp_path / corpus.store.key))
    alone.store.create()
    alone.prepare()
    corpus.tokenizer.pause = 0.001
    processes = [multiprocessing.get_context("fork").Process(target=corpus.prepare) for _ in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert corpus.files() == alone.files()


def test_a_portion_that_is_gone_is_prepared_alone(corpus: Corpus):
    portions = corpus.prepare()
    files = corpus.files()
    corpus.store.forget([portions[0], portions[3]])
    corpus.tokenizer.texts = []
    assert corpus.prepare() == portions
    assert corpus.files() == files
    assert 2 < len(corpus.tokenizer.texts) < 40


def test_a_file_that_changes_while_it_is_read_commits_nothing(corpus: Corpus):
    file = Path(corpus.extents[0].sources[0].path)
    committing = prepare_extent(corpus.store, corpus.extents[0], corpus.tokenizer)
    next(committing)
    os.utime(file, ns=(0, 0))
    assert "texts.jsonl.zst: changed while it was read" in refused(CorpusError, list, committing)
    assert len(corpus.portions()) == 1
    # The changed file is another extent, prepared from its beginning.
    corpus.extents = extents_of([source_of(file)])
    corpus.prepare()
    assert [text for _, _, text in corpus.rows()] == TEXTS


def test_what_lies_before_a_broken_place_is_kept(tmp_path: Path):
    broken = tmp_path / "texts.csv"
    broken.write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS) + '"no end')
    corpus = corpus_of(tmp_path, source_of(broken, "csv"))
    for _ in range(2):
        with pytest.raises(CorpusError, match="not CSV"):
            corpus.prepare()
    # The portion that was read together with the broken row is lost.
    assert 80 < len(corpus.rows()) < 100


def test_without_room_one_line_and_nothing_half_written(corpus: Corpus):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
        told = refused(RunError, corpus.prepare)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal_before)
    assert re.search("cannot be written .*; free space", told)
    assert list(corpus.files()) == ["store.json"]
    corpus.prepare()


def test_what_is_read_and_who_reads_it_make_the_key_of_a_store(tmp_path: Path):
    tokenizer = CountingTokenizer(tmp_path / "a")
    readings = [READING, Reading(), Reading("body"), Reading(before=" ")]
    stores = [TokenStore.of(tmp_path, tokenizer, reading) for reading in readings]
    other = CountingTokenizer(tmp_path / "b")
    assert TokenStore.of(tmp_path, other, READING) == stores[0]
    file = tmp_path / "b" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|end|>"))
    stores.append(TokenStore.of(tmp_path, TextTokenizer(file.parent, 257), READING))
    assert len({store.key for store in stores}) == 5


@pytest.mark.parametrize("change", [{"format": 1}, {"reading": 5}, {"more": 1}])
def test_a_store_of_another_version_is_refused(corpus: Corpus, change: dict[str, Any]):
    file = corpus.folder / "store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    told = refused(RunError, corpus.store.create)
    assert re.search(
        r"store.json: not the description of a token store \(.*bring back a copy",
        told,
    )


# Damage


def test_a_flipped_bit_is_found_or_changes_nothing(corpus: Corpus):
    store, portion = corpus.store, corpus.prepare()[0]
    file = open_portion(store, portion)
    documents, tokens = file.documents(), file.tokens(0, file.record.tokens).tolist()
    path = corpus.folder / portion.file_name
    content = path.read_bytes()
    found = 0
    damaged = [
        content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        for at in range(0, len(content), 23)
    ]
    damaged += [content[: len(content) // 2], b"", content[:-1]]
    for damage in damaged:
        path.write_bytes(damage)
        forget_open_files()
        try:
            is_same = open_portion(store, portion).documents().equals(documents)
            is_same &= open_portion(store, portion).tokens(0, len(tokens)).tolist() == tokens
        except CorpusError:
            found += 1
        else:
            assert is_same
    assert found > len(damaged) / 2
    path.unlink()
    forget_open_files()
    with pytest.raises(CorpusError, match="not there; run the same command, which prepares it"):
        open_portion(store, portion).tokens(0, 1)


def test_a_portion_is_not_taken_for_another(corpus: Corpus):
    first, second, *_ = corpus.prepare()
    shutil.copy(corpus.folder / second.file_name, corpus.folder / first.file_name)
    forget_open_files()
    with pytest.raises(CorpusError, match="holds other documents"):
        open_portion(corpus.store, first).tokens(0, 1)


def test_verification_finds_texts_and_files_that_differ(tmp_path: Path):
    file = tmp_path / "texts.jsonl"
    file.write_bytes(lines_of(TEXTS))
    corpus = corpus_of(tmp_path, source_of(file))
    (extent,) = corpus.extents
    portions = corpus.prepare()
    assert damaged_portions(corpus.store, extent) == {}
    # A bit of the tokens.
    path = corpus.folder / portions[2].file_name
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    damages = damaged_portions(corpus.store, extent)
    assert list(damages) == portions[2:3]
    assert damages[portions[2]].startswith(f"{path}: cannot be read (")
    # Another text of the same size at the same time.
    times = file.stat()
    file.write_text(file.read_text().replace("text 50 ", "test 50 "))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    damages = damaged_portions(corpus.store, extent)
    assert f"{file}, line 51: is not what was tokenised" in damages.values()
    assert len(damages) == 2
    corpus.store.forget(damages)
    corpus.prepare()
    assert [text for _, _, text in corpus.rows()] == [
        text.replace("text 50 ", "test 50 ") for text in TEXTS
    ]
    for lines, what in [
        (TEXTS[:-1], ", line 100: is not there any more"),
        ([*TEXTS, "more"], ", line 101: was not there when the corpus was tokenised"),
    ]:
        file.write_bytes(lines_of(lines).replace(b"text 50 ", b"test 50 "))
        assert list(damaged_portions(corpus.store, extent).values()) == [f"{file}{what}"]


# Lists, and stores of objects


def test_lists_what_is_stored_and_what_was_left_out_of_each_file(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"text": "abc"}\n\n{"text": 5}\n{"text": ""}\n')
    large = tmp_path / "large.jsonl"
    large.write_bytes(lines_of(TEXTS) + b"{\n")
    cut_portions(monkeypatch, file_bytes=4000)
    of_texts = corpus.extents
    corpus.extents = of_texts + extents_of([source_of(bad), source_of(large)])
    portions = corpus.prepare()
    assert len(corpus.extents) > 3
    corpora, key = corpus.folder.parent, corpus.store.key
    [stored] = stored_corpora(corpora)
    assert (stored.key, stored.store, stored.problem) == (key, corpus.store, None)
    assert (stored.documents, stored.bad) == (204, 2)
    tokens = len("".join(TEXTS).encode())
    assert stored.tokens == 2 * tokens + 3
    assert stored.bytes == sum(map(len, corpus.files().values()))
    assert stored.changed is not None
    corpus.store.forget(portions[3 : len(corpus.store.portions()[of_texts[0].key])])
    files = {Path(file.name).name: file for file in stored_files(corpora / key)}
    counts = [(name, f.documents, f.bad, f.empty, f.whole) for name, f in files.items()]
    assert counts[:2] == [("bad.jsonl", 3, 1, 1, True), ("large.jsonl", 101, 1, 15, True)]
    assert files["texts.jsonl.zst"].whole is False
    assert files["large.jsonl"].tokens == tokens
    assert files["bad.jsonl"].problems == [f"{bad}, line 3 (text is int, expected a string)"]
    offset = large.read_bytes().index(b"\n{\n") + 2
    assert files["large.jsonl"].problems == [f"{large}, byte {offset:,} (invalid JSON)"]
    (corpus.folder / portions[0].file_name).write_bytes(b"")
    assert f"{portions[0].file_name}: cannot be read" in str(stored_corpus(corpora / key).problem)
    (corpus.folder / "store.json").write_text("{")
    assert "not the description" in str(stored_corpus(corpora / key).problem)
    with pytest.raises(RunError, match=f"did you mean '{key}'"):
        store_folder(corpora, key[:-1] + "_")
    remove_corpus(store_folder(corpora, key[:6]))
    assert stored_corpora(corpora) == []


def test_a_store_of_objects_holds_the_same_and_is_asked_little(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    corpus.prepare()
    files, rows = corpus.files(), corpus.rows()
    with object_store(monkeypatch) as server:
        corpora = place("s3://bucket/corpora")
        corpus.store = replace(corpus.store, folder=corpora / corpus.store.key)
        corpus.store.create()
        portions = corpus.prepare()
        assert corpus.rows() == rows
        assert {portion.file_name for portion in portions} == files.keys() - {"store.json"}
        assert [stored.documents for stored in stored_corpora(corpora)] == [100]
        forget_open_files()
        server.clear()
        for start in range(250):
            open_portion(corpus.store, portions[0]).tokens(start, start + 1)
        open_portion(corpus.store, portions[0]).documents()
        assert len(server.requests()) <= 2
        # Sources in a store are listed once, and read by ranges.
        for number in range(20):
            path = f"/bucket/small/{number:02}.jsonl"
            assert server.request("PUT", path, b'{"text": "abc"}\n' * number)[0] == 200
        server.clear()
        sources = [
            Source("jsonl", f"s3://bucket/small/{number:02}.jsonl", 0) for number in range(20)
        ]
        assert [state.bytes for state in sources_now(sources)] == [16 * i for i in range(20)]
        assert len([request for request in server.requests() if "list-type" in str(request)]) == 1
        cut_portions(monkeypatch, file_bytes=100)
        corpus.extents = extents_of(sources[-2:])
        assert len(corpus.extents) == 3 + 4
        corpus.prepare()
        assert len(corpus.rows()) == 18 + 19
        remove_corpus(corpora / corpus.store.key)
        assert stored_corpora(corpora) == []
