"""What a run directory holds, and which of it counts.

runs/run_id=NAME-HASH/
├── scan.toml        as submitted
├── manifest.json    everything resolved: what is measured, with what, by which code
├── index/           documents of the corpus, where there is one: their lengths and hashes
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
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import ValidationError

from schemas.commits import (
    READERS,
    Commit,
    commit_name,
    commits_of,
    read_ledger,
    read_oldest,
    read_parts,
)
from schemas.document_fates import Fates
from schemas.errors import OtherRunError, RunError
from schemas.kinds import TABLES
from schemas.manifest import Manifest
from schemas.parquet import is_whole
from schemas.places import Place, names, place, reason

DATA_FOLDER = rf"({'|'.join(TABLES)})/intervention=[\w().,+-]+"
DATA_FILE = r"^(shard-\d+|merged-[\w-]+)\.parquet$"
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
    def fates_file(self) -> Place:
        """What became of the corpus's documents, by part."""
        return self.index / "fates.json"

    def fates(self) -> Fates | None:
        """What became of the corpus's documents; none where there is no corpus, or an older run did
        not keep it.
        """
        try:
            return Fates.read(json.loads(self.fates_file.read_bytes()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

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
                f"{self.path}: no manifest.json; expected the directory of a run"
            ) from None
        except OSError as error:
            raise RunError(f"{self.manifest_file}: cannot be read ({reason(error)})") from None
        except ValidationError as error:
            raise OtherRunError(
                f"{self.manifest_file}: not a manifest ({error.error_count()} problems)"
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

    def damaged_files(
        self, parts: Iterable[pa.Table], thorough: bool = False
    ) -> dict[str, list[int]]:
        """Files of a ledger (or of parts of one) that are not there or not whole, and the shards
        whose rows they held.

        On a disk a power cut can leave a file without its content, so files are opened as long as
        their commits are not folded, and all of them if `thorough`; the others are looked for by
        name. What a store has taken is whole: there nothing is looked for, unless `thorough`. A
        file outside the run's tables is none of its files.
        """
        found: dict[str, list[int]] = {}
        present: dict[str, Names] = {}
        for part in parts:
            rows = pc.list_parent_indices(part["files"]).to_numpy()
            paths = pc.struct_field(pc.list_flatten(part["files"]), "path").combine_chunks()
            bad = self._bad(paths, part["folded"].to_numpy()[rows], thorough, present)
            for i in np.flatnonzero(bad):
                found.setdefault(paths[i].as_py(), []).append(part["shard"][rows[i]].as_py())
        return found

    def _bad(
        self, paths: pa.Array, folded: np.ndarray, thorough: bool, present: dict[str, Names]
    ) -> np.ndarray:
        """Which files are bad; `present` keeps what lies in each directory."""
        on_disk = isinstance(self.path, Path)
        halves = pc.split_pattern(paths, "/", max_splits=1, reverse=True)
        folders = pc.list_element(halves, 0).dictionary_encode()
        codes, own = folders.indices.to_numpy(), pc.list_element(halves, 1) if len(paths) else paths
        bad = ~pc.match_substring_regex(own, DATA_FILE).to_numpy(zero_copy_only=False)
        for code, folder in enumerate(folders.dictionary.to_pylist()):
            here = codes == code
            if not re.fullmatch(DATA_FOLDER, folder):
                bad[here] = True
            elif on_disk and not thorough and len(named := np.flatnonzero(here & folded & ~bad)):
                if folder not in present:
                    present[folder] = Names.of(names(self.path / folder))
                bad[named] = ~present[folder].hold(own.take(pa.array(named)))
        opened = ~bad & (thorough | (on_disk & ~folded))
        places = np.flatnonzero(opened)
        with ThreadPoolExecutor(READERS) as pool:
            whole = pool.map(lambda i: is_whole(self.path / paths[i].as_py()), places.tolist())
            bad[places] = ~np.fromiter(whole, bool, len(places))
        return bad


@dataclass(frozen=True)
class Names:
    """What lies in a directory of data files; a million names take a few megabytes."""

    shards: np.ndarray
    """The numbers in `shard-NUMBER.parquet`, sorted."""
    others: frozenset[str]

    @classmethod
    def of(cls, found: Iterable[str]) -> Names:
        """Sort names by kind."""
        every = pa.array(found, pa.string())
        of_shards = pc.match_substring_regex(every, r"^shard-\d+\.parquet$")
        numbers = (
            pc.utf8_slice_codeunits(every.filter(of_shards), 6, -8).cast(pa.int64()).to_numpy()
        )
        return cls(np.sort(numbers), frozenset(every.filter(pc.invert(of_shards)).to_pylist()))

    def hold(self, wanted: pa.Array) -> np.ndarray:
        """Which of some names are there."""
        of_shards = pc.starts_with(wanted, "shard-").to_numpy(zero_copy_only=False)
        numbers = pc.utf8_slice_codeunits(wanted.filter(pa.array(of_shards)), 6, -8)
        there = np.zeros(len(wanted), bool)
        wanted_shards = numbers.cast(pa.int64()).to_numpy()
        near = np.searchsorted(self.shards, wanted_shards).clip(max=max(0, len(self.shards) - 1))
        there[of_shards] = self.shards[near] == wanted_shards if len(self.shards) else False
        for i in np.flatnonzero(~of_shards):
            there[i] = wanted[i].as_py() in self.others
        return there


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
        found = [run for run in inside if run.manifest_file.is_file()]
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
