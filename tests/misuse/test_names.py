"""Scan files and directories with odd names: each run is found, continued and read as itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headcount.jobs.plan.plan import make_plan, prepare_run
from headcount.jobs.plan.portable_scan import portable_scan
from headcount.schemas.scans.scan import LONGEST_NAME, SAFE_NAME, load_scan, parse_scan, safe_name
from tests.toys import toy_runs

NAMES = [
    ("lr=0.1", "lr_0.1"),
    ("a?b", "a_b"),
    ("a%20b", "a_20b"),
    ("a\\b", "a_b"),
    ("a b", "a_b"),
    ("a*[b]", "a__b_"),
    ("it's", "it_s"),
    ('a"b', "a_b"),
    ("a\nb", "a_b"),
    ("a\tb", "a_b"),
    ("a;b|c&d", "a_b_c_d"),
    ("$HOME", "_HOME"),
    ("{a}", "_a_"),
    ("#1", "_1"),
    ("a+b,c", "a_b_c"),
    ("a@b:c", "a_b_c"),
    ("-rf", "_rf"),
    ("--help", "_-help"),
    (".hidden", "_hidden"),
    (".toml", "_toml"),
    (".", "_"),
    ("..", "_."),
    ("café", "cafe"),
    ("cafe\u0301", "cafe"),
    ("Größe", "Gro_e"),
    ("日本", "__"),
    ("😀", "_"),
    ("\udcff", "_"),
    ("\u202eabc", "_abc"),
    ("ﬁt", "fit"),
    ("a" * 250, "a" * LONGEST_NAME),
    ("plain-name_1.2", "plain-name_1.2"),
]


@pytest.mark.parametrize(("name", "safe"), NAMES)
def test_a_run_has_a_name_that_every_system_takes(name: str, safe: str):
    run_id = parse_scan(FIELDS).run_id(name)
    assert run_id.rpartition("-")[0] == safe == safe_name(safe)
    assert SAFE_NAME.fullmatch(run_id)
    assert len(f"run_id={run_id}-99") < 255


FIELDS: dict[str, Any] = {
    "model": "bundled:gpt2-mini",
    "n_ctx": 8,
    "sequences": 2,
    "input": {"family": "uniform_random"},
}
TEXT = 'model = "bundled:gpt2-mini"\nn_ctx = 8\nsequences = 2\ninput.family = "uniform_random"\n'


@pytest.mark.parametrize("name", ["lr=0.1", "a?b", "a b", "-x", "日本", "it's", "a\nb"])
def test_a_file_of_any_name_is_a_scan_here_and_on_a_cluster(tmp_path: Path, name: str):
    file = tmp_path / f"{name}.toml"
    file.write_text(TEXT)
    here = load_scan(file).run_id(file.stem)
    assert portable_scan(file, ["out=/r"]).run_id(file.stem) == here
    assert here.startswith(f"{safe_name(name)}-")


ODD_NAMES = [
    "a=b-1",
    "a?b-1",
    "a%20b-1",
    "a b-1",
    "a*b-1",
    "a[b]-1",
    "it's-1",
    "a\\b-1",
    "ä-1",
    'a"b-1',
]
"""Runs of an older version, which took the names of scans as they are."""


def write_run(out: Path, name: str) -> Path:
    """A run of two interventions, one of which has punctuation in its name."""
    names = ("none", "scale_query_bias(0.5)+zero_mlps")
    run = toy_runs.write_run(out, name, {"entropy": lambda _: 0.5}, interventions=names)
    return toy_runs.local(run.path)


def row_counts(path: Path, names: list[str]) -> dict[str, int]:
    """Rows of `heads` by run."""
    sql = "SELECT run_id, intervention, count(*) FROM heads GROUP BY ALL"
    rows = toy_runs.connect_to_tables(path).execute(sql).fetchall()
    assert {intervention for _, intervention, _ in rows} == {
        "none",
        "scale_query_bias(0.5)+zero_mlps",
    }
    assert len(rows) == 2 * len(names)
    return {run: count for run, _, count in rows}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_run_with_an_odd_name_is_read_as_itself(tmp_path: Path, name: str):
    run = write_run(tmp_path / "runs", name)
    assert row_counts(run, [name]).keys() == {name}


def test_runs_with_odd_names_are_read_together_and_none_twice(tmp_path: Path):
    for name in (*ODD_NAMES, "plain-1"):
        write_run(tmp_path / "runs", name)
    rows_by_run = row_counts(tmp_path / "runs", [*ODD_NAMES, "plain-1"])
    assert rows_by_run.keys() == {*ODD_NAMES, "plain-1"}
    assert len(set(rows_by_run.values())) == 1


@pytest.mark.parametrize("out", ["lr=0.1", "a?b", "a*", "[ab]", "a%20b", "it's", "x=1/y=2", "a b"])
def test_a_directory_of_any_name_holds_only_its_own_runs(tmp_path: Path, out: str):
    for name, directory in (("one-1", out), ("two-1", "a_b"), ("two-2", "axb"), ("two-3", "b")):
        write_run(tmp_path / directory, name)
    assert row_counts(tmp_path / out, ["one-1"]).keys() == {"one-1"}


def test_a_large_seed_of_an_older_version_is_read_as_null(tmp_path: Path):
    for name, seed in (("old-1", 2**64), ("new-1", 2**63 - 1)):
        file = write_run(tmp_path, name) / "manifest.json"
        manifest = json.loads(file.read_text())
        manifest["identity"]["scan"]["seed"] = seed
        file.write_text(json.dumps(manifest))
    rows = (
        toy_runs.connect_to_tables(tmp_path)
        .execute("SELECT run_id, seed FROM runs ORDER BY ALL")
        .fetchall()
    )
    assert rows == [("new-1", 2**63 - 1), ("old-1", None)]


@pytest.mark.parametrize("name", ["lr=0.1", "it's", "日本"])
def test_the_same_file_is_the_same_run(tmp_path: Path, name: str):
    file = tmp_path / f"{name}.toml"
    file.write_text(TEXT + f'out = "{tmp_path}/runs"\n')
    for _ in range(2):
        prepare_run(make_plan(load_scan(file), file.stem), TEXT)
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith(f"run_id={safe_name(name)}-")
