"""The format `duo`: which KV heads need the whole cache."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np

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
from headcount.schemas.scans.values import Count, Index


def needs_of_duo(score: str, sink: int, recent: int) -> Needs:
    """What the score is made of."""
    distant_mass = f"distant_mass({sink},{recent})"
    if score == "distant":
        return Needs(statistics=(distant_mass,))
    return Needs(
        statistics=("duplicate_score", "induction_score", distant_mass),
        families=(REPEATED,),
        baseline=Needs(statistics=(distant_mass,), families=("uniform_random",)),
    )


@export_format(
    "KV heads that need the whole cache (retrieval heads), and those that stream",
    read_by="DuoAttention (`load_attn_pattern`), kvpress (by a subclass of `DuoAttentionPress`)",
    source="https://github.com/mit-han-lab/duo-attention",
    writes="folder",
    example="patterns/my-model",
    load="""\
import json

import numpy as np

scores = np.loadtxt("patterns/my-model/full_attention_heads.tsv", delimiter="\\t", ndmin=2)
with open("patterns/my-model/config.json") as file:
    config = json.load(file)
print(scores.shape, config["sink_size"], config["recent_size"])  # [layer kv_head]
""",
    needs=needs_of_duo,
)
def duo(
    source: ExportSource,
    *,
    score: Literal["retrieval", "distant"] = "retrieval",
    sink: Index = 4,
    recent: Count = 64,
    sparsity: Part | None = None,
    threshold: Part | None = None,
    group: Literal["max", "mean"] = "max",
) -> Exported:
    """A score from 0 (streams) to 1 (retrieves) for every KV head.

    `config.json` has `sink_size` and `recent_size`; `full_attention_heads.tsv` has a line for each
    layer and a column for each KV head, which the readers cut at a quantile or at a threshold.

    The score is the share of its attention that a head moves when something repeats, as a mean
    over the queries of the second copy. Two runs are compared: over a random block that is
    repeated, and over random tokens without a repeat. Most heads that need distant keys attend to
    the earlier copy of a token and to what follows it. Others rest on the first keys until
    something repeats, and then look at all keys. So the score is the larger of two numbers: the
    attention to copies and to what follows them, and the change of all attention beyond the first
    `sink` and the last `recent` keys. Attention to distant keys as such says less: a head that
    always spreads over all keys has most of it, and retrieves nothing.

    * `score`: retrieval, as said above; or distant, which is all attention beyond the first `sink`
      and the last `recent` keys, on any input, with one run.
    * `sink`: first keys that a streaming head keeps. DuoAttention trained with 64.
    * `recent`: last keys that a streaming head keeps. DuoAttention trained with 256.
    * `sparsity`: share of KV heads that stream. With it the file has 0 and 1 instead of scores.
    * `threshold`: score from which a KV head retrieves. With it the file has 0 and 1.
    * `group`: how the query heads of a KV head are joined. By default the one that looks farthest
      decides, because all of them lose what the cache drops.
    """
    if sparsity is not None and threshold is not None:
        raise QueryError("export duo: --sparsity and --threshold both choose heads; leave out one")
    # The query heads that share keys are neighbours.
    by_head = scores_by_head(source, score, sink, recent)
    groups = by_head.reshape(*source.kv_shape, source.group_size)
    joined = groups.max(-1) if group == "max" else groups.mean(-1)
    # A layer that does not attend has no cache that could be cut.
    scores = np.clip(np.nan_to_num(joined, nan=0.0), 0, 1)
    if not scores.any():
        raise QueryError(
            f"run {source.run_id}: no head attends to distant keys, so none can be chosen; "
            "expected sequences longer than the windows of the model, or a smaller --recent"
        )
    # A file of scores leaves the number of heads to its reader, and `--check` looks for it.
    is_ranking = sparsity is None and threshold is None
    # Of equal scores at the border, the one of the earlier layer is kept, so that exactly the share
    # `sparsity` of the heads streams.
    heads = ranked(scores)
    if threshold is not None:
        heads = [head for head in heads if scores[head] >= threshold]
    if sparsity is not None:
        heads = heads[: scores.size - round(scores.size * sparsity)]
    if not is_ranking:
        scores = np.zeros(scores.shape)
        for head in heads:
            scores[head] = 1
    text = io.StringIO()
    # float32 has no more than nine digits.
    np.savetxt(text, scores, fmt="%.9g", delimiter="\t")
    config = {"sink_size": sink, "recent_size": recent}
    return Exported(
        files={
            "full_attention_heads.tsv": text.getvalue().encode(),
            "config.json": source.json_file(config, indent=1),
        },
        cut=CacheCut(heads=heads, sink=sink, recent=recent, is_ranking=is_ranking),
    )


def scores_by_head(source: ExportSource, score: str, sink: int, recent: int) -> np.ndarray:
    """How much each query head needs distant keys, `[layer head]`."""
    distant_mass = f"distant_mass({sink},{recent})"
    if score == "distant":
        return source.matrix(distant_mass, MEAN_OR_NOTHING)
    block = block_length(source)
    if recent >= block:
        raise QueryError(
            f"export duo: --recent {recent}: run {source.run_id} repeats a block of {block} "
            f"tokens, which streaming heads would see whole; expected less than {block}, or "
            "longer sequences"
        )
    # The copy and its successor are two keys, so their attention adds up.
    to_copy = source.matrix("duplicate_score", MEAN_OR_NOTHING)
    to_copies = to_copy + source.matrix("induction_score", MEAN_OR_NOTHING)
    assert source.baseline is not None
    without_repeat = source.baseline.matrix(distant_mass, MEAN_OR_NOTHING)
    change = source.matrix(distant_mass, MEAN_OR_NOTHING) - without_repeat
    # The means are over all queries that see distant keys. In the first copy both inputs are alike,
    # so all of the change is in the queries after it, and is larger as a mean over these alone.
    n_ctx, bos = source.run["n_ctx"], source.run["bos"]
    queries = n_ctx - sink - recent
    change *= queries / min(queries, n_ctx - bos - block)
    # Without a repeat there are hardly any copies, so both numbers are attention that would lie
    # elsewhere. It may be the same attention, so they do not add up.
    return np.maximum(to_copies, np.abs(change))


def block_length(source: ExportSource) -> int:
    """Tokens in the block that a sequence repeats."""
    length = source.run["n_ctx"] - source.run["bos"]
    # The default of the family `repeated_random`.
    return source.input_options.get("period") or (length + 1) // 2
