"""Runs whose processes die at random changes of the disk or of a store, and whether each row is
there once in the end.

`make chaos`, or `python -m tests.tools.random_deaths --schedules 1000 --seed 7 [--store]`. In a
schedule one run is measured, extended and compacted by processes forked from this one. Each of them
dies at a random change, just before or just after it. Then the run is finished undisturbed, and its
rows are compared with those of a run that nothing has disturbed. A toy replica measures, so that a
schedule takes a second.
"""

import argparse
import io
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from headcount.jobs.plan.plan import make_plan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.resources import Resources
from headcount.jobs.run.measuring import run_to_end
from headcount.jobs.upkeep.compaction import compact
from headcount.schemas.errors import HeadcountError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.object_stores import region_and_endpoint
from headcount.schemas.places import names, place
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.first_write import _s3_client
from tests.s3.s3_server import Action, Rule, S3Server
from tests.tools.committed_rows import Rows, compare, rows_of
from tests.tools.deaths import death_at_change
from tests.toys.toy_replica import ToyReplica

SIZES = (20, 31, 47)
"""Sequences of the run, which grows."""

SEQUENCES_PER_SHARD = 3
MERGED_ROWS = 3000
"""Rows of a merged file: three shards."""

MOST_CHANGES = 40
"""A process makes fewer changes, so that some processes end before they die."""

PATIENCE_SECONDS = 60.0


@dataclass
class Schedules:
    """Where the runs lie, and what was seen."""

    root: str
    rng: random.Random
    store: S3Server | None
    deaths: int = 0
    bad: list[str] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    """Errors in a line, which a user would read."""

    def scan(self, name: str, sequences: int) -> dict[str, Any]:
        return {
            "model": "bundled:attn-only-2l-mini",
            "n_ctx": 16,
            "sequences": sequences,
            "sequences_per_shard": SEQUENCES_PER_SHARD,
            "input": {"family": "repeated_random"},
            "statistics": ["sink_mass", "entropy"],
            "out": f"{self.root}/{name}",
        }

    def act(self, *actions: Callable[[], object], mortal: bool = True) -> list[Any]:
        """Do something in a process for each action, all at once; returns what they return."""
        context = multiprocessing.get_context("fork")
        begin = context.Event()
        children: list[tuple[Any, Any]] = []
        for action in actions:
            dies_here = mortal and self.store is None
            changes = self.rng.randrange(MOST_CHANGES) if dies_here else sys.maxsize
            reader, writer = context.Pipe(duplex=False)
            arguments = (action, begin, writer, changes, self.rng.random() < 0.5)
            process = context.Process(target=live, args=arguments)
            process.start()
            writer.close()
            children.append((process, reader))
        if mortal and self.store is not None:
            self.store.set_rules(*(self.death_in_store(process.pid) for process, _ in children))
        begin.set()
        returned: list[Any] = []
        for process, reader in children:
            try:
                error, value = reader.recv() if reader.poll(PATIENCE_SECONDS) else ("hangs", None)
            except EOFError:
                self.deaths += 1
                continue
            finally:
                process.kill()
                process.join()
            if error == "hangs" or error.startswith("Traceback") or (error and not mortal):
                self.bad.append(error)
            elif error:
                # Behind the place, which differs.
                self.said[error.partition(": ")[2][:100]] += 1
            else:
                returned.append(value)
        if self.store is not None:
            self.store.set_rules()
        return returned

    def death_in_store(self, pid: int) -> Rule:
        """The death of a process at a request that changes the store, which may be carried out."""
        action = Action(kill=[pid])
        if self.rng.random() < 0.5:
            action["status"] = 500
        method = self.rng.choice(["PUT", "PUT", "DELETE"])
        return Rule(action, method=method, skip=self.rng.randrange(MOST_CHANGES))

    def rows(self, name: str, sequences: int) -> Rows | None:
        """Finish a run undisturbed; its rows, None if that has failed."""
        scan = self.scan(name, sequences)
        actions = [measure, merge] if self.rng.random() < 0.5 else [measure]
        for action in (*actions, rows_in):
            answers = self.act(partial(action, scan), mortal=False)
        return answers[0] if answers else None

    def run_schedule(self, name: str, expected: dict[int, Rows]) -> None:
        """Disturb one run, finish it, and compare its rows."""
        size = self.rng.choice(SIZES[:2])
        final = self.rng.choice([larger for larger in SIZES if larger >= size])
        scan, extended = self.scan(name, size), self.scan(name, final)
        drawn = self.rng.choices(
            ["measure", "measure", "merge", "extend"], k=self.rng.randint(1, 6)
        )
        for action in ["measure", *drawn]:
            if action == "extend":
                scan = extended
            act = partial(merge if action == "merge" else measure, scan)
            self.act(*[act] * self.rng.choice([1, 1, 1, 2]))
        rows = self.rows(name, final)
        if rows is not None and any(verdict := compare(rows, expected[final])):
            lost, doubled, wrong = verdict
            self.bad.append(f"{name}, {drawn}: LOST {lost}, DOUBLED {doubled}, WRONG {wrong}")


def live(action: Callable[[], object], begin: Any, writer: Any, changes: int, after: bool) -> None:
    """The life of one process: it answers with an error, and with what the action returns."""
    begin.wait()
    sys.stderr = io.StringIO()
    try:
        with death_at_change(changes, partial(os._exit, 1), after):
            writer.send(("", action()))
    except HeadcountError as error:
        writer.send((str(error), None))
    except BaseException:
        writer.send((traceback.format_exc(), None))


def measure(scan: dict[str, Any]) -> None:
    plan = make_plan(parse_scan(scan), "deaths")
    prepare_run(plan, "")
    quiet = Console(file=io.StringIO())
    run_to_end(plan, Resources(0, 1, "cpu", None), quiet, replica_class=ToyReplica)


def merge(scan: dict[str, Any]) -> None:
    compact(run_of(scan), MERGED_ROWS)


def rows_in(scan: dict[str, Any]) -> Rows:
    return rows_of(run_of(scan).path)


def run_of(scan: dict[str, Any]) -> RunDirectory:
    home = place(scan["out"])
    return RunDirectory(next(home / name for name in names(home) if name.startswith("run_id=")))


def run_schedules(count: int, seed: int, in_store: bool) -> Schedules:
    """Run so many schedules in a process of their own; what was seen of them."""
    # So that small runs have segments, too.
    for module in list(sys.modules.values()):
        if hasattr(module, "COMMITS_PER_SEGMENT"):
            vars(module)["COMMITS_PER_SEGMENT"] = 5
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="deaths-"))
        store = stack.enter_context(S3Server()) if in_store else None
        if store is not None:
            os.environ |= store.env()
            # What is forked from this process has it; importing boto3 is half of a short life.
            _s3_client(*region_and_endpoint())
        schedules = Schedules(folder, random.Random(seed), None)
        expected: dict[int, Rows] = {}
        for size in SIZES:
            # In this process, so that those that are forked from it find everything imported.
            scan = schedules.scan(f"undisturbed-{size}", size)
            measure(scan)
            expected[size] = rows_in(scan)
        schedules.store = store
        if store is not None:
            schedules.root = "s3://bucket"
        for number in range(count):
            schedules.run_schedule(f"{seed}-{number}", expected)
    return schedules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="in an S3 server, not on a disk")
    options = parser.parse_args()
    seen = run_schedules(options.schedules, options.seed, options.store)
    for line in seen.bad:
        print(line)
    for line, count in seen.said.most_common(10):
        print(f"{count} × {line}")
    where = "in a store" if options.store else "on a disk"
    print(f"{options.schedules} schedules {where}, {seen.deaths} deaths, {len(seen.bad)} bad")
    sys.exit(bool(seen.bad))


if __name__ == "__main__":
    main()
