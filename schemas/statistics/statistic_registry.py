"""What a statistic is: a function, named like its column, whose parameters are activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

from headcount.schemas.files.tables import HEADS
from headcount.schemas.formulas import Ranged, read_definition
from headcount.schemas.pattern import Tensor
from headcount.schemas.scans.kind import Kind

LAYER_VALUES: dict[str, str] = {
    "pattern": "attention pattern, which answers questions (headcount.schemas.pattern)",
    "q": "queries [batch pos head d_head], after any rotation",
    "unrotated_q": "queries [batch pos head d_head], before any rotation and after any norm",
    "k": "keys [batch pos head d_head], repeated where query heads share them",
    "v": "values [batch pos head d_head], repeated where query heads share them",
    "z": "Σ_k A[q,k] v[k], before W_O [batch pos head d_head]",
    "resid_pre": "residual stream before the layer [batch pos d_model]",
    "resid_post": "residual stream after the layer [batch pos d_model]",
    "b_Q": "query bias [head d_head], zero if the model has none",
    "b_K": "key bias [head d_head], zero if the model has none, repeated where query heads share "
    "it",
    "W_K": "key projection [head d_model d_head], repeated where query heads share it",
    "W_O": "output projection [head d_head d_model]",
    "effective": "effective positions EPE[j] = W_pos[j] + MLP_0(W_pos[j]) [pos d_model], NaN if "
    "they are not known",
    "rotary": "whether the model rotates q and k by their positions",
    "tokens": "token ids [batch pos]",
    "labels": "positions that the input family labels, a mask [batch pos] by label",
    "copies": "for every query, the earlier keys that hold the same token",
    "successors": "for every query, the keys that follow an earlier copy of its token",
}
"""Every name a statistic may take as a parameter, with its TransformerLens axes."""


@dataclass(frozen=True, kw_only=True)
class Statistic(Ranged):
    """A registered statistic: a column of `heads`."""

    uniform_baseline: bool
    """Whether the table `sequences` also stores what uniform attention would score."""
    standard: bool
    """Whether a scan that does not name statistics measures it."""

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say about it."""
        return super().facts | {"uniform_baseline": self.uniform_baseline}


STATISTICS: dict[str, Statistic] = {}
"""The statistics by column. One with options stands here with its defaults."""

P = ParamSpec("P")


def statistic(
    *,
    unit: str,
    range: tuple[float, float] = (0.0, math.inf),  # noqa: A002
    source: str,
    uniform_baseline: bool = False,
    defined: Callable[..., Tensor | bool] | None = None,
    of_directions: bool = False,
    missing: str = "",
    standard: bool = True,
) -> Callable[[Callable[P, Tensor]], Callable[P, Any]]:
    """Register a function as a statistic of the table `heads`.

    It returns `[batch head]`, or `[batch]` if all heads of a layer share the value.

    uniform_baseline: also record what uniform attention would score, as column `uniform_NAME` of
    `sequences`. defined: a rule that takes activations too and says, per sequence, where the
    statistic has a value. Elsewhere the column is NULL. The rule's docstring is the end of "NULL
    unless …". of_directions: it reads only directions, as a mean of cosines does. Then it is NULL
    too if one of its vectors is zero. missing: what a layer may lack, so that the column is NULL
    there: the end of "NULL if …". standard: measured by scans that do not name statistics.

    Keyword-only parameters of the function are its options. Their types say what they may be
    (`schemas.scans.values`). The column is named after the function and all options.
    """

    def register(function: Callable[P, Tensor]) -> Callable[P, Any]:
        fields = read_definition(
            function,
            "statistic",
            STATISTICS,
            "activation",
            LAYER_VALUES,
            may_have_options=True,
        )
        fields |= {"unit": unit, "range": range, "source": source, "defined": defined}
        fields |= {"of_directions": of_directions, "missing": missing}
        STATISTICS[fields["name"]] = Statistic(
            **fields, uniform_baseline=uniform_baseline, standard=standard
        )
        return function

    return register


KIND = Kind(
    field="statistics",
    word="statistic",
    meaning="Columns of the heads table: standard, all, or a list of names, in which these words "
    "and options may stand, as in distant_mass(4,64).",
    registry=STATISTICS,
    table=HEADS,
    computed="in every layer",
    sets={"standard": lambda statistic: statistic.standard, "all": lambda _: True},
    default="standard",
    page="statistics.md",
    introduction="""\
# Statistics

Float32 columns of the table `heads`, which has one row per sequence × layer × head. Generated from
`schemas/statistics/` by `make docs`.

`A[q,k]` is the attention pattern (causal, k ≤ q), `S[q,k]` the score just before the softmax. T =
`n_ctx`, q and k count from 0, `t[q]` is a token. An undefined value is NULL, never 0. The last line
of an entry has unit, range and source, and:

* *standard*: measured unless a scan names statistics. The others are named, or come with `all`.
* *baseline*: the column `uniform_NAME` of the table `sequences` is the value of uniform attention,
  `A[q,k] = 1/(q+1)`, on the same sequence.
* *options*: written in their order, `distant_mass(8,128)`. The column's name has all of them,
  `distant_mass_8_128`.

Windows and learned sinks: [models.md](models.md#windows-and-sinks). Quantities of the literature
without a column of their own: [literature.md](literature.md).
""",
)
