"""What a text names in each registry: an entry with its options, or a line on what is wrong."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headcount.schemas import kinds
from headcount.schemas.errors import HeadcountError, ScanError
from headcount.schemas.fingerprints import fingerprint
from headcount.schemas.formula_kinds import prediction, profile, statistic, weight
from headcount.schemas.formulas import Formula
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.registry import Entry, Registry, import_files, parse_call
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.units import Norm
from headcount.schemas.values import Count, Share
from tests.toys import toy_models as toy

KINDS = {kind.field: kind for kind in kinds.KINDS}

OURS = "headcount.schemas.statistics"  # a module whose names are registered at once


@pytest.mark.parametrize(("field", "text", "canonical"), [
    ("statistics", "entropy", "entropy"),
    ("statistics", "distant_mass", "distant_mass(4,64)"),
    ("statistics", "distant_mass_4_64", "distant_mass(4,64)"),
    ("statistics", "distant_mass( 4, 64.0 )", "distant_mass(4,64)"),
    ("statistics", "distant_mass(8)", "distant_mass(8,64)"),
    ("statistics", "distant_mass(recent=8)", "distant_mass(4,8)"),
    ("statistics", "distant_mass(2, recent = 8)", "distant_mass(2,8)"),
    ("statistics", "labelled_key_mass(other)", "labelled_key_mass(other,query)"),
    ("profiles", "attention_by_lag", "attention_by_lag"),
    ("predictions", "loss", "loss"),
    ("weight_statistics", "query_bias_norm", "query_bias_norm"),
])  # fmt: skip
def test_a_text_names_a_formula(field: str, text: str, canonical: str):
    formula = KINDS[field].find(text)
    assert formula.text == canonical
    assert KINDS[field].find(canonical) == formula == KINDS[field].select([text])[0]


def test_every_wrong_option_of_an_entry_is_a_line():
    def layout(*, n: Count, rate: Share = 0.5) -> None:
        """A layout."""

    layout.__module__ = OURS
    registry: Registry[Entry] = Registry("input family")
    entry = registry.add(Entry(function=layout))
    bound = registry.bind(entry, named={"n": 3, "rate": 1}, field="input", subject="input.OPTION")
    assert bound == {"n": 3, "rate": 1.0}
    given: dict[str, Any] = {"rate": 2, "m": 1}
    with pytest.raises(ScanError) as wrong:
        registry.bind(entry, named=given, field="input", subject="input.OPTION")
    assert str(wrong.value).splitlines() == [
        "input.n: missing; the family layout needs it",
        "input.rate: expected at most 1, got 2",
        "input.m: unknown option of layout 'm': Known: n, rate",
    ]
    with pytest.raises(ValueError, match="input family 'layout' is defined twice"):
        registry.add(entry)


@pytest.mark.parametrize("text", ["", "a b", "a(", "a(1,)", "a(=1)", "a(b=)", "a(b=1,b=2)"])
def test_other_texts_are_no_calls(text: str):
    with pytest.raises(ValueError, match="not a name with options"):
        parse_call(text)


@pytest.mark.parametrize(("names", "canonical"), [
    (["distant_mass(8)"], ("distant_mass(8,64)",)),
    (["standard", "distant_mass(recent=32)"], ("standard", "distant_mass(4,32)")),
    (["standard", "entropy"], "standard"),
    (["all", "distant_mass", "distant_mass(1,2)"], ("all", "distant_mass(1,2)")),
    (["entropy", "sink_mass"], ("entropy", "sink_mass")),
    ("standard", "standard"),
])  # fmt: skip
def test_one_choice_is_one_text_and_so_one_run(names: Any, canonical: Any):
    scan = toy.toy_scan(statistics=names)
    assert scan.names(STATISTICS) == canonical
    again = toy.toy_scan(statistics=canonical if isinstance(canonical, str) else list(canonical))
    assert again.fingerprint == scan.fingerprint
    assert again.formulas(STATISTICS) == scan.formulas(STATISTICS)


def test_a_choice_of_options_is_a_column_of_its_own():
    scan = toy.toy_scan(
        statistics=["distant_mass(16,8)", "entropy", "distant_mass", "distant_mass(4,8)"]
    )
    names = [formula.name for formula in scan.formulas(STATISTICS)]
    names.remove("entropy")
    assert names == ["distant_mass_16_8", "distant_mass_4_64", "distant_mass_4_8"]
    other = STATISTICS.find("distant_mass(16,8)")
    assert other.description.endswith("; sink = 16, recent = 8; " + other.undefined_when)
    assert other.record["options"] == {"sink": 16, "recent": 8}
    assert other.record["function"] == "distant_mass"
    assert "options" not in STATISTICS["entropy"].record
    # The options do not change the code.
    assert other.code == STATISTICS["distant_mass_4_64"].code


def entropy(pattern: Pattern) -> Norm: ...
def misspelt(b_Qs: Tensor) -> Norm: ...
def without_default(pattern: Pattern, *, keys: Count) -> Norm: ...
def without_unit(pattern: Pattern) -> Tensor: ...
def without_formula(pattern: Pattern) -> Norm: ...
def with_option(W_Q: Tensor, *, keys: Count = 1) -> Norm: ...


@pytest.mark.parametrize(("register", "function", "problem"), [
    (statistic("x"), entropy, "statistic 'entropy': defined twice"),
    (statistic("x"), without_default, "option 'keys' needs a default of its type"),
    (statistic("x"), without_formula, "needs a first line (meaning) and a formula paragraph"),
    (statistic("x"), without_unit, "expected a type of schemas.units, which says the unit"),
    (statistic("x"), misspelt, "unknown parameter 'b_Qs': did you mean 'b_Q'"),
    (prediction("x"), entropy, "unknown parameter 'pattern'"),
    (profile("x", axis="keys"), entropy, "unknown axis 'keys': did you mean 'key'"),
    (weight("x", axis="none"), with_option, "a weight statistic has no options, got keys"),
])  # fmt: skip
def test_a_function_that_breaks_the_rules_of_its_kind_is_refused(
    register: Any, function: Any, problem: str
):
    function.__module__ = OURS
    function.__doc__ = "Meaning." if function is without_formula else "Meaning.\n\nformula"
    with pytest.raises(ValueError) as wrong:  # noqa: PT011
        register(function)
    assert problem in str(wrong.value)
    formulas: list[Formula] = [f for kind in KINDS.values() for f in kind.values()]
    assert function not in [formula.function for formula in formulas]


@pytest.mark.parametrize(("code", "line"), [
    ("x = (\n", "line 1: SyntaxError: '(' was never closed"),
    ("\nimport nothing_of_ours.x as y\n", ""),  # a library that is missing is said elsewhere
    ("\n\n1 / 0\n", "line 3: ZeroDivisionError: division by zero"),
    ("def f():\n    raise ValueError('defined\\ntwice')\n\nf()\n", "line 2: defined twice"),
])  # fmt: skip
def test_a_file_that_cannot_be_imported_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, line: str
):
    package = f"toy_formulas_{len(code)}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    file = tmp_path / package / "wrong.py"
    file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    if not line:
        with pytest.raises(ModuleNotFoundError, match="nothing_of_ours"):
            import_files(package, [str(file.parent)])
        return
    with pytest.raises(HeadcountError) as wrong:
        import_files(package, [str(file.parent)])
    assert str(wrong.value).startswith(f"{file}, {line}; mend this file")


def test_without_docstrings_runs_are_read_and_nothing_is_described():
    program = (
        "from headcount.schemas.kinds import KINDS\n"
        "from headcount.schemas.errors import HeadcountError\n"
        "entropy = KINDS[0]['entropy']\n"
        "from headcount.schemas.fingerprints import fingerprint\n"
        "print(entropy.unit, fingerprint(*entropy.code))\n"
        "try:\n    entropy.record\nexcept HeadcountError as error:\n    print(error)\n"
    )
    words = [sys.executable, "-OO", "-c", program]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    entropy = STATISTICS["entropy"]
    assert lines[0] == f"{entropy.unit} {fingerprint(*entropy.code)}"
    assert re.fullmatch(r"PYTHONOPTIMIZE=2 .* set PYTHONOPTIMIZE=1", lines[1])


@pytest.mark.parametrize("fact", ["shown", "example"])
def test_each_place_in_a_page_has_one_statistic(fact: str):
    places = sorted(filter(None, (getattr(formula, fact) for formula in STATISTICS.values())))
    assert places == list(range(1, len(places) + 1))
    assert len(places) > 4
