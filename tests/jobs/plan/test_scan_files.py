"""Scans of several checkpoints: which scans a file means, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

import headcount
from headcount.jobs.plan.scan_files import scans_of
from headcount.schemas.errors import ScanError

REST = 'n_ctx = 8\nsequences = 4\n[input]\nfamily = "uniform_random"\n'


def scan_file(folder: Path, beginning: str) -> Path:
    file = folder / "steps.toml"
    file.write_text(f"{beginning}\n{REST}")
    return file


@pytest.mark.parametrize(("beginning", "models"), [
    ('model = "bundled:gpt2-mini"', [("bundled:gpt2-mini", None)]),
    ('model = ["a/b", \'c "d"\']', [("a/b", None), ('c "d"', None)]),
    ('model = "EleutherAI/pythia-70m"\nrevision = ["step1", "step143000"]',
     [("EleutherAI/pythia-70m", "step1"), ("EleutherAI/pythia-70m", "step143000")]),
    (
        'model = "bundled:backcopy-dynamics-mini/step-*"',
        [
            (f"bundled:backcopy-dynamics-mini/step-{step:06}", None)
            for step in (0, 200, 400, 600, 1000, 2000)
        ],
    ),
])  # fmt: skip
def test_every_model_and_every_revision_of_a_list_is_a_scan(
    tmp_path: Path, beginning: str, models: list[tuple[str, str | None]]
):
    scans = scans_of(scan_file(tmp_path, beginning), ["n_ctx=9"])
    assert [(each.scan.model, each.scan.revision) for each in scans] == models
    # What was set makes the same scan again, so each run can be continued by itself.
    for each in scans:
        (again,) = scans_of(each.file, each.overrides)
        assert again.scan == each.scan
        assert again.scan.n_ctx == 9
    assert len({each.scan.run_id("steps") for each in scans}) == len(models)


def test_a_pattern_means_directories_with_a_model_in_the_order_of_their_numbers(tmp_path: Path):
    for name in ("step-1000", "step-200", "step-final", "step-[9]"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "step-7").mkdir()
    scans = scans_of(scan_file(tmp_path, f'model = "{tmp_path}/step-*"'))
    names = [Path(each.scan.model).name for each in scans]
    assert names == ["step-[9]", "step-200", "step-1000", "step-final"]
    # A directory whose name looks like a pattern is itself.
    (one,) = scans_of(scan_file(tmp_path, f'model = "{tmp_path}/step-[9]"'))
    assert one.scan.model == f"{tmp_path}/step-[9]"


@pytest.mark.parametrize(("checkpoints", "said"), [
    ({"model": "bundled:backcopy-dynamics-mini/step-*"},
     "model: expected one checkpoint, got the pattern 'bundled:backcopy-dynamics-mini/step-*'; "),
    ({"model": ["a/b", "c/d"]}, "model: expected one checkpoint, got 2 checkpoints; "),
    ({"model": "a/b", "revision": ("step1", "step2")},
     "revision: expected one checkpoint, got 2 checkpoints; "),
])  # fmt: skip
def test_a_call_in_python_says_how_several_checkpoints_are_scanned(
    tmp_path: Path, checkpoints: dict[str, Any], said: str
):
    fields = {"n_ctx": 4, "sequences": 1, "input": {"family": "uniform_random"}}
    fields["out"] = str(tmp_path / "runs")
    file = scan_file(tmp_path, f'out = "{tmp_path}/runs"\nmodel = "a/b"')
    for call in (
        lambda: headcount.scan({**fields, **checkpoints}),
        lambda: headcount.scan({"model": "a/b", **fields}, **checkpoints),
        lambda: headcount.scan(file, **checkpoints),
    ):
        with pytest.raises(ScanError) as refused:
            call()
        assert str(refused.value).startswith(said)
        assert "headcount scan FILE on the command line makes a run of each" in str(refused.value)
    assert not (tmp_path / "runs").exists()
