"""Every family of causal language models that transformers knows, held against models.md."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headcount
from headcount.workers.loading import load_model
from headcount.workers.model.info.description import describe, find_model
from headcount.workers.replica import Replica
from tests.toys import model_families
from tests.toys.toy_models import toy_scan

EXPECTED = model_families.expected_answers()
"""What docs/reference/models.md says of each family."""

IN_TEST = ("gpt2", "llama", "gpt_neox", "gemma2", "mistral", "gpt_oss", "openai-gpt", "mamba")
"""One of each kind: positions added and rotated, grouped, capped, with a window; and one refused.

`make long` tries the others.
"""


@pytest.fixture(scope="module", autouse=True)
def _quiet_libraries() -> None:
    model_families.prepare_libraries()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in IN_TEST else [pytest.mark.long])
        for family in model_families.families()
    ],
)
def test_a_family_is_measured_as_transformers_computes_it_or_refused_as_its_page_says(
    tmp_path: Path, family: str
) -> None:
    row = model_families.family_row(family, tmp_path)
    assert row.difference < 1e-5, row
    assert row.answer == EXPECTED.get(family, "no row: run python -m tests.toys.model_families")


WITH_OTHER_SENSES = (
    "fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "moss_transcribe_diarize",
)  # fmt: skip
"""Families whose models also see images or hear, and have a language model inside."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("gemma3", "llama") else [pytest.mark.long])
        for family in (*IN_TEST, *WITH_OTHER_SENSES)
    ],
)
def test_a_loaded_model_gets_the_rows_or_the_refusal_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    saved: Any = model_families.tiny_model(family)
    saved.save_pretrained(family)
    loaded: Any = AutoModelForCausalLM.from_pretrained(family)
    names = ["sink_mass", "entropy", "value_norm"]
    tokens = model_families._tokens()
    scan = {"model": family, "n_ctx": tokens.shape[1], "sequences": 2, "statistics": names}
    try:
        info = describe(Path(family))
        replica = Replica(info, toy_scan(**scan), "cpu")
        expected = replica.measure(tokens).heads
    except headcount.Error as error:
        with pytest.raises(headcount.Error) as told:
            headcount.measure(loaded, tokens, names)
        reasons = [str(each).partition(": ")[2] for each in (told.value, error)]
        assert reasons[0] == reasons[1]  # Behind the place that it names.
        return
    rows = headcount.measure(loaded, tokens, names)
    for name in names:
        in_order = expected[name].swapaxes(0, 1).ravel()
        in_order = in_order[~np.isnan(in_order)]
        np.testing.assert_allclose(rows[name].drop_null(), in_order, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["gemma4_text", pytest.param("gemma4", marks=pytest.mark.long)])
def test_the_cap_of_logits_counts_wherever_the_config_has_it(tmp_path: Path, family: str) -> None:
    saved: Any = model_families.tiny_model(family)
    saved.config.get_text_config().final_logit_softcapping = 5.0
    with torch.no_grad():
        saved.get_output_embeddings().weight.mul_(30)
    saved.save_pretrained(tmp_path)
    tokens = model_families._tokens()
    scan = toy_scan(model=str(tmp_path), n_ctx=tokens.shape[1], predictions=["loss"])
    losses = Replica(describe(tmp_path), scan, "cpu").measure(tokens).tables["sequences"]["loss"]
    ids = torch.from_numpy(tokens).long()
    with torch.inference_mode():
        logits = saved(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    np.testing.assert_allclose(losses, expected.view(2, -1).mean(1), rtol=1e-5)


def test_the_page_has_the_families_of_transformers_and_no_others() -> None:
    assert list(EXPECTED) == model_families.families()
    engines = [answer.split("|")[1].strip() for answer in EXPECTED.values()]
    assert set(engines) <= set(model_families.ENGINES)
    assert engines.count("fused") >= 140


def test_loading_a_model_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerLens installs torchvision for models that also see images, and torch with it."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources.transformers import helpers, source

    library: Any = source

    returned: list[object] = []

    def boot(*_: object, **__: object) -> None:
        returned.append(helpers._ensure_torchvision())
        returned.append(library.load_modality_processor("a model"))
        raise NotImplementedError

    monkeypatch.setattr(TransformerBridge, "boot_transformers", boot)
    own = (helpers._ensure_torchvision, library.load_modality_processor)
    model = load_model(describe(find_model("bundled:gpt2-mini")), "raw", "cpu")
    assert model.bridge().problem == "TransformerLens has no bridge for GPT2LMHeadModel"
    assert returned == [False, None]
    assert (helpers._ensure_torchvision, library.load_modality_processor) == own
