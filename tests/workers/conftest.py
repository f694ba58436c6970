"""Toy models that the files of this folder share."""

import pytest

from tests.toys.toy_models import Shelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("models"))
