"""What a run directory holds, and which of it counts.

runs/run_id=NAME-HASH/
├── scan.toml        as submitted
├── manifest.json    everything resolved: what is measured, with what, by which code
├── index/           lengths of the corpus's documents, where there is a corpus
├── heads/intervention=none/shard-000000.parquet …     (sequences/, profiles/ and curves/ alike)
├── weights/intervention=none/shard-000000.parquet     where the scan asks for some
├── failures/shard-000000.json     attempts that failed, and why
└── commits/shard-000000.json      written last: a shard is done if and only if its commit is in
                                   the ledger (commits.py)
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import ValidationError

from schemas.commits import (
    Commit,
    commit_name,
    commits_of,
    read_commit,
    read_ledger,
    read_oldest,
    read_parts,
)
from schemas.damage import BY_SIZE, Damage, by_content, by_size
from schemas.errors import RunError
from schemas.manifest import Manifest
from schemas.places import Place, names, place, reason

pc: Any = pyarrow.compute  # Its functions are made at run time; no type checker finds them.


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, and its ledger."""

    path: Place

    @classmethod
    def of(cls, out: str | Place, run_id: str) -> RunDirectory:
        """The directory of a run among the runs in `out`."""
        return cls(place(out) / f"run_id={run_id}")

    @property
    def run_id(self) -> str:
        """The run's id, from the directory's name."""
        return self.path.name.removeprefix("run_id=")

    @property
    def scan_file(self) -> Place:
        """The scan as submitted."""
        return self.path / "scan.toml"

    @property
    def manifest_file(self) -> Place:
        """The manifest."""
        return self.path / "manifest.json"

    @property
    def index(self) -> Place:
        """The directory of the corpus index."""
        return self.path / "index"

    @property
    def commits_directory(self) -> Place:
        """The directory of the ledger."""
        return self.path / "commits"

    def data_file(self, table: str, intervention: str, shard: int) -> Place:
        """Where a shard's rows of one table lie: the same name in every attempt."""
        return self.path / data_path(table, intervention, f"shard-{shard:06d}.parquet")

    def commit_file(self, shard: int) -> Place:
        """Where a shard's commit is written; thousands of them are folded into one file later."""
        return self.commits_directory / commit_name(shard)

    def loose_commit(self, shard: int) -> Commit | None:
        """The commit that a shard has as a file of its own; none where there is none of this run."""
        try:
            return read_commit(self.commit_file(shard), self.run_id)
        except FileNotFoundError:
            return None

    def failure_file(self, shard: int) -> Place:
        """Where the last failed attempt at a shard is noted."""
        return self.path / "failures" / commit_name(shard)

    def failure(self, shard: int) -> tuple[int, str] | None:
        """Failed attempts at a shard and the last reason; none where none was noted."""
        try:
            note = json.loads(self.failure_file(shard).read_bytes())
            return int(note["attempts"]), str(note["error"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def failed_shards(self) -> list[int]:
        """Shards of which a failed attempt is noted, whether or not a later one succeeded."""
        found = (name[6:-5] for name in names(self.path / "failures") if name.startswith("shard-"))
        return sorted(int(number) for number in found if number.isdecimal())

    def manifest(self) -> Manifest:
        """Read the manifest."""
        try:
            return Manifest.model_validate_json(self.manifest_file.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(
                f"{self.path}: no manifest.json; expected the directory of a run. If it is one, "
                f"headcount rm {self.path} deletes it"
            ) from None
        except OSError as error:
            raise RunError(f"{self.manifest_file}: cannot be read ({reason(error)})") from None
        except ValidationError as error:
            raise RunError(
                f"{self.manifest_file}: not a manifest ({error.error_count()} problems); bring back "
                f"a copy, or delete the run with headcount rm {self.path} and scan again"
            ) from None

    def ledger(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The commits that count, in shard order: some columns of them, and whether they are
        `folded`.
        """
        try:
            return read_ledger(self.commits_directory, self.run_id, columns)
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{self.commits_directory}: cannot be read ({reason(error)})") from None

    def oldest_commit(self, columns: Sequence[str]) -> dict[str, Any] | None:
        """Some columns of one of the first commits; none before there is one."""
        try:
            return read_oldest(self.commits_directory, self.run_id, columns)
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{self.commits_directory}: cannot be read ({reason(error)})") from None

    def ledger_parts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The commits that count in parts of bounded size, each in no order; for whoever is alone
        at work on the run.
        """
        try:
            yield from read_parts(self.commits_directory, self.run_id, columns)
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{self.commits_directory}: cannot be read ({reason(error)})") from None

    def commits(self) -> Iterator[Commit]:
        """The commits that count, in shard order; files that are no commit of this run are passed
        over.
        """
        yield from commits_of(self.ledger())

    def damaged_by_size(self) -> list[Damage]:
        """Committed files that are gone or of another size; others may be at work on the run."""
        while True:
            try:
                return by_size(self.path, read_parts(self.commits_directory, self.run_id, BY_SIZE))
            except FileNotFoundError:
                continue  # Folded meanwhile.
            except (OSError, pa.ArrowException) as error:
                raise RunError(f"{self.path}: cannot be read ({reason(error)})") from None

    def damaged_files(
        self, parts: Iterable[pa.Table], manifest: Manifest | None = None
    ) -> list[Damage]:
        """Files of a ledger (or of parts of one, with the columns of `schemas.damage`) that are not
        as committed: by name and size, or with a `manifest` by content.
        """
        try:
            if manifest is None:
                return by_size(self.path, parts)
            return [
                Damage(file.path, file.shards, why)
                for file, why in by_content(self.path, manifest, parts)
                if why is not None
            ]
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read ({reason(error)})") from None


def data_path(table: str, intervention: str, name: str) -> str:
    """Where a data file lies in the run directory."""
    return f"{table}/intervention={intervention}/{name}"


def covered(manifest: Manifest, ledger: pa.Table) -> np.ndarray:
    """For each commit of a ledger, whether it holds all sequences of its shard: a shard that was the
    last one and short does not, once the run has more sequences.
    """
    shards = ledger["shard"].to_numpy()
    own = (shards >= 0) & (shards < manifest.shards)
    return own & (ledger["stop"].to_numpy() == manifest.stops(shards))


def check_merged(ledger: pa.Table) -> None:
    """Refuse a ledger that counts rows twice: every shard with rows in a merged file must be
    committed there.

    Two compactions that were at work at once on a run in a store can leave such a ledger; a third
    mends it.
    """
    files = pc.list_flatten(ledger["files"])
    held = pa.table({name: pc.struct_field(files, name) for name in ("path", "shards")})
    counts = held.group_by("path").aggregate([("shards", "count"), ("shards", "max")])
    wrong = counts.filter(pc.not_equal(counts["shards_count"], counts["shards_max"]))
    for found in wrong.slice(0, 1).to_pylist():
        raise RunError(
            f"{found['path']}: holds the rows of {found['shards_max']} shards, and "
            f"{found['shards_count']} commits refer to it; expected as many, or rows would be "
            "counted twice; run headcount compact while nobody else is at work on the run"
        )


def find_runs(path: Place) -> list[RunDirectory]:
    """The runs at `path`: a run directory itself, or a directory that holds some."""
    try:
        if (path / "manifest.json").is_file():
            return [RunDirectory(path)]
        inside = [
            RunDirectory(path / name) for name in sorted(names(path)) if name.startswith("run_id=")
        ]
        # A run whose manifest is lost is one that cannot be read, not none.
        found = [
            run for run in inside if run.manifest_file.is_file() or "commits" in names(run.path)
        ]
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({reason(error)})") from None
    if not found:
        raise RunError(
            f"{path}: no run here; expected a run directory, or a directory that holds run_id=… "
            "directories"
        )
    return found


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ, with both values.

    >>> differing_keys({"scan": {"n_ctx": 64, "seed": 0}}, {"scan": {"n_ctx": 128, "seed": 0}})
    ['scan.n_ctx (64, now 128)']
    """
    a, b = _flat(before), _flat(now)
    return [
        f"{key} ({_show(a.get(key))}, now {_show(b.get(key))})"
        for key in sorted(a | b)
        if a.get(key) != b.get(key)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            _flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {prefix + key: value}
        )
    return flat


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
