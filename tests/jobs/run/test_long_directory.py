"""Ray where the temporary directory has a name too long for its sockets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headcount.jobs.cluster import ray_cluster

SCAN = """
model = "bundled:llama-mini"
n_ctx = 8
sequences = 4
statistics = ["sink_mass"]
input = { family = "uniform_random" }
"""


@pytest.mark.long
@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_ray_starts_with_a_long_temporary_directory_and_leaves_nothing(
    tmp_path: Path, variable: str
):
    long_directory = tmp_path / ("x" * 120)
    long_directory.mkdir()
    assert len(str(long_directory)) > ray_cluster.LONGEST_DIRECTORY
    (tmp_path / "toy.toml").write_text(SCAN)
    # A Ray that was started in this process has left its token there.
    variables = {k: value for k, value in os.environ.items() if not k.startswith("RAY_")}
    # On a busy machine Ray starts in more than a minute, and this is not about how soon.
    program = (
        f"import {ray_cluster.__name__} as ray; ray.START_SECONDS = 240.0\n"
        "from headcount.command_line import main; main()"
    )
    command = [sys.executable, "-c", program, "scan", "toy.toml", "--replicas", "1"]
    with subprocess.Popen(
        [*command, "--device", "cpu"],
        cwd=tmp_path,
        env=variables | {variable: str(long_directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, errors = process.communicate(timeout=400)
    if "The current node timed out during startup" in errors:
        pytest.skip("Ray gives its own processes 30 s to start, and this machine is too busy")
    assert process.returncode == 0, errors
    assert output.startswith("runs/run_id=toy-")
    # Ray names its directory after the process that starts it. Others may start one meanwhile.
    assert not list(Path("/tmp").glob(f"headcount-ray-*/session_*_{process.pid}"))
    assert not (long_directory / "ray").exists()
