"""Clusters of machines, as `tests/tools/machines.py` and `tests/tools/slurm.py` make them."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools.chaos import SCAN, reference
from tests.tools.committed_rows import compare
from tests.tools.machines import ROWS_FILE, SCAN_FILE

PROGRAMS = ("ip", "mount", "nsenter", "setpriv", "unshare")


def namespaces() -> list[str]:
    """A command line that runs another one in namespaces of its own.

    It ends when this process ends, however that happens, and the kernel then ends everything in the
    namespaces. An ordinary user is given a user namespace, in which mounting is allowed.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [
        "setpriv", "--pdeathsig", "KILL", "unshare", *user, "--net", "--mount", "--uts", "--pid",
        "--fork", "--kill-child", "--mount-proc",
    ]  # fmt: skip


def missing() -> str | None:
    """Why this machine cannot do it, if so."""
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"needs the programs {', '.join(absent)}"
    needed = "mount -t tmpfs tmpfs /run && ip link add hcbridge type bridge"
    tried = subprocess.run([*namespaces(), "sh", "-c", needed], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces here ({tried.stderr.strip()})"


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["machines", "slurm"])
def test_rows_are_complete_on_machines(scenario: str, tmp_path: Path) -> None:
    """Of machines that share only the store one is lost; an allocation of Slurm is taken back."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    scan_file = tmp_path / SCAN_FILE
    scan_file.write_text(SCAN)
    # A Ray that was started in this process has left its token there.
    variables = {k: value for k, value in os.environ.items() if not k.startswith("RAY_AUTH_")}
    ended = subprocess.run(
        [*namespaces(), sys.executable, "-m", f"tests.tools.{scenario}", str(tmp_path)],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=500,
    )
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert ended.returncode == 0, "\n".join([ended.stdout, ended.stderr, *logs])
    expected_rows = reference(scan_file, tmp_path / "undisturbed")
    assert compare(pickle.loads((tmp_path / ROWS_FILE).read_bytes()), expected_rows) == (0, 0, 0)
