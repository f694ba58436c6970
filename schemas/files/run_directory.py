"""What a run directory holds, and which of its files count.

runs/run_id=NAME-HASH/
├── scan.toml        as submitted
├── manifest.json    everything resolved: what is measured, with what, by which code
├── index/           which portions of the token store it reads, and what became of documents
├── heads/intervention=none/shard-000000-DIGEST.parquet …     and so in sequences/, profiles/, …
├── weights/intervention=none/shard-000000-DIGEST.parquet     if the scan names weight statistics
├── rollups/intervention=none/merged-….parquet  and samples/: of the rows that `compact` has seen
├── complete.json    once all shards were committed: how many, so that none is missed unnoticed
├── failures/shard-000000.json     attempts that failed, and why
└── commits/shard-000000.json      written last: a shard is done if and only if its commit is in
                                   the commit log (commits.py)
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from headcount.schemas.errors import OtherRunError, RunError, StoreError, counted
from headcount.schemas.files.commit import Commit
from headcount.schemas.files.commits import (
    any_commit,
    commit_name,
    commits_of,
    gathered_shards,
    pc,
    read_commit_log,
)
from headcount.schemas.files.damage import Damage, files_damaged_by_size
from headcount.schemas.files.document_fates import Fates
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.places import Place, names, place, read_as, unread, write_whole

SHARD_COMMIT = re.compile(r"shard-(\d+)\.json").fullmatch
"""Tells the shard of a commit, or of a note of a failure, by the name of its file."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run, and its commit log."""

    path: Place

    @classmethod
    def of(cls, out: str | Place, run_id: str) -> "RunDirectory":
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
    def complete_file(self) -> Place:
        """How many shards the run had when it was complete."""
        return self.path / "complete.json"

    def note_complete(self, shards: int) -> None:
        """Note that the first so many shards are committed, if they are."""
        listed = {int(file[1]) for file in map(SHARD_COMMIT, names(self.commits_directory)) if file}
        done = listed | gathered_shards(self.commits_directory)
        if done.issuperset(range(shards)):
            write_whole(self.complete_file, json.dumps({"shards": shards}).encode())

    def forget_complete(self) -> None:
        """Take the note back. Call it before a shard is taken back."""
        self.complete_file.unlink(missing_ok=True)

    def check_complete(self, commit_log: pa.Table) -> None:
        """Refuse a commit log that lacks shards of a run that was complete."""
        try:
            shards = read_as(self.complete_file, lambda content: int(json.loads(content)["shards"]))
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise unread(self.complete_file, error) from None
        if missing := shards - int((commit_log["shard"].to_numpy() < shards).sum()):
            kind = RunError if isinstance(self.path, Path) else StoreError
            raise kind(
                f"{self.path}: was complete, and {counted(missing, 'commit')} of {shards:,} cannot "
                "be found; mend the store or bring back copies, or headcount resume "
                f"{self.path} measures them anew"
            )

    def plugin_file(self, digest: str) -> Place:
        """What the run keeps of a plug-in: its bytes."""
        return self.path / "plugins" / f"{digest}.py"

    def query_file(self, digest: str) -> Place:
        """What the run keeps of a named query that lay beside a plug-in: its bytes."""
        return self.path / "queries" / f"{digest}.sql"

    @property
    def index(self) -> Place:
        """The directory of what the run keeps of its corpus."""
        return self.path / "index"

    @property
    def fates_file(self) -> Place:
        """What became of the corpus's documents, by part."""
        return self.index / "fates.json"

    def fates(self) -> Fates | None:
        """What became of the corpus's documents; None if the run has no corpus."""

        def parse(content: bytes) -> Fates:
            parts = json.loads(content)["parts"]
            return Fates({name: dict(counts) for name, counts in parts.items()})

        try:
            return read_as(self.fates_file, parse)
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
            return None
        except OSError as error:
            raise unread(self.fates_file, error) from None

    @property
    def commits_directory(self) -> Place:
        """The directory of the commit log."""
        return self.path / "commits"

    def commit_file(self, shard: int) -> Place:
        """The file with a shard's commit, until thousands of commits are gathered into one file."""
        return self.commits_directory / commit_name(shard)

    def failure_file(self, shard: int) -> Place:
        """The file about the last failed attempt at a shard."""
        return self.path / "failures" / commit_name(shard)

    def failure(self, shard: int) -> tuple[int, str] | None:
        """The number of failed attempts at a shard, and the last reason; None without any."""

        def parse(content: bytes) -> tuple[int, str]:
            record = json.loads(content)
            return int(record["attempts"]), str(record["error"])

        try:
            return read_as(self.failure_file(shard), parse)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def failed_shards(self) -> list[int]:
        """Shards with a failed attempt, whether or not a later one succeeded."""
        # Other files, for example copies that somebody made, are ignored.
        files = map(SHARD_COMMIT, names(self.path / "failures"))
        return sorted(int(file[1]) for file in files if file)

    def refuse_links(self) -> None:
        """Refuse a run on a disk of which a directory is a link, before anything is written to it.

        What lies behind the link may be another run's, and would be deleted as this one's. A file
        that is a link does no harm: it is replaced or deleted itself, and not what it leads to.
        """
        if not isinstance(self.path, Path):
            return
        inside = [self.path / name for name in sorted(names(self.path))]
        folders = [home / name for home in inside if home.name in TABLES for name in names(home)]
        for directory in (self.path, *inside, *folders):
            if directory.is_symlink() and not directory.is_file():
                raise RunError(
                    f"{directory}: a link to {directory.resolve()}, and expected a directory of "
                    "this run alone, as whatever writes to a run may delete files in it; name what "
                    "the link leads to, or put that in the place of the link"
                )

    def manifest(self) -> Manifest:
        """Read the manifest."""
        # What to do about a broken run, as the end of an error.
        remedy = "; bring back a copy" if self.path.name.startswith("run_id=") else ""
        try:
            return read_as(self.manifest_file, Manifest.model_validate_json)
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(
                f"{self.path}: no manifest.json; expected the directory of a run{remedy}"
            ) from None
        except OSError as error:
            raise unread(self.manifest_file, error) from None
        except ValidationError as error:
            wrong_fields = {problem["loc"] for problem in error.errors()}
            if ("layout",) in wrong_fields and ("run_id",) not in wrong_fields:
                raise OtherRunError(
                    f"{self.path}: its files are laid out in another way than in this headcount; "
                    f"read it with the version that wrote it (before layouts were numbered: 0.3)"
                ) from None
            problems = counted(error.error_count(), "problem")
            why = f"{self.manifest_file}: not a manifest ({problems}){remedy}"
            kind = OtherRunError if isinstance(self.path, Path) else StoreError
            raise kind(why) from None

    def commit_log(self, columns: Sequence[str] | None = None, in_order: bool = True) -> pa.Table:
        """Some columns of the commits that count, in shard order (`read_commit_log`)."""
        return read_commit_log(self.commits_directory, self.run_id, columns, in_order=in_order)

    def commits(self) -> Iterator[Commit]:
        """The commits that count, in shard order; files that are not commits are ignored."""
        return commits_of(self.commit_log())

    def any_commit(self) -> Commit | None:
        """One of the commits, for facts that are the same in all; None before the first."""
        return any_commit(self.commits_directory, self.run_id)

    def damaged_files(self, commit_log: pa.Table) -> list[Damage]:
        """Files of a commit log that are gone, or in a store have another size.

        It needs the columns `damage.BY_SIZE`.
        """
        try:
            return files_damaged_by_size(self.path, commit_log)
        except OSError as error:
            raise unread(self.path, error) from None


def data_path(table: str, intervention: str, name: str) -> str:
    """Where a data file lies in the run directory."""
    return f"{table}/intervention={intervention}/{name}"


def shard_file_name(shard: int, digest: str) -> str:
    """Name of a file with a shard's rows, from its number and the digest of the file's content.

    Attempts may differ in the last bit. So no name is ever used for two contents, and the files of
    a commit stay whatever another attempt writes.
    """
    return f"shard-{shard:06d}-{digest[:8]}.parquet"


def holds_whole_shard(manifest: Manifest, commit_log: pa.Table) -> np.ndarray:
    """Which commits hold their whole shard: a short last one does not once a run has grown."""
    shards = commit_log["shard"].to_numpy()
    in_run = (shards >= 0) & (shards < manifest.shards)
    return in_run & (commit_log["stop"].to_numpy() == manifest.stops(shards))


def check_merged(commit_log: pa.Table) -> None:
    """Refuse a commit log that counts rows twice.

    Every shard with rows in a merged file must have its commit there. A scan and a compaction at
    once, which a store cannot refuse, may break this rule. Another compaction mends it.
    """
    files = pc.list_flatten(commit_log["files"])
    paths = pc.struct_field(files, "path").combine_chunks().dictionary_encode()
    references = np.bincount(paths.indices.to_numpy(), minlength=len(paths.dictionary))
    # How many shards a file has is the same in every reference to it.
    shards = np.zeros(len(paths.dictionary), np.int64)
    shards[paths.indices.to_numpy()] = pc.struct_field(files, "shards").to_numpy()
    twice = np.flatnonzero(references != shards)
    if not len(twice):
        return
    first = twice[0]
    raise RunError(
        f"{paths.dictionary[first]}: holds the rows of {shards[first]} shards, and "
        f"{references[first]} commits refer to it; expected as many, or rows would be "
        "counted twice; run headcount compact while nobody else is at work on the run"
    )


def find_runs(path: Place) -> list[RunDirectory]:
    """The runs at `path`, which is a run directory or holds some; raises `RunError` without any."""
    try:
        if (path / "manifest.json").is_file():
            return [RunDirectory(path)]
        candidates = [
            RunDirectory(path / name) for name in sorted(names(path)) if name.startswith("run_id=")
        ]
        # A run that lost its manifest still counts as a run. Whoever reads it gets an error instead
        # of fewer rows.
        runs = [
            run for run in candidates if run.manifest_file.is_file() or "commits" in names(run.path)
        ]
    except OSError as error:
        raise unread(path, error) from None
    if not runs:
        raise RunError(
            f"{path}: no run here; expected a run directory, or a directory that holds run_id=… "
            "directories"
        )
    return runs


def differing_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ, with both values.

    >>> differing_keys({"scan": {"n_ctx": 64, "seed": 0}}, {"scan": {"n_ctx": 128, "seed": 0}})
    ['scan.n_ctx (64, now 128)']
    """

    def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from flattened(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    def shown(value: object) -> str:
        text = json.dumps(value)
        return text if len(text) <= 60 else f"{text[:57]}…"

    old, new = dict(flattened(before)), dict(flattened(now))
    return [
        f"{key} ({shown(old.get(key))}, now {shown(new.get(key))})"
        for key in sorted(old | new)
        if old.get(key) != new.get(key)
    ]
