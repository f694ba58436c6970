"""A small run that most questions are asked of, and that none of them changes."""

from pathlib import Path

import pytest

from headcount.queries.ask.asking import RunDatabase, open_runs
from tests.toys.toy_runs import write_run


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_run(path, "a-1", {"sink_mass": lambda row: 0.1 + row.head, "entropy": lambda row: None})
    return path


@pytest.fixture(scope="session")
def database(small: Path) -> RunDatabase:
    """One connection for the queries that leave no trace."""
    return open_runs(small)
