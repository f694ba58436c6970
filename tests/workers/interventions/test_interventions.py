"""Interventions: both engines see the same edit, each edit does what it says, and none does
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headcount.schemas.errors import ModelError, ScanError
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.edits import Edit, Edits
from headcount.workers.interventions import (
    INTERVENTIONS,
    edited_weights,
    intervention_registry,
)
from headcount.workers.interventions.sinks import random_coordinates
from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import describe, find_model
from headcount.workers.model.model import bridge_of
from headcount.workers.replica import InterventionMeasurements
from tests.toys import toy_models as toy

WITH_OPTIONS = {
    "scale_query_bias": "(2)",
    "blend_first_position": "(0.25)",
    "scale_first_position": "(3)",
    "zero_mlp": "(1)",
    "zero_attention": "(1)",
    "zero_head": "(1,2)",
    "keep_head": "(0,1)",
    "head_to_first": "(1,3)",
    "keep_window": "(1,3)",
    "stream_heads": "(1,3,L0H1,L1H2)",
    "stream_other_heads": "(1,3,L0H1)",
    "mean_head": "(0,1)",
    "patch_head": "(1,2)",
    "patch_head_at": "(0,1,9)",
    "swap_first_key": "(5)",
    "swap_first_value": "(5)",
    "zero_inactive_heads": "(head_output_norm,4.5)",
    "zero_random_heads": "(head_output_norm,4.5)",
    "zero_entropy_sinks": "(0.6,0.4)",
    "entropy_sinks_to_first": "(0.6,0.4)",
    "blend_position": "(5)",
    "scale_position": "(5,3)",
    "zero_token": "(5)",
    "zero_massive_activations": "(0,1.5,2)",
    "set_massive_activation": "(1,3,-20)",
    "ideal_backcopy": "(1,2)",
    "ideal_induction": "(1,2)",
}
EVERY = [name + WITH_OPTIONS.get(name, "") for name in INTERVENTIONS]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("gpt2"), toy.gpt2())


@pytest.fixture(scope="module")
def replicas(gpt2: Path) -> tuple[toy.TextReplica, toy.TextReplica]:
    return toy.replica(gpt2), toy.replica(gpt2, engine="dense")


def difference(first: InterventionMeasurements, second: InterventionMeasurements) -> float:
    assert first.heads.keys() == second.heads.keys()
    differences = [
        np.nan_to_num(
            np.abs(first.heads[statistic] - second.heads[statistic])
            / (1 + np.abs(second.heads[statistic]))
        ).max()
        for statistic in first.heads
    ]
    return float(max(differences))


@pytest.mark.parametrize("name", EVERY)
def test_both_engines_see_the_same_edit(
    replicas: tuple[toy.TextReplica, toy.TextReplica], name: str
) -> None:
    fused, dense = replicas
    tokens = toy.repeating_tokens(17, batch=3)
    partner = (tokens * 7 + 1) % toy.D_VOCAB
    labels = [["trigger" if token % 3 == 0 else "" for token in row] for row in tokens.tolist()]
    unedited, edited = (
        fused.measure(tokens, edit, labels, partner=partner) for edit in ("none", name)
    )
    assert edited.method.engine == "fused"
    assert difference(edited, dense.measure(tokens, name, labels, partner=partner)) < 1e-5
    assert (difference(edited, unedited) > 1e-4) == (name != "none")
    measured_again = fused.measure(tokens, "none", labels)
    for statistic in STATISTICS:
        np.testing.assert_array_equal(measured_again.heads[statistic], unedited.heads[statistic])


def test_only_the_layers_whose_pattern_is_edited_are_built(
    replicas: tuple[toy.TextReplica, toy.TextReplica],
) -> None:
    tokens = toy.repeating_tokens(17)
    methods = {
        name: replicas[0].measure(tokens, name).method
        for name in ("zero_head(1,2)", "head_to_first(1,3)", "mask_keys")
    }
    assert {method.engine for method in methods.values()} == {"fused"}
    assert {name: method.built_layers for name, method in methods.items()} == {
        "zero_head(1,2)": [],
        "head_to_first(1,3)": [1],
        "mask_keys": [0, 1, 2],
    }


def test_combinations_are_applied_in_order(
    replicas: tuple[toy.TextReplica, toy.TextReplica],
) -> None:
    fused, dense = replicas
    tokens = toy.repeating_tokens(17)
    combination = "zero_query_bias+first_position_second+zero_head(0,1)"
    assert difference(fused.measure(tokens, combination), dense.measure(tokens, combination)) < 1e-5
    half = fused.measure(tokens, "scale_query_bias(0.5)")
    assert (
        difference(fused.measure(tokens, "scale_query_bias(0.25)+scale_query_bias(2)"), half) == 0
    )
    assert difference(fused.measure(tokens, "scale_query_bias(1)"), fused.measure(tokens)) == 0


def test_edits_do_what_they_say(replicas: tuple[toy.TextReplica, toy.TextReplica]) -> None:
    fused, _ = replicas
    tokens = toy.repeating_tokens(17, batch=2)
    first = fused.measure(tokens, "head_to_first(1,3)").heads
    assert (first["sink_mass"][:, 1, 3] == 1).all()
    assert (fused.measure(tokens, "zero_head(1,2)").heads["head_output_norm"][:, 1, 2] == 0).all()
    kept_norms = fused.measure(tokens, "keep_head(0,1)").heads["head_output_norm"][:, 0]
    assert (kept_norms[:, [0, 2, 3]] == 0).all()
    assert (kept_norms[:, 1] > 0).all()
    masked = fused.measure(tokens, "mask_keys").heads
    assert np.abs(masked["sink_mass"]).max() == 0
    window = fused.measure(tokens, "keep_window(0,1)").heads
    np.testing.assert_allclose(window["self_attention"], 1, atol=1e-6)
    tokens_alone = fused.measure(np.full((1, 9), 7, np.int32), "zero_positions").heads
    # Without positions equal tokens cannot be told apart.
    np.testing.assert_allclose(
        tokens_alone["entropy"][0], np.log(np.arange(9) + 1).mean(), rtol=1e-5
    )


def test_a_mean_of_the_bias_over_keys_leaves_the_pattern_of_no_bias(
    replicas: tuple[toy.TextReplica, toy.TextReplica],
) -> None:
    """A softmax does not change by what all keys share: a bias acts by its differences alone."""
    tokens = toy.repeating_tokens(17, batch=2)
    zero, mean, plain = (
        replicas[0].measure(tokens, name).heads
        for name in ("zero_query_bias", "mean_query_bias", "none")
    )
    of_the_pattern = ("sink_mass", "entropy", "head_output_norm", "resid_post_norm")
    for statistic in of_the_pattern:
        np.testing.assert_allclose(mean[statistic], zero[statistic], rtol=1e-5, atol=1e-6)
        assert np.abs(mean[statistic] - plain[statistic]).max() > 1e-3
    # The bias that is averaged is the edited one.
    doubled = replicas[0].measure(tokens, "scale_query_bias(2)+mean_query_bias").heads
    np.testing.assert_allclose(doubled["sink_mass"], zero["sink_mass"], rtol=1e-5, atol=1e-6)


def test_massive_activations_are_gone_after_their_layer(gpt2: Path, tmp_path: Path) -> None:
    def make_massive(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.0.mlp.c_proj.bias"][[3, 7]] = torch.tensor([5000.0, -90.0])

    path = toy.copy_of(gpt2, tmp_path / "m", lambda model: toy.change_weights(model, make_massive))
    names = ["sink_resid_post_massive", "resid_post_norm"]
    replica = toy.replica(path, statistics=names)
    tokens = toy.repeating_tokens(9)
    massive, norm = (replica.measure(tokens).heads[name] for name in names)
    assert massive[0, :2, 0].tolist() == [1, 1]
    zeroed = replica.measure(tokens, "zero_massive_activations(0)").heads
    assert zeroed["sink_resid_post_massive"].max() == 0
    assert zeroed["resid_post_norm"][0, 0, 0] < 200 < 4900 < norm[0, 0, 0]
    set_to_zero = replica.measure(tokens, "set_massive_activation(0,3,0)").heads
    assert set_to_zero["sink_resid_post_massive"].max() == 0
    elsewhere = replica.measure(tokens, "set_massive_activation(0,3,0,5)").heads
    assert elsewhere["sink_resid_post_massive"][0, :2, 0].tolist() == [1, 1]


def test_an_edit_that_reads_labels_needs_them(
    replicas: tuple[toy.TextReplica, toy.TextReplica],
) -> None:
    tokens = toy.repeating_tokens(9)
    with pytest.raises(ScanError, match="reads which tokens are labelled, and no labels are given"):
        replicas[0].measure(tokens, "ideal_backcopy(0,1)")
    # A sequence without a trigger looks at its first token alone.
    heads = replicas[0].measure(tokens, "ideal_backcopy(0,1)", [[""] * 9]).heads
    assert heads["sink_mass"][0, 0, 1] == 1


def test_positions_alone_ignore_the_tokens(
    replicas: tuple[toy.TextReplica, toy.TextReplica],
) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.permuted(np.tile(np.arange(2, 19, dtype=np.int32), (4, 1)), axis=1)
    heads = replicas[0].measure(tokens, "zero_tokens").heads
    assert np.ptp(heads["sink_mass"], axis=0).max() < 1e-6


def test_effective_positions_and_their_swap_follow_the_definition(gpt2: Path) -> None:
    model = load_model(describe(gpt2), "raw", "cpu", torch.float64)
    block: Any = model.bare.get_submodule("transformer.h.0")
    positions = model.bare.get_parameter("transformer.wpe.weight")
    mlp = block.mlp
    hidden = torch.nn.functional.gelu(
        positions @ mlp.c_fc.weight + mlp.c_fc.bias, approximate="tanh"
    )
    effective = positions + hidden @ mlp.c_proj.weight + mlp.c_proj.bias
    torch.testing.assert_close(model.circuit.effective, effective)
    order = effective[0].abs().argsort(descending=True)[:3].tolist()
    assert model.circuit.massive_coordinates(3) == order
    mlp_out = torch.randn(2, 5, 32, dtype=torch.float64)
    for name, rows in (("swap_effective_positions", effective), ("swap_raw_positions", positions)):
        edited = toy.bound(name).edits(model).apply("mlp_out", 0, mlp_out, {})
        u0, u1 = (row / row.norm() for row in rows[:2])
        alpha = mlp_out[:, 0] @ u0
        torch.testing.assert_close(edited[:, 0], mlp_out[:, 0] + alpha[:, None] * (u1 - u0))
        torch.testing.assert_close(edited[:, 1], mlp_out[:, 1] + alpha[:, None] * (u0 - u1))
        assert torch.equal(edited[:, 2:], mlp_out[:, 2:])
        assert toy.bound(name).edits(model).apply("mlp_out", 1, mlp_out, {}) is mlp_out


def test_random_keys_avoid_the_massive_ones_and_depend_on_layer_and_draw(gpt2: Path) -> None:
    model = load_model(describe(gpt2), "raw", "cpu")
    keys: list[Any] = [block.attn for block in bridge_of(model).blocks]

    def zeroed(text: str) -> list[set[int]]:
        with torch.inference_mode(), edited_weights(model, toy.bound(text)):
            return [
                set(np.flatnonzero((attn.W_K == 0).all(dim=0).all(dim=-1).numpy()).tolist())
                for attn in keys
            ]

    massive = set(model.circuit.massive_coordinates(3))
    assert zeroed("scale_massive_keys") == [massive] * len(keys)
    zeroed_by_draw = [zeroed(f"scale_random_keys({draw})") for draw in range(4)]
    assert all(len(layer) == 3 and not layer & massive for draw in zeroed_by_draw for layer in draw)
    assert all(len({frozenset(layer) for layer in draw}) == len(keys) for draw in zeroed_by_draw)
    assert len({frozenset(draw[0]) for draw in zeroed_by_draw}) > 1
    everything = zeroed("scale_random_keys(0,0,20)")
    assert [len(layer) for layer in everything] == [12] * len(keys)


def test_random_keys_are_the_published_ones() -> None:
    # random.seed(42), then random.randint(0, 767) three times for each layer.
    published = [
        [654, 114, 25],
        [759, 281, 250],
        [228, 142, 754],
        [104, 692, 758],
        [558, 89, 604],
        [432, 32, 30],
        [95, 223, 238],
        [517, 616, 27],
        [574, 203, 733],
        [665, 718, 558],
        [429, 225, 459],
        [603, 284, 6],
    ]
    assert [
        random_coordinates(768, 3, [138, 378, 447], layer, 42) for layer in range(12)
    ] == published
    # One that is massive, and one drawn twice, are passed over.
    assert random_coordinates(768, 3, [114], 0, 42) == [654, 25, 759]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("zero_head", r"'zero_head' needs layer; expected zero_head\(layer,head\)"),
        (
            "zero_head(1,2,3)",
            r"'zero_head\(1,2,3\)' has 3 options; expected zero_head\(layer,head\)",
        ),
        ("zero_head(1,x)", r"head: expected an integer, got 'x'"),
        ("scale_query_bias(much)", r"alpha: expected a number, got 'much'"),
        ("none+", r"expected NAME, NAME\(1,0.5\) or A\+B, got 'none\+'"),
        ("zero_hed(1,2)", r"did you mean 'zero_head'"),
        (
            "zero_inactive_heads(head_norm,1)",
            r"score: unknown name 'head_norm': did you mean 'head_output_norm'\? Known: entropy",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ScanError, match=problem):
        toy.bound(text)


def test_heads_and_layers_that_are_not_there_are_refused(gpt2: Path) -> None:
    for text, key in (
        ("zero_head(3,0)", "layer 3"),
        ("zero_head(0,4)", "head 4"),
        ("swap_first_key(17)", "position 17"),
    ):
        with pytest.raises(ScanError, match=f"{key} of "):
            toy.bound(text).check(describe(gpt2), 17)


def test_a_model_without_position_embeddings_is_refused(tmp_path: Path) -> None:
    path = toy.save_model(tmp_path, toy.family("LlamaConfig"))
    replica = toy.replica(path)
    for name in ("first_position_second", "swap_effective_positions"):
        with pytest.raises(ModelError, match=r"W_pos|position embeddings"):
            replica.measure(toy.repeating_tokens(9), name)


@pytest.mark.parametrize("engine", ["fused", "dense"])
def test_what_a_model_does_not_have_is_refused_before_anything_is_measured(
    tmp_path: Path, engine: str
) -> None:
    rotary, attn_only = (
        toy.save_model(tmp_path, toy.family("LlamaConfig")),
        find_model("bundled:attn-only-2l-mini"),
    )
    for path, name, target in (
        (attn_only, "zero_mlp(0)", "mlp_out"),
        (rotary, "zero_query_bias+zero_positions", "pos_embed"),
        (rotary, "zero_query_bias", "b_Q"),
    ):
        with pytest.raises(ModelError, match=f"no {target} for "):
            toy.replica(path, engine=engine, interventions=["none", name])
    with pytest.raises(ModelError, match="no mlp_out for zero_mlps to edit"):
        toy.replica(attn_only, engine=engine).measure(toy.repeating_tokens(9), "zero_mlps")


def test_rotated_keys_are_edited_where_the_bridge_edits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double_keys(k: Tensor) -> Tensor:
        """Keys are twice as long."""
        return 2 * k

    monkeypatch.setattr(intervention_registry, "INTERVENTIONS", dict(INTERVENTIONS))
    intervention_registry.intervention(double_keys)
    path = toy.save_model(tmp_path, toy.family("LlamaConfig"))
    replica, tokens = toy.replica(path), toy.repeating_tokens(9)
    assert replica.measure(tokens, "zero_first_value").method.engine == "fused"
    assert replica.measure(tokens, "double_keys").method.engine == "dense"
    low = toy.replica(path, precision="bfloat16")
    with pytest.raises(
        ScanError,
        match=r"double_keys is measured by the dense engine \(k is edited before its rotation\)",
    ):
        low.measure(tokens, "double_keys")


def test_activations_are_edited_in_every_precision(gpt2: Path) -> None:
    tokens = toy.repeating_tokens(17, batch=3)
    exact, low = (
        toy.replica(gpt2, precision=precision).measure(tokens, "zero_head(1,2)")
        for precision in ("float32", "bfloat16")
    )
    assert (low.method.engine, low.method.precision) == ("fused", "bfloat16")
    assert (low.heads["head_output_norm"][:, 1, 2] == 0).all()
    largest_difference = np.abs(low.heads["sink_mass"] - exact.heads["sink_mass"]).max()
    assert 0 < largest_difference < 0.05


def lean_q(q: Tensor, resid_pre: Tensor) -> Tensor:
    """Queries depend on the stream."""
    return q * (1 + resid_pre.tanh().mean(-1)[..., None, None])


def lean_scores(attn_scores: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores depend on values, and on themselves made anew."""
    return attn_scores / 2 + torch.einsum("bqhd,bkhd->bhqk", q, k + v) / q.shape[-1] ** 0.5


def lean_z(
    z: Tensor, pattern: Any, resid_pre: Tensor, v: Tensor, tokens: Tensor, layer: int
) -> Tensor:
    """Outputs depend on everything before them."""
    scale = pattern.key(0).transpose(1, 2)[..., None] + (tokens % 3)[..., None, None] + layer
    return z * scale + v * resid_pre.mean(-1)[..., None, None]


def lean_out(attn_out: Tensor, z: Tensor, q: Tensor, pattern: Any) -> Tensor:
    """What the attention adds depends on what it was made of."""
    return (
        attn_out
        * (z.norm(dim=-1) + q.norm(dim=-1) + pattern.entropy().transpose(1, 2)).mean(-1)[..., None]
    )


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "legacy"])
def test_edits_read_what_their_layer_has_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(intervention_registry, "INTERVENTIONS", dict(INTERVENTIONS))
    for edit in (lean_q, lean_scores, lean_z, lean_out):
        intervention_registry.intervention(edit)
    # A rotated model's queries are edited in the bridge alone, and the bridge shows no scores of a
    # legacy one.
    edits = {"gpt2": "q scores z out", "llama-gqa": "scores z out", "legacy": "q z out"}[
        name
    ].split()
    if name == "legacy":
        path = toy.save_legacy(tmp_path / "legacy", "safetensors")
    else:
        path = toy.save_model(
            tmp_path,
            toy.gpt2() if name == "gpt2" else toy.family("LlamaConfig", num_key_value_heads=2),
        )
    fused, dense = toy.replica(path), toy.replica(path, engine="dense")
    tokens = toy.repeating_tokens(13)
    unedited = fused.measure(tokens)
    for text in (*(f"lean_{edit}" for edit in edits), "lean_z+lean_out"):
        edited = fused.measure(tokens, text)
        assert difference(edited, dense.measure(tokens, text)) < 1e-5
        assert difference(edited, unedited) > 1e-3


def test_an_edit_that_reads_what_is_not_known_yet_is_refused() -> None:
    def early(v: Tensor, z: Tensor) -> None: ...
    def elsewhere(b_Q: Tensor, tokens: Tensor) -> None: ...

    for edit, problem in (
        (early, "an edit of v reads 'z'"),
        (elsewhere, "an edit of b_Q reads 'tokens'"),
    ):
        with pytest.raises(ValueError, match=problem):
            intervention_registry.intervention(edit)


@pytest.mark.parametrize(
    ("name", "activation"), [("swap_first_key", "k"), ("swap_first_value", "v")]
)
def test_swaps_exchange_two_positions_and_nothing_else(
    gpt2: Path, name: str, activation: str
) -> None:
    model = load_model(describe(gpt2), "raw", "cpu")
    activation_values = torch.randn(2, 6, 4, 8)
    edited = toy.bound(f"{name}(4)").edits(model).apply(activation, 1, activation_values, {})
    assert torch.equal(edited, activation_values[:, [4, 1, 2, 3, 0, 5]])


def test_the_mean_of_a_head_hears_of_no_later_token(gpt2: Path) -> None:
    model = load_model(describe(gpt2), "raw", "cpu")
    z = torch.randn(2, 6, 4, 8)
    edited = toy.bound("mean_head(1,2)").edits(model).apply("z", 1, z, {})
    others = [0, 1, 3]
    assert torch.equal(edited[:, :, others], z[:, :, others])
    for q in range(6):
        torch.testing.assert_close(edited[:, q, 2], z[:, : q + 1, 2].mean(1))


def test_an_edit_of_one_layer_touches_that_layer() -> None:
    edits = Edits([Edit("attn_out", lambda value, known: torch.zeros_like(value), layer=0)])
    assert [edits.touch("attn_out", layer) for layer in (0, 1, None)] == [True, False, True]
