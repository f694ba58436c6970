"""`headcount export`: the registry, the choice of a run, destinations, and the formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import headcount
from exports.export_registry import (
    FORMATS,
    Exported,
    Needs,
    export_format,
    export_format_named,
    export_formats,
)
from exports.export_source import ExportSource, toml_lines
from queries.asking import RunDatabase, open_runs
from schemas.errors import HeadcountError, QueryError
from schemas.scan import parse_scan
from tests.toy_models import family, save_model
from tests.toy_runs import Row, read_manifest, write_run

KV_HEADS = 2
HEADS = 4
LAYERS = 2
N_CTX = 24


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model whose query heads share keys, and a run of it."""
    directory = tmp_path_factory.mktemp("exports")
    save_model(directory / "llama", family("LlamaConfig", num_key_value_heads=KV_HEADS))
    fields = {
        "model": str(directory / "llama"),
        "n_ctx": N_CTX,
        "sequences": 6,
        "sequences_per_shard": 3,
        "input": {"family": "repeated_random"},
        "statistics": ["duplicate_score", "induction_score", "entropy"],
        "profiles": ["attention_by_lag"],
        "out": str(directory / "runs"),
    }
    headcount.scan(fields, name="toy", quiet=True).close()
    return directory


@pytest.fixture(scope="module")
def database(home: Path) -> Iterator[RunDatabase]:
    opened = open_runs(home / "runs")
    yield opened
    opened.connection.close()


def run(*words: str | Path) -> str:
    """What a command prints. A mistake is raised as it is."""
    result = CliRunner().invoke(headcount.app, ["export", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def means_of_heads(database: RunDatabase, statistic: str) -> np.ndarray:
    """Means by layer and query head, straight from the rows."""
    rows = database.rows(
        f"SELECT layer, head, avg({statistic}) FROM heads GROUP BY ALL ORDER BY ALL"
    )
    return np.array([value for _, _, value in rows]).reshape(LAYERS, HEADS)


# KV heads


def test_kv_heads_sum_up_the_query_heads_that_share_keys(database: RunDatabase) -> None:
    assert database.rows("SELECT n_heads, n_kv_heads FROM runs") == [(HEADS, KV_HEADS)]
    means = means_of_heads(database, "entropy").reshape(LAYERS, KV_HEADS, -1)
    rows = database.records("FROM kv_heads WHERE statistic = 'entropy' ORDER BY layer, kv_head")
    assert [row["label"] for row in rows] == ["L0KV0", "L0KV1", "L1KV0", "L1KV1"]
    for row in rows:
        group = means[row["layer"], row["kv_head"]]
        assert row["mean"] == pytest.approx(group.mean())
        assert row["highest"] == pytest.approx(group.max())
        assert row["lowest"] == pytest.approx(group.min())
        heads = (row["kv_head"] * 2, row["kv_head"] * 2 + 1)
        ((low, high, count),) = database.rows(
            "SELECT min(entropy), max(entropy), count(entropy) FROM heads "
            f"WHERE layer = {row['layer']} AND head IN {heads}"
        )
        assert (row["minimum"], row["maximum"]) == (pytest.approx(low), pytest.approx(high))
        assert row["count"] == count == 12
        assert (row["heads"], row["group_size"]) == (2, 2)


def test_runs_of_older_code_have_no_kv_heads(tmp_path: Path) -> None:
    write_run(tmp_path, "old-1", {"sink_mass": lambda row: 0.5})
    opened = open_runs(tmp_path)
    assert opened.rows("SELECT n_kv_heads FROM runs") == [(None,)]
    assert opened.rows("FROM kv_heads") == []
    export = export_format_named("duo")
    with pytest.raises(QueryError, match="begun by older code"):
        _ = ExportSource(opened, opened.records("runs")[0], export, {}, tmp_path).kv_shape


# The registry


def test_the_list_has_every_format() -> None:
    output = run("--list")
    for name in export_formats():
        assert name in output


@pytest.mark.parametrize("name", export_formats())
def test_every_format_explains_itself(name: str) -> None:
    export = export_formats()[name]
    output = run(name, "--help")
    assert export.meaning in output
    for option in export.options.values():
        assert f"  {option.flag}  {option.meaning}" in output
    # The scan of the defaults is a scan.
    needs = export.needs(export.defaults)
    fields = needs.scan_fields("bundled:gpt2-mini")
    assert toml_lines(fields)[0] == 'model = "bundled:gpt2-mini"'
    assert export.source.startswith("https://")


def test_an_option_without_a_line_about_it_is_refused() -> None:
    def no_line(source: ExportSource, *, sink: int = 4) -> Exported:
        """It says nothing of its option."""
        raise NotImplementedError

    register = export_format("", read_by="", source="", writes="file", example="", needs=Needs())
    with pytest.raises(ValueError, match="option 'sink' needs a default"):
        register(no_line)
    assert "no-line" not in FORMATS


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["raz", "RUNS", "-o", "x"], "unknown format 'raz': did you mean 'razor'?"),
        (["razor", "RUNS"], "say where to with -o PATH, for instance -o razor.json"),
        (["razor", "-o", "x"], "expected RUNS, or --model MODEL"),
        (["razor", "RUNS", "-o", "x", "--ecko", "1"], "unexpected '--ecko'; its options: --echo"),
        (["razor", "RUNS", "-o", "x", "--echo", "2"], "--echo: expected at most 1, got '2'"),
        (["razor", "RUNS", "-o", "x", "--echo", "much"], "--echo: expected a number, got 'much'"),
        (["razor", "RUNS", "-o", "x", "--echo"], "--echo: expected a value"),
        (["razor", "RUNS", "-o", "x", "--run", "b"], "unknown run 'b'"),
        (["razor", "RUNS", "-o", "x", "--set", "seed=1"], "--set is about the scan of --model"),
        (["razor", "RUNS", "-o", "."], "is a directory; expected the name of a file"),
        ([], "expected the name of a format"),
    ],
)
def test_a_mistake_is_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(home)
    with pytest.raises(HeadcountError) as caught:
        run(*(str(home / "runs") if word == "RUNS" else word for word in words))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (home / "x").exists()


# The choice of a run


def duplicates(row: Row) -> float:
    return row.layer / 10


def scores(**changes: Any) -> dict[str, Any]:
    columns = {"duplicate_score": duplicates, "induction_score": duplicates}
    return {"columns": columns, "family": "repeated_random", **changes}


def test_what_no_run_measured_is_named_with_the_scan_that_would(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "a-1", {"sink_mass": duplicates})
    with pytest.raises(QueryError) as caught:
        run("razor", tmp_path / "runs", "-o", tmp_path / "razor.json")
    line, *scan = str(caught.value).splitlines()
    assert line == (
        "export razor: run a-1 did not measure duplicate_score, induction_score; this scan would "
        "do, and --model MODEL runs it:"
    )
    import tomllib

    parsed = parse_scan(tomllib.loads("\n".join(scan)))
    assert parsed.input.family == "repeated_random"
    assert parsed.statistics == ("duplicate_score", "induction_score")  # pyright: ignore


def test_another_input_and_an_unfinished_run_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "other", "a-1", **scores(family="uniform_random"))
    with pytest.raises(QueryError, match="is over uniform_random, expected repeated_random"):
        run("razor", tmp_path / "other", "-o", tmp_path / "x")
    write_run(tmp_path / "half", "a-1", **scores(commit=[0]))
    with pytest.raises(QueryError, match="is not complete: 1 of 2 shards are in; headcount resume"):
        run("razor", tmp_path / "half", "-o", tmp_path / "x")


def test_of_several_runs_one_is_named(tmp_path: Path) -> None:
    for name in ("a-1", "b-2"):
        directory = write_run(tmp_path / "runs", name, **scores())
        manifest = read_manifest(directory)
        manifest["model"]["n_kv_heads"] = 3
        Path(str(directory.manifest_file)).write_text(json.dumps(manifest))
    with pytest.raises(QueryError, match="2 runs could be exported; expected one, named with --ru"):
        run("razor", tmp_path / "runs", "-o", tmp_path / "razor.json")
    run("razor", tmp_path / "runs", "-o", tmp_path / "razor.json", "--run", "b-2")
    content = json.loads((tmp_path / "razor.json").read_text())
    assert content["headcount"]["run_id"] == "b-2"

    write_run(tmp_path / "runs", "c-3", **scores(model="other"))
    with pytest.raises(QueryError, match=r"of 2 models; expected one, .*: a-1 \(toy\), c-3 \(oth"):
        run("razor", tmp_path / "runs", "-o", tmp_path / "x")


# Destinations


def test_an_older_export_is_replaced_only_if_that_is_said(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "razor.json"
    file.write_text("older")
    with pytest.raises(QueryError, match="is there already; choose another name, or say --replace"):
        run("razor", home / "runs", "-o", file)
    assert file.read_text() == "older"
    run("razor", home / "runs", "-o", file, "--replace")
    assert "echo_heads" in json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["razor.json"]


def test_what_cannot_be_written_is_said_in_a_line(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QueryError, match="cannot be written"):
        run("razor", home / "runs", "-o", tmp_path / "file" / "razor.json")


# razor


def test_razor_has_the_heads_with_the_highest_scores(
    home: Path, tmp_path: Path, database: RunDatabase
) -> None:
    file = tmp_path / "new folder" / "razor.json"
    run("razor", home / "runs", "-o", file, "--induction", "0.25", "--echo=0.13", "--sink", "2")
    content = json.loads(file.read_text())
    chosen: set[tuple[int, int]] = set()
    for name, statistic, count in (
        ("echo_heads", "duplicate_score", 1),
        ("induction_heads", "induction_score", 2),
    ):
        means = means_of_heads(database, statistic)
        ranked = sorted(product(range(LAYERS), range(HEADS)), key=lambda place: -means[place])
        assert [(layer, head) for layer, head, _ in content[name]] == ranked[:count]
        for layer, head, score in content[name]:
            assert score == pytest.approx(means[layer, head])
            chosen.add((layer, head // 2))
    assert {tuple(place) for place in content["retrieval_kv_heads"]} == chosen
    assert (content["sink_size"], content["compression"]) == (2, 5)
    provenance = content["headcount"]
    assert provenance["options"]["induction"] == 0.25
    assert provenance["input"]["family"] == "repeated_random"
    assert provenance["statistics"] == ["duplicate_score", "induction_score"]
    assert provenance["code"] == database.rows("SELECT code FROM runs")[0][0]
