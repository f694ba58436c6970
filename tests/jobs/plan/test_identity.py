"""Fingerprints of formulas, input families and interventions tell whether a run may continue."""

import importlib.util
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest

from headcount.jobs.plan.plan import Plan, make_plan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.queries.ask.asking import open_runs
from headcount.schemas.errors import QueryError, RunError
from headcount.schemas.fingerprints import fingerprint
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.inputs import INPUTS
from headcount.workers.interventions import INTERVENTIONS
from headcount.workers.model.info.bundled_models import BUNDLED
from headcount.workers.provenance.providers import entry_record
from tests.toys.runs_here import begun
from tests.toys.toy_corpora import write_jsonl
from tests.toys.toy_runs import local

CODE = '''
from functools import cached_property, lru_cache
from typing import Annotated
from pydantic import Field

SIZE = 3

class Table:
    """A table."""

    @cached_property
    def total(self):
        return self.half() * 2

    def half(self):
        return 21

    def other(self):
        return 5

@lru_cache
def helper(x):
    if x < 0:
        raise ValueError(f"{told(x)} is too small")
    return x + SIZE

def told(x):
    return str(x)

def unused():
    return 1

Size = Annotated[int, Field(ge=0)]

def intervention(x, size: int | None = None) -> int:
    """Say something."""
    table = Table()
    return helper(x) * table.total
'''
COUNT = itertools.count()


def fingerprint_of(path: Path, old: str = "", new: str = "") -> str:
    """The fingerprint of `intervention` in CODE, as a module of `workers`, after a replacement."""
    assert old in CODE
    file = path / f"made_{next(COUNT)}.py"
    file.write_text(CODE.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"headcount.workers.{file.stem}", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return fingerprint(module.intervention)


@pytest.mark.parametrize(("old", "new", "shows"), [
    ("helper(x) * ", "helper(x) + ", True),  # the function
    ("x + SIZE", "x - SIZE", True),  # a helper behind a cache
    ("SIZE = 3", "SIZE = 4", True),  # a constant of a helper
    ("self.half() * 2", "self.half() * 3", True),  # a method that it names
    ("return 21", "return 22", True),  # a method that this method names
    ("x < 0", "x < 1", True),  # what is refused
    ("Say something.", "Say something else.", False),
    ("x + SIZE", "(x + SIZE)  # why", False),
    ("return 1\n", "return 2\n", False),  # a function that nobody calls
    ("return 5", "return 6", False),  # a method likewise
    ("is too small", "is too low", False),  # how it is said
    ("str(x)", "repr(x)", False),  # likewise
    ("size: int |", "size: Size |", False),  # which options are refused
    ("-> int:", "-> Size:", False),  # what its values are between
])  # fmt: skip
def test_a_change_of_meaning_shows_and_no_other(tmp_path: Path, old: str, new: str, shows: bool):
    assert (fingerprint_of(tmp_path, old, new) != fingerprint_of(tmp_path)) == shows


CONSTANTS = """
import re, enum, dataclasses, functools
import numpy as np
class Mode(enum.Enum):
    A = 1
@dataclasses.dataclass(frozen=True)
class Facts:
    size: int = 2
    names: tuple = ("a",)
def doubled(x, by=2):
    return x * by
TABLE = {"a": doubled}
CONSTANT = VALUE
def read(x):
    return CONSTANT, x
"""


def constant_fingerprint(path: Path, value: str) -> str:
    """The fingerprint of a function of `workers` that reads a constant with this value."""
    file = path / f"made_{next(COUNT)}.py"
    file.write_text(CONSTANTS.replace("VALUE", value))
    spec = importlib.util.spec_from_file_location(f"headcount.workers.{file.stem}", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return fingerprint(module.read)


@pytest.mark.parametrize(("value", "other"), [
    ("('Mary', 'John')", "('Mary', 'Tom')"), ("['a']", "['b']"), ("{'a': [1]}", "{'a': [2]}"),
    ("{'a': 1}", "{'b': 1}"), ("{'a', 'b'}", "{'a', 'c'}"), ("frozenset('ab')", "frozenset('a')"),
    ("Mode.A", "2"), ("Facts()", "Facts(3)"), ("np.arange(3)", "np.arange(4)"),
    ("np.arange(3)", "np.arange(3.0)"), ("np.array(['a', None])", "np.array(['b', None])"),
    ("re.compile('a' * 300)", "re.compile('a' * 299 + 'b')"),
    ("re.compile('a')", "re.compile('a', re.I)"),
    ("functools.partial(doubled, by=3)", "functools.partial(doubled, by=4)"),
    ("{'f': doubled}", "{'f': dataclasses.fields}"), ("b'a'", "b'b'"), ("range(3)", "range(4)"),
    ("((1, (2, {'a': {3}})),)", "((1, (2, {'a': {4}})),)"),
])  # fmt: skip
def test_a_constant_that_code_reads_shows(tmp_path: Path, value: str, other: str):
    assert constant_fingerprint(tmp_path, value) == constant_fingerprint(tmp_path, value)
    assert constant_fingerprint(tmp_path, value) != constant_fingerprint(tmp_path, other)


def test_the_elements_of_a_set_have_one_order(tmp_path: Path):
    letters = "{'a', 'b', 'c', 'd', 'e', 'f'}"
    assert constant_fingerprint(tmp_path, letters) == constant_fingerprint(
        tmp_path, "{'f', 'e', 'd', 'c', 'b', 'a'}"
    )


@pytest.mark.parametrize(
    "value", ["iter(())", "np.random.default_rng()", "[lambda: 1, object, iter('a')]"]
)
def test_a_constant_that_cannot_be_written_down_is_an_error(tmp_path: Path, value: str):
    with pytest.raises(TypeError, match="has no fingerprint"):
        constant_fingerprint(tmp_path, value)


def constants_of_families() -> list[tuple[str, str]]:
    """The constants of the modules of input families, by module."""
    modules = {entry.function.__module__ for entry in INPUTS.values()}
    return [
        (module, name)
        for module in sorted(modules)
        for name, value in vars(sys.modules[module]).items()
        # What only an error names is no part of a family.
        if name.isupper() and isinstance(value, tuple | dict) and name != "COMPRESSED"
    ]


@pytest.mark.parametrize(("module", "name"), constants_of_families())
def test_another_constant_of_an_input_family_is_another_family(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
):
    def fingerprints() -> list[str]:
        return [fingerprint(entry.function) for entry in INPUTS.values()]

    before = fingerprints()
    value = getattr(sys.modules[module], name)
    changed = (*value, "more") if isinstance(value, tuple) else {**value, ".more": "more"}
    monkeypatch.setattr(sys.modules[module], name, changed)
    assert fingerprints() != before


def planned(path: Path, name: str) -> Plan:
    fields = {"model": "bundled:attn-only-2l-mini", "n_ctx": 9, "sequences": 2, "out": str(path)}
    fields |= {"input": {"family": "ngram_overlap"}}
    fields |= {"interventions": ["none", "zero_head(0,0)+mean_head(1,1)", "zero_head(0,1)"]}
    return begun(fields, name)


def test_a_run_knows_the_code_of_its_input_and_its_interventions(tmp_path: Path):
    manifest = planned(tmp_path, "a").run.manifest()
    assert list(manifest.inputs) == ["ngram_overlap"]
    assert list(manifest.interventions) == ["none", "zero_head", "mean_head"]
    code_of_input = {name: family.fingerprint for name, family in INPUTS.items()}
    code_of_change = {name: fingerprint(*each.code) for name, each in INTERVENTIONS.items()}
    for registry, codes, records in (
        (INPUTS, code_of_input, manifest.inputs),
        (INTERVENTIONS, code_of_change, manifest.interventions),
    ):
        assert records == {name: entry_record(registry[name], codes[name]) for name in records}
        assert len({*codes.values()}) == len(registry)


@pytest.mark.parametrize(
    ("kind", "name", "word"),
    [("inputs", "ngram_overlap", "input family"), ("interventions", "mean_head", "intervention")],
)
def test_two_meanings_under_one_name_are_neither_continued_nor_mixed(
    tmp_path: Path, kind: str, name: str, word: str
):
    first, second = planned(tmp_path, "a"), planned(tmp_path, "b")
    open_runs(tmp_path)
    file = local(second.run.manifest_file)
    manifest = json.loads(file.read_text())
    manifest[kind][name]["fingerprint"] = "0" * 12
    file.write_text(json.dumps(manifest))
    code = rf'the code of {word} {name} \("000000000000", now "\w+"\); headcount scan --new '
    with pytest.raises(RunError, match=code):
        planned(tmp_path, "b")
    problem = (
        rf"{word} '{name}' has one formula in run {first.run.run_id} \(.+\) "
        rf"and another in run {second.run.run_id} \(0+\)"
    )
    with pytest.raises(QueryError, match=problem):
        open_runs(tmp_path)


def test_one_model_and_one_corpus_are_one_run_however_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BUNDLED["gpt2-mini"], tmp_path / "m")
    Path("link").symlink_to("m")
    (tmp_path / "t").mkdir()
    write_jsonl(tmp_path / "t" / "a.jsonl", [(f"document {n} about foxes", None) for n in range(4)])
    shutil.copytree(tmp_path / "t", tmp_path / "copy")
    Path("l").symlink_to("t")
    fields = {"n_ctx": 9, "sequences": 2, "out": "runs", "statistics": ["sink_mass", "entropy"]}
    fields |= {"interventions": ["zero_head(0,0)", "none"]}
    synthetic = {"family": "uniform_random"}
    first = begun(fields | {"model": "m", "input": synthetic}, "a").run
    for model in ("./m", "m/", str(tmp_path / "m"), "link", "bundled:gpt2-mini"):
        assert (
            make_plan(parse_scan(fields | {"model": model, "input": synthetic}), "a").run == first
        )
    files = ["t/*.jsonl", "./t/a.jsonl", str(tmp_path / "t" / "*"), "l/a.jsonl", "copy/a.jsonl"]
    texts = [{"family": "pile", "files": each} for each in (*files, ["copy/a.jsonl"])]
    first = begun(fields | {"model": "m", "input": texts[0]}, "b").run
    for text in texts:
        plan = make_plan(parse_scan(fields | {"model": "link", "input": text}), "b")
        assert plan.run == first
    # The manifest says how the scan that continues it names the place.
    assert plan.manifest.places == {"model": "link", "input.files": ["copy/a.jsonl"]}
    write_jsonl(tmp_path / "copy" / "a.jsonl", [("another document", None) for _ in range(4)])
    other = make_plan(parse_scan(fields | {"model": "m", "input": texts[-1]}), "b")
    assert other.run != first
    # Another run of the scan, and then the newest, whatever the place is called.
    scan = parse_scan(fields | {"model": "./m", "input": synthetic})
    new = make_plan(scan, "a", new=True)
    prepare_run(new, "")
    assert new.run.run_id.endswith("-2")
    for model in ("m", "link"):
        scan = parse_scan(fields | {"model": model, "input": synthetic})
        assert make_plan(scan, "a").run == new.run


@pytest.mark.parametrize(("change", "other"), [
    ({"statistics": ["sink_mass", "entropy"]}, {"statistics": ["entropy", "sink_mass"]}),
    ({"interventions": ["none", "zero_head(0,0)"]}, {"interventions": ["zero_head(0,0)", "none"]}),
    ({"profiles": ["sink_resid_post_by_dimension", "attention_by_lag"]},
     {"profiles": ["attention_by_lag", "sink_resid_post_by_dimension"]}),
    ({"input": {"family": "pile", "files": ["a", "b"], "where": {"k": [1, "2"]}}},
     {"input": {"family": "pile", "files": ["b", "a"], "where": {"k": ["2", 1]}}}),
    ({"input": {"family": "pile", "files": "a", "columns": ["x", "y"]}},
     {"input": {"family": "pile", "files": "a", "columns": ["y", "x"]}}),
])  # fmt: skip
def test_the_order_of_a_list_that_means_nothing_makes_no_other_run(
    change: dict[str, object], other: dict[str, object]
):
    fields = {"model": "m", "n_ctx": 9, "sequences": 2, "input": {"family": "uniform_random"}}
    assert parse_scan(fields | change).run_id("a") == parse_scan(fields | other).run_id("a")
    assert parse_scan(fields | change).run_id("a") != parse_scan(fields).run_id("a")
