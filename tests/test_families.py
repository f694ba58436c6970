"""Every family of causal language models that transformers knows: measured right, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import model_families


@pytest.fixture(scope="module", autouse=True)
def _quiet_libraries() -> None:
    model_families.prepare_libraries()


@pytest.mark.parametrize("family", model_families.families())
def test_a_family_is_measured_as_transformers_computes_it_or_refused_in_one_line(
    tmp_path: Path, family: str
) -> None:
    row = model_families.family_row(family, tmp_path)
    assert row.difference < 1e-5, row
    assert row.engine == "fused" or row.reason
    assert "\n" not in row.line


def test_loading_a_model_installs_nothing() -> None:
    """TransformerLens installs torchvision for models that also see images, and torch with it."""
    from transformer_lens.model_bridge.sources.transformers import helpers, source

    from workers.model import loading

    loading._forbid_installs()
    assert not helpers._ensure_torchvision()
    assert source.load_modality_processor is loading._without_processor
