"""How fast headcount is, and in how much memory: `make bench`.

Prints a table of targets and whether they are met. A whole run also writes RESULTS.md, its plots
and a line of history.jsonl; one that is quick or partial writes only where `--out` says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.cases import CASES, FULL, QUICK, Cell, Sizes, cells, is_weighed
from benchmarks.measure import best_batch, say, time_cells, weigh_cells
from benchmarks.measured_on import machine
from benchmarks.page import Json, draw, page, table
from benchmarks.targets import InterventionMeasurements, Results, targets
from benchmarks.ways import WAYS, Way, compiled, draw_tokens
from schemas.precision import FASTEST_ACCEPTABLE
from workers.process import prepare_process

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the page."""
    prepare_process()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of small models and shapes")
    parser.add_argument("--rounds", type=int, help="default: 3, quick 1")
    parser.add_argument("--cases", nargs="+", choices=CASES[device], default=CASES[device])
    parser.add_argument(
        "--out", type=Path, help="directory for the page, its plots and the history"
    )
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else FULL
    record = benchmark(sizes, options.cases, options.rounds or (1 if options.quick else 3), device)
    Console(width=140).print(table(record))
    whole = not options.quick and set(options.cases) == set(CASES[device])
    if out := options.out or (HERE if whole else None):
        write(record, out)


def benchmark(sizes: Sizes, cases: Sequence[str], rounds: int, device: str) -> Json:
    """Everything that is known of one run of the benchmark."""
    began, now = time.perf_counter(), datetime.now(UTC)
    ways = {**WAYS, "compiled": partial(compiled, backend=sizes.backend)}
    with tempfile.TemporaryDirectory() as directory:
        paths = sizes.make_models(Path(directory))
        # Cases share cells; each is measured once.
        wanted = list(dict.fromkeys(cell for case in cases for cell in cells(case, sizes)))
        if "gpu" in cases:
            wanted = [*at_best_batches(paths["gpt2"], sizes, device, ways), *wanted]
        seconds = time_cells(wanted, paths, device, rounds, ways)
        bytes_of = weigh_cells([cell for cell in wanted if is_weighed(cell, sizes)], paths, device)
    measured = {
        cell: InterventionMeasurements(seconds[cell], *bytes_of.get(cell, (None, None)))
        for cell in wanted
    }
    results = Results(device, measured)
    rows = [
        {"row": target.row, "baseline": target.baseline, "reach": target.reach, "value": value}
        | {"measured": target.show(value), "verdict": target.verdict(value)}
        for target in targets(sizes)
        for value in [target.value(results)]
    ]
    return {
        "time": now.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - began, 1),
        "device": device,
        "rounds": rounds,
        "n_ctx": sizes.main[1],
        "models": {"gpt2": sizes.gpt2, "rotary": sizes.rotary},
        "machine": machine(),
        "rows": rows,
        "cells": [asdict(cell) | asdict(measured[cell]) for cell in wanted],
    }


def at_best_batches(path: Path, sizes: Sizes, device: str, ways: Mapping[str, Way]) -> list[Cell]:
    """Each way at the batch that is the fastest for it; a way of which not even the first batch
    fits is left out.
    """
    n_ctx, fastest = sizes.main[1], FASTEST_ACCEPTABLE[device]
    found: list[Cell] = []
    for way, precision in (
        ("fused", fastest),
        ("compiled", fastest),
        ("run_with_cache", "float32"),
    ):
        say(f"best batch of {way}")
        batch = best_batch(
            ways[way](path, device, precision),
            lambda size: draw_tokens(path, size, n_ctx).to(device),
            sizes.first_batch,
        )
        if batch:
            found.append(Cell("gpt2", way, precision, batch, n_ctx))
    return found


def write(record: Json, out: Path) -> None:
    """The page, its plots, and one more line of the history."""
    plots = draw(record, out / "plots")
    text = page(record, (plot.relative_to(out).as_posix() for plot in plots))
    (out / "RESULTS.md").write_text(text, encoding="utf-8")
    with (out / "history.jsonl").open("a", encoding="utf-8") as history:
        history.write(json.dumps(record, ensure_ascii=False) + "\n")
    say(f"wrote {out / 'RESULTS.md'}")


if __name__ == "__main__":
    main()
