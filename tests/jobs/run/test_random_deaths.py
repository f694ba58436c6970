"""Every row is there once, wherever processes die that measure, extend and compact a run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headcount.schemas.files.commits import gather, taken_back, write_segment
from tests import ROOT
from tests.tools.committed_rows import compare, rows_of
from tests.toys.runs_here import begun, measured
from tests.toys.toy_replica import ToyReplica
from tests.toys.toy_runs import local


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--store"]], ids=["disk", "store"])
def test_each_row_is_there_once_whatever_dies(options: list[str]) -> None:
    # It forks, which a process with the threads of other tests must not do.
    words = ["-m", "tests.tools.random_deaths", "--schedules", "10", "--seed", "20261126"]
    done = subprocess.run(
        [sys.executable, *words, *options], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ended = re.search(r"^10 schedules .*, (\d+) deaths, 0 bad$", done.stdout, re.MULTILINE)
    assert ended is not None
    assert int(ended[1]) >= 10


def test_the_judge_finds_what_is_lost_doubled_or_different(tmp_path: Path) -> None:
    judge = ROOT / "tests" / "tools" / "committed_rows.py"
    assert "import headcount" not in (text := judge.read_text("utf-8"))
    assert "from headcount" not in text
    fields = {"model": "bundled:attn-only-2l-mini", "n_ctx": 8, "out": str(tmp_path)}
    fields |= {"sequences": 5, "sequences_per_shard": 2, "input": {"family": "uniform_random"}}
    run = measured(begun(fields), ToyReplica).run
    rows = rows_of(run.path)
    # Two layers of eight heads; `sequences` has a row of each.
    per_sequence = 2 * 8 + 1
    assert len(rows) == 5 * per_sequence
    doubled = {key: each * 2 for key, each in rows.items()}
    changed = {
        key: [row | ({"entropy": row["entropy"] + 1e-3} if key[0] == "heads" else {"tokens": [1]})]
        for key, (row,) in rows.items()
    }
    assert compare(rows, rows) == (0, 0, 0)
    assert compare(doubled, rows) == (0, 5 * per_sequence, 0)
    assert compare(changed, rows) == (0, 0, 5 * per_sequence)

    # A segment outweighs the commit of the last shard, takes it back, and has the others.
    commits = list(run.commits())
    gather(run.commits_directory, commits[:2])
    assert compare(rows_of(run.path), rows) == (0, 0, 0)
    write_segment(run.commits_directory, taken_back(run.run_id, [0]))
    assert compare(rows_of(run.path), rows) == (2 * per_sequence, 0, 0)
    run.commit_file(2).unlink()
    assert compare(rows_of(run.path), rows) == (3 * per_sequence, 0, 0)
    (local(run.path) / commits[1].files[0].path).write_bytes(b"PAR1")
    with pytest.raises(AssertionError, match=commits[1].files[0].path):
        rows_of(run.path)
