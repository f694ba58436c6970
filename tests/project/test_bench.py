"""The benchmark says what it measured, and its verdicts follow from the numbers."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import pytest
import torch

from benchmarks.at_scale import precision_drift as precision
from benchmarks.at_scale.precision_drift import PAGE, SINKS, Drift, acceptable, read_cases
from benchmarks.cases import FULL, QUICK, Cell
from benchmarks.targets import (
    PEAK_FLOPS,
    CellMeasurements,
    Results,
    Target,
    flops_per_token,
    slope,
    targets,
)
from benchmarks.ways import STANDARD, WAYS, draw_tokens, make_gpt2_small, make_llama
from headcount.schemas.scans.scan import FASTEST_ACCEPTABLE, PRECISIONS
from headcount.schemas.statistics import STATISTICS
from tests import ROOT
from tests.tools.processes import Command


@pytest.mark.long
def test_a_quick_run_has_a_verdict_for_every_target(tmp_path: Path) -> None:
    # Threads only wait for each other at these sizes.
    place: Any = {"environment": os.environ | {"OMP_NUM_THREADS": "1"}, "directory": ROOT}
    command = Command("--quick", "--out", tmp_path, main="benchmarks.bench.main", **place)
    ended = command.ended(timeout=600)
    assert ended.code == 0, ended.stdout + ended.stderr
    (line,) = (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()
    rows = json.loads(line)["rows"]
    wanted = targets(QUICK)
    assert [row["row"] for row in rows] == [target.row for target in wanted]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for target, row in zip(wanted, rows, strict=True):
        assert row["verdict"] == target.verdict(row["value"]), row
        assert row["value"] is None or target.device in ("", device), row
    assert {row["verdict"] for row in rows} & {"met", "missed"}


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


@pytest.mark.long
@pytest.mark.parametrize(("make", "sizes", "n_layers", "d_model"), [
    (make_gpt2_small, QUICK.gpt2, QUICK.gpt2["n_layer"], QUICK.gpt2["n_embd"]),
    (make_llama, QUICK.llama, QUICK.llama["num_hidden_layers"], QUICK.llama["hidden_size"]),
])  # fmt: skip
def test_every_way_does_the_work_it_is_compared_for(
    tmp_path: Path, make: Any, sizes: dict[str, int], n_layers: int, d_model: int
) -> None:
    path = make(tmp_path / "model", **sizes)
    tokens = draw_tokens(path, 2, 48)

    def ran(way: str, precision: str = "float32") -> Any:
        with torch.inference_mode():
            return WAYS[way](path, "cpu", precision)(tokens)

    heads, cached, bare = (ran(way) for way in ("fused", "run_with_cache", "bare"))
    half = ran("bare", "bfloat16_linears")
    same = ran("bare_same_products").last_hidden_state
    torch.testing.assert_close(same, bare.last_hidden_state)
    assert ran("product").shape == (48, 48)
    for layer in range(n_layers):
        of_layer = cached[layer * len(STANDARD) :]
        for statistic, values in zip(STANDARD, of_layer, strict=False):
            fused = torch.from_numpy(heads.heads[statistic.name][:, layer])
            # Some statistics have one value for all heads of a layer.
            expected = values if values.dim() == 2 else values[:, None].expand_as(fused)
            assert torch.allclose(fused, expected, rtol=1e-4, atol=1e-5), statistic.name
    assert bare.last_hidden_state.shape == (2, 48, d_model)
    formats = (bare.last_hidden_state.dtype, half.last_hidden_state.dtype)
    assert formats == (torch.float32, torch.bfloat16)
    assert bare.past_key_values is None


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


# precision.md: its verdicts follow from the figures, and its query answers what it shows


def test_the_page_is_made_from_figures_of_every_precision_that_allow_the_defaults() -> None:
    assert PAGE.read_text(encoding="utf-8") == precision.page(*read_cases())
    _, cases = read_cases()
    assert len(cases) >= 4
    standard = {statistic.name for statistic in STATISTICS.select("standard")}
    # Statistics that were registered later are measured with the next make precision.
    assert {name for case in cases for name in case.drift["float32"]} >= standard
    for case in cases:
        assert case.sequences >= 200
        assert set(case.drift) == set(PRECISIONS) - {"float64"}
        for fastest in FASTEST_ACCEPTABLE.values():
            assert acceptable(case.drift[fastest]) or case.model == SINKS


@pytest.mark.long
def test_every_case_can_be_measured(tmp_path: Path) -> None:
    models = precision.gpt2_small_sharp(tmp_path / "sharp", n_layers=1)
    scans = precision.scans(models, precision.granite_swa_sharp(tmp_path / SINKS))
    cases = [precision.measure_case(fields, 2, ["float32"]) for fields in scans]
    # Every statistic of a forward pass has a value in some case.
    of_forward_pass = {statistic.name for statistic in STATISTICS.select("all")}
    assert {name for case in cases for name in case.drift["float32"]} == of_forward_pass


@pytest.mark.parametrize(("name", "p99", "is_acceptable"), [
    ("sink_mass", 1.1e-3, False),
    ("value_norm", 1.1e-3, False),
    ("sink_mass", float("nan"), False),
    ("entropy", 1.1e-3, True),
    ("head_output_norm_last", 1.1e-3, True),
])  # fmt: skip
def test_acceptable_means_the_99th_percentile_of_standard_probabilities_and_norms(
    name: str, p99: float, is_acceptable: bool
) -> None:
    within = dict.fromkeys(STATISTICS, Drift(0.0, 0.001, 1.0))
    assert acceptable(within)
    assert acceptable(within | {name: Drift(0.0, p99, 1.0)}) == is_acceptable


def test_the_query_of_the_page_answers_the_table_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    (query,) = re.findall(r"```sql\n(.*?)```", text, flags=re.DOTALL)
    with duckdb.connect() as connection:
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or []]
        header, *rows = [f"| {' | '.join(words)} |" for words in [columns, *cursor.fetchall()]]
    shown_header, _, *shown_rows = text.rsplit("```\n\n", 1)[1].splitlines()
    assert [shown_header, *shown_rows] == [header, *rows]
    assert len(rows) == len(PRECISIONS) - 1
