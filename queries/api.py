"""Runs opened in Python: queries in SQL, tables, and cards of heads. `headcount.open` opens them.

It needs neither torch nor Ray. A mistake is an error of `schemas.errors` with one line.

```python
runs = headcount.open("runs")
runs.sql("SELECT label, avg(sink_mass) FROM heads GROUP BY ALL").df()
runs.head("L5H1").show()
```
"""

from __future__ import annotations

import html
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias

import pyarrow as pa
from pydantic import Field

from headcount.queries.ask.answers import Answer, rows_of, run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.ask.formats import check_suffix
from headcount.queries.ask.text_tables import html_table, text_table
from headcount.queries.open.limits import MEMORY, check_memory
from headcount.queries.open.named_queries import NamedQuery
from headcount.queries.open.run import read_runs
from headcount.queries.open.run_memory import RunMemory
from headcount.schemas.arguments import Location, Name, checked
from headcount.schemas.errors import QueryError, unknown
from headcount.schemas.places import absolute, check_on_disk
from headcount.schemas.values import Count, Positive
from headcount.workers.run_model import RunModels

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import polars

    from headcount.queries.report.head_card import HeadCard

ROWS_SHOWN = 20  # rows of an answer that a notebook shows; `df()`, `pl()` and `arrow()` have all

QueryText: TypeAlias = Annotated[str, Field(min_length=0)]
"""An empty one has an error of its own, which says what can be asked."""

MORE_ROWS = "and more rows: df(), pl() and arrow() have all"

CARD_HEIGHT = 900  # height of a card in a notebook, in pixels; it scrolls

RUNS_SUMMARY = """
    SELECT run_id, model, input_family AS input,
        array_to_string(interventions, ', ') AS interventions, complete,
        sequences_done || ' of ' || sequences AS sequences, rows
    FROM runs ORDER BY run_id
"""
"""What a notebook shows of opened runs: which they are, and how much of each is in."""


class Runs:
    """Opened runs. They show what was committed when they were opened; `refresh` looks again."""

    @checked(QueryError)
    def __init__(
        self,
        path: Location,
        *,
        code: Name | None = None,
        memory: Name = MEMORY,
    ) -> None:
        # A notebook may change its working directory, and `refresh` must find the same runs.
        self.path = absolute(path)
        self.code = code
        self.memory = check_memory(memory)
        self.models = RunModels(str(self.path))
        self._memory_of_runs = RunMemory()
        self._database: RunDatabase | None = self._opened()

    def _opened(self) -> RunDatabase:
        database = open_runs(
            self.path,
            code=self.code,
            memory=self.memory,
            tell=_warn,
            read=self._memory_of_runs.read_run,
        )
        for line in database.damage():
            _warn(f"warning: {line}")
        return database

    @property
    def database(self) -> RunDatabase:
        """The views of the runs; an error once they are closed."""
        if self._database is None:
            raise QueryError(f"{self.path}: closed; headcount.open opens these runs again")
        return self._database

    @checked(QueryError)
    def sql(
        self, query: QueryText, *, timeout: Positive | None = None, **parameters: object
    ) -> AnswerTable:
        """Ask in SQL, or by the name of a query with its parameters: `"sink_heads", threshold=0.2`.

        Nothing can be written; `timeout` is in seconds. A mistake in the SQL is an error here. What
        only the rows show, for example a statistic that no run measured, is one when they are read.
        """
        queries = self.database.shipped.queries
        return AnswerTable(self, _with_parameters(query, parameters, queries), timeout)

    @checked(QueryError)
    def head(self, label: Name, *, run_id: Name | None = None, intervention: Name = "none") -> Head:
        """The card of a head, such as `L5H1`, of one run. `run_id` may be left out if one is open.

        The card has every statistic with its uniform baseline and its place among the heads. Tokens
        are numbers if the tokenizer of the model is not there.
        """
        from headcount.queries.report.head_card import head_card

        return Head(head_card(self.database, label, run_id, intervention, self.models))

    @checked(QueryError)
    def attention(
        self,
        label: Name,
        text: QueryText,
        *,
        run_id: Name | None = None,
        intervention: Name = "none",
    ) -> TextAttention:
        """Where each token of a text of your own looks in a head, such as `L5H1`.

        The model of the run reads it, under an intervention of the run; BOS stands before it if the
        run's sequences have one. `run_id` may be left out if one run is open.
        """
        from headcount.queries.report.read_text import read_text

        tokens, weights = read_text(self.database, self.models, label, text, run_id, intervention)
        return TextAttention(label, tokens, weights)

    def refresh(self) -> Self:
        """Look at the commits again: a scan that runs has written more since."""
        known = self.database.runs
        runs, unreadable = read_runs(self.path, self.code, self._memory_of_runs.read_run)
        # The memory gives back the same object for a run that has not changed.
        is_unchanged = len(runs) == len(known) and all(map(is_, runs, known))
        # What was damaged may have been measured again since, under the same commits.
        if is_unchanged and not unreadable and not self.database.damage():
            return self
        # Opened before the old ones are closed: if it fails, these can still be asked.
        opened = self._opened()
        self.close()
        self._database = opened
        return self

    @property
    def views(self) -> dict[str, str]:
        """What can be asked by name: every view, and what it is for."""
        return self.database.view_descriptions

    def close(self) -> None:
        """Free the memory and the files of the connection. Nothing can be asked afterwards."""
        if self._database is not None:
            self._database.close()
        self._database = None

    def __enter__(self) -> Self:
        """Use the runs in a `with` block, which closes them."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or in another process, opens the same runs for itself."""
        return partial(Runs, code=self.code, memory=self.memory), (self.path,)

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self.close()

    def __repr__(self) -> str:
        if self._database is None:
            return f"{self.path} (closed)"
        return f"{self.path}\n{self.sql(RUNS_SUMMARY)!r}"

    def _repr_html_(self) -> str:
        table = "" if self._database is None else self.sql(RUNS_SUMMARY)._repr_html_()
        return f"<p>{html.escape(str(self.path))}</p>{table}"


class AnswerTable:
    """The answer to a query. Its rows are computed once, when they are first asked for."""

    def __init__(self, runs: Runs, query: str, timeout: float | None) -> None:
        self._runs = runs
        self._query = query
        self._timeout = timeout
        # No row is read, but DuckDB finds what is wrong with the SQL.
        self.schema: pa.Schema = self._ask(limit=0).schema  # names and types of the columns

    def _ask(self, limit: int | None = None) -> Answer:
        return run_query(self._runs.database, self._query, limit, self._timeout)

    @cached_property
    def _table(self) -> pa.Table:
        return self._ask().table()

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema.names)

    def arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self._table

    def df(self) -> pandas.DataFrame:
        """The rows as a pandas data frame."""
        try:
            import pandas  # noqa: F401 - Arrow imports it, and its message names no remedy.
        except ImportError:
            raise _not_installed("pandas", "df") from None
        try:
            return self._table.to_pandas()
        except (OverflowError, ValueError) as error:
            raise QueryError(
                f"df(): a time that pandas does not have ({error}); cast its column to VARCHAR in "
                "the query, or use rows(), which gives such times as text"
            ) from None

    def pl(self) -> polars.DataFrame:
        """The rows as a polars data frame."""
        try:
            import polars
        except ImportError:
            raise _not_installed("polars", "pl") from None
        frame = polars.from_arrow(self._table)
        assert isinstance(frame, polars.DataFrame)
        return frame

    def rows(self) -> list[tuple[Any, ...]]:
        """The rows as Python values; a row of one column is a tuple too."""
        return [row for batch in self._table.to_batches() for row in rows_of(batch)]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """The rows, one after the other."""
        return iter(self.rows())

    def __len__(self) -> int:
        """How many rows there are."""
        return self._table.num_rows

    @cached_property
    def _first_rows(self) -> list[tuple[Any, ...]]:
        """Those that a notebook shows, and one more if there are more."""
        return list(self._ask(limit=ROWS_SHOWN + 1).rows())

    def __repr__(self) -> str:
        more = f"\n… {MORE_ROWS}" if len(self._first_rows) > ROWS_SHOWN else ""
        return text_table(self.columns, self._first_rows[:ROWS_SHOWN]) + more

    def _repr_html_(self) -> str:
        more = f"<p>… {MORE_ROWS}</p>" if len(self._first_rows) > ROWS_SHOWN else ""
        return html_table(self.columns, self._first_rows[:ROWS_SHOWN]) + more


class Shown:
    """What a notebook shows as a page."""

    def html(self) -> str:
        """The page as one HTML document, which needs no network."""
        raise NotImplementedError

    @checked(QueryError)
    def save(self, path: Location) -> Path:
        """Write the page to an HTML file."""
        check_on_disk(path)
        file = Path(path)
        check_suffix(file, ".html", ".htm")
        try:
            file.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise QueryError(f"{file}: cannot be written ({error.strerror})") from None
        return file

    @checked(QueryError)
    def show(self, height: Count = CARD_HEIGHT) -> Frame:
        """The page for the output of a cell, in a notebook; `height` is in pixels."""
        return Frame(self.html(), height)

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


@dataclass(frozen=True, repr=False)
class Head(Shown):
    """One head: its card as data, and as a page to look at."""

    card: HeadCard  # every statistic, distribution and extreme sequence, as plain lists and numbers

    def __repr__(self) -> str:
        card = self.card
        rows = [(s.name, s.mean, s.standard_error, s.percentile) for s in card.statistics]
        table = text_table(("statistic", "mean", "standard_error", "percentile"), rows)
        return f"{card.label} of {card.model}, {card.run_id}, {card.intervention}\n{table}"

    def html(self) -> str:
        """The card as one HTML document, which needs no network."""
        from headcount.queries.report.head_card import card_html

        return card_html(self.card)


@dataclass(frozen=True, repr=False)
class TextAttention(Shown):
    """Where each token of a text looks in one head."""

    label: str
    tokens: list[str]  # the text of each
    weights: np.ndarray  # `[query key]`: 0 behind a query, NaN behind a window

    def __repr__(self) -> str:
        import numpy as np

        most = np.nan_to_num(self.weights).argmax(1)
        columns = ("token", "text", "looks most at", "text of that", "weight")
        rows = [
            (query, repr(self.tokens[query]), int(key), repr(self.tokens[key]), weights[key])
            for query, (key, weights) in enumerate(zip(most, self.weights, strict=True))
        ]
        return f"{self.label}\n{text_table(columns, rows)}"

    def html(self) -> str:
        """The tokens and their pattern as one HTML document, which needs no network."""
        from headcount.queries.report.read_text import text_html

        return text_html(self.label, self.tokens, self.weights)


@dataclass(frozen=True, repr=False)
class Frame:
    """An HTML document inside a notebook. Its styles, its scripts and its texts stay inside."""

    document: str
    height: int

    def __repr__(self) -> str:
        return (
            f"a page of {len(self.document):,} characters; a notebook shows it as the last value "
            "of a cell, and save(FILE) of what is shown writes it to a file"
        )

    def _repr_html_(self) -> str:
        # A sandbox without `allow-same-origin`: a text of a corpus never reaches the notebook.
        return (
            f'<iframe srcdoc="{html.escape(self.document)}" sandbox="allow-scripts" '
            f'style="width: 100%; height: {self.height}px; border: 0" title="about a head">'
            "</iframe>"
        )


def _with_parameters(
    query: str, parameters: dict[str, object], queries: Mapping[str, NamedQuery]
) -> str:
    """A query in SQL; only named queries take parameters."""
    if not parameters:
        return query
    found = queries.get(query.strip())
    if found is None:
        raise QueryError(
            f"{next(iter(parameters))}: only named queries take parameters, and this is SQL; "
            "write the value into it"
            if " " in query.strip()
            else unknown("query", query.strip(), queries)
        )
    # As a user would type them: true, not True.
    values = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in parameters.items()
    }
    return found.call(values)


def _warn(line: str) -> None:
    """Warn of damaged files: their shards are in no answer."""
    warnings.warn(line.removeprefix("warning: "), stacklevel=2)


def _not_installed(library: str, method: str) -> QueryError:
    return QueryError(
        f"{method}() needs {library}, which is not installed: pip install -e '.[notebook]'; or use "
        "arrow(), which needs nothing more"
    )
