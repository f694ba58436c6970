"""The model of tests that measure."""

from pathlib import Path

import pytest

from tests.toys import toy_models as toy


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of four heads."""
    return toy.save_model(tmp_path_factory.mktemp("models") / "gpt2", toy.gpt2())
