"""Where a formula has no value although its layer was measured: NULL, and never a large number.

Some things leave a formula without a value. A change may hide a score that it reads. A formula that
reads directions, as a cosine, may meet a vector of zeros. With a window, no query may see the key.
A layer may lack what the formula is about. All make NaN. Broken weights make NaN too, but that is
an error, so it is marked by infinity.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from headcount.schemas.formulas import Formula, evaluate
from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.engine.fused_pattern import FusedPattern


def defined_or_nan(formula: Formula, activations: Mapping[str, Any]) -> Tensor:
    """A formula's value in one layer: NaN where it is undefined.

    If it is not finite for any other reason, it is infinite, so that a reader can tell the two
    apart.
    """
    pattern = activations.get("pattern")
    if isinstance(pattern, DensePattern) and pattern.hidden is not None:
        return _value_under_mask(formula, activations, pattern)
    value = evaluate(formula.function, activations, formula.arguments)
    if _may_be_undefined(formula, pattern):
        return _marked(value, _is_undefined(value, formula, activations))
    # The usual case, once for each formula and layer: one pass over the value.
    return value.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def where_defined(formula: Formula, values: Mapping[str, Any], like: Tensor) -> Tensor:
    """Where a formula has a value by its rule, in the shape of `like`."""
    everywhere = torch.ones_like(like, dtype=torch.bool)
    if formula.defined is None:
        return everywhere
    return everywhere & evaluate(formula.defined, values, formula.arguments)


def _value_under_mask(
    formula: Formula, activations: Mapping[str, Any], pattern: DensePattern
) -> Tensor:
    """The value where a change hides keys: undefined where only a hidden score makes it so."""
    pattern = pattern.not_yet_asked()
    value = evaluate(formula.function, _with_pattern(activations, pattern), formula.arguments)
    undefined = torch.zeros_like(value, dtype=torch.bool)
    if _may_be_undefined(formula, pattern):
        undefined = _is_undefined(value, formula, activations)
    if pattern.was_asked_for_scores:
        # NaN of broken weights must stay an error. So the formula is computed once more with the
        # scores revealed: what is NaN only under the mask is undefined.
        as_revealed = _with_pattern(activations, pattern.revealed())
        revealed = evaluate(formula.function, as_revealed, formula.arguments)
        undefined = undefined | (value.isnan() & revealed.isfinite())
    return _marked(value, undefined)


def _with_pattern(activations: Mapping[str, Any], pattern: DensePattern) -> Mapping[str, Any]:
    """The same activations with another pattern; an engine makes the others when asked."""
    return ChainMap({"pattern": pattern}, cast(dict[str, Any], activations))


def _may_be_undefined(formula: Formula, pattern: FusedPattern | DensePattern | None) -> bool:
    """Whether a formula may have no value although all that it reads are numbers."""
    reads_window = "pattern" in formula.parameters and pattern is not None and pattern.is_partial
    return formula.of_directions or bool(formula.missing) or reads_window


def _is_undefined(value: Tensor, formula: Formula, activations: Mapping[str, Any]) -> Tensor:
    """Where a formula has no value: it is 0/0, or NaN, and everything that it reads is finite."""
    # Begins with true on the value's device, for formulas that read no tensor.
    are_finite = [torch.ones_like(value[:1], dtype=torch.bool).all()]
    for name in formula.parameters:
        read = activations[name]
        if isinstance(read, Tensor):
            are_finite.append(read.isfinite().all())
        elif name == "pattern":
            are_finite.append(read.is_finite())
    return value.isnan() & torch.stack(are_finite).all()


def _marked(value: Tensor, undefined: Tensor) -> Tensor:
    """A value with NaN where it is undefined, and infinity where it is otherwise not finite."""
    return value.where(value.isfinite(), torch.inf).masked_fill(undefined, torch.nan)
