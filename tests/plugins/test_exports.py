"""Export formats of one's own: listed, explained, written, and what is wrong with one."""

import json
from pathlib import Path

import pytest

from headcount.schemas.plugins import activate
from tests.plugins.files import DELIMITERS
from tests.toys.commands import error_of, printed
from tests.toys.toy_runs import write_run

FORMAT = '''\
"""A list of heads."""

import json

from headcount.exports.shared.registry import Exported, Needs, export_format
from headcount.exports.shared.source import ExportSource
from headcount.schemas.values import Count


@export_format(
    "The heads whose attention is spread most",
    read_by="my_reader",
    source="this file",
    writes="file",
    example="wide.json",
    needs=Needs(statistics=("entropy",)),
)
def wide_heads(source: ExportSource, *, count: Count = 2) -> Exported:
    """The heads with the largest entropy, the largest first.

    * `count`: how many.
    """
    means = source.scores("entropy").means
    heads = [list(divmod(int(place), means.shape[1])) for place in (-means).argsort(axis=None)]
    return Exported(files={"wide.json": json.dumps(heads[:count]).encode()})
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    columns = {"entropy": lambda row: row.layer + row.head / 2}
    write_run(tmp_path / "runs", "a-1", columns, layers=2, heads=2)
    file = tmp_path / "mine.py"
    file.write_text(FORMAT)
    return file


def test_a_format_of_ones_own_is_listed_explained_and_written(file: Path):
    assert "wide-heads: The heads whose attention is spread most\n    my_reader" in printed(
        "export", "--list", "--plugin", file
    )
    assert "wide-heads" not in printed("export", "--list")
    assert "--count  how many. (1 or more, default 2)" in printed(
        "export", "wide-heads", "--help", f"--plugin={file}"
    )
    words = ("export", "wide-heads", "runs", "-o", "wide.json", "--plugin", file)
    printed(*words, "--count", "3")
    assert json.loads(Path("wide.json").read_text()) == [[1, 1], [1, 0], [0, 1]]
    assert "--count: expected" in error_of(*words, "--count", "0", "--replace")
    assert "unknown format 'wide-heads'" in error_of(*words[:-2], "--replace")


WRONG = {
    "import json": ("1 / 0", "mine.py, line 3: ZeroDivisionError: division by zero"),
    "    means = ": ("    means = 1 / 0, ", "line 23: export wide-heads: ZeroDivisionError"),
    "    return Exported": ("    return str", "line 25: export wide-heads: TypeError"),
    "def wide_heads": ("def razor", "line 10: format 'razor' is one of headcount's own"),
    "Exported(files=": ("dict(files=", "wide-heads: expected Exported(files=…), got dict"),
    '    read_by="my_reader",\n': ("", "missing 1 required keyword-only argument: 'read_by'"),
}


def test_what_is_wrong_with_a_format_is_one_line(file: Path):
    for good, (bad, message) in WRONG.items():
        file.write_text(FORMAT.replace(good, bad))
        name = "razor" if "razor" in bad else "wide-heads"
        said = error_of("export", name, "runs", "-o", "wide.json", "--plugin", "mine.py")
        assert message in said
        assert said.startswith("mine.py, line ")
        assert not Path("wide.json").exists()


@pytest.mark.long
def test_a_format_measures_a_statistic_of_the_same_file(file: Path):
    body = FORMAT.replace('"entropy"', '"previous_delimiter_mass"').partition("import json\n")[2]
    file.write_text(f"import json\n{DELIMITERS}{body}")
    words = ("--set", "n_ctx=16", "--set", "sequences=6", "--set", "input.family=uniform_random")
    printed(
        *("export", "wide-heads", "new", "-o", "wide.json", "--plugin", "mine.py"),
        *("--model", "bundled:gpt2-mini", *words),
    )
    assert len(json.loads(Path("wide.json").read_text())) == 2


@pytest.fixture(autouse=True)
def _no_plugins_afterwards():
    yield
    activate(())
