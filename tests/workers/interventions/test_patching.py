"""Activation patching: what comes from the run on the partner sequences, held against hooks of
TransformerLens's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from headcount.jobs.plan.plan import make_plan, prepare_run
from headcount.schemas.errors import ModelError, ScanError
from headcount.schemas.scans.scan import Input, parse_scan
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.interventions import INTERVENTIONS, intervention, needs_partners
from headcount.workers.model.model import bridge_of
from headcount.workers.replica import InterventionMeasurements, Replica
from headcount.workers.shard import run_shard
from tests.toys import toy_models as toy
from tests.toys.toy_runs import data_file, local

TOKENS = toy.repeating_tokens(13, batch=5)
PARTNER = (TOKENS * 7 + 1) % toy.D_VOCAB
Z = "blocks.{}.attn.hook_z"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    grouped = toy.family("LlamaConfig", num_key_value_heads=2)
    configs = {"gpt2": toy.gpt2(), "llama-gqa": grouped}
    return {
        name: toy.save_model(tmp_path_factory.mktemp(name), config)
        for name, config in configs.items()
    }


@pytest.fixture
def patches() -> Iterator[None]:
    def patch_mlp(mlp_out: Tensor, partner: Tensor, *, layer: int) -> Tensor:
        """What one MLP adds comes from the partner."""
        return partner

    def patch_every_head(z: Tensor, partner: Tensor, *, head: int) -> Tensor:
        """A head of every layer comes from the partner."""
        return torch.cat(
            [z[:, :, :head], partner[:, :, head : head + 1], z[:, :, head + 1 :]], dim=2
        )

    before = dict(INTERVENTIONS)
    for edit in (patch_mlp, patch_every_head):
        intervention(edit)
    yield
    INTERVENTIONS.clear()
    INTERVENTIONS.update(before)


def replica_of(path: Path, engine: str = "fused", **changes: Any) -> toy.TextReplica:
    return toy.replica(path, engine=engine, predictions=["final_logits", "losses"], **changes)


def logits_by_hooks(model: Any, tokens: np.ndarray, hooks: dict[str, Any]) -> Tensor:
    """The last token's logits of the tokens of its sequence, with TransformerLens's own hooks."""
    ids = torch.from_numpy(tokens).long()
    with torch.inference_mode():
        logits = model.run_with_hooks(ids, return_type="logits", fwd_hooks=list(hooks.items()))
    return logits[:, -1].gather(-1, ids)


def activation_in_run(model: Any, tokens: np.ndarray, name: str, **other_hooks: Any) -> Tensor:
    """An activation of a replica."""
    values: list[Tensor] = []
    logits_by_hooks(
        model, tokens, {name: lambda value, hook: values.append(value.clone()), **other_hooks}
    )
    return values[0]


@pytest.mark.parametrize("engine", ["fused", "dense"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_a_patch_is_the_partners_output_of_that_head_and_nothing_else(
    paths: dict[str, Path], name: str, engine: str
) -> None:
    replica = replica_of(paths[name], engine)
    partner_value = activation_in_run(bridge_of(replica.model), PARTNER, Z.format(1))

    def with_partners_head(value: Tensor, hook: object) -> Tensor:
        return torch.cat([value[:, :, :2], partner_value[:, :, 2:3], value[:, :, 3:]], dim=2)

    def with_partners_head_at_nine(value: Tensor, hook: object) -> Tensor:
        return torch.where(
            (torch.arange(13) == 9)[:, None, None], with_partners_head(value, hook), value
        )

    for text, hook in (
        ("patch_head(1,2)", with_partners_head),
        ("patch_head_at(1,2,9)", with_partners_head_at_nine),
    ):
        measured = replica.measure(TOKENS, text, partner=PARTNER)
        expected = logits_by_hooks(bridge_of(replica.model), TOKENS, {Z.format(1): hook})
        np.testing.assert_allclose(
            measured.sequences["final_logits"], expected.numpy(), atol=1e-5, rtol=1e-5
        )
        assert measured.method.engine == engine
    norms = replica.measure(TOKENS, "patch_head(1,2)", partner=PARTNER).heads["head_output_norm"]
    np.testing.assert_allclose(
        norms[:, 1, 2], partner_value[:, :, 2].norm(dim=-1).mean(-1).numpy(), rtol=1e-5
    )
    plain = replica.measure(TOKENS).heads["head_output_norm"]
    np.testing.assert_array_equal(norms[:, 0], plain[:, 0])
    np.testing.assert_array_equal(norms[:, 1, [0, 1, 3]], plain[:, 1, [0, 1, 3]])


@pytest.mark.parametrize("engine", ["fused", "dense"])
def test_the_partners_run_has_the_other_edits(paths: dict[str, Path], engine: str) -> None:
    replica = replica_of(paths["gpt2"], engine)

    def zero(value: Tensor, hook: object) -> Tensor:
        return value.index_fill(2, torch.tensor([1]), 0)

    partner_value = activation_in_run(
        bridge_of(replica.model), PARTNER, Z.format(1), **{Z.format(0): zero}
    )

    def patch(value: Tensor, hook: object) -> Tensor:
        return torch.cat([value[:, :, :2], partner_value[:, :, 2:3], value[:, :, 3:]], dim=2)

    measured = replica.measure(TOKENS, "zero_head(0,1)+patch_head(1,2)", partner=PARTNER)
    expected = logits_by_hooks(
        bridge_of(replica.model), TOKENS, {Z.format(0): zero, Z.format(1): patch}
    )
    np.testing.assert_allclose(
        measured.sequences["final_logits"], expected.numpy(), atol=1e-5, rtol=1e-5
    )


def assert_same_measurements(
    first: InterventionMeasurements, second: InterventionMeasurements
) -> None:
    for columns in ("heads", "sequences"):
        for name, values in getattr(first, columns).items():
            np.testing.assert_array_equal(values, getattr(second, columns)[name])


def test_a_patch_from_the_sequence_itself_changes_nothing(paths: dict[str, Path]) -> None:
    replica = replica_of(paths["gpt2"])
    assert_same_measurements(
        replica.measure(TOKENS, "patch_head(1,2)", partner=TOKENS), replica.measure(TOKENS)
    )
    assert_same_measurements(replica.measure(TOKENS, partner=PARTNER), replica.measure(TOKENS))


def test_every_batch_has_its_own_partners(paths: dict[str, Path]) -> None:
    one_batch, small_batches = (replica_of(paths["gpt2"], batch_size=size) for size in (5, 2))
    losses_whole, losses_in_parts = (
        replica.measure(TOKENS, "patch_head(0,1)", partner=PARTNER).sequences["losses"]
        for replica in (one_batch, small_batches)
    )
    np.testing.assert_allclose(losses_whole, losses_in_parts, atol=1e-6)


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize("engine", ["fused", "dense"])
def test_any_activation_can_come_from_the_partner(paths: dict[str, Path], engine: str) -> None:
    replica = replica_of(paths["gpt2"], engine)
    for layer in (0, 2):  # The last layer's MLP comes after all that a plain pass has to see.
        name = f"blocks.{layer}.hook_mlp_out"
        partner_value = activation_in_run(bridge_of(replica.model), PARTNER, name)
        measured = replica.measure(TOKENS, f"patch_mlp({layer})", partner=PARTNER).sequences[
            "final_logits"
        ]
        expected = logits_by_hooks(
            bridge_of(replica.model),
            TOKENS,
            {name: lambda value, hook, partner_value=partner_value: partner_value},
        )
        np.testing.assert_allclose(measured, expected.numpy(), atol=1e-5, rtol=1e-5)
    # Every layer of the partner's run is as it would be alone: what is patched is not patched
    # there.
    one_by_one = "+".join(f"patch_head({layer},3)" for layer in range(3))
    assert_same_measurements(
        replica.measure(TOKENS, "patch_every_head(3)", partner=PARTNER),
        replica.measure(TOKENS, one_by_one, partner=PARTNER),
    )


def test_a_patch_needs_partners(paths: dict[str, Path]) -> None:
    with pytest.raises(
        ModelError, match=r"patch_head\(1,2\): .*partner sequences, and none are given"
    ):
        replica_of(paths["gpt2"]).measure(TOKENS, "patch_head(1,2)")
    scan = toy.toy_scan(interventions=["none", "patch_head(0,0)"], model=str(paths["gpt2"]))
    with pytest.raises(
        ScanError,
        match=r"'patch_head\(0,0\)' .*has none; "
        "families with partners: ioi, ioi_other_names, ngram_corrupt, ngram_overlap",
    ):
        make_plan(scan, "toy")


@pytest.mark.parametrize(
    ("family", "other"), [("ngram_overlap", "ngram_corrupt"), ("ngram_corrupt", "ngram_overlap")]
)
def test_the_partner_of_a_layout_is_its_twin(family: str, other: str) -> None:
    def shard_of(family: str, *interventions: str) -> Any:
        fields = {"input": {"family": family, "n": 4}, "interventions": ["none", *interventions]}
        scan = toy.toy_scan(n_ctx=12, sequences=9, sequences_per_shard=4, **fields)
        partners = needs_partners(scan.interventions)
        return Sequences(scan, toy.toy_info(), partners=partners).shard(1)

    layout, twin = (shard_of(name, "patch_head(0,0)") for name in (family, other))
    assert shard_of(family).partner is None  # Nothing asks for it.
    np.testing.assert_array_equal(layout.partner, twin.tokens)
    np.testing.assert_array_equal(twin.partner, layout.tokens)
    # BOS A X1 X2 B C X1 X2 D A X1 X2: they differ in the last A alone.
    assert (layout.tokens != twin.tokens).nonzero()[1].tolist() == [9] * 4


def test_a_scan_writes_what_its_patches_change(tmp_path: Path) -> None:
    fields = {
        "model": "bundled:attn-only-2l-mini",
        "out": str(tmp_path),
        "n_ctx": 9,
        "sequences": 6,
        "sequences_per_shard": 4,
        "input": {"family": "ngram_corrupt"},
        "interventions": ["none", "patch_head(0,7)"],
        "statistics": ["head_output_norm"],
        "predictions": ["final_logits"],
    }
    plan = make_plan(parse_scan(fields), "patch")
    prepare_run(plan, "")
    replica = Replica(plan.info, plan.scan, "cpu")
    clean = Sequences(
        plan.scan.model_copy(update={"input": Input(family="ngram_overlap")}), plan.info
    )
    for shard in range(2):
        run_shard(replica, plan.run, plan.sequences.shard(shard))
        rows = {
            name: pq.read_table(local(data_file(plan.run, "heads", name, shard)))[
                "head_output_norm"
            ].to_numpy()
            for name in map(str, plan.scan.interventions)
        }
        partner = replica.measure(clean.shard(shard).tokens).heads["head_output_norm"]
        # Rows are in the order layer, sequence, head.
        patched, plain = (rows[name].reshape(2, -1, 8) for name in ("patch_head(0,7)", "none"))
        np.testing.assert_allclose(patched[0, :, 7], partner[:, 0, 7], rtol=1e-6)
        np.testing.assert_array_equal(patched[0, :, :7], plain[0, :, :7])
        assert (np.abs(patched[1] - plain[1]).max(-1) > 1e-3).all()
