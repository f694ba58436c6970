"""The gradient of attention by q, k and v, made a tile at a time: no matrix of T² is built."""

from typing import Any

import torch
from torch import Tensor

from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.tile_sweep import LN2, TileScores
from headcount.workers.model.attention_facts import by_shared_head, products_of, weighted_values


class FusedAttention(torch.autograd.Function):
    """z `[batch head pos d_v]` of a pattern that is known, as a function of its q, k and v."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,  # noqa: ANN401 (PyTorch's context)
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: FusedPattern,
    ) -> Tensor:
        ctx.pattern = pattern
        return pattern.z.detach()

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: ANN401, D102
        return (*attention_gradient(ctx.pattern, dz), None)


def attention_gradient(pattern: FusedPattern, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """∂L/∂q, ∂L/∂k and ∂L/∂v in the shapes of q, k and v, from ∂L/∂z `[batch head pos d_v]`.

    ∂L/∂A[q,k] = ⟨∂L/∂z[q], v[k]⟩, ∂L/∂S[q,k] = A[q,k] (∂L/∂A[q,k] - ⟨∂L/∂z[q], z[q]⟩)

    A learned sink has no value, so it is in A alone.
    """
    q, k, v, cap = pattern.q, pattern.k, pattern.v, pattern.facts.soft_cap
    dq, dk, dv = (torch.zeros_like(factor) for factor in (q, k, v))
    mean = torch.linalg.vecdot(dz, pattern.z)[..., None]  # [batch head query 1]
    log2_sums = pattern.lse[..., None] / LN2
    tile_scores = TileScores(q, k, pattern.facts)
    for tile, heads, kv_heads in tile_scores.parts():
        sequences, queries, keys = tile
        of_queries, of_keys = (sequences, heads, queries), (sequences, kv_heads, keys)
        scores = tile_scores.scores(tile, heads, kv_heads)  # [batch head query key], in base 2
        attention = (scores - log2_sums[of_queries]).exp2_()
        d_scores = products_of(dz[of_queries], v[of_keys]).sub_(mean[of_queries]).mul_(attention)
        if cap is not None:
            # Masked scores are far below the cap, and no attention is there.
            tanh = scores.mul_(LN2 / cap).clamp_(min=-1)
            d_scores.mul_(1 - tanh.square_())
        d_products = d_scores.mul_(pattern.scale)
        dq[of_queries] = weighted_values(d_products, k[of_keys])
        # The queries of all heads that share a key are one axis, so a product adds them up.
        d_products, attention, some_q, some_dz = (
            by_shared_head(x, kv_heads.stop - kv_heads.start)
            for x in (d_products, attention, q[of_queries], dz[of_queries])
        )
        dk[of_keys] += d_products.mT @ some_q
        dv[of_keys] += attention.mT @ some_dz
    return dq, dk, dv
