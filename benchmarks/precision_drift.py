"""How far each precision drifts from float64, column by column: `make precision` writes
docs/precision.md.

Every drift is of a value that a row would hold: a sequence, a layer, a head. Probabilities and
shares (range 0 to 1) drift absolutely, everything else relative to the larger of 1 and the float64
value.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measured_on import machine
from benchmarks.page import grid, hardware
from schemas.precision import ACCEPTABLE, FASTEST_ACCEPTABLE, PRECISIONS
from schemas.scan import parse_scan
from schemas.statistics import STATISTICS
from workers.inputs.sequences import Sequences
from workers.model.model_info import describe, find_model
from workers.process import prepare_process
from workers.replica import Replica

PAGE = Path(__file__).parent.parent / "docs" / "precision.md"
RESULTS = Path(__file__).parent / "results" / "precision.json"

TEXT = {
    "family": "text",
    "files": ["README.md", "docs/*.md", "models/*/CARD.md", "CHANGELOG.md"],
    "packing": "concat",
}
BLOCKS = {"family": "repeated_random"}
BACKCOPY = {"family": "backcopy", "text": "bundled:backcopy-3l-mini"}

Drift = dict[str, dict[str, tuple[float, float, float]]]
"""Median, 99th percentile and maximum, by precision and column."""


def gpt2_small_sharp(path: Path, largest: float = 16.0) -> Path:
    """GPT-2 small's shape with random weights whose pre-softmax scores have GPT-2's size.

    Head h of each layer draws W_Q and W_K so that S has the standard deviation `largest^(h/11)`: 1
    to 16, with single scores beyond ±100. After a layer norm, std S = d_model · σ².
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config()
    d_model, heads = config.n_embd, config.n_head
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config)
    spread = (
        (torch.logspace(0, np.log10(largest), heads) / d_model)
        .sqrt()
        .repeat_interleave(d_model // heads)
    )
    with torch.no_grad():
        for block in model.transformer.h:
            query_key = block.attn.c_attn.weight[:, : 2 * d_model]
            query_key.copy_(torch.randn_like(query_key) * spread.repeat(2))
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((find_model("bundled:gpt2-mini") / name).read_bytes())
    return path


def cases(sharp: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The models, each with a scan of at least 200 sequences."""
    yield "gpt2-mini on text", {"model": "bundled:gpt2-mini", "n_ctx": 192, "input": TEXT}
    yield (
        "attn-only-2l-mini on repeated blocks",
        {"model": "bundled:attn-only-2l-mini", "n_ctx": 50, "input": BLOCKS},
    )
    yield (
        "backcopy-3l-mini on repeated blocks",
        {"model": "bundled:backcopy-3l-mini", "n_ctx": 50, "input": BLOCKS},
    )
    task = {"model": "bundled:backcopy-3l-mini", "n_ctx": 128, "bos": True, "input": BACKCOPY}
    yield "backcopy-3l-mini on Bigram-Backcopy", task
    yield (
        "GPT-2 small's shape, scores of GPT-2's size, on text",
        {"model": str(sharp), "n_ctx": 128, "input": TEXT},
    )


def measure_drift(fields: dict[str, Any], sequences: int, wanted: list[str]) -> tuple[Drift, int]:
    """The drift of each precision on the first sequences of a scan, and how many there were."""
    fields = {"bos": False} | fields | {"sequences": sequences, "statistics": "all"}
    info = describe(find_model(fields["model"]))
    source = Sequences(parse_scan(fields), info)
    source.make_index()
    shard = source.shard(0)

    def measure(precision: str) -> dict[str, np.ndarray]:
        scan = parse_scan(fields | {"precision": precision})
        return Replica(info, scan).measure(shard.tokens, labels=shard.labels).heads

    exact = {
        name: values for name, values in measure("float64").items() if np.isfinite(values).any()
    }
    drift: Drift = {}
    for precision in wanted:
        found = measure(precision)
        drift[precision] = {
            name: _drift(name, found[name], values) for name, values in exact.items()
        }
    return drift, len(shard.tokens)


def _drift(column: str, found: np.ndarray, exact: np.ndarray) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum, over the values that there are."""
    error = np.abs(found - exact) / (1.0 if absolute(column) else np.maximum(1, np.abs(exact)))
    error = error[np.isfinite(exact)]
    return float(np.median(error)), float(np.quantile(error, 0.99)), float(error.max())


def absolute(column: str) -> bool:
    """Whether a column is a probability or a share."""
    return STATISTICS[column].range == (0, 1)


def acceptable(drift: dict[str, tuple[float, float, float]]) -> bool:
    """Whether the 99th percentile of every standard probability and norm is small enough."""
    return not any(STATISTICS[name].standard for name in _beyond(drift))


def _beyond(drift: dict[str, tuple[float, float, float]]) -> list[str]:
    """The probabilities and norms whose 99th percentile is too large; NaN is."""
    return [name for name in drift if _judged(name) and not drift[name][1] <= ACCEPTABLE]


def _judged(column: str) -> bool:
    """Whether a column is held to the limit: a probability or a norm."""
    return absolute(column) or "norm" in STATISTICS[column].unit


def page(results: dict[str, Any]) -> str:
    """The page that tells how far each precision drifts."""
    cases: dict[str, dict[str, Any]] = results["cases"]
    precisions = list(next(iter(cases.values()))["drift"])
    defaults = " and ".join(f"`{p}` on {d.upper()}" for d, p in FASTEST_ACCEPTABLE.items())
    parts = [
        "# Precision",
        "How far every column of `heads` that there was drifts from float64 in each value of a "
        "scan's `precision`. A column stands where the input defines it. Written by `make "
        "precision`.",
        "A drift is that of one row's value. Probabilities and shares drift absolutely; "
        "everything else relative to the float64 value, or to 1 where that is smaller. "
        f"*Acceptable*: 99 of 100 values within {ACCEPTABLE:g} for every standard probability and "
        "norm. Whatever the precision, sums, norms, softmax, the residual stream and the "
        "statistics are float32 (float64 in `float64`); it names the format of the factors of "
        "products.",
        f'`precision = "auto"` means {defaults}; scans that need the '
        'bridge (`engine = "dense"`, folded weights) then use `float32`.',
        f"Measured on {hardware(results)}. The text is this project's own documentation at that "
        "commit, byte by byte. A format that the device lacks is imitated: factors are rounded "
        "and multiplied in float32, as tensor cores do. On this CPU that is float16 and TF32; "
        "bfloat16 is native, and rounds results as well.",
        "## Verdicts",
        "The largest 99th percentile among standard probabilities and norms, and the column that "
        "has it.",
        grid(
            ["precision", "products with weights", "q·k and A·v", *cases, "acceptable"],
            (
                _verdict(precision, [case["drift"][precision] for case in cases.values()])
                for precision in precisions
            ),
        ),
    ]
    parts += [_others(precision, cases) for precision in FASTEST_ACCEPTABLE.values()]
    for title, case in cases.items():
        drift: Drift = case["drift"]
        rows = (
            [f"`{c}`", *(_spread(drift[p][c]) for p in precisions)] for c in drift[precisions[0]]
        )
        parts += [
            f"## {title}",
            f"{case['sequences']} sequences of {case['n_ctx']} tokens: median / 99th percentile / "
            "maximum.",
            grid(["column", *(f"`{p}`" for p in precisions)], rows),
        ]
    return "\n\n".join(parts) + "\n"


def _verdict(precision: str, drifts: list[dict[str, tuple[float, float, float]]]) -> list[str]:
    """A precision's row: its formats, what drifts most in each case, whether that is acceptable in
    all.
    """
    cells: list[str] = []
    for drift in drifts:
        worst = max(
            (c for c in drift if _judged(c) and STATISTICS[c].standard),
            key=lambda column, drift=drift: drift[column][1],
        )
        cells.append(f"{drift[worst][1]:.2e} `{worst}`")
    kind = PRECISIONS[precision]
    return [
        f"`{precision}`",
        kind.linears,
        kind.scores,
        *cells,
        "**yes**" if all(map(acceptable, drifts)) else "no",
    ]


def _others(precision: str, cases: dict[str, Any]) -> str:
    """What a scan may ask for that a default does not keep within the limit."""
    drifts = {title: case["drift"][precision] for title, case in cases.items()}
    found = [
        f"`{name}` {drift[name][1]:.2e} ({title})"
        for title, drift in drifts.items()
        for name in _beyond(drift)
    ]
    return f"Probabilities and norms that are not standard and go beyond the limit in `{precision}`: {', '.join(found) or 'none'}."


def _spread(numbers: tuple[float, float, float]) -> str:
    return " / ".join(f"{number:.0e}" for number in numbers)


def main() -> None:
    """Measure, write the results and the page."""
    prepare_process()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument(
        "--precisions", nargs="*", default=[p for p in PRECISIONS if p != "float64"]
    )
    parser.add_argument(
        "--only", default="", help="measure only the models whose line begins so, and write nothing"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    with tempfile.TemporaryDirectory() as directory:
        for name, fields in cases(gpt2_small_sharp(Path(directory) / "gpt2-small-sharp")):
            if name.startswith(options.only):
                drift, count = measure_drift(fields, options.sequences, options.precisions)
                results["cases"][name] = {
                    "sequences": count,
                    "n_ctx": fields["n_ctx"],
                    "drift": drift,
                }
                for precision, columns in drift.items():
                    worst = max(columns, key=lambda c, d=columns: d[c][1])
                    print(
                        f"{name}: {precision}: {worst} {columns[worst]} {acceptable(columns)}",
                        flush=True,
                    )
    if not options.only:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
