"""What a user gets wrong is answered by the command line with lines that begin with `error:` and
exit code 2.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.tools.processes import Command
from tests.toys import toy_models as toy


def test_a_good_scan_is_planned(tmp_path: Path, model: Path):
    scan = tmp_path / "toy.toml"
    scan.write_text(
        f'model = "{model}"\nn_ctx = 8\nsequences = 2\ninput.family = "uniform_random"\n'
    )
    words = ("plan", scan, "--set", f"out={tmp_path}")
    run = Command(*words, environment=os.environ, directory=ROOT).ended()
    assert (run.code, run.stderr) == (0, "")
    assert "uniform_random" in run.stdout


def test_a_bad_scan_is_refused_by_the_real_command(tmp_path: Path):
    scan = tmp_path / "toy.toml"
    scan.write_text("n_ctx = 0\n")
    run = Command("plan", scan, environment=os.environ, directory=ROOT).ended()
    assert (run.code, run.stdout) == (2, "")
    assert run.stderr.splitlines() == [
        f"error: {scan}: model: missing; expected a Hub id, a local directory, or bundled:NAME",
        f"error: {scan}: n_ctx: expected 1 or more, got 0",
        f"error: {scan}: input: missing; expected where sequences come from: a family and its "
        "options",
        f"error: {scan}: sequences: missing; expected how many sequences; all means as many as the "
        "corpus holds",
    ]


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"n_ctx": "8"}, ["TMP/toy.toml: n_ctx: expected an integer, got '8'"]),
        (
            {"sequences": "al"},
            ["TMP/toy.toml: sequences: expected an integer or 'all', got 'al'"],
        ),
        (
            {"n_ctx": 0, "seed": -1},
            [
                "TMP/toy.toml: n_ctx: expected 1 or more, got 0",
                "TMP/toy.toml: seed: expected 0 or more, got -1",
            ],
        ),
        ({"n_ctx": 65}, ["n_ctx: 65 is beyond the 64 positions of bytes"]),
        (
            {"n_ctx": 1},
            ["n_ctx: 1 leaves no room for a token beside the beginning-of-sequence token"],
        ),
        (
            {"sequences": "all"},
            ["sequences: expected a number, got 'all'; the family uniform_random has no end"],
        ),
        ({"model": "/no/such/model"}, ["model '/no/such/model': no such directory"]),
        (
            {"input": {"family": "repeated_random", "period": 8}},
            ["input.period: expected 1 to 7, the tokens in a sequence, got 8"],
        ),
        (
            {"input": {"family": "uniform_random", "high": 0}},
            ["input.high: expected 1 or more, got 0"],
        ),
        (
            {"input": {"family": "uniform_random", "lo": 0}},
            [
                "input.lo: unknown option of uniform_random 'lo': did you mean 'low'? Known: "
                "distinct, high, low"
            ],
        ),
        (
            {"input": {"family": "text", "files": []}},
            ["input.files: expected at least one path or glob, got []"],
        ),
        (
            {"input": {"family": "text", "files": "/no/such/*.txt"}},
            [f"input.files: no file matches '/no/such/*.txt' (in {ROOT})"],
        ),
    ],
)
def test_a_wrong_scan_is_explained(
    plan_error: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    lines: list[str],
):
    monkeypatch.chdir(ROOT)
    assert plan_error(**changes) == lines


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"n_ctxt": 8}, "TMP/toy.toml: unknown key 'n_ctxt': did you mean 'n_ctx'? Known: "),
        (
            {"statistics": ["sink_mas"]},
            "TMP/toy.toml: statistics: unknown statistic 'sink_mas': did you mean 'sink_mass'?",
        ),
        (
            {"interventions": ["non"]},
            "interventions: unknown intervention 'non': did you mean 'none'? Known: ",
        ),
        (
            {"model": "bundled:gpt2-mimi"},
            "model: unknown bundled model 'gpt2-mimi': did you mean 'gpt2-mini'?",
        ),
        (
            {"model": "nobody/nothing"},
            "model 'nobody/nothing': neither a directory, nor bundled:NAME, nor to be had from",
        ),
        (
            {"input": {"family": "uniform_randon"}},
            "input.family: unknown input family 'uniform_randon': did you mean 'uniform_random'?",
        ),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(
    plan_error: Callable[..., list[str]], changes: dict[str, Any], start: str
):
    (line,) = plan_error(**changes)
    assert line.startswith(start)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("n_ctx", "--set n_ctx: expected key=value, for instance --set n_ctx=128"),
        ("n_ctx.x=1", "--set n_ctx.x=1: n_ctx is a value, not a table"),
        ("bos=False", "TMP/toy.toml: bos: expected true or false, got 'False'"),
    ],
)
def test_a_wrong_override_is_explained(
    plan_error: Callable[..., list[str]], override: str, line: str
):
    assert plan_error(override) == [line]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl.zst", b"no zstd", "cannot be read ("),
        ("a.parquet", b"no parquet", "cannot be read ("),
        ("a.csv", b"text\nhello", "expected a file that ends in .jsonl, .json, .parquet"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named(
    plan_error: Callable[..., list[str]], tmp_path: Path, name: str, content: bytes, problem: str
):
    (tmp_path / name).write_bytes(content)
    (line,) = plan_error(sequences="all", input={"family": "pile", "files": str(tmp_path / name)})
    assert line.startswith(f"TMP/{name}: {problem}")


def test_a_corpus_that_is_too_small_says_what_it_holds(
    plan_error: Callable[..., list[str]], tmp_path: Path
):
    (tmp_path / "a.txt").write_text("To be, or not to be")
    files = str(tmp_path / "a.txt")
    assert plan_error(
        sequences=3, input={"family": "text", "files": files, "packing": "concat"}
    ) == [
        "input: the corpus holds 2 sequences of 7 tokens of text (concat packing), 3 wanted, of "
        "1 document: 1 used; lower n_ctx or sequences"
    ]


def test_too_many_bad_rows_are_named(plan_error: Callable[..., list[str]], tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "To be, or not"}\n{"text": null}\n')
    assert plan_error(
        sequences="all", input={"family": "pile", "files": str(tmp_path / "a.jsonl")}
    ) == [
        "input: 1 of 2 documents are bad, more than bad_rows = 0.01: TMP/a.jsonl, line 2 (text is "
        "null, expected a string); mend or remove them, or leave them out: --set bad_rows=0.5"
    ]


@pytest.mark.parametrize(
    ("edit", "start"),
    [
        (
            lambda p: (p / "config.json").unlink(),
            "TMP/m: no readable config.json; expected a model directory",
        ),
        (lambda p: (p / "config.json").write_text("{"), "TMP/m/config.json: not valid JSON ("),
        (
            lambda p: toy.change_config(p, model_type="gpt9"),
            "TMP/m/config.json: not a causal language model",
        ),
        (
            lambda p: toy.change_config(p, n_layer=2),
            "TMP/m: weights missing or of another shape: transformer.h.1.",
        ),
        (
            lambda p: toy.change_config(p, bos_token_id=None),
            "m names no beginning-of-sequence token; set bos = false",
        ),
        (
            lambda p: (p / "model.safetensors").unlink(),
            "TMP/m: expected weights as *.safetensors, found config.json, ",
        ),
        (
            lambda p: (p / "model.safetensors").write_bytes(b"x"),
            "TMP/m: the weights cannot be loaded (",
        ),
    ],
)
def test_a_broken_model_is_named(
    plan_error: Callable[..., list[str]],
    tmp_path: Path,
    model: Path,
    edit: Callable[[Path], object],
    start: str,
):
    (line,) = plan_error(model=str(toy.copy_of(model, tmp_path / "m", edit)))
    assert line.startswith(start)


def test_text_without_a_tokenizer_is_refused(
    plan_error: Callable[..., list[str]], tmp_path: Path, model: Path
):
    path = toy.copy_of(model, tmp_path / "m", lambda p: (p / "tokenizer.json").unlink())
    (tmp_path / "a.txt").write_text("To be, or not to be")
    assert plan_error(
        model=str(path), input={"family": "text", "files": str(tmp_path / "a.txt")}
    ) == [
        "TMP/m: no tokenizer files; text needs one (tokenizer.json, or vocab.json and merges.txt)"
    ]


def test_a_weight_that_is_nan_is_named(
    plan_error: Callable[..., list[str]], tmp_path: Path, model: Path
):
    def spoil(path: Path) -> None:
        toy.change_weights(
            path, lambda w: w["transformer.h.0.attn.c_attn.weight"].fill_(float("nan"))
        )

    (line,) = plan_error(model=str(toy.copy_of(model, tmp_path / "m", spoil)), engine="dense")
    assert line.startswith(
        "layer 0, head 0: sink_mass is not finite for sequence 0 of the shard; expected a finite "
        "number"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read (No such file or directory); expected a TOML scan file"),
        (b"n_ctx = ", "not valid TOML: Invalid value (at end of document)"),
        (
            b"\xff",
            "not valid TOML: 'utf-8' codec can't decode byte 0xff in position 0: invalid start "
            "byte",
        ),
    ],
)
@pytest.mark.parametrize("name", ["plan", "scan"])
def test_a_file_that_is_not_a_scan_is_refused(
    command: Callable[..., tuple[int, list[str]]],
    tmp_path: Path,
    name: str,
    content: bytes | None,
    problem: str,
):
    path = tmp_path / "toy.toml"
    if content is not None:
        path.write_bytes(content)
    assert command(name, path) == (2, [f"error: {path}: {problem}"])


def test_a_wrong_scan_is_refused_before_any_other_runs_and_without_torch(tmp_path: Path):
    good = (
        'model = "bundled:gpt2-mini"\nn_ctx = 8\nsequences = 2\n'
        '[input]\nfamily = "uniform_random"\n'
    )
    (tmp_path / "good.toml").write_text(good)
    (tmp_path / "wrong.toml").write_text(good.replace("n_ctx = 8", "n_ctx = 0"))
    code = (
        "import sys, headcount.command_line\n"
        "for command in ('plan wrong.toml', 'scan good.toml wrong.toml'):\n"
        "    sys.argv = ['headcount', *command.split()]\n"
        "    try:\n        headcount.command_line.main()\n"
        "    except SystemExit as left:\n        print(left.code)\n"
        "print({'torch', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == "error: wrong.toml: n_ctx: expected 1 or more, got 0\n" * 2
    assert done.stdout == "2\n2\nset()\n"
    assert not (tmp_path / "runs").exists()


def test_a_missing_run_cannot_be_continued(
    command: Callable[..., tuple[int, list[str]]], tmp_path: Path, model: Path
):
    path = tmp_path / "toy.toml"
    path.write_text(
        f'model = "{model}"\nn_ctx = 8\nsequences = 2\nout = "{tmp_path}"\ninput.family = '
        '"uniform_random"\n'
    )
    expected = (
        f"error: {tmp_path}/run_id=absent: no such run to continue; headcount scan {path} starts "
        "one"
    )
    assert command("scan", path, "--run", "absent") == (2, [expected])


def test_of_several_scans_the_one_that_is_wrong_is_named(
    command: Callable[..., tuple[int, list[str]]], tmp_path: Path, model: Path
):
    for name, n_ctx in (("long", 65), ("short", 8)):
        text = (
            f'model = "{model}"\nn_ctx = {n_ctx}\nsequences = 2\ninput.family = "uniform_random"\n'
        )
        (tmp_path / f"{name}.toml").write_text(text)
    long, short = tmp_path / "long.toml", tmp_path / "short.toml"
    problem = "n_ctx: 65 is beyond the 64 positions of bytes"
    assert command("scan", long, short, "--replicas", "0") == (2, [f"error: {long}: {problem}"])
    assert command("scan", long, "--replicas", "0") == (2, [f"error: {problem}"])


@pytest.mark.parametrize(
    "arguments",
    [["plan"], ["scan", "--replicas", "-1", "x.toml"], ["scam"], ["plan", "x.toml", "--bogus"]],
)
def test_a_wrong_command_line_has_exit_code_2(
    command: Callable[..., tuple[int, list[str]]], arguments: list[str]
):
    code, lines = command(*arguments)
    assert code == 2
    assert any("Error: " in line for line in lines)
