"""Scan files: what they mean, the errors about wrong ones, and what the fingerprint depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headcount.schemas.errors import ScanError
from headcount.schemas.profiles import KIND as PROFILES
from headcount.schemas.scans.scan import CHANGES_NO_ROW, Scan, load_scan, parse_scan
from headcount.schemas.scans.values import in_toml

MINIMAL = {"model": "toy", "n_ctx": 8, "input": {"family": "pile"}, "sequences": 3}
KNOWN = ", ".join(sorted(Scan.model_fields))

FILE = """
model = "toy"
n_ctx = 8
sequences = 3

[input]
family = "pile"
files = ["a.jsonl", "b.jsonl"]
"""


def error_lines(fields: dict[str, Any]) -> list[str]:
    with pytest.raises(ScanError) as caught:
        parse_scan(fields)
    return str(caught.value).splitlines()


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


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("model", 3, "expected a string"),
        ("model", "", "expected a string that is not empty"),
        ("revision", 3, "expected a string"),
        ("weight_processing", "rwa", "expected 'raw' or 'folded'"),
        ("precision", 16, "expected a string"),
        ("engine", None, "expected 'fused' or 'dense'"),
        ("n_ctx", "8", "expected an integer"),
        ("n_ctx", 8.0, "expected an integer"),
        ("n_ctx", True, "expected an integer"),
        ("n_ctx", 0, "expected 1 or more"),
        ("bos", 1, "expected true or false"),
        ("bos", "true", "expected true or false"),
        ("input", "pile", "expected a table"),
        ("interventions", "none", "expected an array"),
        ("statistics", "al", "expected 'standard' or 'all', or an array"),
        ("statistics", 5, "expected 'standard' or 'all', or an array"),
        ("sequences", "al", "expected an integer or 'all'"),
        ("sequences", 0, "expected 1 or more, or 'all'"),
        ("sequences", 1.5, "expected an integer or 'all'"),
        ("sequences_per_shard", 0, "expected 1 or more"),
        ("batch_size", "large", "expected an integer or 'auto'"),
        ("batch_size", -4, "expected 1 or more, or 'auto'"),
        ("seed", -1, "expected 0 or more"),
        ("seed", "0", "expected an integer"),
        ("out", 3, "expected a string"),
    ],
)
def test_a_wrong_value_is_one_line_with_key_expectation_and_value(
    key: str, value: object, problem: str
):
    assert error_lines(MINIMAL | {key: value}) == [f"{key}: {problem}, got {in_toml(value)}"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"input": {"family": 3}}, "input.family: expected a string, got 3"),
        ({"input": {}}, "input.family: missing; expected the name of an input family"),
        ({"statistics": ["entropy", 2]}, "statistics.1: expected a string, got 2"),
        ({"interventions": [None]}, "interventions.0: expected a string, got None"),
        ({"statistics": []}, "statistics: expected at least one name, each once, got []"),
        ({"interventions": []}, "interventions: expected at least one name, each once, got []"),
        (
            {"statistics": ["entropy", "entropy"]},
            "statistics: expected at least one name, each once, got ['entropy', 'entropy']",
        ),
        (
            {"interventions": ["none", "none"]},
            "interventions: expected at least one name, each once, got ['none', 'none']",
        ),
        ({"profiles": "all"}, "profiles: expected an array, got 'all'"),
        (
            {"profiles": ["attention_by_lag", "attention_by_lag"]},
            "profiles: expected each name once, got ['attention_by_lag', 'attention_by_lag']",
        ),
        (
            {"profiles": ["score_by_pair"], "n_ctx": 257},
            "profiles: score_by_pair keeps every pair of a query and a key, so it expects n_ctx "
            "<= 256, got 257; lower n_ctx or leave it out",
        ),
        ({"n_ctxt": 8}, f"unknown key 'n_ctxt': did you mean 'n_ctx'? Known: {KNOWN}"),
        ({"zzz": 8}, f"unknown key 'zzz': Known: {KNOWN}"),
        (
            {"outputs": ["loss"]},
            "outputs: this field is now called predictions; rename it in the scan",
        ),
    ],
)
def test_a_wrong_place_is_named(changes: dict[str, Any], line: str):
    assert error_lines(MINIMAL | changes) == [line]


def test_an_unknown_statistic_is_answered_with_the_nearest_name():
    (line,) = error_lines(MINIMAL | {"statistics": ["sink_mas"]})
    assert line.startswith(
        "statistics: unknown statistic 'sink_mas': did you mean 'sink_mass'? Known: "
    )


def test_an_unknown_profile_is_answered_with_the_nearest_name():
    (line,) = error_lines(MINIMAL | {"profiles": ["attention_by_lags"]})
    assert line.startswith(
        "profiles: unknown profile 'attention_by_lags': did you mean 'attention_by_lag'? Known: "
    )


def test_profiles_default_to_none_and_pairs_are_allowed_up_to_256_tokens():
    assert parse_scan(MINIMAL | {"profiles": []}).names(PROFILES) == ()
    pairs = parse_scan(MINIMAL | {"profiles": ["score_by_pair"], "n_ctx": 256})
    assert pairs.names(PROFILES) == ("score_by_pair",)


def test_a_scan_without_profiles_has_no_profiles_in_its_record():
    assert "profiles" not in parse_scan(MINIMAL).record
    assert parse_scan(MINIMAL | {"profiles": ["attention_by_lag"]}).record["profiles"] == [
        "attention_by_lag"
    ]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("model", "a Hub id, a local directory, or bundled:NAME"),
        ("n_ctx", "tokens in every sequence, the beginning-of-sequence token included"),
        ("input", "where sequences come from: a family and its options"),
        ("sequences", "how many sequences; all means as many as the corpus holds"),
    ],
)
def test_a_missing_key_is_named_with_what_it_means(key: str, expected: str):
    assert error_lines({k: v for k, v in MINIMAL.items() if k != key}) == [
        f"{key}: missing; expected {expected}"
    ]


def test_several_problems_are_several_lines():
    assert error_lines({"n_ctx": 0, "input": {"family": "pile"}, "sequences": "al", "mode": 1}) == [
        "model: missing; expected a Hub id, a local directory, or bundled:NAME",
        "n_ctx: expected 1 or more, got 0",
        "sequences: expected an integer or 'all', got 'al'",
        f"unknown key 'mode': did you mean 'model'? Known: {KNOWN}",
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("n_ctx", "--set n_ctx: expected key=value, for instance --set n_ctx=128"),
        ("=3", "--set =3: expected key=value, for instance --set n_ctx=128"),
        ("", "--set : expected key=value, for instance --set n_ctx=128"),
        ("n_ctx.deep=3", "--set n_ctx.deep=3: n_ctx is a value, not a table"),
        ("input.family.x=3", "--set input.family.x=3: family is a value, not a table"),
    ],
)
def test_a_malformed_override_is_refused(scan_file: Path, override: str, message: str):
    with pytest.raises(ScanError) as caught:
        load_scan(scan_file, [override])
    assert str(caught.value) == message


def test_a_wrong_override_is_explained_like_a_wrong_file(scan_file: Path):
    with pytest.raises(ScanError) as caught:
        load_scan(scan_file, ["bos=False", "n_ctx=0"])
    assert str(caught.value).splitlines() == [
        f"{scan_file}: n_ctx: expected 1 or more, got 0",
        f"{scan_file}: bos: expected true or false, got 'False'",
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"n_ctx = ", "not valid TOML: Invalid value (at end of document)"),
        (
            b"n_ctx = 1\nn_ctx = 2\n",
            "not valid TOML: Cannot overwrite a value (at line 2, column 10)",
        ),
        (
            b'model = "\xff"',
            "not valid TOML: 'utf-8' codec can't decode byte 0xff in position 9: invalid start "
            "byte",
        ),
    ],
)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes, problem: str):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ScanError) as caught:
        load_scan(path)
    assert str(caught.value) == f"{path}: {problem}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(ScanError) as caught:
        load_scan(tmp_path / "absent.toml")
    expected = "cannot be read (No such file or directory); expected a TOML scan file"
    assert str(caught.value) == f"{tmp_path / 'absent.toml'}: {expected}"
    with pytest.raises(ScanError, match=r"cannot be read \(Is a directory\)"):
        load_scan(tmp_path)


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


def test_an_unknown_precision_is_answered_with_the_nearest():
    (line,) = error_lines(MINIMAL | {"precision": "float23"})
    assert line.startswith("precision: unknown precision 'float23'")
    assert "float32" in line


@pytest.mark.parametrize("bridged", [{"engine": "dense"}, {"weight_processing": "folded"}])
def test_a_low_precision_needs_the_fused_engine(bridged: dict[str, str]):
    assert error_lines(MINIMAL | bridged | {"precision": "bfloat16"}) == [
        "precision: engine = 'dense' and weight_processing = 'folded' compute in float32 or "
        "float64, got 'bfloat16'"
    ]
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
