"""The tokens of a corpus are prepared once, as far as needed, and whoever is killed goes on.

Tokens are bytes here, so what must be in the store can be written down by hand.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from typer.testing import CliRunner

import headcount
from headcount.jobs.corpus import estimate as corpus_estimate
from headcount.jobs.corpus import preparation as corpus_preparation
from headcount.jobs.corpus import work as corpus_work
from headcount.jobs.corpus.estimate import estimate_corpus
from headcount.jobs.corpus.preparation import corpora_of, prepare
from headcount.jobs.corpus.work import CorpusProgress, CorpusWork
from headcount.jobs.plan.resolved_scan import resolve
from headcount.jobs.resources import Resources
from headcount.schemas.errors import CorpusError, HeadcountError, RunError, ScanError
from headcount.schemas.scans.scan import parse_scan
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store import portions
from headcount.workers.inputs.store.preparation import prepare_portion
from headcount.workers.inputs.store.token_store import read_tokens
from headcount.workers.model.files.model_info import describe
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from tests import PILE_MINI
from tests.tools.processes import Command
from tests.tools.workers import joined_cluster
from tests.toys import toy_models as toy
from tests.toys.toy_models import BYTE_BOS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads bytes."""
    return toy.save_byte_model(tmp_path_factory.mktemp("prepared") / "bytes")


def texts_of(number: int, documents: int) -> list[str]:
    """Texts of 40 to 60 letters, no two of them alike."""
    return [f"{number:02}:{i:06} {'abcdefghij' * 5}"[: 40 + i % 21] for i in range(documents)]


def write_corpus(directory: Path, files: int, documents: int) -> list[str]:
    """Write files of documents; returns all texts in order."""
    directory.mkdir(exist_ok=True)
    texts: list[str] = []
    for number in range(files):
        texts_of_file = texts_of(number, documents)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts_of_file)
        (directory / f"{number:02}.jsonl").write_text(lines)
        texts += texts_of_file
    return texts


def fields_of(model: Path, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A scan of the corpus in a directory."""
    files = str(tmp_path / "texts" / "*.jsonl")
    return {
        "model": str(model),
        "n_ctx": 8,
        "sequences": "all",
        "out": str(tmp_path / "runs"),
        "input": {"family": "pile", "files": files, "packing": "concat"},
    } | changes


def sequences_of(fields: dict[str, Any]) -> Sequences:
    """The sequences of a scan, without an index."""
    scan = parse_scan(fields)
    return Sequences(scan, describe(Path(scan.model)))


def scan_file(tmp_path: Path, fields: dict[str, Any]) -> Path:
    """A file with a scan."""
    input_fields = fields["input"]
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items() if key != "input"]
    lines += ["[input]", *(f"{key} = {json.dumps(value)}" for key, value in input_fields.items())]
    path = tmp_path / "scan.toml"
    path.write_text("\n".join(lines))
    return path


def tokens_of(index: SequenceIndex) -> list[int]:
    """All tokens that an index leads to."""
    parts = [read_tokens(index.store, piece, 0, piece.tokens) for piece in index.pieces]
    return np.concatenate(parts).tolist()


def piece_files(tmp_path: Path) -> set[Path]:
    """The committed pieces."""
    return set((tmp_path / "runs" / "corpora").glob("*/*/*.documents.parquet"))


# Killed, and going on


def test_a_preparation_that_is_killed_goes_on_behind_its_last_piece(
    model: Path, tmp_path: Path
) -> None:
    texts = write_corpus(tmp_path / "texts", 2, 3000)
    fields = fields_of(model, tmp_path)
    command = Command(
        *("corpus", "prepare", scan_file(tmp_path, fields), "--replicas", "0"),
        environment=os.environ,
        directory=tmp_path,
        constants={"headcount.workers.inputs.store.preparation.PIECE_TOKENS": 8000},
    )
    deadline = time.monotonic() + 60
    while len(piece_files(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    (process,) = multiprocessing.active_children()
    process.kill()
    assert command.ended().code == -signal.SIGKILL
    left = {path: path.stat().st_mtime_ns for path in piece_files(tmp_path)}
    assert 3 <= len(left) < 37
    sequences = sequences_of(fields)
    index = prepare(sequences, corpora_of(sequences.scan))
    assert left.items() <= {path: path.stat().st_mtime_ns for path in piece_files(tmp_path)}.items()
    assert tokens_of(index) == list("".join(texts).encode())
    # The separators between documents belong to the sequences and not to the store.
    sequences.use_index(index)
    sequences.scan = sequences.scan.model_copy(update={"bos": False})
    joined = [token for text in texts[:3000] for token in [*text.encode(), BYTE_BOS]]
    assert index.sequences > len(joined) // 7
    assert sequences.reader.read(0, 100)[0].reshape(-1).tolist() == joined[:700]


# On Ray


@pytest.fixture
def started_ray() -> Iterator[Resources]:
    """Ray on this machine, with one core."""
    with joined_cluster(num_cpus=1):
        yield Resources(1, 1, "cpu")


def test_ray_prepares_for_a_scan_in_this_process_and_is_ended(
    model: Path, tmp_path: Path, started_ray: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_preparation, "LEAST_TOKENS_ON_RAY", 0)
    monkeypatch.setattr(corpus_preparation, "_InThisProcess", None)
    texts = write_corpus(tmp_path / "texts", 1, 40)
    sequences = sequences_of(fields_of(model, tmp_path))
    resources = replace(started_ray, replicas=0, ray_prepares=True)
    index = prepare(sequences, corpora_of(sequences.scan), resources)
    assert index.documents == len(texts)
    assert not ray.is_initialized()


def test_tasks_prepare_portions_and_one_of_them_is_killed(
    model: Path, tmp_path: Path, started_ray: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_preparation, "LEAST_TOKENS_ON_RAY", 0)
    monkeypatch.setattr(portions, "RANGE_BYTES", 100_000)
    texts = write_corpus(tmp_path / "texts", 3, 3000)
    sequences = sequences_of(fields_of(model, tmp_path))
    progress: list[CorpusProgress] = []
    killed: list[int] = []

    def watch(now: CorpusProgress) -> None:
        progress.append(now)
        if killed:
            return
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "prepare_on_node" in " ".join(process.cmdline()):
                    process.kill()
                    killed.append(process.pid)
                    return

    index = prepare(sequences, corpora_of(sequences.scan), started_ray, watch)
    assert killed
    assert tokens_of(index) == list("".join(texts).encode())
    assert (progress[-1].documents, progress[-1].share) == (len(texts), 1.0)

    # What no node can do is one line, and what was prepared stays.
    committed = piece_files(tmp_path)
    (tmp_path / "texts" / "03.jsonl").write_text('{"text": "a"}\n')
    other = sequences_of(fields_of(model, tmp_path))
    assert other.corpus is not None
    (tmp_path / "texts" / "03.jsonl").unlink()
    with pytest.raises(CorpusError) as refusal:
        prepare(other, corpora_of(other.scan), started_ray)
    assert re.fullmatch(r".*03\.jsonl: [^\n]+", str(refusal.value))
    assert piece_files(tmp_path) == committed


# As far as needed


def test_a_scan_of_few_sequences_tokenises_little(model: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", 3, 4000)
    few = sequences_of(fields_of(model, tmp_path, sequences=4))
    index = prepare(few, corpora_of(few.scan))
    assert index.sequences >= 4
    tokens = sum(piece.tokens for piece in index.pieces)
    assert tokens < 2 * corpus_work.LEAST_TOKENS
    first_piece = piece_files(tmp_path)
    assert len(first_piece) == 1
    # More sequences go on behind that piece.
    more = sequences_of(fields_of(model, tmp_path, sequences=20_000))
    progress: list[CorpusProgress] = []
    index = prepare(more, corpora_of(more.scan), watch=progress.append)
    assert index.sequences == 20_000
    assert piece_files(tmp_path) > first_piece
    assert 160_000 < progress[-1].tokens < 200_000
    # Documents that come first are not taken, so more are needed.
    skipping = fields_of(model, tmp_path, sequences=4)
    skipping["input"] = skipping["input"] | {"skip": 9000, "packing": "document"}
    skipped = sequences_of(skipping)
    index = prepare(skipped, corpora_of(skipped.scan))
    assert index.sequences == 4


def test_few_sequences_of_many_portions_are_few_orders(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "RANGE_BYTES", 50_000)
    write_corpus(tmp_path / "texts", 2, 4000)
    few = sequences_of(fields_of(model, tmp_path, sequences=4))
    work = CorpusWork(few, corpora_of(few.scan))
    assert len(work.portions) > 8
    orders = work.orders()
    assert [order.number for order in orders] == [0, 1]
    assert all((order.most_tokens or 0) < 2 * corpus_work.LEAST_TOKENS for order in orders)
    everything = sequences_of(fields_of(model, tmp_path))
    work = CorpusWork(everything, corpora_of(everything.scan))
    assert [order.number for order in work.orders()] == [*range(len(work.portions))]
    # Any document of a shuffled corpus may come first.
    shuffled = fields_of(model, tmp_path, sequences=4)
    shuffled["input"] = shuffled["input"] | {"shuffle": 1}
    work = CorpusWork(sequences_of(shuffled), corpora_of(everything.scan))
    assert len(work.orders()) == len(work.portions)


def test_an_estimate_is_near_what_the_corpus_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not PILE_MINI.exists():
        pytest.skip("shared/data/pile-mini is not there")
    monkeypatch.setattr(corpus_estimate, "SAMPLE_TOKENS", 1 << 18)
    fields = {
        "model": "bundled:gpt2-mini",
        "n_ctx": 256,
        "sequences": "all",
        "out": str(tmp_path),
        "input": {"family": "pile", "files": str(PILE_MINI / "*.zst"), "packing": "document"},
    }
    sequences = resolve(parse_scan(fields)).sequences
    estimate = estimate_corpus(sequences, tmp_path / "corpora")
    assert estimate is not None
    assert not (tmp_path / "corpora").exists()
    index = prepare(sequences, tmp_path / "corpora")
    assert estimate.sampled_tokens < index.tokens / 30
    assert estimate.tokens == pytest.approx(index.tokens, rel=0.1)
    assert estimate.documents == pytest.approx(index.documents, rel=0.1)
    assert estimate.sequences == pytest.approx(index.sequences, rel=0.1)
    assert estimate_corpus(sequences, tmp_path / "corpora") is None


# Bad input


def test_what_cannot_be_prepared_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "texts", 2, 100)
    (tmp_path / "runs").write_text("no directory")
    sequences = sequences_of(fields_of(model, tmp_path))
    with pytest.raises(HeadcountError) as refusal:
        prepare(sequences, corpora_of(sequences.scan))
    assert str(tmp_path / "runs") in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ScanError, match=r"corpora: expected a directory that can be written"):
        parse_scan(fields_of(model, tmp_path, corpora=" "))
    with pytest.raises(ScanError, match=r"corpora: expected a directory that holds corpora"):
        parse_scan(fields_of(model, tmp_path, corpora="runs/run_id=a"))
    synthetic = fields_of(model, tmp_path, sequences=2, input={"family": "uniform_random"})
    words = ["corpus", "prepare", str(scan_file(tmp_path, synthetic))]
    result = CliRunner().invoke(headcount.app, words)
    assert isinstance(result.exception, ScanError)
    assert "uniform_random reads no corpus, so there is nothing to pre" in str(result.exception)


def test_a_file_that_changes_between_listing_and_reading_is_not_committed(
    model: Path, tmp_path: Path
) -> None:
    texts = write_corpus(tmp_path / "texts", 2, 100)
    sequences = sequences_of(fields_of(model, tmp_path))
    work = CorpusWork(sequences, corpora_of(sequences.scan))
    assert len(work.portions) == 1
    (tmp_path / "texts" / "01.jsonl").write_text('{"text": "another one"}\n')
    with pytest.raises(CorpusError, match=r"01\.jsonl: .*changed"):
        prepare_portion(work.store, work.portions[0], sequences.tokenizer)
    assert not piece_files(tmp_path)
    sequences = sequences_of(fields_of(model, tmp_path))
    index = prepare(sequences, corpora_of(sequences.scan))
    assert tokens_of(index) == list("".join([*texts[:100], "another one"]).encode())


def test_a_tokenizer_that_was_sent_reads_special_tokens_as_text(model: Path) -> None:
    tokenizer = sequences_of(fields_of(model, model)).tokenizer
    sent: TextTokenizer = pickle.loads(pickle.dumps(tokenizer))
    text = "a<|endoftext|>b"
    assert sent.encode(text) == tokenizer.encode(text) == list(text.encode())
    assert sent.fingerprint == tokenizer.fingerprint


# Commands


def test_the_commands_list_show_and_remove_what_is_prepared(model: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", 2, 50)
    with (tmp_path / "texts" / "01.jsonl").open("a") as file:
        file.write("{\n")
    fields = fields_of(model, tmp_path, bad_rows=0.1)
    runner = CliRunner()
    words = ["corpus", "prepare", str(scan_file(tmp_path, fields)), "--replicas", "0"]
    prepared = runner.invoke(headcount.app, words)
    assert prepared.exception is None
    folder = Path(prepared.stdout.strip())
    assert folder.parent == tmp_path / "runs" / "corpora"
    assert re.search(r"101 documents, [\d,]+ tokens, 1 bad row, in ", prepared.stderr)
    corpora = str(folder.parent)
    listed = runner.invoke(headcount.app, ["corpus", "list", corpora]).stdout
    assert re.search(rf"{folder.name}  \w{{8}}, tokenizers [\d.]+  text  101 +[\d,]+ +1 ", listed)
    shown = runner.invoke(
        headcount.app, ["corpus", "show", folder.name[:6], "--corpora", corpora]
    ).stdout
    assert re.search(r"00\.jsonl +[\d.]+ kB +50 +[\d,]+ +0 +whole\n", shown)
    assert re.search(r"01\.jsonl, line 51 \(.+\)\n", shown)
    removal = ["corpus", "remove", folder.name, "--corpora", corpora]
    refused = runner.invoke(headcount.app, removal)
    assert isinstance(refused.exception, RunError)
    assert folder.is_dir()
    assert runner.invoke(headcount.app, [*removal, "--yes"]).exception is None
    assert not folder.exists()
    # A directory without stores, and none at all.
    for place in (corpora, str(tmp_path / "nowhere")):
        nothing = runner.invoke(headcount.app, ["corpus", "list", place])
        assert isinstance(nothing.exception, CorpusError)
        assert str(nothing.exception).startswith(f"{place}: no token store here; ")
