"""The order of files, how long a test may take, caches of the tests' own, and commands that can be
interrupted.
"""

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.doctest import DoctestModule

# A shell starts what runs in the background deaf to interrupts, and commands inherit that; those
# that tests start must hear them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CPU_LIMIT = 3.0
"""Seconds of a processor after which a test belongs to the long ones."""
MODULE_SECONDS = 0.005
"""What a test may take for each module that it is the first to import."""
LOOP_SECONDS = 0.04
"""What the loop of `slowness` takes where CPU_LIMIT holds as it stands."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the largest files first: no worker begins one of them when the others have ended.

    Order by measured seconds would end a hundredth earlier.
    """
    items.sort(key=lambda item: (-item.path.stat().st_size, str(item.path)))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[Any], list[Any]]:
    """Look for doctests only in the files that have some: the others are imported for nothing."""
    collectors = yield
    if file_path.suffix != ".py" or ">>>" in file_path.read_text(encoding="utf-8"):
        return collectors
    return [one for one in collectors if not isinstance(one, DoctestModule)]


def cpu_seconds() -> float:
    """Seconds of a processor that this process and its ended children have taken.

    Commands of tests are children of the fork server, whose own start is no test's.
    """
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    server = forkserver._forkserver._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    if server is not None:
        with contextlib.suppress(psutil.Error):
            commands = psutil.Process(server).cpu_times()
            seconds += getattr(commands, "children_user", 0) + getattr(
                commands, "children_system", 0
            )
    return seconds


def slowness() -> float:
    """How many times longer this machine takes now, at least 1."""
    began = time.process_time()
    sum(number * number for number in range(1_000_000))
    return max(1.0, (time.process_time() - began) / LOOP_SECONDS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let a test fail that takes long and is not marked so."""
    before, modules = cpu_seconds(), len(sys.modules)
    yield
    seconds = cpu_seconds() - before - MODULE_SECONDS * (len(sys.modules) - modules)
    is_of_make_test = item.config.option.markexpr == "not long"
    if seconds > CPU_LIMIT and is_of_make_test:
        factor = slowness()
        if seconds > CPU_LIMIT * factor:
            took = f"{seconds / factor:.1f} s of a processor"
            pytest.fail(f"{took}: more than {CPU_LIMIT:.0f} is `long`", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the files that took longest."""
    of_files: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                of_files[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"seconds by file, {sum(of_files.values()):.0f} in all")
    for name, seconds in sorted(of_files.items(), key=lambda pair: -pair[1])[:15]:
        terminalreporter.write_line(f"{seconds:7.1f} s  {name}")


# The modules and tests that are collected stay for good. The collector would look through these two
# million objects again and again: while they are made, in every test, and twice at the end.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect the garbage of the tests alone from now on."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what commands remember of files and of code out of the user's caches.

    The processes that test at once have one memory.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    # Published models, where there are any, stay where they are.
    os.environ.setdefault("HF_HOME", str(Path(caches) / "huggingface"))
    base = tmp_path_factory.getbasetemp()
    own = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["XDG_CACHE_HOME"] = str(own / "caches")


@pytest.fixture(scope="session", autouse=True)
def _own_place_of_ray() -> Iterator[None]:
    """Keep Ray's sessions out of the directory that all users of this machine share.

    Ray notes there which cluster was started last, in a file that only its owner may write.
    """
    # Sockets lie in it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="hc-", ignore_cleanup_errors=True) as directory:
        os.environ["RAY_TMPDIR"] = directory
        yield


# They are for processes that tests start. Debian's Python has a module of the first name already,
# and the second needs another environment.
collect_ignore = ["faults/sitecustomize.py", "kvpress/compare.py", "vllm/compare.py"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread, and afterwards on as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
