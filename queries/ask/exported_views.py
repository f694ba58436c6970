"""A DuckDB file that holds the views of runs and none of their rows, for dashboards."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote

import duckdb

from headcount.queries.ask.answer_files import appearing
from headcount.queries.ask.formats import check_suffix
from headcount.queries.open.opened_runs import OpenedRuns
from headcount.queries.open.run import Run, read_runs
from headcount.schemas.errors import QueryError, counted
from headcount.schemas.files.content_check import committed_files, problem_of_size
from headcount.schemas.files.damage import Damage
from headcount.schemas.places import place

OLDEST_READER = "v1.4.0"
"""The oldest DuckDB that reads the file. Dashboards bring an older one than ours: Evidence has 1.4.
An older file cannot hold our macros, because their parameters have types."""

NOTE = (
    "These views read the Parquet files that were committed when this file was written. Rows that "
    "a scan has written since are not seen, and files that were merged or removed are missed: run "
    "the command in `refresh` again. It replaces this file in one step."
)
STORE_NOTE = (
    " The runs lie in an object store: a reader needs INSTALL httpfs; LOAD httpfs; and a secret, "
    "CREATE SECRET (TYPE s3, PROVIDER credential_chain), with ENDPOINT if it is not Amazon's."
)


CREATE_NOTES = """
    CREATE TABLE headcount_notes AS
    SELECT
        ?::TIMESTAMP AS written_utc, ? AS runs,
        sum(shards_done)::BIGINT AS shards_done, sum(shards)::BIGINT AS shards,
        ? AS refresh, ? AS note
    FROM runs"""

COUNTS = """
    SELECT
        (SELECT count(*) FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal),
        (
            SELECT count(*) FROM duckdb_functions()
            WHERE function_type = 'table_macro' AND NOT internal
        ),
        coalesce(shards_done, 0), coalesce(shards, 0)
    FROM headcount_notes"""
"""Views, queries with parameters, shards that are done, and shards in all."""


def _without_cut_files(run: Run) -> Run:
    """The run without what has another size on a disk: who reads the views later compares nothing.

    Reading all files would take as long as a query. Those of a store were listed with their sizes.
    """
    home = run.directory.path
    if not isinstance(home, Path):
        return run
    cut = [
        Damage(file.path, file.shards, why)
        for file in committed_files(run.done)
        if (why := problem_of_size(home, file)) is not None
    ]
    return replace(run, damaged=[*run.damaged, *cut]) if cut else run


def write_views(runs_path: str, output: Path, code: str | None = None) -> tuple[str, list[str]]:
    """Write the views of runs into a DuckDB file that appears whole; returns lines about it."""
    # It replaces an older one, which should be no other file.
    check_suffix(output, ".duckdb", ".db")
    if output.exists() and not output.is_file():
        raise QueryError(f"{output}: expected a file, or a name that is free")
    where = place(runs_path)
    absolute = where.resolve() if isinstance(where, Path) else where
    runs, unreadable = read_runs(absolute, code)
    runs = [_without_cut_files(run) for run in runs]
    with appearing(output) as partial:
        # Of a command with the same process number that was killed. DuckDB would go on with it.
        partial.unlink(missing_ok=True)
        try:
            connection = duckdb.connect(
                str(partial), config={"storage_compatibility_version": OLDEST_READER}
            )
        except duckdb.IOException as error:
            why = str(error).partition("\n")[0]
            raise QueryError(f"{output}: cannot be written ({why})") from None
        try:
            opened = OpenedRuns(connection, runs, unreadable, tell=print)
            opened.build()
            opened.make_described_views()
            refresh = f"headcount views {quote(str(absolute))} -o {quote(str(output.resolve()))}"
            refresh += f" --code {quote(code)}" if code else ""
            note = NOTE if isinstance(absolute, Path) else NOTE + STORE_NOTE
            now = datetime.now(UTC).replace(tzinfo=None)
            connection.execute(CREATE_NOTES, [now, str(absolute), refresh, note])
            connection.execute(
                "COMMENT ON TABLE headcount_notes IS 'How old the views of this file are, how much "
                "of the runs they see, how to renew them.'"
            )
            ((views, macros, shards_done, shards),) = connection.execute(COUNTS).fetchall()
        finally:
            # Closing writes what is still in the log beside the file.
            connection.close()
        size = partial.stat().st_size
    written = (
        f"{output}: {counted(views, 'view')} and {macros} queries with parameters over "
        f"{counted(len(opened.runs), 'run')} ({shards_done:,} of {counted(shards, 'shard')} done), "
        f"{size / 1e6:.1f} MB"
    )
    return written, opened.damage()
