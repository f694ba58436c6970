"""Runs as jobs of a real Ray cluster that wants a token: submitted twice, stopped, resumed; what
goes wrong is one line.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from headcount.jobs.cluster import kubernetes_job
from headcount.jobs.cluster.job_interpreter import INTERPRETER
from headcount.jobs.cluster.ray_cluster import hook_variables
from headcount.jobs.cluster.submission import staged_code
from headcount.jobs.job_state import PREFIX
from headcount.jobs.plan.plan import make_plan, replan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.plan.scan_files import portable_scan
from headcount.jobs.run.dispatch import FIRST_COMMIT
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan_file import load_scan
from tests import ROOT
from tests.plugins.files import DELIMITERS
from tests.tools.chaos import FAULTS, halt_after_commits
from tests.tools.processes import (
    DIES_WITH_ITS_PARENT,
    Command,
    Ended,
    free_port,
    libraries_alone,
)
from tests.toys.commands import error_of
from tests.toys.toy_runs import write_run

PATIENCE_SECONDS = 240
"""How long a test waits for what always comes, on a machine that does other things, too."""
TOKEN = "a-token-of-this-test-and-no-other"
SECRET = "what-nobody-may-read-in-a-log"
SHARDS = 8
SEQUENCES = 2 * SHARDS

SCAN = f"""
model = "bundled:gpt2-mini"
n_ctx = 64
sequences = {SEQUENCES}
sequences_per_shard = 2
[input]
family = "repeated_random"
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray head of its own, with its dashboard; yields the dashboard's address."""
    directory = tempfile.mkdtemp(prefix="hc-")  # Sockets lie in it, and their paths must be short.
    dashboard = free_port()
    url = f"http://127.0.0.1:{dashboard}"
    options = {
        "node-ip-address": "127.0.0.1", "port": free_port(), "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard, "dashboard-agent-listen-port": free_port(),
        "ray-client-server-port": free_port(), "num-cpus": 2, "include-log-monitor": "false",
        "object-store-memory": 100_000_000, "temp-dir": directory,
    }  # fmt: skip
    # As on a machine of a cluster: no copy of this project but the one that a job brings.
    programs = libraries_alone(Path(directory) / "venv") / "bin"
    # As where the environment of a head was not activated: `python` is another one.
    others = Path(directory) / "others"
    others.mkdir()
    (others / "python").write_text("#!/bin/sh\necho this is another Python\nexit 3\n")
    (others / "python").chmod(0o755)
    command = [*DIES_WITH_ITS_PARENT, str(programs / "python"), "-m", "ray.scripts.scripts"]
    command += ["start", "--head", "--block", "--disable-usage-stats", "--no-monitor"]
    command += [f"--{name}={value}" for name, value in options.items()]
    env = environment() | {"PATH": os.pathsep.join([str(others), "/usr/bin", "/bin"])}
    # Workers that nobody has asked for would import Ray for nothing.
    env["RAY_prestart_worker_first_driver"] = "0"
    log = Path(directory) / "head.log"
    with log.open("w") as out:
        head = psutil.Popen(command, cwd=directory, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not answers(url):
            assert head.poll() is None, f"the head died: {log.read_text()}"
            assert time.monotonic() < deadline, f"no dashboard in a minute: {log.read_text()}"
            time.sleep(0.1)
        yield url
    finally:
        started = [head, *head.children(recursive=True)]
        head.terminate()
        _, alive = psutil.wait_procs(started, timeout=1)
        for process in alive:
            # It may have ended by itself meanwhile.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive)
        shutil.rmtree(directory, ignore_errors=True)


def answers(url: str) -> bool:
    token = {"Authorization": f"Bearer {TOKEN}"}
    try:
        request = urllib.request.Request(f"{url}/api/version", headers=token)
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status == 200
    except (OSError, http.client.HTTPException):
        return False


def environment(token: str | None = TOKEN) -> dict[str, str]:
    """This one, with a token and without what points to another cluster."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return env | ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {})


def start(*words: str, token: str | None = TOKEN, **variables: str) -> Command:
    return Command(*words, environment=environment(token) | variables, directory=ROOT)


def headcount(*words: str, token: str | None = TOKEN, **variables: str) -> Ended:
    """Run a command to its end."""
    ended = start(*words, token=token, **variables).ended(PATIENCE_SECONDS)
    assert "Traceback" not in ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
    return ended


def told(*words: str, token: str | None = TOKEN, **variables: str) -> tuple[str, str]:
    """What a command that ends well prints on stdout and on stderr, stripped."""
    code, out, errors = headcount(*words, token=token, **variables)
    assert code == 0, errors
    return out.strip(), errors.strip()


def refused(*words: str, token: str | None = TOKEN, **variables: str) -> str:
    """The one line that a refused command says."""
    code, out, errors = headcount(*words, token=token, **variables)
    assert (code, out, len(errors.splitlines())) == (2, "", 1), errors
    assert errors.startswith("error: ")
    return errors.strip()


@pytest.fixture
def scan_file(tmp_path: Path) -> Path:
    path = tmp_path / "far.toml"
    path.write_text(SCAN)
    return path


@pytest.mark.long
def test_what_only_the_driver_finds_out_is_an_error_of_submit_and_said_by_status(
    cluster: str, tmp_path: Path
) -> None:
    texts, at = tmp_path / "texts.jsonl", ("--address", cluster)
    texts.write_text(json.dumps({"text": "one two three"}) + "\n")
    scan_file = tmp_path / "short.toml"
    fields = f"out = '{tmp_path}/runs'\ninput = {{ family = 'text', files = '{texts}' }}\n"
    scan_file.write_text(SCAN.partition("[input]")[0] + fields)
    code, _, errors = headcount("submit", str(scan_file), *at)
    assert code == 2
    refusal = "the corpus holds 0 sequences"
    run = RunDirectory.of(f"{tmp_path}/runs", load_scan(scan_file).run_id("short"))
    assert refusal in errors, errors
    said = told("status", str(run.path), *at)[0]
    assert re.search(rf"^job +FAILED: .*{refusal}", said, re.MULTILINE)
    status = json.loads(told("status", str(run.path), "--format", "json", *at)[0])
    assert status["job"] == "FAILED"
    assert refusal in status["job_error"]
    assert "this run never began" in refused("resume", str(run.path), *at)


@pytest.mark.long
def test_a_plug_in_goes_with_the_job_and_with_the_one_that_resumes_it(
    cluster: str, tmp_path: Path
) -> None:
    plugin, at = tmp_path / "my_heads.py", ("--address", cluster)
    plugin.write_text(DELIMITERS)
    scan_file = tmp_path / "own.toml"
    fields = f"out = '{tmp_path}/runs'\n"
    fields += 'statistics = ["previous_delimiter_mass"]\n[input]'
    scan_file.write_text(SCAN.replace("[input]", fields))
    name, _ = told("submit", str(scan_file), "--plugin", str(plugin), *at)
    plugin.unlink()
    run = RunDirectory.of(f"{tmp_path}/runs", name)
    assert told("logs", name, "-f", *at)[1] == f"{name}: SUCCEEDED"
    (digest,) = run.manifest().plugins.values()
    assert run.plugin_file(digest).read_bytes() == DELIMITERS.encode()
    check_every_row_is_there_once(run)
    # The run goes on from what it keeps: the file is gone.
    run.complete_file.unlink()
    shutil.rmtree(str(run.commits_directory))
    told("resume", str(run.path), *at)
    assert told("logs", f"{name}.2", "-f", *at)[1] == f"{name}.2: SUCCEEDED"
    check_every_row_is_there_once(run)


@pytest.mark.long
def test_submitted_twice_stopped_and_resumed_is_one_complete_run(
    cluster: str, scan_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "my runs"
    earlier = make_plan(load_scan(scan_file, [f"out={out}"]), "far")
    prepare_run(earlier, SCAN)
    run = RunDirectory.of(str(out), f"{earlier.run.run_id}-2")
    name, path, at = run.run_id, str(run.path), ("--address", cluster)
    submit = ("submit", str(scan_file), "--set", f"out={out}", "--env", "FAR_AWAY", *at)
    orders = tmp_path / "orders"
    orders.mkdir()
    halt_after_commits(orders, SHARDS // 2)
    halting = {"PYTHONPATH": str(FAULTS), "FAULTS": str(orders)}

    # Another run of the same scan, which the same command then means: it is one job.
    words = (*submit, "--new", *(word for variable in halting for word in ("--env", variable)))
    variables = {"FAR_AWAY": SECRET, "RAY_ADDRESS": "192.0.2.1:6379"} | halting
    both = [headcount(*words, **variables), headcount(*submit, FAR_AWAY=SECRET)]
    assert [ended.stdout.strip() for ended in both] == [name, name], both
    check_submitted_once(cluster, name, both)
    assert re.search(r"^(phase|speed) ", told("status", path, *at)[0], re.MULTILINE)
    # What its driver has said last.
    last_word = rf"^{name}  RUNNING .*(: {FIRST_COMMIT}| tokens/s, )"
    assert re.search(last_word, told("list", *at)[0], re.MULTILINE)

    # Stopped in the middle, it can be resumed.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(run.commits())) < SHARDS // 2:
        assert time.monotonic() < deadline, headcount("logs", name, *at)
        time.sleep(0.1)
    assert f"{name}: STOPPED; headcount resume {path}" in told("stop", name, *at)[1]
    assert len(list(run.commits())) == SHARDS // 2
    assert "stopped   no driver was heard of lately" in told("status", path)[0]
    refusal = refused(*submit, FAR_AWAY=SECRET)
    assert f"{name}: has ended, STOPPED" in refusal
    assert f"headcount resume {path} --address {cluster} continues the run" in refusal

    # Resumed twice at once, it is one job.
    commands = [start("resume", path, *at) for _ in range(2)]
    both = [command.ended(PATIENCE_SECONDS) for command in commands]
    check_submitted_once(cluster, f"{name}.2", both)
    printed, followed = told("logs", path, "-f", *at)
    assert (printed.splitlines()[-1], followed) == (path, f"{name}.2: SUCCEEDED")
    assert PREFIX not in printed

    check_every_row_is_there_once(run)
    printed, said = told(*submit, FAR_AWAY=SECRET)
    assert printed == name
    assert f"{name}.2: has ended, SUCCEEDED" in said
    assert SECRET not in (run.path / "manifest.json").read_bytes().decode()
    # Other tests have jobs on this cluster, too.
    jobs = re.findall(rf"^({name}\S*) +(\S+)", told("list", *at)[0], re.MULTILINE)
    assert jobs == [(name, "STOPPED"), (f"{name}.2", "SUCCEEDED")]
    listed = told("list", str(out), *at)[0]
    assert re.search(rf"^{name} .* {SHARDS}/{SHARDS} .*SUCCEEDED", listed, re.MULTILINE), listed
    status = json.loads(told("status", path, "--format", "json", *at)[0])
    assert (status["complete"], status["job"]) == (True, "SUCCEEDED")
    unknown = f"unknown job '{name}0': did you mean '{name}'"
    assert unknown in headcount("logs", f"{name}0", *at).stderr


def check_every_row_is_there_once(run: RunDirectory) -> None:
    """Compare shards and rows of a complete run with its plan."""
    commits = list(run.commits())
    assert [commit.shard for commit in commits] == list(range(SHARDS))
    info = replan(run).info
    files = [file for commit in commits for file in commit.files if file.table == "heads"]
    rows = sum(pq.read_metadata(str(run.path / file.path)).num_rows for file in files)
    assert rows == SEQUENCES * info.n_layers * info.n_heads


def check_submitted_once(cluster: str, job_id: str, commands: list[Ended]) -> None:
    """Compare what two commands say of which one submitted a job."""
    for command in commands:
        assert command.code == 0, command.stderr
        assert not re.search(f"Traceback|{SECRET}", command.stdout + command.stderr)
    second, first = sorted((command.stderr.splitlines() for command in commands), key=len)
    assert len(second) == 1
    assert f"{job_id}: already submitted to {cluster}" in second[0]
    assert len(first) == 2
    assert first[0] == f"{job_id}: submitted to {cluster}"
    # One that has little to do may have ended meanwhile, and a busy machine has not begun.
    states = (FIRST_COMMIT, "has ended, SUCCEEDED", "no replica yet: ")
    assert first[1].startswith(tuple(f"{job_id}: {state}" for state in states))


@pytest.mark.long
def test_a_driver_that_dies_at_once_is_said_with_the_last_lines_of_its_log(
    cluster: str, scan_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    out.mkdir()
    run = RunDirectory.of(str(out), load_scan(scan_file).run_id("far"))
    # The head's Python lacks a library: jobs find modules of this folder first.
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\")")
    submit = ("submit", str(scan_file), "--set", f"out={out}", "--env", "PYTHONPATH")
    submit += ("--address", cluster)
    name = run.run_id
    # The same scan may have run with another `out`: that is another run.
    code, printed, errors = start(*submit, PYTHONPATH=str(tmp_path)).ended()
    assert (code, printed.strip()) == (2, name), errors
    check_quoted("the job has ended, FAILED", errors)
    said = told("status", str(run.path), "--address", cluster)[0]
    assert "phase     ended, FAILED" in said
    assert "job       FAILED: ModuleNotFoundError: No module named 'typer'" in said

    # There is nothing to resume, so the same command submits it again. A cluster that takes its
    # time does not hold the command up.
    code, _, errors = Command(
        *submit,
        environment=environment() | {"PYTHONPATH": str(tmp_path)},
        directory=ROOT,
        constants={"headcount.jobs.cluster.submission.QUEUED_SECONDS": 0.0},
    ).ended()
    assert code == 0
    first_line, second_line = errors.splitlines()
    assert re.fullmatch(rf"{name}\.\d: submitted to {cluster}", first_line)
    check_quoted("queued: the cluster has not started it", second_line)


@pytest.mark.long
def test_a_job_that_is_refused_stops_itself_so_that_kuberay_makes_no_new_cluster(
    cluster: str,
) -> None:
    job: dict[str, Any] = {
        "entrypoint": f"${INTERPRETER} -m {kubernetes_job.__name__} scan nowhere.toml",
        "submission_id": "refused",
        "metadata": {"headcount": "refused", "run": "nowhere", "attempt": "1"},
    }
    variables = hook_variables() | {"RAY_API_SERVER_ADDRESS": cluster}
    with staged_code() as code:
        job["runtime_env"] = {"working_dir": str(code), "env_vars": variables}
        # Ray reads the token once in a process.
        submission = f"JobSubmissionClient({cluster!r}).submit_job(**{job!r})"
        command = [sys.executable, "-c", f"from ray.job_submission import *; {submission}"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        # A head that has just started does not take a job yet, or loses its answer.
        while "refused" not in told("list", "--address", cluster)[0]:
            assert time.monotonic() < deadline
            subprocess.run(command, env=environment(), capture_output=True)
    printed, state = told("logs", "refused", "--follow", "--address", cluster)
    assert re.search("^error: .*nowhere.toml", printed, re.MULTILINE), printed
    assert "refused: STOPPED" in state


def check_quoted(title: str, printed: str) -> None:
    """Compare what was printed with what docs/guide/troubleshooting.md quotes; `…` is anything."""
    page = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(rf"\*\*{re.escape(title)}\*\*\n\n```text\n(.+?)```", page, re.DOTALL)
    expected = re.escape(" ".join(quoted.split())).replace("…", ".*")
    assert re.fullmatch(expected, " ".join(printed.split())), printed


@pytest.mark.long
@pytest.mark.parametrize("token", ["wrong", None])
def test_a_wrong_or_missing_token_is_one_line(cluster: str, token: str | None) -> None:
    line = refused("list", "--address", cluster, token=token)
    assert f"{cluster}: the cluster refused the token" in line
    assert "RAY_AUTH_TOKEN" in line


class Old(BaseHTTPRequestHandler):
    """A cluster of another version."""

    def do_GET(self) -> None:
        version = b'{"version": "4", "ray_version": "2.40.0"}'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(version if self.path == "/api/version" else b"[]")

    def log_message(self, *_: object) -> None:
        pass


def test_another_version_of_ray_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a-1", {"entropy": lambda row: 0.5})
    with ThreadingHTTPServer(("127.0.0.1", 0), Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        resume = ["resume", str(run.path), "--address", address]
        for options, line in (
            ([], "the cluster runs Ray 2.40.0, this machine 2.6"),
            (["--env", "NOT_SET"], "--env NOT_SET: expected the name of a"),
        ):
            assert line in error_of(*resume, *options)
        server.shutdown()


def test_what_every_node_can_see_is_accepted(scan_file: Path) -> None:
    files = "input={family = 'pile', files = ['/mnt/a.jsonl', 's3://bucket/*.jsonl']}"
    words = ["out=s3://bucket/runs", "model=openai-community/gpt2", files]
    scan = portable_scan(scan_file, words)
    assert (scan.out, scan.model) == ("s3://bucket/runs", "openai-community/gpt2")
    assert scan.input.family == "pile"
