"""First contact with a GPU: a kernel that does not compile or does not agree measures nothing.

Kernels are functions here; `test_kernel.py` has the real one, in Triton's interpreter.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headcount.jobs.commands.doctor import compared_layers
from headcount.workers.engine.tile_sweep import Sweep, Swept
from headcount.workers.engine.token_pairs import TokenPairs
from headcount.workers.kernel import sweep_kernel
from headcount.workers.kernel.kernel_check import (
    ALLOWED,
    D_HEADS,
    DRAWN_FACTS,
    EVERY_FACT,
    SINK,
    SLOPES,
    SOFT_CAP,
    WINDOW,
    FactNames,
    Shape,
    compare,
    every_layer,
    in_words,
    layers_of,
    proven_sweep,
)
from headcount.workers.model.attention_facts import AttentionFacts
from tests.reference.attention_answers import defined_answers
from tests.tools.pairwise import sampled
from tests.toys import toy_models as toy
from tests.toys.commands import ended

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 37, 24)


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: AttentionFacts,
    labels: Sequence[TokenPairs],
    *,
    entropy: bool,
    number_format: str,
) -> Swept:
    """What a kernel should answer, from the whole matrix."""
    defined = defined_answers(q, k, v, facts, labels)
    z, lse, distance, every_entropy, *masses = (answer.float() for answer in defined.values())
    return Swept(z, lse, distance, every_entropy if entropy else None, tuple(masses))


def kernel_with(**changes: Callable[[Swept], Any]) -> Sweep:
    """A kernel some of whose answers are others."""

    def sweep(*arguments: Any, **options: Any) -> Swept:
        swept = by_definition(*arguments, **options)
        return Swept(**vars(swept) | {name: change(swept) for name, change in changes.items()})

    return sweep


def failing_kernel(*_: Any, **__: Any) -> Swept:
    raise RuntimeError("ptxas: out of registers\nand much more")


def with_other_facts(**changes: Callable[[Any], Any]) -> Sweep:
    """A kernel that takes some facts for others, where a layer has them."""

    def sweep(
        q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts, *arguments: Any, **options: Any
    ) -> Swept:
        wrong = {
            name: change(getattr(facts, name))
            for name, change in changes.items()
            if getattr(facts, name) is not None
        }
        return by_definition(q, k, v, replace(facts, **wrong), *arguments, **options)

    return sweep


def with_other_groups(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Swept:
    """A kernel whose query head h reads kv head h % kv_heads."""
    groups = q.shape[1] // k.shape[1]
    return by_definition(
        q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), *arguments, **options
    )


WRONG_ANSWERS = {
    "z": kernel_with(z=lambda s: s.z * 1.01),
    "lse": kernel_with(lse=lambda s: s.lse + 0.5),
    "distance": kernel_with(distance=lambda s: s.distance * math.nan),
    "entropy": kernel_with(entropy=lambda s: None if s.entropy is None else s.entropy + 0.25),
    "masses": kernel_with(masses=lambda s: tuple(m + 0.125 for m in s.masses)),
    "shared keys": with_other_groups,
}
WRONG_FACTS = {
    "a soft cap": with_other_facts(soft_cap=lambda cap: 1.1 * cap),
    "a window": with_other_facts(window=lambda window: window + 1),
    "a shorter window": with_other_facts(window=lambda window: window - 1),
    "ALiBi slopes": with_other_facts(slopes=lambda slopes: slopes.flip(0)),
    "a learned sink": with_other_facts(sink=lambda _: None),
}


@pytest.mark.parametrize(
    ("shape", "factors"),
    sampled(list(product((Shape(6, 2, 37, 24, d_v=40), Shape(2, 1, 257, 16)), ALLOWED)), enumerate),
)
def test_every_fact_is_drawn_and_seen_if_it_is_wrong(shape: Shape, factors: str) -> None:
    for facts in DRAWN_FACTS:
        right = compare(by_definition, shape, factors, CPU, facts)
        assert right.agrees
        assert right.difference < 1e-6 < right.allowed
        for wrong, sweep in WRONG_FACTS.items():
            if wrong.replace("shorter ", "") in facts:
                comparison = compare(sweep, shape, factors, CPU, facts)
                assert not comparison.agrees, (comparison, wrong)


def test_a_kernel_that_is_wrong_fails_or_leaves_answers_out_is_seen() -> None:
    for wrong, sweep in WRONG_ANSWERS.items():
        comparison = compare(sweep, SHAPE, "float32", CPU)
        assert (comparison.agrees, comparison.error) == (False, ""), wrong
    comparison = compare(failing_kernel, SHAPE, "float32", CPU)
    assert (comparison.agrees, comparison.error) == (False, "RuntimeError: ptxas: out of registers")
    missing = compare(kernel_with(masses=lambda s: s.masses[1:]), SHAPE, "float32", CPU)
    assert missing.error.startswith("ValueError: zip()")


def have_kernel(patch: pytest.MonkeyPatch, sweep: Sweep) -> None:
    """Let this machine take itself for one with a GPU whose kernel is `sweep`."""
    patch.setattr(sweep_kernel, "available", lambda _: True)
    patch.setattr(sweep_kernel, "sweep", sweep)


@pytest.mark.parametrize(("name", "heads", "facts"), [
    ("gpt2", "4", [""]),
    # A window that no query of this length reaches hides nothing.
    ("mistral-window-20", "4/2", [""]),
    ("gemma2-low-caps", "4/2", ["", ", a soft cap", ", a window", ", a soft cap, a window"]),
    ("gpt-oss", "4/2", ["", ", a learned sink", ", a window", ", a window, a learned sink"]),
])  # fmt: skip
def test_the_kernel_is_tried_with_the_layers_that_a_model_has(
    shelf: toy.Shelf, name: str, heads: str, facts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shelf.replica(name, n_ctx=20).model
    layers = [in_words(*layer) for layer in layers_of(model, 20)]
    assert layers == [f"heads {heads}, n_ctx 20, d_head 8{words}" for words in facts]
    launches: list[int] = []

    def counting(*arguments: Any, **options: Any) -> Swept:
        launches.append(1)
        return by_definition(*arguments, **options)

    have_kernel(monkeypatch, counting)
    assert proven_sweep(model, 20, "float32", "cpu") is counting
    # Without facts it is asked every question and none.
    assert len(launches) == 1 + len(layers)


TOKENS = toy.repeating_tokens(21, batch=2)


def measured_with(
    shelf: toy.Shelf, sweep: Sweep, **changes: Any
) -> tuple[str, dict[str, np.ndarray]]:
    """What a replica on a CPU measures that takes itself for a GPU with a kernel."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        have_kernel(monkeypatch, sweep)
        measured = toy.replica(shelf.path("llama-gqa"), **changes).measure(TOKENS)
    return measured.method.attention, measured.heads


@pytest.fixture
def warnings_said() -> Iterator[list[str]]:
    """The lines that the product's own modules log."""
    handler = logging.Handler(logging.WARNING)
    lines: list[str] = []
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("headcount")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_a_replica_uses_a_kernel_that_agrees(shelf: toy.Shelf, warnings_said: list[str]) -> None:
    attention, heads = measured_with(shelf, by_definition)
    assert (attention, warnings_said) == ("kernel", [])
    plain = shelf.replica("llama-gqa", "dense").measure(TOKENS)
    assert plain.method.attention == "matrix"
    for name in toy.FORWARD_STATISTICS:
        np.testing.assert_allclose(heads[name], plain.heads[name], rtol=1e-5, atol=1e-5)
    assert measured_with(shelf, by_definition, precision="float64")[0] == "tiles"


@pytest.mark.parametrize(
    ("sweep", "problem"),
    [
        (failing_kernel, "does not compile or run (RuntimeError: ptxas: out of registers); tiles"),
        (kernel_with(z=lambda s: s.z * 1.5), "differs from the tiles by 0."),
    ],
    ids=["uncompiled", "wrong"],
)
def test_a_replica_falls_back_to_tiles_and_says_so_once(
    shelf: toy.Shelf, warnings_said: list[str], sweep: Sweep, problem: str
) -> None:
    attention, heads = measured_with(shelf, sweep)
    assert attention == "tiles"
    (line,) = warnings_said
    assert line.startswith(
        f"the GPU kernel is not used: with heads 4/2, n_ctx 40, d_head 8 in float32 it {problem}"
    )
    plain = shelf.replica("llama-gqa").measure(TOKENS)
    for name in toy.FORWARD_STATISTICS:
        np.testing.assert_array_equal(heads[name], plain.heads[name])


def test_the_doctor_compares_every_shape_in_every_format() -> None:
    shapes = {shape for shape, _ in every_layer()}
    assert {facts for _, facts in every_layer()} == set(DRAWN_FACTS)
    assert set(EVERY_FACT) == {SOFT_CAP, WINDOW, SLOPES, SINK}
    assert {shape.d_head for shape in shapes} == set(D_HEADS)
    assert {shape.heads // shape.kv_heads for shape in shapes} == {1, 2, 3, 4}
    assert {shape.d_v for shape in shapes} > {None}
    assert {shape.n_ctx for shape in shapes} == {1, 37, 257, 1024}
    good, bad = (
        list(compared_layers(s, [(SHAPE, FactNames({SINK}))], "cpu"))
        for s in (by_definition, failing_kernel)
    )
    assert [(c.name, c.ok) for c in good] == [
        (factors, True) for factors in ("float32", "tf32", "float16", "bfloat16")
    ]
    assert good[0].result.startswith("heads 4/2, n_ctx 37, d_head 24, a learned sink: differs by ")
    assert good[0].result.endswith(" (allowed 2.0e-05)")
    assert not bad[0].ok
    assert ": RuntimeError: ptxas: out of registers (allowed" in bad[0].result


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_doctor_says_in_one_line_that_there_is_no_gpu() -> None:
    answer = ended("doctor", "--device", "cuda")
    assert answer.code == 1
    line = "FAIL  kernel           no CUDA device is here, so there is no kernel to compare\n"
    assert answer.output == line
