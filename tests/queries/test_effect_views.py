"""Effects of heads in SQL: ranked, with their direct part, beside what interventions change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import headcount
from headcount.jobs.plan.calibration import calibration_of
from headcount.queries.ask.asking import open_runs
from headcount.schemas.errors import RunError
from headcount.schemas.files.run_directory import RunDirectory
from tests.toys import toy_models as toy

SCAN = {
    "n_ctx": 12,
    "bos": False,
    "sequences": 6,
    "sequences_per_shard": 4,
    "precision": "float64",
    "input": {"family": "uniform_random"},
}
EFFECTS = ["effect_mean", "direct_effect_mean", "effect_zero_magnitude", "effect_window(1,3)"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with effects, one without, and the calibration of the first by all of its heads."""
    out = tmp_path_factory.mktemp("effects")
    model = toy.save_model(out / "model", toy.gpt2(n_layer=2))
    fields = {**SCAN, "model": str(model), "out": str(out / "runs")}
    headcount.scan({**fields, "statistics": EFFECTS}, name="effects", quiet=True)
    headcount.scan({**fields, "statistics": ["entropy"]}, name="other", quiet=True)
    (directory,) = (out / "runs").glob("run_id=effects-*")
    calibration = calibration_of(RunDirectory(directory), heads=8, sequences=4, draw=0)
    headcount.scan(calibration, name="effects-calibration", quiet=True)
    return out / "runs"


def test_heads_are_ranked_by_the_size_of_an_effect_with_its_direct_part(runs: Path) -> None:
    rows = open_runs(runs).records(
        "SELECT * FROM head_effects WHERE statistic = 'effect_mean' ORDER BY rank"
    )
    assert [row["rank"] for row in rows] == list(range(1, 9))
    sizes = [abs(row["effect"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    for row in rows:
        assert row["direct"] + row["indirect"] == pytest.approx(row["effect"], abs=1e-12)
    # Four heads a layer were compared.
    assert {(row["calibration"], row["calibrated_heads"]) for row in rows} == {("in its layer", 4)}


def test_what_calibration_measures_is_the_change_of_the_loss(runs: Path) -> None:
    database = open_runs(runs)
    losses = {
        row["intervention"]: np.array(row["losses"])
        for row in database.records(
            "SELECT intervention, list(loss ORDER BY sequence) AS losses FROM sequences "
            "WHERE run_id LIKE 'effects-calibration%' GROUP BY ALL"
        )
    }
    rows = database.records("calibrated_effects")
    assert len(rows) == 3 * 8
    for row in rows:
        layer, head = row["layer"], row["head"]
        intervention = {
            "effect_mean": f"mean_head({layer},{head})",
            "effect_zero_magnitude": f"zero_head({layer},{head})",
            "effect_window_1_3": f"stream_heads(1,3,L{layer}H{head})",
        }[row["statistic"]]
        change = losses[intervention] - losses["none"]
        if row["statistic"] == "effect_zero_magnitude":
            change = np.abs(change)
        assert row["measured"] == pytest.approx(change.mean(), abs=1e-6)
        assert row["sequences"] == 4


def test_agreement_is_told_by_layer_and_over_all_layers(runs: Path) -> None:
    database = open_runs(runs)
    pairs = database.records("SELECT * FROM calibrated_effects WHERE statistic = 'effect_mean'")
    rows = database.records("SELECT * FROM effect_calibration WHERE statistic = 'effect_mean'")
    assert [row["layer"] for row in rows] == [None, 0, 1]
    for row in rows:
        some = [pair for pair in pairs if row["layer"] in (None, pair["layer"])]
        x, y = (np.array([pair[name] for pair in some]) for name in ("estimate", "measured"))
        ranks = np.stack([values.argsort().argsort() for values in (x, y)])
        assert row["heads"] == len(some)
        assert row["spearman"] == pytest.approx(np.corrcoef(ranks)[0, 1])
        assert row["slope"] == pytest.approx(np.polyfit(x, y, 1)[0])
        assert row["same_sign"] == pytest.approx((np.sign(x) == np.sign(y)).mean())


def test_without_calibration_effects_say_so(runs: Path) -> None:
    (directory,) = runs.glob("run_id=effects-????????")
    rows = open_runs(directory).records("head_effects")
    assert {row["calibration"] for row in rows} == {"first order, not calibrated"}
    assert open_runs(directory).records("effect_calibration") == []


def test_a_run_without_effects_has_none_to_rank_and_none_to_calibrate(runs: Path) -> None:
    (directory,) = runs.glob("run_id=other-*")
    assert open_runs(directory).records("head_effects") == []
    with pytest.raises(RunError, match="expected a run with effects"):
        calibration_of(RunDirectory(directory), heads=2, sequences=2, draw=0)
