"""`headcount reproduce`: every replication runs on its miniature, shows its claims, and is not
mistaken for the published model; mistakes in its file are lines.
"""

import html
import math
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from pydantic import ValidationError

from headcount.jobs.console import duration
from headcount.reproduce.published_run import estimated_time, published_command
from headcount.reproduce.replication import (
    Check,
    Claim,
    PublishedValue,
    Replication,
    read_toml,
    replications,
)
from headcount.reproduce.replication_figures import write_page
from headcount.reproduce.replication_runs import open_replication_runs, plan_replication
from headcount.reproduce.verdicts import Result, judge, warning
from headcount.schemas.errors import RunError, ScanError
from headcount.schemas.statistics import STATISTICS
from headcount.workers.known_models import KnownModels
from headcount.workers.model.info.description import find_model
from tests.reproduce.controls import measured_runs, null_claims
from tests.toys import published
from tests.toys import toy_models as toy
from tests.toys.commands import ended
from tests.toys.toy_replications import REPLICATIONS, replication_text, toy_replication
from tests.toys.toy_runs import one_line, without_runs

QUICK = "sink_circuit_no_mlp"
"""It measures few sequences, under interventions. What runs it is the same for all."""


def reproduce(*words: str) -> tuple[int, str]:
    end = ended("reproduce", *words)
    return end.code, end.output


# Each replication


@pytest.fixture(scope="module")
def models() -> KnownModels:
    """The miniatures, each loaded once for the replications that share it: they are small."""
    return KnownModels(most_loaded=100)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == QUICK else [pytest.mark.long]) for n in REPLICATIONS]
)
def test_every_replication_shows_its_claims_on_its_miniature_and_not_without_its_interventions(
    name: str, tmp_path: Path, models: KnownModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It needs nothing of the directory in which it runs.
    monkeypatch.chdir(tmp_path)
    replication, out = REPLICATIONS[name], tmp_path / "runs"
    runs, info = measured_runs(replication, replication.bundled_model, out, models)
    database = open_replication_runs(replication, str(runs))
    results = judge(name, replication, info, replication.bundled_model, database)
    assert [result.name for result in results if result.verdict == "fail"] == []
    # Every published figure is there, and none is compared with a miniature.
    figures = [result for result in results if result.published != "holds"]
    published_names = [value.full_name for value in replication.published_values]
    assert {figure.verdict for figure in figures} == {"not comparable"}
    assert sorted(figure.name for figure in figures) == sorted(published_names)
    assert len(results) - len(figures) >= len(replication.claim)
    measured = [result.measured for result in results]
    assert all(math.isfinite(value) for value in measured if value is not None)
    write_page(tmp_path / "page.html", name, replication, "m", results, database)
    page = (tmp_path / "page.html").read_text()
    assert all(figure.title in html.unescape(page) for figure in replication.figure)
    controls = null_claims(name, replication, out, models, results)
    assert [control.name for control in controls if not control.reason] == []


def test_a_replication_that_runs_again_measures_nothing_twice(tmp_path: Path) -> None:
    def write_times() -> list[int]:
        return sorted(file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet"))

    exit_code, output = reproduce("position_geometry", "--out", str(tmp_path))
    assert exit_code == 0
    # The page lies beside the directory of the runs.
    (page,) = tmp_path.rglob("*.html")
    assert f"figures in {page}" in output
    assert page.with_suffix("").is_dir()
    assert "<strong>a miniature: its numbers are not comparable" in page.read_text()
    times_before = write_times()
    assert times_before
    assert reproduce("position_geometry", "--out", str(tmp_path))[0] == 0
    assert write_times() == times_before


@pytest.mark.long
@pytest.mark.parametrize("name", REPLICATIONS)
def test_a_replication_of_the_published_model_runs_where_its_weights_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = published.weights(REPLICATIONS[name].published_model)
    published.work_beside_the_texts(tmp_path, monkeypatch)
    text_options = published.options_of_text(REPLICATIONS[name])
    words = [name, "--model", model, "--out", "published-runs", *text_options]
    exit_code, output = reproduce(*words)
    if "no file matches" in output:
        pytest.skip(f"the published texts are not here: {output.splitlines()[-1]}")
    assert exit_code == 0, output


def test_overrides_are_of_every_scan_or_of_one_and_all_are_in_float32(tmp_path: Path) -> None:
    replication = REPLICATIONS["previous_token"]
    overrides = ["sequences=8", "with-bos.seed=7", "parts.input.distinct=true"]
    plans = plan_replication(replication, replication.bundled_model, str(tmp_path), overrides)
    scans = {plan.run.run_id.rpartition("-")[0]: plan.scan for plan in plans}
    assert scans.keys() == replication.scan.keys()
    assert {scan.sequences for scan in scans.values()} == {8}
    assert {plan.manifest.sequences for plan in plans} == {8}
    assert {scan.precision for scan in scans.values()} == {"float32"}
    assert {name for name, scan in scans.items() if scan.seed == 7} == {"with-bos"}
    assert scans["parts"].input.options == {"distinct": True}
    assert scans["with-bos"].input.options == {}


def test_another_formula_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replication = REPLICATIONS["sink_rates"]

    def directory() -> str:
        return plan_replication(replication, replication.bundled_model, str(tmp_path))[0].scan.out

    first_directory = directory()
    assert directory() == first_directory
    changed = replace(STATISTICS["sink_alpha"], function=STATISTICS["sink_mass"].function)
    monkeypatch.setitem(STATISTICS, "sink_alpha", changed)
    assert directory() != first_directory


def test_logits_in_pieces_are_the_same_and_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    path, tokens = find_model("bundled:gpt2-mini"), toy.repeating_tokens(9)
    replica = toy.replica(path, predictions=["losses", "final_logits"])
    at_once = replica.measure(tokens).sequences
    monkeypatch.setattr("headcount.workers.engine.prediction_inputs.CHUNK_BYTES", 1)
    in_pieces = replica.measure(tokens).sequences
    for column in ("losses", "final_logits"):
        np.testing.assert_allclose(in_pieces[column], at_once[column], atol=1e-5)
    replica = toy.replica(path, toy.load_model)
    calls: list[int] = []
    replica.model.modules("unembed")[0].register_forward_pre_hook(lambda *_: calls.append(1))
    replica.measure(tokens)
    assert calls == []


# Verdicts


def verdicts(replication: Replication) -> list[Result]:
    """Results on the published model, m, and on another one. The SQL reads no table."""
    database = without_runs(duckdb.connect())
    published_info = toy.toy_info(n_layers=1)
    other_info = toy.toy_info(n_layers=2)
    results = judge("toy", replication, published_info, "m", database)
    return results + judge("toy", replication, other_info, "other", database)


def test_verdicts() -> None:
    checks = [
        Check(
            sql="VALUES ('near', 1.05), ('far', 1.2)",
            published={"near": 1.0, "far": 1.0, "left out": 1.0},
            tolerance=0.1,
            tolerance_reason="a toy",
        ),
        Check(
            sql="VALUES ('part', 215)",
            published={"part": 200.0},
            tolerance=0.1,
            tolerance_reason="a toy",
            relative=True,
        ),
    ]
    claims = [
        Claim(sql="VALUES ('it is so', 3, true), ('0/0 is no number', 'NaN'::FLOAT, true)"),
        Claim(sql="VALUES ('not so', NULL, false)", models=("m",)),
        Claim(sql="SELECT 'n = {}', 'x', true WHERE false", models=("m",)),
    ]
    replication = toy_replication(check=checks, claim=claims)
    results = verdicts(replication)
    assert [(result.name, result.verdict, result.model) for result in results] == [
        ("near", "pass", "m"),
        ("far", "fail", "m"),
        ("left out", "fail", "m"),
        ("part", "pass", "m"),
        ("it is so", "pass", "m"),
        ("0/0 is no number", "fail", "m"),
        ("not so", "fail", "m"),
        ("n = {}: no rows", "not comparable", "m"),
        ("near", "not comparable", "other"),
        ("far", "not comparable", "other"),
        ("left out", "not comparable", "other"),
        ("part", "not comparable", "other"),
        ("it is so", "pass", "other"),
        ("0/0 is no number", "fail", "other"),
    ]
    measured = [result.measured for result in results[:7]]
    assert measured == [1.05, 1.2, None, 215.0, 3.0, None, None]
    assert [result.tolerance for result in results[:5]] == [0.1, 0.1, 0.1, 20.0, None]


def replication_in(directory: Path, text: str, values: str) -> Replication:
    (directory / "values.csv").write_text(values)
    (directory / "toy.toml").write_text(replication_text(text + "\n[scan]"))
    return read_toml(directory / "toy.toml", Replication)


def test_a_file_of_published_values_may_name_models_and_tolerances(tmp_path: Path) -> None:
    text = """
published_models.large = { n_layers = 2 }
[[check]]
file = "values.csv"
tolerance = 0.1
tolerance_reason = "a toy"
sql = "VALUES ('a', 1.05), ('b', 3)"
"""
    table = "name,value,model,tolerance\na,1,,\na,2,large,\nb,2.9,large,0.01\n"
    replication = replication_in(tmp_path, text, table)
    assert [(f.name, f.tolerance, f.file, f.model, f.verdict) for f in verdicts(replication)] == [
        ("a", 0.1, "values.csv", "m", "pass"),
        ("large: a", 0.1, "values.csv", "m", "not comparable"),
        ("large: b", 0.01, "values.csv", "m", "not comparable"),
        ("a", 0.1, "values.csv", "other", "not comparable"),
        ("large: a", 0.1, "values.csv", "other", "fail"),
        ("large: b", 0.01, "values.csv", "other", "fail"),
    ]


@pytest.mark.parametrize(("text", "csv", "problem"), [
    ("tolerance = 1", "name,valu\n", "values.csv: expected the columns name and value"),
    ("tolerance = 1", "name,value\na,x\n", "values.csv: a: value: expected a number, got 'x'"),
    ("", "name,value\na,1\n", "values.csv: a: no tolerance, in the file or in the check"),
    ("tolerance = 1", "name,value\na,1\na,2\n", "values.csv: names 'a' twice"),
    ("tolerance = 1", "name,value,model\na,1,xl\n", "values.csv: unknown model 'xl'"),
    ("published = { a = 1 }", "", "expected either published or file, got both"),
    ("tolerance = 1\nsizes = { layers = 2 }", "", "unknown field of a model 'layers'"),
    ("tolerance = 1\nrelative = true\nlog10 = true", "", "either relative or log10"),
])  # fmt: skip
def test_wrong_values_are_lines(tmp_path: Path, text: str, csv: str, problem: str) -> None:
    check = f"[[check]]\nsql = ''\nfile = 'values.csv'\ntolerance_reason = 'a toy'\n{text}\n"
    with one_line(ScanError, re.escape(problem)):
        replication_in(tmp_path, check, csv)


def test_a_tolerance_of_the_logarithm_is_of_orders_of_magnitude() -> None:
    published = PublishedValue("p", 1e-6, 1, "log10")
    assert [published.is_near(value) for value in (1e-5, 1.1e-5, 1e-7, 0.9e-7, 0, -1e-6, None)] == [
        True, False, True, False, False, False, False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="p: log10: expected a value above 0, got 0"):
        PublishedValue("p", 0, 1, "log10")


TOLERANCE: Any = {"tolerance": 0.1, "tolerance_reason": "a toy"}


def test_figures_of_the_authors_text_are_compared_only_with_that_text() -> None:
    check = Check(sql="VALUES ('a', 1)", published={"a": 1}, needs_text=True, **TOLERANCE)
    replication = toy_replication(check=[check])
    database = without_runs(duckdb.connect())
    info = toy.toy_info(n_layers=1)
    (without,) = judge("toy", replication, info, "m", database)
    (with_text,) = judge("toy", replication, info, "m", database, has_text=True)
    assert (without.verdict, with_text.verdict) == ("not comparable", "pass")
    assert "--text toy=FILE" in without.reason


def test_the_text_stands_wherever_a_replication_reads_it(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("It is what it is. " * 40)
    scan = {"n_ctx": 16, "sequences": 1, "statistics": ["sink_mass"]}
    scan |= {"input": {"family": "text", "files": "$text", "packing": "concat"}}
    with pytest.raises(ValidationError, match=re.escape("reads $text, and the replication has no")):
        toy_replication(scan={"s": scan})
    replication = toy_replication(scan={"s": scan}, text={"what": "a text"})

    def files(text: str | None) -> object:
        model, out = replication.bundled_model, str(tmp_path / "runs")
        (plan,) = plan_replication(replication, model, out, text=text)
        return plan.scan.input.options["files"]

    assert files(None) == "bundled:LICENSE"
    assert files(str(tmp_path / "own.txt")) == str(tmp_path / "own.txt")


def test_a_reader_is_warned_of_every_model_but_the_published_one() -> None:
    replication = REPLICATIONS["previous_token"]
    same = toy.toy_info(**replication.published_sizes)
    other = toy.toy_info(n_layers=99)
    text = "its numbers are not comparable with the published ones"
    same_sizes = "a model of the sizes of a published one: its numbers are compared, and may differ"
    for info, model, line in (
        (other, replication.published_model, ""),
        (other, replication.bundled_model, f"a miniature: {text}"),
        (other, "else", f"another model: {text}"),
        (same, "same", same_sizes),
    ):
        assert warning(replication, info, model) == line


# With the published weights


def test_the_command_names_every_model_and_what_it_needs() -> None:
    sizes = {"n_layers": 2, "d_model": 4, "d_vocab": 10}
    replication = toy_replication(
        published_sizes=sizes,
        published_models={"a/big": sizes},
        text={"what": "a text"},
        scan={"s": {"input": {"family": "csv_texts", "files": "sink_circuit_sentence.csv"}}},
    )
    texts = "headcount reproduce texts sink_circuit_sentence"
    loop = "for model in m a/big; do headcount reproduce toy.toml --model $model --text FILE; done"
    assert published_command("toy", replication) == f"{texts} && {loop}"
    trained = toy_replication(made_by="train it")
    assert published_command("toy", trained) == "train it && headcount reproduce toy.toml --model m"


def test_the_time_is_operations_of_tokens_over_those_of_a_gpu() -> None:
    sizes = {"n_layers": 2, "d_model": 4, "d_vocab": 10}
    scans = {
        "drawn": {"n_ctx": 8, "sequences": 5, "interventions": ["none", "a", "b"]},
        "sentence": {
            "n_ctx": 8,
            "sequences": "all",
            "input": {"family": "csv_texts", "files": "sink_circuit_sentence.csv"},
        },
        "of others": {"n_ctx": 8, "sequences": 5, "sizes": [{"n_layers": 3}]},
    }
    fields = {"published_sizes": sizes, "scan": scans}
    # For a token 24 x 2 x 4² + 2 x 2 x 8 x 4 + 2 x 4 x 10 operations.
    operations = 768 + 128 + 80
    tokens = 8 * 5 * 3 + 8
    untrained = toy_replication(**fields)
    assert estimated_time(untrained, gpu_operations=1) == duration(tokens * operations)
    trained = toy_replication(**fields, training_tokens=7)
    assert estimated_time(trained, gpu_operations=1) == duration((tokens + 3 * 7) * operations)


@pytest.mark.parametrize("name", [n for n in REPLICATIONS if REPLICATIONS[n].training_tokens])
def test_a_training_has_as_many_tokens_as_its_command(name: str) -> None:
    module, *options = REPLICATIONS[name].made_by.split()[2:]
    args = import_module(module).arguments().parse_args(options)
    assert REPLICATIONS[name].training_tokens == args.steps * args.batch * args.length
    assert str(args.out) == REPLICATIONS[name].published_model


# Mistakes


def test_mistakes_in_its_sql_are_lines() -> None:
    rows = "FROM (SELECT 0.5 AS sink_mass)"
    for field, sql, line in (
        (
            "check",
            f"SELECT 'sink', avg(sink_mas) {rows}",
            "unknown column 'sink_mas': ",
        ),
        (
            "claim",
            f"SELECT 'sink', 1 {rows}",
            "expected 3 columns, got 2, in SELECT 'sink', 1",
        ),
        ("check", f"SELECT 'sink' {rows}", "expected 2 columns, got 1, in SELECT 'sink' FROM"),
        ("check", "SELECT 'sink', 1 FROM range(2)", "a check names 'sink' twice"),
    ):
        entry = {"sql": sql} | ({"published": {}} if field == "check" else {})
        with one_line(RunError, re.escape(f"toy: {line}")):
            verdicts(toy_replication(**{field: [entry]}))


def test_replications_are_listed_and_a_file_that_is_none_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, listing = reproduce("--list")
    for name, replication in REPLICATIONS.items():
        assert f"{name}: {replication.title}\n" in listing
        assert f": {published_command(name, replication)}\n" in listing
    (tmp_path / "odd.toml").write_text('title = "odd"\nchek = []')
    monkeypatch.setattr("headcount.reproduce.replication.REPLICATIONS", tmp_path)
    with pytest.raises(ScanError, match=r"odd.toml: source: Field required"):
        replications()
