"""Checkpoints of a series with the same weights: which are named, and what is measured of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import headcount
from headcount.jobs.plan.same_weights import SAMPLE_BYTES, SAMPLES, without_duplicates
from headcount.jobs.plan.scan_files import scans_of
from headcount.workers.model.info.description import hub_digests
from tests.toys import toy_models as toy
from tests.toys.commands import ended, printed
from tests.toys.hub_server import MODEL, hub

REST = 'n_ctx = 8\nsequences = 4\nstatistics = ["sink_mass"]\n[input]\nfamily = "uniform_random"\n'


def scan_file(folder: Path, beginning: str) -> Path:
    file = folder / "steps.toml"
    file.write_text(f'{beginning}\nout = "{folder}/runs"\n{REST}')
    return file


def write_files(directory: Path, weights: bytes, **config: object) -> Path:
    """Files of a checkpoint that nobody loads."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def compared(
    folder: Path, beginning: str, capsys: pytest.CaptureFixture[str], skip: bool = False
) -> tuple[list[str], list[str]]:
    """What is said of a series, and the checkpoints that are left of it."""
    left = without_duplicates(scans_of(scan_file(folder, beginning)), skip)
    names = [each.scan.revision or Path(each.scan.model).name for each in left]
    return capsys.readouterr().err.splitlines(), names


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps of which 1 and 3 are step 10, and the other one is of its own."""
    folder = tmp_path_factory.mktemp("series")
    first = toy.save_model(folder / "step2", toy.gpt2(n_layer=1))
    toy.copy_of(first, folder / "step10", lambda path: toy.change_weights(path, _negate))
    for step in ("step1", "step3"):
        shutil.copytree(folder / "step10", folder / step)
    return folder


def _negate(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.neg_()


NAMED = "step1 and step3 have the weights of step10"


def test_they_are_named_before_anything_is_measured_and_skipped_if_asked(
    series: Path, tmp_path: Path
):
    file = scan_file(tmp_path, f'model = "{series}/step*"')
    command = ["scan", file, "--replicas", "0"]
    lines = printed(*command, "--skip-duplicates").splitlines()
    assert lines[:2] == [NAMED, "2 duplicates skipped"]
    assert lines[2].startswith("steps-")  # Of the first run.
    steps = "SELECT step, sink_heads FROM checkpoints ORDER BY step"
    assert headcount.open(tmp_path / "runs").sql(steps).df()["step"].tolist() == [2, 10]

    lines = printed(*command).splitlines()
    assert lines[:2] == [NAMED, "--skip-duplicates leaves out 2 duplicates"]
    runs = headcount.open(tmp_path / "runs")
    assert runs.sql(steps).df()["step"].tolist() == [1, 2, 3, 10]
    of_step = "SELECT sequence, layer, head, sink_mass FROM heads JOIN runs USING (run_id) WHERE"
    one, two, three, ten = (
        sorted(runs.sql(f"{of_step} step = {step}").df().itertuples(index=False, name=None))
        for step in (1, 2, 3, 10)
    )
    assert one == three == ten != two


def test_plan_and_submit_name_them(series: Path, tmp_path: Path):
    file = scan_file(tmp_path, f'model = "{series}/step*"')
    said = printed("plan", file, "--skip-duplicates").splitlines()
    assert said[:2] == [NAMED, "2 duplicates skipped"]
    # Each of the two is priced, and a line has both.
    rows = [line.split("  about ") for line in said[-3:]]
    assert [len(row) for row in rows] == [3, 3, 3]
    words = [row[0].split() for row in rows]
    assert [Path(row[0]).name for row in words] == ["step2", "step10", "all"]
    assert [row[2] for row in words[:2]] == ["1", "1"]
    assert not (tmp_path / "runs").exists()
    # Nothing listens there: what is said before is said before any job is made.
    result = ended("submit", file, "--address", "127.0.0.1:1")
    assert result.code == 2
    assert result.stderr.splitlines()[0] == NAMED


def test_files_are_compared_whole_with_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    weights = bytes(range(256)) * 1024
    assert len(weights) // SAMPLES > SAMPLE_BYTES + 1
    other = bytearray(weights)
    other[SAMPLE_BYTES + 1] ^= 1  # Behind the first sample, before the second.
    for name, content in [
        ("step5", weights), ("step40", bytes(other)), ("step300", weights), ("final", weights),
        ("step6", bytes(other)), ("step7", bytes(other)), ("step8", bytes(other)),
    ]:  # fmt: skip
        write_files(tmp_path / name, content)
    pattern = f'model = ["{tmp_path}/*"]'
    groups = ["final and step5 have the weights of step300",
              "step6, step7 and step8 have the weights of step40"]  # fmt: skip
    said, left = compared(tmp_path, pattern, capsys, skip=True)
    assert (sorted(said), left) == (["5 duplicates skipped", *groups], ["step40", "step300"])
    write_files(tmp_path / "step9", bytes(other))
    groups[1] = "step6, step7 and 2 more have the weights of step40"
    assert sorted(compared(tmp_path, pattern, capsys)[0])[1:] == groups
    # With another configuration it is another model, which has the same weights all the same.
    toy.change_config(tmp_path / "step5", rope_theta=1e6)
    said, left = compared(tmp_path, pattern, capsys, skip=True)
    assert sorted(said)[1:] == groups
    assert left == ["step5", "step40", "step300"]
    (tmp_path / "step5" / "model.safetensors").unlink()
    said, left = compared(tmp_path, pattern, capsys)
    assert "final has the weights of step300" in said
    assert said[-2].startswith("1 checkpoint not compared with the others, the first is step5: ")
    assert len(left) == 8


def test_the_hub_is_asked_before_anything_is_downloaded(
    series: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    steps = [f"step{step}" for step in (1, 2, 3, 10)]
    beginning = f'model = "{MODEL}"\nrevision = {json.dumps(steps)}'
    hub_digests.cache_clear()
    with hub(series, tmp_path / "cache", monkeypatch) as asked:
        said, left = compared(tmp_path, beginning, capsys, skip=True)
        assert (said, left) == ([NAMED, "2 duplicates skipped"], ["step2", "step10"])
        of_models = sorted(each for each in asked if "api/models" in each or "resolve" in each)
        assert of_models == sorted(f"GET api/models/{MODEL}/revision/{step}" for step in steps)
        lines = printed("scan", tmp_path / "steps.toml", "--replicas", "0", "--skip-duplicates")
        assert lines.splitlines()[:2] == [NAMED, "2 duplicates skipped"]
        assert sum(each.endswith("model.safetensors") and "GET" in each for each in asked) == 2
        rows = headcount.open(tmp_path / "runs").sql("SELECT step FROM runs ORDER BY step").df()
        assert rows["step"].tolist() == [2, 10]
    hub_digests.cache_clear()
    with hub(series, tmp_path / "empty", monkeypatch, has_digests=False):
        said, left = compared(tmp_path, beginning, capsys, skip=True)
    unknown = f"model '{MODEL}': the Hub gives no digests of its weights"
    assert said == [f"4 checkpoints not compared with the others, the first is step1: {unknown}"]
    assert left == steps
    # Without the Hub, what was downloaded is compared; the rest is said.
    hub_digests.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    said, left = compared(tmp_path, beginning, capsys, skip=True)
    assert len(said) == 1
    assert said[0].startswith("2 checkpoints not compared with the others, the first is step1: ")
    assert left == steps
