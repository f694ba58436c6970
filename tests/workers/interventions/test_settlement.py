"""Which engine and which precision: settled once for a whole scan, and refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headcount.schemas.errors import ModelError, RunError, ScanError
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.scans.precision import FASTEST_ACCEPTABLE
from headcount.workers.interventions import edited_weights
from headcount.workers.interventions.settlement import Settlement, check_begun, settle
from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import describe
from headcount.workers.model.model import Model
from tests.toys import toy_models as toy


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("llama"), toy.family("LlamaConfig"))


@pytest.fixture(scope="module")
def llama(llama_path: Path) -> Model:
    return load_model(describe(llama_path), "raw", "cpu")


@pytest.fixture
def gpt2(tmp_path: Path) -> Model:
    return load_model(describe(toy.save_model(tmp_path, toy.gpt2())), "raw", "cpu")


def settled(model: Model, device: str, **changes: Any) -> Settlement:
    return settle(model, toy.toy_scan(**changes), device)


def test_auto_is_the_fastest_precision_that_every_intervention_can_have(
    llama: Model,
) -> None:
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


def test_a_precision_that_an_intervention_cannot_have_is_refused_in_one_line(
    llama: Model, llama_path: Path
) -> None:
    changes: dict[str, Any] = {
        "precision": "bfloat16",
        "interventions": ["none", "swap_first_key(5)"],
    }
    message = (
        r"^precision: swap_first_key\(5\) is measured by the dense engine \(k is edited before its "
        r"rotation\), which does not compute in bfloat16; set precision = 'auto', 'float32' or "
        "'float64'$"
    )
    with pytest.raises(ScanError, match=message):
        settled(llama, "cuda", **changes)
    # A replica refuses before it measures anything.
    with pytest.raises(ScanError, match=message):
        toy.replica(llama_path, **changes)
    assert settled(llama, "cuda", **changes | {"precision": "float64"}).precision == "float64"


def test_methods_say_engine_precision_attention_and_built_layers(llama_path: Path) -> None:
    replica, tokens = toy.replica(llama_path), toy.repeating_tokens(9)
    names = ["none", "swap_first_key(5)", "head_to_first(1,3)", "mask_keys"]
    methods = [replica.measure(tokens, name).method for name in names]
    assert [method.intervention for method in methods] == names
    assert [(method.engine, method.attention, method.built_layers) for method in methods] == [
        ("fused", "tiles", []),
        ("dense", "matrix", []),
        ("fused", "tiles", [1]),
        ("fused", "tiles", [0, 1]),
    ]
    assert {method.precision for method in methods} == {"float32"}


def test_what_the_model_does_not_have_is_refused_when_it_is_settled(llama: Model) -> None:
    with pytest.raises(ScanError, match=r"layer 7 of .*, which has 2"):
        settled(llama, "cpu", interventions=["zero_head(7,0)"])
    with pytest.raises(ModelError, match="no b_Q for zero_query_bias to edit"):
        settled(llama, "cpu", interventions=["zero_query_bias"])
    with pytest.raises(ScanError, match="keeps no key"):
        settled(llama, "cpu", interventions=["keep_window(0,0)"])


def test_a_run_goes_on_in_the_precision_it_was_begun_in() -> None:
    check_begun(frozenset(), "float32", "toy", "cpu")
    check_begun(frozenset({"float32"}), "float32", "toy", "cpu")
    with pytest.raises(RunError, match="toy: begun in float32, and precision = 'auto' means tf32"):
        check_begun(frozenset({"float32"}), "tf32", "toy", "cuda")


@pytest.mark.parametrize("text", ["zero_query_bias", "first_position_second"])
def test_weights_that_are_not_restored_are_an_error(gpt2: Model, text: str) -> None:
    names = {
        "zero_query_bias": "transformer.h.0.attn.c_attn.bias",
        "first_position_second": "transformer.wpe.weight",
    }
    edit = toy.bound(text)
    with torch.inference_mode(), edited_weights(gpt2, edit):
        pass
    module, _, weight = names[text].rpartition(".")
    owner = gpt2.bare.get_submodule(module)
    original = getattr(owner, weight)
    with (
        pytest.raises(ModelError, match=f"{names[text]} was not restored after {text}"),
        torch.inference_mode(),
        edited_weights(gpt2, edit),
    ):
        # The engine reads a copy from now on: the edit stays in it.
        setattr(owner, weight, torch.nn.Parameter(original.clone(), requires_grad=False))


def test_one_intervention_has_one_text() -> None:
    texts = {
        "scale_query_bias(0.50)": "scale_query_bias(0.5)",
        "scale_query_bias(1.0)+none": "scale_query_bias(1)+none",
        "zero_head(1, 02)": "zero_head(1,2)",
        "scale_query_bias(1e+3)": "scale_query_bias(1000)",
        "zero_inactive_heads(entropy,.25,raw)": "zero_inactive_heads(entropy,0.25,raw)",
        "none()": "none",
    }
    for text, canonical in texts.items():
        assert str(parse_intervention(text)) == canonical
        assert parse_intervention(canonical) == parse_intervention(text)
    for text in ("", "none+", "zero_head(1", "zero_head(1,,2)", "zero head", "a(b(1))"):
        with pytest.raises(ScanError, match=r"expected NAME, NAME\(1,0.5\) or A\+B, got"):
            parse_intervention(text)


def test_a_scan_holds_interventions_and_writes_their_canonical_text() -> None:
    scan = toy.toy_scan(interventions=["none", "scale_query_bias(0.50)"])
    assert scan.interventions[1] == parse_intervention("scale_query_bias(0.5)")
    assert scan.record["interventions"] == ["none", "scale_query_bias(0.5)"]
    same = toy.toy_scan(interventions=["none", "scale_query_bias(0.5)"])
    assert (scan, scan.fingerprint) == (same, same.fingerprint)
    with pytest.raises(ScanError, match=r"interventions: expected at least one name, each once"):
        toy.toy_scan(interventions=["scale_query_bias(0.5)", "scale_query_bias(0.50)"])
    with pytest.raises(ScanError, match=r"interventions\.1: expected NAME.* got 'none\+'"):
        toy.toy_scan(interventions=["none", "none+"])


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
    gpt2: Model, fact: dict[str, Any], words: str
) -> None:
    settled(gpt2, "cpu", interventions=["mean_query_bias"])
    # Facts that a layer of GPT-2 does not have, although it has a query bias.
    gpt2._attention.facts[2] = replace(gpt2._attention.facts[2], **fact)
    with pytest.raises(ModelError) as caught:
        settled(gpt2, "cpu", interventions=["mean_query_bias"])
    assert f"mean_query_bias: layer 2 has {words}, and this edit is defined for" in str(
        caught.value
    )
