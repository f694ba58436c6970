"""What `headcount plan` says of a scan is what the scan then does, and its tokenising is not done
twice.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
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


def planned(fields: dict[str, Any]) -> tuple[Plan, list[IndexProgress]]:
    """A plan, and what was said while the corpus was tokenised: nothing if it was not."""
    seen: list[IndexProgress] = []
    return make_plan(parse_scan(fields), "toy", watch=seen.append), seen


def keep(plan: Plan) -> None:
    kept = KeptIndex.of(plan.sequences, plan.run.path.parent)
    assert kept is not None
    kept.write(plan.sequences)


# The index that a plan keeps


def test_a_scan_reads_the_index_that_its_plan_kept(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", "What is planned", "is tokenised once", "")
    fields = fields_of(model, tmp_path)
    plan, seen = planned(fields)
    assert [(p.documents, p.tokens, p.source, p.sources) for p in seen] == [(3, 32, 1, 1)]
    keep(plan)
    again, seen = planned(fields)
    assert seen == []
    assert plan.sequences.index is not None
    assert again.sequences.index is not None
    for name in ("source", "row", "n_tokens", "problems"):
        np.testing.assert_array_equal(
            getattr(again.sequences.index, name), getattr(plan.sequences.index, name)
        )
    assert again.bad_rows == []
    assert again.sequences.fates is not None
    assert again.sequences.fates.all == {"used": 2, "empty": 1}
    # Other interventions, another family that packs the same: the same index.
    _, seen = planned(fields | {"interventions": ["zero_query_bias"], "batch_size": 1})
    assert seen == []


@pytest.mark.parametrize("change", ["content", "name", "more", "n_ctx", "packing", "tokenizer"])
def test_an_index_of_something_else_is_not_taken(model: Path, tmp_path: Path, change: str) -> None:
    file = write_texts(tmp_path / "a.jsonl", "abcdefgh", "ijklmnopqrst")
    fields = fields_of(model, tmp_path)
    plan, _ = planned(fields)
    keep(plan)
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
    changed, seen = planned(fields)
    assert seen
    assert (changed.sequences.text_length, len(changed.sequences)) == (
        fields["n_ctx"] - 1,
        len(changed.sequences),
    )


def test_an_index_of_the_first_files_does_not_depend_on_the_others(
    model: Path, tmp_path: Path
) -> None:
    write_texts(tmp_path / "a.jsonl", "abcdefghijklmnopqrstuvwxyz")
    write_texts(tmp_path / "b.jsonl", "0123456789")
    fields = fields_of(model, tmp_path, sequences=2)
    plan, seen = planned(fields)
    assert [p.source for p in seen] == [1]
    keep(plan)
    write_texts(tmp_path / "b.jsonl", "9876543210")
    assert planned(fields)[1] == []
    write_texts(tmp_path / "a.jsonl", "bacdefghijklmnopqrstuvwxyz")
    assert planned(fields)[1]


def test_a_broken_index_is_made_anew(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", "abcdefghijklmnop")
    fields = fields_of(model, tmp_path)
    plan, _ = planned(fields)
    keep(plan)
    (file,) = (tmp_path / "runs" / FOLDER).glob("*.parquet")
    file.write_bytes(b"PAR1, and then the power went")
    assert planned(fields)[1]


def test_the_index_of_a_store_lies_in_the_store(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", "abcdefghijklmnop")
    plan, _ = planned(fields_of(model, tmp_path))
    kept = KeptIndex.of(plan.sequences, place("s3://bucket/runs"))
    assert kept is not None
    assert isinstance(kept.file, StorePath)
    assert re.fullmatch(rf"s3://bucket/runs/{FOLDER}/\w{{12}}\.parquet", kept.file.url)


def test_synthetic_sequences_have_no_index(model: Path, tmp_path: Path) -> None:
    synthetic = {"sequences": 2, "input": {"family": "uniform_random"}}
    plan, _ = planned(fields_of(model, tmp_path) | synthetic)
    assert KeptIndex.of(plan.sequences, plan.run.path.parent) is None


def test_tokenising_is_a_quiet_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    said = Console(file=io.StringIO(), width=20)
    with progress.watch_index(said) as watch:
        watch(IndexProgress(1024, 250_000, 976, 4000, 1, 3))
        watch(IndexProgress(2048, 500_000, 1953, None, 1, 1))
    assert isinstance(said.file, io.StringIO)
    assert said.file.getvalue().splitlines() == [
        "tokenising: 1,024 documents, 250,000 tokens, 976 of 4,000 sequences, file 1 of 3",
        "tokenising: 2,048 documents, 500,000 tokens, 1,953 sequences",
    ]
    monkeypatch.setattr(progress, "QUIET_SECONDS", 10.0)
    silent = Console(file=io.StringIO())
    with progress.watch_index(silent) as watch:
        watch(IndexProgress(1024, 250_000, 976, 4000, 1, 3))
    assert isinstance(silent.file, io.StringIO)
    assert silent.file.getvalue() == ""


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
    assert [c.method.intervention for c in cost.interventions] == ["none", "patch_head(0,7)"]
    assert cost.seconds == sum(c.seconds for c in cost.interventions)
    assert all(
        c.seconds == pytest.approx(96 * 12 / c.tokens_per_second) for c in cost.interventions
    )
    assert list(tmp_path.iterdir()) == []  # It wrote nothing.

    prepare_run(plan, "")
    quiet = Console(file=io.StringIO())
    assert run_to_end(plan, Resources(replicas=0, device="cpu"), quiet) == []
    files = [f for files in plan.run.ledger(["files"])["files"].to_pylist() for f in files]
    written: dict[str, tuple[int, int]] = {}
    for file in files:
        rows, size = written.get(file["table"], (0, 0))
        written[file["table"]] = (rows + file["rows"], size + file["bytes"])
    assert {c.table: c.rows for c in cost.tables} == {t: rows for t, (rows, _) in written.items()}
    for table in cost.tables:
        assert table.bytes == pytest.approx(written[table.table][1], rel=0.25), table.table


def command(tmp_path: Path, **fields: Any) -> list[str]:
    """Words of `headcount plan` for a scan in a file of its own."""
    scan = tmp_path / "toy.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items() if key != "input"]
    lines += ["[input]", *(f"{k} = {json.dumps(v)}" for k, v in fields["input"].items())]
    scan.write_text("\n".join(lines))
    return ["plan", str(scan)]


def test_the_command_says_what_will_run_and_leaves_no_run(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", *["a text of some length "] * 200, "")
    fields = fields_of(model, tmp_path, interventions=["none", "zero_query_bias"])
    words = command(tmp_path, **fields)
    call = [sys.executable, "-m", "headcount", *words, "--device", "cuda", "--replicas", "4"]
    env = os.environ | {"COLUMNS": "120", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(call, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cuda, float16x2_linears, 4 replicas" in done.stdout
    assert "This machine has no cuda" in done.stdout
    assert "measured on its cpu in float32" in done.stdout
    assert re.search(r"all .* about [\d.]+ ", done.stdout)
    assert "201 documents read, 4,400 tokens; index kept as" in done.stdout
    assert re.search(r"documents ┃ all ┃ used ┃ empty ┃", done.stdout)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [FOLDER]
    assert planned(fields)[1] == []


def test_what_cannot_run_is_refused_before_anything_is_tokenised(tmp_path: Path) -> None:
    """The engine and the precision are settled for the device that is asked for."""
    model = toy.save_model(tmp_path / "llama", toy.family("LlamaConfig", vocab_size=257))
    toy.byte_tokenizer(model)
    write_texts(tmp_path / "a.jsonl", *["a text of some length "] * 20)
    changes = {"interventions": ["swap_first_key(5)"], "precision": "float16x2_linears"}
    words = command(tmp_path, **fields_of(model, tmp_path, bos=False, **changes))
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
    before = np.ones(60_000_000, np.uint8)
    del before
    with PeakMemory("cpu") as nothing:
        pass
    with PeakMemory("cpu") as something:
        held = np.ones(400_000_000, np.uint8)
        held[::4096] += 1
    del held
    grown = something.main - nothing.main
    assert 350_000_000 < grown < 500_000_000
    with PeakMemory("cpu") as after:
        pass
    assert after.main < something.main - 350_000_000, "an earlier peak is another one's"
    assert after.main < total_memory()
    assert 1e8 < total_memory() < 1e14
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
