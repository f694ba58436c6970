"""The dense engine in layers with windows, capped scores and learned sinks: against a float64
recomputation from the files, against transformers' eager attention and against the fused engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.schemas.errors import ModelError, ScanError
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.profiles import PROFILES
from headcount.workers.interventions.settlement import settle
from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import describe
from headcount.workers.replica import InterventionMeasurements
from tests.reference.weights import Weights, read_gemma2, read_llama, read_tensors
from tests.toys import model_families
from tests.toys import toy_models as toy
from tests.workers.engine.test_reference import (
    ASKED,
    FORWARD_PROFILES,
    compare,
    reference_of,
    sequences_of,
)

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
}


def path_of(shelf: toy.Shelf, name: str) -> Path:
    path = shelf.root / f"narrow-{name}"
    return path if path.exists() else toy.save_model(path, MODELS[name]())


def weights_of(path: Path, soft_cap: float | None) -> Weights:
    """The weights as the reference reads them, with the facts of their layers."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    read = read_llama if soft_cap is None else read_gemma2
    weights = read(path.name, config | {"attn_logit_softcapping": None}, read_tensors(path))
    layers = [replace(layer, window=WINDOW, soft_cap=soft_cap) for layer in weights.layers]
    return replace(weights, layers=layers)


def measured(
    shelf: toy.Shelf, name: str, intervention: str, engine: str
) -> InterventionMeasurements:
    tokens, partner, labels = sequences_of(toy.D_VOCAB, N_CTX)
    curves = [profile for profile in FORWARD_PROFILES if PROFILES[profile].axis != "pair"]
    replica = toy.replica(
        path_of(shelf, name), n_ctx=N_CTX, engine=engine, precision="float32",
        statistics=ASKED, profiles=FORWARD_PROFILES, curves=curves,
        predictions=list(PREDICTIONS),
    )  # fmt: skip
    return replica.measure(tokens, intervention, labels, partner)


@pytest.mark.parametrize("intervention", ["none", "mask_keys(0,1)", "swap_first_key(3)"])
@pytest.mark.parametrize(("name", "soft_cap"), [("mistral", None), ("gemma2", CAP)])
def test_every_column_of_layers_with_windows_and_caps(
    shelf: toy.Shelf, name: str, soft_cap: float | None, intervention: str
) -> None:
    tokens, partner, labels = sequences_of(toy.D_VOCAB, N_CTX)
    weights = weights_of(path_of(shelf, name), soft_cap)
    reference = reference_of(weights, tokens, intervention, partner, labels)
    assert compare(measured(shelf, name, intervention, "dense"), reference) == {}


def test_changes_stay_within_the_window(shelf: toy.Shelf) -> None:
    model = load_model(describe(path_of(shelf, "mistral")), "raw", "cpu")
    with pytest.raises(ScanError, match="hides every key from query 6"):
        # Refused before anything runs, because no query sees a key before these six.
        settle(model, toy.toy_scan(n_ctx=N_CTX, interventions=["mask_keys(1,6)"]), "cpu")
    settle(model, toy.toy_scan(n_ctx=N_CTX, interventions=["mask_keys(1,5)"]), "cpu")
    for engine in ("fused", "dense"):
        with pytest.raises(ScanError, match="hides every key from query 6"):
            measured(shelf, "mistral", "mask_keys(1,6)", engine)
        with pytest.raises(ScanError, match=r"layer 0 do not see: they see 6 keys; leave the laye"):
            measured(shelf, "mistral", "head_to_first(0,3)", engine)


@pytest.mark.parametrize(
    ("family", "intervention"),
    [
        ("bamba", "none"),  # has a layer that does not attend
        ("bitnet", "none"),  # norms what its attention writes
        # Rotates in a function of its own, and TransformerLens shows nothing of it.
        ("codegen", "none"),
        ("gptj", "none"),
        # Has learned sinks, behind some keys that are hidden.
        ("gpt_oss", "mask_keys(2,1)"),
        # TransformerLens shows scores that are not those behind its pattern.
        ("modernbert-decoder", "none"),
    ],
)
def test_both_engines_agree_on_other_families(
    tmp_path: Path, family: str, intervention: str
) -> None:
    path = tmp_path / family
    model_families.tiny_model(family).save_pretrained(path)  # pyright: ignore[reportCallIssue]
    tokens = toy.repeating_tokens(19)
    fused, dense = (
        toy.replica(path, engine=engine).measure(tokens, intervention)
        for engine in ("fused", "dense")
    )
    assert fused.heads.keys() == dense.heads.keys()
    for name, values in fused.heads.items():
        np.testing.assert_allclose(dense.heads[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
    if family == "gpt_oss":
        assert (dense.heads["sink_gate"] > 0).all()
    if family == "bitnet":
        refusal = "shows z of layer 0 only after the layer has changed it"
        with pytest.raises(ModelError, match=refusal):
            toy.replica(path, engine="dense").measure(tokens, "zero_head(0,1)")


def test_what_transformerlens_hides_is_named(tmp_path: Path) -> None:
    model_families.tiny_model("nanochat").save_pretrained(tmp_path / "m")  # pyright: ignore[reportCallIssue]
    model = load_model(describe(tmp_path / "m"), "raw", "cpu")
    with pytest.raises(ModelError) as caught:
        model.shown_facts(0)
    assert str(caught.value).startswith(
        "m: the scores of layer 0 could not be made as 0.3536 · q·k"
    )
    assert str(caught.value).endswith("; TransformerLens hides the q and k that are multiplied")
