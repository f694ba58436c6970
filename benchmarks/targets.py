"""What has to be reached: every row of the benchmark's table, and what is measured of it."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, median

from benchmarks.cases import SHOWN, Cell, Shape, Sizes, product_cell
from benchmarks.ways import bare_format
from headcount import MeasureCallback
from headcount.schemas.scans.scan import FASTEST_ACCEPTABLE

PEAK_FLOPS = 790e12
"""Operations per second that an H200 was seen to do in half-precision products."""

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class CellMeasurements:
    """What is known of a cell; memory is None if it was not weighed."""

    seconds: list[float]
    """Of one pass, by round."""
    loaded: int | None = None
    """Bytes after loading."""
    peak: int | None = None
    """Bytes at most."""


class Results:
    """The cells of one run of the benchmark, and how they compare; None for a cell that was not
    measured.
    """

    def __init__(self, device: str, cells: Mapping[Cell, CellMeasurements]) -> None:
        self.device, self.cells = device, cells

    def tokens_per_second(self, cell: Cell | None) -> float | None:
        """The speed of a cell in its median round."""
        if cell is None or cell not in self.cells:
            return None
        return cell.batch * cell.n_ctx / median(self.cells[cell].seconds)

    def speed(self, cell: Cell | None, baseline: Cell | None) -> float | None:
        """Tokens per second over those of a baseline, paired by round."""
        if cell is None or baseline is None or not {cell, baseline} <= self.cells.keys():
            return None
        rounds = zip(self.cells[cell].seconds, self.cells[baseline].seconds, strict=True)
        # The median of ratios, not a ratio of medians: the machine's speed changes between rounds.
        ratio = median(baseline_seconds / seconds for seconds, baseline_seconds in rounds)
        return ratio * (cell.batch * cell.n_ctx) / (baseline.batch * baseline.n_ctx)

    def share_of_product(self, cell: Cell, product: Cell, flops: float) -> float | None:
        """Operations per second of a cell, `flops` for each token, over those of a square matrix
        product with `n_ctx` rows, paired by round.
        """
        ratio = self.speed(cell, product)
        # The product's rows are its tokens, and each costs 2·n_ctx² operations.
        return None if ratio is None else ratio * flops / (2 * product.n_ctx**2)

    def memory(self, cell: Cell, baseline: Cell) -> float | None:
        """Peak memory over that of a baseline."""
        peak = self._peak(cell)
        baseline_peak = self._peak(baseline)
        return peak / baseline_peak if peak and baseline_peak else None

    def extra(self, cell: Cell) -> int | None:
        """Bytes at the peak beyond those after loading."""
        measurements = self.cells.get(cell)
        if measurements is None or measurements.peak is None or measurements.loaded is None:
            return None
        return measurements.peak - measurements.loaded

    def growth(self, model: str, way: str) -> float | None:
        """The exponent with which extra memory grows with n_ctx, over the longer half of the
        lengths.
        """
        cells_of_way = [cell for cell in self.cells if (cell.model, cell.way) == (model, way)]
        # The curve is of one sequence, so a cell is known by its length.
        by_length = sorted(cells_of_way, key=lambda cell: cell.n_ctx)
        # Short sequences need so little that the allocator's rounding would be measured.
        longer_half = by_length[(len(by_length) - 1) // 2 :]
        points: list[tuple[float, float]] = []
        for cell in longer_half:
            extra = self.extra(cell)
            if extra is None or extra <= 0:
                return None
            points.append((cell.n_ctx, extra))
        return slope(points) if len(points) >= 2 else None

    def only(self, way: str, precision: str) -> Cell | None:
        """GPT-2's cell of a way that has one: on a GPU, that of its best batch."""
        wanted = ("gpt2", way, precision)
        matching = (c for c in self.cells if (c.model, c.way, c.precision) == wanted)
        return next(matching, None)

    def _peak(self, cell: Cell) -> int | None:
        measurements = self.cells.get(cell)
        return None if measurements is None else measurements.peak


Measure = Callable[[Results], float | None]


@dataclass(frozen=True)
class Target:
    """A row of the table: a number, what it is compared with, and how far it has to reach.

    A row without a reach is for information.
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
        """What was measured, or None if it was not."""
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
        if self.unit == "%":
            return f"{value:.2%}"
        # 1/6.6 is easier to compare with 1/6 than 0.152 with 0.167.
        if self.at_most is not None and max(self.at_most, value) < 0.5:
            return f"1/{1 / value:.3g} ×"
        return f"{value:.3g} {self.unit}".rstrip()

    def verdict(self, value: float | None) -> str:
        """`met`, `missed` or `not measured`; a row for information has none."""
        if value is None:
            return NOT_MEASURED
        if self.at_least is None and self.at_most is None:
            return "–"
        is_large_enough = self.at_least is None or value >= self.at_least
        is_small_enough = self.at_most is None or value <= self.at_most
        return "met" if is_large_enough and is_small_enough else "missed"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent p of the y = c·x^p that is closest to points (x, y): a straight line through
    their logarithms.
    """
    log_x = [math.log2(x) for x, _ in points]
    log_y = [math.log2(y) for _, y in points]
    return linear_regression(log_x, log_y).slope


def flops_per_token(sizes: Sizes) -> float:
    """Operations of GPT-2's products for one token, without the unembedding.

    n_layers · (24·d_model² + 2·n_ctx·d_model): products with weights, and attention to the past.
    """
    n_layers, d_model, n_ctx = sizes.gpt2["n_layer"], sizes.gpt2["n_embd"], sizes.main[1]
    # A layer has 12·d_model² weights, with a product and a sum each. Attention has two products,
    # q·k and A·v, of 2·d_model operations for n_ctx/2 earlier tokens in the mean.
    return n_layers * (24 * d_model**2 + 2 * n_ctx * d_model)


def targets(sizes: Sizes) -> list[Target]:
    """Every row, in the order of the table."""
    on_cpu = [
        *_gpt2_on_cpu(sizes),
        *_effects_on_cpu(sizes),
        *_llama_on_cpu(sizes),
        *_grouped_on_cpu(sizes),
        _watching_on_cpu(sizes),
        *_tensors_on_cpu(sizes),
    ]
    return [
        *(replace(target, device="cpu") for target in on_cpu),
        _growth(sizes),
        *(replace(target, device="cuda") for target in _gpt2_on_gpu(sizes)),
    ]


def _gpt2_on_cpu(sizes: Sizes) -> list[Target]:
    """GPT-2 small's shape against every other way, and in other precisions."""
    main_setting = f"GPT-2, CPU, {_shown(sizes.main)}, float32"
    short_setting = f"GPT-2, CPU, {_shown(sizes.short)}, float32"
    bare = Cell("gpt2", "bare", "float32", *sizes.main)
    fused = replace(bare, way="fused")
    compiled = replace(bare, way="compiled")
    cached = replace(bare, way="run_with_cache")
    short_bare = Cell("gpt2", "bare", "float32", *sizes.short)
    short_fused = replace(short_bare, way="fused")
    against_bare = Target(f"{main_setting}: speed", "bare", _speed(fused, bare), at_least=0.95)
    rows = sizes.product_rows

    def share_of_peak(results: Results) -> float | None:
        return results.share_of_product(fused, product_cell(sizes), flops_per_token(sizes))

    return [
        against_bare,
        Target(
            f"{main_setting}: share of the float32 peak",
            f"a product of {rows} × {rows} matrices",
            share_of_peak,
            at_least=0.72,
            unit="",
        ),
        Target(f"{main_setting}: peak memory", "bare", _memory(fused, bare), at_most=1.25),
        Target(f"{main_setting}: speed", "bare, compiled", _speed(fused, compiled), at_least=0.90),
        Target(f"{short_setting}: speed", "bare", _speed(short_fused, short_bare), at_least=0.90),
        *_faster_precisions(sizes.main, against_bare),
        Target(f"{main_setting}: speed", "run_with_cache", _speed(fused, cached), at_least=4),
        Target(
            f"{main_setting}: peak memory", "run_with_cache", _memory(fused, cached), at_most=1 / 6
        ),
    ]


def _faster_precisions(shape: Shape, against_bare: Target) -> list[Target]:
    """The fastest acceptable precision of a CPU, and one that is shown for information."""
    fastest = FASTEST_ACCEPTABLE["cpu"]
    # While that is float32, the first row of the table answers this too.
    setting = f"GPT-2, CPU, {_shown(shape)}"
    if fastest == "float32":
        row = f"{setting}, fastest acceptable precision: speed (float32, the first row again)"
        rows = [replace(against_bare, row=row)]
    else:
        row = f"{setting}, {fastest}, the fastest acceptable: speed"
        fused = Cell("gpt2", "fused", fastest, *shape)
        bare = replace(fused, way="bare")
        in_float32 = replace(fused, precision="float32")
        bare_name = f"bare, {bare_format(fastest)}"
        rows = [
            Target(row, bare_name, _speed(fused, bare), at_least=0.85),
            Target(row, "headcount, float32", _speed(fused, in_float32), at_least=1.5),
        ]
    if fastest != SHOWN:
        row = f"{setting}, {SHOWN}: speed (for information)"
        fused = Cell("gpt2", "fused", SHOWN, *shape)
        bare = replace(fused, way="bare")
        rows.append(Target(row, f"bare, {bare_format(SHOWN)}", _speed(fused, bare)))
    return rows


def _effects_on_cpu(sizes: Sizes) -> list[Target]:
    """What a pass forward and backward costs, in forward passes that know their loss."""
    setting = f"GPT-2, CPU, {_shown(sizes.main)}, float32"
    bare = Cell("gpt2", "bare_loss", "float32", *sizes.main)
    reaches = {"gradients": 1.9, "direct_effects": 1.3, "all_effects": 3.0}
    rows = [
        # Of time, so the baseline's speed over that of the way.
        Target(
            f"{setting}, {way.replace('_', ' ')}: time",
            "bare, with the loss",
            _speed(bare, replace(bare, way=way)),
            at_most=reach,
        )
        for way, reach in reaches.items()
    ]
    memory = _memory(replace(bare, way="all_effects"), bare)
    row = f"{setting}, all effects: peak memory"
    return [*rows, Target(row, "bare, with the loss", memory, at_most=2)]


def _llama_on_cpu(sizes: Sizes) -> list[Target]:
    """A rotary model of about the same size."""
    setting = f"Llama, CPU, {_shown(sizes.main)}, float32"
    bare = Cell("llama", "bare", "float32", *sizes.main)
    fused = replace(bare, way="fused")
    cached = replace(bare, way="run_with_cache")
    return [
        # Below GPT-2's 0.95: a Llama's bare pass has no slow GELU whose time headcount wins back.
        Target(f"{setting}: speed", "bare", _speed(fused, bare), at_least=0.90),
        Target(f"{setting}: peak memory", "bare", _memory(fused, bare), at_most=1.25),
        Target(f"{setting}: speed", "run_with_cache", _speed(fused, cached), at_least=4),
        Target(f"{setting}: peak memory", "run_with_cache", _memory(fused, cached), at_most=1 / 6),
    ]


def _grouped_on_cpu(sizes: Sizes) -> list[Target]:
    """A wide rotary model whose heads share keys, one sequence of each length."""
    rows: list[Target] = []
    for n_ctx in sizes.grouped_lengths:
        setting = f"grouped, CPU, {_shown((1, n_ctx))}, float32"
        bare = Cell("grouped", "bare", "float32", 1, n_ctx)
        fused = replace(bare, way="fused")
        same_products = replace(bare, way="bare_same_products")
        # The longest sequence spends most of its time in attention, where all questions are.
        reach = 0.85 if n_ctx == sizes.grouped_lengths[-1] else 0.95
        rows += [
            Target(f"{setting}: speed", "bare", _speed(fused, bare), at_least=reach),
            Target(
                f"{setting}: speed",
                "bare, the same products",
                _speed(fused, same_products),
                at_least=reach,
            ),
            Target(f"{setting}: peak memory", "bare", _memory(fused, bare), at_most=1.05),
        ]
    return rows


def _watching_on_cpu(sizes: Sizes) -> Target:
    """What the callback takes of a training, at its default interval.

    A measurement is timed beside a step, because its share is far below what two whole trainings
    differ by.
    """
    every = inspect.signature(MeasureCallback).parameters["every"].default
    step = Cell("trained", "training_step", "float32", *sizes.trained_on)
    watching = replace(step, way="watching")

    def share(results: Results) -> float | None:
        ratio = results.speed(step, watching)
        return None if ratio is None else ratio / every

    setting = f"GPT-2 in training, CPU, {_shown(sizes.trained_on)}, float32"
    row = f"{setting}, watched every {every} steps: time"
    return Target(row, "the steps alone", share, at_most=0.02, unit="%")


def _tensors_on_cpu(sizes: Sizes) -> list[Target]:
    """What all standard statistics of tensors cost, in attention alone."""
    rows: list[Target] = []
    for model, shape in sizes.tensors:
        attention = Cell(model, "attention", "float32", *shape)
        ours = replace(attention, way="attention_statistics")
        row = f"q, k and v of {model}'s heads, CPU, {_shown(shape)}, float32: time"
        rows.append(Target(row, "attention alone", _speed(attention, ours), at_most=1.4))
    return rows


def _growth(sizes: Sizes) -> Target:
    """Memory against the length of a sequence."""
    lengths = f"{sizes.lengths[0]} → {sizes.lengths[-1]}"
    return Target(
        f"rotary, extra memory against n_ctx {lengths}: exponent (1 is linear)",
        "–",
        lambda results: results.growth("rotary", "fused"),
        at_most=1.1,
        unit="",
    )


def _gpt2_on_gpu(sizes: Sizes) -> list[Target]:
    """GPT-2 small's shape, each way at its best batch."""
    # The best batches are found on the machine, so a cell is known by its way and precision.
    precision = FASTEST_ACCEPTABLE["cuda"]
    setting = f"GPT-2, GPU, n_ctx {sizes.main[1]}, best batch, {precision}"

    def speed_against(way: str, way_precision: str) -> Measure:
        return lambda results: results.speed(
            results.only("fused", precision), results.only(way, way_precision)
        )

    def tokens_per_second(results: Results) -> float | None:
        return results.tokens_per_second(results.only("fused", precision))

    def share_of_peak(results: Results) -> float | None:
        tokens = tokens_per_second(results)
        return None if tokens is None else tokens * flops_per_token(sizes) / PEAK_FLOPS

    return [
        Target(
            f"{setting}: speed",
            f"bare, compiled, {bare_format(precision)}",
            speed_against("compiled", precision),
            at_least=0.85,
        ),
        Target(f"{setting}: speed", "–", tokens_per_second, at_least=1.5e6, unit="tokens/s"),
        Target(f"{setting}: share of {PEAK_FLOPS / 1e12:.0f} TFLOP/s", "–", share_of_peak, unit=""),
        Target(
            f"{setting}: speed",
            "run_with_cache, float32, its best batch",
            speed_against("run_with_cache", "float32"),
            at_least=15,
        ),
    ]


def _shown(shape: Shape) -> str:
    """A shape as rows name it, such as `4 × 1024`."""
    batch, n_ctx = shape
    return f"{batch} × {n_ctx}"


def _speed(ours: Cell, baseline: Cell) -> Measure:
    return lambda results: results.speed(ours, baseline)


def _memory(ours: Cell, baseline: Cell) -> Measure:
    return lambda results: results.memory(ours, baseline)
