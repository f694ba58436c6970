"""Provenance: what every commit says of how its shard was measured.

Also runs that other code continues, readers that refuse to mix two meanings of a column, and runs
of older code.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import headcount.jobs.plan.resolved_scan
import headcount.workers.shard
from headcount import app
from headcount.jobs.cluster.ray_cluster import Resources
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run, replan
from headcount.jobs.run.loop import run_to_end
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.open.connection import connect
from headcount.schemas.errors import QueryError, RunError
from headcount.schemas.files.commits import gather
from headcount.schemas.files.places import write_whole
from headcount.schemas.formulas import Formula
from headcount.schemas.packages import PACKAGE
from headcount.schemas.predictions import PREDICTION_INPUTS, PREDICTIONS
from headcount.schemas.profiles import PROFILES
from headcount.schemas.scans.scan import parse_scan
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.statistics.statistic_registry import LAYER_VALUES
from headcount.schemas.weight_statistics import WEIGHT_STATISTICS
from headcount.schemas.weight_statistics.weight_registry import LAYER_WEIGHTS, MODEL_WEIGHTS
from headcount.workers.provenance.code_fingerprint import (
    code_fingerprint,
    learn_fingerprint,
    read_code,
)
from headcount.workers.provenance.providers import PROVIDERS, column_fingerprint, provider_modules
from headcount.workers.replica import Replica
from tests.toys.toy_replica import ToyReplica

CODE_HERE = code_fingerprint()
OTHER_CODE = "0123456789ab"
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


def plan_of(out: Path, sequences: int = 4, **changes: Any) -> Plan:
    """Plan the run of this file's scan."""
    scan = parse_scan(FIELDS | {"sequences": sequences, "out": str(out)} | changes)
    return make_plan(scan, "traced")


def run_here(
    plan: Plan, replica_class: type[Replica] = ToyReplica, allow_other_code: bool = False
) -> list[str]:
    """Bring a run to its end in this process; returns the lines that it says."""
    text = io.StringIO()
    prepare_run(plan, "")
    console = Console(file=text, width=1000, highlight=False)
    resources = Resources(0, 1, "cpu", None)
    failures = run_to_end(
        plan, resources, console, replica_class=replica_class, allow_other_code=allow_other_code
    )
    assert failures == []
    return text.getvalue().splitlines()


@pytest.fixture
def become_other_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that gives this process another code, in which `entropy` means something else."""

    def become(code: str) -> None:
        monkeypatch.setattr(headcount.jobs.plan.resolved_scan, "code_fingerprint", lambda: code)
        monkeypatch.setattr(headcount.workers.shard, "code_fingerprint", lambda: code)

        def record(formula: Formula) -> dict[str, Any]:
            changed = (
                {"fingerprint": code} if formula.name == "entropy" and code != CODE_HERE else {}
            )
            return formula.record | {"fingerprint": column_fingerprint(formula)} | changed

        monkeypatch.setattr(headcount.jobs.plan.resolved_scan, "column_record", record)

    return become


def test_every_commit_says_how_its_shard_was_measured(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    run_here(plan, Replica)
    for commit in plan.run.commits():
        assert commit.code == CODE_HERE
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
    gather(plan.run.commits_directory, before)
    assert list(plan.run.commits()) == before
    sql = """
        SELECT DISTINCT code, device, method.intervention, method.built_layers, version.version
        FROM (SELECT code, device, unnest(methods) AS method, versions FROM shards),
             unnest(versions) AS v(version)
        WHERE version.library = 'torch' ORDER BY method.intervention DESC
    """
    torch = next(v.version for v in before[0].versions if v.library == "torch")
    assert connect(plan.run.path).execute(sql).fetchall() == [
        (CODE_HERE, before[0].device, "none", [], torch),
        (CODE_HERE, before[0].device, "head_to_first(1,3)", [1], torch),
    ]


def test_a_run_continues_with_other_code_only_if_that_is_allowed(
    tmp_path: Path, become_other_code: Callable[[str], None]
) -> None:
    begun_plan = plan_of(tmp_path)
    run_here(begun_plan)
    become_other_code(OTHER_CODE)
    # A complete run measures nothing, so it does not matter which code is here.
    assert "2 of them done" in run_here(plan_of(tmp_path))[-1]
    for extended, way in (
        (lambda: plan_of(tmp_path, 6), f"headcount rm {begun_plan.run.path} deletes it"),
        (
            lambda: replan(begun_plan.run, ["sequences=6"]),
            "headcount scan SCAN --new starts another",
        ),
    ):
        with pytest.raises(RunError) as refusal:
            run_here(extended())
        (line,) = str(refusal.value).splitlines()
        for part in (CODE_HERE, OTHER_CODE, "--allow-other-code", way):
            assert part in line
    assert begun_plan.run.manifest() == begun_plan.manifest
    lines = run_here(plan_of(tmp_path, 6), allow_other_code=True)
    assert f"begun with code {CODE_HERE}, continues with code {OTHER_CODE}" in lines[1]
    manifest = begun_plan.run.manifest()
    assert (manifest.code, list(manifest.other_codes)) == (CODE_HERE, [OTHER_CODE])
    assert manifest.other_codes[OTHER_CODE]["statistics"]["entropy"] == OTHER_CODE
    assert [c.code for c in begun_plan.run.commits()] == [CODE_HERE, CODE_HERE, OTHER_CODE]
    # Code that was allowed once has a part in the run, and need not be allowed again.
    run_here(plan_of(tmp_path, 8))
    become_other_code(CODE_HERE)
    run_here(plan_of(tmp_path, 10))
    assert [c.code for c in begun_plan.run.commits()] == [
        CODE_HERE,
        CODE_HERE,
        OTHER_CODE,
        OTHER_CODE,
        CODE_HERE,
    ]


def test_readers_refuse_to_mix_two_meanings_of_a_column(
    tmp_path: Path, become_other_code: Callable[[str], None]
) -> None:
    begun_plan = plan_of(tmp_path)
    run_here(begun_plan)
    become_other_code(OTHER_CODE)
    run_here(plan_of(tmp_path, 6), allow_other_code=True)
    for change in (lambda: None, lambda: compact(begun_plan.run)):
        change()
        with pytest.raises(QueryError) as refusal:
            connect(begun_plan.run.path)
        entropy = column_fingerprint(STATISTICS["entropy"])
        assert str(refusal.value) == (
            "statistic 'entropy' has one formula in 2 shards from 0 to 1 of run "
            f"{begun_plan.run.run_id}, by code {CODE_HERE} ({entropy}) and another in shard 2 of "
            f"run {begun_plan.run.run_id}, by code {OTHER_CODE} ({OTHER_CODE}); "
            f"--code {OTHER_CODE} reads the latter alone"
        )
        for code, sequences in ((CODE_HERE, [0, 1, 2, 3]), (OTHER_CODE, [4, 5])):
            connection = connect(begun_plan.run.path, code=code)
            sql = "SELECT DISTINCT sequence FROM heads ORDER BY 1"
            assert [row[0] for row in connection.execute(sql).fetchall()] == sequences
    with pytest.raises(QueryError, match="unknown code 'c0de'"):
        connect(begun_plan.run.path, code="c0de")
    words = [
        "query",
        str(begun_plan.run.path),
        "SELECT count(*) AS n FROM sequences",
        "--format",
        "csv",
    ]
    answer = CliRunner().invoke(app, [*words, "--code", OTHER_CODE])
    assert answer.stdout.splitlines() == ["n", "4"]
    run_id = begun_plan.run.run_id
    assert answer.stderr == f"note: run {run_id} is not complete: 1 of 3 shards are in\n"


def test_other_code_that_means_the_same_is_read_as_one(
    tmp_path: Path, become_other_code: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(plan_of(tmp_path))
    become_other_code(OTHER_CODE)
    # Other code, in which every name means the same.
    monkeypatch.undo()
    monkeypatch.setattr(headcount.jobs.plan.resolved_scan, "code_fingerprint", lambda: OTHER_CODE)
    monkeypatch.setattr(headcount.workers.shard, "code_fingerprint", lambda: OTHER_CODE)
    plan = plan_of(tmp_path, 6)
    run_here(plan, allow_other_code=True)
    sql = "SELECT code, count(*) FROM shards GROUP BY code ORDER BY 2 DESC"
    assert connect(plan.run.path).execute(sql).fetchall() == [(CODE_HERE, 2), (OTHER_CODE, 1)]


def test_another_device_and_other_libraries_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("begun on" in line for line in run_here(plan_of(tmp_path)))
    monkeypatch.setattr(headcount.workers.shard, "device_name", lambda device: "cuda NVIDIA H100")
    lines = run_here(plan_of(tmp_path, 10))
    matching_lines = [line for line in lines if "cuda NVIDIA H100, begun on cpu " in line]
    assert len(matching_lines) == 1


MEASURING = sorted(
    {f"{module.replace('.', '/')}.py" for f in FORMULAS for module in provider_modules(f)}
)
"""The files of code that columns read."""


def copy_code(
    out: Path, file: str, intervention: Callable[[str], str], files: Iterable[str] = MEASURING
) -> Path:
    """A copy of some code that measures, with one file changed."""
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, out / name)
    text = (out / file).read_text()
    assert intervention(text) != text
    (out / file).write_text(intervention(text))
    return out


@pytest.mark.parametrize(
    ("intervention", "shows"),
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
    tmp_path: Path, intervention: Callable[[str], str], shows: bool
) -> None:
    files = ("workers/replica.py", "schemas/scans/scan.py")
    before = read_code(copy_code(tmp_path / "before", files[0], lambda text: text + "\n", files))
    project = copy_code(tmp_path / "after", files[0], intervention, files)
    # What another process says of its files holds for the same bytes alone.
    learn_fingerprint(before)
    assert (code_fingerprint(project) != before.fingerprint) == shows


def test_the_fingerprint_of_another_process_holds_for_the_same_bytes(tmp_path: Path) -> None:
    file = "workers/replica.py"
    here = read_code(copy_code(tmp_path / "here", file, lambda text: text + "\n", [file]))
    project = copy_code(tmp_path / "a", file, lambda text: text + "# why\n", [file])
    code = read_code(project)
    assert (code.fingerprint, code.content != here.content) == (here.fingerprint, True)
    learn_fingerprint(code._replace(fingerprint="of another"))
    read_code.cache_clear()
    assert code_fingerprint(project) == "of another"
    moved = copy_code(tmp_path / "b", file, lambda text: text + "# why \n", [file])
    assert code_fingerprint(moved) == here.fingerprint


def test_everything_that_a_formula_can_read_has_its_providers() -> None:
    readable = {*LAYER_VALUES, *PREDICTION_INPUTS, *LAYER_WEIGHTS, *MODEL_WEIGHTS}
    conditions = {name for formula in FORMULAS for name in formula.conditions}
    assert set(PROVIDERS) == readable | conditions
    for modules in PROVIDERS.values():
        for module in modules:
            assert (PACKAGE / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("module", sorted({m for modules in PROVIDERS.values() for m in modules}))
def test_a_change_in_a_provider_shows_in_the_columns_that_read_it_alone(
    tmp_path: Path, module: str
) -> None:
    file = f"{module.replace('.', '/')}.py"
    longer = copy_code(tmp_path, file, lambda text: text + "LIMIT = 1\n")
    before = {formula.name: column_fingerprint(formula) for formula in FORMULAS}
    after = {formula.name: column_fingerprint(formula, longer) for formula in FORMULAS}
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {f.name for f in FORMULAS if module in provider_modules(f)}
    assert changed


def test_a_comment_in_every_provider_shows_in_no_column(tmp_path: Path) -> None:
    for file in MEASURING:
        copy_code(tmp_path, file, lambda text: text + "# why\n", [file])
    for formula in FORMULAS:
        assert column_fingerprint(formula, tmp_path) == column_fingerprint(formula)


def test_what_a_fix_of_the_inputs_of_predictions_changes() -> None:
    # The loss was once mended there, which changed its values and not its formula.
    module = "workers.engine.prediction_inputs"
    readers = {f.name for f in FORMULAS if module in provider_modules(f)}
    assert readers == set(PREDICTIONS)
    assert "workers.engine.kernel.sweep_kernel" in provider_modules(STATISTICS["entropy"])
    assert "workers.engine.token_pairs" in provider_modules(STATISTICS["induction_score"])
    assert "workers.engine.token_pairs" not in provider_modules(STATISTICS["entropy"])


def test_a_run_of_another_layout_is_refused_in_one_line(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    prepare_run(plan, "")
    fields = json.loads(plan.run.manifest_file.read_bytes())
    for layout in (None, 3, fields["layout"] + 1):
        write_whole(plan.run.manifest_file, json.dumps(fields | {"layout": layout}).encode())
        with pytest.raises(RunError, match=r"read it with the version that wrote it \(.*0\.3\)$"):
            plan.run.manifest()
