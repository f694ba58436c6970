"""Five ways to run GPT-2 small over the same tokens, interleaved in one run: `python -m benchmarks.bench`.

Times are medians over rounds in which every way runs once, so that a change of the machine's speed meets them all. Peak memory
is that of a fresh process per way, counted from after the model was loaded. Weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from schemas.statistics import evaluate, select
from workers.loading import load_model
from workers.models import describe
from workers.batch import measure_batch
from workers.dense import DenseEngine
from workers.fused import FusedEngine
from workers.pairs import find_matches
from workers.pattern import DensePattern

RESULTS = Path(__file__).parent / "results" / "latest.json"
STATISTICS = select("all")
MEASURES_PATTERN = [s for s in STATISTICS if set(s.parameters) <= {"pattern", "copies", "successors"}]
SCORES = {"sink_logit_margin"}


def bare(path: Path) -> Callable[[Tensor], object]:
    """Hugging Face's forward pass with SDPA and without the unembedding; measures nothing."""
    from transformers import GPT2Model

    model = GPT2Model.from_pretrained(path, attn_implementation="sdpa").eval()
    return lambda tokens: model(tokens, use_cache=False)


def fused(path: Path) -> Callable[[Tensor], object]:
    """headcount's fused engine, all statistics."""
    engine = FusedEngine(load_model(describe(path), "raw", "cpu"))
    return lambda tokens: measure_batch(engine, STATISTICS, tokens)


def dense(path: Path) -> Callable[[Tensor], object]:
    """headcount's dense engine, all statistics."""
    engine = DenseEngine(load_model(describe(path), "raw", "cpu"))
    return lambda tokens: measure_batch(engine, STATISTICS, tokens)


def run_with_cache(path: Path) -> Callable[[Tensor], object]:
    """TransformerLens's run_with_cache, then all statistics from the cache."""
    bridge = load_model(describe(path), "raw", "cpu").bridge
    names = (
        "hook_resid_pre",
        "hook_resid_post",
        *(f"attn.hook_{n}" for n in ("q", "k", "v", "z", "pattern", "attn_scores")),
    )

    def run(tokens: Tensor) -> object:
        wanted = [f"blocks.{layer}.{name}" for layer in range(bridge.cfg.n_layers) for name in names]
        _, cache = bridge.run_with_cache(tokens, names_filter=wanted)
        matches = find_matches(tokens)
        out: list[Tensor] = []
        for layer in range(bridge.cfg.n_layers):
            seen: dict[str, Any] = {n.rpartition("hook_")[2]: cache[f"blocks.{layer}.{n}"] for n in names}
            seen["pattern"] = DensePattern(seen["pattern"], seen["attn_scores"])
            out += [evaluate(s.compute, {**seen, **matches}) for s in STATISTICS]
        return out

    return run


def output_attentions(path: Path) -> Callable[[Tensor], object]:
    """Hugging Face's output_attentions=True, then the statistics that need only patterns."""
    from transformers import GPT2Model

    model = GPT2Model.from_pretrained(path, attn_implementation="eager").eval()
    wanted = [s for s in MEASURES_PATTERN if s.name not in SCORES]

    def run(tokens: Tensor) -> object:
        patterns = model(tokens, use_cache=False, output_attentions=True).attentions
        matches = find_matches(tokens)
        return [
            evaluate(s.compute, {"pattern": DensePattern(pattern, pattern), **matches})
            for pattern in patterns
            for s in wanted
        ]

    return run


WAYS: dict[str, Callable[[Path], Callable[[Tensor], object]]] = {
    way.__name__: way for way in (bare, fused, dense, run_with_cache, output_attentions)
}


def main() -> None:
    """Run the benchmark, print the table, write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--n-ctx", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tokens = torch.randint(50257, (options.batch, options.n_ctx), generator=torch.Generator().manual_seed(0))
    if options.memory_of:
        print(peak_memory(WAYS[options.memory_of](options.model), tokens))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = make_gpt2_small(Path(directory))
        seconds = time_all(path, tokens, options.rounds)
        arguments = ["--batch", str(options.batch), "--n-ctx", str(options.n_ctx), "--model", str(path)]
        memory = {way: memory_of(way, arguments) for way in WAYS}
    report(seconds, memory, tokens, options.rounds)


def make_gpt2_small(path: Path) -> Path:
    """GPT-2 small's shape with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(path)
    return path


@torch.inference_mode()
def time_all(path: Path, tokens: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, after a round that warms up."""
    runs = {name: way(path) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run(tokens)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


@torch.inference_mode()
def peak_memory(run: Callable[[Tensor], object], tokens: Tensor) -> int:
    """Largest resident set of this process, in bytes, while it runs twice."""
    Path("/proc/self/clear_refs").write_text("5")  # Linux: start the peak anew.
    for _ in range(2):
        run(tokens)
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def memory_of(way: str, arguments: list[str]) -> int:
    """Peak memory of one way in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench", "--memory-of", way, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    return int(done.stdout.split()[-1])


def report(seconds: dict[str, list[float]], memory: dict[str, int], tokens: Tensor, rounds: int) -> None:
    """Print the table and write the ratios."""
    median = {way: statistics.median(times) for way, times in seconds.items()}

    def ratio(way: str, other: str) -> float:
        """Speed of one way over another's, paired by round."""
        return statistics.median(b / a for a, b in zip(seconds[way], seconds[other], strict=True))

    batch, n_ctx = tokens.shape
    title = (
        f"GPT-2 small, {batch} × {n_ctx} tokens, float32, {torch.get_num_threads()} threads, median of {rounds} rounds"
    )
    table = Table("", "tokens/s", "× bare", "peak memory", "× bare", title=title, title_justify="left")
    for way, run in WAYS.items():
        meaning = (run.__doc__ or "").split("\n")[0]
        cells = (f"{tokens.numel() / median[way]:,.0f}", f"{ratio(way, 'bare'):.2f}")
        table.add_row(f"{way}: {meaning}", *cells, f"{memory[way] / 1e9:.2f} GB", f"{memory[way] / memory['bare']:.2f}")
    Console(width=140).print(table)
    results = {
        f"cpu_float32_{batch}x{n_ctx}": {
            "fused_over_bare": round(ratio("fused", "bare"), 3),
            "fused_over_run_with_cache": round(ratio("fused", "run_with_cache"), 3),
            "fused_over_output_attentions": round(ratio("fused", "output_attentions"), 3),
            "dense_over_bare": round(ratio("dense", "bare"), 3),
            "memory_over_bare": round(memory["fused"] / memory["bare"], 3),
            "tokens_per_second": {way: round(tokens.numel() / s) for way, s in median.items()},
            "peak_memory_bytes": memory,
            "rounds": rounds,
        },
        "machine": {
            "cpu": _cpu(), "threads": torch.get_num_threads(), "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "transformer_lens")}, "commit": _commit(),
        },
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({k: v for k, v in next(iter(results.values())).items() if isinstance(v, float)}, indent=1))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
