"""The sweep of a fused pattern as one Triton kernel: what `workers.engine` asks of all keys, tile
by tile on a GPU.

S = scale · q·k is the pre-softmax score, A = softmax(S) over the keys `k <= q`. A program owns one
head's tile of queries and goes over the keys as flash attention does: a tile of scores lives in
registers and is never written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from schemas.errors import ModelError, unknown

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:  # torch brings it for CUDA and not for the CPU
    triton = None

MAX_D_HEAD = 256

SCORES = {"float32": True, "tf32": False}
"""Whether float32 factors are split in two, for three tf32 products that come within about 1e-6 of
the float32 one.

One tf32 product comes within about 1e-3; float32 products themselves would not use the tensor
cores.
"""

Labels = Sequence[tuple[Tensor, Tensor, int]]


class Tiles(NamedTuple):
    """How the work is cut: `queries` per program, `keys` per step, `dims` per product, and what a
    program takes.
    """

    queries: int
    keys: int
    dims: int
    warps: int
    stages: int


TILES = {
    torch.float32: {
        64: Tiles(64, 32, 32, 4, 2),
        128: Tiles(128, 32, 32, 8, 2),
        256: Tiles(64, 16, 32, 4, 2),
    },
    torch.float16: {
        64: Tiles(64, 64, 64, 4, 3),
        128: Tiles(128, 64, 128, 8, 2),
        256: Tiles(128, 32, 256, 8, 2),
    },
}
"""By dtype and padded d_head: what the registers and the shared memory of an H100 hold."""
TILES[torch.bfloat16] = TILES[torch.float16]

SMALL = Tiles(32, 32, 32, 4, 1)
"""For a d_head above 64 on a device whose programs have less than an H100's `SHARED_BYTES` of
shared memory.
"""

SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class Swept:
    """What one sweep answers, in float32; all but z are `[batch head query]`."""

    z: Tensor
    """`Σ_k A[q,k] v[k]`: `[batch head pos d_head]`, in memory `[batch pos head d_head]`."""
    lse: Tensor
    """`ln Σ_k exp S[q,k]`."""
    distance: Tensor
    """`Σ_k A[q,k] (q-k)`."""
    entropy: Tensor | None
    """`-Σ_k A[q,k] ln A[q,k]` in nats, if it was asked for."""
    masses: tuple[Tensor, ...]
    """`Σ_{k in members} A[q,k]` for each item of `labels`."""


class Sweep(Protocol):
    """What answers a sweep: the kernel, or what a test puts in its place."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        labels: Labels,
        *,
        entropy: bool,
        scores: str,
    ) -> Swept: ...


def available(device: torch.device) -> bool:
    """Whether the kernel can run there: triton installed, and a CUDA device whose tensor cores know
    tf32 and bfloat16.
    """
    usable = triton is not None and device.type == "cuda" and torch.cuda.is_available()
    return usable and torch.cuda.get_device_capability(device) >= (8, 0)


def sweep(
    q: Tensor, k: Tensor, v: Tensor, scale: float, labels: Labels, *, entropy: bool, scores: str
) -> Swept:
    """Answer z, the log-sum-exp and the row sums of A in one pass that never holds A.

    q `[batch head pos d_head]`; k, v `[batch kv_head pos d_head]`, where query head h reads kv head
    h // (head // kv_head). An item of `labels` is (query_label, key_label, lag), int32
    `[batch pos]`: k is a member for q if and only if query_label[q] = key_label[k] >= 0 and k <= q
    - lag. `scores` says how float32 factors are multiplied (`SCORES`); float16 and bfloat16 ones
    know one way only, as they are and summed in float32, and A is rounded to their dtype for A·v.
    """
    _check(q, k, v, labels, scores)
    batch, heads, n_ctx, d_head = q.shape
    block_d = max(16, 1 << (d_head - 1).bit_length())
    tiles = _tiles(q, block_d)
    z = torch.empty(batch, n_ctx, heads, d_head, dtype=torch.float32, device=q.device)
    rows = torch.empty(
        2 + entropy + len(labels), batch, heads, n_ctx, dtype=torch.float32, device=q.device
    )
    with torch.cuda.device_of(q):
        _sweep_tile[(-(-n_ctx // tiles.queries), heads, batch)](
            q,
            k,
            v,
            tuple(query.contiguous() for query, _, _ in labels),
            tuple(key.contiguous() for _, key, _ in labels),
            z,
            rows,
            q.stride(),
            k.stride(),
            v.stride(),
            scale / math.log(2),
            n_ctx,
            GROUP=heads // k.shape[1],
            D_HEAD=d_head,
            BLOCK_D=block_d,
            DIMS=min(tiles.dims, block_d),
            QUERIES=tiles.queries,
            KEYS=tiles.keys,
            LAGS=tuple(lag for _, _, lag in labels),
            ENTROPY=entropy,
            SPLIT=q.dtype == torch.float32 and SCORES[scores],
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    lse, distance, *others = rows.unbind()
    return Swept(
        z.transpose(1, 2), lse, distance, others.pop(0) if entropy else None, tuple(others)
    )


def _tiles(q: Tensor, block_d: int) -> Tiles:
    if block_d > 64 and q.is_cuda:
        held = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
        if held < SHARED_BYTES:
            return SMALL
    return TILES[q.dtype][max(64, block_d)]


def _check(q: Tensor, k: Tensor, v: Tensor, labels: Labels, scores: str) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    alike = (
        q.dim() == k.dim() == 4
        and k.shape == v.shape
        and q.shape[::2] == k.shape[::2]
        and q.shape[3] == k.shape[3]
    )
    if not alike or q.shape[1] % k.shape[1]:
        raise ModelError(
            f"{shapes}: expected [batch head pos d_head], alike but for q's heads, a multiple of "
            "k's"
        )
    if q.shape[3] > MAX_D_HEAD:
        raise ModelError(f"d_head {q.shape[3]}: the kernel takes at most {MAX_D_HEAD}")
    if q.dtype not in TILES or not q.dtype == k.dtype == v.dtype:
        raise ModelError(
            f"q {q.dtype}, k {k.dtype}, v {v.dtype}: expected float32, float16 or bfloat16, all "
            "the same"
        )
    if q.dtype == torch.float32 and scores not in SCORES:
        raise ModelError(unknown("way to multiply scores", scores, SCORES))
    expected = [q.shape[0], q.shape[2]]
    for label in (part for query, key, _ in labels for part in (query, key)):
        if list(label.shape) != expected or label.dtype != torch.int32:
            raise ModelError(
                f"label {label.dtype} {list(label.shape)}: expected int32 [batch pos] = {expected}"
            )


def _jit(function: Callable[..., Any]) -> Any:
    return function if triton is None else triton.jit(function)


@_jit
def _sweep_tile(
    q,
    k,
    v,
    query_labels,
    key_labels,
    z,
    rows,
    q_stride,
    k_stride,
    v_stride,
    scale,
    n_ctx,
    GROUP: tl.constexpr,
    D_HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DIMS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    LAGS: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Sweep one tile of queries over its keys; `scale` makes scores in base 2, whose exponential is
    the cheap one.

    Carried for each query, where m is the largest score so far, t = s - m and p = 2^t: `top` = m,
    `total` = Σ p, `lean` = Σ p t, `reach` = Σ p (q-k), `mass` = Σ_{members} p, `mixed` = Σ p v.
    When m grows to m', every p shrinks by a = 2^(m-m') and every t by m'-m, so lean becomes a (lean
    + (m-m') total). In the end the entropy is ln 2 · (log2 total - lean / total): scores enter it
    only as differences, so large ones cost it nothing.
    """
    MASKED: tl.constexpr = -1e30  # pyright: ignore[reportAssignmentType]  (finite: 0 · MASKED is 0 and not NaN)
    LN2: tl.constexpr = 0.6931471805599453  # pyright: ignore[reportAssignmentType]
    # The longest rows start first, so that no program is left working alone.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    queries = first + tl.arange(0, QUERIES)
    offsets = tl.arange(0, KEYS)
    dims = tl.arange(0, BLOCK_D)
    part = tl.arange(0, DIMS)
    known = queries < n_ctx
    q_at = (
        q + batch * q_stride[0] + head * q_stride[1] + queries.to(tl.int64)[:, None] * q_stride[2]
    )
    k_at = k + batch * k_stride[0] + head // GROUP * k_stride[1]
    v_at = v + batch * v_stride[0] + head // GROUP * v_stride[1]
    k_tile = offsets[:, None] * k_stride[2] + part[None, :] * k_stride[3]
    v_tile = offsets[:, None] * v_stride[2] + dims[None, :] * v_stride[3]
    query = ()
    for d in tl.static_range(0, D_HEAD, DIMS):  # pyright: ignore[reportGeneralTypeIssues]
        asked = known[:, None] & (d + part < D_HEAD)[None, :]
        query += (tl.load(q_at + (d + part)[None, :] * q_stride[3], mask=asked, other=0.0),)
    query_label = ()
    mass = ()
    for i in tl.static_range(len(LAGS)):  # pyright: ignore
        query_label += (tl.load(query_labels[i] + batch * n_ctx + queries, mask=known, other=-1),)
        mass += (tl.zeros([QUERIES], tl.float32),)
    top = tl.full([QUERIES], MASKED, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    lean = tl.zeros([QUERIES], tl.float32)
    reach = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    # First the tiles that lie wholly in the past, which need no mask, then those that touch the
    # diagonal.
    for DIAGONAL in tl.static_range(2):
        for start in range(first * DIAGONAL, tl.minimum(first + QUERIES * DIAGONAL, n_ctx), KEYS):
            keys = start + offsets
            there = keys < n_ctx
            scores = tl.zeros([QUERIES, KEYS], tl.float32)
            # A few dimensions at a time: the halves of a split q would not fit the registers whole.
            for d in tl.static_range(0, D_HEAD, DIMS):
                if DIAGONAL or d + DIMS > D_HEAD:
                    inside = there[:, None] & (d + part < D_HEAD)[None, :]
                    key = tl.load(k_at + k_tile + d * k_stride[3], mask=inside, other=0.0)
                else:
                    key = tl.load(k_at + k_tile + d * k_stride[3])
                scores = _product(query[d // DIMS], tl.trans(key), scores, SPLIT)
            scores *= scale
            if DIAGONAL:
                scores = tl.where(queries[:, None] >= keys[None, :], scores, MASKED)
            new_top = tl.maximum(top, tl.max(scores, 1))
            step = top - new_top
            shrink = tl.exp2(step)
            scores -= new_top[:, None]
            weights = tl.exp2(scores)
            sums = tl.sum(weights, 1)
            if ENTROPY:
                lean = shrink * (lean + step * total) + tl.sum(weights * scores, 1)
            if DIAGONAL:
                reached = tl.sum(weights * (queries[:, None] - keys[None, :]).to(tl.float32), 1)
            else:
                # By way of the tile's last key: both terms are at least 0, so nothing cancels.
                beyond = (KEYS - 1 - offsets).to(tl.float32)
                reached = tl.sum(weights * beyond[None, :], 1) + sums * (
                    queries - (start + KEYS - 1)
                ).to(tl.float32)
            reach = shrink * reach + reached
            new_mass = ()
            for i in tl.static_range(len(LAGS)):
                key_label = tl.load(key_labels[i] + batch * n_ctx + keys, mask=there, other=-1)
                member = query_label[i][:, None] == key_label[None, :]  # pyright: ignore
                if LAGS[i] > 1 or (DIAGONAL and LAGS[i] == 1):
                    member &= queries[:, None] - LAGS[i] >= keys[None, :]
                new_mass += (shrink * mass[i] + tl.sum(tl.where(member, weights, 0.0), 1),)
            mass = new_mass
            total = shrink * total + sums
            if DIAGONAL or D_HEAD != BLOCK_D:
                value = tl.load(
                    v_at + v_tile, mask=there[:, None] & (dims < D_HEAD)[None, :], other=0.0
                )
            else:
                value = tl.load(v_at + v_tile)
            mixed = _product(weights.to(value.dtype), value, mixed * shrink[:, None], SPLIT)
            top = new_top
            k_at += KEYS * k_stride[2]
            v_at += KEYS * v_stride[2]
    size = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * n_ctx
    row_at = rows + (batch * tl.num_programs(1) + head) * n_ctx + queries
    log_total = tl.log2(total)
    tl.store(row_at, (top + log_total) * LN2, mask=known)
    tl.store(row_at + size, reach / total, mask=known)
    if ENTROPY:
        tl.store(row_at + 2 * size, tl.maximum((log_total - lean / total) * LN2, 0.0), mask=known)
    for i in tl.static_range(len(LAGS)):
        # A negative label fits nothing, and only a negative query label can have met a negative key
        # label.
        fitting = tl.where(query_label[i] < 0, 0.0, mass[i] / total)  # pyright: ignore
        tl.store(row_at + (2 + ENTROPY + i) * size, fitting, mask=known)
    z_at = (
        z
        + ((batch * n_ctx + queries) * tl.num_programs(1) + head)[:, None] * D_HEAD
        + dims[None, :]
    )
    tl.store(z_at, mixed / total[:, None], mask=known[:, None] & (dims < D_HEAD)[None, :])


@_jit
def _product(a, b, sums, SPLIT: tl.constexpr):
    """`sums + a @ b`; split, each float32 factor is `high + low` of 11 bits each, and low · low is
    left out.
    """
    if SPLIT:
        a_high = ((a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        b_high = ((b.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        sums = tl.dot(a - a_high, b_high, sums, input_precision="tf32")
        sums = tl.dot(a_high, b - b_high, sums, input_precision="tf32")
        return tl.dot(a_high, b_high, sums, input_precision="tf32")
    return tl.dot(a, b, sums, input_precision="tf32")
