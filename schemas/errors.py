"""Every error that a user can meet, and helpers for their texts."""

import difflib
from collections.abc import Iterable

LONGEST_NAME = 200  # characters of an unknown name that an error repeats


class HeadcountError(Exception):
    """An error that one line explains: the thing, what was expected, what arrived, what to do."""


class ScanError(HeadcountError):
    """The scan cannot be run as it is written."""


class ModelError(HeadcountError):
    """The model cannot be loaded, or differs from what the scan says."""


class CorpusError(HeadcountError):
    """The files of text cannot be read, or hold too little text."""


class MeasureError(HeadcountError):
    """A statistic is NaN or infinite where it is defined."""


class RunError(HeadcountError):
    """A run directory cannot be used as it is."""


class StoreError(RunError):
    """A store does not give what lies in it. Whoever reads must not take it for missing."""


class OtherRunError(RunError):
    """A run that cannot be continued: it measured something else, or too little of it is left."""


class WriteError(RunError):
    """A disk or a store does not take a file. It probably takes no other either."""


class SilentStoreError(WriteError):
    """A store does not answer, however often it is asked. It probably answers nobody else."""


class QueryError(HeadcountError):
    """A question that cannot be answered."""


def counted(count: int, noun: str) -> str:
    """A count with its noun, singular or plural.

    >>> counted(1, "shard"), counted(2000, "bad row")
    ('1 shard', '2,000 bad rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The text of an error about an unknown name, with the nearest of the known ones.

    >>> unknown("statistic", "sink_mas", ["sink_mass", "entropy"])
    "unknown statistic 'sink_mas': did you mean 'sink_mass'? Known: entropy, sink_mass"
    """
    # A whole text may stand where a name was expected.
    name = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
    known_names = sorted(known)
    nearest = difflib.get_close_matches(name, known_names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown {kind} {name!r}: {hint}Known: {', '.join(known_names) or 'none'}"


def printable(text: str) -> str:
    """A text from a file, safe to show in a terminal: invisible characters are written out.

    These are for example line ends, escape sequences and marks that change the writing direction.

    >>> printable("Pile-CC"), printable("a\\x1b[2Jb\\nc")
    ('Pile-CC', 'a\\\\x1b[2Jb\\\\nc')
    """
    letters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(letters)
