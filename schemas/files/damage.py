"""Which committed files are gone or have another size than was committed.

There are two checks of different cost. This one goes by name, which has a digest in it, and in a
store by size: a listing of each directory is enough, for a million files in seconds. The other
(`content_check.py`) reads every file.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headcount.schemas.files.commits import COMMITS_PER_SEGMENT, pc
from headcount.schemas.filled_tables import OF_MERGED, TABLES
from headcount.schemas.packages import entered
from headcount.schemas.places import NOT_LISTED, Place, StorePath, names, sizes, unread

DATA_FOLDER = rf"({'|'.join(TABLES)})/intervention=[\w().,+-]+"
DATA_FILE = r"(shard|merged)-[\w-]+\.parquet"
"""Names of the folders and files of data. A commit that names another path is damaged."""

BY_SIZE = ["files.path", "files.bytes"]  # what `files_damaged_by_size` reads

FEW_NAMES = 10_000  # of a directory: a set of more takes long and much memory
LISTING = "schemas.files.listing.Listing"  # of many names

LOOKED_FOR = 16  # objects that a listing lacks, of which the store is asked one by one


@dataclass(frozen=True)
class Damage:
    """A committed file that differs from what was committed."""

    path: str  # relative to the run directory
    shards: list[int]  # shards whose rows were in the file
    why: str

    def __str__(self) -> str:
        return f"{shards_in_words(self.shards)}: {self.path} {self.why}"

    @property
    def is_of_rollup(self) -> bool:
        """Whether a merge made the file of rows that lie in other files: its shards are done."""
        return self.path.partition("/")[0] in OF_MERGED and is_data_path(self.path)


def shards_in_words(shards: Sequence[int]) -> str:
    """A list of shards as a phrase.

    >>> shards_in_words([4]), shards_in_words([5, 3, 4]), shards_in_words([3, 5])
    ('shard 4', 'shards 3 to 5', '2 shards from 3 to 5')
    """
    if len(shards) == 1:
        return f"shard {shards[0]}"
    low, high = min(shards), max(shards)
    if len(shards) == high - low + 1:
        return f"shards {low} to {high}"
    return f"{len(shards):,} shards from {low} to {high}"


def is_data_path(path: str) -> bool:
    """Whether a run may have a data file there. A damaged commit log may hold any path."""
    return bool(re.fullmatch(f"{DATA_FOLDER}/{DATA_FILE}", path))


def data_folders(commit_log: pa.Table) -> list[str]:
    """The directories of the data files of a commit log, relative to the run."""
    folders: set[str] = set()
    # In batches, because the texts of a million commits take much memory.
    for batch in commit_log.select(["files"]).to_batches(COMMITS_PER_SEGMENT):
        paths = pc.struct_field(batch["files"].flatten(), "path")
        folders.update(_folders_and_names(paths)[0].unique().to_pylist())
    # A damaged commit log may hold any path. Nothing outside the run's tables is listed.
    return sorted(one for one in folders if re.fullmatch(DATA_FOLDER, one))


def _folders_and_names(paths: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The folder and the name of each path; a path without a folder is both."""
    parts = pc.split_pattern(paths, "/", max_splits=1, reverse=True)
    ends = parts.offsets.to_numpy()
    return parts.values.take(pa.array(ends[:-1])), parts.values.take(pa.array(ends[1:] - 1))


def files_damaged_by_size(home: Place, commit_log: pa.Table) -> list[Damage]:
    """Committed files of a commit log that are missing, or in a store have another size.

    A directory is listed once, instead of asking for each file: in a store a request per file would
    take hours. A path outside the run's tables is damage.
    """
    sizes_in: dict[str, SizesIn] = {}
    damages: dict[str, Damage] = {}
    for batch in commit_log.select(["shard", "files"]).to_batches(COMMITS_PER_SEGMENT):
        # A row of the commit log has a list of files. From here on there is one entry per file.
        files, rows = batch["files"].flatten(), pc.list_parent_indices(batch["files"])
        paths = pc.struct_field(files, "path")
        committed = pc.struct_field(files, "bytes").to_numpy()
        actual = np.full(len(files), NOT_OURS)
        folders, file_names = _folders_and_names(paths)
        encoded = folders.dictionary_encode()
        for number, folder in enumerate(encoded.dictionary.to_pylist()):
            if re.fullmatch(DATA_FOLDER, folder):
                if folder not in sizes_in:
                    sizes_in[folder] = _sizes_in(home / folder)
                here = np.flatnonzero(encoded.indices.to_numpy() == number)
                of_folder = file_names.take(pa.array(here))
                actual[here] = sizes_in[folder](of_folder, committed[here])
        for i in np.flatnonzero(actual != committed).tolist():
            path, shard = paths[i].as_py(), batch["shard"][rows[i].as_py()].as_py()
            size = int(actual[i]) if is_data_path(path) else NOT_OURS
            why = size_problem(size, int(committed[i]))
            damages.setdefault(path, Damage(path, [], why)).shards.append(shard)
    return list(damages.values())


SizesIn: TypeAlias = Callable[[pa.Array, np.ndarray], np.ndarray]
"""The sizes of files in a directory, of their names and committed sizes; `GONE` if not there."""


def _sizes_in(directory: Place) -> SizesIn:
    if isinstance(directory, StorePath):
        listed = dict(sizes(directory))

        def sizes_listed(files: pa.Array, _: np.ndarray) -> np.ndarray:
            found = np.array([listed.get(name, GONE) for name in files.to_pylist()])
            gone = np.flatnonzero(found == GONE)
            # A listing that was cut lacks objects that are there, so some are looked for by name.
            for i in gone[:: max(1, len(gone) // LOOKED_FOR)].tolist():
                if (directory / files[i].as_py()).is_file():
                    raise unread(directory, OSError(NOT_LISTED))
            return found

        return sizes_listed
    # On a disk a size is a call for each file, so what is there counts as committed.
    there = names(directory)
    if len(there) > FEW_NAMES:
        listing = entered(LISTING)(there)
        return lambda files, committed: np.where(listing.holds(files), committed, GONE)
    few = {*there}
    return lambda files, committed: np.where(
        [name in few for name in files.to_pylist()], committed, GONE
    )


NOT_OURS, GONE = -2, -1  # in place of the size of a path that is none of ours, or is gone


def size_problem(actual: int, committed: int) -> str:
    """What is wrong with a size that is not the committed one, as words behind the path."""
    if actual == NOT_OURS:
        return "is not a file of this run"
    if actual == GONE:
        return "is gone"
    return f"has {actual:,} bytes where {committed:,} were committed"
