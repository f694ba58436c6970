"""Queries one after another, with a history and the names of views and columns completed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from headcount.queries.ask.asking import RunDatabase
from headcount.queries.ask.named_queries import NamedQuery
from headcount.queries.ask.typed_queries import with_parameters
from headcount.queries.open.connection import view_descriptions
from headcount.schemas.errors import HeadcountError

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document

GREETING = (
    "A query is a named query with its parameters, or SQL. help lists the queries, help NAME "
    "explains one, Tab completes names, Ctrl-D ends."
)

WORDS_OF_SQL = (
    *("SELECT", "FROM", "WHERE", "GROUP", "BY", "ORDER", "LIMIT", "JOIN", "USING", "WITH"),
    *("DISTINCT", "count", "avg", "median"),
)
"""What else is completed."""


def converse(
    database: RunDatabase,
    queries: Mapping[str, NamedQuery],
    answer: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Answer queries until there are no more. A mistake is a line that `say` writes."""
    for line in _lines_typed(database, queries, say) if sys.stdin.isatty() else sys.stdin:
        typed = line.strip().rstrip(";").strip()
        first, _, rest = typed.partition(" ")
        if typed in ("exit", "quit"):
            return
        try:
            if first == "help" and rest.strip() in queries:
                say(queries[rest.strip()].help_text())
            elif first == "help":
                views = view_descriptions(database.connection)
                say(
                    "\n".join(
                        f"{view:<24} {text.partition('. ')[0]}" for view, text in views.items()
                    )
                )
            elif first in queries:
                answer(with_parameters(first, shlex.split(rest), queries))
            elif typed:
                answer(typed)
        except HeadcountError as error:
            say(f"error: {error}")


def _lines_typed(
    database: RunDatabase, queries: Mapping[str, NamedQuery], say: Callable[[str], None]
) -> Iterator[str]:
    """What the user types at a terminal."""
    from platformdirs import user_state_path
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.history import FileHistory

    class NamesCompleter(Completer):
        """Completes the word before the cursor."""

        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterable[Completion]:
            for name, start in completions(document.text_before_cursor, database, queries):
                yield Completion(name, start_position=start)

    history = user_state_path("headcount") / "queries"
    history.parent.mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)), completer=NamesCompleter(), complete_while_typing=False
    )
    say(GREETING)
    while True:
        try:
            yield session.prompt("headcount> ")
        except KeyboardInterrupt:
            # Ctrl-C drops the line that is being typed.
            continue
        except EOFError:
            return


def completions(
    text: str, database: RunDatabase, queries: Mapping[str, NamedQuery]
) -> list[tuple[str, int]]:
    """The names that may end a text, each with where it begins, counted back from the end."""
    word = re.search(r"[\w-]*$", text)
    typed = word[0] if word else ""
    first = text.split(maxsplit=1)[0] if text.strip() else ""
    views = view_descriptions(database.connection)
    if typed.startswith("--") and first in queries:
        names = [f"--{parameter.name}" for parameter in queries[first].parameters]
    elif typed == text:
        names = [*views, "help", "exit", *WORDS_OF_SQL]
    else:
        named = [view for view in views if re.search(rf"\b{re.escape(view)}\b", text)] or ["heads"]
        columns = {column for view in named for column in database.columns(view)}
        names = [*sorted(columns), *views, *WORDS_OF_SQL]
    matching = [name for name in names if name.lower().startswith(typed.lower())]
    return [(name, -len(typed)) for name in dict.fromkeys(matching)]
