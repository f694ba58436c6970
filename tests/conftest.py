"""The order of files, caches of the tests' own, and commands that can be interrupted."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell starts what runs in the background deaf to interrupts, and commands inherit that; those
# that tests start must hear them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST_FILES = (
    "test_faults.py",
    "test_cluster.py",
    "test_controls.py",
    "test_remote.py",
    "test_reference.py",
    "test_reproduce.py",
    "test_dispatch.py",
    "test_compact.py",
    "test_machine.py",
    "test_runs.py",
    "test_families.py",
    "test_corpus_preparation.py",
    "test_report.py",
    "test_bench.py",
    "test_extension.py",
    "test_explore.py",
    "test_kernel.py",
    "test_damage.py",
    "test_preemption.py",
    "test_metrics.py",
    "test_queries.py",
    "test_packaging.py",
    "test_measured_heads.py",
    "test_stores.py",
)
"""They come first, so that no worker begins a long file when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files before all others."""
    places = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


# The modules and tests that are collected stay for good. The collector would look through these two
# million objects again and again: while they are made, in every test, and twice at the end.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect the garbage of the tests alone from now on."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what queries remember of files out of the user's caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    # Published models, where there are any, stay where they are.
    os.environ.setdefault("HF_HOME", str(Path(caches) / "huggingface"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="session", autouse=True)
def _own_place_of_ray() -> Iterator[None]:
    """Keep Ray's sessions out of the directory that all users of this machine share.

    Ray notes there which cluster was started last, in a file that only its owner may write.
    """
    # Sockets lie in it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="hc-", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_TMPDIR"] = directory
        yield


# It is for processes that tests start, and Debian's Python has a module of this name already.
collect_ignore = ["faults/sitecustomize.py"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread, and afterwards on as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
