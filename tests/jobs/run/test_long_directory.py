"""Ray where the temporary directory has a name too long for its sockets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headcount.jobs.cluster.ray_cluster import LONGEST_DIRECTORY

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
    assert len(str(long_directory)) > LONGEST_DIRECTORY
    (tmp_path / "toy.toml").write_text(SCAN)
    kept = {*Path("/tmp").glob("headcount-ray-*")}
    # A Ray that was started in this process has left its token there.
    variables = {k: value for k, value in os.environ.items() if not k.startswith("RAY_")}
    program = "from headcount.command_line import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "scan", "toy.toml", "--replicas", "1", "--device", "cpu"],
        cwd=tmp_path,
        env=variables | {variable: str(long_directory)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("runs/run_id=toy-")
    assert {*Path("/tmp").glob("headcount-ray-*")} == kept
    assert not (long_directory / "ray").exists()
