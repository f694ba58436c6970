"""`headcount reproduce`: every replication runs on its miniature, shows its claims, and is not
mistaken for the published model.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from typer.testing import CliRunner

from headcount import app
from headcount.reproduce.control_runs import (
    as_if_untouched,
    as_measured,
    measure_run,
    with_untouched,
)
from headcount.reproduce.controls import has_interventions, null_claims
from headcount.reproduce.published_values import PublishedValue
from headcount.reproduce.replication import (
    Check,
    Claim,
    Replication,
    read_replication,
    replications,
)
from headcount.reproduce.replication_figures import Heading, write_page
from headcount.reproduce.replication_runs import (
    open_replication_runs,
    plan_replication,
    plan_replication_in,
)
from headcount.reproduce.verdicts import Result, judge
from headcount.schemas.errors import ScanError
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.statistics import STATISTICS
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.loading import load_model
from headcount.workers.model.files.model_info import find_model
from headcount.workers.model.model import bridge_of
from headcount.workers.replica import Replica
from tests.toys import published
from tests.toys import toy_models as toy
from tests.toys.toy_runs import without_runs

REPLICATIONS = replications()
FEW_SEQUENCES = ("sequences=40", "sequences_per_shard=40")
"""Other than any replication has."""

HEADING = Heading(replication="", title="", source="", model="", runs="", warning="")


def reproduce(*words: str) -> tuple[int, str]:
    """Exit code and output of the command, with its error."""
    result = CliRunner().invoke(app, ["reproduce", *words])
    error = "" if result.exception is None else str(result.exception)
    return result.exit_code, result.output + error


@pytest.fixture(scope="module")
def models() -> Iterator[KnownModels]:
    """The miniatures, each loaded once for the replications that share it: they are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headcount.workers.model.files.known_models.MOST_LOADED", 100)
        yield KnownModels()


LONG_REPLICATIONS = {
    "active_dormant",
    "backcopy_dynamics",
    "first_keys",
    "induction_sinks",
    "masked_keys",
    "recency_bias",
    "sequence_patching",
}
"""They measure most sequences or interventions; what runs them is the same for all replications."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LONG_REPLICATIONS else [])
        for name in REPLICATIONS
    ],
)
def test_every_replication_shows_its_claims_on_its_miniature_and_not_without_its_interventions(
    name: str, tmp_path: Path, models: KnownModels
) -> None:
    replication = REPLICATIONS[name]
    model = replication.bundled_model
    plans = plan_replication(replication, model, str(tmp_path), models=models)
    directory = plans[0].scan.out
    other = with_untouched(replication, is_miniature=True)
    is_other = other != replication
    untouched = plan_replication_in(directory, other, model, models=models) if is_other else plans
    for plan in {plan.run.run_id: plan for plan in [*plans, *untouched]}.values():
        measure_run(plan, models)
    database = open_replication_runs(replication, directory)
    if is_other:
        # A user's directory does not have the others.
        as_measured(plans).show(database)
    results = judge(name, replication, plans[0].info, model, database)
    assert [result.name for result in results if result.verdict == "fail"] == []
    # Every published figure is there, and none is compared with a miniature.
    figures = [result for result in results if result.published != "holds"]
    published_names = [value.full_name for value in replication.published_values]
    assert {figure.verdict for figure in figures} == {"not comparable"}
    assert sorted(figure.name for figure in figures) == sorted(published_names)
    assert len(results) - len(figures) >= len(replication.claim)
    measured = [result.measured for result in results]
    assert all(math.isfinite(value) for value in measured if value is not None)
    write_page(tmp_path / "page.html", HEADING, results, replication.figure, database)
    page = (tmp_path / "page.html").read_text()
    assert all(figure.title in html.unescape(page) for figure in replication.figure)
    # Last, because it changes what the database shows.
    if has_interventions(replication):
        null = as_if_untouched(plans, untouched)
        controls = null_claims(name, replication, database, results, null)
        assert [control.name for control in controls if control.is_wrong] == []


def test_a_replication_that_runs_again_measures_nothing_twice(tmp_path: Path) -> None:
    def write_times() -> list[int]:
        return sorted(file.stat().st_mtime_ns for file in tmp_path.rglob("*.parquet"))

    assert reproduce("position_geometry", "--out", str(tmp_path))[0] == 0
    times_before = write_times()
    assert times_before
    assert reproduce("position_geometry", "--out", str(tmp_path))[0] == 0
    assert write_times() == times_before


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


def test_a_replication_runs_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # One text as a corpus, one text as the source of tokens, and many files.
    for name in ("sink_rates", "sink_circuit_content", "text_and_code"):
        assert plan_replication(REPLICATIONS[name], REPLICATIONS[name].bundled_model, "runs")


def test_an_override_may_be_of_one_scan(tmp_path: Path) -> None:
    replication = REPLICATIONS["previous_token"]
    plans = plan_replication(
        replication,
        replication.bundled_model,
        str(tmp_path),
        ["sequences=8", "with-bos.seed=7", "parts.input.distinct=true"],
    )
    scans = {plan.run.run_id.rpartition("-")[0]: plan.scan for plan in plans}
    assert scans.keys() == replication.scan.keys()
    assert {scan.sequences for scan in scans.values()} == {8}
    assert {name for name, scan in scans.items() if scan.seed == 7} == {"with-bos"}
    assert scans["parts"].input.options == {"distinct": True}
    assert scans["with-bos"].input.options == {}


def test_heads_with_a_pattern_of_zeros_leave_the_bias_of_their_values_as_published(
    tmp_path: Path,
) -> None:
    replication = REPLICATIONS["recency_bias"]
    plans = plan_replication(replication, replication.bundled_model, str(tmp_path), ["sequences=3"])
    (plan,) = [plan for plan in plans if plan.run.run_id.startswith("random-50")]
    tokens = plan.sequences.shard(0).tokens
    bridge = bridge_of(load_model(plan.info, "raw", "cpu"))
    state = load_file(Path(plan.info.path) / "model.safetensors")
    # Folding moves the bias of LayerNorm into the bias of the values.
    value_bias = state["blocks.0.attn.b_V"] + torch.einsum(
        "d,hde->he", state["blocks.0.ln1.b"], state["blocks.0.attn.W_V"]
    )
    is_kept_head = (torch.arange(8) == 1)[:, None]
    patterns: list[torch.Tensor] = []
    hooks = [
        ("hook_pos_embed", lambda value, hook: value * 0),
        ("blocks.0.attn.hook_z", lambda z, hook: torch.where(is_kept_head, z, value_bias)),
        ("blocks.1.attn.hook_pattern", lambda pattern, hook: patterns.append(pattern)),
    ]
    with torch.inference_mode():
        bridge.run_with_hooks(torch.from_numpy(tokens).long(), fwd_hooks=hooks)
    measured = Replica(plan.info, plan.scan, "cpu").measure(tokens, plan.scan.interventions[0])
    expected = patterns[0][:, :, 1:, 0].mean(-1)
    np.testing.assert_allclose(measured.heads["sink_mass"][:, 1], expected.numpy(), rtol=1e-4)


def test_the_published_heads_have_the_roles_that_were_published() -> None:
    heads = [(0, 0, 0.19, 0.02), (0, 3, 0.50, 0.02), (1, 6, 0.02, 0.33), (1, 7, 0.02, 0.12)]
    database = duckdb.connect()
    database.execute(
        "CREATE TABLE replication_heads (scan TEXT, layer INT, head INT, "
        "previous_token_score DOUBLE, induction_score DOUBLE)"
    )
    database.executemany("INSERT INTO replication_heads VALUES ('repeated', ?, ?, ?, ?)", heads)
    roles = database.sql(
        f"SELECT role FROM ({REPLICATIONS['sequence_patching'].view['roles']}) ORDER BY layer, head"
    ).fetchall()
    assert [role for (role,) in roles] == [
        "other heads of layer 0",
        "previous-token heads",
        "induction heads",
        "other heads of layer 1",
    ]


def test_another_formula_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replication = REPLICATIONS["sink_rates"]

    def directory() -> str:
        return plan_replication(replication, replication.bundled_model, str(tmp_path))[0].scan.out

    first_directory = directory()
    assert directory() == first_directory
    changed = replace(STATISTICS["sink_alpha"], compute=STATISTICS["sink_mass"].compute)
    monkeypatch.setitem(STATISTICS, "sink_alpha", changed)
    assert directory() != first_directory


def toy_replication(**fields: Any) -> Replication:
    sizes = {"n_layers": 1, "n_heads": 2}
    base = {
        "title": "",
        "source": "",
        "measured": "",
        "published_model": "m",
        "published_sizes": sizes,
        "bundled_model": "b",
        "scan": {},
    }
    return Replication.model_validate(base | fields)


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
        ),
        Check(sql="VALUES ('part', 215)", published={"part": 200.0}, tolerance=0.1, relative=True),
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


def replication_in(directory: Path, text: str, **files: str) -> Replication:
    """A replication of one layer and two heads, from its file and the files beside it."""
    for name, content in files.items():
        (directory / f"{name}.csv").write_text(content)
    head = """title = ""
source = ""
measured = ""
published_model = "m"
published_sizes = { n_layers = 1, n_heads = 2 }
bundled_model = "b"
scan = {}
"""
    (directory / "toy.toml").write_text(head + text)
    return read_replication(directory / "toy.toml")


def test_a_file_of_published_values_may_name_models_and_tolerances(tmp_path: Path) -> None:
    replication = replication_in(
        tmp_path,
        """
published_models.large = { n_layers = 2 }
[[check]]
file = "values.csv"
tolerance = 0.1
sql = "VALUES ('a', 1.05), ('b', 3)"
""",
        values="name,value,model,tolerance\na,1,,\na,2,large,\nb,2.9,large,0.01\n",
    )
    assert [(f.name, f.tolerance, f.file, f.model, f.verdict) for f in verdicts(replication)] == [
        ("a", 0.1, "values.csv", "m", "pass"),
        ("large: a", 0.1, "values.csv", "m", "not comparable"),
        ("large: b", 0.01, "values.csv", "m", "not comparable"),
        ("a", 0.1, "values.csv", "other", "not comparable"),
        ("large: a", 0.1, "values.csv", "other", "fail"),
        ("large: b", 0.01, "values.csv", "other", "fail"),
    ]


@pytest.mark.parametrize(
    ("text", "csv", "problem"),
    [
        ("tolerance = 1", "name,valu\n", "values.csv: expected the columns name and value"),
        ("tolerance = 1", "name,value\na,x\n", "values.csv: a: value: expected a number, got 'x'"),
        ("", "name,value\na,1\n", "values.csv: a: no tolerance, in the file or in the check"),
        ("tolerance = 1", "name,value\na,1\na,2\n", "values.csv: names 'a' twice"),
        ("tolerance = 1", "name,value,model\na,1,xl\n", "values.csv: unknown model 'xl'"),
        ("published = { a = 1 }", "", "expected either published or file, got both"),
        ("tolerance = 1\nsizes = { layers = 2 }", "", "unknown field of a model 'layers'"),
        ("tolerance = 1\nrelative = true\nlog10 = true", "", "either relative or log10"),
    ],
)
def test_mistakes_in_published_values_are_lines(
    tmp_path: Path, text: str, csv: str, problem: str
) -> None:
    check = f"[[check]]\nsql = ''\nfile = 'values.csv'\n{text}\n"
    with pytest.raises(ScanError, match=re.escape(problem)) as error:
        replication_in(tmp_path, check, values=csv)
    assert len(str(error.value).splitlines()) == 1


def test_a_tolerance_of_the_logarithm_is_of_orders_of_magnitude() -> None:
    published = PublishedValue("p", 1e-6, 1, "log10")
    assert [published.is_near(value) for value in (1e-5, 1.1e-5, 1e-7, 0.9e-7, 0, -1e-6, None)] == [
        True, False, True, False, False, False, False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="p: log10: expected a value above 0, got 0"):
        PublishedValue("p", 0, 1, "log10")


def test_figures_of_the_authors_text_are_compared_only_with_that_text() -> None:
    check = Check(sql="VALUES ('a', 1)", published={"a": 1}, tolerance=0.1, needs_text=True)
    replication = toy_replication(check=[check])
    database = without_runs(duckdb.connect())
    info = toy.toy_info(n_layers=1)
    (without,) = judge("toy", replication, info, "m", database)
    (with_text,) = judge("toy", replication, info, "m", database, has_text=True)
    assert (without.verdict, with_text.verdict) == ("not comparable", "pass")
    assert "--text toy=FILE" in without.reason


def test_the_text_stands_wherever_a_replication_reads_it(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("It is what it is. " * 40)
    scan = {
        "n_ctx": 16,
        "sequences": 1,
        "statistics": ["sink_mass"],
        "input": {"family": "text", "files": "$text", "packing": "concat"},
    }
    with pytest.raises(ValidationError, match=re.escape("reads $text, and the replication has no")):
        toy_replication(scan={"s": scan})
    replication = toy_replication(scan={"s": scan}, text={"what": "a text"})

    def files(text: str | None) -> object:
        (plan,) = plan_replication(
            replication, "bundled:gpt2-mini", str(tmp_path / "runs"), text=text
        )
        return plan.scan.input.options["files"]

    assert files(None) == "bundled:LICENSE"
    assert files(str(tmp_path / "own.txt")) == str(tmp_path / "own.txt")


def test_every_replication_is_measured_in_float32(tmp_path: Path) -> None:
    replication = REPLICATIONS["previous_token"]
    plans = plan_replication(replication, replication.bundled_model, str(tmp_path))
    assert {plan.scan.precision for plan in plans} == {"float32"}
    assert (
        "replications are measured in float32"
        in reproduce("previous_token", "--set", "precision=float64")[1]
    )


def test_no_claim_compares_a_quotient_by_a_spread() -> None:
    # 0 / 0 is NaN, and DuckDB holds NaN to be greater than every number.
    quotient = re.compile(r"/ \(?(sqrt|stddev|\S*standard_error)[^,>]*> *\d")
    for name, replication in REPLICATIONS.items():
        for claim in replication.claim:
            assert not quotient.search(claim.sql), name


def connection_with_views(
    name: str, views: tuple[str, ...], tables: dict[str, str]
) -> duckdb.DuckDBPyConnection:
    """A connection with some of a replication's views, over tables given as SQL."""
    connection = duckdb.connect()
    for table, sql in tables.items():
        connection.execute(f"CREATE TABLE {table} AS {sql}")
    for view in views:
        connection.execute(f"CREATE VIEW {view} AS {REPLICATIONS[name].view[view]}")
    return connection


NO_SINKS = "0.0"
SINKS_BUT_NOT_ON_RANDOM_OR_LONG = "(scan <> 'random' AND scan <> 'natural-long')::INT"


@pytest.mark.parametrize(
    ("alpha", "cosine", "expected"),
    [
        # The cosine is NULL in models with rotary positions.
        (NO_SINKS, "NULL", [(0, False), ("rotary", 0, True), (0, False)]),
        (NO_SINKS, "0.5", [(0, False), ("learned absolute", 0, False), (0, False)]),
        (
            SINKS_BUT_NOT_ON_RANDOM_OR_LONG,
            "NULL",
            [(100, True), ("rotary", 100, False), (100, True)],
        ),
        (
            SINKS_BUT_NOT_ON_RANDOM_OR_LONG,
            "0.5",
            [(100, True), ("learned absolute", 100, True), (100, True)],
        ),
    ],
)
def test_sink_rates_of_one_token_depend_on_the_kind_of_positions_and_no_sinks_show_nothing(
    alpha: str, cosine: str, expected: list[tuple[Any, ...]]
) -> None:
    heads = f"""
        SELECT *, ({alpha})::FLOAT AS sink_alpha, ({cosine})::FLOAT AS sink_key_cosine
        FROM
            (SELECT unnest(['natural', 'random', 'repeated', 'natural-long']) AS scan),
            range(3) AS s(sequence)
    """
    views = ("sequence_rates", "rates")
    connection = connection_with_views("sink_rates", views, {"replication_heads": heads})
    text, one_token, length = REPLICATIONS["sink_rates"].claim[:3]
    ((_, text_rate, text_holds),) = connection.execute(text.sql).fetchall()
    ((claim, token_rate, token_holds),) = connection.execute(one_token.sql).fetchall()
    ((_, length_rate, length_holds),) = connection.execute(length.sql).fetchall()
    assert expected == [
        (text_rate, text_holds),
        (claim.partition(" positions")[0], token_rate, token_holds),
        (length_rate, length_holds),
    ]


def test_the_residual_norm_at_bos_is_compared_with_the_other_positions() -> None:
    # Norms 2, 4 and 6: at BOS 2, at the others 5 on average, at all 4.
    heads = """
        SELECT
            'task' AS scan,
            'none' AS intervention,
            0 AS head,
            'r' AS run_id,
            2.0::FLOAT AS sink_resid_post_norm,
            4.0::FLOAT AS resid_post_norm,
            1.0 AS sink_mass_triggers,
            1.0 AS sink_mass_others,
            1.0 AS previous_token_triggers,
            1.0 AS sink_logit_margin
    """
    tables = {"replication_heads": heads, "runs": "SELECT 'r' AS run_id, 3 AS n_ctx"}
    connection = connection_with_views("active_dormant_one_layer", ("head",), tables)
    assert connection.execute("SELECT resid_ratio FROM head").fetchall() == [(0.4,)]


def test_mistakes_in_the_sql_of_a_replication_are_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = """
title = ""
source = ""
measured = ""
published_model = "m"
published_sizes = { n_layers = 9 }
bundled_model = "bundled:gpt2-mini"

[scan.random]
n_ctx = 8
sequences = 2
statistics = ["sink_mass"]
input = { family = "uniform_random" }

[[check]]
tolerance = 1
published = {}
sql = "SELECT 'sink', avg(sink_mass) FROM replication_heads"

[[claim]]
sql = "SELECT 'sink', avg(sink_mass), true FROM replication_heads"
"""
    monkeypatch.setattr("headcount.reproduce.replication.REPLICATIONS", tmp_path)

    def reproduce_own(text: str) -> str:
        (tmp_path / "own.toml").write_text(text)
        arguments = ["reproduce", "own", "--out", str(tmp_path / "runs")]
        result = CliRunner().invoke(app, arguments)
        return "" if result.exit_code == 0 else str(result.exception)

    assert reproduce_own(toml) == ""
    for right, wrong, line in (
        (
            "avg(sink_mass) FROM",
            "avg(sink_mas) FROM",
            "own: unknown column 'sink_mas': did you mean 'sink_mass'? Nearest: ",
        ),
        (
            "avg(sink_mass), true",
            "avg(sink_mass)",
            "own: expected 3 columns, got 2, in SELECT 'sink', avg(sink_mass) FROM ",
        ),
        (
            "'sink', avg(sink_mass) FROM",
            "'sink' FROM",
            "own: expected 2 columns, got 1, in SELECT 'sink' FROM replication_heads",
        ),
    ):
        assert reproduce_own(toml.replace(right, wrong)).startswith(line)


def test_an_unknown_replication_and_a_wrong_field_are_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_code, output = reproduce("recency")
    assert exit_code == 1
    assert "unknown replication 'recency': did you mean 'recency_bias'?" in output
    assert "--list names them" in reproduce()[1]
    _, listing = reproduce("--list")
    for name, replication in REPLICATIONS.items():
        assert f" {name} " in listing
        assert replication.published_model.split()[0] in listing
    words = ["recency_bias", "--out", str(tmp_path / "runs")]
    _, output = reproduce(*words, "--set", "random-49.n_ctx=8")
    assert (
        "--set random-49.n_ctx=8: unknown scan or field 'random-49': did you mean 'random-48'? "
        "Known: abac-10" in output
    )
    _, output = reproduce(*words, "--json", str(tmp_path / "no" / "results.json"))
    assert f"results.json: cannot be written ({tmp_path / 'no'} is no directory)" in output
    # Both mistakes were found before anything was measured.
    assert not (tmp_path / "runs").exists()
    (tmp_path / "odd.toml").write_text('title = "odd"\nchek = []')
    monkeypatch.setattr("headcount.reproduce.replication.REPLICATIONS", tmp_path)
    with pytest.raises(ScanError, match=r"odd.toml: source: Field required"):
        replications()


def test_overrides_reach_every_scan(tmp_path: Path) -> None:
    replication = REPLICATIONS["previous_token"]
    plans = plan_replication(replication, replication.bundled_model, str(tmp_path), FEW_SEQUENCES)
    sizes = [(plan.manifest.sequences, plan.scan.sequences_per_shard) for plan in plans]
    assert sizes == [(40, 40)] * len(replication.scan)


@pytest.mark.parametrize("engine", ["fused", "dense"])
@pytest.mark.parametrize("name", ["gpt2-mini", "attn-only-2l-mini"])
def test_predictions_are_those_of_the_whole_model(name: str, engine: str) -> None:
    tokens = np.random.default_rng(0).integers(1, 200, size=(5, 21)).astype(np.int32)
    replica = toy.replica(
        find_model(f"bundled:{name}"), predictions=list(PREDICTIONS), engine=engine, batch_size=2
    )
    measured = replica.measure(tokens).sequences
    with torch.inference_mode():
        logits = bridge_of(replica.model)(
            torch.from_numpy(tokens).long(), return_type="logits"
        ).double()
    log_probabilities = logits.log_softmax(-1)
    token_ids = torch.from_numpy(tokens).long()
    # The prediction at a position is of the next token.
    losses = -log_probabilities[:, :-1].gather(-1, token_ids[:, 1:, None])[..., 0]
    expected = {
        "loss": losses.mean(-1),
        "loss_early": losses[:, :10].mean(-1),
        "loss_late": losses[:, 10:].mean(-1),
        "final_probabilities": log_probabilities[:, -1].exp().gather(-1, token_ids),
        "final_logits": logits[:, -1].gather(-1, token_ids),
    }
    for column, values in expected.items():
        np.testing.assert_allclose(measured[column], values.numpy(), atol=2e-5, rtol=1e-5)
    # Nothing predicts the first token.
    assert np.isnan(measured["losses"][:, 0]).all()
    np.testing.assert_allclose(measured["losses"][:, 1:], losses.numpy(), atol=2e-5)


def test_logits_in_small_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(1, 200, size=(3, 9)).astype(np.int32)
    replica = toy.replica(find_model("bundled:gpt2-mini"), predictions=["losses", "final_logits"])
    at_once = replica.measure(tokens).sequences
    monkeypatch.setattr("headcount.workers.engine.prediction_inputs.CHUNK_BYTES", 1)
    in_pieces = replica.measure(tokens).sequences
    for column in ("losses", "final_logits"):
        np.testing.assert_allclose(in_pieces[column], at_once[column], atol=1e-5)


def test_without_predictions_the_unembedding_does_not_run() -> None:
    replica = toy.replica(find_model("bundled:gpt2-mini"))
    calls: list[int] = []
    replica.model.modules("unembed")[0].register_forward_pre_hook(lambda *_: calls.append(1))
    replica.measure(toy.repeating_tokens(9))
    assert calls == []
