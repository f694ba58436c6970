"""Provenance: what every commit says of how its shard was measured.

Also runs that other code continues, readers that refuse to mix two meanings of a column, and runs
of older code.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from platformdirs import user_cache_path

import headcount.jobs.plan.resolved_scan
import headcount.workers.shard
from headcount.jobs import api
from headcount.jobs.plan.plan import Plan, make_plan, replan
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.asking import open_runs
from headcount.schemas.errors import QueryError, RunError
from headcount.schemas.files.commits import gather
from headcount.schemas.formula_kinds import (
    LAYER_VALUES,
    LAYER_WEIGHTS,
    MODEL_WEIGHTS,
    PREDICTION_INPUTS,
)
from headcount.schemas.formulas import Formula
from headcount.schemas.packages import PACKAGE
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.profiles import PROFILES
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.weight_statistics import WEIGHT_STATISTICS
from headcount.workers.provenance.code_fingerprint import (
    check_code,
    code_fingerprint,
    learn_fingerprint,
    read_code,
)
from headcount.workers.provenance.providers import PROVIDERS, column_fingerprint, provider_modules
from headcount.workers.replica import Replica
from tests.toys.commands import ended, printed
from tests.toys.refusals import refused
from tests.toys.runs_here import become, run_here
from tests.toys.toy_runs import local

CODE_HERE = code_fingerprint()
OTHER_CODE = "0123456789ab"
FIELDS: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini", "n_ctx": 9, "input": {"family": "uniform_random"},
    "interventions": ["none", "head_to_first(1,3)"], "statistics": ["entropy", "resid_pre_norm"],
    "sequences_per_shard": 2,
}  # fmt: skip
FORMULAS: list[Formula] = [
    formula
    for registry in (STATISTICS, PROFILES, PREDICTIONS, WEIGHT_STATISTICS)
    for formula in registry.values()
]


def plan_of(out: Path, sequences: int = 4, **changes: Any) -> Plan:
    """Plan the run of this file's scan."""
    scan = parse_scan(FIELDS | {"sequences": sequences, "out": str(out)} | changes)
    return make_plan(scan, "traced")


@pytest.fixture
def become_other_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that gives this process another code, in which `entropy` means something else."""

    def become_other(code: str) -> None:
        def record(formula: Formula) -> dict[str, Any]:
            is_changed = formula.name == "entropy" and code != CODE_HERE
            own = code if is_changed else column_fingerprint(formula)
            return formula.record | {"fingerprint": own}

        become(monkeypatch, code)
        monkeypatch.setattr(headcount.jobs.plan.resolved_scan, "column_record", record)

    return become_other


def test_every_commit_says_how_its_shard_was_measured(tmp_path: Path):
    plan = plan_of(tmp_path)
    run_here(plan, Replica)
    commits = list(plan.run.commits())
    method = {"engine": "fused", "precision": "float32", "attention": "tiles"}
    for commit in commits:
        assert commit.code == CODE_HERE
        assert commit.device.startswith("cpu ")
        assert {"torch", "transformer_lens", "numpy"} <= {v.library for v in commit.versions}
        assert [m.model_dump() for m in commit.methods] == [
            method | {"intervention": name, "built_layers": built}
            for name, built in (("none", []), ("head_to_first(1,3)", [1]))
        ]
    gather(plan.run.commits_directory, commits)
    assert list(plan.run.commits()) == commits
    sql = """
        SELECT DISTINCT code, device, method.intervention, method.built_layers, version.version
        FROM (SELECT code, device, unnest(methods) AS method, versions FROM shards),
             unnest(versions) AS v(version)
        WHERE version.library = 'torch' ORDER BY method.intervention DESC
    """
    torch = next(v.version for v in commits[0].versions if v.library == "torch")
    assert open_runs(plan.run.path).rows(sql) == [
        (CODE_HERE, commits[0].device, "none", [], torch),
        (CODE_HERE, commits[0].device, "head_to_first(1,3)", [1], torch),
    ]


def test_other_code_is_answered_with_what_exists_where_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fields = FIELDS | {"sequences": 2, "out": str(tmp_path)}
    run_here(plan_of(tmp_path, 2))
    run = plan_of(tmp_path, 2).run
    file = local(run.manifest_file)
    file.write_text(file.read_text().replace(CODE_HERE, OTHER_CODE))
    resumed = f"headcount resume {run.path} --allow-other-code"
    for command, way in (
        (False, "new=True starts another run"),
        (True, f"headcount rm {run.path}, and the same command measures it anew"),
    ):
        # `calibrate` and exports scan in a process that is a command.
        monkeypatch.setattr(api, "is_a_command", lambda answer=command: answer)
        line = refused(RunError, headcount.scan, fields, sequences=4, name="traced", quiet=True)
        assert resumed in line
        assert line.endswith(f"; {way}")
    printed(*resumed.split()[1:], "--set", "sequences=4", "--replicas", "0")
    with headcount.scan(fields, sequences=6, name="traced", quiet=True) as opened:
        assert opened.sql("SELECT count(DISTINCT sequence) FROM heads").rows() == [(6,)]


def test_a_run_continues_with_other_code_only_if_that_is_allowed(
    tmp_path: Path, become_other_code: Callable[[str], None]
):
    begun_plan = plan_of(tmp_path)
    run_here(begun_plan)
    run = begun_plan.run
    become_other_code(OTHER_CODE)
    # A complete run measures nothing, so it does not matter which code is here.
    assert "2 of them done" in run_here(plan_of(tmp_path))[-1]
    for extended in (lambda: plan_of(tmp_path, 6), lambda: replan(run, ["sequences=6"])):
        line = refused(RunError, run_here, extended())
        for part in (CODE_HERE, OTHER_CODE, "--allow-other-code", "headcount scan --new starts"):
            assert part in line
    assert run.manifest() == begun_plan.manifest
    lines = run_here(plan_of(tmp_path, 6), allow_other_code=True)
    assert f"begun with code {CODE_HERE}, continues with code {OTHER_CODE}" in lines[1]
    manifest = run.manifest()
    assert (manifest.code, list(manifest.other_codes)) == (CODE_HERE, [OTHER_CODE])
    assert manifest.other_codes[OTHER_CODE]["statistics"]["entropy"] == OTHER_CODE
    # Code that was allowed once has a part in the run, and need not be allowed again.
    run_here(plan_of(tmp_path, 8))
    become_other_code(CODE_HERE)
    run_here(plan_of(tmp_path, 10))
    codes = [CODE_HERE, CODE_HERE, OTHER_CODE, OTHER_CODE, CODE_HERE]
    assert [c.code for c in run.commits()] == codes


def test_readers_refuse_to_mix_two_meanings_of_a_column(
    tmp_path: Path, become_other_code: Callable[[str], None]
):
    plan = plan_of(tmp_path)
    run_here(plan)
    become_other_code(OTHER_CODE)
    run_here(plan_of(tmp_path, 6), allow_other_code=True)
    path, run_id = plan.run.path, plan.run.run_id
    entropy = column_fingerprint(STATISTICS["entropy"])
    for change in (lambda: None, lambda: compact(plan.run)):
        change()
        assert refused(QueryError, open_runs, path) == (
            f"statistic 'entropy' has one formula in 2 shards from 0 to 1 of run {run_id}, by code "
            f"{CODE_HERE} ({entropy}) and another in shard 2 of run {run_id}, by code {OTHER_CODE} "
            f"({OTHER_CODE}); --code {OTHER_CODE} reads the latter alone"
        )
        for code, sequences in ((CODE_HERE, [0, 1, 2, 3]), (OTHER_CODE, [4, 5])):
            sql = "SELECT DISTINCT sequence FROM heads ORDER BY 1"
            found = open_runs(path, code=code).rows(sql)
            assert [sequence for (sequence,) in found] == sequences
    with pytest.raises(QueryError, match="unknown code 'c0de'"):
        open_runs(path, code="c0de")
    words = ["query", str(path), "SELECT count(*) AS n FROM sequences", "--format", "csv"]
    answer = ended(*words, "--code", OTHER_CODE)
    assert answer.stdout.splitlines() == ["n", "4"]
    assert answer.stderr == f"note: run {run_id} is not complete: 1 of 3 shards are in\n"


def test_other_code_of_one_meaning_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not any("begun on" in line for line in run_here(plan_of(tmp_path)))
    become(monkeypatch, OTHER_CODE)
    monkeypatch.setattr(headcount.workers.shard, "device_name", lambda device: "cuda NVIDIA H100")
    plan = plan_of(tmp_path, 10)
    lines = run_here(plan, allow_other_code=True)
    # Another device is said once.
    assert sum("cuda NVIDIA H100, begun on cpu " in line for line in lines) == 1
    sql = "SELECT code, count(*) FROM shards GROUP BY code ORDER BY 2"
    assert open_runs(plan.run.path).rows(sql) == [(CODE_HERE, 2), (OTHER_CODE, 3)]


MEASURING = sorted(
    {f"{module.replace('.', '/')}.py" for f in FORMULAS for module in provider_modules(f)}
)
"""The files of code that columns read."""


def copy_code(
    out: Path, change: Callable[[str], str], changed: Iterable[str],
    files: Iterable[str] = MEASURING,
) -> Path:  # fmt: skip
    """A copy of some code that measures, with some files changed."""
    for file in files:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        text = (PACKAGE / file).read_text()
        (out / file).write_text(change(text) if file in changed else text)
    return out


def test_the_code_is_known_by_what_python_runs(tmp_path: Path):
    file = "workers/replica.py"
    before = read_code(copy_code(tmp_path / "before", lambda text: text + "\n", [file], [file]))

    def changed(old: str, new: str) -> Path:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return copy_code(folder, lambda text: text.replace(old, new, 1), [file], [file])

    for old, new, shows in (
        ("\n\n\n", "\n\n\n\n", False),
        ("\n\n\n", "\n# why\n\n", False),
        ("A loaded model that measures.", "A model that measures.", False),
        ("\n\n\n", "\nLIMIT = 1\n\n", True),
        ("does not fit the memory", "is too large for the memory", True),
    ):
        code = read_code(changed(old, new))
        assert code.content != before.content, new
        assert (code.fingerprint != before.fingerprint) == shows, new
    # It is remembered for the next command, and a broken memory is none.
    (remembered,) = (user_cache_path("headcount") / "code").glob(before.content)
    for said, found in (("0123456789ab", "0123456789ab"), ("0123", before.fingerprint)):
        remembered.write_text(said)
        read_code.cache_clear()
        assert code_fingerprint(tmp_path / "before") == found
    with pytest.raises(
        RunError, match=rf"this node runs code {CODE_HERE}, the driver 0123456789ab;"
    ):
        check_code(before._replace(fingerprint="0123456789ab"))
    # What another process says of its files holds for the same bytes alone.
    learn_fingerprint(before._replace(fingerprint="of another"))
    read_code.cache_clear()
    assert code_fingerprint(tmp_path / "before") == "of another"
    assert code_fingerprint(changed("\n\n\n", "\n# how\n\n")) == before.fingerprint


def test_everything_that_a_formula_can_read_has_its_providers():
    readable = {*LAYER_VALUES, *PREDICTION_INPUTS, *LAYER_WEIGHTS, *MODEL_WEIGHTS}
    conditions = {name for formula in FORMULAS for name in formula.conditions}
    assert set(PROVIDERS) == readable | conditions
    for modules in PROVIDERS.values():
        for module in modules:
            assert (PACKAGE / f"{module.replace('.', '/')}.py").is_file()
    # The loss was once mended there, which changed its values and not its formula.
    module = "workers.engine.prediction_inputs"
    of_effects = {f.name for f in FORMULAS if f.needs_gradients}
    reading = {f.name for f in FORMULAS if module in provider_modules(f)}
    assert reading == {*PREDICTIONS} | of_effects
    assert "workers.kernel.sweep_kernel" in provider_modules(STATISTICS["entropy"])
    assert "workers.engine.token_pairs" in provider_modules(STATISTICS["induction_score"])
    assert "workers.engine.token_pairs" not in provider_modules(STATISTICS["entropy"])


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.long)])
def test_a_change_in_a_provider_shows_in_the_columns_that_read_it_alone(tmp_path: Path, step: int):
    before = {formula.name: column_fingerprint(formula) for formula in FORMULAS}
    commented = copy_code(tmp_path / "commented", lambda text: text + "# why\n", MEASURING)
    assert {f.name: column_fingerprint(f, commented) for f in FORMULAS} == before
    for module in sorted({m for modules in PROVIDERS.values() for m in modules})[::step]:
        file = f"{module.replace('.', '/')}.py"
        longer = copy_code(tmp_path / module, lambda text: text + "LIMIT = 1\n", [file])
        readers = {f.name for f in FORMULAS if module in provider_modules(f)}
        assert readers
        changed = {f.name for f in FORMULAS if column_fingerprint(f, longer) != before[f.name]}
        assert changed == readers
