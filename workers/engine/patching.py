"""Activation patching: a run on other sequences, from which edits take what they read as `partner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from workers.engine.edits import PARTNER, Edit, Edits
from workers.engine.engine import Activations, Done, Engine


def with_partner(engine: Engine, tokens: Tensor | None, depth: int) -> Engine:
    """The engine whose edits know the run on partner sequences `[batch pos]`, in which all other
    edits are made too; passes go through so many layers.
    """
    if tokens is None or PARTNER not in engine.edits.reads:
        return engine
    noted: dict[tuple[int, int | None], Tensor] = {}
    places = list(enumerate(engine.edits.edits))
    noting = [_noting(noted, i, edit) if PARTNER in edit.reads else edit for i, edit in places]
    wanted = sum(
        depth if edit.layer is None else 1 for edit in engine.edits.edits if PARTNER in edit.reads
    )

    def stop(layer: int, seen: Activations) -> None:
        if len(noted) == wanted:
            raise Done

    engine.edited(Edits(noting)).run(tokens, {}, stop, ("resid_post",), layers=range(depth))
    return engine.edited(
        Edits(_given(noted, i, edit) if PARTNER in edit.reads else edit for i, edit in places)
    )


def _noting(noted: dict[tuple[int, int | None], Tensor], i: int, edit: Edit) -> Edit:
    """Changes nothing, and notes what the edit would be made of."""

    def note(value: Tensor, known: Mapping[str, Any]) -> Tensor:
        noted[i, known["layer"]] = value
        return value

    return replace(edit, function=note, reads=frozenset[str]())


def _given(noted: Mapping[tuple[int, int | None], Tensor], i: int, edit: Edit) -> Edit:
    function: Callable[[Tensor, Mapping[str, Any]], Tensor] = edit.function
    return replace(
        edit,
        function=lambda value, known: function(value, {**known, PARTNER: noted[i, known["layer"]]}),
    )
