"""The format `duo`: which KV heads need the whole cache."""

from __future__ import annotations

import io
import json
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from exports.export_registry import Exported, Needs, export_format
from exports.export_source import ExportSource
from schemas.errors import QueryError
from schemas.values import Count, Index

Share = Annotated[float, Field(ge=0, le=1)]


def needs_of_duo(sink: int, recent: int) -> Needs:
    """The mass beyond the keys that a streaming head keeps."""
    return Needs(statistics=(f"distant_mass({sink},{recent})",))


@export_format(
    "KV heads that need the whole cache (retrieval heads), and those that stream",
    read_by="DuoAttention (`load_attn_pattern`), kvpress (`DuoAttentionPress`)",
    source="https://github.com/mit-han-lab/duo-attention",
    writes="folder",
    example="patterns/my-model",
    needs=needs_of_duo,
)
def duo(
    source: ExportSource,
    *,
    sink: Index = 4,
    recent: Count = 64,
    sparsity: Share | None = None,
    threshold: Share | None = None,
    group: Literal["max", "mean"] = "max",
) -> Exported:
    """A score from 0 (streams) to 1 (retrieves) for every KV head: its share of distant attention.

    `config.json` has `sink_size` and `recent_size`; `full_attention_heads.tsv` has a line for each
    layer and a column for each KV head, which the readers cut at a quantile or at a threshold. The
    score is the attention of a query beyond the first `sink` and the last `recent` keys. The scan
    repeats a random block, so that whoever retrieves must look far back.

    * `sink`: first keys that a streaming head keeps. DuoAttention trained with 64.
    * `recent`: last keys that a streaming head keeps. DuoAttention trained with 256.
    * `sparsity`: share of KV heads that stream. With it the file has 0 and 1 instead of scores.
    * `threshold`: score from which a KV head retrieves. With it the file has 0 and 1.
    * `group`: how the query heads of a KV head are joined. By default the one that looks farthest
      decides, because all of them lose what the cache drops.
    """
    if sparsity is not None and threshold is not None:
        raise QueryError("export duo: --sparsity and --threshold both choose heads; leave out one")
    statistic = f"distant_mass({sink},{recent})"
    scores = source.by_kv_head(statistic, "highest" if group == "max" else "mean")
    # A layer that does not attend has no cache that could be cut.
    scores = np.nan_to_num(scores, nan=0.0)
    if sparsity is not None or threshold is not None:
        scores = whole_heads(scores, sparsity, threshold).astype(float)
    config = {"sink_size": sink, "recent_size": recent, "headcount": source.provenance}
    text = io.StringIO()
    np.savetxt(text, np.clip(scores, 0, 1), fmt="%.9g", delimiter="\t")
    return Exported(
        files={
            "full_attention_heads.tsv": text.getvalue().encode(),
            "config.json": f"{json.dumps(config, indent=1, ensure_ascii=False)}\n".encode(),
        }
    )


def whole_heads(
    scores: np.ndarray, sparsity: float | None, threshold: float | None = None
) -> np.ndarray:
    """The heads that keep their whole cache, as a mask: those with the highest scores.

    Of equal scores at the border, the one of the earlier layer is kept, so that exactly the share
    `sparsity` of the heads streams.
    """
    if threshold is not None:
        return scores >= threshold
    assert sparsity is not None
    kept = scores.size - round(scores.size * sparsity)
    mask = np.zeros(scores.size, bool)
    mask[np.argsort(-scores, axis=None, kind="stable")[:kept]] = True
    return mask.reshape(scores.shape)
