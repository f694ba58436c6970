"""Scan files: what they mean, and what the fingerprint depends on. Wrong ones: `tests/misuse`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headcount.schemas.profiles import KIND as PROFILES
from headcount.schemas.scans.scan import CHANGES_NO_ROW, Scan, load_scan, parse_scan

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


def test_a_minimal_scan_has_these_defaults():
    assert parse_scan(MINIMAL).model_dump() == {
        "model": "toy",
        "revision": None,
        "weight_processing": "raw",
        "unused_weights": "refuse",
        "precision": "auto",
        "engine": "fused",
        "n_ctx": 8,
        "bos": True,
        "input": {"family": "pile"},
        "interventions": ("none",),
        "layers": "all",
        "heads": "all",
        "statistics": "standard",
        "profiles": (),
        "curves": (),
        "weight_statistics": (),
        "predictions": (),
        "sequences": 3,
        "sequences_per_shard": 256,
        "batch_size": "auto",
        "seed": 0,
        "bad_rows": 0.01,
        "bad_rows_in_a_row": 100,
        "out": "runs",
        "corpora": None,
    }


def test_profiles_default_to_none_and_pairs_are_allowed_up_to_256_tokens():
    assert parse_scan(MINIMAL | {"profiles": []}).names(PROFILES) == ()
    pairs = parse_scan(MINIMAL | {"profiles": ["score_by_pair"], "n_ctx": 256})
    assert pairs.names(PROFILES) == ("score_by_pair",)


def test_a_scan_without_profiles_has_no_profiles_in_its_record():
    assert "profiles" not in parse_scan(MINIMAL).record
    assert parse_scan(MINIMAL | {"profiles": ["attention_by_lag"]}).record["profiles"] == [
        "attention_by_lag"
    ]


def test_options_of_the_input_are_kept_as_written(scan_file: Path):
    assert load_scan(scan_file).input.options == {"files": ["a.jsonl", "b.jsonl"]}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("n_ctx=16", "n_ctx", 16),
        ("sequences=all", "sequences", "all"),
        ('sequences="all"', "sequences", "all"),
        ("bos=false", "bos", False),
        ("out=some/where", "out", "some/where"),
        ("out=a=b", "out", "a=b"),
        (" seed = 7", "seed", 7),
        ("model=bundled:gpt2-mini", "model", "bundled:gpt2-mini"),
        ('statistics=["entropy", "sink_mass"]', "statistics", ("entropy", "sink_mass")),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_string(
    scan_file: Path, override: str, key: str, value: object
):
    assert getattr(load_scan(scan_file, [override]), key) == value


def test_overrides_reach_into_tables_and_the_last_one_counts(scan_file: Path):
    scan = load_scan(
        scan_file, ["input.packing=document", "input.packing=concat", "input.files=c.jsonl"]
    )
    assert scan.input.options == {"files": "c.jsonl", "packing": "concat"}


def test_an_override_can_make_a_table(tmp_path: Path):
    path = tmp_path / "bare.toml"
    path.write_text('model = "toy"\nn_ctx = 8\nsequences = 3\n', encoding="utf-8")
    assert load_scan(path, ["input.family=pile"]).input.family == "pile"


def test_a_scan_cannot_be_changed():
    scan = parse_scan(MINIMAL)
    with pytest.raises(ValidationError, match="frozen"):
        scan.n_ctx = 9  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        scan.input.family = "text"  # pyright: ignore[reportAttributeAccessIssue]


CHANGES: dict[str, Any] = {
    "model": "other",
    "revision": "main",
    "precision": "float64",
    "weight_processing": "folded",
    "unused_weights": "ignore",
    "engine": "dense",
    "n_ctx": 9,
    "bos": False,
    "input": {"family": "pile", "packing": "concat"},
    "interventions": ["none", "zero_first_value"],
    "layers": [0],
    "heads": ["L0H1"],
    "statistics": ["entropy"],
    "profiles": ["attention_by_lag"],
    "curves": ["score_shift_by_key"],
    "weight_statistics": ["query_bias_norm"],
    "predictions": ["loss"],
    "sequences_per_shard": 8,
    "seed": 1,
}


@pytest.mark.parametrize("key", CHANGES)
def test_the_fingerprint_changes_with(key: str):
    assert parse_scan(MINIMAL | {key: CHANGES[key]}).fingerprint != parse_scan(MINIMAL).fingerprint


def test_every_field_that_can_change_a_row_is_known_to_change_the_fingerprint():
    assert set(Scan.model_fields) - set(CHANGES) == set(CHANGES_NO_ROW)


@pytest.mark.parametrize("change", [{"sequences": 4}, {"sequences": "all"}, {"batch_size": 2}])
def test_the_fingerprint_does_not_depend_on_how_and_how_much_is_measured(change: dict[str, Any]):
    assert parse_scan(MINIMAL | change).fingerprint == parse_scan(MINIMAL).fingerprint


@pytest.mark.parametrize("bridged", [{"engine": "dense"}, {"weight_processing": "folded"}])
def test_the_bridge_computes_in_float32_or_float64(bridged: dict[str, str]):
    for precision in ("auto", "float32", "float64"):
        assert parse_scan(MINIMAL | bridged | {"precision": precision}).precision == precision


def test_the_fingerprint_does_not_depend_on_where_the_run_is_written():
    assert parse_scan(MINIMAL | {"out": "elsewhere"}).fingerprint == parse_scan(MINIMAL).fingerprint


def test_the_fingerprint_does_not_depend_on_the_order_of_keys():
    options = {"family": "pile", "files": "a", "packing": "concat"}
    backwards = {key: MINIMAL[key] for key in reversed(MINIMAL)} | {
        "input": dict(reversed(options.items()))
    }
    assert parse_scan(backwards).fingerprint == parse_scan(MINIMAL | {"input": options}).fingerprint


def test_a_default_written_out_is_the_same_scan():
    assert (
        parse_scan(MINIMAL | {"seed": 0, "bos": True}).fingerprint
        == parse_scan(MINIMAL).fingerprint
    )


def test_the_run_id_is_the_name_and_the_fingerprint():
    scan = parse_scan(MINIMAL)
    assert len(scan.fingerprint) == 8
    assert int(scan.fingerprint, 16) >= 0
    assert scan.run_id("toy") == f"toy-{scan.fingerprint}"
