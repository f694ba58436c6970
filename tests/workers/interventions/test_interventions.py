"""Interventions: what `test_reference`, which judges their values, cannot say.

What is refused, in which order changes are made and what they may read, that weights come back,
seeds and partners, what is undefined under a change, and which engine and precision measure it.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headcount.schemas.errors import MeasureError, ModelError, ScanError
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.scans.scan import FASTEST_ACCEPTABLE
from headcount.schemas.statistics import STATISTICS
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.interventions import (
    INTERVENTIONS,
    bind,
    changed_weights,
    intervention,
    intervention_registry,
    needs_partners,
)
from headcount.workers.interventions.settlement import Settlement, settle
from headcount.workers.interventions.sinks import keep_heavy_keys
from headcount.workers.loading import load_model
from headcount.workers.model.info.description import describe
from headcount.workers.model.model import Model
from headcount.workers.replica import InterventionMeasurements
from tests.toys import toy_models as toy

TOKENS = toy.repeating_tokens(13, batch=5)
PARTNER = (TOKENS * 7 + 1) % toy.D_VOCAB
Paths = dict[str, Path]
Replicas = Callable[..., toy.TextReplica]
Register = Callable[..., None]
both_engines = pytest.mark.parametrize("engine", ["fused", "dense"])


MODELS = {
    "gpt2": "gpt2", "llama": "llama-gqa", "legacy": "legacy-safetensors", "opt": "opt",
    "mistral": "mistral-window-6",
}  # fmt: skip
"""The Llama has grouped queries, the legacy file no MLPs, the MLP of OPT is no module, and queries
of the Mistral see six keys.
"""


@pytest.fixture
def paths(shelf: toy.Shelf) -> Paths:
    return {name: shelf.path(model) for name, model in MODELS.items()}


OURS = "headcount.workers.interventions"  # a module whose functions are registered at once


@pytest.fixture
def replicas(shelf: toy.Shelf) -> Replicas:
    """Replicas by model and engine, each made once."""
    outputs = ["final_logits", "losses"]
    return lambda name, engine="fused": shelf.replica(MODELS[name], engine, predictions=outputs)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Registers interventions for one test."""
    monkeypatch.setattr(intervention_registry, "INTERVENTIONS", copy(INTERVENTIONS))

    def register_all(*functions: Callable[..., Any]) -> None:
        for function in functions:
            function.__module__ = OURS
            intervention(function)

    return register_all


def model_of(path: Path) -> Model:
    return load_model(describe(path), "raw", "cpu")


def difference(first: InterventionMeasurements, second: InterventionMeasurements) -> float:
    """The largest difference of a statistic, relative where values are large."""
    return max(
        float(np.nan_to_num(np.abs(x - y) / (1 + np.abs(y))).max())
        for x, y in ((first.heads[name], second.heads[name]) for name in toy.FORWARD_STATISTICS)
    )


def assert_same(first: InterventionMeasurements, second: InterventionMeasurements) -> None:
    """To the last bit."""
    for columns in ("heads", "sequences"):
        for name, values in getattr(first, columns).items():
            np.testing.assert_array_equal(values, getattr(second, columns)[name])


# What a scan holds


def test_a_scan_writes_the_canonical_text_of_its_interventions() -> None:
    texts = ["none", "scale_query_bias(1e+3)", "zero_inactive_heads(entropy,.25,raw)"]
    scan = toy.toy_scan(interventions=texts)
    canonical = ["none", "scale_query_bias(1000)", "zero_inactive_heads(entropy,0.25,raw)"]
    assert scan.record["interventions"] == canonical
    same = toy.toy_scan(interventions=canonical)
    assert (scan, scan.fingerprint) == (same, same.fingerprint)


CANNOT_HAVE = """
llama|swap_effective_positions|no position embeddings
llama|first_position_second|no W_pos for first_position_second
llama|zero_query_bias+zero_positions|no pos_embed for zero_positions to change
llama|zero_query_bias|layer 0 has no b_Q for zero_query_bias to change
llama|mean_query_bias|mean_query_bias: queries are rotated, and their bias with them
legacy|zero_mlp(0)|no mlp_out for zero_mlp to change
legacy|zero_mlps|no mlp_out for zero_mlps to change
gpt2|keep_window(1,0)+mask_keys|hides every key from query 1; leave each query a key
gpt2|mask_keys(1,39)+mask_keys|hides every key from query 1; leave each query a key
mistral|head_to_first(0,3)|layer 0 do not see: they see 6 keys; leave the laye
gpt2|patch_head(1,2)|partner sequences, and none are given
gpt2|ideal_backcopy(0,1)|reads which tokens are labelled, and no labels are given
gpt2|blend_position(39)|position: expected at most 38 (the model's last but one), got 39
"""
"""A model, an intervention, and why it cannot be made there."""


@both_engines
def test_what_a_model_or_a_sequence_does_not_have_is_refused(
    replicas: Replicas, engine: str
) -> None:
    for line in CANNOT_HAVE.strip().splitlines():
        name, text, problem = line.split("|")
        with pytest.raises((ModelError, ScanError)) as caught:
            replicas(name, engine).measure(TOKENS, text)
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)


def test_weights_that_a_dose_overflows_are_named(paths: Paths, tmp_path: Path) -> None:
    name = "transformer.h.0.attn.c_attn.bias"

    def enlarge(path: Path) -> None:
        toy.change_weights(path, lambda weights: weights[name].fill_(1e38))

    huge = toy.copy_of(paths["gpt2"], tmp_path / "m", enlarge)
    with pytest.raises(MeasureError, match=f"{name} holds numbers that are NaN or infinite"):
        toy.replica(huge).measure(TOKENS, "scale_query_bias(1000000)")


# Order, and what changes read


def test_changes_are_made_in_their_order(replicas: Replicas) -> None:
    replica = replicas("gpt2")

    def measured(text: str) -> InterventionMeasurements:
        return replica.measure(TOKENS, text, partner=PARTNER)

    halved = measured("scale_query_bias(0.5)")
    assert_same(measured("scale_query_bias(0.25)+scale_query_bias(2)"), halved)
    assert_same(measured("scale_query_bias(1)"), measured("none"))
    scaled_before = measured("scale_first_position(3)+first_position_second")
    assert_same(scaled_before, measured("first_position_second"))
    scaled_after = measured("first_position_second+scale_first_position(3)")
    assert difference(scaled_after, scaled_before) > 1e-3
    both = measured("zero_head(1,2)+zero_head(1,0)").heads["head_output_norm"]
    assert (both[:, 1] == 0).all(0).tolist() == [True, False, True, False]
    # The run on the partner has the other changes, so the head is zero there, too.
    for text in ("patch_head(1,2)+zero_head(1,2)", "zero_head(1,2)+patch_head(1,2)"):
        assert_same(measured(text), measured("zero_head(1,2)"))


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
    norms = z.norm(dim=-1) + q.norm(dim=-1) + pattern.entropy().transpose(1, 2)
    return attn_out * norms.mean(-1)[..., None]


def test_of_earlier_keys_that_tie_the_first_is_evicted() -> None:
    ln = math.log

    def kept(rows: list[list[float]], heavy: int, recent: int) -> list[list[int]]:
        changed = keep_heavy_keys(torch.tensor(rows)[None, None], heavy=heavy, recent=recent)
        return [row.nonzero()[:, 0].tolist() for row in changed[0, 0].isfinite().tril()]

    # Keys 0 and 1 have 11/8 each.
    tie = [[0.0, -9, -9, -9], [ln(1), ln(3), -9, -9], [ln(1), ln(5), ln(2), -9], [0.0] * 4]
    assert kept(tie, heavy=1, recent=2) == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(
    ("name", "changes"),
    # A rotated model's queries are changed in the bridge alone, and the bridge shows no scores of a
    # legacy one.
    [("gpt2", "q scores z out z+out"), ("llama", "scores z"), ("legacy", "q z out")],
)
def test_changes_read_what_their_layer_has_known_before(
    replicas: Replicas, register: Register, name: str, changes: str
) -> None:
    register(lean_q, lean_scores, lean_z, lean_out)
    fused, dense = replicas(name), replicas(name, "dense")
    unchanged = fused.measure(TOKENS)
    for change in changes.split():
        text = "+".join(f"lean_{part}" for part in change.split("+"))
        changed = fused.measure(TOKENS, text)
        assert changed.method.engine == "fused"
        assert difference(changed, dense.measure(TOKENS, text)) < 1e-5
        assert difference(changed, unchanged) > 1e-3


def test_a_change_that_reads_what_is_not_known_yet_is_refused() -> None:
    def early(v: Tensor, z: Tensor) -> None: ...
    def at_once(q: Tensor, k: Tensor) -> None: ...
    def elsewhere(b_Q: Tensor, tokens: Tensor) -> None: ...
    def nothing(logits: Tensor) -> None: ...
    def zero_head(z: Tensor) -> None: ...

    for change, problem in (
        (early, "unknown thing that a change of v reads 'z'"),
        (at_once, "unknown thing that a change of q reads 'k'"),
        (elsewhere, "unknown thing that a change of b_Q reads 'tokens'"),
        (nothing, "unknown target 'logits'"),
        (zero_head, "'zero_head' is defined twice"),
    ):
        change.__module__ = OURS
        with pytest.raises(ValueError, match=problem):
            intervention_registry.intervention(change)


# Weights come back


def flatten_queries(W_Q: Tensor) -> Tensor:
    """The query weights are set to zero."""
    return torch.zeros_like(W_Q)


def spoil_query_bias(b_Q: Tensor) -> Tensor:
    """The query bias is infinite."""
    return torch.full_like(b_Q, torch.inf)


def break_off(W_V: Tensor, layer: int) -> Tensor:
    """The first layer is changed, the second one raises."""
    if layer == 1:
        raise MeasureError("on purpose")
    return W_V * 2


def weights_of(replica: toy.TextReplica) -> dict[str, bytes]:
    weights = replica.model.bare.state_dict()
    return {name: weight.numpy().tobytes() for name, weight in weights.items()}


@both_engines
@pytest.mark.parametrize("name", ["gpt2", "llama", "legacy"])
def test_a_change_of_a_weight_is_measured_and_undone(
    replicas: Replicas, register: Register, name: str, engine: str
) -> None:
    register(flatten_queries, spoil_query_bias, break_off)
    replica = replicas(name, engine)
    weights, before = weights_of(replica), replica.measure(TOKENS)
    changed = replica.measure(TOKENS, "flatten_queries").heads
    # Less their bias, queries are zero. Where there is no bias, attention is uniform.
    assert np.isnan(changed["sink_position_cosine"]).all()
    assert (changed["query_norm"] > 0).all() == (name != "llama")
    if name == "llama":
        uniform = np.log(np.arange(TOKENS.shape[1]) + 1).mean()
        np.testing.assert_allclose(changed["entropy"], uniform, rtol=1e-5)
    else:
        with pytest.raises((MeasureError, ModelError), match=r"layer 0"):
            replica.measure(TOKENS, "spoil_query_bias")
    with pytest.raises(MeasureError, match="on purpose"):
        replica.measure(TOKENS, "break_off")
    assert weights_of(replica) == weights
    assert_same(replica.measure(TOKENS), before)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("zero_query_bias", "transformer.h.0.attn.c_attn.bias"),
        ("first_position_second", "transformer.wpe.weight"),
    ],
)
def test_weights_that_are_not_restored_are_an_error(paths: Paths, text: str, name: str) -> None:
    model, change = model_of(paths["gpt2"]), bind(parse_intervention(text))
    with torch.inference_mode(), changed_weights(model, change):
        pass
    module, _, weight = name.rpartition(".")
    owner = model.bare.get_submodule(module)
    original = getattr(owner, weight)
    with (
        pytest.raises(ModelError, match=f"{name} was not restored after {text}"),
        torch.inference_mode(),
        changed_weights(model, change),
    ):
        # The engine reads a copy from now on: the change stays in it.
        setattr(owner, weight, torch.nn.Parameter(original.clone(), requires_grad=False))


# Partners


def test_every_sequence_has_its_own_partner(paths: Paths, replicas: Replicas) -> None:
    replica, text = replicas("gpt2"), "patch_head(1,2)"
    plain = replica.measure(TOKENS)
    assert_same(replica.measure(TOKENS, text, partner=TOKENS), plain)
    assert_same(replica.measure(TOKENS, partner=PARTNER), plain)
    small_batches = toy.replica(paths["gpt2"], predictions=["losses"], batch_size=2)
    losses = [r.measure(TOKENS, text, partner=PARTNER).sequences for r in (replica, small_batches)]
    np.testing.assert_allclose(losses[0]["losses"], losses[1]["losses"], atol=1e-6)


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
    assert shard_of(family).partner is None  # Nothing reads it.
    np.testing.assert_array_equal(layout.partner, twin.tokens)
    np.testing.assert_array_equal(twin.partner, layout.tokens)
    # BOS A X1 X2 B C X1 X2 D A X1 X2: they differ in the last A alone.
    assert (layout.tokens != twin.tokens).nonzero()[1].tolist() == [9] * 4


# Undefined queries and keys


def zero_queries(q: Tensor) -> Tensor:
    """Queries are zero."""
    return torch.zeros_like(q)


def zero_first_key(k: Tensor) -> Tensor:
    """The first key is zero."""
    return torch.cat([torch.zeros_like(k[:, :1]), k[:, 1:]], dim=1)


def zero_first_query(q: Tensor) -> Tensor:
    """Query 0 alone is zero."""
    return torch.cat([torch.zeros_like(q[:, :1]), q[:, 1:]], dim=1)


@both_engines
def test_the_cosine_of_a_vector_of_zeros_is_null(
    replicas: Replicas, register: Register, engine: str
) -> None:
    register(zero_queries, zero_first_key, zero_first_query)
    null = {
        "none": set[str](),
        "zero_queries": {"sink_key_cosine", "earlier_key_cosine"},
        "zero_first_key": {"sink_key_cosine"},
        "zero_first_query": {"sink_key_cosine"},
    }
    cosines = [s for s in STATISTICS if STATISTICS[s].unit == "cosine"]
    for text, expected in null.items():
        heads = replicas("gpt2", engine).measure(TOKENS, text).heads
        assert {s for s in cosines if np.isnan(heads[s][:, 0]).all()} == expected
        assert {s for s in cosines if np.isnan(heads[s]).any()} == expected


@both_engines
def test_weights_that_are_not_numbers_are_an_error_under_a_mask_too(
    paths: Paths, tmp_path: Path, engine: str
) -> None:
    def spoil(weights: dict[str, Tensor]) -> None:
        weights["transformer.h.1.attn.c_attn.bias"][0] = torch.nan

    spoilt = toy.copy_of(paths["gpt2"], tmp_path / "m", lambda p: toy.change_weights(p, spoil))
    replica = toy.replica(spoilt, engine=engine, statistics=["sink_logit_margin"])
    with pytest.raises(MeasureError, match="layer 1, head 0: sink_logit_margin is not finite for"):
        replica.measure(TOKENS, "mask_keys")


# Settlement of engine and precision


def settled(model: Model, device: str, **changes: Any) -> Settlement:
    return settle(model, toy.toy_scan(**changes), device)


def test_what_hides_every_key_of_a_window_is_refused_before_anything_runs(paths: Paths) -> None:
    model = model_of(paths["mistral"])
    settled(model, "cpu", interventions=["mask_keys(1,5)"])
    with pytest.raises(ScanError, match="hides every key from query 6"):
        settled(model, "cpu", interventions=["mask_keys(1,6)"])


def test_auto_is_the_fastest_precision_that_every_intervention_can_have(paths: Paths) -> None:
    llama = model_of(paths["llama"])
    for device, fastest in FASTEST_ACCEPTABLE.items():
        fused_only = settled(llama, device, interventions=["none", "zero_first_value"])
        assert fused_only.precision == fastest
        bridged = settled(llama, device, interventions=["none", "swap_first_key(5)"])
        assert bridged.precision == "float32"
        engines = {str(i): settlement.engine for i, settlement in bridged.interventions.items()}
        assert engines == {"none": "fused", "swap_first_key(5)": "dense"}
        assert settled(llama, device, precision="bfloat16").precision == "bfloat16"
        for changes in ({"engine": "dense"}, {"weight_processing": "folded"}):
            assert settled(llama, device, **changes).precision == "float32"


def test_methods_say_engine_precision_attention_and_built_layers(replicas: Replicas) -> None:
    expected = {
        "none": ("fused", "tiles", []),
        "swap_first_key(5)": ("dense", "matrix", []),
        "zero_head(1,2)": ("fused", "tiles", []),
        "head_to_first(1,3)": ("fused", "tiles", [1]),
        "zero_entropy_sinks(0.8,0.5)": ("fused", "tiles", [0, 1]),
        "mask_keys": ("fused", "tiles", [0, 1]),
    }
    for text, told in expected.items():
        method = replicas("llama").measure(TOKENS, text).method
        assert (method.engine, method.attention, method.built_layers) == told
        assert (method.intervention, method.precision) == (text, "float32")


def test_activations_are_changed_in_every_precision(paths: Paths, replicas: Replicas) -> None:
    exact = replicas("gpt2").measure(TOKENS, "zero_head(1,2)")
    low = toy.replica(paths["gpt2"], precision="bfloat16").measure(TOKENS, "zero_head(1,2)")
    assert (low.method.engine, low.method.precision) == ("fused", "bfloat16")
    assert (low.heads["head_output_norm"][:, 1, 2] == 0).all()
    assert 0 < np.abs(low.heads["sink_mass"] - exact.heads["sink_mass"]).max() < 0.05
    with pytest.raises(ScanError, match="does not compute in bfloat16"):
        toy.replica(paths["llama"], precision="bfloat16").measure(TOKENS, "swap_first_key(5)")


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ({"soft_cap": 30.0}, "a soft cap"),
        ({"window": 5}, "a window"),
        ({"sink": torch.zeros(4)}, "learned sinks"),
    ],
    ids=str,
)
def test_a_mean_of_the_query_bias_is_refused_where_scores_are_not_all(
    paths: Paths, fact: dict[str, Any], words: str
) -> None:
    gpt2 = model_of(paths["gpt2"])
    settled(gpt2, "cpu", interventions=["mean_query_bias"])
    # Facts that a layer of GPT-2 does not have, although it has a query bias.
    gpt2._attention.facts[2] = replace(gpt2._attention.facts[2], **fact)
    with pytest.raises(ModelError, match=f"mean_query_bias: layer 2 has {words}, and it is"):
        settled(gpt2, "cpu", interventions=["mean_query_bias"])
