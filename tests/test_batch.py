"""How many sequences go through the model at once: found by measuring, halved where memory ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from schemas.statistics import STATISTICS
from tests import toy_models as toy
from workers.batch import FIRST_TOKENS, MOST_TOKENS, TRIALS, BatchSize


def sizes_of(batch: BatchSize, seconds_of: dict[int, float], passes: int = 40) -> list[int]:
    """The sizes that are used one after another, where a pass of each size takes so long."""
    used: list[int] = []
    for _ in range(passes):
        used.append(batch.size)
        batch.note(batch.size, seconds_of.get(batch.size, 0.01 * batch.size))
    return list(dict.fromkeys(used))


def test_a_size_that_was_asked_for_stays() -> None:
    batch = BatchSize(6, "cpu", 128)
    assert sizes_of(batch, {6: 1.0}) == [6]
    assert not batch.searching


def test_sizes_double_while_that_is_faster_and_the_best_stays() -> None:
    first = FIRST_TOKENS["cpu"] // 128
    # Per sequence: 10, 8, 7.9 ms; the last gain is below 5 %.
    batch = BatchSize("auto", "cpu", 128)
    times = {first: 10.0 * first, 2 * first: 8.0 * 2 * first, 4 * first: 7.9 * 4 * first}
    assert sizes_of(batch, times) == [first, 2 * first, 4 * first]
    assert batch.size == 2 * first
    assert not batch.searching


def test_no_batch_is_larger_than_the_device_should_hold() -> None:
    batch = BatchSize("auto", "cpu", 1024)
    speedier = {size: size**0.5 for size in range(1, 200)}
    assert max(sizes_of(batch, speedier)) == batch.size == MOST_TOKENS["cpu"] // 1024
    assert not batch.searching
    assert BatchSize("auto", "cuda", 2 * MOST_TOKENS["cuda"]).size == 1


def test_a_slow_first_try_does_not_decide() -> None:
    batch = BatchSize("auto", "cpu", 128)
    first = batch.size
    for seconds in [9.0] + [1.0] * (TRIALS - 1):
        batch.note(first, seconds)
    for seconds in [9.0] + [1.0] * (TRIALS - 1):
        batch.note(2 * first, seconds)
    assert batch.size == 4 * first


def test_a_batch_that_is_not_full_says_nothing() -> None:
    batch = BatchSize("auto", "cpu", 128)
    for _ in range(10):
        batch.note(batch.size - 1, 1e-9)
    assert batch.size == FIRST_TOKENS["cpu"] // 128
    assert batch.searching


def test_halving_is_for_good() -> None:
    batch = BatchSize("auto", "cpu", 128)
    size = batch.size
    batch.halve()
    assert (batch.size, batch.searching) == (size // 2, False)
    assert sizes_of(batch, {}) == [size // 2]


@pytest.mark.parametrize("size", [1, 3, "auto"])
def test_rows_do_not_depend_on_the_batches(tmp_path: Path, size: int | str) -> None:
    path = toy.save_model(tmp_path / "toy", toy.gpt2())
    tokens = toy.repeating_tokens(20, batch=7)
    whole = toy.measure(path, tokens, batch_size=7)
    parts = toy.measure(path, tokens, batch_size=size)
    for name in STATISTICS:
        np.testing.assert_allclose(parts.heads[name], whole.heads[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, values in whole.chance.items():
        np.testing.assert_allclose(parts.chance[name], values, rtol=1e-6, err_msg=name)


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_when_memory_ends_the_batch_is_halved_and_nothing_is_lost(tmp_path: Path) -> None:
    """A process that may not grow by more than 300 MB measures 64 sequences asked for in one batch."""
    path = toy.save_model(tmp_path / "toy", toy.gpt2(n_positions=512, n_embd=256))
    script = f"""
        import resource
        import numpy as np
        from tests import toy_models as toy
        from pathlib import Path
        replica = toy.replica(Path({str(path)!r}), batch_size=64)
        tokens = toy.repeating_tokens(512, batch=64)
        replica.measure(tokens[:1])
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + 300_000_000,) * 2)
        heads = replica.measure(tokens).heads
        assert 1 <= replica.batch.size < 64, replica.batch.size
        first = replica.measure(tokens[:1]).heads
        assert all(len(v) == 64 for v in heads.values())
        np.testing.assert_allclose(heads["entropy"][:1], first["entropy"], rtol=1e-5)
        print("halved to", replica.batch.size)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert "halved to" in done.stdout, done.stderr[-2000:]
