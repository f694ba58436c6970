"""What a run directory holds, and which of it counts.

runs/run_id=NAME-HASH/
├── scan.toml        as submitted
├── manifest.json    everything resolved: what is measured, with what, by which code
├── index/           lengths of the corpus's documents, where there is a corpus
├── heads/intervention=none/shard-000000.parquet …     (sequences/ alike)
├── failures/shard-000000.json     attempts that failed, and why
└── commits/shard-000000.json      written last: a shard is done if and only if its commit exists
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import RunError

TABLES = ("heads", "sequences")


class DataFile(BaseModel):
    """A Parquet file of a committed shard, its path relative to the run directory."""

    model_config = ConfigDict(frozen=True)
    table: str
    intervention: str
    path: str
    rows: int
    bytes: int


class Commit(BaseModel):
    """The record that makes a shard done."""

    model_config = ConfigDict(frozen=True)
    run_id: str
    shard: int
    start: int
    stop: int
    rows: int
    tokens: int
    seconds: float
    """From the first forward pass to the last data file."""
    compute_seconds: float
    """Of these, forward passes and reductions; a replica computes the next shard while it writes one."""
    idle_seconds: float
    """How long the replica had waited for this shard, computing nothing."""
    host: str
    attempt: int
    engine: str
    precision: str
    bad_rows: list[str]
    files: list[DataFile]


class Manifest(BaseModel):
    """Everything that made the run: `identity` must not change while a run grows, the rest is for the record."""

    model_config = ConfigDict(frozen=True)
    run_id: str
    created: str
    identity: dict[str, Any]
    shards: int
    sequences: int
    statistics: dict[str, dict[str, Any]]
    model: dict[str, Any]
    code: str
    versions: dict[str, str]


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, and its ledger."""

    path: Path

    @classmethod
    def of(cls, out: Path | str, run_id: str) -> RunDirectory:
        """The directory of a run among the runs in `out`."""
        return cls(Path(out) / f"run_id={run_id}")

    @property
    def run_id(self) -> str:
        """The run's id, from the directory's name."""
        return self.path.name.removeprefix("run_id=")

    @property
    def scan_file(self) -> Path:
        """The scan as submitted."""
        return self.path / "scan.toml"

    @property
    def manifest_file(self) -> Path:
        """The manifest."""
        return self.path / "manifest.json"

    @property
    def index(self) -> Path:
        """The directory of the corpus index."""
        return self.path / "index"

    def data_file(self, table: str, intervention: str, shard: int) -> Path:
        """Where a shard's rows of one table lie: the same name in every attempt."""
        return self.path / table / f"intervention={intervention}" / f"shard-{shard:06d}.parquet"

    def commit_file(self, shard: int) -> Path:
        """Where a shard's commit lies."""
        return self.path / "commits" / f"shard-{shard:06d}.json"

    def failure_file(self, shard: int) -> Path:
        """Where the last failed attempt at a shard is noted."""
        return self.path / "failures" / f"shard-{shard:06d}.json"

    def failure(self, shard: int) -> tuple[int, str] | None:
        """Failed attempts at a shard and the last reason; none where none was noted."""
        try:
            note = json.loads(self.failure_file(shard).read_bytes())
            return int(note["attempts"]), str(note["error"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def manifest(self) -> Manifest:
        """Read the manifest."""
        try:
            return Manifest.model_validate_json(self.manifest_file.read_bytes())
        except OSError:
            raise RunError(f"{self.path}: no manifest.json; expected the directory of a run") from None
        except ValidationError as error:
            raise RunError(f"{self.manifest_file}: not a manifest ({error.error_count()} problems)") from None

    def commits(self) -> Iterator[Commit]:
        """The commits of the run, in shard order; files that are no commit of this run are passed over."""
        for path in sorted((self.path / "commits").glob("shard-*.json")):
            try:
                commit = Commit.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                continue
            if commit.run_id == self.run_id and path == self.commit_file(commit.shard):
                yield commit

    def damaged_files(self, commit: Commit) -> Iterator[str]:
        """Files of a commit that are not where they belong, or not whole: another size, or no Parquet footer."""
        for file in commit.files:
            path = self.path / file.path
            belongs = file.table in TABLES and path == self.data_file(file.table, file.intervention, commit.shard)
            if not (belongs and _is_whole(path, file.bytes)):
                yield file.path


def _is_whole(path: Path, size: int) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            # After a power cut a file can have its size and none of its content.
            return file.seek(0, os.SEEK_END) == size and file.seek(size - 4) >= 0 and file.read(4) == b"PAR1"
    except (OSError, ValueError):
        return False


def find_runs(path: Path) -> list[RunDirectory]:
    """The runs at `path`: a run directory itself, or a directory that holds some."""
    if (path / "manifest.json").is_file():
        return [RunDirectory(path)]
    found = [RunDirectory(p.parent) for p in sorted(path.glob("run_id=*/manifest.json"))]
    if not found:
        raise RunError(f"{path}: no run here; expected a run directory, or a directory that holds run_id=… directories")
    return found


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ, with both values.

    >>> differing_keys({"scan": {"n_ctx": 64, "seed": 0}}, {"scan": {"n_ctx": 128, "seed": 0}})
    ['scan.n_ctx (64, now 128)']
    """
    a, b = _flat(before), _flat(now)
    return [
        f"{key} ({_show(a.get(key))}, now {_show(b.get(key))})" for key in sorted(a | b) if a.get(key) != b.get(key)
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
