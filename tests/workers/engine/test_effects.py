"""Effects of heads on the loss, from gradients, against slopes of the loss in `tests/reference`."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.schemas.errors import ScanError
from headcount.workers.interventions import INTERVENTIONS
from tests.reference.effect_definitions import (
    EFFECT_DEFINITIONS,
    EFFECT_VARIANTS,
    Definition,
    direct_logit_of_parts,
    gradient,
    loss,
    recompute_effects,
)
from tests.reference.forward import Run, forward
from tests.reference.reference_changes import run_changed
from tests.reference.weights import Norm, Weights, read_weights
from tests.tools.pairwise import sampled
from tests.toys import model_families
from tests.toys import toy_models as toy
from tests.workers.test_python_api import state_of

pytestmark = pytest.mark.usefixtures("one_thread")

DEFINITIONS: dict[str, Definition] = {**EFFECT_DEFINITIONS, **EFFECT_VARIANTS}
GRADIENTS = ("gradient_norm", "gradient_sink_share")
"""These take a slope for every coordinate."""
EFFECTS = [column for column in DEFINITIONS if column not in GRADIENTS]
FAMILIES = ("gpt2", "llama-gqa", "qwen3", "gemma2-low-caps", "gpt-oss-window-6", "granite")
TOLERANCES = {"float64": 1e-5, "float32": 1e-3}
PRECISIONS = {"gpt2": ("float64", "float32"), "gpt-oss-window-6": ("float32",)}
"""Models that are not measured in float64 alone: transformers cannot run experts in it."""
OF_FLOAT32_NORMS = 1e-4
"""Of models whose library rotates and norms in float32, whatever their format is: of 1e-4 nats."""


def with_brackets(column: str) -> str:
    """`effect_window(1,3)` of `effect_window_1_3`."""
    return re.sub(r"_(\d[\d_]*)$", lambda match: f"({match[1].replace('_', ',')})", column)


STATISTICS = [with_brackets(column) for column in DEFINITIONS]


@cache
def tokens_of(n_ctx: int) -> np.ndarray:
    # With this seed no quantised number lies in the middle between two steps, where float32 might
    # round it the other way: at least 2e-5 of a step beside it.
    return np.random.default_rng([29, n_ctx]).integers(2, toy.D_VOCAB, (4, n_ctx)).astype(np.int32)


class Shelf:
    """Models and what they should measure, each computed once."""

    def __init__(self, models: toy.Shelf) -> None:
        self.models = models

    @cache  # noqa: B019
    def weights(self, name: str) -> Weights:
        return read_weights(self.models.path(name))

    def run(self, name: str) -> Run:
        return forward(self.weights(name), tokens_of(12)[0].tolist())

    def measured(self, name: str, intervention: str, n_ctx: int, precision: str) -> Any:
        fields: dict[str, Any] = {"statistics": STATISTICS}
        fields["profiles"] = ["direct_logit_of_parts"]
        replica = self.models.replica(name, precision=precision, n_ctx=n_ctx, **fields)
        tokens = tokens_of(n_ctx)
        return replica.measure(tokens[:2], intervention, partner=tokens[2:])

    def check(
        self, name: str, intervention: str, n_ctx: int, columns: Sequence[str], sequences: int = 2
    ) -> None:
        """Differences are relative to the largest head of a layer, of at least 1e-4 nats."""
        ours, partners = (tokens[:sequences] for tokens in np.split(tokens_of(n_ctx), 2))
        expected = recompute_effects(self.weights(name), ours, columns, intervention, partners)
        floor = 0 if name.startswith("gpt2") else OF_FLOAT32_NORMS
        for precision in PRECISIONS.get(name, ("float64",)):
            tolerance = TOLERANCES[precision]
            measured = self.measured(name, intervention, n_ctx, precision).heads
            for column, values in expected.items():
                of_layers = np.nan_to_num(np.abs(values)).max(2, keepdims=True)
                scale = np.maximum(of_layers, 1e-4)
                np.testing.assert_allclose(
                    *(measured[column][:sequences] / scale, values / scale),
                    rtol=0, atol=max(tolerance, floor), err_msg=f"{column}, {precision}",
                )  # fmt: skip


@pytest.fixture(scope="module")
def shelf(shelf: toy.Shelf) -> Shelf:
    return Shelf(shelf)


# The reference itself


IDENTITY = Norm(np.array(1e8), None, 1e16, False)
"""A norm that does nothing: its eps drowns what it divides by."""


def one_layer(weights: Weights, size: float, cap: float | None) -> Weights:
    """Attention and logits alone, with this cap and logits this much larger."""
    layer = replace(weights.layers[0], mlp=None)
    W_U = weights.W_U * size
    return replace(weights, layers=[layer], final_norm=IDENTITY, W_U=W_U, final_soft_cap=cap)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gpt-oss-window-6"])
def test_in_one_layer_without_mlp_and_norm_every_effect_is_a_direct_one(
    shelf: Shelf, name: str
) -> None:
    weights = one_layer(shelf.weights(name), 1, cap=1.5)
    tokens = tokens_of(12)[:1]
    values = recompute_effects(weights, tokens, EFFECTS)
    values["direct_effect_zero_magnitude"] = np.abs(values["direct_effect"])
    for column in EFFECTS:
        if column.startswith("effect"):
            expected = values[f"direct_{column}"]
            np.testing.assert_allclose(values[column], expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gpt-oss-window-6"])
def test_where_the_loss_is_a_plane_an_effect_is_what_an_ablation_changes(
    shelf: Shelf, name: str
) -> None:
    # The smaller the logits, the straighter the loss.
    weights = one_layer(shelf.weights(name), 1e-4, cap=None)
    tokens = tokens_of(12)[0].tolist()
    effects = recompute_effects(weights, tokens_of(12)[:1], ["direct_effect", "effect_mean"])
    for column, ablation in (("direct_effect", "zero_head"), ("effect_mean", "mean_head")):
        ablated = [
            loss(run_changed(weights, tokens, f"{ablation}(0,{head})", tokens))
            for head in range(weights.n_heads)
        ]
        measured = np.array(ablated) - loss(forward(weights, tokens))
        assert 1e-6 < np.abs(measured).max() < 1e-4
        difference = np.abs(effects[column][0, 0] - measured).max()
        assert difference < 1e-3 * np.abs(measured).max(), column


@pytest.mark.parametrize("name", [*FAMILIES, "neox", "bloom", "legacy-pth"])
def test_parts_sum_to_the_centred_logit(shelf: Shelf, name: str) -> None:
    run, weights = shelf.run(name), shelf.weights(name)
    parts = np.array([direct_logit_of_parts(run, layer) for layer in range(len(run.layers))])
    logits = replace(weights, final_soft_cap=None).logits(run.layers[-1].resid_post)
    of_targets = logits[np.arange(len(logits) - 1), run.tokens[1:]]
    assert parts.sum() == pytest.approx((of_targets - logits[:-1].mean(-1)).mean(), abs=1e-12)
    heads = [sum(DEFINITIONS["direct_logit"](run, layer)) for layer in range(len(run.layers))]
    np.testing.assert_allclose(parts[:, 1], heads, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_a_direction_is_as_steep_as_its_coordinates_say(shelf: Shelf, name: str) -> None:
    run = forward(shelf.weights(name), tokens_of(3)[0].tolist())
    z = run.layers[0].z
    slopes = gradient(run, 0, "z_before_change", z.shape)
    expected = np.abs((slopes * z).sum((1, 2)))
    np.testing.assert_allclose(DEFINITIONS["effect_zero_magnitude"](run, 0), expected, rtol=1e-5)


# The product


MADE = (
    "mask_keys", "keep_window(1,4)", "swap_first_value(3)", "zero_first_token",
    "zero_mlp(1)", "zero_attention(1)", "head_to_first(1,0)", "zero_head(0,1)", "mean_head(0,3)",
    "patch_head(1,1)", "keep_head(1,2)", "zero_head(0,1)+mask_keys(2,2)",
)  # fmt: skip
CELLS = [*product(["gpt2", "llama-gqa"], MADE), ("gpt2", "zero_query_bias")]


@pytest.mark.parametrize(
    ("intervention", "why"),
    [
        ("swap_first_key(3)", "needs the dense engine (k is changed before its rotation)"),
        ("zero_massive_activations(1,1)", "resid_post is changed"),
    ],
)
def test_what_has_no_backward_pass_is_refused(shelf: Shelf, intervention: str, why: str) -> None:
    with pytest.raises(ScanError, match=re.escape(why)):
        shelf.measured("llama-gqa", intervention, 12, "float64")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_effect(shelf: Shelf, name: str) -> None:
    shelf.check(name, "none", 12, EFFECTS)


def facets(cell: tuple[str, str]) -> list[Any]:
    """A cell is an example of a model, and of all interventions that change the same things."""
    name, intervention = cell
    changes = [change.partition("(")[0] for change in intervention.split("+")]
    return [name, tuple(INTERVENTIONS[change].target for change in changes)]


@pytest.mark.parametrize(("name", "intervention"), sampled(CELLS, facets))
def test_every_effect_under_an_intervention(shelf: Shelf, name: str, intervention: str) -> None:
    shelf.check(name, intervention, 12, EFFECTS, sequences=1)


GRADIENT_CELLS = [*product(FAMILIES, ["none"]), ("gpt2", "zero_head(0,1)")]
GRADIENT_CELLS += [("llama-gqa", "swap_first_value(2)")]


# Every family goes the same way back in `test_every_effect`; a slope of each coordinate takes long.
@pytest.mark.parametrize(
    ("name", "intervention"), sampled(GRADIENT_CELLS, lambda cell: [cell[1] == "none"])
)
def test_every_gradient(shelf: Shelf, name: str, intervention: str) -> None:
    shelf.check(name, intervention, 3, GRADIENTS)


@pytest.mark.parametrize("n_ctx", [1, 2, 4, 5])
def test_short_sequences(shelf: Shelf, n_ctx: int) -> None:
    shelf.check("llama-gqa", "none", n_ctx, EFFECTS)
    measured = shelf.measured("llama-gqa", "none", n_ctx, "float64").heads
    undefined = {column for column in DEFINITIONS if np.isnan(measured[column]).all()}
    windows = {column for column in DEFINITIONS if "window" in column}
    shorter = {column for column in windows if "4_64" in column or n_ctx < 5}
    assert undefined == (set(DEFINITIONS) if n_ctx == 1 else shorter)


def test_long_sequences(shelf: Shelf) -> None:
    columns = ["effect_window_4_64", "direct_effect_window_4_64", "effect_mean", "direct_effect"]
    shelf.check("gpt2-long", "none", 80, columns)
    measured = shelf.measured("gpt2-long", "none", 80, "float64").heads
    assert not any(np.isnan(measured[column]).any() for column in columns)


def test_a_window_that_hides_nothing_has_no_effect_to_measure(shelf: Shelf) -> None:
    columns = ["effect_window_1_7", "direct_effect_window_1_7"]
    for name in ("gemma2-low-caps", "gpt-oss-window-6"):
        path = shelf.models.path(name)
        statistics = [with_brackets(column) for column in columns]
        measured = toy.measure(path, tokens_of(12)[:2], statistics=statistics, n_ctx=12).heads
        for column in columns:
            # The first layer sees 6 keys, the second one all.
            assert np.isnan(measured[column]).all((0, 2)).tolist() == [True, False], name


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_the_logit(shelf: Shelf, name: str) -> None:
    runs = [forward(shelf.weights(name), row) for row in tokens_of(12)[:2].tolist()]
    layers = range(len(runs[0].layers))
    expected = [[direct_logit_of_parts(run, layer) for layer in layers] for run in runs]
    measured = shelf.measured(name, "none", 12, PRECISIONS.get(name, ("float64",))[-1])
    moments = measured.tables["profiles"]["direct_logit_of_parts"]
    np.testing.assert_allclose(moments[1], np.mean(expected, 0), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("family", model_families.families())
def test_effects_of_every_family_that_the_fused_engine_measures(
    tmp_path: Path, family: str
) -> None:
    tokens, fields = tokens_of(12)[:2], {"n_ctx": 12, "precision": "float32"}
    try:
        model_families.tiny_model(family).save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
        toy.measure(tmp_path, tokens, statistics=["entropy"], **fields)
    except Exception:
        pytest.skip("the fused engine does not measure it")
    measured = toy.measure(tmp_path, tokens, statistics=["effects"], **fields).heads
    defined = {column for column in measured if not np.isnan(measured[column]).all()}
    of_layers = {column for column in defined if not column.startswith("direct_")}
    assert of_layers == {"effect_mean", "effect_quantised_values_4", "effect_quantised_keys_4",
                         "effect_zero_magnitude", *GRADIENTS}  # fmt: skip


# What is left behind


def test_a_replica_measures_the_same_before_and_after(shelf: Shelf) -> None:
    replica = shelf.models.replica("gpt2", statistics=["entropy", *STATISTICS], n_ctx=12)
    before, first = state_of(replica.model.bare), replica.measure(tokens_of(12)).heads
    replica.measure(tokens_of(12), "zero_query_bias")
    again = replica.measure(tokens_of(12)).heads
    assert state_of(replica.model.bare) == before
    for column, values in first.items():
        np.testing.assert_array_equal(values, again[column], err_msg=column)
    # A sequence has its effects whatever lies beside it, but for rounding.
    alone = replica.measure(tokens_of(12)[2:3]).heads
    for column in DEFINITIONS:
        np.testing.assert_allclose(alone[column][0], first[column][2], atol=1e-5, err_msg=column)
