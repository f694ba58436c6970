"""Scan files: what they mean, and what the fingerprint depends on; kinds of measurement and tables,
and what is derived from the two lists. Wrong files: `tests/misuse`.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest

from headcount.schemas.errors import ScanError
from headcount.schemas.filled_tables import FILLINGS, TABLES
from headcount.schemas.kinds import KINDS, table_schema
from headcount.schemas.scans.overrides import split_override
from headcount.schemas.scans.scan import WITHOUT_IDENTITY, Scan
from headcount.schemas.scans.scan_file import load_scan, parse_scan
from headcount.schemas.statistics import STATISTICS
from tests.toys import toy_models as toy

MINIMAL = {"model": "toy", "n_ctx": 8, "input": {"family": "pile"}, "sequences": 3}

FILE = """
model = "toy"
n_ctx = 8
sequences = 3

[input]
family = "pile"
files = ["a.jsonl", "b.jsonl"]
"""


@pytest.fixture
def scan_file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.parametrize(("override", "key", "value"), [
    ("n_ctx=16", "n_ctx", 16),
    ("sequences=all", "sequences", "all"),
    ('sequences="all"', "sequences", "all"),
    ("bos=false", "bos", False),
    ("out=some/where", "out", "some/where"),
    ("out=a=b", "out", "a=b"),
    (" seed = 7", "seed", 7),
    ("model=bundled:gpt2-mini", "model", "bundled:gpt2-mini"),
    ('statistics=["entropy", "sink_mass"]', "statistics", ("entropy", "sink_mass")),
])  # fmt: skip
def test_an_override_is_toml_or_bare_text(scan_file: Path, override: str, key: str, value: object):
    assert getattr(load_scan(scan_file, [override]), key) == value


def test_overrides_reach_into_tables_and_the_last_one_counts(scan_file: Path):
    overrides = ["input.packing=document", "input.packing=concat", "input.files=c.jsonl"]
    scan = load_scan(scan_file, overrides)
    assert scan.input.options == {"files": "c.jsonl", "packing": "concat"}
    scan_file.write_text(FILE.partition("[input]")[0], encoding="utf-8")
    assert load_scan(scan_file, ["input.family=pile"]).input.family == "pile"


@pytest.mark.parametrize(("override", "names", "value"), [
    ('input.where."meta.year"=2020', ["input", "where", "meta.year"], 2020),
    ("input.where.'größe' = 'a.b=c'", ["input", "where", "größe"], "a.b=c"),
    ('input . where . "a=b" = [1]', ["input", "where", "a=b"], [1]),
    ('input.where."a\\u002eb".c=x.y=z', ["input", "where", "a.b", "c"], "x.y=z"),
])  # fmt: skip
def test_the_key_of_an_override_is_read_as_toml(
    scan_file: Path, override: str, names: list[str], value: object
):
    expected: Any = value
    for name in reversed(names[1:]):
        expected = {name: expected}
    assert load_scan(scan_file, [override]).input.options["where"] == expected["where"]
    assert split_override(override)[0] == names


@pytest.mark.parametrize("key", [
    "", "n_ctx.", "a b", "größe", '"a', '"a"b', "'''a'''", "[input]\nseed", "# seed",
    "a." * 5000 + "a",
])  # fmt: skip
def test_what_is_no_key_of_toml_sets_nothing(scan_file: Path, key: str):
    with pytest.raises(ScanError, match="expected key=value, for instance --set n_ctx=128"):
        load_scan(scan_file, [f"{key}=1"])


CHANGES: dict[str, Any] = {
    "model": "other", "revision": "main", "tokenizer": "other", "precision": "float64",
    "weight_processing": "folded",
    "unused_weights": "ignore", "adapter": "apply", "engine": "dense", "n_ctx": 9, "bos": False,
    "input": {"family": "pile", "packing": "concat"}, "interventions": ["none", "zero_first_value"],
    "layers": [0], "heads": ["L0H1"], "statistics": ["entropy"], "profiles": ["attention_by_lag"],
    "curves": ["score_shift_by_key"], "weight_statistics": ["query_bias_norm"],
    "predictions": ["loss"], "sequences_per_shard": 8, "seed": 1,
}  # fmt: skip


def fingerprint(**fields: Any) -> str:
    return parse_scan(MINIMAL | fields).fingerprint


def test_the_fingerprint_changes_with_every_field_that_can_change_a_row():
    assert set(Scan.model_fields) - set(CHANGES) == set(WITHOUT_IDENTITY)
    assert [key for key in CHANGES if fingerprint(**{key: CHANGES[key]}) == fingerprint()] == []


def test_the_fingerprint_does_not_depend_on_how_and_how_much_is_measured_nor_on_its_wording():
    same = [{"sequences": 4}, {"sequences": "all"}, {"batch_size": 2}, {"out": "elsewhere"}]
    # Defaults, written out.
    same.append({"seed": 0, "bos": "auto"})
    # What auto means is known only with the model: until then it is this.
    same.append({"bos": True})
    assert {fingerprint(**fields) for fields in same} == {fingerprint()}
    options = {"family": "pile", "files": "a", "packing": "concat"}
    backwards = {key: MINIMAL[key] for key in reversed(MINIMAL)}
    backwards |= {"input": dict(reversed(options.items()))}
    assert parse_scan(backwards).fingerprint == fingerprint(input=options)


def test_parse_scan_takes_what_it_writes():
    scan = toy.toy_scan(statistics=["standard", "distant_mass(2,3)"])
    assert parse_scan(scan.model_dump(mode="json", exclude_none=True)) == scan


# Kinds and tables


def test_readers_of_runs_and_the_registries_know_the_same_kinds() -> None:
    assert [filling.field for filling in FILLINGS] == [kind.field for kind in KINDS]


def test_every_field_is_of_one_kind_and_every_table_is_filled():
    fields = [kind.field for kind in KINDS]
    assert len(set(fields)) == len(fields)
    assert [field for field in Scan.model_fields if field in fields] == fields
    for table in TABLES.values():
        assert set(table.order) <= set(table.own), table.name


def test_no_two_columns_of_a_table_have_one_name():
    formulas_by_field = {kind.field: list(kind.values()) for kind in KINDS}
    for table in TABLES.values():
        names = table_schema(table, formulas_by_field).names
        assert len(set(names)) == len(names), table.name


def test_a_scan_is_the_same_after_ray_has_pickled_it():
    scan = toy.toy_scan(curves=["value_norm_by_key"])
    assert pickle.loads(pickle.dumps(scan)) == scan
    assert [kind.field for kind in scan.kinds()] == ["statistics", "curves"]
    assert [kind.field for kind in scan.kinds("from the weights")] == []
    assert [f.name for f in scan.formulas(STATISTICS)] == toy.FORWARD_STATISTICS
