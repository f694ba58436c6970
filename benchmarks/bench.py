"""How fast headcount is, and in how much memory: `make bench`.

Prints a table of targets and whether they are met. A whole run also writes RESULTS.md, its plots
and a line of history.jsonl. A quick or partial run writes only if `--out` says where, or a partial
one with `--keep`: the page shows it.
"""

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
from benchmarks.page import Json, draw, page, table, write_again
from benchmarks.targets import CellMeasurements, Results, targets
from benchmarks.ways import WAYS, Way, compiled, draw_tokens
from headcount.schemas.scans.scan import FASTEST_ACCEPTABLE
from headcount.workers.process import prepare_process

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
    parser.add_argument(
        "--keep", action="store_true", help="show the single cases on the page of this folder"
    )
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else FULL
    rounds = options.rounds or (1 if options.quick else 3)
    record = benchmark(sizes, options.cases, rounds, device)
    Console(width=140).print(table(record))
    # The page of this folder shows every row at full size, or is left as it is.
    is_whole = not options.quick and set(options.cases) == set(CASES[device])
    out = options.out or (HERE if is_whole else None)
    if out is not None:
        write(record, out)
    elif options.keep and not options.quick:
        keep(record, options.cases)


def benchmark(sizes: Sizes, cases: Sequence[str], rounds: int, device: str) -> Json:
    """The record of one run of the benchmark: everything that is known of it."""
    start_time = time.perf_counter()
    started_at = datetime.now(UTC)
    ways = {**WAYS, "compiled": partial(compiled, backend=sizes.backend)}
    with tempfile.TemporaryDirectory() as directory:
        paths = sizes.make_models(Path(directory))
        requested_cells = [cell for case in cases for cell in cells(case, sizes)]
        if "gpu" in cases:
            best = at_best_batches(paths["gpt2"], sizes, device, ways)
            requested_cells = [*best, *requested_cells]
        # Cases share cells; each is measured once.
        unique_cells = list(dict.fromkeys(requested_cells))
        seconds = time_cells(unique_cells, paths, device, rounds, ways)
        weighed_cells = [cell for cell in unique_cells if is_weighed(cell, sizes)]
        memory = weigh_cells(weighed_cells, paths, device, fresh=sizes is FULL)
    # A cell that was not weighed is known by its seconds alone.
    measured = {
        cell: CellMeasurements(seconds[cell], *memory.get(cell, (None, None)))
        for cell in unique_cells
    }
    return {
        "time": started_at.isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - start_time, 1),
        "device": device,
        "rounds": rounds,
        "n_ctx": sizes.main[1],
        "models": sizes.of_models(),
        "machine": machine(),
        "rows": _rows(sizes, Results(device, measured)),
        "cells": [asdict(cell) | asdict(measured[cell]) for cell in unique_cells],
    }


def _rows(sizes: Sizes, results: Results) -> list[Json]:
    """The table: every target with what was measured and its verdict."""
    rows: list[Json] = []
    for target in targets(sizes):
        value = target.value(results)
        rows.append(
            {
                "row": target.row,
                "baseline": target.baseline,
                "reach": target.reach,
                "value": value,
                "measured": target.show(value),
                "verdict": target.verdict(value),
            }
        )
    return rows


def at_best_batches(path: Path, sizes: Sizes, device: str, ways: Mapping[str, Way]) -> list[Cell]:
    """Each way at the batch that is the fastest for it. A way is left out if not even its first
    batch fits.
    """
    n_ctx = sizes.main[1]
    fastest = FASTEST_ACCEPTABLE[device]
    # run_with_cache has no other precision than float32.
    precisions = {"fused": fastest, "compiled": fastest, "run_with_cache": "float32"}
    best_cells: list[Cell] = []
    for way, precision in precisions.items():
        say(f"best batch of {way}")
        batch = best_batch(
            ways[way](path, device, precision),
            lambda size: draw_tokens(path, size, n_ctx).to(device),
            sizes.first_batch,
        )
        if batch:
            best_cells.append(Cell("gpt2", way, precision, batch, n_ctx))
    return best_cells


def write(record: Json, out: Path) -> None:
    """Write the page and its plots, and add a line to the history."""
    plots = draw(record, out / "plots")
    text = page(record, (plot.relative_to(out).as_posix() for plot in plots))
    (out / "RESULTS.md").write_text(text, encoding="utf-8")
    with (out / "history.jsonl").open("a", encoding="utf-8") as history:
        history.write(json.dumps(record, ensure_ascii=False) + "\n")
    say(f"wrote {out / 'RESULTS.md'}")


def keep(record: Json, cases: Sequence[str]) -> None:
    """Keep what single cases measured, and write the page again with it."""
    record["rows"] = [row for row in record["rows"] if row["value"] is not None]
    file = HERE / "results" / f"bench_{'_'.join(cases)}.json"
    file.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    write_again()
    say(f"wrote {file}")


if __name__ == "__main__":
    main()
