"""TransformerLens is imported, and a bridge booted, only where something asks for it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headcount
from headcount.schemas.kinds import KINDS
from headcount.workers.bridge.bridge import bridge_of
from headcount.workers.loading import load_model
from headcount.workers.model.info.description import describe
from headcount.workers.model.layer_weights import READ_THROUGH_BRIDGE
from headcount.workers.replica import Replica
from tests.tools.processes import Command
from tests.toys import toy_models as toy
from tests.toys.model_families import tiny_model

N_CTX = 16
TOKENS = np.random.default_rng(0).integers(50, size=(2, N_CTX)).astype(np.int32)

SCAN = """
model = "bundled:gpt2-mini"
n_ctx = 16
sequences = 4
input.family = "uniform_random"
"""


def replica_of(model: Path, **fields: Any) -> Replica:
    return toy.replica(model, load_model, n_ctx=N_CTX, **{"statistics": ["sink_mass"], **fields})


@pytest.mark.long
def test_a_standard_scan_does_not_import_transformerlens(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(SCAN)
    done = Command(
        *("scan", "own.toml", "--replicas", "0"),
        environment=os.environ,
        directory=tmp_path,
        main="tests.tools.listed_modules.main",
    ).ended()
    modules = done.stdout.split()
    assert (done.code, "torch" in modules) == (0, True), done.stderr
    assert "transformer_lens" not in modules


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_reads_no_weight_boots_no_bridge(shelf: toy.Shelf, name: str) -> None:
    names = {
        kind.field: [
            formula.text
            for formula in kind.values()
            if not {*formula.parameters, *formula.conditions} & {*READ_THROUGH_BRIDGE}
            and (kind.field == "profiles" or not formula.name.endswith("_by_pair"))
        ]
        for kind in KINDS
        if kind.computed != "from the weights"
    }
    replica = replica_of(shelf.path(name), **names)
    assert not replica.model.has_booted
    replica.measure(TOKENS)
    assert not replica.model.has_booted


@pytest.mark.parametrize(
    "fields",
    [
        {"statistics": ["head_result_norm"]},
        {"statistics": ["sink_position_cosine"]},
        {"predictions": ["position_cosine_mlp"]},
        {"weight_statistics": ["query_key_norm"]},
        {"engine": "dense"},
        {"weight_processing": "folded"},
        {"interventions": ["zero_query_bias"]},
    ],
    ids=str,
)
def test_what_reads_weights_or_runs_the_bridge_boots_it_with_the_replica(
    shelf: toy.Shelf, fields: dict[str, Any]
) -> None:
    assert replica_of(shelf.path("gpt2"), **fields).model.has_booted


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "opt", "bloom"])
def test_positions_are_known_without_the_bridge_as_with_it(shelf: toy.Shelf, name: str) -> None:
    model = load_model(describe(shelf.path(name)), "raw", "cpu")
    rotary = model.rotary
    assert not model.has_booted
    assert rotary == (bridge_of(model).running.cfg.positional_embedding_type == "rotary")


def test_a_bridge_is_booted_the_same_in_the_middle_of_a_pass(shelf: toy.Shelf) -> None:
    first, late = (load_model(describe(shelf.path("gpt2")), "raw", "cpu") for _ in range(2))
    first.bridge()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with torch.inference_mode():
        late.bridge()
    assert torch.equal(torch.get_rng_state(), state)
    for own, expected in zip(late.all_weights(), first.all_weights(), strict=True):
        assert torch.equal(own, expected)
        assert not own.is_inference()
    assert [late.scale(layer) for layer in range(2)] == [first.scale(layer) for layer in range(2)]


def test_a_model_without_a_bridge_is_measured_in_memory_as_from_files(tmp_path: Path) -> None:
    model = tiny_model("helium")
    model.save_pretrained(tmp_path / "helium")  # pyright: ignore[reportCallIssue]
    replica = replica_of(tmp_path / "helium", statistics=["entropy"])
    expected = replica.measure(TOKENS).heads["entropy"]
    assert replica.model.bridge().problem
    rows = headcount.measure(model, TOKENS, ["entropy"])
    # Rows are ordered by layer, then by sequence.
    np.testing.assert_array_equal(rows["entropy"].to_numpy(), expected.swapaxes(0, 1).ravel())
