"""Effects of heads on the loss, as report, explorer and cards of heads show them.

Their numbers are statistics like others. Here is how far they can be trusted: what
`headcount calibrate` measured of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headcount.queries.ask.asking import Record
from headcount.queries.ask.text_tables import value_text
from headcount.queries.open.sql_text import text_literal

NOT_CALIBRATED = "first order, not calibrated"

PARTS = "direct_logit_of_parts"


def effects_among(statistics: Iterable[str]) -> list[str]:
    """The statistics that estimate what an intervention does to the loss."""
    return [name for name in statistics if name.startswith("effect_")]


def is_calibration(run: Record) -> bool:
    """Whether a run has only losses beside another: `headcount calibrate` or an export made it."""
    return run["calibrates"] is not None


def shown_runs(runs: Iterable[Record]) -> list[Record]:
    """The runs of a page, checkpoints in the order of training: calibrations last, without their
    interventions, which may be hundreds.
    """
    shown = [run | {"interventions": ["none"]} if is_calibration(run) else run for run in runs]

    def place(run: Record) -> tuple[Any, ...]:
        return is_calibration(run), run["name"], run["step"] or 0, run["run_id"]

    return sorted(shown, key=place)


def effect_queries(
    run_id: str, intervention: str, statistics: Iterable[str], *, has_parts: bool
) -> dict[str, str]:
    """The SQL of what a page shows of effects beside means; `has_parts`: with the profile PARTS."""
    of_run = f"WHERE run_id = {text_literal(run_id)}"
    queries: dict[str, str] = {}
    if effects_among(statistics):
        queries["effects"] = (
            "SELECT name AS statistic, measured_by, meaning FROM statistics "
            "WHERE starts_with(name, 'effect_')"
        )
    # Interventions on heads of an intervened model were not measured.
    if queries and intervention == "none":
        queries["calibration"] = f"FROM effect_calibration {of_run}"
        queries["pairs"] = f"FROM calibrated_effects {of_run}"
    if has_parts:
        queries["parts"] = (
            f"SELECT layer, part, mean, standard_error FROM profile_means {of_run} "
            f"AND intervention = {text_literal(intervention)} AND profile = '{PARTS}' "
            "ORDER BY layer, part"
        )
    return queries


def effects_answer(
    run_id: str, layers: int, statistics: Sequence[str], found: Mapping[str, list[Record]]
) -> Record:
    """What a page shows of effects; `trust` of one has a line for all layers, then one for each."""
    pairs: dict[str, list[Record]] = {}
    for row in found.get("pairs", []):
        names = ("label", "estimate", "measured", "measured_error")
        pairs.setdefault(row["statistic"], []).append({name: row[name] for name in names})
    calibration = found.get("calibration", [])
    effects: list[Record] = []
    for row in sorted(found.get("effects", []), key=lambda row: row["statistic"]):
        name = row["statistic"]
        if name in statistics:
            lines = [trust(run_id, calibration, name, at, layers) for at in (None, *range(layers))]
            effects.append({**row, "trust": lines, "pairs": pairs.get(name, [])})
    return {"effects": effects, "parts": found.get("parts", [])}


def trust(
    run_id: str,
    calibration: Iterable[Record],
    statistic: str,
    layer: int | None = None,
    layers: int | None = None,
) -> str:
    """How far an effect can be trusted, in words: in the layer, or over all that were drawn if less
    than three of its heads were measured. `calibration` are rows of `effect_calibration`, `layers`
    those of the model.
    """
    measured = {row["layer"]: row for row in calibration if row["statistic"] == statistic}
    compared = {at: row for at, row in measured.items() if row["spearman"] is not None}
    row = compared.get(layer, compared.get(None))
    if row is None:
        return f"{NOT_CALIBRATED}: headcount calibrate {run_id}"
    where = f"layer {row['layer']}"
    if row["layer"] is None:
        drawn = len(measured.keys() - {None})
        where = "all layers" if layers in (drawn, None) else f"{drawn} of the {layers} layers"
    spearman, slope = (value_text(float(f"{row[name]:.2g}")) for name in ("spearman", "slope"))
    return (
        f"Spearman {spearman}, slope {slope} "
        f"against {row['heads']} measured heads of {where}, on {row['sequences']} sequences"
    )
