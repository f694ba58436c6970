"""What notebooks get wrong: whatever a function is called with, an error is a line of ours."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headcount

TOKENS = [[1, 2, 3, 4]]


def odd_values() -> Iterator[Any]:
    """Values of all types; every call makes its own."""
    yield from (None, 0, -1, 10**30, 1.5, float("nan"), float("inf"), True)
    yield from (b"x", bytearray(b"x"), "", "x" * 100_000, "\0", "\ud800", "%s{0}\n; DROP")
    yield from ((1, 2), [], {}, {"a": 1}, {1: 2}, [None], [[[]]], {"a"}, iter("ab"))
    yield from (Path("/nowhere"), object(), print, headcount)
    yield from (np.float32(1), np.array([1]), np.array("x", dtype=object), torch.zeros(2))


def calls(where: Path, model: Any) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Every argument of every public function, as something that takes its value."""
    runs = headcount.open(where)
    card = runs.head("L0H0")
    # A scan whose values are right ends where its model is looked for.
    gone = {"model": "/nowhere/model", "n_ctx": 4, "sequences": 1, "out": "none"}
    gone["input"] = {"family": "uniform_random"}
    yield "open", headcount.open
    yield "open: code", lambda value: headcount.open(where, code=value)
    yield "open: memory", lambda value: headcount.open(where, memory=value)
    yield "sql", lambda value: runs.sql(value).rows()
    assert runs.sql("outliers", k=1).rows()
    yield "sql: timeout", lambda value: runs.sql("heads", timeout=value).rows()
    yield "sql: parameter", lambda value: runs.sql("outliers", k=value).rows()
    yield "head", runs.head
    yield "head: run_id", lambda value: runs.head("L0H0", run_id=value)
    yield "head: intervention", lambda value: runs.head("L0H0", intervention=value)
    yield "attention", lambda value: runs.attention(value, "a")
    yield "attention: text", lambda value: runs.attention("L0H0", value)
    yield "attention: run_id", lambda value: runs.attention("L0H0", "a", run_id=value)
    yield "save", card.save
    yield "show", card.show
    yield "scan", lambda value: headcount.scan(value, quiet=True)
    for name in (
        *("name", "replicas", "cores", "device", "address", "new", "quiet"),
        *("n_ctx", "sequences", "input", "model", "layers", "statistics", "out", "nothing"),
    ):
        yield f"scan: {name}", lambda value, name=name: headcount.scan(gone, **{name: value})
    yield "measure", lambda value: headcount.measure(value, TOKENS)
    for name in (
        *("tokens", "statistics", "interventions", "layers", "heads", "batch_size", "engine"),
        *("precision", "run_id", "attention_mask"),
    ):
        fields: dict[str, Any] = {"tokens": TOKENS, "statistics": ["entropy"]}

        def measure(value: Any, name: str = name, fields: dict[str, Any] = fields) -> object:
            return headcount.measure(model, **(fields | {name: value}))

        yield f"measure: {name}", measure
    callback: Any = headcount.MeasureCallback
    yield "MeasureCallback", callback
    for name in ("every", "statistics", "out"):
        yield f"MeasureCallback: {name}", lambda value, name=name: callback(TOKENS, **{name: value})


@pytest.mark.long
def test_no_value_of_any_argument_raises_another_error_than_ours(
    shelf: Path, loaded_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    raw: list[str] = []
    for name, call in calls(shelf / "RUNS" / "run_id=a-1", loaded_model):
        for value in odd_values():
            try:
                with warnings.catch_warnings(action="ignore"):
                    call(value)
            except headcount.Error as error:
                # A scan has a line for each of its mistakes.
                long = [line for line in str(error).split("\n") if len(line) > 900]
                raw += [f"{name}({value!r}): {line}" for line in long]
            except Exception as error:
                raw.append(f"{name}({value!r:.50}): {error!r:.100}")
    assert raw == []
