"""The scripts of our pages: modules in the explorer, joined into one in a report."""

import posixpath
import re
from pathlib import Path

import pytest

from headcount.queries.report.html_page import CARD, PAGE, REPORT, TEMPLATES, joined

IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";', re.MULTILINE)
EXPORT = re.compile(
    r"^export (?:async )?(?:function|const|class|let) (\w+|\{[^}]*\})", re.MULTILINE
)
DECLARATION = re.compile(r"^(?:async )?(?:function|const|class|let) (\w+)", re.MULTILINE)


def text_of(module: str) -> str:
    return (PAGE / module).read_text(encoding="utf-8")


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("modules", [CARD, REPORT])
def test_a_module_comes_after_those_that_it_imports(modules: tuple[str, ...]) -> None:
    exported: dict[str, set[str]] = {}
    for module in modules:
        for names, source in IMPORT.findall(text_of(module)):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(module), source))
            assert words(names) <= exported[path], (module, source)
        exported[module] = words(" ".join(EXPORT.findall(text_of(module))))


def test_a_report_has_every_module_and_no_name_twice() -> None:
    assert {*REPORT} == {file.relative_to(PAGE).as_posix() for file in PAGE.rglob("*.js")}
    script = joined(map(text_of, REPORT))
    assert not re.search("^(import|export) ", script, re.MULTILINE)
    names = DECLARATION.findall(script)
    assert sorted(names) == sorted(set(names))


def test_no_line_of_a_script_is_longer_than_100_characters() -> None:
    scripts = [*PAGE.rglob("*.js"), *Path(TEMPLATES).glob("*.js")]
    lines = [line for file in scripts for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines if len(line) > 100] == []
