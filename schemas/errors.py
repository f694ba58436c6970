"""Every error that a user can meet, and helpers for their texts."""

import difflib
import re
from collections.abc import Iterable, Sequence

LONGEST_NAME = 200  # characters of an unknown name that an error repeats

NEAR, NEAR_WORD, VERY_NEAR = 0.5, 0.6, 0.85
"""How alike two names are if one may have been meant by the other, two words of such names, and
names of which several may be said.
"""

MOST_NEAR = 3  # near names that an error names
MOST_LISTED = 24  # known names that an error lists; of more it says what lists them

LISTINGS = {
    "statistic": "headcount list statistics",
    "intervention": "headcount list interventions",
    "input family": "headcount list inputs",
    "bundled model": "headcount list models",
    "profile": "docs/reference/profiles.md",
    "prediction": "docs/reference/predictions.md",
    "weight statistic": "docs/reference/weights.md",
    "key": "docs/reference/scan.md",
    "view": "headcount query RUNS",
    "query": "headcount query RUNS",
    "replication": "headcount reproduce --list",
    "run": "headcount list",
}
"""What lists all names of a kind."""


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


class AnotherRunError(RunError):
    """A run that cannot be continued as asked. Another run can be begun beside it."""

    def __init__(self, run: object, problem: str) -> None:
        super().__init__(f"{problem}; headcount scan --new starts another run")
        self.run = run  # where it lies
        self.problem = problem  # what is wrong, without what a scan's command does about it


class WriteError(RunError):
    """A disk or a store does not take a file. It probably takes no other either."""


class SilentStoreError(WriteError):
    """A store does not answer, however often it is asked. It probably answers nobody else."""


class QueryError(HeadcountError):
    """A question that cannot be answered."""


class SqlMistake(QueryError):
    """A query that DuckDB does not understand."""

    def __init__(self, text: str, pointer: str | None = None) -> None:
        super().__init__(text)
        self.pointer = pointer  # the line of SQL, and carets below its mistake; None if unknown


def counted(count: int, noun: str) -> str:
    """A count with its noun, singular or plural.

    >>> counted(1, "shard"), counted(2000, "bad row")
    ('1 shard', '2,000 bad rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The text of an error about an unknown name, with those of the known ones that are near it.

    Of many names it only says what lists them.

    >>> unknown("statistic", "sink_mas", ["sink_mass", "entropy"])
    "unknown statistic 'sink_mas': did you mean 'sink_mass'? Known: entropy, sink_mass"
    >>> unknown("intervention", "ablate", map(str, range(50)))
    "unknown intervention 'ablate': Known: 50, as headcount list interventions says"
    """
    # A whole text may stand where a name was expected.
    name = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
    known_names = sorted(known)
    near = [repr(each) for each in near_names(name, known_names)]
    choices = " or ".join(filter(None, [", ".join(near[:-1]), *near[-1:]]))
    hint = f"did you mean {choices}? " if near else ""
    if len(known_names) > MOST_LISTED:
        listing = LISTINGS.get(kind)
        listed = f"{len(known_names)}{f', as {listing} says' if listing else ''}"
    else:
        listed = ", ".join(known_names) or "none"
    return f"unknown {kind} {name!r}: {hint}Known: {listed}"


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """The known names that may have been meant, the nearest first.

    Each word is near a word of theirs: `ablate_head` is not `patch_head`.

    >>> near_names("zero_heads", ["keep_head", "zero_head", "zero_mlp", "zero_heard"])
    ['zero_head', 'zero_heard']
    >>> near_names("ablate_head", ["patch_head", "zero_head"])
    []
    """

    def words_of(text: str) -> list[str]:
        # Numbers count only in how alike the whole names are.
        return re.findall(r"[^\W\d_]+", text.lower())

    def is_near(other: str) -> bool:
        words, other_words = words_of(name), words_of(other)
        is_one_word = len(words) == len(other_words) == 1
        return is_one_word or all(
            difflib.get_close_matches(word, other_words, cutoff=NEAR_WORD) for word in words
        )

    candidates = difflib.get_close_matches(name, known, n=len(known) or 1, cutoff=NEAR)
    nearest = [other for other in candidates if is_near(other)][:MOST_NEAR]
    very_near = difflib.get_close_matches(name, nearest, n=MOST_NEAR, cutoff=VERY_NEAR)
    return very_near or nearest[:1]


MOST_NAMES = 12  # names that an error lists


def unknown_among(kind: str, name: str, known: Iterable[str], listing: str) -> str:
    """The text of an error about a name that is none of many: the close ones, and what lists all.

    >>> known = [f"score_{number}" for number in range(100)]
    >>> unknown_among("column", "score", known[:2], "DESCRIBE heads")
    "unknown column 'score': did you mean 'score_1'? Known: score_0, score_1"
    >>> unknown_among("column", "score_99x", known, "DESCRIBE heads")[:63]
    "unknown column 'score_99x': did you mean 'score_99'? Also near:"
    """
    known_names = sorted(known)
    if len(known_names) <= MOST_NAMES:
        return unknown(kind, name, known_names)
    # A beginning of a name may be too short to be close to it.
    beginnings = [each for each in known_names if len(name) > 2 and name.lower() in each.lower()]
    close = difflib.get_close_matches(name, known_names, n=MOST_NAMES // 2, cutoff=0.5)
    nearest = list(dict.fromkeys([*close[:1], *beginnings, *close]))[: MOST_NAMES // 2]
    every = f"{listing} lists all {len(known_names)}"
    if not nearest:
        return f"unknown {kind} {name[:LONGEST_NAME]!r}: {every}"
    near = f"Also near: {', '.join(nearest[1:])}; " if len(nearest) > 1 else ""
    return f"unknown {kind} {name[:LONGEST_NAME]!r}: did you mean {nearest[0]!r}? {near}{every}"


def printable(text: str) -> str:
    """A text from a file, safe to show in a terminal: invisible characters are written out.

    These are for example line ends, escape sequences and marks that change the writing direction.

    >>> printable("Pile-CC"), printable("a\\x1b[2Jb\\nc")
    ('Pile-CC', 'a\\\\x1b[2Jb\\\\nc')
    """
    letters = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(letters)
