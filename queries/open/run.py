"""One run as queries see it: its manifest, its commit log, and the files whose rows count."""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.schemas.errors import QueryError, RunError, StoreError, unknown
from headcount.schemas.files.damage import Damage
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory, check_merged, find_runs, pc
from headcount.schemas.filled_tables import OF_MERGED, WORDS, carried_columns, columns_of
from headcount.schemas.places import Place, absolute, read_as
from headcount.schemas.tables import Column


@dataclass(frozen=True)
class Run:
    """One run: its manifest, its commit log, and what of it can be read."""

    directory: RunDirectory
    manifest: Manifest
    commit_log: pa.Table  # one row per commit, in shard order
    code: str | None  # Only shards that this code measured are read. None reads all.
    damaged: list[Damage]  # not as committed; the caller decides whether to tell the user
    queries: Mapping[str, str | None]  # SQL of those that it brings; None: not as it was kept

    @property
    def damaged_rollups(self) -> list[Damage]:
        """Damaged roll-ups. Their shards are answered from rows."""
        return [damage for damage in self.damaged if damage.is_of_rollup]

    @property
    def damaged_data(self) -> list[Damage]:
        """The other damaged files. No view shows their shards."""
        return [damage for damage in self.damaged if not damage.is_of_rollup]

    @cached_property
    def is_whole(self) -> np.ndarray:
        """For each commit, whether all of its files but roll-ups are as committed."""
        return ~np.isin(self.commit_log["shard"].to_numpy(), _shards_of(self.damaged_data))

    @cached_property
    def done(self) -> pa.Table:
        """The commits whose files are as committed. Roll-ups may be damaged."""
        return self.commit_log.filter(pa.array(self.is_whole))

    def files(self, table: str, unrolled: bool = False) -> list[str]:
        """Full paths of a table's files that count; `unrolled`: if no roll-up repeats them."""
        files = pc.list_flatten(self.done["files"])
        is_read = pc.equal(pc.struct_field(files, "table"), table)
        paths = pc.struct_field(files, "path")
        if table in OF_MERGED or unrolled:
            commit_of_file = pc.list_parent_indices(self.done["files"]).combine_chunks()
            is_rolled_up = pa.array(self._is_rolled_up).take(commit_of_file)
            keep = pc.and_ if table in OF_MERGED else pc.and_not
            is_read = keep(is_read, is_rolled_up)
        # A merged file has one commit per shard, so its path occurs many times.
        unique_paths = pc.unique(paths.filter(is_read))
        return [f"{self.directory.path}/{path}" for path in unique_paths.to_pylist()]

    @cached_property
    def _is_rolled_up(self) -> np.ndarray:
        """For each commit that counts, whether its rows are in roll-ups and samples that count.

        If the roll-up of one intervention is damaged, those of the others do not count either:
        rows are read for all interventions of a shard, or for none.
        """
        tables = pc.struct_field(pc.list_flatten(self.done["files"]), "table")
        commits = pc.list_parent_indices(self.done["files"])
        is_rolled_up = ~np.isin(self.done["shard"].to_numpy(), _shards_of(self.damaged_rollups))
        for table in OF_MERGED:
            with_file = commits.filter(pc.equal(tables, table)).to_numpy()
            is_rolled_up &= np.isin(np.arange(len(self.done)), with_file)
        return is_rolled_up

    @property
    def codes(self) -> list[str]:
        """The code of every shard that is done, each once. Before the first shard it is the code
        that began the run.
        """
        codes = pc.unique(self.done["code"]).to_pylist()
        return list(dict.fromkeys(codes)) or [self.manifest.code]

    def shards_of(self, code: str) -> str:
        """The shards that some code measured, in words."""
        is_of_code = [own == code for own in self.done["code"].to_pylist()]
        shards = self.done["shard"].to_numpy()[is_of_code]
        if len(shards) == 1:
            return f"shard {shards[0]}"
        return f"{len(shards):,} shards from {shards.min()} to {shards.max()}"

    @property
    def scan(self) -> dict[str, Any]:
        """The resolved scan."""
        return self.manifest.identity.get("scan", {})

    @property
    def carried(self) -> dict[str, dict[str, Column]]:
        """The columns that carry fields of its documents, by table and name."""
        return carried_columns(self.scan.get("input", {}).get("columns") or [])

    @cached_property
    def own_columns(self) -> dict[str, tuple[str, ...]]:
        """The columns that not every run has, sorted, by table."""
        measured = columns_of(self.manifest.kinds)
        return {
            table: tuple(sorted({*columns, *self.carried.get(table, ())}))
            for table, columns in measured.items()
        }


def _shards_of(damaged: list[Damage]) -> list[int]:
    return [shard for damage in damaged for shard in damage.shards]


READINGS = 20  # how often a run is read whose shards are merged meanwhile


def read_run(directory: RunDirectory, code: str | None) -> Run:
    """Read a manifest and a commit log, and look for files that are gone, or in a store have
    another size.
    """
    run = _read_once(directory, code)
    for _ in range(READINGS):
        # A file that was merged after the commit log was read is gone, and not damaged.
        if not run.damaged:
            break
        run, before = _read_once(directory, code), run
        if run.commit_log.equals(before.commit_log):
            break
    return run


def _read_once(directory: RunDirectory, code: str | None) -> Run:
    manifest = directory.manifest()
    commit_log = directory.commit_log()
    directory.check_complete(commit_log)
    # Otherwise rows would count twice.
    check_merged(commit_log)
    if code is not None:
        codes = commit_log["code"].to_pylist()
        if code not in codes:
            raise QueryError(f"run {directory.run_id}: {unknown('code', code, set(codes))}")
        commit_log = commit_log.filter(pa.array([own == code for own in codes], pa.bool_()))
    damaged = directory.damaged_files(commit_log)
    queries = {name: _kept_query(directory, digest) for name, digest in manifest.queries.items()}
    return Run(directory, manifest, commit_log, code, damaged, queries)


def _kept_query(directory: RunDirectory, digest: str) -> str | None:
    """The SQL that a run keeps under a digest; None if it is something else."""
    with suppress(OSError, UnicodeDecodeError):
        content = read_as(directory.query_file(digest), bytes)
        if hashlib.sha256(content).hexdigest() == digest:
            return content.decode()
    return None


ReadRun = Callable[[RunDirectory, str | None], Run]  # reads what some code measured


def read_runs(
    path: Place, code: str | None = None, read: ReadRun = read_run
) -> tuple[list[Run], list[RunError]]:
    """Read the runs at `path`, and say which cannot be read; `code`: only its own shards."""
    runs: list[Run] = []
    unreadable: list[RunError] = []
    for directory in find_runs(absolute(path)):
        try:
            runs.append(read(directory, code))
        except StoreError:
            raise  # What the store has not given may be whole: an answer without it is wrong.
        except RunError as error:
            # One run that cannot be read must not hide the others.
            unreadable.append(error)
    if not runs:
        raise unreadable[0]
    _refuse_two_meanings(runs)
    return runs, unreadable


def _refuse_two_meanings(runs: list[Run]) -> None:
    """Refuse runs, or shards of one run, that use one name for two formulas."""
    # A mean over both would be of neither.
    known: dict[str, tuple[Run, str, str]] = {}
    for run, code in [(each, code) for each in runs for code in each.codes]:
        run_id = run.directory.run_id
        meanings = run.manifest.meanings(code)
        if meanings is None:
            raise QueryError(
                f"run {run_id}: {run.shards_of(code)} were measured by code {code}, of which its "
                "manifest says nothing; compare manifest.json with a copy"
            )
        subjects = (
            (f"{WORDS[field]} {name!r}", fingerprint)
            for field, fingerprints in meanings.items()
            for name, fingerprint in fingerprints.items()
        )
        for subject, fingerprint in subjects:
            other, other_code, other_fingerprint = known.setdefault(
                subject, (run, code, fingerprint)
            )
            if other_fingerprint == fingerprint:
                continue
            if other is run:
                places = [
                    f"{run.shards_of(each)} of run {run_id}, by code {each}"
                    for each in (other_code, code)
                ]
                remedy = f"--code {code} reads the latter alone"
            else:
                places = [f"run {each.directory.run_id}" for each in (other, run)]
                remedy = "query one run directory at a time"
            raise QueryError(
                f"{subject} has one formula in {places[0]} ({other_fingerprint}) and another in "
                f"{places[1]} ({fingerprint}); {remedy}"
            )
