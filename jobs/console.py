"""What commands print for people. Imports nothing heavy: every command loads this."""

from __future__ import annotations

from rich.console import Console

from schemas.errors import printable


def say(console: Console, line: str) -> None:
    """Print lines as they are: not wrapped, without markup, control characters written out."""
    # Line ends stay: a message may have several lines.
    lines = map(printable, line.split("\n"))
    console.print("\n".join(lines), markup=False, soft_wrap=True)


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
