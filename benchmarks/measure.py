"""How long a way takes and how much memory: seconds by round, and the peak of a fresh process.

`python -m benchmarks.measure PATH WAY PRECISION DEVICE BATCH N_CTX` is such a process.
"""

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Cell
from benchmarks.ways import WAYS, Run, Way, draw_tokens
from headcount.workers.process import prepare_process

PASSES = {"cpu": 1, "cuda": 10}
"""Forward passes that are timed together: on a GPU one alone is too short."""

WEIGHED_AT_ONCE = {"cpu": 2, "cuda": 1}
"""Processes that are weighed side by side, where they do not take memory from each other."""

LEAST_GAIN = 1.02
"""A batch twice as large must be this much faster to be the better one."""

LARGEST_BATCH = 512


class Memory(NamedTuple):
    """Bytes of a process."""

    loaded: int
    """After loading and a pass over 16 tokens."""
    peak: int


def say(text: str) -> None:
    """Tell how far the benchmark is."""
    print(text, file=sys.stderr, flush=True)


@torch.inference_mode()
def seconds_of(run: Run, tokens: Tensor) -> float:
    """Seconds of one pass over tokens."""
    device = tokens.device.type
    _wait(device)
    start_time = time.perf_counter()
    for _ in range(PASSES[device]):
        run(tokens)
    _wait(device)
    return (time.perf_counter() - start_time) / PASSES[device]


def time_cells(
    cells: Sequence[Cell],
    paths: Mapping[str, Path],
    device: str,
    rounds: int,
    ways: Mapping[str, Way] = WAYS,
) -> dict[Cell, list[float]]:
    """Seconds of every cell in every round, after each way has run once and is warm (compiled)."""
    say("loading")
    # Cells that differ only in their tokens share one loaded model.
    loaded: dict[tuple[str, str, str], Run] = {}
    first_cells: dict[Run, Cell] = {}
    runs: dict[Cell, Run] = {}
    for cell in cells:
        key = (cell.model, cell.way, cell.precision)
        if key not in loaded:
            loaded[key] = ways[cell.way](paths[cell.model], device, cell.precision)
            first_cells[loaded[key]] = cell
        runs[cell] = loaded[key]
    tokens = {
        cell: draw_tokens(paths[cell.model], cell.batch, cell.n_ctx).to(device) for cell in cells
    }
    say("warming up")
    for run, cell in first_cells.items():
        seconds_of(run, tokens[cell])
    # Every cell runs once a round, so that a slower minute of the machine meets all of them.
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
    """The fastest batch per token, doubled until that gains nothing or memory runs out. It is 0 if
    not even the first batch fits.
    """
    best_size = 0
    best_speed = 0.0
    batch = first
    while batch <= LARGEST_BATCH:
        try:
            tokens = tokens_of(batch)
            # The first of the two passes warms up: kernels are chosen for this shape.
            speed = batch / min(seconds_of(run, tokens) for _ in range(2))
        except torch.OutOfMemoryError:
            break
        if speed < LEAST_GAIN * best_speed:
            break
        best_size = batch
        best_speed = speed
        batch *= 2
    free()
    return best_size


def weigh_cells(
    cells: Sequence[Cell], paths: Mapping[str, Path], device: str, fresh: bool = True
) -> dict[Cell, Memory]:
    """The memory of every cell, each in a process of its own. A cell that cannot be weighed is left
    out.

    If the processes shall not be `fresh`, this one weighs all cells, one after the other. That
    takes no time for starting, but counts what earlier cells left: good enough to try the
    benchmark.
    """
    if not _can_weigh(device):
        return {}
    # Models of this process would count against the memory that the others can have.
    free()
    if not fresh:
        say(f"weighing {len(cells)} cells")
        return {cell: _weigh(paths[cell.model], cell, device) for cell in cells}
    say(f"weighing, {len(cells)} processes")
    with ThreadPoolExecutor(WEIGHED_AT_ONCE[device]) as pool:
        memory = pool.map(
            lambda cell: _weigh_in_a_fresh_process(cell, paths[cell.model], device), cells
        )
        weighed = dict(zip(cells, memory, strict=True))
    return {cell: memory for cell, memory in weighed.items() if memory is not None}


def _weigh_in_a_fresh_process(cell: Cell, path: Path, device: str) -> Memory | None:
    """The memory of a cell, measured by a fresh process; None if that process failed."""
    arguments = (path, cell.way, cell.precision, device, cell.batch, cell.n_ctx)
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.measure", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
    )
    if process.returncode:
        say(f"{cell} could not be weighed: exit code {process.returncode}")
        return None
    # Libraries may have printed something before.
    last_line = process.stdout.splitlines()[-1]
    return Memory(*json.loads(last_line))


def _weigh(path: Path, cell: Cell, device: str) -> Memory:
    """The memory of a cell in this process."""
    prepare_process()
    tokens = draw_tokens(path, cell.batch, cell.n_ctx).to(device)
    return weigh_run(WAYS[cell.way](path, device, cell.precision), tokens)


@torch.inference_mode()
def weigh_run(run: Run, tokens: Tensor) -> Memory:
    """The memory while a way runs twice: of the process, or on a GPU of the tensors."""
    run(tokens[:1, :16])  # What is made once, at first use, belongs to loading.
    on_gpu = tokens.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        loaded = torch.cuda.memory_allocated()
    else:
        _trim_heap()
        # Writing 5 makes Linux start VmHWM, the peak of the resident set, anew.
        Path("/proc/self/clear_refs").write_text("5")
        loaded = _own_status("VmRSS")
    for _ in range(2):
        run(tokens)
    peak = torch.cuda.max_memory_allocated() if on_gpu else _own_status("VmHWM")
    return Memory(loaded, peak)


def _trim_heap() -> None:
    """Give freed memory back to the system: a run would use it again without being seen to."""
    libc = ctypes.CDLL(None)
    # Only glibc has it.
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _own_status(field: str) -> int:
    """A field of this process's /proc status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith(field))
    return 1024 * kibibytes


def _can_weigh(device: str) -> bool:
    """Whether this system can start a process's peak anew, as Linux can."""
    return device == "cuda" or Path("/proc/self/clear_refs").exists()


def _wait(device: str) -> None:
    """Wait for a GPU, which computes while Python goes on."""
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Weigh one way, as the arguments say, and print the bytes."""
    path, way, precision, device, batch, n_ctx = sys.argv[1:]
    cell = Cell("", way, precision, int(batch), int(n_ctx))
    print(json.dumps(_weigh(Path(path), cell, device)))


if __name__ == "__main__":
    main()
