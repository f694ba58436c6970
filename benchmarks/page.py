"""What a run of the benchmark looks like: a table for the terminal, a page with every detail, and
plots, all made from its record.

`python -m benchmarks.page` writes the page again from the last record, without measuring.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.targets import PEAK_FLOPS
from benchmarks.ways import WAYS, bare_format
from headcount.schemas.errors import counted

if TYPE_CHECKING:  # It takes long to import, and only plots need it.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Json = dict[str, Any]

COLUMNS = ("row", "baseline", "reach", "measured", "verdict")
OTHER_COLUMNS = ("figures", "of them", "time", "commit", "machine")
NOT_RECORDED = "not recorded"
HERE = Path(__file__).parent
VERDICT_COLOURS = {"met": "green", "missed": "red"}
WAY_COLOURS = {"fused": "#d95f02", "bare": "#1b6ca8", "run_with_cache": "#777777"}
"""The ways that plots show, with their colours."""

MODELS = {
    "gpt2": "GPT-2 small's shape",
    "llama": "a Llama of about GPT-2 small's size: rotary positions, grouped heads, RMSNorm, "
    "SwiGLU",
    "rotary": "a small Llama for long sequences",
    "grouped": "a wide Llama of few layers, its query heads sharing keys in fours",
    "trained": "a small GPT-2 that is trained and watched",
}
"""What each model of the benchmark is."""

METHOD = f"""\
Every way runs once in each round, so a change in the machine's speed meets all of them. Ratios are
paired by round, and the table shows the median of the rounds. Before the first round every way runs
once without being timed; torch.compile compiles there. Memory is the largest resident set (on a
GPU: bytes in tensors) of a fresh process in which one way runs twice. *Extra* memory is the part
beyond what the process held after loading and a pass over 16 tokens. Weights are random; tokens
repeat as often as in text. Nothing is estimated: a row that needs a device which this machine lacks
is not measured. The reaches of GPU rows are meant for one H200, whose {PEAK_FLOPS / 1e12:.0f}
TFLOP/s are what it was seen to do in half precision."""


def table(record: Json) -> Table:
    """The rows, for the terminal."""
    terminal_table = Table(*COLUMNS, title=hardware(record), title_justify="left")
    for row in record["rows"]:
        *cells, verdict = (row[column] for column in COLUMNS)
        terminal_table.add_row(*cells, f"[{VERDICT_COLOURS.get(verdict, 'dim')}]{verdict}[/]")
    return terminal_table


def hardware(record: Json) -> str:
    """What it was measured on, and which code."""
    machine = record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    devices = f"{machine['cpu']}, {cores}; {machine['gpu'] or 'no GPU'}"
    return f"{devices}; Python {machine['python']}, {versions}; commit {machine['commit']}"


def page(record: Json, plots: Iterable[str]) -> str:
    """The page, in Markdown; `plots` are the addresses of its pictures."""
    sections = [
        "# How fast headcount is",
        "`make bench` writes this page, its plots and a line of `history.jsonl`.",
        "Every figure down to the last section, but for cases run alone, is of one run of it, and "
        "of no later code: "
        f"{hardware(record)}; {record['time']}, {record['rounds']} rounds in "
        f"{record['seconds'] / 60:.0f} minutes.",
        grid(COLUMNS, ([row[column] for column in COLUMNS] for row in record["rows"])),
        *_single_cases(record["time"]),
        METHOD,
        *(f"![{Path(plot).stem}]({plot})" for plot in plots),
    ]
    for model, sizes in record["models"].items():
        cells = [_details(cell) for cell in record["cells"] if cell["model"] == model]
        if cells:
            sizes_text = ", ".join(f"{name} {size}" for name, size in sizes.items())
            sections.append(f"## {model}: {MODELS[model]}")
            sections.append(f"{sizes_text}.")
            sections.append(grid(cells[0], (cell.values() for cell in cells)))
    measured_ways = {cell["way"] for cell in record["cells"]}
    ways = [f"* **{name}**: {way.__doc__}" for name, way in WAYS.items() if name in measured_ways]
    sections.append("\n".join(ways))
    sections.append("## Other measurements")
    sections.append(grid(OTHER_COLUMNS, _other_measurements()))
    return "\n\n".join(sections) + "\n"


def _single_cases(whole_run: str) -> Iterator[str]:
    """What single cases measured after the last whole run."""
    for file in sorted((HERE / "results").glob("bench_*.json")):
        record: Json = json.loads(file.read_text(encoding="utf-8"))
        if record["time"] > whole_run:
            rounds = counted(record["rounds"], "round")
            yield f"Cases run alone: {hardware(record)}; {record['time']}, {rounds}."
            yield grid(COLUMNS, ([row[column] for column in COLUMNS] for row in record["rows"]))
            cells = [_details(cell) for cell in record["cells"]]
            yield grid(cells[0], (cell.values() for cell in cells))


def _other_measurements() -> Iterator[list[str]]:
    """What the figures of each file of `results/` were measured on, and when."""
    for file in sorted((HERE / "results").glob("*.json")):
        record: Json = json.loads(file.read_text(encoding="utf-8"))
        # The figures of some files are measured one by one.
        for name, measured in record.get("measured", {"all": record}).items():
            machine = measured["machine"]
            yield [
                f"[{file.name}](results/{file.name})",
                name,
                measured.get("time") or NOT_RECORDED,
                machine["commit"] or NOT_RECORDED,
                f"{machine['cpu']}, {counted(machine['cores'], 'thread')}; "
                f"{machine['gpu'] or 'no GPU'}",
            ]


def draw(record: Json, directory: Path) -> list[Path]:
    """Plots of speed and memory against the batch and against n_ctx, as SVG; a plot without two
    points is left out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Other precisions are in the tables only.
    in_float32 = [cell for cell in record["cells"] if cell["precision"] == "float32"]
    n_ctx = record["n_ctx"]
    curves = {
        "batch": [
            cell
            for cell in in_float32
            if (cell["model"], cell["n_ctx"]) == ("gpt2", n_ctx) and cell["way"] in WAY_COLOURS
        ],
        "n_ctx": [c for c in in_float32 if c["model"] == "rotary"],
    }
    titles = {"batch": f"gpt2, float32, n_ctx {n_ctx}", "n_ctx": "rotary, float32, one sequence"}
    plot_paths: list[Path] = []
    for axis, cells in curves.items():
        # One point makes no curve.
        if len({cell[axis] for cell in cells}) >= 2:
            plot_paths.append(directory / f"{axis}.svg")
            _save(_figure(cells, axis, titles[axis]), plot_paths[-1])
    return plot_paths


def _figure(cells: Sequence[Json], axis: str, title: str) -> Figure:
    """Speed on the left, memory on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    figure.suptitle(title)
    speed, memory = figure.subplots(1, 2)
    _curves(speed, cells, axis, "tokens/s", tokens_per_second)
    values = sorted({cell[axis] for cell in cells})
    speed.set_xscale("log", base=2)
    speed.set_xticks(values, labels=[str(value) for value in values])
    _curves(memory, cells, axis, "peak memory, GB", _peak_gigabytes)
    return figure


def _save(figure: Figure, path: Path) -> None:
    """Write a figure so that the same numbers make the same file."""
    import matplotlib

    # Without a fixed salt the ids in an SVG are random; as text, its words can be searched.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})


def tokens_per_second(cell: Json) -> float:
    """The speed of a cell in its median round."""
    return cell["batch"] * cell["n_ctx"] / median(cell["seconds"])


def _peak_gigabytes(cell: Json) -> float | None:
    return None if cell["peak"] is None else cell["peak"] / 1e9


def _curves(
    axes: Axes, cells: Sequence[Json], axis: str, label: str, value: Callable[[Json], float | None]
) -> None:
    """One line for each way, through the cells that have a value."""
    for way, colour in WAY_COLOURS.items():
        values = [(cell[axis], value(cell)) for cell in cells if cell["way"] == way]
        points = sorted((x, y) for x, y in values if y is not None)
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=way, markersize=4)
    axes.set(xlabel=axis, ylabel=label, ylim=(0, None))
    axes.legend(frameon=False)


def _details(cell: Json) -> dict[str, str]:
    """A cell's row in the table of its model."""
    details = {
        "way": cell["way"],
        # The bare pass has formats of its own; only headcount has our precisions.
        "precision": cell["precision"]
        if cell["way"] == "fused"
        else bare_format(cell["precision"]),
        "batch × n_ctx": f"{cell['batch']} × {cell['n_ctx']}",
        "tokens/s": f"{tokens_per_second(cell):,.0f}",
        "seconds by round": ", ".join(f"{seconds:.3g}" for seconds in cell["seconds"]),
        "peak memory, MB": "–",
        "extra, MB": "–",
        "extra, kB a token": "–",
    }
    if cell["peak"] is not None:
        extra = cell["peak"] - cell["loaded"]
        tokens = cell["batch"] * cell["n_ctx"]
        details["peak memory, MB"] = f"{cell['peak'] / 1e6:,.0f}"
        details["extra, MB"] = f"{extra / 1e6:,.0f}"
        details["extra, kB a token"] = f"{extra / tokens / 1e3:,.1f}"
    return details


def grid(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    header = list(names)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_again() -> None:
    """Write RESULTS.md once more, from the last whole run of the benchmark."""
    lines = (HERE / "history.jsonl").read_text(encoding="utf-8").splitlines()
    plots = [f"plots/{plot.name}" for plot in sorted((HERE / "plots").glob("*.svg"))]
    (HERE / "RESULTS.md").write_text(page(json.loads(lines[-1]), plots), encoding="utf-8")


if __name__ == "__main__":
    write_again()
