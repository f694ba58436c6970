"""How far a scan is: told by batches, and taken back where a shard fails."""

import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headcount.jobs import bars, phases
from headcount.jobs.bars import bar, waiting
from headcount.jobs.plan.plan import (
    Plan,
    make_plan,
    operations_of_token,
    sequences_in_a_shard,
)
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.resources import Resources
from headcount.jobs.run.measuring import measure_in_process
from headcount.jobs.run.progress import Progress
from headcount.jobs.upkeep.status import as_lines, read_status
from headcount.schemas.files.commit import Failure
from headcount.schemas.scans.scan_file import parse_scan

FIELDS: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini", "n_ctx": 8, "sequences": 7, "batch_size": 2,
    "interventions": ["none", "zero_head(0,0)"], "statistics": ["sink_mass"],
    "input": {"family": "uniform_random"},
}  # fmt: skip


def plan_of(tmp_path: Path, **changes: Any) -> Plan:
    fields = FIELDS | {"out": str(tmp_path / "runs")} | changes
    plan = make_plan(parse_scan(fields), "toy")
    prepare_run(plan, "")
    return plan


def test_each_batch_is_told_while_its_shard_is_measured(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, sequences_per_shard=4)
    told: list[tuple[int, int]] = []
    measured = measure_in_process(
        plan,
        np.array([0, 1]),
        Resources(0, 1, "cpu"),
        measured=lambda shard, tokens: told.append((shard, tokens)),
    )
    assert [outcome.shard for outcome in measured] == [0, 1]
    # Two batches of two sequences of 8 tokens under each of two interventions; then 2 and 1.
    assert told == [
        *((0, tokens) for tokens in (0, 16, 32, 48, 64)),
        *((1, tokens) for tokens in (0, 16, 24, 40, 48)),
    ]


def test_a_long_batch_is_told_by_the_layers_that_it_has_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headcount.workers.engine.told_layers.TELL_SECONDS", 0.0)

    def told_of(name: str, **changes: Any) -> list[int]:
        told: list[int] = []
        plan = plan_of(tmp_path / name, sequences=3, batch_size=3, **changes)
        resources = Resources(0, 1, "cpu")
        list(
            measure_in_process(
                plan,
                np.array([0]),
                resources,
                measured=lambda _, tokens: told.append(tokens),
            )
        )
        return told

    # Three sequences of 8 tokens go through two layers, of which the last ends with its attention.
    assert told_of("forward") == [0, 12, 24, 36, 48]
    # The way back through a layer is twice the way forward.
    effects = {"statistics": ["effect_mean"], "interventions": ["none"]}
    assert told_of("backward", **effects) == [0, 4, 8, 16, 24, 24]


def test_what_a_failed_shard_has_measured_is_taken_back() -> None:
    now = [100.0]
    shown: list[tuple[str, float | None]] = []
    told = Progress(1000, 400, lambda *words: shown.append(words), clock=lambda: now[0])
    told.measured(4, 0)
    assert shown[-1] == ("400 of 1,000 tokens", 0.4)
    now[0] += 10
    told.measured(4, 100)
    assert shown[-1] == ("500 of 1,000 tokens, 10 tokens/s, 50 s left", 0.5)
    told.measured(5, 100)
    told.note(Failure(4, "broken"))
    words = "500 of 1,000 tokens, 10 tokens/s, 50 s left, 1 shard failed"
    assert shown[-1] == (words, 0.5)
    assert told.summary() is None, "nothing is committed"


def test_lines_keep_coming_where_nothing_is_told() -> None:
    text = io.StringIO()
    console = Console(file=text, width=80)
    shown = bar(console, "tokens", "tokens: ", longest_silence=0.0)
    with waiting(console, "planning"), shown as show:
        show("4 of 8", 0.5)
        deadline = time.monotonic() + 20
        while text.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    # Of two bars only the inner one has lines.
    assert set(text.getvalue().splitlines()) == {"tokens: 4 of 8"}


def test_short_bars_one_after_another_are_not_silent_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [time.monotonic() + 3600]
    monkeypatch.setattr("headcount.jobs.bars.time.monotonic", lambda: now[0])
    text = io.StringIO()
    console = Console(file=text, width=80)
    for words in ("starting", "planning", "loading"):
        with waiting(console, words):
            now[0] += bars.QUIET_SECONDS - 1
    assert text.getvalue() == "loading\n"
    # Another command, an hour later, is silent for as long.
    now[0] += 3600
    with waiting(console, "starting"):
        now[0] += bars.QUIET_SECONDS - 1
    assert text.getvalue() == "loading\n"


def test_status_counts_what_is_in_hand(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, sequences_per_shard=4)
    with phases.taken():
        phases.about(plan.run)
        phases.note("measuring", tokens_per_second=10.0, tokens_in_hand=32)
        deadline = time.monotonic() + 20
        while not any(driver.tokens_in_hand for driver in phases.drivers_of(plan.run)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        status = read_status(plan.run)
        assert (status.tokens, status.tokens_done, status.tokens_in_hand) == (112, 0, 32)
        assert status.seconds_left == 8.0
        assert "tokens    0 of 112 (0.0%), 32 more in hand" in as_lines(status)


def test_a_default_shard_is_about_a_minute_of_a_cpu_and_stays_that_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = plan_of(tmp_path, sequences=300)
    assert small.scan.sequences_per_shard == 256
    monkeypatch.setattr("headcount.jobs.plan.plan.SHARD_OPERATIONS", 2e9)
    # In each of 2 layers 24 operations for each of 128² weights, and 2 · 128 for each of 8 tokens.
    large = plan_of(tmp_path / "other", sequences=300)
    assert large.info.d_model == large.info.n_heads * large.info.d_head == 128
    one_token = 2 * (24 * 128**2 + 2 * 128 * 8)
    per_shard = int(2e9 / (one_token * 8 * 2))
    assert 512 // 8 < per_shard < 256
    # A pass never has less than 512 tokens, if there are as many.
    assert sequences_in_a_shard(large.scan, large.info, 2e7) == 512 // 8
    assert large.scan.sequences_per_shard == per_shard
    assert large.manifest.identity["scan"]["sequences_per_shard"] == per_shard
    # The run that was begun elsewhere keeps its shards, and a scan that names them has them.
    again = make_plan(parse_scan(FIELDS | {"sequences": 301, "out": str(tmp_path / "runs")}), "toy")
    assert (again.run.run_id, again.scan.sequences_per_shard) == (small.run.run_id, 256)
    named = plan_of(tmp_path / "named", sequences_per_shard=100)
    assert named.scan.sequences_per_shard == 100
    # A loss needs the unembedding, and an effect the way back: both make a shard shorter.
    info, scan = large.info, parse_scan(FIELDS | {"predictions": ["loss"]})
    unembedding = 2 * 128 * info.d_vocab
    assert operations_of_token(scan, info) == one_token + unembedding
    scan = parse_scan(FIELDS | {"statistics": ["effect_mean"]})
    assert operations_of_token(scan, info) == 3 * (one_token + unembedding)
