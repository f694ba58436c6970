"""What can be refused is refused before anything is measured: no run is there afterwards."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headcount.exports.formats import export_formats
from tests.toys.commands import error_of
from tests.toys.toy_runs import Cell, write_run

MODEL = "bundled:needle-mini"  # 3 layers of 4 heads, 128 positions


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(words: str, message: str, model: str = MODEL) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    told = error_of("export", *words.split(), "--model", model)
    assert re.search(message, told), told
    assert "\n" not in told
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before


@pytest.mark.parametrize(("words", "message"), [
    ("duo -o x --set n_ctx=64 --recent 64", "--recent 64: the run repeats a block of 32 tokens"),
    ("duo -o x --recent 20 --set input.period=12", "unknown option of uniform_random 'period'"),
    ("duo -o x --sparsity 0.5 --threshold 0.5", "both choose heads; leave out one"),
    ("duo -o x --sparsity 1.5", "--sparsity: expected less than 1"),
    ("duo -o x --threshold 0", "--threshold: expected more than 0"),
    ("duo -o x --sink 200", "--sink 200: expected fewer than the 128 tokens"),
    ("duo -o x --score distant --recent 124", "keeps all of 128 tokens; expected less"),
    ("duo -o x --score effect --recent 500", "keeps all of 128 tokens; expected less"),
    ("duo -o x --recent 16 --set sequences=1", "1 sequence: expected 2 or more"),
    ("duo -o x --recent 16 --set heads=[\"L0H0\"]", "does not measure every head"),
    ("duo -o x --recent 16 --set statistics=[\"entropy\"]", "does not measure duplicate_score"),
    ("duo -o x --recent 16 --set interventions=[\"zero_head(0,1)\"]", "the intervention none"),
    ("duo -o x --recent 16 --set input.family=needle", "is over needle, expected"),
    ("duo -o x --recent 16 --run a-1", "--run is about runs that are there"),
    ("duo -o x --recent 16 --check-sequences 4", "--check-sequences is about --check"),
    ("duo -o x --recent 16 --text a.txt", "--text is about --check; leave it out"),
    ("duo -o x --recent 16 --check --text bundled:LICENSE", "no tokenizer files; text needs one"),
    ("duo -o x --recent 5 --set n_ctx=32 --check", "is repeated needs 32 tokens besides"),
    ("razor -o x --check", "razor --check: --recent 4000: with the first 4 keys a head keeps all"),
    ("razor -o x --echo 1", "--echo: expected less than 1"),
    ("headkv -o x --check", "chooses no heads to keep whole; leave out --check"),
    ("headkv -o x --score effect --recent 127", "keeps all of 128 tokens"),
    ("retrieval-heads -o x --set n_ctx=12", "n_ctx"),
    ("important-heads -o x --deviations=-1", "--deviations: expected 0 or more"),
    ("important-heads -o x --set sequences=1", "1 sequence: expected 2 or more"),
    ("fp8-kv-scales -o x --prefix attn", r"--prefix: expected a name with \{layer\} in it"),
    ("fp8-kv-scales -o x --quantile 1", "--quantile: expected less than 1"),
    ("fp8-kv-checkpoint -o x --prefix h.{layer}.a", r"expected h\.\{layer\}\.a in the 3 layers"),
    ("fp8-kv-checkpoint -o x --checkpoint other", "model 'other': neither a directory"),
    ("expected-attention -o x --set n_ctx=4", "n_ctx is 4; expected more than the 4 first tokens"),
    ("minference -o x --set profiles=[]", "does not measure the profile column_diagonal"),
    ("card -o elsewhere/README.md", "expected a name in the directory of the run or above it"),
    ("razor -o x --device cuda --set n_ctx=100000", "n_ctx: 100000 is beyond the 128 positions"),
])  # fmt: skip
def test_options_are_refused_before_a_scan(words: str, message: str):
    refused(words, message)


FOLDERS = [name for name, export in export_formats().items() if export.writes == "folder"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_something_else_is_refused_before_a_scan(name: str):
    Path("x").mkdir()
    Path("x/thesis.tex").write_text("years of work")
    refused(f"{name} -o x", "is there already; choose another name, or say --replace")
    refused(f"{name} -o x --replace", r"holds thesis\.tex, which is no part of this export")


@pytest.mark.parametrize(("place", "message"), [
    ("file/x", "file is a file; expected a directory, or a free name"),
    ("file", "is there already; choose another name, or say --replace"),
    ("folder", "is a directory; expected the name of a file"),
    ("n" * 245, r"n… is too long for a file system; choose a shorter name"),
    ("m" * 300 + "/x", "cannot be written|is too long"),
    ("pipe", "is neither a file nor a directory"),
    ("/", "is the root of the disk"),
])  # fmt: skip
def test_places_that_take_no_file_are_refused_before_a_scan(place: str, message: str):
    Path("file").touch()
    Path("folder").mkdir()
    os.mkfifo("pipe")
    refused(f"razor -o {place}", message)


@pytest.mark.parametrize(("library", "names"), [
    ("safetensors", ["expected-attention", "qfilters", "fp8-kv-scales", "fp8-kv-checkpoint"]),
    ("pyiceberg", ["iceberg"]),
])  # fmt: skip
def test_a_missing_library_is_named_before_a_scan(
    library: str, names: Sequence[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, library, None)
    for name in names:
        refused(f"{name} -o x", f"export {name} needs {library}, which is not installed: pip")


# Advice


def test_a_run_that_lacks_what_is_needed_is_not_to_be_resumed(home: Path):
    """To finish it would take hours, in vain."""
    half: Cell = lambda _: 0.5  # noqa: E731
    write_run(home / "runs", "a-1", {"sink_mass": half}, commit=[0])
    told = error_of("export", "duo", "runs", "-o", "x")
    assert "did not measure duplicate_score" in told
    assert "resume" not in told
    copies = {"duplicate_score": half, "induction_score": half}
    write_run(home / "other", "a-1", copies, family="repeated_random", commit=[0])
    told = error_of("export", "razor", "other", "-o", "x")
    assert re.search(r"is not complete: .*; headcount resume \S+/run_id=a-1 ", told), told


@pytest.mark.parametrize("words", ["headkv --recent 1", "duo --recent 1", "important-heads"])
def test_a_list_of_effects_asks_for_a_calibration(words: str, home: Path):
    write_run(home / "runs", "a-1", {"sink_mass": lambda _: 0.5})
    message = "this scan would do, then headcount calibrate of its run; --model MODEL runs both"
    assert message in error_of("export", *words.split(), "runs", "--score", "effect", "-o", "x")


@pytest.mark.parametrize(("threshold", "heads"), [("0.99", "0"), ("0.01", "4")])
def test_a_threshold_that_chooses_all_or_none_makes_no_list(threshold: str, heads: str, home: Path):
    from tests.exports.test_exports import DISTANT, of_heads, write_toy

    write_toy(home / "runs", "a-1", {"distant_mass(1,1)": of_heads(DISTANT)})
    words = ("duo", "runs", "-o", "x", "--score", "distant", "--sink", 1, "--recent", 1)
    message = f"--threshold {threshold}: {heads} of 4 KV heads of run a-1 reach it, which is no "
    assert message in error_of("export", *words, "--threshold", threshold)
    assert not Path("x").exists()
