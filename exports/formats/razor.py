"""The format `razor`: echo and induction heads, which keep the whole cache."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from pydantic import Field

from headcount.exports.registry import (
    REPEATED,
    CacheCut,
    Exported,
    Needs,
    Part,
    export_format,
    ranked,
)
from headcount.exports.source import MEAN_OR_NOTHING, ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.scans.values import LARGEST_INT32, Count, Index

Divisor = Annotated[int, Field(ge=2, le=LARGEST_INT32)]


@export_format(
    "Echo and induction heads keep the whole cache, the others a window",
    read_by="implementations of RazorAttention, Algorithm 1",
    source="https://arxiv.org/abs/2407.15891",
    writes="file",
    example="razor.json",
    load="""\
import json

with open("razor.json") as file:
    heads = json.load(file)
print(heads["retrieval_kv_heads"], heads["sink_size"], heads["recent_size"])
""",
    needs=Needs(
        statistics=("duplicate_score", "induction_score"),
        families=(REPEATED,),
    ),
)
def razor(
    source: ExportSource,
    *,
    echo: Part = 0.01,
    induction: Part = 0.14,
    sink: Index = 4,
    recent: Count = 4000,
    compression: Divisor = 5,
) -> Exported:
    """The heads that attend most to the earlier copy of a token, or to what follows it.

    The file is JSON. `echo_heads` and `induction_heads` are lists of `[layer, head, score]`, the
    highest first; `retrieval_kv_heads` are the `[layer, kv_head]` that hold any of them, because
    query heads that share keys keep or lose them together. The other KV heads keep the first
    `sink_size` keys and the last max(`recent_size`, keys / `compression`). The paper gives the
    algorithm and no file format, so the names are ours.

    * `echo`: share of all query heads that are echo heads; 1 % is what is told of the paper.
    * `induction`: share of all query heads that are induction heads; 14 % is told of the paper.
    * `sink`: first keys that the other heads keep, N_0 of the paper.
    * `recent`: fewest last keys that the other heads keep, S_0 of the paper.
    * `compression`: the other heads keep one in so many keys, C of the paper.
    """
    echo_scores = source.matrix("duplicate_score", MEAN_OR_NOTHING)
    induction_scores = source.matrix("induction_score", MEAN_OR_NOTHING)
    # If all scores are 0, the highest ones say nothing.
    if not np.nansum(echo_scores + induction_scores):
        raise QueryError(
            f"export razor: no head of run {source.run_id} attends to the earlier copy of a token; "
            "expected sequences whose copies lie within the model's window"
        )
    echo_heads = highest_heads(echo_scores, echo)
    induction_heads = highest_heads(induction_scores, induction)
    # A cache keeps or drops the keys of a KV head for all of its query heads.
    chosen = (*echo_heads, *induction_heads)
    kv_heads = sorted({(layer, head // source.group_size) for layer, head, _ in chosen})
    content = {
        "echo_heads": echo_heads,
        "induction_heads": induction_heads,
        "retrieval_kv_heads": kv_heads,
        "sink_size": sink,
        "recent_size": recent,
        "compression": compression,
    }
    return Exported(
        files={"razor.json": source.json_file(content)},
        notes=(f"{len(kv_heads)} of {math.prod(source.kv_shape)} KV heads keep the whole cache",),
        cut=CacheCut(
            heads=kv_heads, sink=sink, recent=max(recent, source.run["n_ctx"] // compression)
        ),
    )


def highest_heads(scores: np.ndarray, share: float) -> list[tuple[int, int, float]]:
    """The heads with the highest scores, a share of all of them: layer, head and score.

    At least one. Layers that do not attend have no heads.
    """
    heads = ranked(scores)
    count = max(1, round(len(heads) * share))
    return [(layer, head, float(scores[layer, head])) for layer, head in heads[:count]]
