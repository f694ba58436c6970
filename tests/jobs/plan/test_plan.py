"""What `headcount plan` prints is what the scan then does, and a corpus is tokenised once."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import headcount
from headcount.jobs.corpus import estimate as corpus_estimate
from headcount.jobs.corpus.preparation import Preparation, corpora_of
from headcount.jobs.corpus.work import CorpusProgress
from headcount.jobs.plan.cost import Rehearsal
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.resources import JOB_ADDRESS, Device, Resources
from headcount.jobs.run import progress
from headcount.jobs.run.loop import run_to_end
from headcount.schemas.errors import ScanError
from headcount.schemas.scans.scan import parse_scan
from headcount.workers.memory import PeakMemory, available_cores, total_memory
from tests import ROOT
from tests.tools.processes import Command
from tests.toys import toy_models as toy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads bytes."""
    return toy.save_byte_model(tmp_path_factory.mktemp("plan") / "bytes")


def write_texts(path: Path, *texts: str) -> Path:
    """Write a file of documents."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def fields_of(model: Path, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A scan of the texts in a directory."""
    fields = {
        "model": str(model),
        "n_ctx": 8,
        "sequences": "all",
        "out": str(tmp_path / "runs"),
        "input": {"family": "pile", "files": str(tmp_path / "*.jsonl"), "packing": "concat"},
    }
    return fields | changes


def plan_and_progress(fields: dict[str, Any]) -> tuple[Plan, list[CorpusProgress]]:
    """A plan, and the progress of the preparation: none if nothing was tokenised."""
    progress_of_corpus: list[CorpusProgress] = []
    preparation = Preparation(watch=progress_of_corpus.append)
    return make_plan(parse_scan(fields), "toy", preparation=preparation), progress_of_corpus


# The tokens of a corpus


def test_scans_of_one_corpus_read_the_same_tokens(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", "What is planned", "is tokenised once", "")
    fields = fields_of(model, tmp_path)
    plan, corpus_progress = plan_and_progress(fields)
    assert (corpus_progress[-1].documents, corpus_progress[-1].tokens) == (3, 32)
    assert plan.sequences.fates is not None
    assert plan.sequences.fates.all == {"used": 2, "empty": 1}
    # The same again, or with other interventions, another length, another packing.
    for changes in (
        {},
        {"interventions": ["zero_query_bias"], "batch_size": 1},
        {"n_ctx": 4},
        {"input": fields["input"] | {"packing": "document"}},
    ):
        changed_plan, corpus_progress = plan_and_progress(fields | changes)
        assert corpus_progress == []
        assert changed_plan.bad_rows == []


@pytest.mark.parametrize("change", ["content", "name", "more", "tokenizer"])
def test_tokens_of_something_else_are_not_taken(model: Path, tmp_path: Path, change: str) -> None:
    file = write_texts(tmp_path / "a.jsonl", "abcdefgh", "ijklmnopqrst")
    fields = fields_of(model, tmp_path)
    plan_and_progress(fields)
    if change == "content":
        write_texts(file, "abcdefghi", "jklmnopqrst")
        os.utime(file, (1, 1))
    elif change == "name":
        file.rename(tmp_path / "b.jsonl")
    elif change == "more":
        write_texts(tmp_path / "b.jsonl", "uvwxyz")
    else:
        fields["model"] = str(shutil.copytree(model, tmp_path / "other"))
        tokenizer = tmp_path / "other" / "tokenizer.json"
        content = json.loads(tokenizer.read_text())
        content["normalizer"] = {"type": "Lowercase"}
        tokenizer.write_text(json.dumps(content))
    assert plan_and_progress(fields)[1]


def test_a_damaged_piece_is_prepared_again(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", "abcdefghijklmnop")
    fields = fields_of(model, tmp_path)
    plan_and_progress(fields)
    (file,) = (tmp_path / "runs" / "corpora").glob("*/*/*.documents.parquet")
    file.write_bytes(b"PAR1, and then the power went")
    assert plan_and_progress(fields)[1]


def test_tokens_lie_beside_the_runs_or_where_the_scan_says(model: Path, tmp_path: Path) -> None:
    fields = fields_of(model, tmp_path, out="s3://bucket/runs")
    assert str(corpora_of(parse_scan(fields))) == "s3://bucket/runs/corpora"
    fields["corpora"] = str(tmp_path / "tokens")
    assert corpora_of(parse_scan(fields)) == tmp_path / "tokens"


def test_a_preparation_prints_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    quick_console = Console(file=io.StringIO(), width=20)
    with progress.watch_index(quick_console) as watch:
        watch(CorpusProgress(1024, 250_000, 3, 0.25, 400_000.0, 125.0))
        watch(CorpusProgress(1, 500_000, 0, None, None, None, waiting=True))
    assert isinstance(quick_console.file, io.StringIO)
    assert quick_console.file.getvalue().splitlines() == [
        "preparing tokens: 1,024 documents, 250,000 tokens, 3 bad rows, 25%, 400,000 tokens/s, "
        "2 min 5 s left",
        "preparing tokens: 1 document, 500,000 tokens, waiting for another process that prepares "
        "the same texts",
    ]
    monkeypatch.setattr(progress, "QUIET_SECONDS", 10.0)
    slow_console = Console(file=io.StringIO())
    with progress.watch_index(slow_console) as watch:
        watch(CorpusProgress(1024, 250_000, 3, 0.25, 400_000.0, 125.0))
    assert isinstance(slow_console.file, io.StringIO)
    assert slow_console.file.getvalue() == ""


# The cost


def test_the_cost_is_that_of_the_scan(tmp_path: Path) -> None:
    fields = {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 12,
        "sequences": 96,
        "sequences_per_shard": 32,
        "batch_size": 16,
        "out": str(tmp_path),
        "input": {"family": "ngram_corrupt", "n": 4},
        "interventions": ["none", "patch_head(0,7)"],
        "curves": ["attention_by_lag"],
        "profiles": ["attention_by_lag"],
        "weight_statistics": ["query_bias_norm"],
    }
    plan = make_plan(parse_scan(fields), "toy")
    cost = Rehearsal(plan.scan, plan.info, "cpu").measure(plan)
    assert (cost.device, cost.measured_on, cost.batch_size) == ("cpu", "cpu", 16)
    assert [each.method.intervention for each in cost.interventions] == ["none", "patch_head(0,7)"]
    assert cost.seconds == sum(each.seconds for each in cost.interventions)
    for each in cost.interventions:
        assert each.seconds == pytest.approx(96 * 12 / each.tokens_per_second)
    assert list(tmp_path.iterdir()) == []  # It wrote nothing.

    prepare_run(plan, "")
    quiet = Console(file=io.StringIO())
    assert run_to_end(plan, Resources(replicas=0, device="cpu"), quiet) == []
    rows_written: Counter[str] = Counter()
    bytes_written: Counter[str] = Counter()
    for files_of_shard in plan.run.commit_log(["files"])["files"].to_pylist():
        for file in files_of_shard:
            rows_written[file["table"]] += file["rows"]
            bytes_written[file["table"]] += file["bytes"]
    assert {table.table: table.rows for table in cost.tables} == rows_written
    for table in cost.tables:
        assert table.bytes == pytest.approx(bytes_written[table.table], rel=0.25), table.table


def words_of_plan(tmp_path: Path, **fields: Any) -> list[str]:
    """Words of `headcount plan` for a scan in a file of its own."""
    scan = tmp_path / "toy.toml"
    input_fields = fields.pop("input")
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
    lines.append("[input]")
    lines += [f"{key} = {json.dumps(value)}" for key, value in input_fields.items()]
    scan.write_text("\n".join(lines))
    return ["plan", str(scan)]


def test_the_command_says_what_will_run_and_leaves_no_run(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", *["a text of some length "] * 200, "")
    fields = fields_of(model, tmp_path, interventions=["none", "zero_query_bias"])
    words = words_of_plan(tmp_path, **fields)
    environment = os.environ | {"COLUMNS": "120", "CUDA_VISIBLE_DEVICES": ""}
    process = Command(
        *words, "--device", "cuda", "--replicas", "4", environment=environment, directory=ROOT
    ).ended()
    assert (process.code, process.stderr) == (0, "")
    assert "cuda, float16x2_linears, 4 replicas" in process.stdout
    assert "This machine has no cuda" in process.stdout
    assert "measured on its cpu in float32" in process.stdout
    assert re.search(r"all .* about [\d.]+ ", process.stdout)
    assert "4,400 tokens of 201 documents are prepared" in process.stdout
    assert re.search(r"documents ┃ all ┃ used ┃ empty ┃", process.stdout)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["corpora"]
    assert plan_and_progress(fields)[1] == []
    here = Command(*words, environment=environment, directory=ROOT).ended()
    assert "cpu, float32, in this process" in here.stdout


@pytest.mark.parametrize(
    ("gpus", "device", "address", "replicas"),
    [
        (0, "auto", None, 0),
        (1, "auto", None, 1),
        (3, "auto", None, 3),
        (3, "cuda", None, 3),
        (3, "cpu", None, 0),
        (0, "auto", "192.0.2.10:6379", 1),
    ],
)
def test_replicas_that_nobody_counted_are_one_a_gpu_or_this_process(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    device: Device,
    address: str | None,
    replicas: int,
) -> None:
    monkeypatch.delenv(JOB_ADDRESS, raising=False)
    monkeypatch.setattr("headcount.jobs.resources.available_gpus", lambda: gpus)
    assert Resources.asked_for(None, 0, device, address).replicas == replicas
    assert Resources.asked_for(2, 0, device, address).replicas == 2
    # In a job, `address` is the one that Ray says.
    monkeypatch.setenv(JOB_ADDRESS, "192.0.2.10:6379")
    assert Resources.asked_for(None, 0, device, None).replicas == 1


def test_a_large_corpus_is_estimated_and_nothing_of_it_is_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_estimate, "SAMPLE_TOKENS", 2000)
    write_texts(tmp_path / "a.jsonl", *["a text of some length "] * 1000)
    result = CliRunner().invoke(
        headcount.app, words_of_plan(tmp_path, **fields_of(model, tmp_path))
    )
    assert result.exception is None
    words = " ".join(result.stdout.replace("│", " ").split())
    assert re.search(r"sequences about 3,2\d\d ", words)
    assert re.search(
        r"about 1,\d\d\d documents, 2[12],\d\d\d tokens \(from a sample of 2,0\d\d ", words
    )
    assert re.search(
        r"about 2[12],\d\d\d tokens to prepare: about [\d.]+ s on this machine, ", words
    )
    assert not (tmp_path / "runs").exists()


def test_a_scan_that_cannot_run_is_refused_before_anything_is_tokenised(tmp_path: Path) -> None:
    """Engine and precision are settled for the device that the user names, not for this one."""
    model = toy.save_model(tmp_path / "llama", toy.family("LlamaConfig", vocab_size=257))
    toy.byte_tokenizer(model)
    write_texts(tmp_path / "a.jsonl", *["a text of some length "] * 20)
    changes = {"interventions": ["swap_first_key(5)"], "precision": "float16x2_linears"}
    words = words_of_plan(tmp_path, **fields_of(model, tmp_path, bos=False, **changes))
    result = CliRunner().invoke(headcount.app, [*words, "--device", "cuda"])
    assert isinstance(result.exception, ScanError)
    (line,) = str(result.exception).splitlines()
    assert "swap_first_key(5) is measured by the dense engine" in line
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_help_names_the_device_and_the_replicas() -> None:
    printed = CliRunner().invoke(headcount.app, ["plan", "--help"]).output
    assert "--device" in printed
    assert "--replicas" in printed


# Memory


def test_the_peak_is_that_of_the_block_in_bytes() -> None:
    # A higher peak before the block must not count.
    earlier_array = np.ones(60_000_000, np.uint8)
    del earlier_array
    with PeakMemory("cpu") as idle_peak:
        pass
    with PeakMemory("cpu") as peak:
        large_array = np.ones(400_000_000, np.uint8)
        large_array[::4096] += 1  # Touch every page, or the system does not count it.
    del large_array
    growth = peak.main - idle_peak.main
    assert 350_000_000 < growth < 500_000_000
    with PeakMemory("cpu") as later_peak:
        pass
    assert later_peak.main < peak.main - 350_000_000, "an earlier peak is another one's"
    assert later_peak.main < total_memory()
    assert 1e8 < total_memory() < 1e14
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
