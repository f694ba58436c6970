"""Runs that are brought to their end in this process."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import headcount.workers.shard
from headcount.jobs.plan import resolved_scan
from headcount.jobs.plan.plan import Plan, make_plan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.resources import Resources
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.run.measuring import run_to_end
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.replica import Replica
from headcount.workers.shard import run_shard
from tests.toys.toy_replica import ToyReplica


def run_here(
    plan: Plan, replica_class: type[Replica] = ToyReplica, allow_other_code: bool = False
) -> list[str]:
    """Bring a run to its end without Ray; returns the lines that it says."""
    text = io.StringIO()
    prepare_run(plan, "")
    failures = run_to_end(
        plan,
        Resources(0, 1, "cpu", None),
        Console(file=text, width=1000, highlight=False),
        replica_class=replica_class,
        allow_other_code=allow_other_code,
    )
    assert failures == []
    return text.getvalue().splitlines()


def become(patch: pytest.MonkeyPatch, code: str) -> None:
    """Let plans and commits of this process be of another code."""
    for module in (resolved_scan, headcount.workers.shard):
        patch.setattr(module, "code_fingerprint", lambda: code)


def begun(fields: dict[str, Any], name: str = "toy") -> Plan:
    """A run that is planned and written down, and of which nothing is measured."""
    plan = make_plan(parse_scan(fields), name)
    prepare_run(plan, "")
    return plan


def measured(plan: Plan, replica_class: Callable[..., Replica] = Replica) -> Plan:
    """Measure the shards of a run that are missing, the last one first."""
    replica = replica_class(plan.info, plan.scan, "cpu")
    for shard in missing_shards(plan).tolist()[::-1]:
        run_shard(replica, plan.run, plan.sequences.shard(shard))
    return plan


def measure_here(fields: dict[str, Any], name: str = "toy") -> Plan:
    """Measure all of a scan in this process, without a driver."""
    return measured(begun(fields, name))
