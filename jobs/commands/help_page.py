"""The commands of `headcount --help`, by what they are for. Every command loads this."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Measure": ("init", "plan", "scan", "corpus", "doctor"),
    "Ask": ("query", "report", "explore", "text", "views", "export"),
    "Runs": ("list", "status", "resume", "check", "compact", "rm"),
    "Cluster": ("submit", "logs", "stop"),
    "Literature": ("reproduce",),
}


class PanelledGroup(TyperGroup):
    """The front door: its help has the commands in panels, each with its first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer has no names
        """Write a section for each panel."""
        for panel, names in PANELS.items():
            # The sentence is wrapped to the width of the terminal, and never cut.
            rows = [(name, self.commands[name].get_short_help_str(1_000)) for name in names]
            with formatter.section(panel):
                formatter.write_dl(rows)


class DefaultedGroup(TyperGroup):
    """A group whose first command need not be named: `reproduce NAME` beside `reproduce texts`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Read the command line."""
        is_named = args[:1] and args[0] in self.commands
        return super().parse_args(ctx, args if is_named else [next(iter(self.commands)), *args])
