"""Scans of several checkpoints: which scans a file means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headcount.jobs.plan.checkpoints import scans_of
from headcount.schemas.errors import ScanError

REST = 'n_ctx = 8\nsequences = 4\n[input]\nfamily = "uniform_random"\n'


def scan_file(folder: Path, beginning: str) -> Path:
    file = folder / "steps.toml"
    file.write_text(f"{beginning}\n{REST}")
    return file


def model_directories(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")


def test_a_file_with_one_model_means_one_scan(tmp_path: Path):
    (one,) = scans_of(scan_file(tmp_path, 'model = "bundled:gpt2-mini"'), ["n_ctx=9"])
    assert (one.scan.model, one.scan.n_ctx, one.overrides) == ("bundled:gpt2-mini", 9, ("n_ctx=9",))


def test_every_model_of_a_list_is_a_scan(tmp_path: Path):
    scans = scans_of(scan_file(tmp_path, 'model = ["a/b", \'c "d"\']'), ["seed=3"])
    assert [each.scan.model for each in scans] == ["a/b", 'c "d"']
    # What was set makes the same scan again, so each run can be continued by itself.
    for each in scans:
        (again,) = scans_of(each.file, each.overrides)
        assert again.scan == each.scan
    assert len({each.scan.run_id("steps") for each in scans}) == 2


def test_every_revision_of_a_list_is_a_scan(tmp_path: Path):
    beginning = 'model = "EleutherAI/pythia-70m"\nrevision = ["step1", "step143000"]'
    scans = scans_of(scan_file(tmp_path, beginning))
    assert [(each.scan.model, each.scan.revision) for each in scans] == [
        ("EleutherAI/pythia-70m", "step1"),
        ("EleutherAI/pythia-70m", "step143000"),
    ]


def test_a_pattern_means_directories_with_a_model_in_the_order_of_their_numbers(tmp_path: Path):
    model_directories(tmp_path, "step-1000", "step-200", "step-final", "step-[9]")
    (tmp_path / "step-7").mkdir()
    scans = scans_of(scan_file(tmp_path, f'model = "{tmp_path}/step-*"'))
    names = [Path(each.scan.model).name for each in scans]
    assert names == ["step-[9]", "step-200", "step-1000", "step-final"]
    # A directory whose name looks like a pattern is itself.
    (one,) = scans_of(scan_file(tmp_path, f'model = "{tmp_path}/step-[9]"'))
    assert one.scan.model == f"{tmp_path}/step-[9]"


def test_checkpoints_of_a_bundled_model_are_found(tmp_path: Path):
    scans = scans_of(scan_file(tmp_path, 'model = "bundled:backcopy-dynamics-mini/step-*"'))
    steps = [0, 200, 400, 600, 1000, 2000]
    assert [each.scan.model for each in scans] == [
        f"bundled:backcopy-dynamics-mini/step-{step:06}" for step in steps
    ]


@pytest.mark.parametrize(
    ("beginning", "message"),
    [
        ("model = []", "model: expected a text, or a list of texts, got []"),
        ("model = [1]", "model: expected a text, or a list of texts, got [1]"),
        ('model = ["a", "a"]', "model: expected each checkpoint once, got a twice"),
        (
            'model = ["a", "b"]\nrevision = ["x", "y"]',
            "model and revision are both lists; expected one list, of models or of the revisions "
            "of one model",
        ),
        (
            'model = "/nowhere/step-*"',
            "model: no directory with a config.json matches '/nowhere/step-*' (in {here})",
        ),
        ('model = ["a", "b"]\nn_ctx2 = 1', "unknown key 'n_ctx2': did you mean 'n_ctx'?"),
    ],
)
def test_wrong_lists_are_one_line(beginning: str, message: str, tmp_path: Path):
    file = scan_file(tmp_path, beginning)
    with pytest.raises(ScanError) as caught:
        scans_of(file)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{file}: {message.format(here=Path.cwd())}")
