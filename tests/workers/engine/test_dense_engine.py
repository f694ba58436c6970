"""The dense engine in layers with windows, capped scores and learned sinks: against a float64
recomputation from the files, against transformers' eager attention and against the fused engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headcount.schemas.errors import ModelError, ScanError
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.profiles import PROFILES
from headcount.schemas.scans.intervention import parse_intervention
from headcount.workers.interventions.settlement import settle
from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import describe
from headcount.workers.replica import InterventionMeasurements, Replica
from tests.reference.weights import Weights, read_gemma2, read_llama, read_tensors
from tests.toys import model_families
from tests.toys import toy_models as toy
from tests.workers.engine.test_reference import WITH_OPTIONS, compare, reference_of, sequences_of

pytestmark = pytest.mark.usefixtures("one_thread")

N_CTX = 21
WINDOW, CAP = 6, 0.5

MODELS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: toy.family("MistralConfig", sliding_window=WINDOW, num_key_value_heads=2),
    "gemma2": lambda: toy.family(
        "Gemma2Config",
        head_dim=8,
        num_key_value_heads=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 2,
        attn_logit_softcapping=CAP,
        final_logit_softcapping=None,
    ),
    "gpt-oss": lambda: model_families.tiny_config("gpt_oss"),
}


class Shelf:
    """Models and their replicas, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cache  # noqa: B019
    def path(self, name: str) -> Path:
        return toy.save_model(self.root / name, MODELS[name]())

    @cache  # noqa: B019
    def weights(self, name: str) -> Weights:
        """The weights as the reference reads them, with the facts of their layers."""
        path = self.path(name)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        tensors = read_tensors(path)
        if name == "mistral":
            weights, soft_cap = read_llama(name, config, tensors), None
        else:
            weights = read_gemma2(name, config | {"attn_logit_softcapping": None}, tensors)
            soft_cap = CAP
        layers = [replace(layer, window=WINDOW, soft_cap=soft_cap) for layer in weights.layers]
        return replace(weights, layers=layers)

    @cache  # noqa: B019
    def replica(self, name: str, engine: str) -> Replica:
        curves = [profile for profile in PROFILES if PROFILES[profile].axis != "pair"]
        scan = toy.toy_scan(
            model=str(self.path(name)), n_ctx=N_CTX, engine=engine, precision="float32",
            statistics=["all", *WITH_OPTIONS], profiles=list(PROFILES), curves=curves,
            predictions=list(PREDICTIONS),
        )  # fmt: skip
        return Replica(describe(self.path(name)), scan, "cpu")

    def measured(self, name: str, intervention: str, engine: str) -> InterventionMeasurements:
        tokens, partner, labels = sequences_of(toy.D_VOCAB, N_CTX)
        replica = self.replica(name, engine)
        return replica.measure(tokens, parse_intervention(intervention), labels, partner)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("intervention", ["none", "mask_keys(0,1)", "swap_first_key(3)"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_every_column_of_layers_with_windows_and_caps(
    shelf: Shelf, name: str, intervention: str
) -> None:
    tokens, partner, labels = sequences_of(toy.D_VOCAB, N_CTX)
    reference = reference_of(shelf.weights(name), tokens, intervention, partner, labels)
    assert compare(shelf.measured(name, intervention, "dense"), reference) == {}


@pytest.mark.parametrize("intervention", ["none", "mask_keys(2,1)", "zero_head(0,1)"])
def test_both_engines_agree_on_learned_sinks(shelf: Shelf, intervention: str) -> None:
    fused, dense = (
        shelf.measured("gpt-oss", intervention, engine) for engine in ("fused", "dense")
    )
    for table, columns in fused.tables.items():
        for name, values in columns.items():
            np.testing.assert_allclose(
                dense.tables[table][name], values, rtol=1e-5, atol=1e-5, err_msg=name
            )
    for field, aggregates in fused.means.items():
        for name, aggregate in aggregates.items():
            np.testing.assert_allclose(
                dense.means[field][name].mean, aggregate.mean, rtol=1e-5, atol=1e-5, err_msg=name
            )
    assert (dense.heads["sink_gate"] > 0).all()


def test_learned_sinks_are_those_of_eager_attention(shelf: Shelf) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        shelf.path("gpt-oss"),
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float64,
    )
    tokens, _, _ = sequences_of(toy.D_VOCAB, N_CTX)
    with torch.inference_mode():
        patterns = model(torch.from_numpy(tokens).long(), output_attentions=True).attentions
    heads = shelf.measured("gpt-oss", "none", "dense").heads
    windows = [model_families.WINDOW, N_CTX]
    for layer, (pattern, window) in enumerate(zip(patterns, windows, strict=True)):
        expected = {
            "sink_mass": pattern[..., 1:window, 0].mean(-1),
            "previous_token_score": pattern.diagonal(-1, -2, -1).mean(-1),
            "entropy": -torch.special.xlogy(pattern, pattern).sum(-1).mean(-1),
            "sink_gate": 1 - pattern.sum(-1).mean(-1),
        }
        for name, values in expected.items():
            np.testing.assert_allclose(heads[name][:, layer], values, atol=1e-5, err_msg=name)


def test_changes_stay_within_the_window(shelf: Shelf) -> None:
    model = shelf.replica("mistral", "dense").model
    with pytest.raises(ScanError, match="hides every key from query 6"):
        # Refused before anything runs, because no query sees a key before these six.
        settle(model, toy.toy_scan(n_ctx=N_CTX, interventions=["mask_keys(1,6)"]), "cpu")
    settle(model, toy.toy_scan(n_ctx=N_CTX, interventions=["mask_keys(1,5)"]), "cpu")
    with pytest.raises(ScanError, match="hides every key from query 6"):
        shelf.measured("mistral", "mask_keys(1,6)", "dense")
    with pytest.raises(ScanError, match=r"layer 0 do not see: they see 6 keys; leave the layer"):
        shelf.measured("mistral", "head_to_first(0,3)", "dense")


@pytest.mark.parametrize(
    "family",
    [
        "bamba",  # has a layer that does not attend
        "bitnet",  # norms what its attention writes
        "codegen",  # rotates in a function of its own, and TransformerLens shows nothing of it
        "gptj",
        "modernbert-decoder",  # TransformerLens shows scores that are not those behind its pattern
    ],
)
def test_both_engines_agree_on_other_families(tmp_path: Path, family: str) -> None:
    path = tmp_path / family
    model_families.tiny_model(family).save_pretrained(path)  # pyright: ignore[reportCallIssue]
    tokens = toy.repeating_tokens(9)
    fused, dense = (toy.measure(path, tokens, engine=engine) for engine in ("fused", "dense"))
    assert fused.heads.keys() == dense.heads.keys()
    for name, values in fused.heads.items():
        np.testing.assert_allclose(dense.heads[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


def test_z_that_the_layer_norms_is_not_changed(tmp_path: Path) -> None:
    model_families.tiny_model("bitnet").save_pretrained(tmp_path / "bitnet")  # pyright: ignore[reportCallIssue]
    replica = toy.replica(tmp_path / "bitnet", engine="dense")
    with pytest.raises(ModelError, match="shows z of layer 0 only after the layer has changed it"):
        replica.measure(toy.repeating_tokens(9), "zero_head(0,1)")


def test_what_transformerlens_hides_is_named(tmp_path: Path) -> None:
    model_families.tiny_model("nanochat").save_pretrained(tmp_path / "m")  # pyright: ignore[reportCallIssue]
    model = load_model(describe(tmp_path / "m"), "raw", "cpu")
    with pytest.raises(ModelError) as caught:
        model.shown_facts(0)
    assert str(caught.value).startswith(
        "m: the scores of layer 0 could not be made as 0.3536 · q·k"
    )
    assert str(caught.value).endswith("; TransformerLens hides the q and k that are multiplied")
