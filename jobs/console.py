"""What commands print for people. Imports nothing heavy: every command loads this."""

import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console

from headcount.schemas.errors import RunError, printable
from headcount.schemas.text_columns import in_columns, padded


def say(console: Console, line: str) -> None:
    """Print lines as they are: not wrapped, without markup, control characters written out."""
    # Line ends stay: a message may have several lines.
    lines = map(printable, line.split("\n"))
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def tell(line: str) -> None:
    """Print lines for people on stderr: programs read stdout."""
    say(Console(highlight=False, stderr=True), line)


def check_can_ask(command: str, words: Sequence[str], yes: bool) -> None:
    """Refuse to ask before a deletion where nobody can answer; `yes` says it need not be asked."""
    if not yes and not sys.stdin.isatty():
        raise RunError(
            f"{command} asks before it deletes, and stdin is no terminal; {command} "
            f"{shlex.join([*words, '--yes'])} does not ask"
        )


def duration(seconds: float) -> str:
    """A time in words, in its two largest units.

    >>> duration(0.25), duration(45), duration(125), duration(7300)
    ('0.2 s', '45 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def in_bytes(count: float) -> str:
    """A number of bytes in the unit that leaves at most three digits before the point.

    >>> in_bytes(999), in_bytes(1_234_567)
    ('999 bytes', '1.23 MB')
    """
    size = count
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def print_terms(rows: Sequence[tuple[str, str]]) -> None:
    """Print names with what they mean, wrapped in a terminal and a line each in a pipe."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    indent = max(cell_len(name) for name, _ in rows) + 2
    for name, meaning in rows:
        # A narrow terminal still gets words, and wraps them itself.
        lines = textwrap.wrap(meaning, max(width - indent, 20), break_on_hyphens=False)
        print(padded(name, indent) + f"\n{'':<{indent}}".join(lines))


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows in columns that are never cut, not even on a narrow terminal."""
    print("\n".join(in_columns(rows)))
