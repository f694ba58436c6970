"""What a plug-in registers, its fingerprints, and what is wrong with a file."""

from pathlib import Path

import pytest

from headcount.schemas.errors import ScanError
from headcount.schemas.fingerprints import fingerprint as fingerprint_of
from headcount.schemas.formula_kinds import STATISTICS
from headcount.schemas.plugin_files import read_plugins
from headcount.schemas.plugins import activate
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import parse_scan
from tests.plugins.files import DELIMITERS, HEADER, statistic_file
from tests.toys.refusals import refused

NAME = "previous_delimiter_mass"


def scan_with(*files: Path, **fields: object) -> Scan:
    return parse_scan(
        {"model": "bundled:gpt2-mini", "n_ctx": 8, "sequences": 1, "statistics": [NAME],
         "input": {"family": "uniform_random"}, "plugins": [*map(str, files)], **fields}
    )  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_heads.py"
    path.write_text(DELIMITERS)
    return path


def fingerprint(file: Path, content: str) -> str:
    file.write_text(content)
    (formula,) = scan_with(file).formulas(STATISTICS)
    return fingerprint_of(*formula.code)


def test_a_fingerprint_covers_functions_and_constants_of_the_file_and_no_prose(file: Path):
    first = fingerprint(file, DELIMITERS)
    assert fingerprint(file, DELIMITERS.replace("Mean attention", "The mean attention")) == first
    assert fingerprint(file, f"# {DELIMITERS}") == first
    assert fingerprint(file, DELIMITERS.replace("[10, 46]", "[10, 47]")) != first
    assert fingerprint(file, DELIMITERS.replace("lag=0", "lag=1")) != first


def test_each_scan_has_its_own_version_of_a_file_and_a_scan_without_has_none(file: Path):
    old = scan_with(file)
    file.write_text(DELIMITERS.replace(".mean(-1)", ".amax(-1)"))
    new = scan_with(file)
    (of_new,) = new.formulas(STATISTICS)
    (of_old,) = old.formulas(STATISTICS)
    assert fingerprint_of(*of_old.code) != fingerprint_of(*of_new.code)
    # Of one name and one meaning, so the runs are of one scan, which the fingerprints tell apart.
    assert old.fingerprint == new.fingerprint
    message = refused(ScanError, scan_with)
    assert message.startswith(f"statistics: unknown statistic '{NAME}'")
    assert NAME not in STATISTICS


def test_a_wrong_file_is_one_line_with_the_place_of_the_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "wrong.py"
    unit = statistic_file("return pattern.key(0).mean(-1)").replace("-> Probability", "-> Tensor")
    expectations = {
        "import no_such_module\n": "line 1: ModuleNotFoundError: No module named 'no_such_module'",
        "x = 1\nx = (": "line 2: SyntaxError: '(' was never closed",
        "x = 1\n\nraise SystemExit(3)\n": "line 3: SystemExit: 3",
        f"{HEADER}x = 1 / 0\n": "line 6: ZeroDivisionError: division by zero",
        unit: "line 8: tried: expected a type of schemas.units, which says the unit, as what it",
        statistic_file("pass", name="entropy"): (
            "line 8: statistic 'entropy' is one of headcount's own; call it otherwise"
        ),
        statistic_file("pass", name="Entropy"): "statistic 'Entropy': expected at most 60 of a to",
        statistic_file("pass", name="label"): "is, or begins as, a column of every run",
        statistic_file("pass", name="uniform_mass"): "is, or begins as, a column of every run",
        statistic_file("pass").replace("tokens: Tensor", "token: Tensor"): (
            "line 8: statistic 'tried': unknown parameter 'token'"
        ),
        statistic_file("pass") + statistic_file("pass"): (
            f"line 22: statistic 'tried' is defined before, in {file}, line 8"
        ),
        statistic_file(
            "return BAD", decorator='BAD = __import__("threading").Lock()\n@statistic("here")'
        ): ("line 9: TypeError: a constant of type lock has no fingerprint"),
        "\x00": "source code string cannot contain null bytes",
    }
    for content, message in expectations.items():
        file.write_text(content)
        said = refused(ScanError, scan_with, file, statistics=["entropy"])
        assert said.startswith(str(file)), said
        assert message in said
    file.write_bytes(b"# \xff\n")
    assert "can't decode byte 0xff" in refused(ScanError, scan_with, file)
    assert refused(ScanError, scan_with, tmp_path / "no.py") == (
        f"plugins: {tmp_path}/no.py: cannot be read (No such file or directory); expected a "
        "Python file"
    )
    assert "unknown installed plug-in 'heads'" in refused(ScanError, scan_with, Path("heads"))
    (tmp_path / "helpers_of_mine.py").write_text("def half(x): return x / 2")
    monkeypatch.syspath_prepend(str(tmp_path))
    file.write_text(f"from helpers_of_mine import half\n{DELIMITERS}")
    assert "imports helpers_of_mine from the same folder" in refused(ScanError, scan_with, file)
    file.write_text("def sink(): ...\n")
    assert f"{file}: defines nothing; decorate" in refused(ScanError, scan_with, file)
    (tmp_path / "folder.py").mkdir()
    assert "folder.py: " in refused(ScanError, scan_with, tmp_path / "folder.py")
    monkeypatch.setenv("HEADCOUNT_INPUT_ROOTS", str(tmp_path))
    assert "only installed plug-ins run" in refused(ScanError, scan_with, file)
    for value in ("my_heads.py", 3, [3]):
        assert "plugins: expected a" in refused(ScanError, scan_with, plugins=value)


def test_an_installed_package_offers_plug_ins_by_an_entry_point(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    site = tmp_path / "site"
    (site / "my_package").mkdir(parents=True)
    (site / "my_package" / "__init__.py").touch()
    file.rename(site / "my_package" / "heads.py")
    information = site / "my_package-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: my-package\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[headcount.plugins]\nmine = my_package.heads\nlost = my_package.lost\n"
    )
    monkeypatch.syspath_prepend(str(site))
    scan = scan_with(Path("mine"))
    assert [formula.name for formula in scan.formulas(STATISTICS)] == [NAME]
    assert scan.plugins[0].content == DELIMITERS.encode()
    assert refused(ScanError, scan_with, Path("lost")) == (
        "plugins: lost: its package has no module my_package.lost"
    )
    assert "unknown installed plug-in 'min': did you mean 'mine'" in refused(
        ScanError, scan_with, Path("min")
    )


def test_two_plug_ins_cannot_define_one_name(file: Path):
    other = file.with_name("other.py")
    other.write_text(DELIMITERS)
    assert refused(ScanError, scan_with, file, other) == (
        f"{other}, line 13: statistic '{NAME}' is defined before, in {file}, line 13; call one of "
        "them otherwise"
    )
    assert "expected each name once" in refused(ScanError, scan_with, file, file)
    # What was refused is not half there.
    activate(read_plugins([file]))
    assert STATISTICS[NAME].meaning.startswith("Mean attention to the last delimiter")
    activate(())
    assert NAME not in STATISTICS
