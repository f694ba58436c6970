"""In which format an answer is written: as a table, CSV, JSON, Markdown or Parquet."""

from pathlib import Path, PurePath
from typing import Literal, TextIO, TypeAlias

from headcount.queries.ask.answers import Answer
from headcount.queries.ask.text_tables import COUNTED_ROWS, TABLE_ROWS, write_table
from headcount.queries.open.rooms import WRITERS
from headcount.schemas.errors import QueryError
from headcount.schemas.packages import entered

Format: TypeAlias = Literal["table", "csv", "json", "jsonl", "parquet", "markdown"]

SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".md": "markdown",
    ".parquet": "parquet",
    ".txt": "table",
}
"""The format that the name of a file asks for."""


def format_of(requested: Format | None, output: Path | None, vertical: bool = False) -> Format:
    """The format of an answer: the requested one, or the one that the file's name says."""
    suffix = "" if output is None else output.suffix.lower()
    suffix_format = SUFFIXES.get(suffix)
    if requested is not None and suffix_format is not None and requested != suffix_format:
        suffixes = {known_format: known for known, known_format in SUFFIXES.items()}
        raise QueryError(
            f"--format {requested} contradicts the name {output}: leave out --format, or name the "
            f"file …{suffixes[requested]}"
        )
    if requested is None and suffix and suffix_format is None:
        raise QueryError(
            f"{output}: expected a name that ends in {', '.join(SUFFIXES)}; or say --format "
            f"{'|'.join(SUFFIXES.values())}"
        )
    answer_format = requested or suffix_format or "table"
    if answer_format == "parquet" and output is None:
        raise QueryError("--format parquet writes a file; say which one with -o FILE.parquet")
    if vertical and answer_format != "table":
        raise QueryError(
            f"--vertical is a form of a table, and this is {answer_format}; leave out one"
        )
    return answer_format


def check_suffix(path: PurePath, *suffixes: str) -> None:
    """Refuse a name that promises another form of file than the one that is written."""
    if path.suffix.lower() not in suffixes:
        raise QueryError(f"{path}: expected a name that ends in {' or '.join(suffixes)}")


def rows_to_read(answer_format: Format, limit: int | None) -> int | None:
    """How many rows to ask for, as DuckDB reads no more: a table also counts rows that it hides."""
    if answer_format != "table":
        return limit
    shown_rows = TABLE_ROWS if limit is None else limit
    # One row more than are counted shows that there are even more.
    return shown_rows + COUNTED_ROWS + 1


def write(
    answer: Answer,
    answer_format: Format,
    out: TextIO,
    limit: int | None = None,
    vertical: bool = False,
) -> None:
    """Write an answer as text, row by row: it may be larger than the memory."""
    if answer_format == "table":
        write_table(answer, out, limit, vertical)
    else:
        entered(WRITERS[answer_format])(answer, out)
