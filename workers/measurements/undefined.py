"""Where a formula has no value although its layer was measured: NULL, and never a large number.

Some things leave a formula without a value. A change may hide a score that it reads. A formula that
reads directions, as a cosine, may meet a vector of zeros. With a window, no query may see the key.
A layer may lack what the formula is about. All make NaN. Broken weights make NaN too, but that is
an error, so it is marked by infinity.
"""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from headcount.schemas.formulas import Formula, evaluate


def defined_or_nan(formula: Formula, activations: Mapping[str, Any]) -> Tensor:
    """A formula's value in one layer: NaN where it is undefined, infinite if it is not finite."""

    def with_pattern(pattern: object) -> Tensor:
        # An engine makes the other activations when they are asked for.
        values = ChainMap({"pattern": pattern}, cast(dict[str, Any], activations))
        return evaluate(formula.function, values, formula.arguments)

    pattern = activations.get("pattern")
    masked = None
    if pattern is not None and pattern.hidden is not None:
        masked = pattern.not_yet_asked()
        value = with_pattern(masked)
    else:
        value: Tensor = evaluate(formula.function, activations, formula.arguments)
    undefined: Tensor | None = None
    reads_window = "pattern" in formula.parameters and pattern is not None and pattern.is_partial
    # May it have no value although all that it reads are numbers?
    if formula.of_directions or formula.missing or reads_window:
        # Begins with true on the value's device, for formulas that read no tensor.
        are_finite = [torch.ones_like(value[:1], dtype=torch.bool).all()]
        for name in formula.parameters:
            read = activations[name]
            if isinstance(read, Tensor):
                are_finite.append(read.isfinite().all())
            elif name == "pattern":
                are_finite.append(read.is_finite())
        # It is 0/0, or NaN, and everything that it reads is finite.
        undefined = value.isnan() & torch.stack(are_finite).all()
    if masked is not None and masked.was_asked_for_scores:
        # NaN of broken weights must stay an error. So the formula is computed once more with the
        # scores revealed: what is NaN only under the mask is undefined.
        by_mask = value.isnan() & with_pattern(masked.revealed()).isfinite()
        undefined = by_mask if undefined is None else undefined | by_mask
    if undefined is None:
        # The usual case, once for each formula and layer: one pass over the value.
        return value.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    return value.where(value.isfinite(), torch.inf).masked_fill(undefined, torch.nan)


def where_defined(formula: Formula, values: Mapping[str, Any], like: Tensor) -> Tensor:
    """Where a formula has a value by its rule, in the shape of `like`."""
    everywhere = torch.ones_like(like, dtype=torch.bool)
    if formula.defined is None:
        return everywhere
    return everywhere & evaluate(formula.defined, values, formula.arguments)
