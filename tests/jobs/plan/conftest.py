"""The model of scans whose tokens can be written down by hand."""

from pathlib import Path

import pytest

from tests.toys import toy_models as toy


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads bytes."""
    return toy.save_byte_model(tmp_path_factory.mktemp("plan") / "bytes")
