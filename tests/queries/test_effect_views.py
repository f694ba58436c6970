"""Effects of heads: in SQL, report, explorer, cards of heads and exports, beside what interventions
change.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headcount
from headcount.exports.formats import export_formats
from headcount.exports.shared.registry import Needs
from headcount.exports.shared.source import choose_run
from headcount.queries.answers.loss_effects import trust
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.report.head_card import card_html, head_card
from headcount.queries.report.html_page import json_value, unpacked
from headcount.queries.report.report import write_report
from headcount.schemas.errors import RunError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import place
from tests.pages.browser import Page, chromium
from tests.queries.page.test_explore_queries import Asker
from tests.toys.commands import printed

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
    from tests.toys import toy_models as toy

    out = tmp_path_factory.mktemp("effects")
    model = toy.save_model(out / "model", toy.gpt2(n_layer=2))
    fields = {**SCAN, "model": str(model), "out": str(out / "runs")}
    effects = {"statistics": EFFECTS, "profiles": ["direct_logit_of_parts"]}
    headcount.scan({**fields, **effects}, name="effects", quiet=True)
    headcount.scan({**fields, "statistics": ["entropy"]}, name="other", quiet=True)
    (directory,) = (out / "runs").glob("run_id=effects-*")
    printed("calibrate", directory, "--heads", 8, "--sequences", 4, "--replicas", 0)
    return out / "runs"


@pytest.fixture(scope="module")
def database(runs: Path) -> RunDatabase:
    return open_runs(runs)


@pytest.fixture(scope="module")
def run_id(runs: Path) -> str:
    (directory,) = runs.glob("run_id=effects-????????")
    return directory.name.removeprefix("run_id=")


@pytest.fixture(scope="module")
def report(database: RunDatabase, runs: Path) -> Path:
    write_report(database, runs.parent / "report.html")
    return runs.parent / "report.html"


def data_of(report: Path) -> Any:
    return unpacked(report.read_text(encoding="utf-8"))


def test_heads_are_ranked_by_the_size_of_an_effect_with_its_direct_part(
    database: RunDatabase,
) -> None:
    rows = database.records(
        "SELECT * FROM head_effects WHERE statistic = 'effect_mean' ORDER BY rank"
    )
    assert [row["rank"] for row in rows] == list(range(1, 9))
    sizes = [abs(row["effect"]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    for row in rows:
        assert row["direct"] + row["indirect"] == pytest.approx(row["effect"], abs=1e-12)
    # Four heads a layer were compared.
    assert {(row["calibration"], row["calibrated_heads"]) for row in rows} == {("in its layer", 4)}


def test_what_calibration_measures_is_the_change_of_the_loss(database: RunDatabase) -> None:
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


def test_agreement_is_told_by_layer_and_over_all_layers(database: RunDatabase) -> None:
    pairs = database.records("SELECT * FROM calibrated_effects WHERE statistic = 'effect_mean'")
    rows = database.records("SELECT * FROM effect_calibration WHERE statistic = 'effect_mean'")
    assert [row["layer"] for row in rows] == [None, 0, 1]
    for row in rows:
        some = [pair for pair in pairs if row["layer"] in (None, pair["layer"])]
        x, y = (np.array([pair[name] for pair in some]) for name in ("estimate", "measured"))
        ranks = [values.argsort().argsort() for values in (x, y)]
        assert row["heads"] == len(some)
        assert row["spearman"] == pytest.approx(np.corrcoef(ranks[0], ranks[1])[0, 1])
        assert row["slope"] == pytest.approx(np.polyfit(x, y, 1)[0])
        assert row["same_sign"] == pytest.approx((np.sign(x) == np.sign(y)).mean())


def test_without_calibration_effects_say_so_and_what_would_make_one(
    runs: Path, run_id: str
) -> None:
    database = open_runs(runs / f"run_id={run_id}")
    rows = database.records("head_effects")
    assert {row["calibration"] for row in rows} == {"first order, not calibrated"}
    assert database.records("effect_calibration") == database.records("calibrated_effects") == []
    line = f"first order, not calibrated: headcount calibrate {run_id}"
    assert {trust(run_id, [], "effect_mean", layer) for layer in (None, 0, 1)} == {line}


def test_a_run_without_effects_has_none_to_rank_and_none_to_calibrate(runs: Path) -> None:
    from headcount.jobs.plan.calibration import calibration_of

    (directory,) = runs.glob("run_id=other-*")
    assert open_runs(directory).records("head_effects") == []
    with pytest.raises(RunError, match="expected a run with effects"):
        calibration_of(RunDirectory(directory), heads=2, sequences=2, draw=0, on_cpu=True)


def test_windows_as_long_as_the_sequences_are_no_effects_to_calibrate(
    runs: Path, tmp_path: Path
) -> None:
    from headcount.jobs.plan.calibration import calibration_of

    fields = {**SCAN, "model": str(runs.parent / "model"), "out": str(tmp_path)}
    headcount.scan(fields, statistics=["effect_window(2,10)", "sink_mass"], quiet=True)
    (directory,) = tmp_path.glob("run_id=*")
    with pytest.raises(RunError, match=r"can measure on sequences of 12 tokens \(shorter windows"):
        calibration_of(RunDirectory(directory), heads=2, sequences=2, draw=0, on_cpu=True)


# What people and other tools see


def words(row: dict[str, Any]) -> str:
    spearman, slope = (f"{float(f'{row[name]:.2g}'):.4g}" for name in ("spearman", "slope"))
    where = "all layers" if row["layer"] is None else f"layer {row['layer']}"
    heads = f"{row['heads']} measured heads of {where}, on 4 sequences"
    return f"Spearman {spearman}, slope {slope} against {heads}"


def test_a_report_says_how_far_effects_can_be_trusted(
    database: RunDatabase, run_id: str, report: Path
) -> None:
    data = data_of(report)
    # A calibration comes last, without its 24 interventions.
    assert data["overview"]["runs"][0]["run_id"] == run_id
    assert data["overview"]["runs"][-1]["name"] == "effects-calibration"
    calibrated = "SELECT name, calibrates FROM runs ORDER BY name"
    assert [row["calibrates"] for row in database.records(calibrated)] == [None, run_id, None]
    keys = [key for key in data["answers"] if key.startswith("details/")]
    assert [key.rpartition("/")[2] for key in keys] == ["none"] * 3
    assert [run["has_effects"] for run in data["overview"]["runs"]] == [True, False, False]
    shown = data["answers"][f"effects/{run_id}/none"]
    names = ["effect_mean", "effect_window_1_3", "effect_zero_magnitude"]
    assert [effect["statistic"] for effect in shown["effects"]] == names
    calibration = database.records("effect_calibration")
    compared = database.records("calibrated_effects")
    names = ("label", "estimate", "measured", "measured_error")
    for effect in shown["effects"]:
        rows, pairs = (
            [row for row in all_rows if row["statistic"] == effect["statistic"]]
            for all_rows in (calibration, compared)
        )
        assert effect["trust"] == [words(row) for row in rows]
        assert effect["pairs"] == json_value([{name: row[name] for name in names} for row in pairs])
    # The parts of a layer are five, and no mean over them.
    parts = database.records(
        "SELECT layer, part, sum(count * mean) / sum(count) AS mean FROM profiles "
        "GROUP BY ALL ORDER BY ALL"
    )
    assert [(part["layer"], part["part"]) for part in parts] == list(np.ndindex(2, 5))
    shown_parts = [(part["layer"], part["part"], part["mean"]) for part in shown["parts"]]
    assert shown_parts == [tuple(part.values()) for part in json_value(parts)]  # type: ignore[attr-defined]


def test_the_explorer_lists_which_runs_have_effects(runs: Path) -> None:
    with closing(Asker(runs)) as ask:
        listed = ask("overview")["runs"]
    assert [(run["name"], run["interventions"], run["has_effects"]) for run in listed] == [
        ("effects", ["none"], True),
        ("other", ["none"], False),
        ("effects-calibration", ["none"], False),
    ]


def test_a_card_has_the_effects_of_its_head(database: RunDatabase, run_id: str) -> None:
    card = head_card(database, "L1H2", run_id)
    rows = database.records("SELECT * FROM head_effects WHERE label = 'L1H2' ORDER BY statistic")
    assert [effect.statistic for effect in card.effects] == [row["statistic"] for row in rows]
    interventions = ["mean_head(1,2)", "stream_heads(1,3,L1H2)", "zero_head(1,2)"]
    assert [effect.intervention for effect in card.effects] == interventions
    calibration = database.records("FROM effect_calibration WHERE layer = 1")
    trusted = {row["statistic"]: words(row) for row in calibration}
    for effect, row in zip(card.effects, rows, strict=True):
        assert effect.effect == row["effect"]
        assert effect.standard_error == row["standard_error"]
        assert effect.direct == row["direct"]
        assert effect.indirect == row["indirect"]
        assert effect.trust == trusted[effect.statistic]
    assert card.effects[0].direct_error == card.statistic("direct_effect_mean").standard_error


@pytest.mark.long
def test_an_export_of_an_effect_says_how_far_it_can_be_trusted(
    runs: Path, database: RunDatabase, run_id: str
) -> None:
    card = export_formats()["card"]
    of_effect = replace(card, needs_of=Needs(statistics=("effect_mean",)))
    columns = "layer, heads, sequences, spearman, slope"
    rows = database.records(
        f"SELECT {columns} FROM effect_calibration WHERE statistic = 'effect_mean'"
    )
    for path, calibration in [
        (runs, rows),
        (runs / f"run_id={run_id}", "first order, not calibrated"),
    ]:
        destination = place(str(runs / f"run_id={run_id}" / "README.md"))
        source = choose_run(open_runs(path), of_effect, {"license": "mit"}, destination)
        assert source.provenance["calibration"] == {"effect_mean": calibration}
        content = card.function(source).files["README.md"].decode()
        section = content.partition("## Effects on the loss")[2].partition("\n## ")[0]
        begins = ["all | 8 | 4 | ", "0 | 4 | 4 | ", "1 | 4 | 4 | "]
        begins = begins if path == runs else [f"{calibration} | "]
        lines = [line for line in section.splitlines() if line.startswith("| `effect_mean` | ")]
        for line, begin in zip(lines, begins, strict=True):
            assert line.startswith(f"| `effect_mean` | {begin}")


@pytest.mark.long
def test_effects_in_a_browser(
    runs: Path, database: RunDatabase, run_id: str, report: Path, tmp_path: Path
) -> None:
    card = head_card(database, "L1H2", run_id)
    (tmp_path / "card.html").write_text(card_html(card), encoding="utf-8")
    best = database.records("FROM head_effects WHERE statistic = 'effect_mean' AND rank = 1")[0]
    for browser in chromium(tmp_path / "chromium"):
        page = Page(browser)
        page.open(report.as_uri())
        shown = page.attributes("[data-effect]", "data-effect")
        assert shown == ["effect_mean", "effect_window_1_3", "effect_zero_magnitude"]
        rows = page.rows("[data-effect=effect_mean]")
        assert len(rows) == 8
        assert rows[0][0] == best["label"]
        number = float(rows[0][1].split(" ")[0].replace("−", "-"))
        assert number == pytest.approx(best["effect"], rel=1e-3)
        assert len(page.all("[data-effect=effect_mean] .point")) == 8
        assert page.rows("[data-parts]")[0][0] == "0"
        assert page.rows("[data-parts]")[-1][0] == "all"
        page.show(f"run={run_id}&head=L1H2")
        in_report = page.rows("#head-effects")
        assert [row[0] for row in in_report[::2]] == [one.intervention for one in card.effects]
        assert [row[0] for row in in_report[1::2]] == [one.trust for one in card.effects]
        page.open((tmp_path / "card.html").as_uri())
        in_card = page.run(
            "return [...document.querySelectorAll('caption')].find((one) => "
            "one.textContent === 'Effects of L1H2').parentElement.innerText"
        )
        assert all(one.trust in in_card for one in card.effects)
        # A run without effects has no such section.
        page.open(report.as_uri())
        (other,) = runs.glob("run_id=other-*")
        page.show(f"run={other.name.removeprefix('run_id=')}")
        assert not page.find("#effects-card").is_displayed()
        assert page.texts("#head-effects") == [""]
        assert browser.get_log("browser") == []
