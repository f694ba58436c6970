"""The sink circuit: controls as large as what they control, cosines of positions, and the published
tables.
"""

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
from headcount.schemas.errors import ModelError, ScanError
from headcount.schemas.predictions import PREDICTION_INPUTS
from headcount.workers.engine.prediction_inputs import COMPUTED_BY
from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import describe, find_model
from headcount.workers.model.model import Model, bridge_of
from tests.toys import published
from tests.toys import toy_models as toy


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("circuit") / "gpt2", toy.gpt2())


@pytest.fixture(scope="module")
def model(gpt2: Path) -> Model:
    return load_model(describe(gpt2), "raw", "cpu", torch.float64)


def moved(model: Model, text: str) -> torch.Tensor:
    """What an edit of a weight adds to it."""
    part = toy.bound(text).parts[0]
    owner: Any = bridge_of(model) if part.target == "W_pos" else bridge_of(model).blocks[1].attn
    weight = getattr(owner, part.target)
    return part.function_for(model)(weight, {}) - weight


@pytest.mark.parametrize(
    ("edit", "control"),
    [
        ("zero_query_bias", "random_query_bias({})"),
        ("scale_query_bias(0.25)", "random_query_bias({},0.25)"),
        ("scale_query_bias(1.5)", "random_query_bias({},1.5)"),
        ("first_position_second", "random_first_position({})"),
        ("blend_first_position(0.25)", "random_first_position({},0.25)"),
    ],
)
def test_a_control_moves_a_weight_as_far_in_another_direction(
    model: Model, edit: str, control: str
) -> None:
    edit_move, *control_moves = [
        moved(model, text) for text in (edit, control.format(0), control.format(1))
    ]
    for control_move in control_moves:
        torch.testing.assert_close(control_move.norm(dim=-1), edit_move.norm(dim=-1))
        rows = edit_move.norm(dim=-1) > 0
        cosine = torch.nn.functional.cosine_similarity(edit_move[rows], control_move[rows], dim=-1)
        assert cosine.abs().max() < 0.95
    assert not torch.equal(*control_moves)
    assert torch.equal(moved(model, control.format(0)), control_moves[0])


def test_what_is_done_to_the_first_position_is_done_elsewhere(model: Model) -> None:
    for first, elsewhere in (
        ("first_position_second", "blend_position(0)"),
        ("blend_first_position(0.25)", "blend_position(0,0.25)"),
        ("scale_first_position(0.25)", "scale_position(0,0.25)"),
    ):
        assert torch.equal(moved(model, first), moved(model, elsewhere))
        rows = moved(model, elsewhere.replace("(0", "(7")).norm(dim=-1)
        assert torch.nonzero(rows).flatten().tolist() == [7]
    embed = torch.randn(2, 9, 32)
    first, fifth = (
        toy.bound(edit_text).edits(model).apply("embed", None, embed, {})
        for edit_text in ("zero_first_token", "zero_token(5)")
    )
    assert torch.equal(first, embed * (torch.arange(9) != 0)[:, None])
    assert torch.equal(fifth, embed * (torch.arange(9) != 5)[:, None])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("blend_position(39)", "expected a position from 0 to 38, got 39"),
        ("scale_position(-1,2)", "position: expected 0 or more, got -1"),
        ("zero_token(9)", "expected a position from 0 to 8, got 9"),
    ],
)
def test_a_position_that_is_not_there_is_refused(gpt2: Path, text: str, problem: str) -> None:
    with pytest.raises(ScanError, match=problem):
        toy.replica(gpt2).measure(toy.repeating_tokens(9), text)


@pytest.mark.parametrize("engine", ["fused", "dense"])
def test_cosines_of_effective_positions_equal_their_definitions(gpt2: Path, engine: str) -> None:
    tokens = toy.repeating_tokens(17, batch=3)
    gpt: Any = (
        GPT2LMHeadModel.from_pretrained(gpt2, attn_implementation="eager")
        .double()
        .eval()
        .transformer
    )
    position = gpt.wpe.weight[:17]
    effective = position + gpt.h[0].mlp(position)
    tokens_alone = gpt.wte(torch.from_numpy(tokens).long())
    block_outputs: list[torch.Tensor] = []
    gpt.h[0].register_forward_hook(
        lambda module, arguments, output: block_outputs.append(
            output[0] if isinstance(output, tuple) else output
        )
    )
    with torch.no_grad():
        gpt(inputs_embeds=tokens_alone)
        # Positions are added inside; taken from the embeddings first, tokens are left alone.
        gpt(inputs_embeds=tokens_alone - position)
    embeddings = tokens_alone + position
    nets = {
        "position_cosine_mlp": embeddings
        + gpt.h[0].mlp(embeddings)
        - tokens_alone
        - gpt.h[0].mlp(tokens_alone),
        "position_cosine_layer": block_outputs[0] - block_outputs[1],
    }
    measured = toy.replica(gpt2, predictions=list(nets), engine=engine).measure(tokens).sequences
    for name, net in nets.items():
        expected = torch.nn.functional.cosine_similarity(effective.expand_as(net), net, dim=-1)
        np.testing.assert_allclose(measured[name], expected.detach(), atol=1e-5)


def test_what_every_output_may_read_is_computed_by_something() -> None:
    assert set(COMPUTED_BY) == set(PREDICTION_INPUTS)


@pytest.mark.parametrize("family", ["LlamaConfig", "OPTConfig"])
def test_cosines_of_effective_positions_are_undefined_without_them(
    tmp_path: Path, family: str
) -> None:
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32} if family == "OPTConfig" else {}
    path = toy.save_model(tmp_path / "model", toy.family(family, **sizes))
    outputs = ["position_cosine_mlp", "position_cosine_layer", "loss"]
    measured = toy.measure(
        path, toy.repeating_tokens(9, batch=2), predictions=outputs, engine="dense"
    ).sequences
    for name in outputs[:2]:
        assert measured[name].shape == (2, 9)
        assert np.isnan(measured[name]).all()
    assert np.isfinite(measured["loss"]).all()


@pytest.mark.parametrize("folded", [False, True])
def test_effective_positions_of_a_hidden_or_folded_mlp_are_refused(
    tmp_path: Path, folded: bool
) -> None:
    config = toy.gpt2() if folded else toy.family("OPTConfig", ffn_dim=48, word_embed_proj_dim=32)
    path = toy.save_model(tmp_path / "model", config)
    replica = toy.replica(path, engine="dense", weight_processing="folded" if folded else "raw")
    for name in ("swap_effective_positions", "scale_massive_keys"):
        with pytest.raises(
            ModelError,
            match="no module of its own, or folded, so its effective positions are not known",
        ):
            replica.measure(toy.repeating_tokens(9), name)
    for name in ("zero_query_bias", "first_position_second"):
        measured = replica.measure(toy.repeating_tokens(9), name).heads
        assert np.isnan(measured["sink_position_cosine"]).all()
        assert np.isfinite(measured["sink_key_cosine"]).all()


# The replications' views


def ask_replication(
    name: str, model: str, out: Path, *overrides: str
) -> Callable[[str], list[Row]]:
    """Measure a replication; what puts SQL to its runs."""
    replication = replications()[name]
    plans = plan_replication(replication, model, str(out), overrides)
    measure_runs(plans, Resources(0, device="cpu"), Console(quiet=True))
    return open_replication_runs(replication, plans[0].scan.out).rows


def test_effects_are_paired_and_the_gini_coefficient_is_of_each_sequence(tmp_path: Path) -> None:
    edits = ["none", "zero_query_bias", "random_query_bias"]
    ask = ask_replication(
        "sink_circuit",
        "bundled:gpt2-mini",
        tmp_path,
        "sequences=9",
        f"interventions={edits}".replace("'", '"'),
    )
    rows = ask(
        "SELECT intervention, sequence, layer, head, sink_mass_late FROM replication_heads "
        "ORDER BY ALL"
    )
    cells = {
        edit: np.array([row[4] for row in rows if row[0] == edit]).reshape(9, 24) for edit in edits
    }
    band = {edit: values.mean(1) for edit, values in cells.items()}
    effects_found = {
        row[0]: row[1:]
        for row in ask("SELECT intervention, mean, percent, change, standard_error FROM effect")
    }
    for edit in edits:
        change = band[edit] - band["none"]
        percent = 100 * band[edit].mean() / band["none"].mean()
        expected = (band[edit].mean(), percent, change.mean(), change.std(ddof=1) / 3)
        np.testing.assert_allclose(effects_found[edit], expected, rtol=1e-9, atol=1e-12)
    (control,) = ask(
        "SELECT control, control_percent, control_standard_error "
        "FROM effects_and_controls WHERE intervention = 'zero_query_bias'"
    )
    # Sums of rows in another order may differ in the last bit.
    assert control == (
        "random_query_bias",
        *(pytest.approx(effects_found["random_query_bias"][i], rel=1e-9) for i in (1, 3)),
    )
    for edit, sequence, gini, above in ask("SELECT intervention, sequence, gini, above2 FROM band"):
        sorted_values = np.sort(cells[edit][sequence])
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
