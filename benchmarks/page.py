"""What a run of the benchmark looks like: a table for the terminal, a page with every detail,
plots; all from its record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.targets import PEAK_FLOPS
from benchmarks.ways import WAYS, bare_format

Json = dict[str, Any]

COLUMNS = ("row", "baseline", "reach", "measured", "verdict")
COLOURS = {"met": "green", "missed": "red"}
LINES = {"fused": "#d95f02", "bare": "#1b6ca8", "run_with_cache": "#777777"}
"""The ways that plots show, with their colours."""

METHOD = f"""\
Every way runs once in each round, so that a change of the machine's speed meets all of them; ratios are paired by round, and
what is shown is the median of the rounds. Before the first round every way runs once without being timed: torch.compile
compiles there. Memory is the largest resident set (on a GPU: bytes in tensors) of a fresh process in which one way runs twice;
*extra* is what that is more than after loading and a pass over 16 tokens. Weights are random; tokens repeat as often as in text.
Nothing is estimated: what needs a device that this machine has not is not measured. The reaches of GPU rows are meant for one
H200, whose {PEAK_FLOPS / 1e12:.0f} TFLOP/s are what it was seen to do in half precision."""


def table(record: Json) -> Table:
    """The rows, for the terminal."""
    shown = Table(*COLUMNS, title=hardware(record), title_justify="left")
    for row in record["rows"]:
        *cells, verdict = (row[column] for column in COLUMNS)
        shown.add_row(*cells, f"[{COLOURS.get(verdict, 'dim')}]{verdict}[/]")
    return shown


def hardware(record: Json) -> str:
    """What it was measured on, and which code."""
    on = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in on["versions"].items())
    devices = f"{on['cpu']}, {on['cores']} cores; " + (on["gpu"] or "no GPU")
    return f"{devices}; Python {on['python']}, {versions}; commit {on['commit']}"


def page(record: Json, plots: Iterable[str]) -> str:
    """The page, in Markdown; `plots` are the addresses of its pictures."""
    parts = [
        "# How fast headcount is",
        "`make bench` writes this page, its plots and a line of `history.jsonl`.",
        f"{hardware(record)}; {record['time']}, {record['rounds']} rounds in "
        f"{record['seconds'] / 60:.0f} minutes.",
        grid(COLUMNS, ([row[column] for column in COLUMNS] for row in record["rows"])),
        METHOD,
        *(f"![{Path(plot).stem}]({plot})" for plot in plots),
    ]
    for model, sizes in record["models"].items():
        if cells := [_details(cell) for cell in record["cells"] if cell["model"] == model]:
            parts.append(
                f"## {model}: {', '.join(f'{name} {size}' for name, size in sizes.items())}"
            )
            parts.append(grid(cells[0], (cell.values() for cell in cells)))
    parts.append("\n".join(f"* **{name}**: {way.__doc__}" for name, way in WAYS.items()))
    return "\n\n".join(parts) + "\n"


def draw(record: Json, directory: Path) -> list[Path]:
    """Speed and memory against the batch and against n_ctx, as SVG; a plot without two points is
    left out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    for axis, model, n_ctx in (("batch", "gpt2", record["n_ctx"]), ("n_ctx", "rotary", None)):
        cells = [c for c in record["cells"] if (c["model"], c["precision"]) == (model, "float32")]
        cells = [c for c in cells if n_ctx in (None, c["n_ctx"])]
        values = sorted({cell[axis] for cell in cells})
        if len(values) < 2:
            continue
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        figure.suptitle(f"{model}, float32, {f'n_ctx {n_ctx}' if n_ctx else 'one sequence'}")
        speed, memory = figure.subplots(1, 2)
        _curves(speed, cells, axis, "tokens/s", tokens_per_second)
        speed.set_xscale("log", base=2)
        speed.set_xticks(values, labels=[str(value) for value in values])
        _curves(
            memory, cells, axis, "peak memory, GB", lambda cell: cell["peak"] and cell["peak"] / 1e9
        )
        drawn.append(directory / f"{axis}.svg")
        # Text stays text, and the same numbers make the same file.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": axis}):
            figure.savefig(drawn[-1], metadata={"Date": None})
    return drawn


def tokens_per_second(cell: Json) -> float:
    """By the median round."""
    return cell["batch"] * cell["n_ctx"] / median(cell["seconds"])


def _curves(
    axes: Axes, cells: Sequence[Json], axis: str, label: str, value: Callable[[Json], float | None]
) -> None:
    """One line per way, through the cells that have a value."""
    for way, colour in LINES.items():
        points = sorted(
            (c[axis], y) for c in cells if c["way"] == way and (y := value(c)) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=way, markersize=4)
    axes.set(xlabel=axis, ylabel=label, ylim=(0, None))
    axes.legend(frameon=False)


def _details(cell: Json) -> dict[str, str]:
    """What is shown of a cell."""
    tokens, weighed = cell["batch"] * cell["n_ctx"], cell["peak"] is not None
    extra = cell["peak"] - cell["loaded"] if weighed else 0
    precision = cell["precision"] if cell["way"] == "fused" else bare_format(cell["precision"])
    return {
        "way": cell["way"],
        "precision": precision,
        "batch × n_ctx": f"{cell['batch']} × {cell['n_ctx']}",
        "tokens/s": f"{tokens_per_second(cell):,.0f}",
        "seconds by round": ", ".join(f"{s:.3g}" for s in cell["seconds"]),
        "peak memory, MB": f"{cell['peak'] / 1e6:,.0f}" if weighed else "–",
        "extra, MB": f"{extra / 1e6:,.0f}" if weighed else "–",
        "extra, kB a token": f"{extra / tokens / 1e3:,.1f}" if weighed else "–",
    }


def grid(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    names = list(names)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [names, ["---"] * len(names), *rows])
