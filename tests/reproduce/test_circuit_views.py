"""The views of the sink circuit's replications, against numpy and the published tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import GPT2LMHeadModel

from headcount.jobs.cluster.ray_cluster import Resources
from headcount.queries.ask.asking import Row
from headcount.reproduce.replication import replications
from headcount.reproduce.replication_runs import (
    measure_runs,
    open_replication_runs,
    plan_replication,
)
from headcount.workers.model.files.model_info import find_model
from tests.toys import published


def ask_replication(
    name: str, model: str, out: Path, *overrides: str
) -> Callable[[str], list[Row]]:
    """Measure a replication; what puts SQL to its runs."""
    replication = replications()[name]
    plans = plan_replication(replication, model, str(out), overrides)
    measure_runs(plans, Resources(0, device="cpu"), Console(quiet=True))
    return open_replication_runs(replication, plans[0].scan.out).rows


def test_effects_are_paired_and_the_gini_coefficient_is_of_each_sequence(tmp_path: Path) -> None:
    interventions = ["none", "zero_query_bias", "random_query_bias"]
    ask = ask_replication(
        "sink_circuit",
        "bundled:gpt2-mini",
        tmp_path,
        "sequences=9",
        f"interventions={interventions}".replace("'", '"'),
    )
    rows = ask(
        "SELECT intervention, sequence, layer, head, sink_mass_late FROM replication_heads "
        "ORDER BY ALL"
    )
    cells = {
        intervention: np.array([row[4] for row in rows if row[0] == intervention]).reshape(9, 24)
        for intervention in interventions
    }
    band = {intervention: values.mean(1) for intervention, values in cells.items()}
    effects_found = {
        row[0]: row[1:]
        for row in ask("SELECT intervention, mean, percent, change, standard_error FROM effect")
    }
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
    for intervention, sequence, gini, above in ask(
        "SELECT intervention, sequence, gini, above2 FROM band"
    ):
        sorted_values = np.sort(cells[intervention][sequence])
        differences = np.abs(sorted_values[:, None] - sorted_values).sum() / (
            2 * 24**2 * sorted_values.mean()
        )
        assert (gini, above) == (pytest.approx(differences, rel=1e-6), (sorted_values > 0.2).mean())


def test_percentiles_of_the_shifts_and_massive_coordinates_are_numpys(tmp_path: Path) -> None:
    ask = ask_replication("sink_circuit_structure", "bundled:gpt2-mini", tmp_path, "sequences=11")
    gpt: Any = (
        GPT2LMHeadModel.from_pretrained(find_model("bundled:gpt2-mini")).double().eval().transformer
    )
    inputs: list[torch.Tensor] = []
    for block in gpt.h:
        block.ln_1.register_forward_hook(lambda module, arguments, output: inputs.append(output))
    tokens = torch.tensor(
        [row[0] for row in ask("SELECT tokens FROM replication_sequences ORDER BY sequence")]
    )
    with torch.no_grad():
        gpt(tokens)
    weights = [block.attn.c_attn.weight[:, 128:256].reshape(128, 8, 16) for block in gpt.h]
    biases = [block.attn.c_attn.bias[:128].reshape(8, 16) for block in gpt.h]
    shifts = torch.stack(
        [
            torch.einsum("bkd,dhe,he->bhk", *parts)
            for parts in zip(inputs, weights, biases, strict=True)
        ]
    ).detach()
    margins = (shifts - shifts.amin(-1, keepdim=True)).flatten(1, 2).numpy()
    expected = np.stack(
        [*np.percentile(margins, [10, 50, 90], axis=1), margins.mean(1), margins.std(1)], axis=-1
    ).reshape(-1, 5)
    percentiles_found = ask(
        "SELECT p10, p50, p90, mean, sd FROM percentiles ORDER BY layer, position"
    )
    np.testing.assert_allclose(np.array(percentiles_found), expected, atol=1e-4)
    first = (gpt.wpe.weight[0] + gpt.h[0].mlp(gpt.wpe.weight[:1])[0]).detach().numpy()
    size = np.abs(first)
    massive = {row[0] for row in ask("SELECT dimension FROM coordinates WHERE massive")}
    assert massive == set(np.flatnonzero(size > size.mean() + 3 * size.std()).tolist()) != set()
    coupling = np.stack(
        [
            torch.einsum("dhe,he->hd", weight, bias).detach().numpy()
            for weight, bias in zip(weights, biases, strict=True)
        ]
    )
    ((mean, other_mean),) = ask("SELECT massive, other FROM by_kind")
    assert mean == pytest.approx(np.abs(coupling[..., sorted(massive)]).mean(), rel=1e-6)
    assert other_mean == pytest.approx(
        np.abs(np.delete(coupling, sorted(massive), axis=-1)).mean(), rel=1e-6
    )


def test_the_published_percentiles_of_the_shifts(tmp_path: Path) -> None:
    model = published.weights(replications()["sink_circuit_structure"].published_model)
    texts, table = (
        published.DATA[1] / f"sink_circuit_{name}.csv" for name in ("300_texts", "bq_k_percentiles")
    )
    if not (texts.exists() and table.exists()):
        pytest.skip(f"{texts.name} and {table.name} are not here")
    ask = ask_replication("sink_circuit_structure", model, tmp_path, f'texts.input.files="{texts}"')
    percentiles_found = ask(
        "SELECT layer + 1, position, p10, p50, p90, mean, sd FROM percentiles ORDER BY layer, "
        "position"
    )
    np.testing.assert_allclose(
        np.array(percentiles_found), np.loadtxt(table, delimiter=",", skiprows=1), atol=0.01
    )


def test_a_scan_with_sizes_is_of_those_models_alone(tmp_path: Path) -> None:
    replication = replications()["sink_circuit_lengths"]
    replication_plan = plan_replication(replication, "bundled:gpt2-mini", str(tmp_path))
    assert [plan.scan.n_ctx for plan in replication_plan] == [40, 128, 256]
    longest = [
        scan["n_ctx"]
        for scan in replication.scan.values()
        if scan.get("sizes") == [{"n_ctx": 1024}]
    ]
    assert longest == [512, 1024]
