"""Every error a user can meet, and the one way to name what they probably meant.

HeadcountError
├── ScanError       a scan file, an override or an option
├── ModelError      a model, its tokenizer or its weights
├── CorpusError     files of text
├── MeasureError    a number that is not one
├── RunError        a run directory, its manifest, shards and commits
└── QueryError      SQL, query names, output formats
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadcountError(Exception):
    """Anything that is explained in one line: what, what was expected, what arrived, what to do."""


class ScanError(HeadcountError):
    """The scan, as written, cannot be run."""


class ModelError(HeadcountError):
    """The model cannot be loaded, or is not what the scan says."""


class CorpusError(HeadcountError):
    """The text cannot be read, or holds too little of it."""


class MeasureError(HeadcountError):
    """A statistic is NaN or infinite where it is defined."""


class RunError(HeadcountError):
    """A run directory cannot be used as it is."""


class QueryError(HeadcountError):
    """A question that cannot be answered."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that `name` is no `kind`, and which known name comes nearest.

    >>> unknown("statistic", "sink_mas", ["sink_mass", "entropy"])
    "unknown statistic 'sink_mas': did you mean 'sink_mass'? Known: entropy, sink_mass"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}Known: {', '.join(names) or 'none'}"


def printable(text: str) -> str:
    """A text of somebody else's as a terminal may show it: what is no visible character is written
    out, for instance line ends, escape sequences and marks that turn the direction of writing.

    >>> printable("Pile-CC"), printable("a\\x1b[2Jb\\nc")
    ('Pile-CC', 'a\\\\x1b[2Jb\\\\nc')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
