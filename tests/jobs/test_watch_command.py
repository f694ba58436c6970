"""`headcount watch`: folders of checkpoints, runs of these, and files of a callback."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headcount.schemas.watch.history import Facts
from headcount.workers.model.info.bundled_models import BUNDLED
from tests.toys.commands import ended, error_of, printed

SERIES = Path(BUNDLED["backcopy-dynamics-mini"])


def step_file(directory: Path, step: int, score: float) -> None:
    """What a callback writes at a step, of a model of one layer and two heads."""
    rows = {
        "layer": np.zeros(2, np.int16), "head": np.arange(2, dtype=np.int16),
        "score_max": np.array([1, score], np.float32), "step": np.full(2, step),
    }  # fmt: skip
    table = Facts({"h.0.w": 1.0 + step}).added_to(pa.table(rows))
    pq.write_table(table, directory / f"step-{step:09d}.parquet")


def test_files_of_a_callback_ring_with_exit_code_3(tmp_path: Path) -> None:
    step_file(tmp_path, 0, 2)
    assert printed("watch", str(tmp_path)) == "0 alarms and 0 notices in 1 step, 0 to 0\n"
    step_file(tmp_path, 500, 1e4)
    code, text, _ = ended("watch", str(tmp_path))
    assert code == 3
    assert "1 alarm and 0 notices in 2 steps, 0 to 500" in text
    assert "score_growth at step 500, L0H1: Scores of a head" in text
    code, text, _ = ended("watch", str(tmp_path), "--json")
    record = json.loads(text)
    assert (code, record["steps"]) == (3, [0, 500])
    (alarm,) = record["alarms"]
    assert (alarm["rule"], alarm["heads"], alarm["value"]) == ("score_growth", ["L0H1"], 1e4)


def test_a_directory_with_nothing_to_watch_is_refused(tmp_path: Path) -> None:
    assert "expected checkpoints such as checkpoint-500" in error_of("watch", tmp_path)
    assert error_of("watch", tmp_path / "nowhere").endswith("and there is no such directory")


@pytest.mark.long
def test_a_folder_of_checkpoints_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step, source in ((0, "step-000000"), (10, "step-000200")):
        shutil.copytree(SERIES / source, tmp_path / "saved" / f"checkpoint-{step}")
    assert printed("watch", "saved").startswith("0 alarms")
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    before = {file: file.stat().st_mtime_ns for file in runs[0].rglob("*.parquet")}
    # The next checkpoint is the first one again: a training that was continued from a wrong place.
    shutil.copytree(SERIES / "step-000000", tmp_path / "saved" / "checkpoint-20")
    code, text, _ = ended("watch", "saved")
    assert code == 3
    assert "earlier_weights at step 20, the model" in text
    assert {file: file.stat().st_mtime_ns for file in runs[0].rglob("*.parquet")} == before
    # Of the runs alone, the weights are not known.
    assert printed("watch", "runs").startswith("0 alarms")
