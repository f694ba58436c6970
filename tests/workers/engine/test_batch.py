"""How many sequences go through the model at once: found by measuring, halved where memory ends."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headcount.schemas.errors import ModelError
from headcount.workers.engine.engine import PassRequest
from headcount.workers.measurements.batch import PendingBatch, collect
from headcount.workers.measurements.results import Measurements
from headcount.workers.replica import FIRST_TOKENS, MOST_TOKENS, TRIALS, BatchSize
from tests.tools.processes import Command
from tests.toys import toy_models as toy


def sizes_of(batch: BatchSize, seconds_of: dict[int, float], passes: int = 40) -> list[int]:
    """The sizes that are used one after another, where a pass of each size takes so long."""
    sizes: list[int] = []
    for _ in range(passes):
        sizes.append(batch.size)
        batch.note(batch.size, seconds_of.get(batch.size, 0.01 * batch.size))
    return list(dict.fromkeys(sizes))


def test_sizes_double_while_that_is_faster_and_the_best_stays() -> None:
    first = FIRST_TOKENS["cpu"] // 128
    # Per sequence: 10, 8, 7.9 ms; the last gain is below 5 %.
    batch = BatchSize("auto", "cpu", 128)
    times = {first: 10.0 * first, 2 * first: 8.0 * 2 * first, 4 * first: 7.9 * 4 * first}
    assert sizes_of(batch, times) == [first, 2 * first, 4 * first]
    assert (batch.size, batch.searching) == (2 * first, False)
    # No batch is larger than the device should hold.
    batch = BatchSize("auto", "cpu", 1024)
    speedier = {size: size**0.5 for size in range(1, 200)}
    assert max(sizes_of(batch, speedier)) == batch.size == MOST_TOKENS["cpu"] // 1024
    assert not batch.searching
    assert BatchSize("auto", "cuda", 2 * MOST_TOKENS["cuda"]).size == 1
    # A size that was asked for stays, and halving is for good.
    asked, halved = BatchSize(6, "cpu", 128), BatchSize("auto", "cpu", 128)
    halved.halve()
    for batch, size in ((asked, 6), (halved, first // 2)):
        assert (batch.size, batch.searching) == (size, False)
        assert sizes_of(batch, {6: 1.0}) == [size]


def test_a_slow_first_try_and_a_batch_that_is_not_full_do_not_decide() -> None:
    batch = BatchSize("auto", "cpu", 128)
    first = batch.size
    for _ in range(10):
        batch.note(first - 1, 1e-9)
    assert (batch.size, batch.searching) == (first, True)
    for size in (first, 2 * first):
        for seconds in [9.0] + [1.0] * (TRIALS - 1):
            batch.note(size, seconds)
    assert batch.size == 4 * first


def with_memory_for(most: int, path: Path, **fields: Any) -> toy.TextReplica:
    """A replica in which an allocation fails, as on a CPU, where a pass takes more sequences."""

    def fail_beyond(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        if len(args[0]) > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    replica = toy.replica(path, toy.load_model, **fields)
    replica.model.blocks[0].register_forward_pre_hook(fail_beyond)
    return replica


@pytest.mark.parametrize(("size", "most"), [(3, 7), (7, 3), ("auto", 2)])
def test_rows_do_not_depend_on_the_batches_or_on_where_memory_ends(
    shelf: toy.Shelf, size: int | str, most: int
) -> None:
    path, tokens = shelf.path("gpt2"), toy.repeating_tokens(20, batch=7)
    in_one_batch = shelf.replica("gpt2", batch_size=7, profiles=toy.FORWARD_PROFILES).measure(
        tokens
    )
    replica = with_memory_for(most, path, batch_size=size, profiles=toy.FORWARD_PROFILES)
    in_batches = replica.measure(tokens)
    assert most == 7 or replica.batch.size <= most
    for name in toy.FORWARD_STATISTICS:
        np.testing.assert_allclose(
            in_batches.heads[name], in_one_batch.heads[name], rtol=1e-5, atol=1e-6, err_msg=name
        )
    for name, values in in_one_batch.sequences.items():
        np.testing.assert_allclose(in_batches.sequences[name], values, rtol=1e-6, err_msg=name)
    for name, (count, mean, m2) in in_one_batch.tables["profiles"].items():
        moments = in_batches.tables["profiles"][name]
        np.testing.assert_array_equal(moments[0], count)
        np.testing.assert_allclose(moments[1], mean, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(moments[2], m2, rtol=1e-3, atol=1e-5, err_msg=name)


def test_what_nobody_reads_later_is_forgotten_after_the_attention(shelf: toy.Shelf) -> None:
    replica = shelf.replica("gpt2")
    tokens = torch.from_numpy(toy.repeating_tokens(12)).long()
    shown: list[set[str]] = []
    with torch.inference_mode():
        replica.engine.run(
            PassRequest(
                tokens=tokens,
                on_layer=lambda _, activations: shown.append(set(activations)),
                read_late={"resid_post", "q"},
            )
        )
    assert shown == [{"resid_pre", "pattern", "q", "k", "v", "z"}, {"q", "resid_post"}] * 3


@pytest.mark.parametrize(
    ("statistics", "products"), [("all", 3 * 4), (["sink_mass", "value_norm"], 2 * 4 + 1)]
)
def test_after_the_last_attention_nothing_is_computed_that_nobody_reads(
    shelf: toy.Shelf, statistics: Any, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = toy.replica(shelf.path("gpt2"), statistics=statistics)
    whole_replica = shelf.replica("gpt2")
    calls: list[int] = []

    def counting(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(1)
        return torch.nn.functional.linear(x, weight, bias)

    toy.multiply_with(monkeypatch, counting)
    tokens = toy.repeating_tokens(12)
    measured = replica.measure(tokens)
    assert len(calls) == products
    whole = whole_replica.measure(tokens)
    for name, values in measured.heads.items():
        np.testing.assert_array_equal(values, whole.heads[name])


@pytest.mark.parametrize("after_layers", [0, 1])
def test_the_batch_before_is_collected_before_fewer_sequences_are_tried(
    shelf: toy.Shelf, after_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"profiles": ["value_norm_by_key"], "predictions": ["loss"]}
    tokens = toy.repeating_tokens(20, batch=10)
    four, two = (
        toy.replica(shelf.path("gpt2"), toy.load_model, batch_size=size, **fields)
        for size in (4, 2)
    )
    whole_batch, in_pairs = four.measure(tokens[:4]), two.measure(tokens[4:])
    # Within the second pass, after none or one of its layers, memory has run out.
    sizes: list[int] = []

    def run_out(_module: object, args: tuple[torch.Tensor, ...]) -> None:
        sizes.append(len(args[0]))
        if sizes == [4, 4]:
            events.append("no memory")
            raise torch.OutOfMemoryError("CUDA out of memory")

    events: list[str] = []
    four.model.blocks[after_layers].register_forward_pre_hook(run_out)

    def collect_noted(pending: PendingBatch) -> Measurements:
        events.append("collected")
        return collect(pending)

    monkeypatch.setattr("headcount.workers.replica.collect", collect_noted)

    class NotedSize(BatchSize):
        def halve(self) -> None:
            events.append("halved")
            super().halve()

    four.batch = NotedSize(4, "cpu", 20)
    measured = four.measure(tokens)
    assert sizes == [4, 4, 2, 2, 2]
    assert events == ["no memory", "collected", "halved", *["collected"] * 3]
    expected = Measurements.of_batches([whole_batch, in_pairs])
    for table, columns in expected.tables.items():
        for name, values in columns.items():
            if table != "profiles":  # In the order of the batches, moments round in another way.
                np.testing.assert_array_equal(measured.tables[table][name], values, err_msg=name)
    np.testing.assert_array_equal(measured.tables["profiles"]["value_norm_by_key"][0], 10)


def test_one_sequence_that_is_too_large_is_one_line(shelf: toy.Shelf) -> None:
    replica = with_memory_for(0, shelf.path("gpt2"))
    with pytest.raises(ModelError, match=r"^one sequence of 8 tokens does not fit the memory; low"):
        replica.measure(toy.repeating_tokens(8, batch=5))


def measure_in_little_memory() -> None:
    """Measure 32 sequences in one batch, and grow by 120 MB at most.

    The command line names the model.
    """
    replica = toy.replica(Path(sys.argv[1]), batch_size=32)
    tokens = toy.repeating_tokens(512, batch=32)
    replica.measure(tokens[:1])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * 4096 + 120_000_000
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    heads = replica.measure(tokens).heads
    assert 1 <= replica.batch.size < 32, replica.batch.size
    first = replica.measure(tokens[:1]).heads
    assert all(len(v) == 32 for v in heads.values())
    np.testing.assert_allclose(heads["entropy"][:1], first["entropy"], rtol=1e-5)
    print("halved to", replica.batch.size)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_when_memory_ends_the_batch_is_halved_and_nothing_is_lost(tmp_path: Path) -> None:
    path = toy.save_model(tmp_path / "toy", toy.gpt2(n_positions=512, n_embd=256))
    ended = Command(
        path,
        environment=os.environ,
        directory=tmp_path,
        main="tests.workers.engine.test_batch.measure_in_little_memory",
    ).ended()
    assert "halved to" in ended.stdout, ended.stderr[-2000:]
