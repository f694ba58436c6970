"""The replications of the sink circuit: their published tables, and their SQL against numpy."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import GPT2LMHeadModel

from headcount.jobs.cluster.ray_cluster import Resources
from headcount.queries.ask.asking import Row, RunDatabase
from headcount.reproduce.replication import Replication, replications
from headcount.reproduce.replication_runs import (
    measure_runs,
    open_replication_runs,
    plan_replication,
)
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import describe, find_model
from headcount.workers.model.model import bridge_of
from tests import ROOT
from tests.toys import published

CIRCUIT = {
    name: replication
    for name, replication in replications().items()
    if name.startswith("sink_circuit")
}

INTERVENTION_OF_COLUMN = {
    "b_nullify_query_bias": "zero_query_bias",
    "c_remove_first_position": "first_position_second",
    "d_swap_effective_positions": "swap_effective_positions",
    "e_swap_raw_positions": "swap_raw_positions",
    "f_nullify_first_token": "zero_first_token",
    "g_no_mlp": "zero_mlps",
    "h_no_positions": "zero_positions",
    "i_zero_massive_key_columns": "scale_massive_keys",
    "j_zero_random_key_columns": "scale_random_keys",
}
"""Our interventions by column of the published table, which begins with the source's letter."""

INTERVENTIONS_OF_FAMILY = {
    "gpt2": "bcdefghij",
    "gpt-neo": "cdefghij",
    "opt": "bcfgh",
    "Qwen2.5": "bfg",
}
"""Which of them a family's models can have."""


def values(replication: Replication, model: str = "") -> dict[str, float]:
    """Every published value of a replication, by name."""
    return {
        value.name: value.value
        for check in replication.check
        for value in check.values
        if value.model == model
    }


def run_replication(name: str, model: str, out: Path, *overrides: str) -> RunDatabase:
    """The runs of a replication on a miniature."""
    # The model is loaded once for all scans.
    models = KnownModels()
    plans = plan_replication(CIRCUIT[name], model, str(out), overrides, models=models)
    measure_runs(plans, Resources(0, device="cpu"), Console(quiet=True), models=models)
    return open_replication_runs(CIRCUIT[name], plans[0].scan.out)


def test_the_table_of_sixteen_models_is_the_published_one() -> None:
    with published.data_file("sink_circuit_models.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    replication = CIRCUIT["sink_circuit_models"]
    assert len(rows) == len(replication.published_models) == 16
    # The rows are in the order of the models of the source: by family, then by size.
    by_size = sorted(replication.published_models, key=lambda model: _size_of(replication, model))
    for family, letters in INTERVENTIONS_OF_FAMILY.items():
        prefix = {"gpt2": "GPT-2", "gpt-neo": "GPT-Neo", "opt": "OPT"}.get(family, family)
        family_rows = [row for row in rows if row["model"].startswith(f"{prefix} ")]
        models = [model for model in by_size if f"/{family}" in model]
        for row, model in zip(family_rows, models, strict=True):
            ours = values(replication, model)
            assert ours["first key, middle layers: untouched"] == float(row["baseline"])
            for column, intervention in INTERVENTION_OF_COLUMN.items():
                name = f"{intervention}: percent of the untouched model"
                expected = float(row[column]) if column[0] in letters else None
                assert ours.get(name) == expected


def _size_of(replication: Replication, model: str) -> tuple[int, ...]:
    """About the parameters of a model."""
    sizes = replication.published_models[model]
    return (int(sizes["n_layers"]) * int(sizes["d_model"]) ** 2,)


def test_the_table_of_interventions_is_the_published_one() -> None:
    ours = values(CIRCUIT["sink_circuit"])
    letters = {
        f"int_{column[0]}": intervention for column, intervention in INTERVENTION_OF_COLUMN.items()
    }
    letters |= {"int_a": "none", "int_j": "scale_random_keys(42)"}
    for file in ("overall", "by_dataset"):
        path = published.data_file(f"sink_circuit_bos_attention_{file}.csv")
        with path.open(newline="") as lines:
            for row in csv.DictReader(lines):
                intervention = letters[row["intervention"]]
                mean = float(row["mean_bos_attention"])
                if file == "by_dataset":
                    assert ours[f"{intervention}, {row['dataset']}"] == mean
                    continue
                assert ours[f"{intervention}: first key, layers 3 to 10"] == mean
                assert ours[f"{intervention}: standard error"] == float(row["stderr"])


@pytest.mark.parametrize("name", CIRCUIT)
def test_no_tolerance_reaches_nothing_at_all(name: str) -> None:
    for check in CIRCUIT[name].check:
        for value in check.values:
            # A control may do nothing, and the check says so.
            if not check.why_null_passes(value.name):
                assert not value.is_near(0), value.full_name


def test_the_replications_name_the_command_that_builds_their_texts() -> None:
    for name in CIRCUIT:
        content = (ROOT / "reproduce" / "replications" / f"{name}.toml").read_text()
        if "_texts.csv" in content or "_sentence.csv" in content:
            assert (
                "headcount reproduce texts sink_circuit" in content or "of sink_circuit" in content
            ), name


# Models that lack a part


def test_the_miniatures_lack_a_part() -> None:
    blocks: dict[str, Any] = {}
    for part in ("mlp", "bias"):
        model = CIRCUIT[f"sink_circuit_no_{part}"].bundled_model
        blocks[part] = bridge_of(load_model(describe(find_model(model)), "raw", "cpu")).blocks
    assert not any(hasattr(block, "mlp") for block in blocks["mlp"])
    assert all(hasattr(block, "mlp") for block in blocks["bias"])
    assert all(not block.attn.b_Q.any() for block in blocks["bias"])
    assert any(block.attn.b_Q.any() for block in blocks["mlp"])


# SQL against numpy


def connection(
    replication: Replication, views: tuple[str, ...], tables: dict[str, str]
) -> Callable[[str], list[Row]]:
    """What asks some of a replication's views, over tables given as SQL."""
    database = duckdb.connect()
    for table, sql in tables.items():
        database.execute(f"CREATE TABLE {table} AS {sql}")
    for view in views:
        database.execute(f"CREATE VIEW {view} AS {replication.view[view]}")
    return lambda sql: database.sql(sql).fetchall()


def test_slopes_are_of_each_data_set_and_then_averaged() -> None:
    # Two data sets whose logits fall by 0.5 and by 0.25 for each unit of ln(query + 1).
    curve = "list_transform(range(40), lambda q: 1 / (1 + exp(-(0.3 - slope * ln(q + 1)))))"
    curves = f"""
        SELECT 'tokens-40' AS scan, sequence, 'none' AS intervention, 'r' AS run_id, layer,
               {curve} AS sink_attention_by_query
        FROM (VALUES (0, 0.5), (1, 0.5), (2, 0.25)) AS t(sequence, slope), range(12) AS l(layer)
    """
    sequences = """
        SELECT 'tokens-40' AS scan, sequence, 'none' AS intervention,
               CASE WHEN sequence < 2 THEN 'sst2' ELSE 'gsm8k' END AS pile_set_name
        FROM range(3) AS t(sequence)
    """
    runs = "SELECT 'r' AS run_id, 12 AS n_layers"
    tables = {"replication_curves": curves, "replication_sequences": sequences, "runs": runs}
    ask = connection(CIRCUIT["sink_circuit_lengths"], ("by_query", "slopes"), tables)
    rows = ask("SELECT pile_set_name, slope FROM slopes ORDER BY slope")
    assert rows == [("sst2", pytest.approx(-0.5)), ("gsm8k", pytest.approx(-0.25))]


def test_half_a_dose_is_part_of_the_change() -> None:
    doses = """
        SELECT * FROM (VALUES ('scale_query_bias', 0.0, 0.2), ('scale_query_bias', 0.5, 0.35),
                              ('scale_query_bias', 1.0, 0.5)) AS t(intervention, dose, mean)
    """
    ask = connection(CIRCUIT["sink_circuit_doses"], (), {"dose": doses})
    (check,) = [
        check for check in CIRCUIT["sink_circuit_doses"].check if "half a dose" in check.sql
    ]
    assert ask(check.sql) == [
        ("scale_query_bias: part of the change that half a dose makes", pytest.approx(0.3))
    ]


def test_maps_are_means_of_the_patterns(tmp_path: Path) -> None:
    database = run_replication(
        "sink_circuit_maps",
        "bundled:gpt2-mini",
        tmp_path,
        "sequences=2",
        'interventions=["none","zero_query_bias"]',
    )
    gpt: Any = GPT2LMHeadModel.from_pretrained(
        find_model("bundled:gpt2-mini"), attn_implementation="eager"
    ).eval()
    tokens = torch.tensor(
        [
            row[0]
            for row in database.rows(
                "SELECT tokens FROM replication_sequences WHERE intervention = 'none' "
                "ORDER BY sequence"
            )
        ]
    )
    for intervention in ("none", "zero_query_bias"):
        if intervention == "zero_query_bias":
            for block in gpt.transformer.h:
                # Queries are the first third of the joint weights.
                block.attn.c_attn.bias.data[:128] = 0
        with torch.no_grad():
            patterns = gpt(tokens, output_attentions=True).attentions
        expected = torch.stack(patterns).mean((0, 1, 2)).numpy()
        measured = np.zeros((21, 21))
        for query, key, attention in database.rows(
            f"SELECT query, key, attention FROM maps WHERE intervention = '{intervention}'"
        ):
            measured[query, key] = attention
        np.testing.assert_allclose(measured, expected, atol=1e-5)
        ((first,),) = database.rows(
            f"SELECT first FROM sinks WHERE intervention = '{intervention}'"
        )
        assert first == pytest.approx(expected[10:, 0].mean(), abs=1e-5)


def test_figures_of_models_are_numpys(tmp_path: Path) -> None:
    database = run_replication("sink_circuit_models", "bundled:gpt2-mini", tmp_path, "sequences=3")
    figures: dict[str, Any] = dict(database.rows("SELECT name, value FROM figures"))
    rows = database.rows(
        "SELECT intervention, sink_mass_late, second_key_mass_late, sink_position_cosine, layer, "
        "head FROM replication_heads ORDER BY intervention, layer, head, sequence"
    )

    def column(intervention: str, place: int) -> np.ndarray:
        return np.array([row[place] for row in rows if row[0] == intervention], dtype=float)

    plain = column("none", 1).mean()
    for intervention, name in (
        ("zero_mlp(0)", "zero_mlp(0)"),
        ("scale_massive_keys(0,6)", "scale_massive_keys"),
        ("scale_random_keys(0,0,6)", "scale_random_keys"),
        (
            "zero_query_bias+scale_massive_keys(0,6)+swap_effective_positions",
            "bias, key columns and positions together",
        ),
    ):
        percent = 100 * column(intervention, 1).mean() / plain
        assert figures[f"{name}: percent of the untouched model"] == pytest.approx(percent)
    gain = column("swap_effective_positions", 2).mean() - column("none", 2).mean()
    assert figures["relocation: gain of key 1 over what key 0 had"] == pytest.approx(gain / plain)
    cosines = column("none", 3).reshape(24, 3).mean(1)
    share = figures["cells whose queries point to effective position 0: share"]
    assert share == pytest.approx((cosines > 0.1).mean())
    assert figures["largest cosine of the queries of a cell"] == pytest.approx(cosines.max())
    losses = {
        intervention: np.mean(
            [
                loss
                for name, loss in database.rows(
                    "SELECT intervention, loss FROM replication_sequences WHERE loss IS NOT NULL"
                )
                if name == intervention
            ]
        )
        for intervention in ("none", "zero_query_bias")
    }
    added = losses["zero_query_bias"] - losses["none"]
    assert figures["loss added by zero_query_bias, nats"] == pytest.approx(added)


def test_a_step_of_a_training_is_in_the_name_of_its_scan() -> None:
    # Attention .5 to the first key: an intervention leaves .4, another .05.
    heads = """
        SELECT 'texts-step-000400' AS scan, 'r' AS run_id, layer, *
        FROM (VALUES ('none', 0.5), ('zero_query_bias', 0.4), ('first_position_second', 0.05))
                 AS t(intervention, sink_mass_late), range(3, 11) AS l(layer)
    """
    # Layers 0 to 2 do not count.
    weights = """
        SELECT 'texts-step-000400' AS scan, 'r' AS run_id, *
        FROM (VALUES ('first_effective_position', NULL, NULL, -7.0),
                     ('first_effective_position', NULL, NULL, 2.0),
                     ('bias_position_cosine', 0, 5, 0.6), ('bias_position_cosine', 0, 2, -0.9),
                     ('bias_position_cosine', 1, 5, -0.4)) AS t(weight, position, layer, value)
    """
    runs = "SELECT 'r' AS run_id, 12 AS n_layers"
    tables = {"replication_heads": heads, "replication_weights": weights, "runs": runs}
    views = ("band", "by_step", "of_weights")
    ask = connection(CIRCUIT["sink_circuit_training"], views, tables)
    ((step, *removed),) = ask(
        "SELECT step, first, removed_by_bias, removed_by_position FROM by_step"
    )
    assert step == 400
    assert [float(value) for value in removed] == pytest.approx([0.5, 20, 90])
    ((largest, alignment),) = ask("SELECT largest, alignment FROM of_weights")
    assert (float(largest), float(alignment)) == (7.0, 0.6)
