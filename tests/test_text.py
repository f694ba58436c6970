"""The text of sequences, and what a head looks at, held against the whole pattern."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from headcount import app
from jobs.in_process import measure_in_process
from jobs.plan import make_plan, prepare_run
from jobs.run_model import RunModel
from queries.connection import connect
from schemas.errors import HeadcountError
from schemas.scan import parse_scan
from tests import toy_models as toy
from workers.engine.dense_engine import DenseEngine
from workers.model.loading import load_model
from workers.model.model_info import describe

TEXTS = "text\nHello there!\x1b[2J and on it goes\nDer Bär ißt große Äpfel heute\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and a run of it, on two texts, untouched and edited."""
    folder = tmp_path_factory.mktemp("text")
    model = toy.save_byte_model(folder / "bytes")
    (folder / "texts.csv").write_text(TEXTS, encoding="utf-8")
    scan = parse_scan(
        {
            "model": str(model), "n_ctx": 20, "sequences": 2, "out": str(folder / "runs"),
            "interventions": ["none", "mask_first_keys(2)"], "bos": False,
            "statistics": ["sink_mass", "entropy"],
            "input": {"family": "csv_texts", "files": str(folder / "texts.csv")},
        }
    )  # fmt: skip
    plan = make_plan(scan, "texts")
    prepare_run(plan, "")
    commits = list(measure_in_process(plan, np.arange(plan.manifest.shards), "cpu"))
    assert [type(commit).__name__ for commit in commits] == ["Commit"]
    return folder


def call(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_of(place: Path) -> Path:
    return next((place / "runs").glob("run_id=*"))


def test_a_sequence_reads_as_its_text_without_control_characters(place: Path) -> None:
    lines = call("text", run_of(place), "0", "--width", "24").splitlines()
    assert re.match(r"sequence 0 of texts-\w+; 20 tokens; .*texts\.csv, row 0, ", lines[0])
    assert lines[1] == ""
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines[2:])) <= 24
    assert [line.split("  ", 1)[0].strip() for line in lines[2:]] == ["0", "10", "19"]
    pieces = "|".join(line[4:] for line in lines[2:]).split("|")
    assert pieces == [*"Hello there!", "\\x1b", *"[2J and"]


def test_a_query_decodes_tokens(place: Path) -> None:
    sql = "SELECT sequence, tokens FROM sequences WHERE intervention = 'none' ORDER BY ALL"
    text = call("query", place / "runs", sql, "--text", "--format", "json")
    assert '"Hello there!\\u001b[2J and"' in text
    assert '"Der Bär ißt große' in text
    call("query", place / "runs", sql, "--text", "-o", place / "texts.parquet")
    exported = pq.read_table(place / "texts.parquet")["tokens"].to_pylist()
    assert exported == ["Hello there!\x1b[2J and", "Der Bär ißt große"]


def test_a_part_of_a_character_is_its_bytes(place: Path) -> None:
    assert "|B|\\xc3|\\xa4|r|" in call("text", run_of(place), "1")


@pytest.mark.parametrize("intervention", ["none", "mask_first_keys(2)", "zero_query_bias"])
@pytest.mark.parametrize("head", [0, 1])
def test_a_head_looks_where_its_pattern_says(place: Path, intervention: str, head: int) -> None:
    lines = call(
        "text", run_of(place), "1", "--head", f"L0H{head}", "--intervention", intervention
    ).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("pos "))
    pattern = whole_pattern(place, intervention)[head]
    looks = [
        re.fullmatch(r" *(\d+) '.+' +(\d+) '.+' +([\d.]+) +([\d.]+)", x) for x in lines[start + 1 :]
    ]
    assert len(looks) == 20
    for position, look in enumerate(looks):
        assert look is not None
        row = pattern[position]
        assert int(look[1]) == position
        assert row[int(look[2])] == pytest.approx(row.max(), abs=1e-6)
        assert float(look[3]) == pytest.approx(row.max(), abs=5.1e-4)
        assert float(look[4]) == pytest.approx(row[0], abs=5.1e-4)
    beside = dict(line.split() for line in lines[3:start] if len(line.split()) == 2)
    if intervention == "zero_query_bias":
        assert "not measured in this run" in lines
    else:
        assert float(beside["sink_mass"]) == pytest.approx(pattern[1:, 0].mean(), abs=1e-4)


def whole_pattern(place: Path, intervention: str) -> np.ndarray:
    """The pattern of layer 0 on sequence 1: `[head query key]`."""
    from schemas.intervention import parse_intervention
    from workers.interventions import bind, edited_weights

    model = load_model(describe(place / "bytes"), "raw", "cpu", torch.float32)
    bound = bind(parse_intervention(intervention))
    tokens = connect(place / "runs").execute(
        "SELECT tokens FROM sequences WHERE sequence = 1 AND intervention = 'none'"
    ).fetchall()[0][0]  # fmt: skip
    patterns: list[torch.Tensor] = []
    with torch.inference_mode(), edited_weights(model, bound):
        DenseEngine(model, bound.edits(model)).run(
            torch.tensor([tokens]), {}, lambda layer, seen: patterns.append(seen["pattern"].dense())
        )
    return patterns[0][0].numpy()


def test_a_model_that_has_moved_is_named_and_another_one_is_refused(
    place: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "place"
    shutil.copytree(place, moved)
    run = run_of(moved)
    manifest = run / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(place / "bytes"), "/nowhere/bytes"))
    with pytest.raises(HeadcountError, match="no such directory; --model PATH says where"):
        call("text", run, "0", "--head", "L0H0")
    shown = call("text", run, "0", "--model", moved / "bytes")
    assert shown.endswith(call("text", run_of(place), "0").partition("\n")[2])
    other = toy.save_byte_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    toy.write_config(other, config | {"layer_norm_epsilon": 0.5})
    with pytest.raises(HeadcountError, match="was measured with"):
        RunModel(run, str(other)).text([1])


def test_a_model_without_a_tokenizer_shows_numbers(place: Path, tmp_path: Path) -> None:
    moved = tmp_path / "place"
    shutil.copytree(place, moved)
    (moved / "bytes" / "tokenizer.json").unlink()
    result = CliRunner().invoke(
        app, ["text", str(run_of(moved)), "0", "--model", str(moved / "bytes")]
    )
    assert "note: token numbers are shown: " in result.stderr
    assert re.search(r"^ 0  \d+\|\d+\|", result.stdout, flags=re.MULTILINE)
