"""How long a way takes and how much memory: seconds by round, and the peak of a fresh process.

`python -m benchmarks.measure PATH WAY PRECISION DEVICE BATCH N_CTX` is such a process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases import Cell
from benchmarks.ways import WAYS, Run, Way, draw_tokens
from workers.process import prepare_process

PASSES = {"cpu": 1, "cuda": 10}
"""Forward passes that are timed together: on a GPU one alone is too short."""

AT_ONCE = {"cpu": 2, "cuda": 1}
"""Processes that are weighed side by side, where they do not take memory from each other."""

GAIN = 1.02
"""A batch twice as large has to be this much faster to be the better one."""

LARGEST_BATCH = 512


def say(text: str) -> None:
    """Tell how far the benchmark is."""
    print(text, file=sys.stderr, flush=True)


@torch.inference_mode()
def seconds_of(run: Run, tokens: Tensor) -> float:
    """Seconds of one pass over tokens."""
    device = tokens.device.type
    _wait(device)
    began = time.perf_counter()
    for _ in range(PASSES[device]):
        run(tokens)
    _wait(device)
    return (time.perf_counter() - began) / PASSES[device]


def time_cells(
    cells: Sequence[Cell],
    paths: Mapping[str, Path],
    device: str,
    rounds: int,
    ways: Mapping[str, Way] = WAYS,
) -> dict[Cell, list[float]]:
    """Seconds of every cell in every round, after a round in which every way warms up (and
    compiles).
    """
    say("loading")
    first: dict[Run, Cell] = {}
    runs: dict[Cell, Run] = {}
    loaded: dict[tuple[str, str, str], Run] = {}
    for cell in cells:
        key = (cell.model, cell.way, cell.precision)
        if key not in loaded:
            loaded[key] = ways[cell.way](paths[cell.model], device, cell.precision)
            first[loaded[key]] = cell
        runs[cell] = loaded[key]
    tokens = {
        cell: draw_tokens(paths[cell.model], cell.batch, cell.n_ctx).to(device) for cell in cells
    }
    say("warming up")
    for run, cell in first.items():
        seconds_of(run, tokens[cell])
    seconds: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for number in range(rounds):
        say(f"timing, round {number + 1} of {rounds}")
        for cell, run in runs.items():
            seconds[cell].append(seconds_of(run, tokens[cell]))
    return seconds


def free() -> None:
    """Give back the memory of ways that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def best_batch(run: Run, tokens_of: Callable[[int], Tensor], first: int) -> int:
    """The fastest batch per token: doubled until that gains nothing or memory runs out; 0 where not
    even the first fits.
    """
    best, speed, batch = 0, 0.0, first
    while batch <= LARGEST_BATCH:
        try:
            tokens = tokens_of(batch)
            found = batch / min(
                seconds_of(run, tokens) for _ in range(2)
            )  # The first one warms up.
        except torch.OutOfMemoryError:
            break
        if found < GAIN * speed:
            break
        best, speed, batch = batch, found, 2 * batch
    free()
    return best


def weigh_cells(
    cells: Sequence[Cell], paths: Mapping[str, Path], device: str
) -> dict[Cell, tuple[int, int]]:
    """Bytes after loading and at the peak, of every cell in a process of its own; a cell that
    cannot be weighed is left out.
    """
    if not _can_weigh(device):
        return {}

    def weigh(cell: Cell) -> tuple[int, int] | None:
        arguments = (paths[cell.model], cell.way, cell.precision, device, cell.batch, cell.n_ctx)
        command = [sys.executable, "-m", "benchmarks.measure", *map(str, arguments)]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
        if done.returncode:
            say(f"{cell} could not be weighed: exit code {done.returncode}")
            return None
        loaded, peak = json.loads(done.stdout.splitlines()[-1])
        return loaded, peak

    free()
    say(f"weighing, {len(cells)} processes")
    with ThreadPoolExecutor(AT_ONCE[device]) as pool:
        return {
            cell: found for cell, found in zip(cells, pool.map(weigh, cells), strict=True) if found
        }


@torch.inference_mode()
def weigh_run(run: Run, tokens: Tensor) -> tuple[int, int]:
    """Bytes that are resident before, and at most while, a way runs twice; on a GPU those in
    tensors.
    """
    run(tokens[:1, :16])  # What is made once, at first use, belongs to loading.
    if tokens.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        loaded = torch.cuda.memory_allocated()
    else:
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(
                0
            )  # Freed memory that is still resident would be used again and not be seen.
        Path("/proc/self/clear_refs").write_text("5")  # Start the peak anew.
        loaded = _status("VmRSS")
    for _ in range(2):
        run(tokens)
    return loaded, torch.cuda.max_memory_allocated() if tokens.device.type == "cuda" else _status(
        "VmHWM"
    )


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def _can_weigh(device: str) -> bool:
    """Whether this system starts a process's peak anew: Linux does."""
    return device == "cuda" or Path("/proc/self/clear_refs").exists()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    path, way, precision, device, batch, n_ctx = sys.argv[1:]
    prepare_process()
    drawn = draw_tokens(Path(path), int(batch), int(n_ctx)).to(device)
    print(json.dumps(weigh_run(WAYS[way](Path(path), device, precision), drawn)))
