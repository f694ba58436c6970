"""What `headcount plan` prints is what the scan then does."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from headcount.jobs.plan.cost import Rehearsal, replicas_at_once
from headcount.jobs.plan.plan import make_plan
from headcount.jobs.plan.resolved_scan import resolve
from headcount.jobs.resources import JOB_ADDRESS, Device, Resources
from headcount.schemas.errors import ScanError
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.memory import available_cores, peak_memory, total_memory
from headcount.workers.replica import Replica
from tests.jobs.plan.test_corpus_preparation import (
    fields_of,
    plan_and_progress,
    scan_file,
    write_texts,
)
from tests.tools.processes import Ended
from tests.toys import toy_models as toy
from tests.toys.commands import ended
from tests.toys.runs_here import run_here
from tests.toys.small_portions import cut_portions


def test_the_cost_is_that_of_the_scan(tmp_path: Path):
    fields = {
        "model": "bundled:attn-only-2l-mini", "n_ctx": 12, "sequences": 96,
        "sequences_per_shard": 32, "batch_size": 16, "out": str(tmp_path),
        "input": {"family": "ngram_corrupt", "n": 4}, "interventions": ["none", "patch_head(0,7)"],
        "curves": ["attention_by_lag"], "profiles": ["attention_by_lag"],
        "weight_statistics": ["query_bias_norm"],
    }  # fmt: skip
    plan = make_plan(parse_scan(fields), "toy")
    cost = Rehearsal(plan.scan, plan.info, "cpu").measure(plan)
    assert (cost.device, cost.measured_on, cost.batch_size) == ("cpu", "cpu", 16)
    assert [each.method.intervention for each in cost.interventions] == ["none", "patch_head(0,7)"]
    assert cost.seconds == sum(each.seconds for each in cost.interventions)
    for each in cost.interventions:
        assert each.seconds == pytest.approx(96 * 12 / each.tokens_per_second)
    assert list(tmp_path.iterdir()) == []  # It wrote nothing.

    run_here(plan, Replica)
    rows_written: Counter[str] = Counter()
    files = [file for commit in plan.run.commits() for file in commit.files]
    for file in files:
        rows_written[file.table] += file.rows
    bytes_written = sum(file.bytes for file in files)
    assert cost.rows == rows_written
    # A batch is half of a shard, so its files have twice as many footers for their rows.
    assert bytes_written < cost.bytes < 2 * bytes_written


def plan(scan: str, *options: str) -> Ended:
    """`headcount plan`, as it ends."""
    return ended("plan", scan, *options, columns=120)


def have_gpus(patch: pytest.MonkeyPatch, gpus: int) -> None:
    """Let this machine have so many GPUs."""
    patch.setattr("headcount.jobs.resources.available_gpus", lambda: gpus)


def test_the_command_says_what_will_run_and_leaves_no_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # A machine without GPUs.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    have_gpus(monkeypatch, 0)
    write_texts(tmp_path / "a.jsonl", *["a text of some length "] * 200, "")
    fields = fields_of(model, tmp_path, interventions=["none", "zero_query_bias"])
    scan = scan_file(tmp_path, fields)
    done = plan(scan, "--device", "cuda", "--replicas", "4")
    assert (done.code, done.stderr) == (0, "")
    for words in (
        r"cuda, float16x2_linears, 4 replicas", r"This machine has no cuda",
        r"measured on its cpu in float32",
        # The time of another device is no time of this one.
        r"none +│ [\d,]+ tokens/s, fused", r"all +│ not known here",
        r"4,400 tokens of 201 documents are prepared", r"documents ┃ all ┃ used ┃ empty ┃",
    ):  # fmt: skip
        assert re.search(words, done.stdout), words
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["corpora"]
    assert plan_and_progress(fields)[1] == []
    assert "cpu, float32, in this process" in plan(scan).stdout


def test_what_a_plan_measures_is_told_while_it_is_measured(tmp_path: Path):
    fields = {
        "model": "bundled:attn-only-2l-mini", "n_ctx": 8, "sequences": 64, "batch_size": 16,
        "sequences_per_shard": 32, "out": str(tmp_path), "statistics": ["sink_mass"],
        "interventions": ["none", "zero_head(0,1)"], "input": {"family": "uniform_random"},
    }  # fmt: skip
    plan = make_plan(parse_scan(fields), "toy")
    told: list[str] = []
    alone = Rehearsal(plan.scan, plan.info, "cpu").measure(plan, told.append)
    passes = [f"pass {number} of 16 sequences at a time" for number in (1, 2, 3)]
    names = "none (1 of 2)", "zero_head(0,1) (2 of 2)"
    steps = [words for words in told if not words.endswith("%")]
    assert steps == [f"{name}: {words}" for name in names for words in passes]
    # Replicas that share the cores of a machine are no faster than the cores.
    assert replicas_at_once("cpu", 16) == min(16, available_cores())
    half = alone.of_sequences(64, 32)
    assert half.seconds == pytest.approx(alone.seconds / 2)
    assert half.rows["heads"] * 2 == alone.rows["heads"] == 64 * 2 * plan.info.n_layers * 8


def test_a_large_corpus_is_estimated_by_its_first_portion(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut_portions(monkeypatch, letters=2200)
    write_texts(tmp_path / "a.jsonl", *["a text of some length "] * 1000)
    fields = fields_of(model, tmp_path, input={"files": str(tmp_path / "a.jsonl")})
    result = plan(scan_file(tmp_path, fields))
    assert result.code == 0
    words = " ".join(result.stdout.replace("│", " ").split())
    for expected in (
        # The first 100 documents have 22 tokens each, and a separator.
        r"sequences about 3,3\d\d ",
        r"about 1,01\d documents, 22,\d\d\d tokens ",
        r"2,200 tokens prepared, about 20,\d\d\d tokens to prepare: about [\d.]+ m?s on this ",
        r"about \d\d tokens at portions' ends are not measured",
    ):
        assert re.search(expected, words), expected
    # The scan finds the portion.
    assert len(list((tmp_path / "runs" / "corpora").glob("*/*-00000.parquet"))) == 1


def test_a_scan_that_cannot_run_is_refused_before_anything_is_tokenised(tmp_path: Path):
    """Engine and precision are settled for the device that the user names, not for this one."""
    model = toy.save_model(tmp_path / "llama", toy.family("LlamaConfig", vocab_size=257))
    toy.byte_tokenizer(model)
    write_texts(tmp_path / "a.jsonl", *["a text of some length "] * 20)
    changes = {"interventions": ["swap_first_key(5)"], "precision": "float16x2_linears"}
    scan = scan_file(tmp_path, fields_of(model, tmp_path, bos=False, **changes))
    result = plan(scan, "--device", "cuda")
    assert result.code == 2
    (line,) = result.stderr.splitlines()
    assert "swap_first_key(5) is measured by the dense engine" in line
    assert result.stdout == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("gpus", "device", "address", "replicas"), [
    (0, "auto", None, 0), (1, "auto", None, 1), (3, "auto", None, 3), (3, "cuda", None, 3),
    (3, "cpu", None, 0), (0, "auto", "192.0.2.10:6379", 1),
])  # fmt: skip
def test_replicas_that_nobody_counted_are_one_a_gpu_or_this_process(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: Device, address: str | None, replicas: int
):
    monkeypatch.delenv(JOB_ADDRESS, raising=False)
    have_gpus(monkeypatch, gpus)
    assert Resources.asked_for(None, 0, device, address).replicas == replicas
    assert Resources.asked_for(2, 0, device, address).replicas == 2
    # In a job, `address` is the one that Ray says.
    monkeypatch.setenv(JOB_ADDRESS, "192.0.2.10:6379")
    assert Resources.asked_for(None, 0, device, None).replicas == 1


def test_the_peak_is_that_of_the_block_in_bytes():
    # A higher peak before the block must not count.
    earlier_array = np.ones(20_000_000, np.uint8)
    del earlier_array
    with peak_memory("cpu") as idle_peak:
        pass
    with peak_memory("cpu") as peak:
        large_array = np.ones(100_000_000, np.uint8)
    del large_array
    assert 80_000_000 < peak.main - idle_peak.main < 150_000_000
    with peak_memory("cpu") as later_peak:
        pass
    assert later_peak.main < peak.main - 80_000_000, "an earlier peak is another one's"
    assert later_peak.main < total_memory() < 1e14
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("options", [
    {"family": "single_token_repeat", "token": 50256},
    {"family": "text_with_token", "files": "bundled:LICENSE", "token": 50256, "position": 3},
])  # fmt: skip
def test_a_token_beyond_the_vocabulary_is_known_before_anything_is_drawn_or_prepared(
    options: dict[str, object],
):
    fields = {"model": "bundled:llama-mini", "n_ctx": 8, "sequences": 2, "input": options}
    line = "input.token: expected 0 to 256, the token ids of llama-mini, got 50256"
    with pytest.raises(ScanError, match=line):
        resolve(parse_scan(fields))
