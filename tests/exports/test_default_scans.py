"""What `--model` measures if nobody says: formats about text read text."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headcount.exports.formats import export_formats
from headcount.exports.formats.head_profiles import input_name, input_notes
from headcount.exports.refusals import scan_for
from headcount.schemas.scans.scan import Scan
from tests.toys.toy_models import family, save_model

ABOUT_TEXT = [
    "expected-attention", "fp8-kv-checkpoint", "fp8-kv-scales", "minference", "qfilters",
]  # fmt: skip


def scan_of(name: str, *overrides: str, model: str = "bundled:gpt2-mini") -> Scan:
    export = export_formats()[name]
    needs = export.needs(export.parsed_options({}))
    return scan_for(needs, {"model": model, "out": "runs"}, overrides)[1]


def test_formats_about_text_read_text_and_others_do_not():
    formats = export_formats()
    about_text = [
        name
        for name, export in formats.items()
        if export.needs(export.parsed_options({})).about_text
    ]
    assert about_text == ABOUT_TEXT
    for name in ABOUT_TEXT:
        scan = scan_of(name)
        assert (scan.input.family, scan.input.options["files"]) == ("text", "bundled:LICENSE")
        assert (scan.sequences, scan.sequences_per_shard) == ("all", 1)
    assert scan_of("razor").input.family == "repeated_random"


def test_a_corpus_that_is_named_takes_the_place_of_the_licence(tmp_path: Path):
    file = tmp_path / "my.txt"
    file.write_text("a text. " * 2000)
    scan = scan_of("qfilters", f"input.files={file}")
    assert scan.input.options == {"files": str(file), "packing": "concat"}
    # Of a whole corpus it reads no more than other formats do.
    assert scan.sequences == 64
    other = scan_of("qfilters", "input.family=repeated_random", "input.period=7")
    assert other.input.options == {"period": 7}
    assert other.sequences == 64


def test_a_model_without_a_tokenizer_reads_random_repeats(tmp_path: Path):
    save_model(tmp_path / "deaf", family("LlamaConfig"))
    scan = scan_of("qfilters", model=str(tmp_path / "deaf"))
    assert (scan.input.family, scan.sequences) == ("repeated_random", 64)


@pytest.mark.parametrize(("family_name", "files", "note"), [
    ("text", "bundled:LICENSE", "measured on text bundled:LICENSE, 3 sequences of 64 tokens: "),
    ("text", ["/home/me/private/book.txt"], None),
    ("repeated_random", None, "measured on repeated_random: other input has other queries"),
])  # fmt: skip
def test_a_note_says_what_was_measured(family_name: str, files: Any, note: str | None):
    run = {"input_family": family_name, "sequences_done": 3, "n_ctx": 64}
    source: Any = SimpleNamespace(run=run, input_options={"files": files})
    notes = input_notes(source)
    assert notes == () if note is None else notes[0].startswith(note)
    assert "private" not in input_name(source)
