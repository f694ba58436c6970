"""The text of sequences, and what a head attends to, compared with the whole pattern."""

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from headcount.schemas.errors import HeadcountError
from headcount.workers.run_model import RunModel
from tests.toys.commands import ended, error_of, printed
from tests.toys.toy_runs import ask

TEXTS = "text\nHello there!\x1b[2J and on it goes\nDer Bär ißt große Äpfel heute\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and a run of it, on two texts, untouched and changed."""
    from tests.toys import toy_models as toy
    from tests.toys.runs_here import measure_here

    folder = tmp_path_factory.mktemp("text")
    model = toy.save_byte_model(folder / "bytes")
    (folder / "texts.csv").write_text(TEXTS, encoding="utf-8")
    fields = {
        "model": str(model), "out": str(folder / "runs"), "n_ctx": 20, "sequences": 2, "bos": False,
        "input": {"family": "csv_texts", "files": str(folder / "texts.csv")},
        "interventions": ["none", "mask_keys(0,2)"], "statistics": ["sink_mass", "entropy"],
    }  # fmt: skip
    measure_here(fields, "texts")
    return folder


def run_of(home: Path) -> Path:
    return next((home / "runs").glob("run_id=*"))


def test_a_sequence_reads_as_its_text_without_control_characters(home: Path) -> None:
    lines = printed("text", run_of(home), "0", "--width", "24").splitlines()
    assert re.match(r"sequence 0 of texts-\w+; 20 tokens; .*texts\.csv, row 0, ", lines[0])
    assert lines[1] == ""
    # The escape of the text would clear a terminal.
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines[2:])) <= 24
    assert [line.split("  ", 1)[0].strip() for line in lines[2:]] == ["0", "10", "19"]
    pieces = "|".join(line[4:] for line in lines[2:]).split("|")
    assert pieces == [*"Hello there!", "\\x1b", *"[2J and"]


def test_a_query_decodes_tokens(home: Path) -> None:
    sql = "SELECT sequence, tokens FROM sequences WHERE intervention = 'none' ORDER BY ALL"
    text = printed("query", home / "runs", sql, "--text", "--format", "json")
    assert '"Hello there!\\u001b[2J and"' in text
    assert '"Der Bär ißt große' in text
    printed("query", home / "runs", sql, "--text", "-o", home / "texts.parquet")
    exported = pq.read_table(home / "texts.parquet")["tokens"].to_pylist()
    assert exported == ["Hello there!\x1b[2J and", "Der Bär ißt große"]


def test_a_part_of_a_character_is_its_bytes(home: Path) -> None:
    assert "|B|\\xc3|\\xa4|r|" in printed("text", run_of(home), "1")


@pytest.mark.parametrize(("intervention", "head"), [("mask_keys(0,2)", 1), ("zero_query_bias", 0)])
def test_the_keys_of_a_head_are_of_its_pattern(home: Path, intervention: str, head: int) -> None:
    from tests.reference.reference_changes import run_changed
    from tests.reference.weights import read_weights

    words = ("--head", f"L0H{head}", "--intervention", intervention)
    lines = printed("text", run_of(home), "1", *words).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("pos "))
    sql = "SELECT tokens FROM sequences WHERE sequence = 1 AND intervention = 'none'"
    ((tokens,),) = ask(home / "runs", sql)
    weights = read_weights(home / "bytes")
    pattern = run_changed(weights, tokens, intervention, ()).layers[0].pattern[head]
    look_lines = lines[header + 1 :]
    assert len(look_lines) == 20
    for position, line in enumerate(look_lines):
        look = re.fullmatch(r" *(\d+) '.+' +(\d+) '.+' +([\d.]+) +([\d.]+)", line)
        assert look is not None
        attention = pattern[position]
        assert int(look[1]) == position
        # Two keys may tie, so the key itself is compared by its attention.
        assert attention[int(look[2])] == pytest.approx(attention.max(), abs=1e-6)
        # Shares are printed with three digits.
        assert float(look[3]) == pytest.approx(attention.max(), abs=5.1e-4)
        assert float(look[4]) == pytest.approx(attention[0], abs=5.1e-4)
    measured = dict(line.split() for line in lines[3:header] if len(line.split()) == 2)
    assert ("not measured in this run" in lines) == (intervention == "zero_query_bias")
    if measured:
        assert float(measured["sink_mass"]) == pytest.approx(pattern[1:, 0].mean(), abs=1e-4)


def test_a_model_that_moved_is_named_and_another_is_refused(home: Path, tmp_path: Path) -> None:
    from tests.toys import toy_models as toy

    moved = shutil.copytree(home, tmp_path / "moved")
    run = run_of(moved)
    manifest = run / "manifest.json"
    manifest.write_text(manifest.read_text().replace(str(home / "bytes"), "/nowhere/bytes"))
    told = error_of("text", run, "0", "--head", "L0H0")
    assert "no such directory; --model PATH says where" in told
    shown = printed("text", run, "0", "--model", moved / "bytes")
    assert shown.endswith(printed("text", run_of(home), "0").partition("\n")[2])
    other = toy.save_byte_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    toy.write_config(other, config | {"layer_norm_epsilon": 0.5})
    with pytest.raises(HeadcountError, match="was measured with"):
        RunModel(run, str(other)).text([1])


def test_a_model_without_a_tokenizer_shows_numbers(home: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(home, tmp_path / "moved")
    (moved / "bytes" / "tokenizer.json").unlink()
    words = ["text", str(run_of(moved)), "0", "--model", str(moved / "bytes")]
    result = ended(*words)
    assert "note: token numbers are shown: " in result.stderr
    assert re.search(r"^ 0  \d+\|\d+\|", result.stdout, flags=re.MULTILINE)
