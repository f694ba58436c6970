"""The format `razor`: echo and induction heads, which keep the whole cache."""

import math
from typing import Annotated

from pydantic import Field

from headcount.exports.shared.certainty import sure_heads
from headcount.exports.shared.registry import (
    REPEATED,
    CacheCut,
    Exported,
    Needs,
    Part,
    export_format,
    ranked,
)
from headcount.exports.shared.source import ExportSource
from headcount.schemas.values import LARGEST_INT32, Count, Index

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
    streamed_keys=lambda options, n_ctx: (
        options["sink"],
        streamed_recent(options["recent"], options["compression"], n_ctx),
    ),
    least_documents=2,
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
    query heads that share keys keep or lose them together. A head that is not above the uniform
    baseline by more than 0.05 of its attention (q ≤ 0.05) is in no list. The other KV heads keep
    the first `sink_size` keys and the last max(`recent_size`, keys / `compression`). The paper
    gives the algorithm and no file format, so the names are ours.

    * `echo`: share of all query heads that are echo heads; 1 % is what is told of the paper.
    * `induction`: share of all query heads that are induction heads; 14 % is told of the paper.
    * `sink`: first keys that the other heads keep, N_0 of the paper.
    * `recent`: fewest last keys that the other heads keep, S_0 of the paper.
    * `compression`: the other heads keep one in so many keys, C of the paper.
    """
    shares = {"duplicate_score": echo, "induction_score": induction}
    highest = {name: highest_heads(source, name, share) for name, share in shares.items()}

    def kv_heads_of(part: ExportSource) -> dict[tuple[int, int], float]:
        # A cache keeps or drops the keys of a KV head for all of its query heads.
        found: dict[tuple[int, int], float] = {}
        for name, share in shares.items():
            for layer, head, _, q in highest_heads(part, name, share):
                kv_head = layer, head // source.group_size
                found[kv_head] = min(q, found.get(kv_head, 1))
        return found

    choice = source.choice(kv_heads_of)
    if not choice.items:
        raise source.nothing_found("duplicate_score", "induction_score")
    kv_heads = sorted(choice.items)
    content = {
        "echo_heads": [head[:3] for head in highest["duplicate_score"]],
        "induction_heads": [head[:3] for head in highest["induction_score"]],
        "retrieval_kv_heads": kv_heads,
        "sink_size": sink,
        "recent_size": recent,
        "compression": compression,
    }
    return Exported(
        stability=choice.stability,
        files={"razor.json": source.json_file(content, choice=choice)},
        notes=(f"{len(kv_heads)} of {math.prod(source.kv_shape)} KV heads keep the whole cache",),
        cut=CacheCut(
            heads=kv_heads,
            sink=sink,
            recent=streamed_recent(recent, compression, source.run["n_ctx"]),
        ),
    )


def streamed_recent(recent: int, compression: int, n_ctx: int) -> int:
    """Last keys that the other heads keep of so many."""
    return max(recent, n_ctx // compression)


def highest_heads(
    source: ExportSource, statistic: str, share: float
) -> list[tuple[int, int, float, float]]:
    """The heads with the highest scores, a share of all of them: layer, head, score and q.

    Those that are not surely above the uniform baseline are left out.
    """
    scores = source.scores(statistic)
    heads = ranked(scores.means)
    count = max(1, round(len(heads) * share))
    sure = sure_heads(heads[:count], scores.q)
    return [(*head, float(scores.means[head]), q) for head, q in sure.items()]
