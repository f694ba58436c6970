"""What has to be reached: every row of the benchmark's table, and what is measured of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, median

from benchmarks.cases import SHOWN, Cell, Shape, Sizes
from benchmarks.ways import bare_format
from schemas.precision import FASTEST_ACCEPTABLE

PEAK_FLOPS = 790e12
"""Products that an H200 was seen to do in half precision, in operations per second."""


NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class InterventionMeasurements:
    """What is known of a cell; memory is None where it was not weighed."""

    seconds: list[float]
    loaded: int | None = None
    peak: int | None = None


class Results:
    """The cells of one run of the benchmark, and what they say of each other; None where a cell was
    not measured.
    """

    def __init__(self, device: str, cells: Mapping[Cell, InterventionMeasurements]) -> None:
        self.device, self.cells = device, cells

    def tokens_per_second(self, cell: Cell | None) -> float | None:
        """By the median round."""
        if cell is None or cell not in self.cells:
            return None
        return cell.batch * cell.n_ctx / median(self.cells[cell].seconds)

    def speed(self, cell: Cell | None, other: Cell | None) -> float | None:
        """Tokens per second over another cell's, paired by round."""
        if cell is None or other is None or cell not in self.cells or other not in self.cells:
            return None
        pairs = zip(self.cells[cell].seconds, self.cells[other].seconds, strict=True)
        return (
            median(b / a for a, b in pairs)
            * (cell.batch * cell.n_ctx)
            / (other.batch * other.n_ctx)
        )

    def memory(self, cell: Cell, other: Cell) -> float | None:
        """Peak memory over another cell's."""
        peaks = [self.cells[c].peak if c in self.cells else None for c in (cell, other)]
        return peaks[0] / peaks[1] if peaks[0] and peaks[1] else None

    def extra(self, cell: Cell) -> int | None:
        """Bytes at the peak beyond those after loading."""
        found = self.cells.get(cell)
        return (
            None
            if found is None or found.peak is None or found.loaded is None
            else found.peak - found.loaded
        )

    def growth(self, model: str, way: str) -> float | None:
        """The exponent with which extra memory grows with n_ctx, over the longer half of the
        lengths.
        """
        ours = sorted(
            (c for c in self.cells if (c.model, c.way) == (model, way)), key=lambda c: c.n_ctx
        )
        points = [(cell.n_ctx, self.extra(cell)) for cell in ours[(len(ours) - 1) // 2 :]]
        known = [(n_ctx, extra) for n_ctx, extra in points if extra is not None and extra > 0]
        return slope(known) if len(known) == len(points) >= 2 else None

    def only(self, way: str, precision: str) -> Cell | None:
        """GPT-2's cell of a way that has one: on a GPU, that of its best batch."""
        return next(
            (c for c in self.cells if (c.model, c.way, c.precision) == ("gpt2", way, precision)),
            None,
        )


Measure = Callable[[Results], float | None]


@dataclass(frozen=True)
class Target:
    """A row of the table: a number, what it is held against, and how far it has to reach; no reach
    is information.
    """

    row: str
    baseline: str
    measure: Measure
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "×"
    device: str = ""
    """Where it is measured; empty for everywhere."""

    def value(self, results: Results) -> float | None:
        """What was measured, if it was."""
        return self.measure(results) if self.device in ("", results.device) else None

    @property
    def reach(self) -> str:
        """How far it has to reach, in words."""
        if self.at_least is not None:
            return f"≥ {self.show(self.at_least)}"
        return "–" if self.at_most is None else f"≤ {self.show(self.at_most)}"

    def show(self, value: float | None) -> str:
        """A value with its unit; a small ratio as a fraction."""
        if value is None:
            return NOT_MEASURED
        if self.unit == "tokens/s":
            return f"{value:,.0f} tokens/s"
        if self.at_most is not None and max(self.at_most, value) < 0.5:
            return f"1/{1 / value:.3g} ×"
        return f"{value:.3g} {self.unit}".rstrip()

    def verdict(self, value: float | None) -> str:
        """met, missed or not measured; information has none."""
        if value is None:
            return NOT_MEASURED
        if self.at_least is None and self.at_most is None:
            return "–"
        reached = (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )
        return "met" if reached else "missed"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent p of the y = c·x^p that is closest to points (x, y): a straight line through
    their logarithms.
    """
    return linear_regression(
        [math.log2(x) for x, _ in points], [math.log2(y) for _, y in points]
    ).slope


def flops_per_token(sizes: Sizes) -> float:
    """Operations of GPT-2's products that a token needs: 24·d_model² a layer with weights,
    2·n_ctx·d_model in attention.

    Attention counts the past alone; there is no unembedding.
    """
    n_layers, d_model, n_ctx = sizes.gpt2["n_layer"], sizes.gpt2["n_embd"], sizes.main[1]
    return n_layers * (24 * d_model**2 + 2 * n_ctx * d_model)


def targets(sizes: Sizes) -> list[Target]:
    """Every row, in the order of the table."""
    on_cpu, on_gpu = FASTEST_ACCEPTABLE["cpu"], FASTEST_ACCEPTABLE["cuda"]
    main, short = (f"{batch} × {n_ctx}" for batch, n_ctx in (sizes.main, sizes.short))
    lengths = f"{sizes.lengths[0]} → {sizes.lengths[-1]}"

    def cell(way: str, precision: str = "float32", shape: Shape = sizes.main) -> Cell:
        return Cell("gpt2", way, precision, *shape)

    def speed(ours: Cell, other: Cell) -> Measure:
        return lambda results: results.speed(ours, other)

    def memory(other: Cell) -> Measure:
        return lambda results: results.memory(cell("fused"), other)

    def gpu_speed(baseline: str, precision: str) -> Measure:
        return lambda r: r.speed(r.only("fused", on_gpu), r.only(baseline, precision))

    def gpu_tokens(results: Results) -> float | None:
        return results.tokens_per_second(results.only("fused", on_gpu))

    def mfu(results: Results) -> float | None:
        tokens = gpu_tokens(results)
        return None if tokens is None else tokens * flops_per_token(sizes) / PEAK_FLOPS

    bare, fused = cell("bare"), cell("fused")
    cpu, gpu = f"CPU, {main}, float32", f"GPU, n_ctx {sizes.main[1]}, best batch, {on_gpu}"
    first = Target(f"{cpu}: speed", "bare", speed(fused, bare), at_least=0.95)
    if on_cpu == "float32":
        fastest = [
            replace(
                first,
                row=f"CPU, {main}, fastest acceptable precision: speed (float32, the first row "
                "again)",
            )
        ]
    else:
        row, ours = f"CPU, {main}, {on_cpu}, the fastest acceptable: speed", cell("fused", on_cpu)
        fastest = [
            Target(
                row,
                f"bare, {bare_format(on_cpu)}",
                speed(ours, cell("bare", on_cpu)),
                at_least=0.85,
            ),
            Target(row, "headcount, float32", speed(ours, fused), at_least=1.5),
        ]
    if on_cpu != SHOWN:
        row, both = (
            f"CPU, {main}, {SHOWN}: speed (for information)",
            (cell("fused", SHOWN), cell("bare", SHOWN)),
        )
        fastest.append(Target(row, f"bare, {bare_format(SHOWN)}", speed(*both)))
    of_cpu = [
        first,
        Target(f"{cpu}: peak memory", "bare", memory(bare), at_most=1.25),
        Target(f"{cpu}: speed", "bare, compiled", speed(fused, cell("compiled")), at_least=0.90),
        Target(
            f"CPU, {short}, float32: speed",
            "bare",
            speed(*(cell(way, shape=sizes.short) for way in ("fused", "bare"))),
            at_least=0.90,
        ),
        *fastest,
        Target(f"{cpu}: speed", "run_with_cache", speed(fused, cell("run_with_cache")), at_least=4),
        Target(
            f"{cpu}: peak memory", "run_with_cache", memory(cell("run_with_cache")), at_most=1 / 6
        ),
    ]
    of_gpu = [
        Target(
            f"{gpu}: speed",
            f"bare, compiled, {bare_format(on_gpu)}",
            gpu_speed("compiled", on_gpu),
            at_least=0.85,
        ),
        Target(f"{gpu}: speed", "–", gpu_tokens, at_least=1.5e6, unit="tokens/s"),
        Target(f"{gpu}: share of {PEAK_FLOPS / 1e12:.0f} TFLOP/s", "–", mfu, unit=""),
        Target(
            f"{gpu}: speed",
            "run_with_cache, float32, its best batch",
            gpu_speed("run_with_cache", "float32"),
            at_least=15,
        ),
    ]
    growth = Target(
        f"extra memory against n_ctx {lengths}: exponent (1 is linear)",
        "–",
        lambda r: r.growth("rotary", "fused"),
        at_most=1.1,
        unit="",
    )
    return [
        *(replace(t, device="cpu") for t in of_cpu),
        growth,
        *(replace(t, device="cuda") for t in of_gpu),
    ]
