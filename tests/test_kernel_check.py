"""First contact with a GPU: a kernel that does not compile or does not agree measures nothing.

Kernels are functions here; `test_kernel.py` has the real one, in Triton's interpreter.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from headcount import app
from jobs.kernel_table import COMPARISON_HEAD, compare_kernel, comparison_line
from schemas.statistics import STATISTICS
from tests import toy_models as toy
from workers.engine import sweep_kernel
from workers.engine.kernel_check import ALLOWED, D_HEADS, Shape, compare, every_shape, proven_sweep
from workers.engine.sweep_kernel import PairLabels, Sweep, Swept
from workers.model.attention_facts import AttentionFacts
from workers.model.model_info import ModelInfo

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 37, 24)


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: AttentionFacts,
    labels: Sequence[PairLabels],
    *,
    entropy: bool,
    number_format: str,
) -> Swept:
    """What a kernel should answer, from the whole matrix."""
    groups, n_ctx = q.shape[1] // k.shape[1], q.shape[2]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    position = torch.arange(n_ctx)
    behind = position[:, None] - position
    logits = torch.where(behind >= 0, facts.scale * q @ k.mT, -torch.inf)
    pattern = logits.softmax(-1)
    masses = [
        pattern * ((query[:, :, None] == key[:, None]) & (behind >= lag))[:, None]
        for query, key, lag in labels
    ]
    return Swept(
        (pattern @ v).float(),
        logits.logsumexp(-1).float(),
        (pattern * behind).sum(-1).float(),
        -torch.xlogy(pattern, pattern).sum(-1).float() if entropy else None,
        tuple(mass.sum(-1).float() for mass in masses),
    )


def kernel_with(**changes: Callable[[Swept], Any]) -> Sweep:
    """A kernel some of whose answers are others."""

    def sweep(*arguments: Any, **options: Any) -> Swept:
        swept = by_definition(*arguments, **options)
        return Swept(**vars(swept) | {name: change(swept) for name, change in changes.items()})

    return sweep


def failing_kernel(*_: Any, **__: Any) -> Swept:
    raise RuntimeError("ptxas: out of registers\nand much more")


@pytest.mark.parametrize("factors", ALLOWED)
def test_a_kernel_that_answers_the_definitions_agrees(factors: str) -> None:
    for shape in (SHAPE, Shape(1, 1, 1, 8), Shape(4, 4, 130, 64)):
        comparison = compare(by_definition, shape, factors, CPU)
        assert comparison.agrees, comparison
        assert comparison.difference < 1e-6 < comparison.allowed


@pytest.mark.parametrize(
    ("sweep", "difference"),
    [
        (kernel_with(z=lambda s: s.z * 1.01), 0.01),
        (kernel_with(lse=lambda s: s.lse + 0.5), 0.5),
        (kernel_with(distance=lambda s: s.distance * math.nan), math.inf),
        (kernel_with(entropy=lambda s: None if s.entropy is None else s.entropy + 0.25), 0.25),
        (kernel_with(masses=lambda s: tuple(m + 0.125 for m in s.masses)), 0.125),
    ],
    ids=["z", "lse", "distance", "entropy", "masses"],
)
def test_any_answer_that_differs_is_seen(sweep: Sweep, difference: float) -> None:
    comparison = compare(sweep, SHAPE, "float32", CPU)
    assert not comparison.agrees
    assert comparison.error == ""
    assert comparison.difference == pytest.approx(difference, rel=0.7)


def test_a_kernel_that_does_not_compile_or_leaves_answers_out_is_seen() -> None:
    comparison = compare(failing_kernel, SHAPE, "float32", CPU)
    assert (comparison.agrees, comparison.error) == (False, "RuntimeError: ptxas: out of registers")
    missing = compare(kernel_with(masses=lambda s: s.masses[1:]), SHAPE, "float32", CPU)
    assert missing.error.startswith("ValueError: zip()")


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        ({}, {8}),
        ({"num_key_value_heads": None}, {8}),
        ({"num_key_value_heads": 2}, {2}),
        ({"text_config": {"num_key_value_heads": 4, "num_global_key_value_heads": 1}}, {1, 4}),
        ({"multi_query": True}, {1}),
        # A part that sees images has heads of its own.
        ({"num_key_value_heads": 2, "vision_config": {"num_key_value_heads": 3}}, {2}),
    ],
    ids=str,
)
def test_the_kernel_is_tried_with_the_keys_that_a_model_has(
    config: dict[str, Any], kv_heads: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape: dict[str, Any] = {
        "n_layers": 1,
        "n_heads": 8,
        "d_model": 64,
        "d_head": 8,
        "n_ctx": 20,
        "d_vocab": 9,
    }
    info = ModelInfo(
        path=str(tmp_path), name="", layout="huggingface", sha256="", bos_token_id=None,
        eos_token_id=None, **shape,
    )  # fmt: skip
    tried: set[int] = set()

    def noting(q: Tensor, k: Tensor, *arguments: Any, **options: Any) -> Swept:
        tried.add(k.shape[1])
        return by_definition(q, k, *arguments, **options)

    monkeypatch.setattr(sweep_kernel, "available", lambda _: True)
    monkeypatch.setattr(sweep_kernel, "sweep", noting)
    assert proven_sweep(info, 20, "float32", "cpu") is noting
    assert tried == kv_heads


class ReplicaHere:
    """A replica on a CPU that takes itself for a GPU with some kernel."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.monkeypatch = path, monkeypatch

    def measure(self, sweep: Sweep, **changes: Any) -> tuple[str, dict[str, np.ndarray]]:
        self.monkeypatch.setattr(sweep_kernel, "available", lambda _: True)
        self.monkeypatch.setattr(sweep_kernel, "sweep", sweep)
        measured = toy.replica(self.path, **changes).measure(toy.repeating_tokens(21, batch=2))
        return measured.method.attention, measured.heads


@pytest.fixture
def replica_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReplicaHere:
    path = toy.save_model(tmp_path / "llama", toy.family("LlamaConfig", num_key_value_heads=2))
    return ReplicaHere(path, monkeypatch)


def test_a_replica_uses_a_kernel_that_agrees(
    replica_here: ReplicaHere, caplog: pytest.LogCaptureFixture
) -> None:
    attention, heads = replica_here.measure(by_definition)
    assert (attention, caplog.messages) == ("kernel", [])
    plain = toy.measure(replica_here.path, toy.repeating_tokens(21, batch=2), engine="dense")
    assert plain.method.attention == "matrix"
    for name in STATISTICS:
        np.testing.assert_allclose(heads[name], plain.heads[name], rtol=1e-5, atol=1e-5)
    assert replica_here.measure(by_definition, precision="float64")[0] == "tiles"


@pytest.mark.parametrize(
    ("sweep", "problem"),
    [
        (failing_kernel, "does not compile or run (RuntimeError: ptxas: out of registers); tiles"),
        (kernel_with(z=lambda s: s.z * 1.5), "differs from the tiles by 0."),
    ],
    ids=["uncompiled", "wrong"],
)
def test_a_replica_falls_back_to_tiles_and_says_so_once(
    replica_here: ReplicaHere, caplog: pytest.LogCaptureFixture, sweep: Sweep, problem: str
) -> None:
    with caplog.at_level(logging.WARNING):
        attention, heads = replica_here.measure(sweep)
    assert attention == "tiles"
    (line,) = caplog.messages
    assert line.startswith(
        f"the GPU kernel is not used: with heads 4/2, n_ctx 40, d_head 8 in float32 it {problem}"
    )
    replica_here.monkeypatch.undo()
    plain = toy.measure(replica_here.path, toy.repeating_tokens(21, batch=2))
    for name in STATISTICS:
        np.testing.assert_array_equal(heads[name], plain.heads[name])


def test_the_doctor_compares_every_shape_in_every_format() -> None:
    shapes = every_shape()
    assert {shape.d_head for shape in shapes} == set(D_HEADS)
    assert {shape.heads // shape.kv_heads for shape in shapes} == {1, 2, 4}
    assert {shape.n_ctx for shape in shapes} == {1, 37, 257, 1024}
    good, bad = (list(compare_kernel("cpu", s, [SHAPE])) for s in (by_definition, failing_kernel))
    assert [c.factors for c in good] == ["float32", "tf32", "float16", "bfloat16"]
    assert COMPARISON_HEAD.split() == [
        "shape", "precision", "compiled", "difference", "allowed", "verdict",
    ]  # fmt: skip
    line = comparison_line(good[0])
    assert line.startswith("heads 4/2, n_ctx 37, d_head 24")
    assert line.split()[6:8] == ["float32", "yes"]
    assert line.endswith("2.0e-05  ok")
    assert comparison_line(bad[0]).endswith("FAIL RuntimeError: ptxas: out of registers")
    assert comparison_line(bad[0]).split()[6:8] == ["float32", "no"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_doctor_says_in_one_line_that_there_is_no_gpu() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--device", "cuda"])
    assert answer.exit_code == 1
    assert answer.output == "no CUDA device is here, so there is no kernel to compare\n"
