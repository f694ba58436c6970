"""Every statistic, profile and prediction under every intervention, in both engines, against the
recomputation from files and formulas in `tests/reference`.
"""

import re
from collections.abc import Hashable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from headcount.schemas.errors import ModelError
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.profiles import PROFILES
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import uniform_column
from headcount.schemas.weight_statistics import WEIGHT_STATISTICS
from headcount.workers.interventions import INTERVENTIONS
from headcount.workers.replica import InterventionMeasurements, Replica
from tests import ROOT
from tests.reference.definitions import (
    BY_PAIR,
    PREDICTION_DEFINITIONS,
    PROFILE_DEFINITIONS,
    STATISTIC_DEFINITIONS,
    VARIANT_DEFINITIONS,
    Reference,
    recompute,
)
from tests.reference.effect_definitions import EFFECT_DEFINITIONS
from tests.reference.forward import forward
from tests.reference.reference_changes import (
    ACTIVATION_CHANGES,
    WEIGHT_CHANGES,
    NotApplicable,
    run_changed,
)
from tests.reference.weight_definitions import WEIGHT_DEFINITIONS, Rows
from tests.reference.weights import Weights, read_weights
from tests.tools.pairwise import sampled
from tests.toys import toy_models as toy

pytestmark = pytest.mark.usefixtures("one_thread")

N_CTX = 17
ENGINES = ("fused", "dense")

ON_EVERY_INTERVENTION = ("attn-only-2l-mini", "llama-gqa", "neox")
OF_ONE_THING = (
    "backcopy-3l-mini", "legacy-pth", "gpt2-inverse-layer", "neox-serial", "qwen2", "qwen3",
    "phi", "gemma2", "bigcode", "opt", "gpt-neo", "bloom", "mistral-window-6", "gemma2-window-6",
    "gpt-oss",
)  # fmt: skip
"""Models that differ from another in one thing."""

SCORES_NOT_CHANGEABLE = ("attn-only-2l-mini", "legacy-pth", "opt", "gpt-neo")
"""Models whose scores TransformerLens shows and does not let change: the dense engine says so."""

OF_SCORES = "mask_|keep_window|keep_heavy|stream_|mean_query_bias"
"""Interventions that change scores, as a pattern, like those below."""

ROTATED_KEYS_HIDDEN = ("neox",)
"""Models whose keys TransformerLens does not show after their rotation."""

OF_POSITIONS = "position|massive_keys|random_keys"
REFUSED = {
    "llama-gqa|qwen3|gemma2|mistral-window-6|gemma2-window-6": f"{OF_POSITIONS}|query_bias",
    "neox|neox-serial|qwen2|phi|gpt-oss": f"{OF_POSITIONS}|mean_query_bias",
    "bloom": OF_POSITIONS,
    "gpt-neo": "query_bias",
    "gpt2-two-layers|gpt2-mini": "rotation|token_keys",
    "neox": "token_keys",
    "attn-only-2l-mini|legacy-pth": "mlp|swap_effective|swap_raw|rotation|token_keys",
}
"""Models, and which interventions change or read what they do not have: no sample need meet them.
"""

OPTIONS: dict[str, tuple[str, ...]] = {
    "scale_query_bias": ("(-1.5)",), "random_query_bias": ("", "(3,0.25)"),
    "scale_massive_keys": ("", "(2.5,5)", "(0,0)"),
    "scale_random_keys": ("", "(7,-1,4)", "(42,0,0)"),
    "scale_first_token_keys": ("", "(-2)"), "scale_random_token_keys": ("", "(42,3)"),
    "zero_first_mlp_out": ("", "(1)"), "mask_keys": ("", "(0,3)", "(-8,4)", "(16,1)"),
    "mask_recent_keys": ("", "(2)"), "keep_window": ("(1,4)", "(0,6)"),
    "keep_heavy_keys": ("(3,4)", "(1,1)", "(6,2)"), "mask_random_span": ("", "(3,5)"),
    "stream_heads": ("(1,4,L0H1,L1H0,L1H2)",),
    "stream_other_heads": ("(2,4,L0H3,L1H0,L1H1)",),
    "stream_groups": ("(1,4,2,x21)", "(0,5,1,x01)"),
    "store_keys": (
        "(rotated4,2,17,2,x21)", "(q4_0,0,17,1,x11)", "(fp8,0,9,1,x01)", "(mlx4,0,17,1,x11)",
    ),
    "store_values": (
        "(rotated2,1,17,2,x12)", "(q8_0,0,17,1,x11)", "(fp8,3,17,1,x11)", "(affine8,0,12,1,x1)",
        "(mlx2,0,17,1,x11)", "(mlx8,0,17,1,x11)", "(rotated3,0,17,1,x11)",
    ),
    "zero_massive_activations": ("(0,1.5,2)",),
    "set_massive_activation": ("(0,5,-20)", "(1,31,7.5,3)"), "ideal_backcopy": ("(0,2)",),
    "ideal_induction": ("(1,1)",), "blend_first_position": ("(0.3)",),
    "random_first_position": ("", "(2,0.5)"), "blend_position": ("(3)", "(0,0.4)"),
    "scale_first_position": ("(0)", "(2.5)"), "scale_position": ("(3,-2)",),
    "zero_token": ("(6)",), "swap_effective_positions": ("",), "swap_raw_positions": ("",),
    "zero_mlp": ("(1)",), "zero_attention": ("(0)",), "zero_head": ("(0,1)",),
    "keep_head": ("(1,2)",), "mean_head": ("(0,3)",), "patch_head": ("(0,2)",),
    "patch_head_at": ("(1,1,12)",), "head_to_first": ("(0,3)",),
    "zero_inactive_heads": (
        "(head_output_norm,1,layer_mean)", "(head_output_norm_last,1,layer_mean)",
        "(sink_alpha,1,layer_mean)", "(sink_value_norm,1,layer_mean)",
        "(value_norm,1,layer_mean)", "(entropy,1.3)",
    ),
    "zero_random_heads": ("(entropy,1,layer_mean)", "(head_output_norm,1,layer_mean,4)"),
    "zero_entropy_sinks": ("(0.8,0.5)",), "entropy_sinks_to_first": ("(0.8,0.5)",),
    "quantise_values": ("(1,2)",), "quantise_keys": ("(1,2)", "(0,1,2)"),
    "swap_first_key": ("(7)",), "swap_first_value": ("(7)",),
}  # fmt: skip
"""Options of the interventions that need some, or behave otherwise with others."""

COMBINATIONS = (
    "zero_query_bias+mask_keys(0,1)",
    "mask_keys(-2,2)+head_to_first(1,0)",
    "stream_groups(1,4,1,x1)+store_keys(rotated4,2,15,2,x31)+store_values(q4_0,2,15,2,x12)",
    "first_position_second+scale_massive_keys",
    "swap_first_value(4)+patch_head(1,0)+patch_head_at(0,1,9)",
    "zero_first_token+zero_positions+zero_attention(1)",
)
WITH_OPTIONS = (
    "distant_mass(0,1)", "distant_mass(1,3)", "distant_mass(2,7)",
    "distant_mass_last(0,1)", "distant_mass_last(1,3)", "distant_mass_last(2,7)",
    "labelled_key_mass(other,answer)", "sink_strongest_late(3)",
)  # fmt: skip
"""Statistics with options that mean something in short sequences."""

ASKED = [*STATISTIC_DEFINITIONS, *WITH_OPTIONS]
STATISTICS_MEASURED = {s.name: s for s in STATISTICS.select(ASKED)}
"""All but the effects, which are compared in `test_effects`."""
WITH_BASELINE = [s.name for s in STATISTICS_MEASURED.values() if s.uniform_baseline]

EVERY = [name + options for name in INTERVENTIONS for options in OPTIONS.get(name, ("",))]
EVERY += COMBINATIONS
ONE_EACH = [name + OPTIONS.get(name, ("",))[0] for name in INTERVENTIONS]
A_FEW = (
    "none", "scale_query_bias(-1.5)", "mask_keys", "zero_head(0,1)", "first_position_second",
    "swap_first_key(7)", "mask_keys(-4,4)",
)  # fmt: skip

TRAINED = (
    *A_FEW,
    "scale_massive_keys",
    "zero_massive_activations(0,1.5,2)",
    "zero_inactive_heads(head_output_norm,1,layer_mean)",
    "zero_inactive_heads(entropy,1.3)",
    "zero_random_heads(entropy,1,layer_mean)",
    "zero_entropy_sinks(0.8,0.5)",
    "entropy_sinks_to_first(0.8,0.5)",
    "swap_effective_positions",
)
"""Interventions whose choice of keys, heads or rows depends on what a model has learnt.

The others do the same to the trained `gpt2-mini` as to the toy of its architecture.
"""


reference_of = partial(recompute, uniform_baseline=WITH_BASELINE, variants=VARIANT_DEFINITIONS)


class Shelf:
    """Models, their weights, their replicas and what they measure, each made once."""

    def __init__(self, models: toy.Shelf) -> None:
        self.path = models.path
        self.models = models

    @cache  # noqa: B019
    def weights(self, name: str) -> Weights:
        return read_weights(self.path(name))

    def replica(self, name: str, engine: str, precision: str = "float32") -> Replica:
        n_ctx = 131 if name == "gpt2-long" else N_CTX
        curves = [p for p in toy.FORWARD_PROFILES if PROFILES[p].axis != "pair"]
        return self.models.replica(
            name, engine, n_ctx=n_ctx, precision=precision, statistics=ASKED,
            profiles=toy.FORWARD_PROFILES, curves=curves, predictions=list(PREDICTIONS),
            weight_statistics=list(WEIGHT_STATISTICS),
        )  # fmt: skip

    def d_vocab(self, name: str) -> int:
        return len(self.weights(name).W_E)

    @cache  # noqa: B019
    def reference(self, name: str, intervention: str, n_ctx: int = N_CTX) -> Reference:
        tokens, partner, labels = sequences_of(self.d_vocab(name), n_ctx)
        return reference_of(self.weights(name), tokens, intervention, partner, labels)

    def measured(
        self,
        name: str,
        intervention: str,
        engine: str,
        precision: str = "float32",
        n_ctx: int = N_CTX,
    ) -> InterventionMeasurements:
        tokens, partner, labels = sequences_of(self.d_vocab(name), n_ctx)
        replica = self.replica(name, engine, precision)
        return replica.measure(tokens, parse_intervention(intervention), labels, partner)


@pytest.fixture(scope="module")
def shelf(shelf: toy.Shelf) -> Shelf:
    return Shelf(shelf)


@cache  # A replica knows the tokens again that it has measured untouched.
def sequences_of(d_vocab: int, n_ctx: int) -> tuple[np.ndarray, np.ndarray, list[list[str]]]:
    """A repeated block behind a first token, with triggers; a sequence with a few repeats, without
    triggers; and their partners. Both have labels of a question and its answer.
    """
    # With this seed no quantised number lies in the middle between two steps.
    rng = np.random.default_rng(101)
    block = rng.integers(2, d_vocab, size=(n_ctx + 1) // 2)
    repeated = np.concatenate([block[:1], block[1:], block[1:]])[:n_ctx]
    if n_ctx % 2 == 0:
        repeated = np.tile(block, 2)[:n_ctx]
    mixed = rng.integers(2, min(d_vocab, 17), size=n_ctx)
    tokens = np.stack([repeated, mixed]).astype(np.int32)
    partner = rng.integers(2, d_vocab, size=tokens.shape).astype(np.int32)
    in_order = question_labels(n_ctx)
    of_repeated = zip(repeated.tolist(), in_order, strict=True)
    labels = [["trigger" if token % 3 == 1 else label for token, label in of_repeated], in_order]
    return tokens, partner, labels


def question_labels(n_ctx: int) -> list[str]:
    """Gold keys, others, a question, some tokens without a label, and the answer at the end."""
    parts = {"": 0.05, "gold": 0.4, "other": 0.5, "query": 0.6, " ": 0.65, "answer": 1.0}
    ends = {label: share * n_ctx for label, share in parts.items()}
    label_of = [next(label for label in ends if i < ends[label]) for i in range(n_ctx)]
    return [label.strip() for label in label_of]


def disagreements(
    measured: np.ndarray, expected: np.ndarray, absolute: bool, tolerance: float, listed: bool
) -> str | None:
    """What is wrong with a column, in words.

    Differences are absolute where values are at most 1, otherwise relative to their size: the
    largest of a list, whose small entries may be differences of large numbers.
    """
    if measured.shape != expected.shape:
        return f"is {measured.shape}, expected {expected.shape}"
    sizes = np.nan_to_num(np.abs(expected))
    if listed:
        sizes = sizes.max(-1, keepdims=True)
    scale = 1.0 if absolute else np.maximum(1, sizes)
    difference = np.nan_to_num(np.abs(measured - expected) / scale)
    difference[np.isnan(measured) != np.isnan(expected)] = np.inf
    if difference.max(initial=0) <= tolerance:
        return None
    place = tuple(int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
    return f"at {place} is {measured[place]}, expected {expected[place]}"


def compare(
    measured: InterventionMeasurements, reference: Reference, tolerance: float = 1e-5
) -> dict[str, str]:
    """The columns that disagree, and how."""
    problems: dict[str, str | None] = {}
    for name, statistic in STATISTICS_MEASURED.items():
        bounded = max(map(abs, statistic.range)) <= 1
        # A difference of scores is as exact as the scores, which are alike in the heads of a layer.
        of_scores = statistic.unit.startswith("logits")
        problems[name] = disagreements(
            measured.heads[name], reference.heads[name], bounded, tolerance, of_scores
        )
        if statistic.uniform_baseline:
            column = uniform_column(name)
            problems[column] = disagreements(
                measured.sequences[column],
                reference.uniform_baseline[name],
                bounded,
                tolerance,
                False,
            )
    for name, prediction in PREDICTIONS.items():
        bounded = max(map(abs, prediction.range)) <= 1
        problems[name] = disagreements(
            measured.sequences[name],
            reference.predictions[name],
            bounded,
            tolerance,
            prediction.per_token,
        )
    assert set(measured.tables["profiles"]) == set(reference.profiles)
    for name, expected in reference.profiles.items():
        bounded = PROFILES[name].unit == "probability"
        if name not in BY_PAIR:
            problems[f"curve {name}"] = disagreements(
                measured.tables["curves"][name], expected, bounded, tolerance, True
            )
        _, mean, m2 = measured.tables["profiles"][name]
        # What the heads of a layer share is kept once.
        values = expected[:, :, 0] if mean.ndim == 2 else expected
        # Over the sequences that have a value.
        defined = np.ma.masked_invalid(values)
        expected_mean = defined.mean(0).filled(np.nan)
        spread = ((defined - defined.mean(0)) ** 2).sum(0).filled(np.nan)
        problems[f"profile {name}"] = disagreements(mean, expected_mean, bounded, tolerance, True)
        # A square differs by twice the difference times the root.
        size = np.maximum(1, np.nan_to_num(np.abs(values)).max())
        problems[f"spread of {name}"] = disagreements(
            m2 / size**2, spread / size**2, True, 4 * tolerance, True
        )
    return {name: problem for name, problem in problems.items() if problem}


def is_refused(name: str, intervention: str, engine: str) -> bool:
    """Whether a model does not have what an intervention needs."""
    hides = re.search(OF_SCORES, intervention)
    if hides and engine == "dense" and name in SCORES_NOT_CHANGEABLE:
        return True
    if "store_keys" in intervention and engine == "dense" and name in ROTATED_KEYS_HIDDEN:
        return True
    needs = [needs for names, needs in REFUSED.items() if name in names.split("|")]
    return any(re.search(need, intervention) for need in needs)


def check(shelf: Shelf, name: str, intervention: str, engine: str) -> None:
    refusal = r"attn_scores.* cannot be changed in this architect|no key_input for scale_"
    refusal += "|does not show the keys of layer 0 after their rotation"
    try:
        reference = shelf.reference(name, intervention)
    except NotApplicable:
        refusal = "."
    if refusal == "." or is_refused(name, intervention, engine):
        with pytest.raises(ModelError, match=refusal):
            shelf.measured(name, intervention, engine)
        return
    assert compare(shelf.measured(name, intervention, engine), reference) == {}


# Completeness


def test_everything_that_is_registered_has_an_independent_definition() -> None:
    assert {*STATISTIC_DEFINITIONS, *EFFECT_DEFINITIONS} == set(STATISTICS)
    assert {*STATISTIC_DEFINITIONS, *VARIANT_DEFINITIONS} == set(STATISTICS_MEASURED)
    assert set(PROFILE_DEFINITIONS) == set(toy.FORWARD_PROFILES)
    assert set(PREDICTION_DEFINITIONS) == set(PREDICTIONS)
    assert set(WEIGHT_DEFINITIONS) == set(WEIGHT_STATISTICS)
    assert set(INTERVENTIONS) == {"none", *WEIGHT_CHANGES, *ACTIVATION_CHANGES}


def test_the_reference_imports_nothing_that_it_checks() -> None:
    for file in (ROOT / "tests" / "reference").glob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        imports = [line for line in lines if line.startswith(("import ", "from "))]
        assert not [line for line in imports if line.split()[1].startswith("headcount")], file.name


def test_every_intervention_changes_something(shelf: Shelf) -> None:
    tokens, partner, labels = sequences_of(shelf.d_vocab("llama-gqa"), N_CTX)

    def values(intervention: str, name: str, i: int) -> np.ndarray:
        of_sequence = (tokens[i].tolist(), intervention, partner[i].tolist(), labels[i])
        layers = run_changed(shelf.weights(name), *of_sequence).layers
        of_layers = [(layer.pattern, layer.z, layer.resid_post) for layer in layers]
        return np.concatenate([value.ravel() for layer in of_layers for value in layer])

    names = ("gpt2-two-layers", "llama-gqa")
    plain = {name: [values("none", name, i) for i in range(2)] for name in names}
    for intervention in EVERY:
        name = names["rotation" in intervention]
        # Most show in the first sequence, and then no other is read.
        changes = (
            np.abs(values(intervention, name, i) - plain[name][i]).max() > 1e-3 for i in range(2)
        )
        assert any(changes) == (intervention != "none"), intervention


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "gpt2-mini", "llama-mini", "llama-gqa", "neox", "gemma2-low-caps"),
        *("gpt-oss", "granite"),
        *(name for name in OF_ONE_THING if name != "legacy-pth"),
    ],
)
def test_the_reference_runs_models_as_their_library_does(shelf: Shelf, name: str) -> None:
    from transformers import AutoModelForCausalLM

    weights = shelf.weights(name)
    tokens, _, _ = sequences_of(shelf.d_vocab(name), N_CTX)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    as_written: dict[str, Any] = {**eager, "dtype": torch.float64}
    model: Any = AutoModelForCausalLM.from_pretrained(shelf.path(name), **as_written)
    with torch.inference_mode():
        output = model(torch.from_numpy(tokens).long(), output_attentions=True)
    for i, row in enumerate(tokens.tolist()):
        run = forward(weights, row)
        # Libraries keep angles of rotations, and some softmaxes, in float32.
        np.testing.assert_allclose(run.logits, output.logits[i], rtol=1e-5, atol=1e-5)
        for layer, pattern in zip(run.layers, output.attentions, strict=True):
            np.testing.assert_allclose(layer.pattern, pattern[i], atol=1e-5)


# Comparison


CELLS = [
    (*cell, engine)
    for cell in [
        *(("gpt2-two-layers", intervention) for intervention in EVERY),
        *(("gpt2-mini", intervention) for intervention in TRAINED),
        *product(ON_EVERY_INTERVENTION, ONE_EACH),
        *product(OF_ONE_THING, A_FEW),
        *product(("mistral-window-6", "bloom"), ("keep_heavy_keys(2,3)",)),
        *product(("opt",), ("swap_effective_positions", "scale_random_keys(7,-1,4)", "zero_mlps")),
        *product(("qwen2", "gemma2-window-6", "phi"), ("swap_first_rotations",)),
        *product(("qwen2", "opt"), ("scale_first_token_keys", "scale_random_token_keys(42,3)")),
    ]
    for engine in ENGINES
]


def facets(cell: tuple[str, str, str]) -> list[Hashable]:
    """What a cell is an example of: an intervention with its options, a model in an engine, and the
    way of a change through an engine, which is that of all that change the same thing.
    """
    name, intervention, engine = cell
    changes = [change.partition("(")[0] for change in intervention.split("+")]
    changed = [INTERVENTIONS[change].target for change in changes]
    if is_refused(name, intervention, engine):
        return [(*changed, engine, "refused")]
    return [intervention, (*changed, engine), (name, engine)]


@pytest.mark.parametrize(("name", "intervention", "engine"), sampled(CELLS, facets))
def test_every_column_under_every_intervention(
    shelf: Shelf, name: str, intervention: str, engine: str
) -> None:
    check(shelf, name, intervention, engine)


SHORT = list(product(("gpt2", "llama-gqa"), ("none", "mask_keys"), ENGINES, (1, 2, 3, 4, 16)))
LONG = list(product(["gpt2-long"], ["none"], ENGINES, (131,)))
"""Several tiles of queries, and more keys than there are last queries in any definition."""


@pytest.mark.parametrize(
    ("name", "intervention", "engine", "n_ctx"), sampled(SHORT + LONG, enumerate)
)
def test_short_and_long_sequences(
    shelf: Shelf, name: str, intervention: str, engine: str, n_ctx: int
) -> None:
    reference = shelf.reference(name, intervention, n_ctx)
    measured = shelf.measured(name, intervention, engine, n_ctx=n_ctx)
    assert compare(measured, reference) == {}


@pytest.mark.parametrize(("name", "intervention"), [
    ("gpt2", "patch_head(0,2)"), ("llama-gqa", "stream_other_heads(2,4,L1H0,L1H1)"),
])  # fmt: skip
def test_float64_leaves_no_more_than_the_rounding_of_what_is_stored(
    shelf: Shelf, name: str, intervention: str
) -> None:
    reference = shelf.reference(name, intervention)
    # Libraries keep the angles of rotations in float32.
    tolerance = 1e-7 if name == "gpt2" else 1e-5
    for engine in ("fused", "dense"):
        measured = shelf.measured(name, intervention, engine, "float64")
        assert compare(measured, reference, tolerance) == {}, engine


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "bigcode", "legacy-pth", "neox", "llama-gqa", "opt", "gpt-neo", "bloom"),
        # Its vocabulary is as large as that of a real model of bytes.
        pytest.param("attn-only-2l-mini", marks=pytest.mark.long),
    ],
)
def test_every_weight_statistic(shelf: Shelf, name: str) -> None:
    weights = shelf.weights(name)
    written: dict[str, Rows] = {statistic: {} for statistic in WEIGHT_STATISTICS}
    for row in shelf.replica(name, "dense").weights()["weights"].to_pylist():
        index = row["dimension"] if row["position"] is None else row["position"]
        if row["earlier_layer"] is not None:
            index = (row["earlier_layer"], row["earlier_head"])
        written[row["weight"]][row["layer"], row["head"], index] = row["value"]
    for statistic, define in WEIGHT_DEFINITIONS.items():
        expected = define(weights)
        assert set(written[statistic]) == set(expected), statistic
        for place, value in expected.items():
            assert written[statistic][place] == pytest.approx(value, rel=1e-5, abs=1e-5), (
                statistic,
                place,
            )
