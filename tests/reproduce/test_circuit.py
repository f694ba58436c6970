"""The replications of the sink circuit, measured on a miniature: their SQL against numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import GPT2LMHeadModel

from headcount.jobs.resources import Resources
from headcount.queries.ask.asking import RunDatabase
from headcount.reproduce.replication_runs import (
    measure_runs,
    open_replication_runs,
    plan_replication,
)
from headcount.workers.known_models import KnownModels
from headcount.workers.model.info.description import find_model
from tests.toys.toy_replications import REPLICATIONS

MODEL = "bundled:gpt2-mini"


def measured(name: str, out: Path, *overrides: str) -> RunDatabase:
    # The model is loaded once for all scans.
    models = KnownModels()
    plans = plan_replication(REPLICATIONS[name], MODEL, str(out), overrides, models=models)
    measure_runs(plans, Resources(0, device="cpu"), Console(quiet=True), models=models)
    return open_replication_runs(REPLICATIONS[name], plans[0].scan.out)


def test_a_scan_with_sizes_is_of_those_models_alone(tmp_path: Path) -> None:
    replication = REPLICATIONS["sink_circuit_lengths"]
    plans = plan_replication(replication, MODEL, str(tmp_path))
    assert [plan.scan.n_ctx for plan in plans] == [40, 128, 256]
    scans = replication.scan.values()
    longest = [scan["n_ctx"] for scan in scans if scan.get("sizes") == [{"n_ctx": 1024}]]
    assert longest == [512, 1024]


@pytest.mark.long
def test_figures_of_models_are_numpys(tmp_path: Path) -> None:
    database = measured("sink_circuit_models", tmp_path, "sequences=3")
    figures: dict[str, Any] = dict(database.rows("SELECT name, value FROM figures"))
    heads = database.rows(
        "SELECT intervention, sink_mass_late, second_key_mass_late, sink_position_cosine, layer, "
        "head FROM replication_heads ORDER BY intervention, layer, head, sequence"
    )

    def column(intervention: str, place: int) -> np.ndarray:
        return np.array([row[place] for row in heads if row[0] == intervention], dtype=float)

    plain = column("none", 1).mean()
    together = "zero_query_bias+scale_massive_keys(0,0)+swap_effective_positions"
    for intervention, name in (
        ("zero_mlp(0)", "zero_mlp(0)"),
        ("scale_massive_keys(0,0)", "scale_massive_keys"),
        ("scale_random_keys(42,0,0)", "scale_random_keys"),
        (together, "bias, key columns and positions together"),
    ):
        percent = 100 * column(intervention, 1).mean() / plain
        assert figures[f"{name}: percent of the untouched model"] == pytest.approx(percent)
    gain = column("swap_effective_positions", 2).mean() - column("none", 2).mean()
    assert figures["relocation: gain of key 1 over what key 0 had"] == pytest.approx(gain / plain)
    cosines = column("none", 3).reshape(24, 3).mean(1)
    share = figures["cells whose queries point to effective position 0: share"]
    assert share == pytest.approx((cosines > 0.1).mean())
    assert figures["largest cosine of the queries of a cell"] == pytest.approx(cosines.max())
    sql = "SELECT intervention, loss FROM replication_sequences WHERE loss IS NOT NULL"
    losses = database.rows(sql)

    def loss(intervention: str) -> float:
        return float(np.mean([value for name, value in losses if name == intervention]))

    added = loss("zero_query_bias") - loss("none")
    assert figures["loss added by zero_query_bias, nats"] == pytest.approx(added)


@pytest.mark.long
def test_effects_are_paired_and_the_gini_coefficient_is_of_each_sequence(tmp_path: Path) -> None:
    interventions = ["none", "zero_query_bias", "random_query_bias"]
    override = f"interventions={interventions}".replace("'", '"')
    ask = measured("sink_circuit", tmp_path, "sequences=9", override).rows
    lists = "list(sink_mass_late ORDER BY sequence, layer, head)"
    rows = ask(f"SELECT intervention, {lists} FROM replication_heads GROUP BY ALL")
    cells = {intervention: np.reshape(values, (9, 24)) for intervention, values in rows}
    band = {intervention: values.mean(1) for intervention, values in cells.items()}
    rows = ask("SELECT intervention, mean, percent, change, standard_error FROM effect")
    effects_found = {name: numbers for name, *numbers in rows}
    for intervention in interventions:
        change = band[intervention] - band["none"]
        percent = 100 * band[intervention].mean() / band["none"].mean()
        expected = (band[intervention].mean(), percent, change.mean(), change.std(ddof=1) / 3)
        np.testing.assert_allclose(effects_found[intervention], expected, rtol=1e-9, atol=1e-12)
    (control,) = ask(
        "SELECT control, control_percent, control_standard_error "
        "FROM effects_and_controls WHERE intervention = 'zero_query_bias'"
    )
    # Sums of rows in another order may differ in the last bit.
    assert control == (
        "random_query_bias",
        *(pytest.approx(effects_found["random_query_bias"][i], rel=1e-9) for i in (1, 3)),
    )
    for name, sequence, gini, above in ask("SELECT intervention, sequence, gini, above2 FROM band"):
        values = cells[name][sequence]
        differences = np.abs(values[:, None] - values).sum() / (2 * 24**2 * values.mean())
        assert (gini, above) == (pytest.approx(differences, rel=1e-6), (values > 0.2).mean())


@pytest.mark.long
def test_percentiles_of_the_shifts_and_massive_coordinates_are_numpys(tmp_path: Path) -> None:
    ask = measured("sink_circuit_structure", tmp_path, "sequences=11").rows
    gpt: Any = GPT2LMHeadModel.from_pretrained(find_model(MODEL)).double().eval().transformer
    inputs: list[torch.Tensor] = []
    for block in gpt.h:
        block.ln_1.register_forward_hook(lambda module, arguments, output: inputs.append(output))
    rows = ask("SELECT tokens FROM replication_sequences ORDER BY sequence")
    tokens = torch.tensor([tokens for (tokens,) in rows])
    with torch.no_grad():
        gpt(tokens)
    weights = [block.attn.c_attn.weight[:, 128:256].reshape(128, 8, 16) for block in gpt.h]
    biases = [block.attn.c_attn.bias[:128].reshape(8, 16) for block in gpt.h]
    parts = zip(inputs, weights, biases, strict=True)
    shifts = torch.stack([torch.einsum("bkd,dhe,he->bhk", *each) for each in parts]).detach()
    margins = (shifts - shifts.amin(-1, keepdim=True)).flatten(1, 2).numpy()
    percentiles = np.percentile(margins, [10, 50, 90], axis=1)
    expected = np.stack([*percentiles, margins.mean(1), margins.std(1)], axis=-1).reshape(-1, 5)
    rows = ask("SELECT p10, p50, p90, mean, sd FROM percentiles ORDER BY layer, position")
    np.testing.assert_allclose(np.array(rows), expected, atol=1e-4)
    first = (gpt.wpe.weight[0] + gpt.h[0].mlp(gpt.wpe.weight[:1])[0]).detach().numpy()
    size = np.abs(first)
    massive = {row[0] for row in ask("SELECT dimension FROM coordinates WHERE massive")}
    assert massive == set(np.flatnonzero(size > size.mean() + 3 * size.std()).tolist()) != set()
    pairs = zip(weights, biases, strict=True)
    coupling = torch.stack([torch.einsum("dhe,he->hd", *each) for each in pairs]).detach().abs()
    is_massive = np.isin(np.arange(128), sorted(massive))
    means = [coupling.numpy()[..., chosen].mean() for chosen in (is_massive, ~is_massive)]
    assert ask("SELECT massive, other FROM by_kind") == [pytest.approx(means, rel=1e-6)]
