"""The tokens of a corpus are prepared once, as far as needed, here or on Ray.

Tokens are bytes here, so what must be in the store can be written down by hand.
"""

import contextlib
import io
import itertools
import json
import os
import pickle
import re
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from rich.console import Console

from headcount.jobs import bars
from headcount.jobs.corpus.preparation import CorpusWork, Preparation, corpora_of, prepare_here
from headcount.jobs.plan.plan import Plan, make_plan
from headcount.jobs.plan.resolved_scan import resolve
from headcount.jobs.resources import Resources
from headcount.schemas.errors import CorpusError, HeadcountError
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.token_store import open_portion
from headcount.workers.model.info.description import describe
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from tests.tools.processes import Ended
from tests.tools.workers import WORKER_PARENTS, joined_cluster
from tests.toys.commands import ended
from tests.toys.refusals import refused
from tests.toys.small_portions import cut_portions
from tests.toys.toy_corpora import fates_of


def write_texts(path: Path, *texts: str) -> Path:
    """Write a file of documents."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_corpus(directory: Path, files: int, documents: int) -> list[str]:
    """Write files of documents of 40 to 60 letters, no two alike; returns all texts in order."""
    texts = [
        f"{i // documents:02}:{i % documents:06} {'abcdefghij' * 5}"[: 40 + i % 21]
        for i in range(files * documents)
    ]
    for number in range(files):
        of_file = texts[number * documents : (number + 1) * documents]
        write_texts(directory / f"{number:02}.jsonl", *of_file)
    return texts


def fields_of(model: Path, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A scan of the texts in a directory. Options of its input are changed one by one."""
    input_fields = {"family": "pile", "files": str(tmp_path / "*.jsonl"), "packing": "concat"}
    fields = {"model": str(model), "n_ctx": 8, "sequences": "all", "out": str(tmp_path / "runs")}
    return fields | changes | {"input": input_fields | changes.pop("input", {})}


def scan_file(tmp_path: Path, fields: dict[str, Any]) -> str:
    """A file with a scan."""
    scalars, options = fields | {"input": None}, fields["input"]
    lines = [f"{key} = {json.dumps(value)}" for key, value in scalars.items() if value is not None]
    lines += ["[input]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
    path = tmp_path / "toy.toml"
    path.write_text("\n".join(lines))
    return str(path)


def sequences_of(fields: dict[str, Any]) -> Sequences:
    """The sequences of a scan, without an index."""
    scan = parse_scan(fields)
    return Sequences(scan, describe(Path(scan.model)))


def prepared(fields: dict[str, Any], *options: Any, **named: Any) -> SequenceIndex:
    """The index of a scan whose tokens are prepared."""
    sequences = sequences_of(fields)
    preparation = Preparation(*options, **named)
    return preparation.prepared(sequences, corpora_of(sequences.scan))


def tokens_of(index: SequenceIndex) -> list[int]:
    """All tokens that an index leads to."""
    files = [open_portion(index.store, portion) for portion in index.portions]
    return np.concatenate([file.tokens(0, file.record.tokens) for file in files]).tolist()


def portion_files(tmp_path: Path) -> set[Path]:
    """The committed portions."""
    return set((tmp_path / "runs" / "corpora").glob("*/*.parquet"))


def console() -> tuple[Console, io.StringIO]:
    """A console that prints a line for each portion, and what it has printed."""
    text = io.StringIO()
    return Console(file=text, width=20), text


@pytest.fixture(autouse=True)
def _talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "QUIET_SECONDS", 0.0)


def plan_and_progress(fields: dict[str, Any]) -> tuple[Plan, list[str]]:
    """A plan, and what the preparation says: nothing if nothing was tokenised."""
    shown, text = console()
    plan = make_plan(parse_scan(fields), "toy", preparation=Preparation(console=shown))
    return plan, text.getvalue().splitlines()


# Once


def test_scans_of_one_corpus_read_the_same_tokens(model: Path, tmp_path: Path):
    write_texts(tmp_path / "a.jsonl", "What is planned", "is tokenised once", "")
    fields = fields_of(model, tmp_path)
    plan, said = plan_and_progress(fields)
    assert said[-1].startswith("preparing tokens: 3 documents, 32 tokens, 100%, ")
    assert fates_of(plan.sequences).all == {"used": 2, "empty": 1}
    # The same again, or with other interventions, another length, another packing.
    for changes in (
        {},
        {"interventions": ["zero_query_bias"], "batch_size": 1},
        {"n_ctx": 4},
        {"input": fields["input"] | {"packing": "document"}},
    ):
        assert plan_and_progress(fields | changes)[1] == []
    # Another text, even of the same length, is tokenised.
    write_texts(tmp_path / "a.jsonl", "What is planned", "is tokenised anew", "")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert plan_and_progress(fields)[1]


def test_a_tokenizer_that_was_sent_reads_special_tokens_as_text(model: Path):
    tokenizer = sequences_of(fields_of(model, model)).tokenizer
    sent: TextTokenizer = pickle.loads(pickle.dumps(tokenizer))
    text = "a<|endoftext|>b"
    assert sent.encode(text) == tokenizer.encode(text) == list(text.encode())
    assert sent.fingerprint == tokenizer.fingerprint


# As far as needed


def test_a_scan_of_few_sequences_prepares_few_portions(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut_portions(monkeypatch, letters=20_000)
    write_corpus(tmp_path, 3, 1000)
    assert len(prepared(fields_of(model, tmp_path, sequences=4))) == 4
    (first_portion,) = portion_files(tmp_path)
    # More sequences go on behind that portion.
    shown, text = console()
    index = prepared(fields_of(model, tmp_path, sequences=6000), console=shown)
    assert len(index) == 6000
    assert portion_files(tmp_path) > {first_portion}
    assert 48_000 < index.tokens < 48_000 + 2 * 20_000
    words = rf"preparing tokens: {index.documents:,} documents, {index.tokens:,} tokens, 100%, "
    assert text.getvalue().splitlines()[-1].startswith(words)
    # Documents that come first are not taken, so more are needed.
    options = {"skip": 1500, "packing": "document"}
    assert len(prepared(fields_of(model, tmp_path, sequences=4, input=options))) == 4
    assert len(portion_files(tmp_path)) < 7
    # Any document of a shuffled corpus may come first.
    assert len(prepared(fields_of(model, tmp_path, sequences=4, input={"shuffle": 1}))) > 4
    assert len(portion_files(tmp_path)) == 8


@pytest.mark.long
def test_tasks_prepare_portions_and_one_of_them_is_killed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut_portions(monkeypatch, file_bytes=20_000)
    texts = write_corpus(tmp_path, 3, 3000)
    fields = fields_of(model, tmp_path)
    killed: list[int] = []

    def kill_a_task() -> None:
        """Kill the first task that is seen at work when there are portions."""
        while not killed:
            for process in WORKER_PARENTS[0].children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    at_work = "prepare_on_node" in " ".join(process.cmdline())
                    if at_work and portion_files(tmp_path):
                        process.kill()
                        killed.append(process.pid)
                        return
            time.sleep(0.02)

    with joined_cluster(num_cpus=1):
        resources = Resources(1, 1, "cpu")
        shown, text = console()
        Thread(target=kill_a_task, daemon=True).start()
        index = prepared(fields, resources, shown, ray_bytes=0)
        assert killed
        assert tokens_of(index) == list("".join(texts).encode())
        last = text.getvalue().splitlines()[-1]
        assert re.search(rf": {len(texts):,} documents, .* 100%", last)

        # What no node can do is one line, and what was prepared stays.
        committed = portion_files(tmp_path)
        more = write_texts(tmp_path / "03.jsonl", "a")
        other = sequences_of(fields)
        assert other.corpus is not None
        more.unlink()
        told = refused(
            CorpusError, Preparation(resources, ray_bytes=0).prepared, other, corpora_of(other.scan)
        )
        assert re.fullmatch(r".*03\.jsonl: .+", told)
        assert portion_files(tmp_path) == committed

        # For a scan in this process Ray prepares and is ended.
        fields["corpora"] = str(tmp_path / "again")
        index = prepared(fields, replace(resources, replicas=0, ray_prepares=True), ray_bytes=0)
        assert index.documents == len(texts)
        assert not ray.is_initialized()


# What is said


def corpus(*words: str) -> Ended:
    """`headcount corpus …`, as it ends."""
    return ended("corpus", *words)


def test_tokens_lie_beside_the_runs_or_where_the_scan_says(model: Path, tmp_path: Path):
    write_corpus(tmp_path, 2, 100)
    (tmp_path / "runs").write_text("no directory")
    told = refused(HeadcountError, prepared, fields_of(model, tmp_path))
    assert str(tmp_path / "runs") in told
    fields = fields_of(model, tmp_path, out="s3://bucket/runs")
    assert str(corpora_of(parse_scan(fields))) == "s3://bucket/runs/corpora"
    fields["corpora"] = str(tmp_path / "tokens")
    assert corpora_of(parse_scan(fields)) == tmp_path / "tokens"


def test_a_preparation_says_how_far_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut_portions(monkeypatch, letters=500)
    write_texts(tmp_path / "a.jsonl", *["x" * 99] * 10)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{\n")
    fields = fields_of(model, tmp_path, bad_rows=0.5)
    scan = parse_scan(fields)
    lines: list[str] = []
    # Every look at the clock is a second after the last one.
    seconds = itertools.count()
    work = CorpusWork(
        resolve(scan).sequences,
        corpora_of(scan),
        lambda words, _: lines.append(words),
        clock=lambda: float(next(seconds)),
    )
    work.store.create()
    work.show()
    prepare_here(work)
    assert work.is_done
    first, *_, last = lines
    assert first == "0 documents, 0 tokens, 0%"
    second = r"6 documents, 594 tokens, \d\d%, \d+ tokens/s, [\d.]+ s left"
    assert any(re.fullmatch(second, line) for line in lines)
    assert re.fullmatch(r"11 documents, 990 tokens, 1 bad row, 100%, .*, 0.0 s left", last)
    # It takes less time than a line is waited for by default.
    monkeypatch.undo()
    assert plan_and_progress(fields | {"corpora": str(tmp_path / "again")})[1] == []


def test_the_commands_list_show_and_remove_what_is_prepared(model: Path, tmp_path: Path):
    texts = write_corpus(tmp_path, 2, 50)
    with (tmp_path / "01.jsonl").open("a") as file:
        file.write("{\n")
    fields = fields_of(model, tmp_path, bad_rows=0.1)
    done = corpus("prepare", scan_file(tmp_path, fields), "--replicas", "0")
    assert done.code == 0
    folder = Path(done.stdout.strip())
    assert folder.parent == tmp_path / "runs" / "corpora"
    assert re.search(
        r"101 documents, [\d,]+ tokens, 1 bad row, 6 tokens at portions' ends ", done.stderr
    )
    assert tokens_of(prepared(fields)) == list("".join(texts).encode())
    corpora = str(folder.parent)
    listed = corpus("list", corpora).stdout
    assert corpus("list", str(tmp_path / "runs")).stdout == listed
    assert re.search(rf"{folder.name}  \w{{8}}, tokenizers [\d.]+  text  101 +[\d,]+ +1 ", listed)
    shown = corpus("show", folder.name[:6], "--corpora", corpora).stdout
    assert re.search(r"00\.jsonl +[\d.]+ kB +50 +[\d,]+ +0 +0 +whole\n", shown)
    assert re.search(r"01\.jsonl, line 51 \(.+\)\n", shown)
    removal = ("remove", folder.name, "--corpora", corpora)
    assert corpus(*removal).code == 2
    assert folder.is_dir()
    assert corpus(*removal, "--yes").code == 0
    assert not folder.exists()
