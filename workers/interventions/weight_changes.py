"""Changes of weights: made in place, undone, and checked to be undone.

They are made in place because both engines read the same tensors. A copy of a model with a change
would need its memory twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.workers.interventions.intervention_registry import BoundIntervention
from headcount.workers.model.model import ChangeableWeight, Model


@contextmanager
def changed_weights(model: Model, bound: BoundIntervention) -> Iterator[None]:
    """Apply the changes of weights; afterwards restore them and check what the engines read."""
    # Functions that read the circuit must take it from the unchanged weights, so all functions are
    # made before the first change is applied.
    functions = [(part, part.function_for(model)) for part in bound.weight_parts]
    changes = [
        (part.target, function, weight)
        for part, function in functions
        for weight in part.weights(model)
    ]
    # A weight is looked up again by each call: the tensor that was changed would not tell whether
    # the model still uses it.
    readers: dict[str, Callable[[], Tensor]] = {}
    for target, _, weight in changes:
        if weight.parameter is not None:
            readers[weight.parameter] = partial(model.bare.get_parameter, weight.parameter)
        where = "" if weight.layer is None else f"layer {weight.layer}: "
        readers[where + target] = weight.read

    def checksums() -> dict[str, str]:
        return {
            name: sha256(read().detach().cpu().contiguous().numpy().tobytes()).hexdigest()
            for name, read in readers.items()
        }

    before = checksums()
    originals: list[tuple[ChangeableWeight, Tensor]] = []
    try:
        for target, function, weight in changes:
            changed = function(weight.tensor, {"layer": weight.layer})
            # Before the change, so that an error restores it too.
            originals.append((weight, weight.tensor.clone()))
            weight.tensor.copy_(changed)
            if not torch.equal(weight.read(), changed):
                raise ModelError(f"{model.info.name}: {target} cannot be changed in place")
        yield
    finally:
        # Backwards, because two parts may have changed one weight: its first original counts.
        for weight, original in reversed(originals):
            weight.tensor.copy_(original)
        for name, checksum in checksums().items():
            if checksum != before[name]:
                raise ModelError(
                    f"{model.info.name}: {name} was not restored after {bound.intervention}"
                )
