"""An allocation of Slurm: two machines on which `deploy/slurm.sh` runs a scan, while a third one
tries all their ports.

`python -m tests.tools.slurm FOLDER` is run like `tests/tools/machines.py`. The job is told to end
in the middle of the scan and put back into the queue, and ends when it runs again.
"""

import http.client
import json
import os
import pickle
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from http import HTTPStatus
from pathlib import Path

import grpc
import psutil

from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan_file import load_scan
from tests import ROOT
from tests.s3.s3_server import Rule, S3Server
from tests.tools.committed_rows import rows_of
from tests.tools.machines import (
    COMMIT_DELAY,
    NETWORK,
    OUT,
    PRIVATE,
    PROGRESS_SECONDS,
    PYTHON,
    ROWS_FILE,
    SCAN_FILE,
    Machines,
    address,
    private_directories,
)
from tests.tools.srun import on_node

JOB_ID = 4711
TAKEN = 21150
"""A port that is held on the second machine, of the hundred that this job would take."""


PORTS_DELAY = 10.0
"""How long each commit is held back while ports are tried, so that the job does not end before."""

SRUN = Path(__file__).parent / "srun.py"
COMMANDS = {
    "srun": [PYTHON, "-P", str(SRUN), "srun"],
    "scontrol": [PYTHON, "-P", str(SRUN), "scontrol"],
    "ray": [PYTHON, "-m", "ray.scripts.scripts"],
    "headcount": [PYTHON, "-m", "headcount"],
}
PATHS = ("/", "/metrics", "/api/jobs/", "/get_runtime_envs_info")
"""What a stranger asks for by HTTP."""

CALLS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "NodeManagerService/GetNodeStats",
    "ObjectManagerService/Pull",
    "ReporterService/HealthCheck",
    "CoreWorkerService/GetCoreWorkerStats",
    "RayletDriver/ClusterInfo",
)
"""And by gRPC: a call of each kind of process of Ray that changes nothing."""


def own_tmp(*kept: Path) -> str:
    """Shell commands that give a machine its own /tmp, in which some directories stay."""
    before = f"{PRIVATE}/tmp_before"
    commands = [f"mkdir {before}", f"mount --bind /tmp {before}", "mount -t tmpfs tmpfs /tmp"]
    for path in kept:
        if path.is_relative_to("/tmp"):
            there = shlex.quote(str(path))
            inside = shlex.quote(f"{before}/{path.relative_to('/tmp')}")
            commands.append(f"mkdir -p {there} && mount --bind {inside} {there}")
    return " && ".join(commands)


def network(pid: int) -> Path | None:
    """The network of a process; none of one that has ended, and that nobody has asked how."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/ns/net").readlink()
    return None


class Allocation(Machines):
    """Two machines with a /tmp each and all other files in common."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hosts = self.folder / "hosts"
        names = [f"{address(number)} hcnode{number}" for number in (1, 2)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        named = f"mount --bind {shlex.quote(str(hosts))} /etc/hosts"
        for number in (1, 2):
            tmp = own_tmp(self.folder, ROOT, Path(sys.prefix), Path(sys.base_prefix))
            self.start_machine(number, [private_directories(), named, tmp, "exec sleep infinity"])
        commands = self.folder / "commands"
        commands.mkdir()
        for name, words in COMMANDS.items():
            (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            (commands / name).chmod(0o755)
        os.environ |= {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PLAYED_NODES": json.dumps({name: node.pid for name, node in self.nodes.items()}),
            "PLAYED_QUEUE": str(self.folder / "queue"),
            "SLURM_JOB_ID": str(JOB_ID),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "hcnode[1-2]",
            "PLAYED_ADDRESS": address(1),
        }

    def sbatch(self, *words: str) -> subprocess.Popen[str]:
        """Start the batch script on the first machine."""
        script = on_node("hcnode1", self.folder, ["bash", str(ROOT / "deploy/slurm.sh"), *words])
        with self.log("job").open("a") as log:
            return subprocess.Popen(script, stdout=log, stderr=log, text=True)

    def processes(self) -> list[psutil.Process]:
        """What the job runs on the machines."""
        holders = {node.pid for node in self.nodes.values()}
        networks = {network(pid) for pid in holders}
        everything = [process for process in psutil.process_iter() if process.pid not in holders]
        return [process for process in everything if network(process.pid) in networks]

    def token(self) -> str:
        """The token of the job, which its processes have in their environment."""
        for process in self.processes():
            # It may have ended meanwhile.
            with suppress(psutil.Error):
                if token := process.environ().get("RAY_AUTH_TOKEN"):
                    return token
        raise AssertionError("no process of the job has a token")

    def check_nothing_is_left(self) -> None:
        """No process of the job, and no file of Ray, on either machine."""
        # The kernel takes a moment for those that were killed.
        _, left = psutil.wait_procs(self.processes(), timeout=5)
        assert not left, left
        for node in self.nodes.values():
            assert not Path(f"/proc/{node.pid}/root/tmp/headcount-{JOB_ID}").exists()


def open_ports(host: str) -> list[int]:
    """All TCP ports of a machine that take a connection."""
    found: list[int] = []
    for port in range(1, 1 << 16):
        with socket.socket() as probe:
            probe.settimeout(2)
            if probe.connect_ex((host, port)) == 0:
                found.append(port)
    return found


def http_answers(host: str, port: int) -> set[str]:
    """The statuses of what is answered by HTTP; none where no HTTP is spoken."""
    statuses: set[str] = set()
    for path in PATHS:
        connection = http.client.HTTPConnection(host, port, timeout=5)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            statuses.add(HTTPStatus(connection.getresponse().status).name)
    return statuses


def grpc_answers(host: str, port: int, token: str = "") -> set[str]:
    """What becomes of the calls."""
    codes: set[str] = set()
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for call in CALLS:
            try:
                channel.unary_unary(f"/ray.rpc.{call}")(
                    b"", timeout=5, metadata=(("authorization", f"Bearer {token}"),)
                )
                codes.add("OK")
            except grpc.RpcError as error:
                codes.add(error.code().name)
    return codes


def check_ports(host: str) -> int:
    """Only the job's ports are open, and they tell a stranger nothing; returns the first."""
    ports = [port for port in open_ports(host) if port != TAKEN]
    assert len(ports) >= len(CALLS), ports
    # A hundred that was free on both machines, and so not the first one that was asked for.
    (first,) = {port - port % 100 for port in ports}
    assert first > TAKEN, ports
    for port in ports:
        answers = http_answers(host, port), grpc_answers(host, port)
        by_http = ({"UNAUTHORIZED"}, {"UNAVAILABLE"})
        by_grpc: tuple[set[str], set[str]] = (set(), {"UNAUTHENTICATED", "UNIMPLEMENTED"})
        assert answers in (by_http, by_grpc), (port, answers)
    return first


def run_a_job_twice(folder: Path) -> None:
    """The job is stopped when both machines have committed, and ends when it runs again."""
    scan_file = folder / SCAN_FILE
    allocation = Allocation(folder)
    with S3Server(host=f"{NETWORK}.1") as store:
        os.environ |= store.env() | {"HOME": f"{PRIVATE}/home"}

        def hold_commits_back(seconds: float) -> None:
            store.set_rules(Rule({"delay": seconds}, path="/commits/", method="PUT", count=None))

        hold_commits_back(COMMIT_DELAY)
        scan = load_scan(scan_file)
        run = RunDirectory.of(OUT, scan.run_id(scan_file.stem))
        holder = subprocess.Popen(
            on_node("hcnode2", folder, [PYTHON, "-m", "http.server", str(TAKEN)]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        job = allocation.sbatch(SCAN_FILE, "--set", f"out={OUT}", "--replicas", "2")
        allocation.wait_until(
            lambda: {commit.host for commit in run.commits()} == set(allocation.nodes), job
        )
        hold_commits_back(PORTS_DELAY)
        (first,) = {check_ports(address(number)) for number in (1, 2)}
        # The calls themselves are right: who has the token gets an answer.
        assert "OK" in grpc_answers(address(1), first, allocation.token())
        holder.terminate()
        holder.wait()
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) == 128 + signal.SIGTERM
        assert (folder / "queue").read_text() == str(JOB_ID)
        allocation.check_nothing_is_left()

        n_before = len(list(run.commits()))
        store.set_rules()
        job = allocation.sbatch(SCAN_FILE, "--set", f"out={OUT}", "--replicas", "2")
        assert job.wait(timeout=PROGRESS_SECONDS) == 0
        allocation.check_nothing_is_left()
        assert 2 <= n_before < len(list(run.commits()))
        (folder / ROWS_FILE).write_bytes(pickle.dumps(rows_of(run.path)))


if __name__ == "__main__":
    run_a_job_twice(Path(sys.argv[1]))
