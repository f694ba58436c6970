"""Runs with a plug-in: proof, travel, reading without it, resuming, and what is refused."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import headcount
from headcount.jobs.plan.resolved_scan import resolve
from headcount.schemas.errors import ScanError
from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern
from headcount.schemas.plugin_files import read_plugins
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.units import Probability
from headcount.workers.plugin_proof import prove
from tests.plugins.files import DELIMITERS, HEADER, OWN_CHANGES, statistic_file
from tests.tools.processes import Command
from tests.toys.commands import ended, error_of, printed
from tests.toys.refusals import refused

NAME = "previous_delimiter_mass"
SCAN = f"""\
model = "bundled:gpt2-mini"
n_ctx = 16
sequences = 6
sequences_per_shard = 3
statistics = ["sink_mass", "{NAME}"]
plugins = ["my_heads.py"]

[input]
family = "uniform_random"
low = 40
high = 50
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # What a user of this machine has run is remembered in this test alone.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "my_heads.py").write_text(DELIMITERS)
    (tmp_path / "scan.toml").write_text(SCAN)
    return tmp_path


def by_hand(tokens: list[int], pattern: np.ndarray) -> float:
    """The statistic of one head, in loops."""
    total, delimiter = 0.0, None
    for query, token in enumerate(tokens):
        delimiter = query if token in (10, 46) else delimiter
        total += 0.0 if delimiter is None else float(pattern[query, delimiter])
    return total / len(tokens)


@pytest.mark.long
def test_a_run_with_a_plug_in_is_measured_read_without_it_and_resumed_by_whom_trusts_it(
    folder: Path,
):
    printed("scan", "scan.toml", "--replicas", "0")
    (run,) = Path("runs").iterdir()
    (kept,) = (run / "plugins").iterdir()
    assert kept.read_text() == DELIMITERS
    assert json.loads((run / "manifest.json").read_text())["plugins"] == {"my_heads.py": kept.stem}
    # Read by somebody who has no plug-in: the values, the meaning and the unit.
    Path("my_heads.py").unlink()
    with headcount.open("runs") as runs:
        rows = runs.sql("FROM heads ORDER BY sequence, layer, head").arrow()
        [(comment,), *_] = runs.sql(
            f"SELECT comment FROM duckdb_columns() WHERE column_name = '{NAME}' AND "
            "comment IS NOT NULL"
        ).rows()
    assert "Mean attention to the last delimiter" in comment
    (data,) = (run / "heads").rglob("shard-000000-*.parquet")
    metadata = pq.read_schema(data).field(NAME).metadata
    assert (metadata[b"unit"], metadata[b"range"]) == (b"probability", b"[0, 1]")
    assert len(rows) == 6 * 3 * 8
    assert max(rows[NAME].to_pylist()) > 0
    # Readers never run what a run keeps.
    kept.write_text("open('has_run', 'w')")
    printed("query", "runs", "FROM heads LIMIT 1")
    printed("report", "runs", "-o", "report.html")
    assert NAME in printed("text", run, "0", "--head", "L0H0")
    assert not Path("has_run").exists()
    kept.write_text(DELIMITERS)
    # The run goes on from what it keeps, where that has run before.
    shutil.rmtree(run / "commits")
    (run / "complete.json").unlink()
    printed("resume", run, "--replicas", "0")
    with headcount.open("runs") as runs:
        again = runs.sql("FROM heads ORDER BY sequence, layer, head").arrow()
    assert again[NAME].equals(rows[NAME])
    # To another user it is a file from elsewhere.
    shutil.rmtree("caches")
    before = sorted(run.rglob("*"))
    assert f"{run}: its plug-in my_heads.py has never run on this machine" in error_of(
        "resume", run, "--replicas", "0"
    )
    assert sorted(run.rglob("*")) == before
    printed("resume", run, "--replicas", "0", "--trust-plugins")
    kept.write_text(DELIMITERS.replace("[10, 46]", "[10]"))
    assert "is not the plug-in my_heads.py that the run was begun with" in error_of(
        "resume", run, "--trust-plugins"
    )


@pytest.mark.long
def test_a_calibration_runs_a_plug_in_from_elsewhere_only_if_it_is_trusted(folder: Path):
    statistics = f'statistics=["effects", "{NAME}"]'
    printed("scan", "scan.toml", "--replicas", "0", "--set", statistics)
    (run,) = Path("runs").iterdir()
    # To another user the plug-in is a file from elsewhere.
    shutil.rmtree("caches", ignore_errors=True)
    words = ("calibrate", run, "--heads", "2", "--sequences", "2", "--replicas", "0")
    assert f"{run}: its plug-in my_heads.py has never run on this machine" in error_of(*words)
    assert len(list(Path("runs").iterdir())) == 1
    printed(*words, "--trust-plugins")
    with headcount.open("runs") as runs:
        assert runs.sql("SELECT max(heads) FROM effect_calibration").rows() == [(2,)]


@pytest.mark.long
def test_sql_beside_a_plug_in_is_a_query_of_its_runs(folder: Path):
    file = Path("delimiter_heads.sql")
    file.write_text(
        f"-- Heads by their mass on delimiters.\nSELECT label, avg({NAME}) AS mass FROM heads "
        "GROUP BY label ORDER BY mass DESC"
    )
    Path("notes.sql").write_text("DROP TABLE heads")
    assert "query delimiter_heads: Heads by their mass" in printed("check", "my_heads.py")
    printed("scan", "scan.toml", "--replicas", "0")
    text = file.read_text()
    file.unlink()
    assert "delimiter_heads          Heads by their mass on delimiters." in printed("query", "runs")
    first, second = ended("query", "runs", "delimiter_heads", "--format", "csv").stdout.split()[1:3]
    assert float(first.partition(",")[2]) > float(second.partition(",")[2]) > 0
    (run,) = Path("runs").iterdir()
    assert [each.read_text() for each in (run / "queries").iterdir()] == [text]
    # It changes no row, so the same command brings another one; who resumes the run, none.
    file.write_text(text.replace("DESC", "ASC"))
    assert "2 of them done" in printed("scan", "scan.toml", "--replicas", "0")
    printed("resume", run, "--replicas", "0")
    (lowest,) = ended("query", "runs", "delimiter_heads", "--format", "csv").stdout.split()[1:2]
    assert float(lowest.partition(",")[2]) < float(second.partition(",")[2])
    file.rename("sink_heads.sql")
    assert error_of("scan", "scan.toml") == (
        "scan.toml: plugins: sink_heads.sql: 'sink_heads' is a view of headcount's own; call it "
        "otherwise"
    )


@pytest.mark.long
def test_a_changed_file_continues_no_run_and_one_with_other_prose_does(folder: Path):
    printed("scan", "scan.toml", "--replicas", "0")
    file = Path("my_heads.py")
    file.write_text(f"# Mine.\n{DELIMITERS}")
    assert "2 of them done" in printed("scan", "scan.toml", "--replicas", "0")
    file.write_text(DELIMITERS.replace("[10, 46]", "[46]"))
    message = error_of("scan", "scan.toml", "--replicas", "0")
    assert f"this run measured something else: the code of statistic {NAME}" in message
    # As if other code of headcount had begun the run, which may be continued where asked for.
    (run,) = Path("runs").iterdir()
    manifest = run / "manifest.json"
    code = json.loads(manifest.read_text())["code"]
    manifest.write_text(manifest.read_text().replace(code, "0" * 12))
    assert "measured something else: the plug-in my_heads.py" in error_of(
        "scan", "scan.toml", "--replicas", "0", "--allow-other-code"
    )


BAD = {
    "return pattern.key(0).mean(-1) * 3": "expected 0 to 1 (probability), got 1.",
    "return pattern.key(0)": "with 8 heads, or [batch], got shape [5, 8, 32]",
    "return 0.5": "expected a tensor, got float",
    "return pattern.key(0).mean(-1) / 0 * 0": "tried is not finite for sequence 0; say",
    "return (pattern.key(0) * (pattern.key(1) / pattern.key(1)).nan_to_num()).mean(-1)": None,
    "return pattern.key(0).mean(-1) / 2 + 0.1 * pattern.key(0).mean()": (
        "in a batch it is 0."
    ),
    "return pattern.key(0).mul_(0.5).mean(-1)": "gives another value when it is asked again",
    "return torch.rand(pattern.key(0).shape[:2])": "gives another value when it is asked again",
    "tokens[:, 0] = 0; return pattern.key(0).mean(-1)": "changes tokens; return a new tensor",
    "return (pattern.key(0).mean(-1) * 1e4).frac()": "float64 gives 0.",
    "return pattern.keys(0).mean(-1)": "asks the pattern for 'keys', which the fused engine does",
    "return pattern.pattern[..., 0].mean(-1)": "asks the pattern for 'pattern', which the fused",
    "return pattern.key(99).mean(-1)": "tried: IndexError: ",
    "return pattern.key(0).mean(1)": "with 8 heads, or [batch], got shape [5, 32]",
    "raise SystemExit(2)": "tried: SystemExit: 2",
    "KEPT.append(pattern.key(1)); return pattern.key(0).mean(-1)": "tried keeps tensors of a pass",
}  # fmt: skip


@pytest.mark.long
def test_what_does_not_hold_on_a_small_model_is_refused_with_the_line(tmp_path: Path):
    file = tmp_path / "my_heads.py"
    for body, message in BAD.items():
        file.write_text(statistic_file(body, decorator='KEPT = []\n@statistic("here")'))
        plugins = read_plugins([file])
        if message is None:
            prove(plugins, plugins, "fused")
            continue
        said = refused(ScanError, prove, plugins, plugins, "fused")
        assert said.startswith(f"{file}, line "), said
        assert message in said, (body, said)
    # The dense engine has the matrix itself.
    file.write_text(statistic_file("return pattern.pattern[..., 0].mean(-1)"))
    plugins = read_plugins([file])
    prove(plugins, plugins, "dense")
    file.write_text(DELIMITERS.replace("0.625", "0.5"))
    plugins = read_plugins([file])
    said = refused(ScanError, prove, plugins, plugins, "fused")
    assert said == (
        f"{file}, line 19: the example {NAME}(pattern([[1, 0], [0.25, 0.75]]), "
        "torch.tensor([[46, 7]])).item() expects 0.5, got 0.625"
    )


RULE = '@statistic("here", defined=lambda pattern: 1 / 0)'
KINDS = (
    (statistic_file("return pattern.key(0).mean(-1)", decorator=RULE), "line 8: tried: Zero"),
    (
        statistic_file(
            "return W_Q.flatten(1).norm(dim=-1) * float('nan')",
            decorator="@weight('x', axis='none')",
        ).replace("pattern: Pattern, tokens: Tensor", "W_Q: Tensor"),
        "line 8: tried: expected a number",
    ),
    (
        statistic_file("return pattern.key(0)[0, 0]", decorator="@profile('x', axis='query')"),
        "line 8: tried: expected [batch head index] or [batch index], got shape [32]",
    ),
    (
        statistic_file("return pattern.received()", decorator="@profile('x', axis='query')"),
        "line 8: tried: a later token changes it from ",
    ),
    (
        statistic_file("return token_loss", decorator="@prediction('x')").replace(
            "pattern: Pattern, tokens", "token_loss"
        ),
        "expected [batch], got shape [5, 32]",
    ),
)


@pytest.mark.long
def test_profiles_predictions_and_statistics_of_weights_are_tried_too(tmp_path: Path):
    file = tmp_path / "my_heads.py"
    for content, message in KINDS:
        names = "import prediction, profile, statistic, weight"
        file.write_text(content.replace("import statistic", names))
        plugins = read_plugins([file])
        assert message in refused(ScanError, prove, plugins, plugins, "fused")


BAD_CHANGES = {
    "return list(tokens * 0.5)": None,
    "raise KeyError(3)": None,
    "return tokens + np.random.default_rng().integers(0, 99, len(tokens))": (
        "line 11: letters: draws other tokens when it is asked again; draw them from draw.rng"
    ),
    "return v[:, :3]": "line 19: shrink_values: expected v [5, 32, 8, 16], got shape [5, 3, 8, 16]",
    "return None": "line 19: shrink_values: expected a tensor, got NoneType",
    "return v.mul_(factor)": "line 19: shrink_values: changes v; return a new tensor",
    "return v * v.mean(0)": "line 19: shrink_values: sink_mass: in a batch it is ",
    "return v / 0": "line 19: shrink_values: layer 0, head 0: head_result_norm is not finite for",
}


@pytest.mark.long
def test_an_intervention_and_an_input_family_are_tried_too(tmp_path: Path):
    file = tmp_path / "own.py"
    for body, message in BAD_CHANGES.items():
        good = "return tokens" if "tokens" in body or "raise" in body else "return factor * v"
        file.write_text(OWN_CHANGES.replace(good, body))
        plugins = read_plugins([file])
        if message is None:
            # A family may refuse the length; planning draws the sequences of the scan itself.
            prove(plugins, plugins, "fused")
            fields = {"model": "bundled:gpt2-mini", "n_ctx": 8, "sequences": 1}
            fields |= {"input": {"family": "letters"}, "plugins": plugins}
            said = refused(ScanError, resolve, parse_scan(fields))
            assert said in (
                f"{file}, line 16: letters: KeyError: 3",
                "input family letters: returned float64, expected token ids, which are integers",
            )
        else:
            assert f"{file}, {message}" in refused(ScanError, prove, plugins, plugins, "fused")


@pytest.mark.long
def test_a_plug_in_reaches_a_replica_of_another_process(folder: Path):
    Path("own.py").write_text(OWN_CHANGES)
    text = SCAN.replace('"my_heads.py"', '"my_heads.py", "own.py"').replace(
        "uniform_random", "letters"
    )
    text = text.replace("low = 40\nhigh = 50\n", "").replace(f'"{NAME}"', f'"{NAME}", "value_norm"')
    Path("scan.toml").write_text(f'interventions = ["none", "shrink_values(0.25)"]\n{text}')
    # In a process of its own, which takes its Ray with it.
    words = ("scan", "scan.toml", "--replicas", "1", "--cores", "1")
    done = Command(*words, environment=os.environ, directory=folder).ended(240)
    assert done.code == 0, done.output
    with headcount.open("runs") as runs:
        (untouched, shrunk) = runs.sql(
            "SELECT avg(value_norm) FROM heads WHERE layer = 0 GROUP BY intervention ORDER BY 1 "
            "DESC"
        ).rows()
    assert shrunk[0] == pytest.approx(untouched[0] / 4, rel=1e-6)


@pytest.mark.long
def test_a_statistic_that_fails_in_one_batch_names_its_line_and_the_other_shards_stay(
    folder: Path,
):
    # Only the first tokens of some sequences make it fail, and none of the small trial.
    bad = "if int(tokens[:, 3].max()) == 49 and tokens.shape[1] == 16:\n        {}\n    "
    text = SCAN.replace(NAME, "tried").replace("sequences_per_shard = 3", "sequences_per_shard = 1")
    Path("scan.toml").write_text(text.replace("sequences = 6", "sequences = 30"))
    for name, action, message in (
        ("raises", "raise KeyError(3)", "my_heads.py, line 15: KeyError: 3"),
        ("undefined", "return pattern.key(0).mean(-1) * torch.nan", "look at my_heads.py, line 8"),
    ):
        body = bad.format(action) + "return pattern.key(0).mean(-1)"
        Path("my_heads.py").write_text(statistic_file(body))
        out = f"out={name}"
        end = ended("scan", "scan.toml", "--replicas", "0", "--set", out)
        assert end.code == 2
        assert message in end.stderr
        with headcount.open(name) as runs:
            [(rows, missing)] = runs.sql(
                "SELECT (SELECT count(DISTINCT sequence) FROM heads), "
                "(SELECT count(*) FROM shards WHERE status <> 'done')"
            ).rows()
        assert rows + missing == 30
        assert 0 < missing < 15


@pytest.mark.long
def test_check_tries_a_file_and_says_what_it_defines(folder: Path):
    assert printed("check", "my_heads.py").splitlines()[-1] == (
        f"statistic {NAME}: Mean attention to the last delimiter up to the query, 0 before the "
        "first."
    )
    Path("my_heads.py").write_text(f"{HEADER}1 / 0\n")
    assert error_of("check", "my_heads.py") == (
        "my_heads.py, line 6: ZeroDivisionError: division by zero"
    )
    message = error_of("scan", "scan.toml", "--set", "plugins=[]", "--plugin", "my_heads.py")
    assert message == "scan.toml: my_heads.py, line 6: ZeroDivisionError: division by zero"
    assert not Path("runs").exists()


@statistic("this file")
def half_first_mass(pattern: Pattern) -> Probability:
    """Half of the mean attention to key 0.

    1/(2T) Σ_q A[q,0]
    """
    return pattern.key(0).mean(-1) / 2


@pytest.mark.long
def test_measure_takes_functions_and_files_and_a_scan_takes_files(folder: Path):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(
        headcount.bundled["gpt2-mini"], attn_implementation="eager"
    ).eval()
    tokens = torch.tensor([[7, 46, 3, 10, 5], [7, 3, 3, 46, 6]])
    names = ["half_first_mass", NAME, "sink_alpha"]
    plugins = [half_first_mass, "my_heads.py"]
    rows = headcount.measure(model, tokens, names, plugins=plugins).to_pydict()
    halves = np.array(rows["half_first_mass"])
    np.testing.assert_allclose(halves * 2, rows["sink_alpha"], rtol=1e-5)
    with torch.no_grad():
        patterns = model(tokens, output_attentions=True).attentions
    places = zip(rows["sequence"], rows["layer"], rows["head"], strict=True)
    expected = [
        by_hand(tokens[s].tolist(), patterns[layer][s, h].numpy()) for s, layer, h in places
    ]
    np.testing.assert_allclose(rows[NAME], expected, atol=1e-6)
    assert min(expected) > 0
    message = refused(ScanError, headcount.scan, "scan.toml", plugins=[half_first_mass], quiet=True)
    assert "expected a text, a number, a list or a dict, got function" in message
