"""Activation patching: a run on partner sequences, from which changes take their own target.

A change that reads `partner` patches. The run on the partner is the same pass, in which every such
change is replaced by one that changes nothing and records what it is given. So neither engine knows
of patching.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from headcount.workers.engine.changes import PARTNER, Change, Changes
from headcount.workers.engine.engine import Activations, Engine, PassRequest, StopPass


def with_partner(engine: Engine, tokens: Tensor | None, depth: int) -> Engine:
    """The engine whose changes know the run on partner sequences `[batch pos]`.

    All other changes are made in that run too. Passes go through the first `depth` layers.
    """
    changes = engine.changes.changes
    if tokens is None or PARTNER not in engine.changes.reads:
        return engine
    # By the number of the change that wants it, and by layer. Not by name: two patches may take the
    # same activation.
    recorded: dict[tuple[int, int], Tensor] = {}

    def recording(number: int, change: Change) -> Change:
        def record(value: Tensor, read: Mapping[str, Any]) -> Tensor:
            recorded[number, read["layer"]] = value
            return value

        # It reads nothing: the run on the partner has no partner of its own.
        return replace(change, function=record, reads=frozenset[str]())

    def patching(number: int, change: Change) -> Change:
        def patch(value: Tensor, read: Mapping[str, Any]) -> Tensor:
            return change.function(value, {**read, PARTNER: recorded[number, read["layer"]]})

        return replace(change, function=patch)

    patches = {number: c for number, c in enumerate(changes) if PARTNER in c.reads}
    recorders, patchers = (
        Changes(by(number, c) if number in patches else c for number, c in enumerate(changes))
        for by in (recording, patching)
    )
    # A patch of all layers is recorded once in each of them.
    expected_count = sum(depth if patch.layer is None else 1 for patch in patches.values())

    def stop_after_last_patch(_layer: int, _activations: Activations) -> None:
        if len(recorded) == expected_count:
            raise StopPass

    # With `resid_post` a pass goes to the end of its last layer, and a patch may be of its MLP.
    partner_engine = engine.changed(recorders)
    partner_engine.run(
        PassRequest(
            tokens=tokens,
            on_layer=stop_after_last_patch,
            read_late=("resid_post",),
            layers=range(depth),
        )
    )
    return engine.changed(patchers)
