"""`headcount export`: the registry, the choice of a run, destinations, and the formats."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

import headcount
from headcount.exports.destination import check_destination, write_export
from headcount.exports.page import exports_page
from headcount.exports.registry import (
    FORMATS,
    Exported,
    Needs,
    export_format,
    export_format_named,
    export_formats,
)
from headcount.exports.source import ExportSource, choose_run, toml_lines
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.errors import QueryError, ScanError
from headcount.schemas.scans.scan import parse_scan
from headcount.schemas.scans.values import range_of
from tests import ROOT
from tests.toys.toy_models import family, save_model
from tests.toys.toy_runs import Row, read_manifest, write_run

KV_HEADS = 2
HEADS = 4
LAYERS = 2
N_CTX = 24
UNTOUCHED = "intervention = 'none'"


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
        "statistics": [
            "duplicate_score",
            "induction_score",
            "entropy",
            "distant_mass(2,4)",
            "distant_mass(1,5)",
            "query_absmax",
            "key_absmax",
            "value_absmax",
        ],
        "profiles": ["attention_by_lag"],
        "interventions": ["none", "zero_head(0,1)"],
        "out": str(directory / "runs"),
    }
    headcount.scan(fields, name="toy", quiet=True).close()
    return directory


@pytest.fixture(scope="module")
def database(home: Path) -> Iterator[RunDatabase]:
    opened = open_runs(home / "runs")
    yield opened
    opened.connection.close()


@pytest.fixture(scope="module")
def pair(home: Path) -> Path:
    """A directory with the same run, and with one over tokens that do not repeat."""
    (directory,) = (home / "runs").iterdir()
    shutil.copytree(directory, home / "pair" / directory.name)
    fields = {
        "model": str(home / "llama"),
        "n_ctx": N_CTX,
        "sequences": 4,
        "input": {"family": "uniform_random"},
        "statistics": ["distant_mass(2,4)", "distant_mass(1,5)"],
        "out": str(home / "pair"),
    }
    headcount.scan(fields, name="baseline", quiet=True).close()
    return home / "pair"


@pytest.fixture(scope="module")
def paired(pair: Path) -> Iterator[RunDatabase]:
    opened = open_runs(pair)
    yield opened
    opened.connection.close()


def run(*words: object) -> str:
    """What a command prints. A mistake is raised as it is."""
    result = CliRunner().invoke(headcount.app, ["export", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def make(database: RunDatabase, name: str, output: Path, **options: object) -> None:
    """Write an export of opened runs: the same as the command, which opens them each time."""
    export = export_format_named(name)
    values = export.parsed_options({key: str(value) for key, value in options.items()})
    destination = check_destination(export, str(output), replace=True)
    source = choose_run(database, export, values, destination)
    write_export(export, destination, export.make(source, **values).files)


def means_of_heads(database: RunDatabase, statistic: str, run: str = "toy") -> np.ndarray:
    """Means by layer and query head, straight from the rows of a run."""
    rows = database.rows(
        f"SELECT layer, head, avg({statistic}) FROM heads WHERE intervention = 'none' "
        f"AND run_id LIKE '{run}-%' GROUP BY ALL ORDER BY ALL"
    )
    return np.array([value for _, _, value in rows]).reshape(LAYERS, HEADS)


# KV heads


def test_kv_heads_sum_up_the_query_heads_that_share_keys(database: RunDatabase) -> None:
    assert database.rows("SELECT n_heads, n_kv_heads FROM runs") == [(HEADS, KV_HEADS)]
    means = means_of_heads(database, "entropy").reshape(LAYERS, KV_HEADS, -1)
    rows = database.records(f"FROM kv_heads WHERE statistic = 'entropy' AND {UNTOUCHED}")
    assert [row["label"] for row in rows] == ["L0KV0", "L0KV1", "L1KV0", "L1KV1"]
    for row in rows:
        group = means[row["layer"], row["kv_head"]]
        assert row["mean"] == pytest.approx(group.mean())
        assert row["highest"] == pytest.approx(group.max())
        assert row["lowest"] == pytest.approx(group.min())
        heads = (row["kv_head"] * 2, row["kv_head"] * 2 + 1)
        ((low, high, count),) = database.rows(
            "SELECT min(entropy), max(entropy), count(entropy) FROM heads "
            f"WHERE {UNTOUCHED} AND layer = {row['layer']} AND head IN {heads}"
        )
        assert (row["minimum"], row["maximum"]) == (pytest.approx(low), pytest.approx(high))
        assert row["count"] == count == 12
        assert (row["heads"], row["group_size"]) == (2, 2)


def test_runs_may_not_say_how_many_kv_heads_there_are(tmp_path: Path) -> None:
    write_run(tmp_path, "old-1", {"sink_mass": lambda row: 0.5})
    opened = open_runs(tmp_path)
    assert opened.rows("SELECT n_kv_heads FROM runs") == [(None,)]
    assert opened.rows("FROM kv_heads") == []
    export = export_format_named("duo")
    with pytest.raises(QueryError, match="has no record of its KV heads"):
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


def test_the_page_is_what_the_registry_says() -> None:
    page = ROOT / "docs" / "exports.md"
    assert page.read_text(encoding="utf-8") == exports_page(), "run: make docs"


def test_an_option_without_a_line_about_it_is_refused() -> None:
    def no_line(source: ExportSource, *, sink: int = 4) -> Exported:
        """It says nothing of its option."""
        raise NotImplementedError

    register = export_format(
        "", read_by="", source="", writes="file", example="", load="", needs=Needs()
    )
    with pytest.raises(ValueError, match="option 'sink' needs a default"):
        register(no_line)
    assert "no-line" not in FORMATS


BORDERS = {
    "duo --sink": ("0", "-1"),
    "duo --recent": ("1", "0"),
    "duo --sparsity": ("0.01 0.99", "0 1"),
    "duo --threshold": ("0.01 0.99", "0 1"),
    "fp8-kv-scales --quantile": ("0.01 0.99", "0 1"),
    "important-heads --deviations": ("0", "-0.1 inf nan"),
    "important-heads --heads": ("1", "0 2.5"),
    "qrhead --heads": ("1", "0 -5"),
    "razor --compression": ("2", "1"),
    "razor --echo": ("0.01 0.99", "0 1"),
    "razor --induction": ("0.01 0.99", "0 1"),
    "razor --recent": ("1", "0 1e3"),
    "razor --sink": ("0", "-1 4294967296"),
}
"""Values within and beyond the range of every option that is a number."""


def test_every_number_of_every_format_has_a_range() -> None:
    options = {
        f"{export.name} {option.flag}": option
        for export in export_formats().values()
        for option in export.options.values()
        if re.search("int|float", str(option.annotation))
    }
    assert options.keys() == BORDERS.keys()
    for name, (within, beyond) in BORDERS.items():
        option = options[name]
        assert range_of(option.annotation) in option.values
        assert [option.parsed(value) for value in within.split()] == [
            float(value) for value in within.split()
        ]
        for value in beyond.split():
            with pytest.raises(QueryError, match=f"{option.flag}: expected "):
                option.parsed(value)


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
    # No longer than the model's own sequences may be.
    assert parsed.n_ctx == 64


def test_of_several_runs_one_is_named(tmp_path: Path) -> None:
    for name in ("a-1", "b-2"):
        directory = write_run(tmp_path / "runs", name, **scores())
        manifest = read_manifest(directory)
        manifest["model"]["n_kv_heads"] = 3
        Path(str(directory.manifest_file)).write_text(json.dumps(manifest))
    export = export_format_named("razor")
    opened = open_runs(tmp_path / "runs")
    with pytest.raises(QueryError, match="2 runs could be exported; expected one, named with --ru"):
        choose_run(opened, export, export.defaults, tmp_path / "x")
    source = choose_run(opened, export, export.defaults, tmp_path / "x", ["b-2"])
    assert source.provenance["run_id"] == "b-2"
    assert source.kv_shape == (2, 3)

    write_run(tmp_path / "runs", "c-3", **scores(model="other"))
    opened = open_runs(tmp_path / "runs")
    with pytest.raises(QueryError, match=r"of 2 models; expected one, .*: a-1 \(toy\), c-3 \(oth"):
        choose_run(opened, export, export.defaults, tmp_path / "x")


# Destinations


def test_an_older_export_is_replaced_only_if_that_is_said(
    database: RunDatabase, tmp_path: Path
) -> None:
    file = tmp_path / "razor.json"
    file.write_text("older")
    with pytest.raises(QueryError, match="is there already; choose another name, or say --replace"):
        check_destination(export_format_named("razor"), str(file), replace=False)
    make(database, "razor", file)
    assert "echo_heads" in json.loads(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["razor.json"]


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


# duo


def load_attn_pattern(folder: Path) -> tuple[np.ndarray, int, int]:
    """What DuoAttention's function of this name reads, and kvpress's press in the same way."""
    scores = np.loadtxt(folder / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    config = json.loads((folder / "config.json").read_text())
    return np.clip(scores, 0, 1), config["sink_size"], config["recent_size"]


def moved_by_group(database: RunDatabase) -> np.ndarray:
    """The attention that a repeat moves, with a cache of 2 first and 4 last keys:
    `[layer kv_head member]`.
    """
    to_copies = means_of_heads(database, "duplicate_score")
    to_copies += means_of_heads(database, "induction_score")
    repeated = means_of_heads(database, "distant_mass_2_4")
    alike = means_of_heads(database, "distant_mass_2_4", "baseline")
    # Of 23 tokens after the first, 12 are the block. So 11 of the 18 queries that see distant keys
    # are in its copy.
    change = (repeated - alike) * 18 / 11
    return np.maximum(to_copies, abs(change)).reshape(LAYERS, KV_HEADS, -1)


def test_duo_scores_a_kv_head_by_the_query_head_whose_attention_a_repeat_moves_most(
    pair: Path, tmp_path: Path, paired: RunDatabase
) -> None:
    words = ("duo", pair, "-o", tmp_path / "duo", "--sink", 2, "--recent", 4)
    output = run(*words)
    assert output.startswith(f"{tmp_path / 'duo'}: duo of llama, from run toy-")
    scores, sink, recent = load_attn_pattern(tmp_path / "duo")
    np.testing.assert_allclose(scores, moved_by_group(paired).max(-1), rtol=1e-6)
    assert (sink, recent) == (2, 4)
    assert np.ptp(scores) > 0.01
    provenance = json.loads((tmp_path / "duo" / "config.json").read_text())["headcount"]
    assert provenance["n_ctx"] == N_CTX
    assert provenance["input"]["family"] == "repeated_random"
    assert provenance["baseline"]["run_id"].startswith("baseline-")
    assert provenance["baseline"]["input"]["family"] == "uniform_random"
    assert provenance["baseline"]["sequences_done"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["duo"]

    with pytest.raises(QueryError, match="is there already"):
        run(*words)
    make(paired, "duo", tmp_path / "duo", sink=2, recent=4, group="mean")
    scores, _, _ = load_attn_pattern(tmp_path / "duo")
    np.testing.assert_allclose(scores, moved_by_group(paired).mean(-1), rtol=1e-6)


def test_duo_may_score_distant_attention_of_one_run(database: RunDatabase, tmp_path: Path) -> None:
    make(database, "duo", tmp_path / "duo", sink=2, recent=4, score="distant")
    scores, _, _ = load_attn_pattern(tmp_path / "duo")
    by_head = means_of_heads(database, "distant_mass_2_4").reshape(LAYERS, KV_HEADS, -1)
    np.testing.assert_allclose(scores, by_head.max(-1), rtol=1e-6)
    with pytest.raises(QueryError, match="did not measure distant_mass_3_4; this scan would do"):
        make(database, "duo", tmp_path / "duo", sink=3, recent=4, score="distant")


def test_duo_finds_a_head_that_looks_at_all_keys_once_something_repeats(tmp_path: Path) -> None:
    """Such a head attends to no copy, and to the first key where nothing repeats."""
    attention_to_copies = {(0, 0): 0.8, (1, 0): 0.02, (0, 1): 0.03}
    distant = {(0, 0): 0.9, (1, 0): 0.6, (0, 1): 0.7}
    distant_without = {(0, 0): 0.85, (1, 0): 0.2, (0, 1): 0.7}

    def head_value(values: dict[tuple[int, int], float]) -> Any:
        return lambda row: values.get((row.layer, row.head), 0.0)

    copies = head_value({head: value / 2 for head, value in attention_to_copies.items()})
    columns = {
        "duplicate_score": copies,
        "induction_score": copies,
        "distant_mass(1,1)": head_value(distant),
    }
    without = {"distant_mass(1,1)": head_value(distant_without)}
    for name, family_name, measured in (
        ("a-1", "repeated_random", columns),
        ("b-1", "uniform_random", without),
        ("b-2", "uniform_random", without),
    ):
        directory = write_run(tmp_path / "runs", name, measured, family=family_name)
        manifest = read_manifest(directory)
        manifest["model"]["n_kv_heads"] = 3
        Path(str(directory.manifest_file)).write_text(json.dumps(manifest))
    words = ("duo", tmp_path / "runs", "-o", tmp_path / "duo", "--sink", 1, "--recent", 1)
    with pytest.raises(QueryError, match="compared with 2 runs; expected one, named with a second"):
        run(*words)
    run(*words, "--run", "a-1", "--run", "b-1")
    scores, _, _ = load_attn_pattern(tmp_path / "duo")
    first, second, *rest = np.argsort(-scores, axis=None)
    assert (first, second) == (0, 3)
    assert scores[0, 0] == pytest.approx(0.8)
    assert scores[1, 0] >= 0.4
    assert max(scores.ravel()[rest]) == pytest.approx(0.03)


def test_a_missing_baseline_is_named_with_the_scan_that_would_measure_it(
    database: RunDatabase, tmp_path: Path
) -> None:
    with pytest.raises(QueryError) as caught:
        make(database, "duo", tmp_path / "duo", sink=2, recent=4)
    line, *scan = str(caught.value).splitlines()
    assert "has no finished run beside it that measured distant_mass_2_4" in line
    # The end of a command says `error:` once: what is indented goes on with the line.
    assert all(part.startswith("    ") for part in scan)
    import tomllib

    parsed = parse_scan(tomllib.loads("\n".join(scan)))
    assert parsed.input.family == "uniform_random"
    assert parsed.n_ctx == N_CTX
    assert parsed.statistics == ("distant_mass(2,4)",)  # pyright: ignore


def test_duo_cuts_scores_where_it_is_told(paired: RunDatabase, tmp_path: Path) -> None:
    highest = moved_by_group(paired).max(-1)
    output = tmp_path / "duo"
    for share, kept in ((0.75, 1), (0.5, 2), (0.1, 4), (0.9, 0)):
        make(paired, "duo", output, sink=2, recent=4, sparsity=share)
        whole, _, _ = load_attn_pattern(output)
        assert whole.sum() == kept
        assert {*whole.ravel()} <= {0.0, 1.0}
        assert not kept or highest[whole == 1].min() == np.sort(highest.ravel())[-kept]
    threshold = float(np.sort(highest.ravel())[1:3].mean())
    make(paired, "duo", output, sink=2, recent=4, threshold=threshold)
    whole, _, _ = load_attn_pattern(output)
    np.testing.assert_array_equal(whole, highest >= threshold)
    with pytest.raises(QueryError, match="leave out one"):
        make(paired, "duo", output, sink=2, recent=4, threshold=0.5, sparsity=0.5)


def test_what_duo_chose_is_tried_out_on_the_model(home: Path, pair: Path, tmp_path: Path) -> None:
    """`tests/exports/test_head_check.py` holds the trial itself against an independent model."""
    words = ("duo", pair, "-o", tmp_path / "duo", "--sink", 1, "--recent", 5)
    output = run(*words, "--sparsity", 0.75, "--check")
    rows = {line[:12]: line.split() for line in output.splitlines() if ":" not in line}
    # One of four KV heads keeps 24 keys, three keep six.
    assert rows["chosen heads"][3:5] == ["1", "1"]
    assert float(rows["chosen heads"][-1]) == pytest.approx(100 * (24 + 3 * 6) / 96, abs=0.01)
    assert float(rows["every head  "][-1]) == 100
    assert "\nchosen heads: " in output
    assert "\nrandom heads: " in output
    # A file of scores leaves open how many heads keep everything, so the check looks for it.
    first, *_ = run(*words, "--replace", "--check").split("number of heads: ")[1].splitlines()
    assert re.fullmatch(
        r"with \d of 4 nothing is lost on other sequences(; --sparsity 0\.\d+ chooses them)?", first
    )
    with pytest.raises(QueryError, match="chooses no heads to keep whole; leave out --check"):
        run("fp8-kv-scales", home / "runs", "-o", tmp_path / "scales.safetensors", "--check")
    # A check that cannot be made leaves nothing behind.
    with pytest.raises(ScanError, match="check: expected recent below 12"):
        run("razor", home / "runs", "-o", tmp_path / "razor.json", "--check")
    assert [path.name for path in tmp_path.iterdir()] == ["duo"]


def test_a_folder_with_other_files_is_not_replaced(paired: RunDatabase, tmp_path: Path) -> None:
    (tmp_path / "duo").mkdir()
    (tmp_path / "duo" / "thesis.tex").write_text("years of work")
    with pytest.raises(QueryError, match=r"holds thesis\.tex, which is no part of this export"):
        make(paired, "duo", tmp_path / "duo", sink=2, recent=4)
    assert [path.name for path in tmp_path.rglob("*")] == ["duo", "thesis.tex"]


def test_one_command_goes_from_a_model_to_the_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences are as long as the model takes, and the second time the run is there."""
    monkeypatch.chdir(tmp_path)
    words = ("duo", "runs", "--model", home / "llama", "-o", "duo", "--recent", 4)
    sets = ("--set", "sequences=2", "--set", "n_ctx=16")
    run(*words, *sets)
    scores, sink, recent = load_attn_pattern(tmp_path / "duo")
    assert (scores.shape, sink, recent) == ((LAYERS, KV_HEADS), 4, 4)
    directories = sorted((tmp_path / "runs").iterdir())
    assert len(directories) == 2
    before = [(path / "manifest.json").stat().st_mtime_ns for path in directories]
    run(*words, *sets, "--replace")
    assert sorted((tmp_path / "runs").iterdir()) == directories
    assert [(path / "manifest.json").stat().st_mtime_ns for path in directories] == before
    again, _, _ = load_attn_pattern(tmp_path / "duo")
    np.testing.assert_array_equal(again, scores)
    # What does not repeat has no period, and that is said before the other scan runs.
    with pytest.raises(ScanError, match="unknown option of uniform_random 'period'"):
        run(*words, *sets, "--set", "input.period=5", "--replace")
    assert sorted((tmp_path / "runs").iterdir()) == directories


# fp8-kv-scales


def scales_of(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a file of weights by name, and what its header says."""
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_scales_are_the_largest_components_by_kv_head(
    database: RunDatabase, tmp_path: Path
) -> None:
    file = tmp_path / "scales.safetensors"
    make(database, "fp8-kv-scales", file)
    tensors, metadata = scales_of(file)
    assert json.loads(metadata["headcount"])["format"] == "fp8-kv-scales"
    assert len(tensors) == 3 * LAYERS
    for layer, (letter, statistic, heads) in product(
        range(LAYERS), (("q", "query", 1), ("k", "key", 2), ("v", "value", 2))
    ):
        scale = tensors[f"model.layers.{layer}.self_attn.{letter}_scale"]
        rows = database.rows(
            f"SELECT max({statistic}_absmax) FROM heads WHERE {UNTOUCHED} AND layer = {layer} "
            f"GROUP BY head // {heads} ORDER BY head // {heads}"
        )
        expected = np.array(rows, np.float32)[:, :, None] / 448
        assert scale.shape == (HEADS // heads, 1, 1)
        assert scale.dtype == np.float32
        np.testing.assert_allclose(scale, expected, rtol=1e-6)


def test_scales_may_clip_the_largest_of_few_sequences(
    database: RunDatabase, tmp_path: Path
) -> None:
    file = tmp_path / "scales.safetensors"
    make(database, "fp8-kv-scales", file)
    largest, _ = scales_of(file)
    make(database, "fp8-kv-scales", file, quantile=0.5, prefix="h.{layer}.attn")
    clipped, _ = scales_of(file)
    assert set(clipped) == {
        name.replace("model.layers", "h").replace("self_", "") for name in largest
    }
    for layer in range(LAYERS):
        values = np.array(
            database.rows(
                f"SELECT list(key_absmax ORDER BY key_absmax) FROM heads WHERE {UNTOUCHED} "
                f"AND layer = {layer} GROUP BY head // 2 ORDER BY head // 2"
            )
        )
        # Both query heads of a group have the values of their six sequences: 1, 1, 2, 2, …
        medians = values[:, 0, 4] / 448
        scales = clipped[f"h.{layer}.attn.k_scale"].ravel()
        # The upper end of a bin is never below the value and at most 4.5 % above it.
        assert (scales >= medians * (1 - 1e-6)).all()
        assert (scales <= medians * 1.045).all()
    with pytest.raises(QueryError, match=r"--prefix: expected a name with \{layer\} in it"):
        make(database, "fp8-kv-scales", file, prefix="attn")


# card


def test_a_run_with_its_card_loads_as_a_data_set(
    home: Path, database: RunDatabase, tmp_path: Path
) -> None:
    import yaml

    shutil.copytree(home / "runs", tmp_path / "runs")
    (directory,) = (tmp_path / "runs").iterdir()
    copied = open_runs(directory)
    make(copied, "card", directory / "README.md", license="cc-by-4.0")
    text = (directory / "README.md").read_text()
    front_matter = yaml.safe_load(text.split("---\n")[1])
    assert front_matter["license"] == "cc-by-4.0"
    patterns = {entry["config_name"]: entry["data_files"] for entry in front_matter["configs"]}
    assert patterns["heads"] == ["heads/intervention=none/*.parquet"]
    assert set(patterns) == {
        f"{table}{intervention}"
        for table in ("heads", "sequences", "profiles")
        for intervention in ("", "-zero_head_0_1_")
    }
    assert "| `entropy` | Mean entropy of the attention rows." in text
    assert str(home) not in text

    import datasets

    for intervention, suffix in (("none", ""), ("zero_head(0,1)", "-zero_head_0_1_")):
        rows = list(
            datasets.load_dataset(str(directory), f"heads{suffix}", split="train", streaming=True)
        )
        ((count, total),) = database.rows(
            f"SELECT count(*), sum(entropy) FROM heads WHERE intervention = '{intervention}'"
        )
        assert len(rows) == count
        assert sum(row["entropy"] for row in rows) == pytest.approx(total)

    # If other files lie beside them, the committed ones are named.
    (directory / "heads" / "intervention=none" / "copy.parquet").write_bytes(b"")
    make(copied, "card", tmp_path / "README.md")
    folder = directory / "heads" / "intervention=none"
    files = sorted(file.relative_to(tmp_path) for file in folder.glob("shard-*.parquet"))
    expected = "\n".join(f'  - "{file}"' for file in files)
    assert expected in (tmp_path / "README.md").read_text()
    with pytest.raises(QueryError, match="expected a name in the directory of the run or above"):
        make(copied, "card", tmp_path / "elsewhere" / "README.md")


# iceberg


def test_iceberg_tables_have_the_rows_of_the_views(database: RunDatabase, tmp_path: Path) -> None:
    pyiceberg_table = pytest.importorskip("pyiceberg.table")
    make(database, "iceberg", tmp_path / "tables")
    assert not list((tmp_path / "tables").rglob("*.parquet"))
    names = ("run_id", "intervention", "sequence", "layer", "head")
    heads = pyiceberg_table.StaticTable.from_metadata(str(tmp_path / "tables" / "heads"))
    query = f"SELECT {', '.join(names)}, entropy FROM heads ORDER BY ALL"
    read = heads.scan(selected_fields=(*names, "entropy")).to_arrow()
    connection = duckdb.connect()
    connection.register("heads", read)
    assert connection.execute(query).fetchall() == database.rows(query)
    untouched = heads.scan(row_filter="intervention = 'none' and layer = 1").to_arrow()
    assert untouched.num_rows == 6 * HEADS
    assert heads.schema().find_field("layer").doc == "Layer, from 0."
    assert len(heads.metadata.snapshots) == 1
    sequences = pyiceberg_table.StaticTable.from_metadata(str(tmp_path / "tables" / "sequences"))
    rows = sequences.scan(row_filter="intervention = 'none'").to_arrow()
    assert rows["tokens"].to_pylist() == [
        tokens
        for (tokens,) in database.rows(
            f"SELECT tokens FROM sequences WHERE {UNTOUCHED} ORDER BY sequence"
        )
    ]
