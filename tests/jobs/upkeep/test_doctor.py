"""`headcount doctor` says what is wrong with a machine, and what to do about it."""

import subprocess
import sys
from typing import Any

import numpy as np

from headcount.jobs.commands import doctor
from headcount.jobs.commands.doctor import DRIFT, MEASURING, READING, check_library, examine
from headcount.schemas.packages import PACKAGE
from headcount.workers.loading import load_model
from headcount.workers.model.info.bundled_models import BUNDLED
from headcount.workers.model.info.description import describe, find_model
from tests import ROOT
from tests.toys import toy_models as toy

WITHOUT_TORCH = """
import sys
from importlib import metadata

real_version = metadata.version
metadata.version = lambda name: real_version("absent" if name == "torch" else name)
sys.modules["torch"] = None
sys.argv = ["headcount", "doctor"]
import headcount.command_line
headcount.command_line.main()
"""


def test_a_machine_that_runs_these_tests_is_healthy():
    checks = list(examine())
    assert [check for check in checks if not check.ok] == []
    names = [check.name for check in checks]
    assert names == [
        "python", "code", *READING, *MEASURING, "device", "memory", "disk",
        *["model"] * len(BUNDLED),
    ]  # fmt: skip
    assert checks[names.index("code")].result == f"from {PACKAGE}"


def test_a_missing_library_is_said_with_what_to_do():
    check = check_library("a_library_that_nobody_wrote")
    assert (check.ok, check.result) == (False, "not installed")
    assert "pip install -e '.[scan]'" in check.advice
    command = [sys.executable, "-c", WITHOUT_TORCH]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (1, "")
    lines = process.stdout.splitlines()
    place = lines.index("FAIL  torch            not installed")
    assert lines[place + 1].strip() == doctor.INSTALL
    assert not [line for line in lines if "model " in line], "nothing else can be looked at"


def test_engines_are_compared_on_every_standard_probability():
    path = find_model("bundled:gpt2-mini")
    fields = {"n_ctx": 32, "statistics": "standard"}
    fused = toy.replica(path, **fields, engine="fused")
    dense = toy.replica(path, load_model, **fields, engine="dense")
    tokens = (
        np.random.default_rng(0).integers(describe(path).d_vocab, size=(2, 32)).astype(np.int32)
    )
    assert doctor._largest_drift(fused, dense, tokens)[1] < DRIFT
    # A weight that differs in one engine only must show.
    bare: Any = dense.model.bare
    bare.transformer.h[2].attn.c_attn.weight.data[:, 0] += 0.5
    assert doctor._largest_drift(fused, dense, tokens)[1] > 100 * DRIFT
