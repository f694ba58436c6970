"""What every shard says of how it was measured; going on with other code; readers that refuse to mix
two meanings; runs of older code.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import jobs.plan
import workers.shard
from headcount import app
from jobs.compaction import compact
from jobs.plan import Plan, make_plan, prepare_run
from jobs.ray_cluster import Resources
from jobs.replan import replan
from jobs.run_loop import run_to_end
from jobs.status import as_lines, list_line, read_status
from queries.asking import open_runs
from queries.connection import connect
from queries.report import write_report
from schemas.commits import COMMITS, Commit, fold
from schemas.errors import QueryError, RunError
from schemas.formulas import Formula
from schemas.places import place, write_whole
from schemas.predictions import PREDICTION_INPUTS, PREDICTIONS
from schemas.profiles import PROFILES
from schemas.run_directory import RunDirectory
from schemas.scan import parse_scan
from schemas.statistics import STATISTICS
from schemas.statistics.statistic_registry import LAYER_VALUES
from schemas.weight_statistics import WEIGHT_STATISTICS
from schemas.weight_statistics.weight_registry import LAYER_WEIGHTS, MODEL_WEIGHTS
from tests.toy_replica import ToyReplica
from tests.toy_runs import local
from workers.provenance.code_fingerprint import ROOT, code_fingerprint
from workers.provenance.providers import PROVIDERS, column_fingerprint, provider_modules
from workers.replica import Replica

HERE = code_fingerprint()
OTHER = "0123456789ab"
FIELDS: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini",
    "n_ctx": 9,
    "input": {"family": "uniform_random"},
    "interventions": ["none", "head_to_first(1,3)"],
    "statistics": ["entropy", "resid_pre_norm"],
    "sequences_per_shard": 2,
}
FORMULAS: list[Formula] = [
    formula
    for registry in (STATISTICS, PROFILES, PREDICTIONS, WEIGHT_STATISTICS)
    for formula in registry.values()
]


def planned(out: Path, sequences: int = 4, **changes: Any) -> Plan:
    scan = parse_scan(FIELDS | {"sequences": sequences, "out": str(out)} | changes)
    return make_plan(scan, "traced")


def measured(
    plan: Plan, replica: type[Replica] = ToyReplica, allow_other_code: bool = False
) -> list[str]:
    """Bring a run to its end in this process; the lines that it says."""
    text = io.StringIO()
    prepare_run(plan, "")
    console = Console(file=text, width=1000, highlight=False)
    resources = Resources(0, 1, "cpu", None)
    failures = run_to_end(
        plan, resources, console, replica=replica, allow_other_code=allow_other_code
    )
    assert failures == []
    return text.getvalue().splitlines()


@pytest.fixture
def other_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make this process one of other code, in which `entropy` means something else."""

    def become(code: str) -> None:
        monkeypatch.setattr(jobs.plan, "code_fingerprint", lambda: code)
        monkeypatch.setattr(workers.shard, "code_fingerprint", lambda: code)

        def record(formula: Formula) -> dict[str, Any]:
            changed = {"fingerprint": code} if formula.name == "entropy" and code != HERE else {}
            return formula.record | {"fingerprint": column_fingerprint(formula)} | changed

        monkeypatch.setattr(jobs.plan, "column_record", record)

    return become


def test_every_commit_says_how_its_shard_was_measured(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    measured(plan, Replica)
    for commit in plan.run.commits():
        assert commit.code == HERE
        assert commit.device.startswith("cpu ")
        assert {"torch", "transformer_lens", "numpy"} <= {v.library for v in commit.versions}
        assert [m.model_dump() for m in commit.methods] == [
            {
                "intervention": name,
                "engine": "fused",
                "precision": "float32",
                "attention": "tiles",
                "built_layers": built,
            }
            for name, built in (("none", []), ("head_to_first(1,3)", [1]))
        ]
    before = list(plan.run.commits())
    fold(plan.run.commits_directory, before)
    assert list(plan.run.commits()) == before
    sql = """
        SELECT DISTINCT code, device, method.intervention, method.built_layers, version.version
        FROM (SELECT code, device, unnest(methods) AS method, versions FROM shards), unnest(versions) AS v(version)
        WHERE version.library = 'torch' ORDER BY method.intervention DESC
    """
    torch = next(v.version for v in before[0].versions if v.library == "torch")
    assert connect(plan.run.path).execute(sql).fetchall() == [
        (HERE, before[0].device, "none", [], torch),
        (HERE, before[0].device, "head_to_first(1,3)", [1], torch),
    ]


def test_a_run_goes_on_with_other_code_only_when_that_is_allowed(
    tmp_path: Path, other_code: Callable[[str], None]
) -> None:
    begun = planned(tmp_path)
    measured(begun)
    other_code(OTHER)
    # There is nothing to measure, so no code is needed.
    assert "2 of them done" in measured(planned(tmp_path))[-1]
    for extended, way in (
        (lambda: planned(tmp_path, 6), f"headcount rm {begun.run.path} deletes it"),
        (lambda: replan(begun.run, ["sequences=6"]), "headcount scan SCAN --new starts another"),
    ):
        with pytest.raises(RunError) as refused:
            measured(extended())
        (line,) = str(refused.value).splitlines()
        for part in (HERE, OTHER, "--allow-other-code", way):
            assert part in line
    assert begun.run.manifest() == begun.manifest
    lines = measured(planned(tmp_path, 6), allow_other_code=True)
    assert f"begun with code {HERE}, goes on with code {OTHER}" in lines[1]
    manifest = begun.run.manifest()
    assert (manifest.code, list(manifest.other_codes)) == (HERE, [OTHER])
    assert manifest.other_codes[OTHER]["statistics"]["entropy"] == OTHER
    assert [c.code for c in begun.run.commits()] == [HERE, HERE, OTHER]
    # What was allowed once is a part of the run, as is the code that began it.
    measured(planned(tmp_path, 8))
    other_code(HERE)
    measured(planned(tmp_path, 10))
    assert [c.code for c in begun.run.commits()] == [HERE, HERE, OTHER, OTHER, HERE]


def test_readers_refuse_to_mix_two_meanings_of_a_column(
    tmp_path: Path, other_code: Callable[[str], None]
) -> None:
    begun = planned(tmp_path)
    measured(begun)
    other_code(OTHER)
    measured(planned(tmp_path, 6), allow_other_code=True)
    for change in (lambda: None, lambda: compact(begun.run)):
        change()
        with pytest.raises(QueryError) as refused:
            connect(begun.run.path)
        entropy = column_fingerprint(STATISTICS["entropy"])
        assert str(refused.value) == (
            "statistic 'entropy' has one formula in 2 shards from 0 to 1 of run "
            f"{begun.run.run_id}, by code {HERE} ({entropy}) and another in shard 2 of run "
            f"{begun.run.run_id}, by code {OTHER} ({OTHER}); --code {OTHER} reads the latter alone"
        )
        for code, sequences in ((HERE, [0, 1, 2, 3]), (OTHER, [4, 5])):
            connection = connect(begun.run.path, code=code)
            found = connection.execute("SELECT DISTINCT sequence FROM heads ORDER BY 1").fetchall()
            assert [row[0] for row in found] == sequences
    with pytest.raises(QueryError, match="unknown code 'c0de'"):
        connect(begun.run.path, code="c0de")
    words = ["query", str(begun.run.path), "SELECT count(*) AS n FROM sequences", "--format", "csv"]
    assert CliRunner().invoke(app, [*words, "--code", OTHER]).output.splitlines() == ["n", "4"]


def test_other_code_that_means_the_same_is_read_as_one(
    tmp_path: Path, other_code: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(planned(tmp_path))
    other_code(OTHER)
    monkeypatch.undo()
    monkeypatch.setattr(jobs.plan, "code_fingerprint", lambda: OTHER)
    monkeypatch.setattr(workers.shard, "code_fingerprint", lambda: OTHER)
    plan = planned(tmp_path, 6)
    measured(plan, allow_other_code=True)
    sql = "SELECT code, count(*) FROM shards GROUP BY code ORDER BY 2 DESC"
    assert connect(plan.run.path).execute(sql).fetchall() == [(HERE, 2), (OTHER, 1)]


def test_another_device_and_other_libraries_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("begun on" in line for line in measured(planned(tmp_path)))
    monkeypatch.setattr(workers.shard, "device_name", lambda device: "cuda NVIDIA H100")
    lines = measured(planned(tmp_path, 10))
    said = [line for line in lines if "cuda NVIDIA H100, begun on cpu " in line]
    assert len(said) == 1


def copy_of_the_code(out: Path, file: str, edit: Callable[[str], str]) -> Path:
    """A copy of the code that measures, with one file edited."""
    for package in ("schemas", "workers"):
        shutil.copytree(ROOT / package, out / package, ignore=shutil.ignore_patterns("*.pyc"))
    text = (out / file).read_text()
    assert edit(text) != text
    (out / file).write_text(edit(text))
    return out


@pytest.mark.parametrize(
    ("edit", "shows"),
    [
        (lambda text: text + "# why\n", False),
        (
            lambda text: text.replace("A loaded model that measures.", "A model that measures.", 1),
            False,
        ),
        (lambda text: text.replace("\n\n\n", "\n\n\n\n"), False),
        (lambda text: text + "LIMIT = 1\n", True),
        (
            lambda text: text.replace("does not fit the memory", "is too large for the memory", 1),
            True,
        ),
    ],
    ids=["comment", "docstring", "layout", "line", "message"],
)
def test_the_code_is_known_by_what_python_runs(
    tmp_path: Path, edit: Callable[[str], str], shows: bool
) -> None:
    project = copy_of_the_code(tmp_path, "workers/replica.py", edit)
    assert (code_fingerprint(project) != HERE) == shows


def test_whatever_a_formula_can_read_has_its_providers() -> None:
    readable = {*LAYER_VALUES, *PREDICTION_INPUTS, *LAYER_WEIGHTS, *MODEL_WEIGHTS}
    conditions = {name for formula in FORMULAS for name in formula.conditions}
    assert set(PROVIDERS) == readable | conditions
    for modules in PROVIDERS.values():
        for module in modules:
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("module", sorted({m for modules in PROVIDERS.values() for m in modules}))
def test_a_change_in_a_provider_shows_in_the_columns_that_read_it_and_in_no_other(
    tmp_path: Path, module: str
) -> None:
    file = f"{module.replace('.', '/')}.py"
    longer = copy_of_the_code(tmp_path / "longer", file, lambda text: text + "LIMIT = 1\n")
    same = copy_of_the_code(tmp_path / "same", file, lambda text: text + "# why\n")
    before = {formula.name: column_fingerprint(formula) for formula in FORMULAS}
    assert before == {formula.name: column_fingerprint(formula, same) for formula in FORMULAS}
    after = {formula.name: column_fingerprint(formula, longer) for formula in FORMULAS}
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {f.name for f in FORMULAS if module in provider_modules(f)}
    assert changed


def test_what_a_fix_of_the_inputs_of_predictions_changes() -> None:
    module = "workers.engine.prediction_inputs"
    reading = {f.name for f in FORMULAS if module in provider_modules(f)}
    assert reading == set(PREDICTIONS)
    assert "workers.engine.sweep_kernel" in provider_modules(STATISTICS["entropy"])
    assert "workers.engine.token_pairs" in provider_modules(STATISTICS["induction_score"])
    assert "workers.engine.token_pairs" not in provider_modules(STATISTICS["entropy"])


OLDER = Path(__file__).parent / "data" / "older_runs"


@pytest.fixture
def older(tmp_path: Path) -> RunDirectory:
    """A run of a 2×2 toy that code of another time measured: one commit in a fold, one in a file."""
    shutil.copytree(OLDER, tmp_path / "runs")
    (path,) = (tmp_path / "runs").iterdir()
    return RunDirectory(path)


def test_a_run_of_older_code_is_read(older: RunDirectory, tmp_path: Path) -> None:
    manifest = older.manifest()
    assert manifest.older
    assert (manifest.sequences, manifest.batch_size) == (3, 2)
    assert list(manifest.kinds["predictions"]) == ["loss"]
    scan = manifest.identity["scan"]
    assert (scan["weight_processing"], scan["predictions"]) == ("raw", ["loss"])
    for commit in older.commits():
        assert [(m.intervention, m.engine, m.built_layers) for m in commit.methods] == [
            ("none", "fused", []),
            ("mask_first_keys", "fused", [0, 1]),
        ]
        assert {m.precision for m in commit.methods} == {"float32"}
        assert (commit.code, commit.device, commit.versions) == ("", "", [])
    connection = connect(older.path)
    sql = "SELECT intervention, count(*), count(entropy), count(DISTINCT sequence) FROM heads GROUP BY 1 ORDER BY 1"
    assert connection.execute(sql).fetchall() == [
        ("mask_first_keys", 12, 12, 3),
        ("none", 12, 12, 3),
    ]
    sql = "SELECT weight_processing, precision, complete FROM runs"
    assert connection.execute(sql).fetchall() == [("raw", "float32", True)]
    assert connection.execute("SELECT DISTINCT code, device FROM shards").fetchall() == [
        (None, None)
    ]
    assert connection.execute("SELECT count(loss) FROM sequences").fetchall() == [(6,)]
    write_report(open_runs(older.path), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "fused, with built patterns in layers 0 1" in page
    assert read_status(older).complete
    assert any("complete" in line for line in as_lines(read_status(older)))
    assert list_line(older)[3] == "2/2"


def test_a_run_of_older_code_is_compacted_and_read(older: RunDirectory) -> None:
    before = connect(older.path).execute("SELECT * FROM heads ORDER BY ALL").fetchall()
    assert compact(older).problems == []
    assert connect(older.path).execute("SELECT * FROM heads ORDER BY ALL").fetchall() == before
    assert [c.methods[1].built_layers for c in older.commits()] == [[0, 1], [0, 1]]


def test_a_run_of_older_code_is_not_gone_on_with(older: RunDirectory) -> None:
    with pytest.raises(RunError) as refused:
        replan(older)
    (line,) = str(refused.value).splitlines()
    assert "begun by an older headcount" in line
    assert line.endswith("; headcount scan SCAN --new starts another run")


def test_a_commit_of_older_code_is_one_of_today(older: RunDirectory) -> None:
    file = older.commit_file(1)
    fields = json.loads(file.read_bytes())
    commit = Commit.model_validate(fields)
    assert set(commit.model_dump()) == set(COMMITS.names)
    write_whole(file, commit.model_dump_json().encode())
    assert connect(place(str(local(older.path).parent))) is not None
    assert len(list(older.commits())) == 2
