"""Every family of causal language models that transformers knows, held against models.md."""

from pathlib import Path
from typing import Any

import pytest

from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import describe, find_model
from tests.toys import model_families

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
    assert model.bridge_problem == "TransformerLens has no bridge for GPT2LMHeadModel"
    assert returned == [False, None]
    assert (helpers._ensure_torchvision, library.load_modality_processor) == own
