"""The benchmark says what it measured, and its verdicts follow from the numbers."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from benchmarks import cases
from benchmarks.cases import FULL, QUICK, Cell, cells
from benchmarks.measure import weigh_run
from benchmarks.targets import (
    PEAK_FLOPS,
    CellMeasurements,
    Results,
    Target,
    flops_per_token,
    slope,
    targets,
)
from benchmarks.ways import STANDARD, WAYS, draw_tokens, make_gpt2_small
from headcount.schemas.scans.precision import FASTEST_ACCEPTABLE
from tests import ROOT
from tests.tools.processes import Command

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_WEIGH = Path("/proc/self/clear_refs").exists()
MB = 1 << 20


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that a quick run of the whole benchmark wrote into."""
    out = tmp_path_factory.mktemp("bench")
    # Threads only wait for each other at these sizes.
    place: Any = {"environment": os.environ | {"OMP_NUM_THREADS": "1"}, "directory": ROOT}
    command = Command("--quick", "--out", out, main="benchmarks.bench.main", **place)
    ended = command.ended(timeout=600)
    assert ended.code == 0, ended.stdout + ended.stderr
    (out / "stdout").write_text(ended.stdout, encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def record(quick: Path) -> dict[str, Any]:
    (line,) = (quick / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(line)


@pytest.mark.long
@pytest.mark.skipif(not CAN_WEIGH, reason="memory is read from Linux's /proc")
def test_a_quick_run_measures_the_rows_of_its_device_and_names_others(
    record: dict[str, Any],
) -> None:
    wanted = targets(QUICK)
    assert [row["row"] for row in record["rows"]] == [target.row for target in wanted]
    for target, row in zip(wanted, record["rows"], strict=True):
        if target.device in ("", DEVICE):
            assert 0 < row["value"] < math.inf, row
            assert row["verdict"] in (("–",) if target.reach == "–" else ("met", "missed")), row
        else:
            words = (row["value"], row["measured"], row["verdict"])
            assert words == (None, "not measured", "not measured")
    if DEVICE == "cuda":
        return  # A GPU's batches are found, not given.
    cell_fields = ("model", "way", "precision", "batch", "n_ctx")
    recorded = {Cell(*(entry[name] for name in cell_fields)): entry for entry in record["cells"]}
    assert set(recorded) == {cell for case in cases.CASES["cpu"] for cell in cells(case, QUICK)}
    assert {cell.way for cell in recorded} == set(WAYS)
    for cell, entry in recorded.items():
        (seconds,) = entry["seconds"]
        assert 0 < seconds < math.inf
        if cases.is_weighed(cell, QUICK):
            assert 100 * MB < entry["loaded"] <= entry["peak"] < 10_000 * MB
        else:
            assert entry["peak"] is None


def test_a_verdict_is_met_or_missed_or_not_measured() -> None:
    for at_least, at_most, value, verdict in (
        (0.95, None, 0.95, "met"), (0.95, None, 0.9499, "missed"), (0.95, None, 3, "met"),
        (None, 1.25, 1.25, "met"), (None, 1.25, 1.2501, "missed"), (None, 1.25, 0.5, "met"),
        (0.95, None, None, "not measured"), (None, None, None, "not measured"),
        (None, None, 0.1, "–"),
    ):  # fmt: skip
        target = Target("row", "baseline", lambda _: None, at_least, at_most)
        assert target.verdict(value) == verdict, (at_least, at_most, value)


def cell(way: str, batch: int, n_ctx: int, model: str = "gpt2", precision: str = "float32") -> Cell:
    return Cell(model, way, precision, batch, n_ctx)


def test_growth_is_the_exponent_of_extra_memory_over_the_longer_half() -> None:
    # Through (0, 0), (1, 1), (2, 4) of logarithms: Σ(x-1)(y-5/3) / Σ(x-1)² = 4/2.
    assert slope([(1, 1), (2, 2), (4, 16)]) == pytest.approx(2, abs=1e-12)

    def grown(*extra: int | None) -> float | None:
        found: dict[Cell, CellMeasurements] = {}
        for place, more in enumerate(extra):
            peak = None if more is None else 700 + more
            found[cell("fused", 1, 2**place, "rotary")] = CellMeasurements([1.0], 700, peak)
            bare = CellMeasurements([1.0], 1, 1 + 8**place)
            found[cell("bare", 1, 2**place, "rotary")] = bare
        return Results("cpu", found).growth("rotary", "fused")

    assert grown(50, 51, 90, 64, 128, 256, 512) == pytest.approx(1, abs=1e-12)
    assert grown(50, 51, 90, 64, 256, 1024, 4096) == pytest.approx(2, abs=1e-12)
    assert [grown(8, 8, None), grown(8, 0), grown()] == [None] * 3


def test_speeds_are_paired_by_round_and_shares_count_operations_of_both() -> None:
    a, b, product = cell("fused", 4, 8), cell("bare", 2, 8), cell("product", 1, 40)
    results = Results("cpu", {a: CellMeasurements([1, 4, 10]), b: CellMeasurements([2, 2, 30])})
    assert results.speed(a, b) == 2 * 2  # The medians of both would say 2/4.
    assert results.tokens_per_second(a) == 32 / 4
    assert results.speed(a, replace(b, batch=3)) is None
    assert results.memory(a, b) is None
    weighed = {a: CellMeasurements([1], 1, 30), b: CellMeasurements([1], 9, 20)}
    assert Results("cpu", weighed).memory(a, b) == 1.5
    # 32 tokens of 320 operations in 2 s, beside 2·40³ operations in 1 s; then in half the time.
    measured = {a: CellMeasurements([2.0, 1.0]), product: CellMeasurements([1.0, 0.5])}
    share = Results("cpu", measured).share_of_product(a, product, 320)
    assert share == pytest.approx((32 * 320 / 2) / (2 * 40**3))
    assert Results("cpu", {}).share_of_product(a, product, 320) is None


def test_gpu_rows_follow_from_the_best_batches() -> None:
    half = FASTEST_ACCEPTABLE["cuda"]
    measurements = {
        cell("fused", 64, 1024, precision=half): CellMeasurements([0.04, 0.04, 0.04]),
        cell("compiled", 128, 1024, precision=half): CellMeasurements([0.08, 0.064, 0.1]),
        cell("run_with_cache", 16, 1024): CellMeasurements([0.25, 0.25, 0.25]),
    }
    values = [(t.device, t.value(Results("cuda", measurements))) for t in targets(FULL)]
    tokens = 64 * 1024 / 0.04
    share = tokens * flops_per_token(FULL) / PEAK_FLOPS
    of_gpu = [value for device, value in values if device == "cuda"]
    assert of_gpu == pytest.approx([1.0, tokens, share, 25.0])
    assert flops_per_token(FULL) == 12 * (24 * 768**2 + 2 * 1024 * 768)
    # A row is of one device.
    assert {value for device, value in values if device != "cuda"} == {None}
    assert {target.value(Results("cpu", measurements)) for target in targets(FULL)} == {None}


@pytest.mark.skipif(not CAN_WEIGH, reason="memory is read from Linux's /proc")
def test_what_a_run_holds_for_a_moment_is_weighed() -> None:
    def run(tokens: torch.Tensor) -> None:
        torch.ones(64 * MB if tokens.shape[1] > 16 else 1, dtype=torch.uint8)

    torch.ones(256 * MB, dtype=torch.uint8)  # An earlier peak does not count.
    loaded, peak = weigh_run(run, torch.zeros(1, 17))
    assert 60 * MB < peak - loaded < 80 * MB


@pytest.mark.long
def test_every_way_does_the_work_it_is_compared_for(tmp_path: Path) -> None:
    path = make_gpt2_small(tmp_path / "gpt2", **QUICK.gpt2)
    tokens = draw_tokens(path, 2, 48)

    def ran(way: str, precision: str = "float32") -> Any:
        with torch.inference_mode():
            return WAYS[way](path, "cpu", precision)(tokens)

    heads, cached, bare = (ran(way) for way in ("fused", "run_with_cache", "bare"))
    half = ran("bare", "bfloat16_linears")
    same = ran("bare_same_products").last_hidden_state
    torch.testing.assert_close(same, bare.last_hidden_state)
    assert ran("product").shape == (48, 48)
    for layer in range(QUICK.gpt2["n_layer"]):
        of_layer = cached[layer * len(STANDARD) :]
        for statistic, values in zip(STANDARD, of_layer, strict=False):
            fused = torch.from_numpy(heads.heads[statistic.name][:, layer])
            # Some statistics have one value for all heads of a layer.
            expected = values if values.dim() == 2 else values[:, None].expand_as(fused)
            assert torch.allclose(fused, expected, rtol=1e-4, atol=1e-5), statistic.name
    assert bare.last_hidden_state.shape == (2, 48, QUICK.gpt2["n_embd"])
    formats = (bare.last_hidden_state.dtype, half.last_hidden_state.dtype)
    assert formats == (torch.float32, torch.bfloat16)
    assert bare.past_key_values is None


def test_tokens_repeat_as_often_as_in_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 50257}')
    tokens = draw_tokens(tmp_path, 16, 1024)
    earlier_copies = (tokens[:, :, None] == tokens[:, None]).tril(-1).sum() / tokens.numel()
    assert 5 < earlier_copies < 7.5  # The Pile: 5 to 7.
    assert torch.equal(tokens, draw_tokens(tmp_path, 16, 1024))


def test_the_readme_has_the_cost_by_length_of_the_last_whole_run() -> None:
    history = (ROOT / "benchmarks" / "history.jsonl").read_text(encoding="utf-8").splitlines()
    cells_by_way: dict[tuple[str, int], Any] = {
        (cell["way"], cell["n_ctx"]): cell
        for cell in json.loads(history[-1])["cells"]
        if cell["model"] == "rotary"
    }
    rows = {"tokens": "", "speed": "", "peak memory": ""}
    for n_ctx in FULL.lengths:
        bare, fused = (cells_by_way[way, n_ctx] for way in ("bare", "fused"))
        ratios = [b / f for b, f in zip(bare["seconds"], fused["seconds"], strict=True)]
        rows["tokens"] += f" {n_ctx} |"
        rows["speed"] += f" {median(ratios):.2f} × |"
        rows["peak memory"] += f" {fused['peak'] / bare['peak']:.2f} × |"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name, row in rows.items() if f"| {name} |{row}\n" not in readme] == []
