"""A head and two nodes, each with a network, a host name, processes and temporary files of its own,
and no copy of the code. They share the store and nothing else.

`python -m tests.tools.machines FOLDER` runs in namespaces of its own, where it may mount and set up
networks (`tests/jobs/run/test_cluster.py` makes them). They end with it, so nothing stays on this
machine, and two of these can run at once with the same addresses. It finds a scan in the folder and
leaves the rows there. It needs neither PyTorch nor Ray itself, which take seconds to import.
"""

import os
import pickle
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headcount.queries.ask.asking import open_runs
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan_file import load_scan
from tests import ROOT
from tests.s3.s3_server import Rule, S3Server
from tests.tools.committed_rows import rows_of

NETWORK = "10.77.41"
HEAD = f"{NETWORK}.1:6391"
OUT = "s3://bucket/runs"
COMMIT_DELAY = 3.0
"""How long the store holds each commit back until both machines have committed. The run is so short
that the first machine would otherwise end it before the second one is there.
"""
HEAD_SECONDS = 90
PROGRESS_SECONDS = 400

PRIVATE = "/run"
"""Every machine mounts an empty directory here. Ray's sockets, temporary files, the home directory
and a link to this Python lie in it: Ray splits the paths of programs at spaces, and this one has
none.
"""
PYTHON = f"{PRIVATE}/environment/bin/{Path(sys.executable).name}"
RAY = [PYTHON, "-m", "ray.scripts.scripts", "start", "--block", "--include-log-monitor=false"]
SCAN_FILE = "chaos.toml"
ROWS_FILE = "rows.pickle"
"""Names in the folder."""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def private_directories(*hidden: Path) -> str:
    """Shell commands that give a machine its private directory, and hide others from it."""
    tools = shlex.quote(str(Path(sys.executable).parent.parent))
    commands = [f"mount -t tmpfs tmpfs {shlex.quote(str(path))}" for path in hidden]
    commands += [
        "mount -t tmpfs tmpfs /dev/shm",
        f"mount -t tmpfs tmpfs {PRIVATE}",
        f"mkdir {PRIVATE}/ray {PRIVATE}/tmp {PRIVATE}/home",
        f"ln -s {tools} {PRIVATE}/environment",
    ]
    return " && ".join(commands)


def address(number: int) -> str:
    """The address of a machine that measures."""
    return f"{NETWORK}.{number + 1}"


@dataclass
class Machines:
    """One machine with the head and the store, two to measure."""

    folder: Path
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "hcbridge", "type", "bridge")
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "hcbridge")
        run("ip", "link", "set", "hcbridge", "up")
        run("sh", "-c", private_directories())

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start_head(self) -> None:
        """Start the head, and wait until it takes connections."""
        host, _, port = HEAD.partition(":")
        options = ["--head", f"--node-ip-address={host}", f"--port={port}", "--num-cpus=0"]
        # Nobody starts machines that are missing: there are none.
        options += ["--no-monitor", "--include-dashboard=false", f"--temp-dir={PRIVATE}/ray"]
        with self.log("head").open("w") as log:
            head = subprocess.Popen([*RAY, *options], stdout=log, stderr=log)
        deadline = time.monotonic() + HEAD_SECONDS
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                printed = self.log("head").read_text()
                assert head.poll() is None, f"the head ended: {printed}"
                assert time.monotonic() < deadline, f"no head in {HEAD_SECONDS} s: {printed}"
            time.sleep(0.2)

    def start_node(self, number: int) -> None:
        """Start a machine that shares only the kernel and the installed libraries with the head."""
        options = [f"--address={HEAD}", f"--node-ip-address={address(number)}", "--num-cpus=1"]
        hidden = [ROOT / "headcount", self.folder]
        steps = [private_directories(*hidden), "cd /", f"exec {shlex.join([*RAY, *options])}"]
        self.start_machine(number, steps, "--pid", "--fork", "--kill-child", "--mount-proc")

    def start_machine(self, number: int, steps: list[str], *isolation: str) -> None:
        """Run shell commands on a machine with a network, a name and mounts of its own."""
        name = f"hcnode{number}"
        device = f"hcw{number}"
        steps = [
            "echo unshared",
            "read -r the_device_is_there",
            f"ip addr add {address(number)}/24 dev {device}",
            f"ip link set {device} up",
            "ip link set lo up",
            f"hostname {name}",
            *steps,
        ]
        log = self.log(name).open("w")
        node = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", *isolation, "sh", "-c", " && ".join(steps)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        assert node.stdin is not None
        assert node.stdout is not None
        # A network device can be given to a machine only when its network is there.
        assert node.stdout.readline() == b"unshared\n", self.log(name).read_text()
        run("ip", "link", "add", f"hcv{number}", "type", "veth", "peer", "name", device)
        run("ip", "link", "set", device, "netns", str(node.pid))
        run("ip", "link", "set", f"hcv{number}", "master", "hcbridge", "up")
        node.stdin.write(b"\n")
        node.stdin.flush()
        self.nodes[name] = node

    def lose_node(self, name: str) -> None:
        self.nodes[name].kill()
        self.nodes[name].wait()

    def scan(self, scan_file: Path) -> subprocess.Popen[str]:
        command = [PYTHON, "-m", "headcount", "scan", str(scan_file)]
        options = ["--set", f"out={OUT}", "--replicas", "2", "--address", HEAD]
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *options], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)

    def wait_until(self, condition: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + PROGRESS_SECONDS
        while not condition():
            assert driver.poll() is None, driver.communicate()
            assert time.monotonic() < deadline, f"no progress in {PROGRESS_SECONDS} s"
            time.sleep(0.5)


def lose_a_machine_in_the_middle_of_a_scan(folder: Path) -> None:
    """Both machines measure, one is lost, and the other one measures the rest."""
    scan_file = folder / SCAN_FILE
    machines = Machines(folder)
    with S3Server(host=f"{NETWORK}.1") as store:
        os.environ |= store.env() | {
            "HOME": f"{PRIVATE}/home",
            "TMPDIR": f"{PRIVATE}/tmp",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 32,
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        store.set_rules(Rule({"delay": COMMIT_DELAY}, path="/commits/", method="PUT", count=None))
        machines.start_head()
        machines.start_node(1)
        machines.start_node(2)
        scan = load_scan(scan_file)
        scanned_run = RunDirectory.of(OUT, scan.run_id(scan_file.stem))
        driver = machines.scan(scan_file)
        machines.wait_until(
            lambda: {commit.host for commit in scanned_run.commits()} == {"hcnode1", "hcnode2"},
            driver,
        )
        machines.lose_node("hcnode1")
        store.set_rules()
        _, errors = driver.communicate(timeout=200)
        assert driver.returncode == 0, errors
        assert "Traceback" not in errors, errors
        committed_rows = rows_of(scanned_run.path)
        counts = open_runs(OUT).rows("SELECT count(*), count(DISTINCT sequence) FROM heads")
        heads = sum(table == "heads" for table, *_ in committed_rows)
        assert counts == [(heads, scan.sequences)]
        (folder / ROWS_FILE).write_bytes(pickle.dumps(committed_rows))


if __name__ == "__main__":
    lose_a_machine_in_the_middle_of_a_scan(Path(sys.argv[1]))
