"""A head and two nodes, each with a network, a host name, a /tmp of its own and no copy of the
code; only the store is shared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from queries.connection import connect
from schemas.run_directory import RunDirectory
from schemas.scan import load_scan
from tests.chaos import SCAN, compare, reference, rows_of
from tests.s3_server import S3Server

ROOT = Path(__file__).parent.parent
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
NETWORK = "10.77.41"
SEQUENCES = 800
CODE = ("schemas", "workers", "jobs", "queries", "models")


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass
class Machines:
    """One machine with the head and the store, two to measure."""

    environment: dict[str, str]
    folder: Path
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    head: str = f"{NETWORK}.1:6391"

    def start_node(self, number: int) -> None:
        """A machine of its own but for the kernel and the installed libraries."""
        name = f"hcnode{number}"
        sh("ip", "netns", "add", name)
        sh("ip", "link", "add", f"hcv{number}", "type", "veth", "peer", "name", f"hcw{number}")
        sh("ip", "link", "set", f"hcw{number}", "netns", name)
        sh("ip", "link", "set", f"hcv{number}", "master", "hcbridge", "up")
        address = f"{NETWORK}.{number + 1}"
        for command in (
            f"addr add {address}/24 dev hcw{number}", f"link set hcw{number} up", "link set lo up",
        ):  # fmt: skip
            sh("ip", "netns", "exec", name, "ip", *command.split())
        hidden = " && ".join(f"mount -t tmpfs tmpfs {ROOT / package}" for package in CODE)
        ray = " ".join(
            [
                *RAY,
                "start",
                f"--address={self.head}",
                f"--node-ip-address={address}",
                "--num-cpus=1",
                "--block",
            ]
        )
        script = f"hostname {name} && mount -t tmpfs tmpfs /tmp && {hidden} && cd / && exec {ray}"
        command = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", script]
        self.nodes[name] = self.start(name, command)

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """A process that writes to a log of its name."""
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill_node(self, name: str) -> None:
        """The machine is gone: every process of it, at once."""
        node = psutil.Process(self.nodes[name].pid)
        for process in [*node.children(recursive=True), node]:
            with contextlib.suppress(psutil.NoSuchProcess):  # Its parent's end may have ended it.
                process.kill()

    def scan(self, file: Path, out: str) -> subprocess.Popen[str]:
        """The user's command, on the head's machine."""
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "headcount",
            "scan",
            str(file),
            "--set",
            f"out={out}",
        ]
        return subprocess.Popen(
            [*command, "--replicas", "2", "--address", self.head],
            env=self.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


def _possible() -> str | None:
    if (
        not sys.platform.startswith("linux")
        or os.geteuid()
        or not all(map(shutil.which, ("ip", "unshare", "mount")))
    ):
        return "needs Linux, root, ip, unshare and mount"
    if " " in sys.executable or Path(sys.executable).is_relative_to("/tmp"):
        return (
            "Ray splits paths at spaces, and each machine has a /tmp of its own: Python lies there"
        )
    tried = subprocess.run(
        "ip netns add hctry && ip netns del hctry && unshare --mount mount -t tmpfs tmpfs /mnt",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return None if tried.returncode == 0 else f"no namespaces here ({tried.stderr.strip()})"


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    """The machines, up; taken down afterwards."""
    if (reason := _possible()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        for number in (1, 2):
            stack.callback(
                subprocess.run, ["ip", "netns", "del", f"hcnode{number}"], capture_output=True
            )
        stack.callback(subprocess.run, ["ip", "link", "del", "hcbridge"], capture_output=True)
        sh("ip", "link", "add", "hcbridge", "type", "bridge")
        sh("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "hcbridge")
        sh("ip", "link", "set", "hcbridge", "up")
        store = stack.enter_context(S3Server(host=f"{NETWORK}.1"))
        for name, value in store.env().items():
            monkeypatch.setenv(name, value)
        environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 32,
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        made = Machines(environment, tmp_path)
        # A socket's path has 107 bytes at most, and the tests' own directories are long where two
        # run at a time.
        short = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="hc", ignore_cleanup_errors=True)
        )
        head = [
            "start",
            "--head",
            f"--node-ip-address={NETWORK}.1",
            f"--port={made.head.rpartition(':')[2]}",
            "--num-cpus=0",
        ]
        head += [
            "--include-dashboard=false",
            f"--temp-dir={short}",
            "--block",
        ]
        started = made.start("head", [*RAY, *head])
        stack.callback(_kill, started)
        _answers(made, started)
        for number in (1, 2):
            made.start_node(number)
            stack.callback(_kill, made.nodes[f"hcnode{number}"])
        yield made


def _answers(machines: Machines, head: subprocess.Popen[bytes]) -> None:
    """Wait until the head takes connections."""
    host, _, port = machines.head.partition(":")
    until = time.monotonic() + 90
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            log = (machines.folder / "head.log").read_text()
            assert head.poll() is None, f"the head ended: {log}"
            assert time.monotonic() < until, f"no head in 90 seconds: {log}"
        time.sleep(0.2)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
    process.wait(30)


def test_machines_that_share_only_the_store(machines: Machines, tmp_path: Path) -> None:
    scan_file = tmp_path / "chaos.toml"
    scan_file.write_text(SCAN.replace("sequences = 95", f"sequences = {SEQUENCES}"))
    expected = reference(scan_file, tmp_path / "undisturbed")
    out = "s3://bucket/runs"
    run = RunDirectory.of(out, load_scan(scan_file).run_id("chaos"))
    driver = machines.scan(scan_file, out)
    wait_until(lambda: {c.host for c in run.commits()} == {"hcnode1", "hcnode2"}, driver, tmp_path)
    machines.kill_node("hcnode1")
    _, errors = driver.communicate(timeout=200)
    assert driver.returncode == 0, errors
    assert "Traceback" not in errors
    assert compare(rows_of(run), expected) == (0, 0, 0)
    counted = (
        connect(out).execute("SELECT count(*), count(DISTINCT sequence) FROM heads").fetchone()
    )
    assert counted == (len(expected), SEQUENCES)


def wait_until(condition: Callable[[], bool], driver: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 150
    while not condition():
        assert driver.poll() is None, driver.communicate()
        if time.monotonic() > deadline:
            driver.send_signal(signal.SIGABRT)  # Says where it stands.
            logs = {f.name: f.read_text()[-2000:] for f in folder.glob("*.log")}
            pytest.fail(f"no progress in 150 seconds: {driver.communicate()}, {logs}")
        time.sleep(0.1)
