"""The sweep of a fused pattern as one Triton kernel, which answers what needs all keys on a GPU.

S is the score before the softmax, made of q·k by the layer's `AttentionFacts`. A is the softmax
over the keys that a query sees and, if there is one, the learned sink. A program owns a tile of
queries of one head and goes over their keys as flash attention does: a tile of scores lives in
registers and is never written to memory. Keys behind the window of all its queries are left out.
"""

from __future__ import annotations  # without triton there is no tl

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.workers.engine.tile_sweep import Swept
from headcount.workers.engine.token_pairs import TokenPairs
from headcount.workers.model.attention_facts import AttentionFacts

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # torch brings it for CUDA and not for the CPU
    triton = None

MAX_D_HEAD = 256
LN2 = math.log(2)

SPLITS_FACTORS = {"float32": True, "tf32": False}
"""Whether float32 factors are split in two float16 numbers, for three products of these.

Three come within about 1e-6 of the float32 product, and cost what one and a half products in tf32
cost. One product in tf32 comes within about 1e-3. The float32 product itself would not use the
tensor cores.
"""

LARGEST_EXPONENT = 14
"""Split factors are scaled by powers of two, so that the largest of a head is just below 2^14.

float16 holds numbers below 2^16 and no bits below 2^-24. So each factor x keeps 22 bits, or an
error of 2^-39 of the head's largest number if that is more.
"""

MOST_SHIFT = 60  # in powers of two, so that the product of two scalings is a float32 number


class TileSizes(NamedTuple):
    """How the work is cut, and what a program takes of the GPU."""

    queries: int  # of a program
    keys: int  # of a step
    dims: int  # dimensions of d_head that one product of q and k sums over
    warps: int
    stages: int  # steps whose loads are in flight at a time


_HALF_TILES = {
    64: TileSizes(64, 64, 64, 4, 3),
    128: TileSizes(128, 64, 128, 8, 2),
    256: TileSizes(128, 32, 256, 8, 2),
}
TILE_SIZES = {
    torch.float32: {
        64: TileSizes(64, 32, 32, 4, 2),
        128: TileSizes(128, 32, 32, 8, 2),
        256: TileSizes(64, 16, 32, 4, 2),
    },
    torch.float16: _HALF_TILES,
    torch.bfloat16: _HALF_TILES,
}
"""By dtype and padded d_head: what the registers and the shared memory of an H100 hold."""

H100_SHARED_BYTES = 227 << 10  # shared memory of a program
SMALL_TILES = TileSizes(32, 32, 32, 4, 1)  # for d_head > 64 in less shared memory


def available(device: torch.device) -> bool:
    """Whether a device has triton, and tensor cores that know tf32 and bfloat16."""
    usable = triton is not None and device.type == "cuda" and torch.cuda.is_available()
    return usable and torch.cuda.get_device_capability(device) >= (8, 0)


def sweep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: AttentionFacts,
    pairs: Sequence[TokenPairs],
    *,
    entropy: bool,
    number_format: str,
) -> Swept:
    """Answer z, the log-sum-exp and the row sums of A in one pass that never holds A.

    q is `[batch head pos d_qk]`, k `[batch kv_head pos d_qk]` and v `[batch kv_head pos d_v]`.
    Query head h reads kv head h // (head // kv_head). `number_format` says how float32 factors are
    multiplied (`SPLITS_FACTORS`). Factors in float16 and bfloat16 are multiplied as they are and
    summed in float32; for A·v, A is rounded to their dtype. A negative label makes no pair.
    """
    _check(q, k, v, pairs)
    batch, heads, n_ctx, d_head = q.shape
    d_v = v.shape[3]
    # Powers of two, and at least the 16 that Triton's products take.
    padded_d_head = max(16, 1 << (d_head - 1).bit_length())
    padded_d_v = max(16, 1 << (d_v - 1).bit_length())
    widest = max(64, padded_d_head, padded_d_v)
    tiles = TILE_SIZES[q.dtype][widest]
    # Tiles of wide heads are made for the shared memory of an H100.
    if widest > 64 and q.is_cuda:
        device = torch.cuda.get_device_properties(q.device)
        if device.shared_memory_per_block_optin < H100_SHARED_BYTES:
            tiles = SMALL_TILES
    # Scores in base 2, because the GPU's exponential is exp2. A cap is between two factors.
    cap = 0.0 if facts.soft_cap is None else facts.soft_cap / LN2
    scale = facts.scale / (LN2 if facts.soft_cap is None else facts.soft_cap)
    z = torch.empty(batch, n_ctx, heads, d_v, dtype=torch.float32, device=q.device)
    row_sums = torch.empty(  # log-sum-exp, distance, entropy if asked for, then the masses
        2 + entropy + len(pairs), batch, heads, n_ctx, dtype=torch.float32, device=q.device
    )
    query_tiles = -(-n_ctx // tiles.queries)  # Rounded up.
    splits = q.dtype == torch.float32 and SPLITS_FACTORS[number_format]
    # Not read if nothing is split.
    q_factors, k_factors, v_factors = (_factors_of(x) if splits else row_sums for x in (q, k, v))
    with torch.cuda.device_of(q):
        _sweep_tile[(query_tiles, heads, batch)](
            q, k, v,
            tuple(some.query_label.contiguous() for some in pairs),
            tuple(some.key_label.contiguous() for some in pairs),
            z, row_sums, q.stride(), k.stride(), v.stride(),
            _in_base_2(facts.slopes, q), _in_base_2(facts.sink, q),
            q_factors, k_factors, v_factors, scale, cap,
            n_ctx if facts.window is None else facts.window, n_ctx,
            CAPPED=facts.soft_cap is not None,
            SLOPED=facts.slopes is not None,
            GATED=facts.sink is not None,
            WINDOWED=facts.window is not None and facts.window < n_ctx,
            HEADS_PER_KV_HEAD=heads // k.shape[1],
            D_HEAD=d_head, D_V=d_v, PADDED_D_V=padded_d_v,
            DIMS=min(tiles.dims, padded_d_head), QUERIES=tiles.queries, KEYS=tiles.keys,
            LAGS=tuple(some.lag for some in pairs), ENTROPY=entropy, SPLIT=splits,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    lse, distance, *others = row_sums.unbind()
    # In the order in which the kernel lays them out.
    entropies = others.pop(0) if entropy else None
    return Swept(z.transpose(1, 2), lse, distance, entropies, tuple(others))


def _in_base_2(fact: Tensor | None, q: Tensor) -> Tensor:
    """A fact of each head, in float32 and base 2; anything if there is none: it is not read."""
    if fact is None:
        return q.new_empty(1, dtype=torch.float32)
    return (fact.to(q.device, torch.float32) / LN2).contiguous()


def _factors_of(x: Tensor) -> Tensor:
    """The power of two that brings the largest number of each head just below 2^14."""
    largest = torch.linalg.vector_norm(x, ord=math.inf, dim=(2, 3))
    shift = (LARGEST_EXPONENT - largest.frexp().exponent).clamp(-MOST_SHIFT, MOST_SHIFT)
    # A power of two only moves the exponent, so scaling by it rounds nothing.
    return torch.ldexp(torch.ones_like(largest), shift)


def _check(q: Tensor, k: Tensor, v: Tensor, pairs: Sequence[TokenPairs]) -> None:
    """Refuse what the kernel would read wrongly: it knows addresses and strides alone."""
    widest = max(q.shape[-1], v.shape[-1])
    if widest > MAX_D_HEAD:
        raise ModelError(f"d_head {widest}: the kernel takes at most {MAX_D_HEAD}")
    labels = [label for some in pairs for label in (some.query_label, some.key_label)]
    fit = (
        q.dim() == k.dim() == v.dim() == 4
        and k.shape[:3] == v.shape[:3]
        and q.shape[::2] == k.shape[::2]
        and q.shape[3] == k.shape[3]
        and q.shape[1] % k.shape[1] == 0
        and q.dtype in TILE_SIZES
        and q.dtype == k.dtype == v.dtype
        and all(label.shape == q.shape[::2] and label.dtype == torch.int32 for label in labels)
    )
    if not fit:
        given = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (q, k, v, *labels))
        raise ModelError(
            f"{given}: expected q, k, v [batch head pos d_head] in float32, float16 or bfloat16, "
            "alike but for q's heads, a multiple of k's, and v's d_head; labels int32 [batch pos]"
        )


def _jit(function: Callable[..., object]) -> Any:  # noqa: ANN401  (triton has no types)
    return function if triton is None else triton.jit(function)


# A kernel is one loop over registers: its state cannot be handed around in parts.
@_jit
def _sweep_tile(  # noqa: C901, PLR0912, PLR0915
    q, k, v, query_labels, key_labels, z, row_sums, q_stride, k_stride, v_stride,
    slopes, sinks, q_factors, k_factors, v_factors, scale, cap, window, n_ctx,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, GATED: tl.constexpr, WINDOWED: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr, D_HEAD: tl.constexpr, D_V: tl.constexpr,
    PADDED_D_V: tl.constexpr, DIMS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    LAGS: tl.constexpr, ENTROPY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Sweep one tile of queries over its keys; `scale` and `cap` make scores in base 2.

    Carried for each query, where s is a score, m the largest so far, t = s - m and p = 2^t:
    `maximum` = m, `total` = Σ p, `score_sum` = Σ p t, `distance_sum` = Σ p (q-k),
    `pair_sums` = Σ_{k in pairs[q]} p and `value_sums` = Σ p v.

    If m grows to m', every p shrinks by a = 2^(m-m') and every t by m'-m. So `score_sum` becomes
    a · (score_sum + (m-m') · total), and the other sums are multiplied by a. In the end the entropy
    is ln 2 · (log2 total - score_sum / total). Scores enter it only as differences, so scores of
    1e4 cost it nothing but their own rounding.

    A learned sink is one more entry of every row, which has no key: it joins `total` at the end.

    A tile may hold no key that some query sees. Then m is still `MASKED` and its p are 1, and the
    first key that the query sees makes a = 0, which clears them.
    """
    # Finite, because 0 · MASKED is 0 and not NaN.
    MASKED: tl.constexpr = -1e30  # pyright: ignore[reportAssignmentType]
    LN2: tl.constexpr = 0.6931471805599453  # pyright: ignore[reportAssignmentType]
    # Late queries have the most keys. Their programs start first, so that no long one is left
    # working alone at the end.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    # 64 bits, because an offset into q, k, v or z can be larger than 32 bits hold.
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    queries = first_query + tl.arange(0, QUERIES)
    key_offsets = tl.arange(0, KEYS)
    all_dims = tl.arange(0, PADDED_D_V)
    some_dims = tl.arange(0, DIMS)
    query_exists = queries < n_ctx  # The last tile may be longer than what is left.
    q_at = (
        q + batch * q_stride[0] + head * q_stride[1] + queries.to(tl.int64)[:, None] * q_stride[2]
    )
    k_at = k + batch * k_stride[0] + head // HEADS_PER_KV_HEAD * k_stride[1]
    v_at = v + batch * v_stride[0] + head // HEADS_PER_KV_HEAD * v_stride[1]
    k_tile = key_offsets[:, None] * k_stride[2] + some_dims[None, :] * k_stride[3]
    v_tile = key_offsets[:, None] * v_stride[2] + all_dims[None, :] * v_stride[3]

    # Of the head, if factors are split: what they are multiplied by, and what undoes it.
    k_factor = 1.0
    v_factor = 1.0
    weight_factor = 1.0
    if SPLIT:
        kv_head = batch * (tl.num_programs(1) // HEADS_PER_KV_HEAD) + head // HEADS_PER_KV_HEAD
        q_factor = tl.load(q_factors + batch * tl.num_programs(1) + head)
        k_factor = tl.load(k_factors + kv_head)
        v_factor = tl.load(v_factors + kv_head)
        weight_factor = 16384.0  # Weights are at most 1.
        scale /= q_factor * k_factor

    # The queries stay in registers during the whole sweep, DIMS dimensions in each part.
    query_parts = ()
    query_lows = ()
    for dim in tl.static_range(0, D_HEAD, DIMS):  # pyright: ignore[reportGeneralTypeIssues]
        in_queries = query_exists[:, None] & (dim + some_dims < D_HEAD)[None, :]
        query = tl.load(q_at + (dim + some_dims)[None, :] * q_stride[3], mask=in_queries, other=0.0)
        if SPLIT:
            high, low = _halves(query * q_factor)  # pyright: ignore[reportPossiblyUnbound]
            query_parts += (high,)
            query_lows += (low,)
        else:
            query_parts += (query,)
    query_label = ()
    pair_sums = ()
    for i in tl.static_range(len(LAGS)):  # pyright: ignore
        query_label += (
            tl.load(query_labels[i] + batch * n_ctx + queries, mask=query_exists, other=-1),
        )
        pair_sums += (tl.zeros([QUERIES], tl.float32),)
    maximum = tl.full([QUERIES], MASKED, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    score_sum = tl.zeros([QUERIES], tl.float32)
    distance_sum = tl.zeros([QUERIES], tl.float32)
    value_sums = tl.zeros([QUERIES, PADDED_D_V], tl.float32)
    slope = 0.0
    if SLOPED:
        slope = tl.load(slopes + head)
    start = 0
    if WINDOWED:
        # The first tile that holds a key which the first query sees.
        start = tl.maximum(first_query - window + 1, 0) // KEYS * KEYS
        k_at += start * k_stride[2]
        v_at += start * v_stride[2]

    # First the tiles of keys that lie wholly in the past of all queries, which need no mask, then
    # those that the diagonal crosses. DIAGONAL is known to the compiler, which makes two loops.
    for DIAGONAL in tl.static_range(2):
        for first_key in range(
            start * (1 - DIAGONAL) + first_query * DIAGONAL,
            tl.minimum(first_query + QUERIES * DIAGONAL, n_ctx),
            KEYS,
        ):
            keys = first_key + key_offsets
            key_exists = keys < n_ctx
            scores = tl.zeros([QUERIES, KEYS], tl.float32)
            # A few dimensions at a time: the halves of a split q would not fit the registers whole.
            for dim in tl.static_range(0, D_HEAD, DIMS):
                if DIAGONAL or dim + DIMS > D_HEAD:
                    in_keys = key_exists[:, None] & (dim + some_dims < D_HEAD)[None, :]
                    key = tl.load(k_at + k_tile + dim * k_stride[3], mask=in_keys, other=0.0)
                else:
                    key = tl.load(k_at + k_tile + dim * k_stride[3])
                if SPLIT:
                    key_high, key_low = _halves(key * k_factor)
                    scores = _split_product(
                        query_parts[dim // DIMS],
                        query_lows[dim // DIMS],
                        tl.trans(key_high),
                        tl.trans(key_low),
                        scores,
                    )
                else:
                    scores = tl.dot(
                        query_parts[dim // DIMS], tl.trans(key), scores, input_precision="tf32"
                    )
            scores *= scale
            if CAPPED:
                # tanh x = (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x
                small = tl.exp2(tl.abs(scores) * -2.8853900817779268)
                height = cap * (1.0 - small) / (1.0 + small)
                scores = tl.where(scores < 0, -height, height)
            if SLOPED:
                scores -= slope * (queries[:, None] - keys[None, :]).to(tl.float32)
            if DIAGONAL:
                scores = tl.where(queries[:, None] >= keys[None, :], scores, MASKED)
            if WINDOWED:
                scores = tl.where(queries[:, None] - keys[None, :] < window, scores, MASKED)

            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            step = maximum - new_maximum  # m - m', never positive
            shrink = tl.exp2(step)
            scores -= new_maximum[:, None]
            weights = tl.exp2(scores)
            weight_sums = tl.sum(weights, 1)
            if ENTROPY:
                score_sum = shrink * (score_sum + step * total) + tl.sum(weights * scores, 1)

            if DIAGONAL:
                distances = (queries[:, None] - keys[None, :]).to(tl.float32)
                tile_distance = tl.sum(weights * distances, 1)
            else:
                # q - k = (q - last) + (last - k), where `last` is the tile's last key. The second
                # term is the same in every tile, and both are at least 0, so nothing cancels.
                before_last = (KEYS - 1 - key_offsets).to(tl.float32)
                tile_distance = tl.sum(weights * before_last[None, :], 1) + weight_sums * (
                    queries - (first_key + KEYS - 1)
                ).to(tl.float32)
            distance_sum = shrink * distance_sum + tile_distance

            new_pair_sums = ()
            for i in tl.static_range(len(LAGS)):
                key_label = tl.load(key_labels[i] + batch * n_ctx + keys, mask=key_exists, other=-1)
                is_pair = query_label[i][:, None] == key_label[None, :]  # pyright: ignore
                # In the past every key is at least 1 behind, and on the diagonal a key of the
                # future has no weight. So lags of 0 and 1 need no comparison there.
                if LAGS[i] > 1 or (DIAGONAL and LAGS[i] == 1):
                    is_pair &= queries[:, None] - LAGS[i] >= keys[None, :]
                tile_mass = tl.sum(tl.where(is_pair, weights, 0.0), 1)
                new_pair_sums += (shrink * pair_sums[i] + tile_mass,)
            pair_sums = new_pair_sums

            total = shrink * total + weight_sums
            if DIAGONAL or D_V != PADDED_D_V:
                value = tl.load(
                    v_at + v_tile,
                    mask=key_exists[:, None] & (all_dims < D_V)[None, :],
                    other=0.0,
                )
            else:
                value = tl.load(v_at + v_tile)
            value_sums *= shrink[:, None]
            if SPLIT:
                weight_high, weight_low = _halves(weights * weight_factor)
                value_high, value_low = _halves(value * v_factor)
                value_sums = _split_product(
                    weight_high, weight_low, value_high, value_low, value_sums
                )
            else:
                value_sums = tl.dot(
                    weights.to(value.dtype), value, value_sums, input_precision="tf32"
                )
            maximum = new_maximum
            k_at += KEYS * k_stride[2]
            v_at += KEYS * v_stride[2]

    # Each kind of row sum is `[batch head query]`, one after another.
    kind_size = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * n_ctx
    row_at = row_sums + (batch * tl.num_programs(1) + head) * n_ctx + queries
    key_total = total
    if GATED:
        sink = tl.load(sinks + head)
        new_maximum = tl.maximum(maximum, sink)
        step = maximum - new_maximum
        shrink = tl.exp2(step)
        score_sum = shrink * (score_sum + step * total)
        distance_sum *= shrink
        value_sums *= shrink[:, None]
        key_total = shrink * total
        total = key_total + tl.exp2(sink - new_maximum)
        new_pair_sums = ()
        for i in tl.static_range(len(LAGS)):  # pyright: ignore
            new_pair_sums += (pair_sums[i] * shrink,)
        pair_sums = new_pair_sums
        maximum = new_maximum
    log2_total = tl.log2(total)
    tl.store(row_at, (maximum + log2_total) * LN2, mask=query_exists)
    tl.store(row_at + kind_size, distance_sum / total, mask=query_exists)
    if ENTROPY:
        entropy = tl.maximum((log2_total * (key_total / total) - score_sum / total) * LN2, 0.0)
        tl.store(row_at + 2 * kind_size, entropy, mask=query_exists)
    for i in tl.static_range(len(LAGS)):
        # A negative label fits nothing. Only a negative query label can have met a negative key
        # label, so it is enough to look at the query's.
        mass = tl.where(query_label[i] < 0, 0.0, pair_sums[i] / total)  # pyright: ignore
        tl.store(row_at + (2 + ENTROPY + i) * kind_size, mass, mask=query_exists)
    z_at = (
        z
        + ((batch * n_ctx + queries) * tl.num_programs(1) + head)[:, None] * D_V
        + all_dims[None, :]
    )
    in_z = query_exists[:, None] & (all_dims < D_V)[None, :]
    tl.store(z_at, value_sums / (total * (weight_factor * v_factor))[:, None], mask=in_z)


@_jit
def _halves(x):
    """float32 numbers as float16 ones and their float16 remainders, of 11 bits each."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@_jit
def _split_product(a_high, a_low, b_high, b_low, sums):
    """`sums + a @ b` of split factors in float32; low · low, 2^-22 of the whole, is left out."""
    # The small products first, so that they are not lost in a large sum.
    sums = tl.dot(a_low, b_high, sums)
    sums = tl.dot(a_high, b_low, sums)
    return tl.dot(a_high, b_high, sums)
