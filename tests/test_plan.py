"""What `headcount plan` prints is what the scan then does, and the corpus is tokenised once."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import headcount
from jobs import progress
from jobs.corpus_index import FOLDER, KeptIndex
from jobs.cost import Rehearsal
from jobs.plan import Plan, make_plan, prepare_run
from jobs.ray_cluster import Resources
from jobs.run_loop import run_to_end
from schemas.errors import ScanError
from schemas.places import StorePath, place
from schemas.scan import parse_scan
from tests import toy_models as toy
from workers.inputs.document_index import IndexProgress
from workers.memory import PeakMemory, available_cores, total_memory

ROOT = Path(__file__).parent.parent


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


def plan_and_progress(fields: dict[str, Any]) -> tuple[Plan, list[IndexProgress]]:
    """A plan, and the progress of the tokenising: none if the corpus was not tokenised."""
    index_progress: list[IndexProgress] = []
    return make_plan(parse_scan(fields), "toy", watch=index_progress.append), index_progress


def keep_index(plan: Plan) -> None:
    """Keep the plan's index beside the runs, as the command `plan` does."""
    kept_index = KeptIndex.of(plan.sequences, plan.run.path.parent)
    assert kept_index is not None
    kept_index.write(plan.sequences)


# The index that a plan keeps


def test_a_scan_reads_the_index_that_its_plan_kept(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", "What is planned", "is tokenised once", "")
    fields = fields_of(model, tmp_path)
    plan, index_progress = plan_and_progress(fields)
    assert [(p.documents, p.tokens, p.source, p.sources) for p in index_progress] == [(3, 32, 1, 1)]
    keep_index(plan)
    plan_again, index_progress = plan_and_progress(fields)
    assert index_progress == []
    assert plan.sequences.index is not None
    assert plan_again.sequences.index is not None
    for name in ("source", "row", "n_tokens", "problems"):
        np.testing.assert_array_equal(
            getattr(plan_again.sequences.index, name), getattr(plan.sequences.index, name)
        )
    assert plan_again.bad_rows == []
    assert plan_again.sequences.fates is not None
    assert plan_again.sequences.fates.all == {"used": 2, "empty": 1}
    # Other interventions, another family that packs the same: the same index.
    _, index_progress = plan_and_progress(
        fields | {"interventions": ["zero_query_bias"], "batch_size": 1}
    )
    assert index_progress == []


@pytest.mark.parametrize("change", ["content", "name", "more", "n_ctx", "packing", "tokenizer"])
def test_an_index_of_something_else_is_not_taken(model: Path, tmp_path: Path, change: str) -> None:
    file = write_texts(tmp_path / "a.jsonl", "abcdefgh", "ijklmnopqrst")
    fields = fields_of(model, tmp_path)
    plan, _ = plan_and_progress(fields)
    keep_index(plan)
    if change == "content":
        # As long as before, and written at the same time.
        times = os.stat(file)
        write_texts(file, "abcdefghi", "jklmnopqrst")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert os.stat(file).st_size == times.st_size
    elif change == "name":
        file.rename(tmp_path / "b.jsonl")
    elif change == "more":
        write_texts(tmp_path / "b.jsonl", "uvwxyz")
    elif change == "n_ctx":
        fields["n_ctx"] = 4
    elif change == "packing":
        fields["input"]["packing"] = "document"
    else:
        fields["model"] = str(shutil.copytree(model, tmp_path / "other"))
        tokenizer = tmp_path / "other" / "tokenizer.json"
        content = json.loads(tokenizer.read_text())
        content["normalizer"] = {"type": "Lowercase"}
        tokenizer.write_text(json.dumps(content))
    changed_plan, index_progress = plan_and_progress(fields)
    assert index_progress
    assert changed_plan.sequences.text_length == fields["n_ctx"] - 1


def test_an_index_of_the_first_files_does_not_depend_on_the_others(
    model: Path, tmp_path: Path
) -> None:
    write_texts(tmp_path / "a.jsonl", "abcdefghijklmnopqrstuvwxyz")
    write_texts(tmp_path / "b.jsonl", "0123456789")
    fields = fields_of(model, tmp_path, sequences=2)
    plan, index_progress = plan_and_progress(fields)
    assert [p.source for p in index_progress] == [1]
    keep_index(plan)
    write_texts(tmp_path / "b.jsonl", "9876543210")
    assert plan_and_progress(fields)[1] == []
    write_texts(tmp_path / "a.jsonl", "bacdefghijklmnopqrstuvwxyz")
    assert plan_and_progress(fields)[1]


def test_a_broken_index_is_made_anew(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", "abcdefghijklmnop")
    fields = fields_of(model, tmp_path)
    plan, _ = plan_and_progress(fields)
    keep_index(plan)
    (file,) = (tmp_path / "runs" / FOLDER).glob("*.parquet")
    file.write_bytes(b"PAR1, and then the power went")
    assert plan_and_progress(fields)[1]


def test_the_index_of_a_store_lies_in_the_store(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", "abcdefghijklmnop")
    plan, _ = plan_and_progress(fields_of(model, tmp_path))
    kept_index = KeptIndex.of(plan.sequences, place("s3://bucket/runs"))
    assert kept_index is not None
    assert isinstance(kept_index.file, StorePath)
    assert re.fullmatch(rf"s3://bucket/runs/{FOLDER}/\w{{12}}\.parquet", kept_index.file.url)


def test_synthetic_sequences_have_no_index(model: Path, tmp_path: Path) -> None:
    synthetic = {"sequences": 2, "input": {"family": "uniform_random"}}
    plan, _ = plan_and_progress(fields_of(model, tmp_path) | synthetic)
    assert KeptIndex.of(plan.sequences, plan.run.path.parent) is None


def test_tokenising_prints_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    quick_console = Console(file=io.StringIO(), width=20)
    with progress.watch_index(quick_console) as watch:
        watch(IndexProgress(1024, 250_000, 976, 4000, 1, 3))
        watch(IndexProgress(2048, 500_000, 1953, None, 1, 1))
    assert isinstance(quick_console.file, io.StringIO)
    assert quick_console.file.getvalue().splitlines() == [
        "tokenising: 1,024 documents, 250,000 tokens, 976 of 4,000 sequences, file 1 of 3",
        "tokenising: 2,048 documents, 500,000 tokens, 1,953 sequences",
    ]
    monkeypatch.setattr(progress, "QUIET_SECONDS", 10.0)
    slow_console = Console(file=io.StringIO())
    with progress.watch_index(slow_console) as watch:
        watch(IndexProgress(1024, 250_000, 976, 4000, 1, 3))
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
    for files_of_shard in plan.run.ledger(["files"])["files"].to_pylist():
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
    command_line = [
        sys.executable,
        "-m",
        "headcount",
        *words,
        "--device",
        "cuda",
        "--replicas",
        "4",
    ]
    env = os.environ | {"COLUMNS": "120", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        command_line, cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "cuda, float16x2_linears, 4 replicas" in process.stdout
    assert "This machine has no cuda" in process.stdout
    assert "measured on its cpu in float32" in process.stdout
    assert re.search(r"all .* about [\d.]+ ", process.stdout)
    assert "201 documents read, 4,400 tokens; index kept as" in process.stdout
    assert re.search(r"documents ┃ all ┃ used ┃ empty ┃", process.stdout)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [FOLDER]
    assert plan_and_progress(fields)[1] == []


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
