"""The commands of `headcount`: a table says which module has which."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import typer
import typer.main
from typer.core import TyperGroup

PANELS = {
    "Measure": {
        "init": "jobs.commands.scan",
        "plan": "jobs.commands.scan",
        "scan": "jobs.commands.scan",
        "calibrate": "jobs.commands.runs",
        "corpus": "jobs.commands.corpus",
        "doctor": "jobs.commands.upkeep",
        "diff": "exports.diff.commands",
        "watch": "jobs.commands.upkeep",
    },
    "Ask": {
        "query": "queries.commands.query",
        "report": "queries.commands.report",
        "explore": "queries.commands.explore",
        "text": "queries.commands.text",
        "views": "queries.commands.views",
        "export": "exports.commands",
        "cache-plan": "exports.commands",
    },
    "Runs": {
        "list": "jobs.commands.runs",
        "status": "jobs.commands.runs",
        "resume": "jobs.commands.runs",
        "check": "jobs.commands.upkeep",
        "compact": "jobs.commands.upkeep",
        "rm": "jobs.commands.upkeep",
    },
    "Cluster": {
        "submit": "jobs.commands.cluster",
        "logs": "jobs.commands.cluster",
        "stop": "jobs.commands.cluster",
    },
    "Literature": {"reproduce": "reproduce.reproduce_commands"},
}
"""The commands by what they are for, each with its module. Its `commands` has it, or is it."""

MODULES = {name: module for panel in PANELS.values() for name, module in panel.items()}


@cache
def _group(module: str) -> TyperGroup:
    group = typer.main.get_group(import_module(f"headcount.{module}").commands)
    for command in group.commands.values():
        for parameter in command.params:
            # A `Path` would make one slash of two, and the file would lie where nobody looks.
            descriptor: Any = getattr(parameter, "type_descriptor", None)  # typer's own
            annotation = descriptor.annotation
            if Path in (annotation, *get_args(annotation)):
                parameter.callback = _check_on_disk
    return group


def _check_on_disk(context: object, parameter: object, value: Any) -> Any:  # noqa: ANN401
    from headcount.schemas.places import check_on_disk

    for path in value if isinstance(value, list | tuple) else [value]:
        if path is not None:
            check_on_disk(path)
    return value


class Commands(Mapping[str, Any]):
    """The commands by name. A module is imported when its command is asked for."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - typer has no name for its commands
        group = _group(MODULES[name])
        # `corpus` and `reproduce` are groups themselves.
        return group.commands.get(name, group)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class _FrontDoor(TyperGroup):
    """All commands. The help has them in panels, each with its first sentence."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - they are typer's
        super().__init__(**settings)
        self.commands: Any = Commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        """Write a section for each panel."""
        for panel, names in PANELS.items():
            # The sentence is wrapped to the width of the terminal, and never cut.
            rows = [(name, self.commands[name].get_short_help_str(1_000)) for name in names]
            with formatter.section(panel):
                formatter.write_dl(rows)


def _print_version(is_wanted: bool) -> None:
    if not is_wanted:
        return
    import headcount
    from headcount.workers.provenance.code_fingerprint import code_fingerprint

    print(f"headcount {headcount.__version__}, code {code_fingerprint()}")
    raise typer.Exit


@cache
def command_line() -> typer.Typer:
    """The command `headcount` with all its subcommands."""
    app = typer.Typer(
        cls=_FrontDoor,
        help="A census of attention heads: scan a model over a corpus, ask SQL about every head.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def front_door(  # pyright: ignore[reportUnusedFunction]
        _: bool = typer.Option(
            False,
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the release and the fingerprint of the measuring code.",
        ),
    ) -> None:
        """Options that come before any command."""

    return app
