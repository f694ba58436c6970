"""Every statistic, profile and prediction under every intervention, in both engines, against the
recomputation from files and formulas in `tests/reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headcount.schemas.errors import MeasureError, ModelError, ScanError
from headcount.schemas.files.tables import uniform_column
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.profiles import PROFILES
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.statistics import KIND, STATISTICS
from headcount.schemas.weight_statistics import WEIGHT_STATISTICS
from headcount.workers.engine.fused_engine import _FusedPass
from headcount.workers.interventions import INTERVENTIONS
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.files.model_info import describe, find_model
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
from tests.reference.forward import forward
from tests.reference.reference_changes import ALL_CHANGES, NotApplicable
from tests.reference.weight_definitions import WEIGHT_DEFINITIONS, Rows
from tests.reference.weights import Weights, read_weights
from tests.toys import toy_models as toy

pytestmark = pytest.mark.usefixtures("one_thread")

N_CTX = 21

MODELS: dict[str, Any] = {
    "gpt2": lambda: toy.gpt2(),
    "llama-gqa": lambda: toy.family("LlamaConfig", num_key_value_heads=2),
    "neox": lambda: toy.family("GPTNeoXConfig"),
    "gpt2-inverse-layer": lambda: toy.gpt2(scale_attn_by_inverse_layer_idx=True),
    "neox-serial": lambda: toy.family("GPTNeoXConfig", use_parallel_residual=False),
    "qwen2": lambda: toy.family("Qwen2Config", num_key_value_heads=2),
    "qwen3": lambda: toy.family("Qwen3Config", head_dim=8, num_key_value_heads=2),
    "phi": lambda: toy.family("PhiConfig"),
    "gemma2": lambda: toy.family(
        "Gemma2Config",
        head_dim=8,
        num_key_value_heads=2,
        sliding_window=64,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "bigcode": lambda: toy.family(
        "GPTBigCodeConfig", n_embd=32, n_inner=48, n_layer=2, n_head=4, n_positions=toy.N_CTX
    ),
    "bloom": lambda: toy.family("BloomConfig", n_layer=2, n_head=4),
    "opt": lambda: toy.family("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "gpt-neo": lambda: toy.family(
        "GPTNeoConfig", num_layers=2, attention_types=[[["global", "local"], 1]], window_size=30
    ),
}

ON_EVERY_INTERVENTION = ("attn-only-2l-mini", "llama-gqa", "neox")
SCORES_NOT_CHANGEABLE = ("attn-only-2l-mini", "legacy-pth", "opt", "gpt-neo")
"""Models whose scores TransformerLens shows and does not let change: the dense engine says so."""

OLDER = ("opt", "gpt-neo", "bloom")
"""Models that scale queries or nothing, or have ALiBi, in modules of their own."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "scale_query_bias": ("(-1.5)",),
    "random_query_bias": ("", "(3,0.25)"),
    "scale_massive_keys": ("", "(2.5,5)"),
    "scale_random_keys": ("", "(7,-1,4)"),
    "zero_first_mlp_out": ("", "(1)"),
    "mask_keys": ("", "(0,3)", "(-8,4)", "(20,1)"),
    "mask_recent_keys": ("", "(2)"),
    "keep_window": ("(1,4)", "(0,6)"),
    "mask_random_span": ("", "(3,5)"),
    "stream_heads": ("(1,4,L0H1,L1H0,L1H2)",),
    "stream_other_heads": ("(2,4,L0H3,L1H0,L1H1)",),
    "zero_massive_activations": ("(0,1.5,2)",),
    "set_massive_activation": ("(0,5,-20)", "(1,31,7.5,3)"),
    "ideal_backcopy": ("(0,2)",),
    "ideal_induction": ("(1,1)",),
    "blend_first_position": ("(0.3)",),
    "random_first_position": ("", "(2,0.5)"),
    "blend_position": ("(3)", "(0,0.4)"),
    "scale_first_position": ("(0)", "(2.5)"),
    "scale_position": ("(3,-2)",),
    "zero_token": ("(6)",),
    "swap_effective_positions": ("",),
    "swap_raw_positions": ("",),
    "zero_mlp": ("(1)",),
    "zero_attention": ("(0)",),
    "zero_head": ("(0,1)",),
    "keep_head": ("(1,2)",),
    "mean_head": ("(0,3)",),
    "patch_head": ("(0,2)",),
    "patch_head_at": ("(1,1,12)",),
    "head_to_first": ("(0,3)",),
    "zero_inactive_heads": (
        "(head_output_norm,1,layer_mean)",
        "(head_output_norm_last,1,layer_mean)",
        "(sink_alpha,1,layer_mean)",
        "(sink_value_norm,1,layer_mean)",
        "(value_norm,1,layer_mean)",
        "(entropy,1.3)",
    ),
    "zero_random_heads": ("(entropy,1,layer_mean)", "(head_output_norm,1,layer_mean,4)"),
    "zero_entropy_sinks": ("(0.8,0.5)",),
    "entropy_sinks_to_first": ("(0.8,0.5)",),
    "swap_first_key": ("(7)",),
    "swap_first_value": ("(7)",),
}
"""Options of the interventions that need some, or behave otherwise with others."""

COMBINATIONS = (
    "zero_query_bias+mask_keys(0,1)",
    "mask_keys(-2,2)+head_to_first(1,0)",
    "first_position_second+scale_massive_keys",
    "swap_first_value(4)+patch_head(1,0)+patch_head_at(0,1,9)",
    "zero_first_token+zero_positions+zero_attention(1)",
)
WITH_OPTIONS = (
    "distant_mass(0,1)", "distant_mass(1,3)", "distant_mass(2,7)",
    "distant_mass_last(0,1)", "distant_mass_last(1,3)", "distant_mass_last(2,7)",
    "labelled_key_mass(other,answer)",
)  # fmt: skip
"""Statistics with options that mean something in short sequences."""

STATISTICS_MEASURED = {s.name: s for s in KIND.select(["all", *WITH_OPTIONS])}
WITH_BASELINE = [s.name for s in STATISTICS_MEASURED.values() if s.uniform_baseline]

EVERY = [name + options for name in INTERVENTIONS for options in OPTIONS.get(name, ("",))]
EVERY += COMBINATIONS
ONE_EACH = [name + OPTIONS.get(name, ("",))[0] for name in INTERVENTIONS]
A_FEW = (
    "none",
    "scale_query_bias(-1.5)",
    "mask_keys",
    "zero_head(0,1)",
    "first_position_second",
    "swap_first_key(7)",
    "mask_keys(-4,4)",
)

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

    def __init__(self, root: Path) -> None:
        self.root = root

    @cache  # noqa: B019
    def path(self, name: str) -> Path:
        if name == "legacy-pth":
            return toy.save_legacy(self.root / name, "pth")
        if name in MODELS:
            return toy.save_model(self.root / name, MODELS[name]())
        return find_model(f"bundled:{name}")

    @cache  # noqa: B019
    def weights(self, name: str) -> Weights:
        return read_weights(self.path(name))

    @cache  # noqa: B019
    def replica(self, name: str, engine: str, precision: str = "float32") -> Replica:
        info = describe(self.path(name))
        curves = [p for p in PROFILES if PROFILES[p].axis != "pair"]
        scan = toy.toy_scan(
            model=str(self.path(name)), n_ctx=N_CTX, engine=engine, precision=precision,
            statistics=["all", *WITH_OPTIONS],
            profiles=list(PROFILES), curves=curves, predictions=list(PREDICTIONS),
            weight_statistics=list(WEIGHT_STATISTICS),
        )  # fmt: skip
        return Replica(info, scan, "cpu")

    def d_vocab(self, name: str) -> int:
        return len(self.weights(name).W_E)

    @cache  # noqa: B019
    def reference(self, name: str, intervention: str, n_ctx: int = N_CTX) -> Reference:
        tokens, partner, labels = sequences_of(self.d_vocab(name), n_ctx)
        weights = self.weights(name)
        return reference_of(weights, tokens, intervention, partner, labels)

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
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("reference"))


def sequences_of(d_vocab: int, n_ctx: int) -> tuple[np.ndarray, np.ndarray, list[list[str]]]:
    """A repeated block behind a first token, with triggers; a sequence with a few repeats, without
    triggers; and their partners. Both have labels of a question and its answer.
    """
    rng = np.random.default_rng(99)
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
    undefined = np.isnan(measured) != np.isnan(expected)
    if undefined.any():
        place = tuple(np.argwhere(undefined)[0].tolist())
        return (
            f"at {place} is {measured[place]}, expected {expected[place]} "
            f"({undefined.sum()} of {undefined.size} places)"
        )
    sizes = np.nan_to_num(np.abs(expected))
    if listed:
        sizes = sizes.max(-1, keepdims=True)
    scale = 1.0 if absolute else np.maximum(1, sizes)
    difference = np.nan_to_num(np.abs(measured - expected) / scale)
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
    assert set(measured.means["profiles"]) == set(reference.profiles)
    for name, expected in reference.profiles.items():
        bounded = PROFILES[name].unit == "probability"
        if name not in BY_PAIR:
            problems[f"curve {name}"] = disagreements(
                measured.tables["curves"][name], expected, bounded, tolerance, True
            )
        aggregate = measured.means["profiles"][name]
        mean, m2 = aggregate.mean, aggregate.m2
        # What the heads of a layer share is kept once.
        values = expected[:, :, 0] if mean.ndim == 2 else expected
        spread = ((values - values.mean(0)) ** 2).sum(0)
        problems[f"profile {name}"] = disagreements(mean, values.mean(0), bounded, tolerance, True)
        # A square differs by twice the difference times the root.
        size = np.maximum(1, np.nan_to_num(np.abs(values)).max())
        problems[f"spread of {name}"] = disagreements(
            m2 / size**2, spread / size**2, True, 4 * tolerance, True
        )
    return {name: problem for name, problem in problems.items() if problem}


def check(shelf: Shelf, name: str, intervention: str, engine: str) -> None:
    of_scores = ("mask_", "keep_window", "stream_", "mean_query_bias")
    changes_scores = any(part.startswith(of_scores) for part in intervention.split("+"))
    if changes_scores and engine == "dense" and name in SCORES_NOT_CHANGEABLE:
        with pytest.raises(
            ModelError, match=r"attn_scores.* cannot be changed in this architecture"
        ):
            shelf.measured(name, intervention, engine)
        return
    try:
        reference = shelf.reference(name, intervention)
    except NotApplicable:
        with pytest.raises(ModelError):
            shelf.measured(name, intervention, engine)
        return
    measured = shelf.measured(name, intervention, engine)
    assert compare(measured, reference) == {}


# Completeness


def test_everything_that_is_registered_has_an_independent_definition() -> None:
    assert set(STATISTIC_DEFINITIONS) == set(STATISTICS)
    assert {*STATISTIC_DEFINITIONS, *VARIANT_DEFINITIONS} == set(STATISTICS_MEASURED)
    assert set(PROFILE_DEFINITIONS) == set(PROFILES)
    assert set(PREDICTION_DEFINITIONS) == set(PREDICTIONS)
    assert set(WEIGHT_DEFINITIONS) == set(WEIGHT_STATISTICS)
    assert set(INTERVENTIONS) == ALL_CHANGES


def test_the_reference_imports_nothing_that_it_checks() -> None:
    for file in (ROOT / "tests" / "reference").glob("*.py"):
        lines = file.read_text(encoding="utf-8").splitlines()
        imports = [line for line in lines if line.startswith(("import ", "from "))]
        assert not [line for line in imports if line.split()[1].startswith("headcount")], file.name


def test_every_intervention_changes_something(shelf: Shelf) -> None:
    plain = shelf.reference("gpt2", "none").heads
    for intervention in EVERY:
        heads = shelf.reference("gpt2", intervention).heads
        changed = max(
            float(np.nan_to_num(np.abs(heads[name] - plain[name]), nan=1).max())
            for name in ("entropy", "head_output_norm", "resid_post_norm")
        )
        assert (changed > 1e-3) == (intervention != "none"), intervention


@pytest.mark.parametrize("name", [*MODELS, "gpt2-mini", "backcopy-3l-mini"])
def test_the_reference_runs_models_as_their_library_does(shelf: Shelf, name: str) -> None:
    from transformers import AutoModelForCausalLM

    path, weights = shelf.path(name), shelf.weights(name)
    tokens, _, _ = sequences_of(shelf.d_vocab(name), N_CTX)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float64
    )
    with torch.inference_mode():
        output = model(torch.from_numpy(tokens).long(), output_attentions=True)
    for i, row in enumerate(tokens.tolist()):
        run = forward(weights, row)
        # Libraries keep angles of rotations, and some softmaxes, in float32.
        np.testing.assert_allclose(run.logits, output.logits[i], rtol=1e-5, atol=1e-5)
        for layer, pattern in zip(run.layers, output.attentions, strict=True):
            np.testing.assert_allclose(layer.pattern, pattern[i], atol=1e-5)


# Facts of a layer


CAP, SINK, SLOPES = 0.05, (0.5, -1.0, 2.0, 0.0), (0.5, 0.1, 0.02, 0.3)

FACTS: dict[str, dict[str, Any]] = {
    # The second half of the queries does not see key 0.
    "window": {"window": 6},
    "wide-window": {"window": 14, "slopes": SLOPES},
    "cap-sink": {"soft_cap": CAP, "sink": SINK},
    "all": {"window": 12, "soft_cap": CAP, "sink": SINK, "slopes": SLOPES},
}
OF_THE_BRIDGE = ("position_cosine_layer", "first_mlp_norm", "first_mlp_position_part")
"""Predictions that run the first layer once more in the bridge, which is not given these facts."""
UNDER_FACTS = {
    "gpt2": ("none", "mask_keys(0,1)", "zero_query_bias", "zero_head(0,1)"),
    "llama-gqa": ("none", "mask_keys(0,1)", "zero_head(0,1)"),
}


def with_facts(weights: Weights, facts: dict[str, Any], layers: Sequence[int]) -> Weights:
    """The same weights, some of whose layers have these facts."""
    of_reference = {"slopes": "distance_slopes"}
    fields = {
        of_reference.get(name, name): np.array(value) if isinstance(value, tuple) else value
        for name, value in facts.items()
    }
    changed = [
        replace(layer, **fields) if number in layers else layer
        for number, layer in enumerate(weights.layers)
    ]
    return replace(weights, layers=changed)


def give_facts(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], layers: Sequence[int]
) -> None:
    """Let the attention of some layers have these facts, as if the model had given them."""
    attend = _FusedPass.attend
    tensors = {
        name: torch.tensor(value) if isinstance(value, tuple) else value
        for name, value in facts.items()
    }

    def attend_with_facts(
        self: _FusedPass, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: AttentionFacts
    ) -> torch.Tensor:
        has_facts = self.layer in layers
        return attend(self, q, k, v, replace(given, **tensors) if has_facts else given)

    monkeypatch.setattr(_FusedPass, "attend", attend_with_facts)


@pytest.mark.parametrize("facts", FACTS)
@pytest.mark.parametrize(
    ("name", "intervention"),
    [(name, intervention) for name, those in UNDER_FACTS.items() for intervention in those],
)
def test_every_column_with_the_facts_of_a_layer(
    shelf: Shelf, name: str, facts: str, intervention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Made before, because its check compares with a model without the facts.
    shelf.replica(name, "fused", "float32")
    layers = range(len(shelf.weights(name).layers))
    give_facts(monkeypatch, FACTS[facts], layers)
    tokens, partner, labels = sequences_of(shelf.d_vocab(name), N_CTX)
    weights = with_facts(shelf.weights(name), FACTS[facts], layers)
    reference = reference_of(weights, tokens, intervention, partner, labels)
    measured = shelf.measured(name, intervention, "fused")
    problems = compare(measured, reference)
    assert {name: problems[name] for name in problems if name not in OF_THE_BRIDGE} == {}
    assert np.isnan(measured.heads["sink_gate"]).all() == ("sink" not in FACTS[facts])


def test_layers_that_differ_in_their_window_have_no_common_uniform_baseline_level(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.replica("llama-gqa", "fused", "float32")
    give_facts(monkeypatch, FACTS["window"], (1,))
    tokens, _, labels = sequences_of(shelf.d_vocab("llama-gqa"), N_CTX)
    weights = with_facts(shelf.weights("llama-gqa"), FACTS["window"], (1,))
    reference = reference_of(weights, tokens, labels=labels)
    measured = shelf.measured("llama-gqa", "none", "fused")
    for statistic_name in STATISTICS_MEASURED:
        np.testing.assert_allclose(
            measured.heads[statistic_name],
            reference.heads[statistic_name],
            rtol=1e-5,
            atol=1e-5,
            err_msg=statistic_name,
        )
    assert np.isnan(measured.heads["sink_mass_late"][:, 1]).all()
    assert not np.isnan(measured.heads["sink_mass_late"][:, 0]).any()
    assert np.isnan(measured.sequences["uniform_sink_mass"]).all()


def test_no_change_gives_attention_to_keys_behind_the_window(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.replica("llama-gqa", "fused", "float32")
    give_facts(monkeypatch, FACTS["window"], (0, 1))
    with pytest.raises(ScanError, match=r"layer 0 do not see: they see 6 keys; leave the layer"):
        shelf.measured("llama-gqa", "head_to_first(0,3)", "fused")
    with pytest.raises(ScanError, match="hides every key from query 6"):
        shelf.measured("llama-gqa", "mask_keys(1,6)", "fused")


# Comparison


EVERYWHERE = [
    *(("gpt2", intervention) for intervention in EVERY),
    *(("gpt2-mini", intervention) for intervention in TRAINED),
    *((name, intervention) for name in ON_EVERY_INTERVENTION for intervention in ONE_EACH),
]
LIKE_ANOTHER = ("attn-only-2l-mini", "neox")
"""Models whose changes act where those of `gpt2` or `llama-gqa` do, except A_FEW."""

OF_ONE_THING = (
    "backcopy-3l-mini", "legacy-pth", "gpt2-inverse-layer", "neox-serial", "qwen2", "qwen3",
    "phi", "gemma2", "bigcode", *OLDER,
)  # fmt: skip
"""Models that differ from another in one thing."""

IN_THE_BRIDGE = ("none", "mask_keys", "zero_head(0,1)")
"""Of A_FEW, those that show whether the bridge's hooks of an architecture are the ones meant."""


def cases(pairs: Iterable[tuple[str, str]], is_long: Callable[[str, str, str], bool]) -> list[Any]:
    """Pairs of a model and an intervention, in both engines."""
    return [
        pytest.param(*pair, engine, marks=[pytest.mark.long] if is_long(*pair, engine) else [])
        for pair in pairs
        for engine in ("fused", "dense")
    ]


@pytest.mark.parametrize(
    ("name", "intervention", "engine"),
    cases(
        EVERYWHERE,
        lambda name, intervention, engine: name in LIKE_ANOTHER and intervention not in A_FEW,
    ),
)
def test_every_column_under_every_intervention(
    shelf: Shelf, name: str, intervention: str, engine: str
) -> None:
    check(shelf, name, intervention, engine)


@pytest.mark.parametrize(
    ("name", "intervention", "engine"),
    cases(
        ((name, intervention) for name in OF_ONE_THING for intervention in A_FEW),
        lambda name, intervention, engine: engine == "dense" and intervention not in IN_THE_BRIDGE,
    ),
)
def test_models_that_differ_in_one_thing(
    shelf: Shelf, name: str, intervention: str, engine: str
) -> None:
    check(shelf, name, intervention, engine)


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_short_sequences(shelf: Shelf, name: str, n_ctx: int) -> None:
    for intervention in ("none", "mask_keys"):
        reference = shelf.reference(name, intervention, n_ctx)
        for engine in ("fused", "dense"):
            measured = shelf.measured(name, intervention, engine, n_ctx=n_ctx)
            assert compare(measured, reference) == {}, (engine, intervention)


@pytest.mark.parametrize("intervention", ["none", "mask_random_span", "patch_head(0,2)"])
def test_float64_leaves_no_more_than_the_rounding_of_what_is_stored(
    shelf: Shelf, intervention: str
) -> None:
    reference = shelf.reference("gpt2", intervention)
    for engine in ("fused", "dense"):
        measured = shelf.measured("gpt2", intervention, engine, "float64")
        assert compare(measured, reference, 1e-7) == {}, engine


@pytest.mark.parametrize(
    "name", ["gpt2", "bigcode", "attn-only-2l-mini", "neox", "llama-gqa", "opt", "gpt-neo", "bloom"]
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


def test_a_model_whose_layers_are_never_shown_is_an_error_and_not_undefined(
    tmp_path: Path,
) -> None:
    config = toy.family("OpenAIGPTConfig", n_embd=32, n_layer=2, n_head=4, n_positions=toy.N_CTX)
    path = toy.save_model(tmp_path, config)
    with pytest.raises((MeasureError, ModelError)):
        toy.measure(path, toy.repeating_tokens(9), engine="dense")


def test_masks_of_keys_leave_the_parts_of_a_score_alone(shelf: Shelf) -> None:
    """Layer 0 reads nothing that a mask of keys could change."""
    shares = ("sink_mass_shift_only", "sink_mass_content_only")
    plain, masked = (
        shelf.measured("gpt2-mini", name, "fused").heads for name in ("none", "mask_keys(-4,4)")
    )
    for name in shares:
        np.testing.assert_allclose(masked[name][:, 0], plain[name][:, 0], atol=1e-6)
    hidden = shelf.measured("gpt2-mini", "mask_keys", "fused").heads["sink_logit_margin"]
    assert np.isnan(hidden).all()
    assert not math.isnan(plain["sink_logit_margin"].max())
