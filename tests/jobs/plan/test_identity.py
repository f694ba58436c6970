"""Fingerprints of formulas, input families and interventions tell whether a run may continue."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

from headcount.jobs.plan.plan import Plan
from headcount.queries.open.connection import connect
from headcount.schemas.errors import QueryError, RunError
from headcount.schemas.files.fingerprints import fingerprint
from headcount.workers.inputs import INPUTS
from headcount.workers.interventions import INTERVENTIONS
from tests.toys.runs_here import begun
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


def planned(path: Path, name: str) -> Plan:
    fields = {"model": "bundled:attn-only-2l-mini", "n_ctx": 9, "sequences": 2, "out": str(path)}
    fields |= {"input": {"family": "ngram_overlap"}}
    fields |= {"interventions": ["none", "zero_head(0,0)+mean_head(1,1)", "zero_head(0,1)"]}
    return begun(fields, name)


def test_a_run_knows_the_code_of_its_input_and_its_interventions(tmp_path: Path):
    manifest = planned(tmp_path, "a").run.manifest()
    assert list(manifest.inputs) == ["ngram_overlap"]
    assert list(manifest.interventions) == ["none", "zero_head", "mean_head"]
    for registry, records in ((INPUTS, manifest.inputs), (INTERVENTIONS, manifest.interventions)):
        assert records == {name: registry[name].record for name in records}
        fingerprints = {registered.record["fingerprint"] for registered in registry.values()}
        assert len(fingerprints) == len(registry)


@pytest.mark.parametrize(
    ("kind", "name", "word"),
    [("inputs", "ngram_overlap", "input family"), ("interventions", "mean_head", "intervention")],
)
def test_two_meanings_under_one_name_are_neither_continued_nor_mixed(
    tmp_path: Path, kind: str, name: str, word: str
):
    first, second = planned(tmp_path, "a"), planned(tmp_path, "b")
    connect(tmp_path)
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
        connect(tmp_path)
