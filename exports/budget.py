"""The format `budget`: how far back each KV head must see, and what of the cache that leaves."""

from __future__ import annotations

import io
import json
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from exports.export_registry import Exported, Needs, export_format
from exports.export_source import ExportSource
from schemas.errors import QueryError
from schemas.parquet import parquet_bytes
from schemas.values import Index

SHARES = (90, 95, 99)
"""Shares of the attention, in percent, for which the table has a window."""

RETRIEVES_FROM = 0.5
"""A KV head needs the whole cache if its window at 95 % is at least this share of the sequence."""

COMPRESSION_RATIOS = 99
"""Rows of the curve in numpy's format: 1 % to 99 % of the cache are dropped."""


@export_format(
    "How many recent keys each KV head needs for 90, 95 and 99 % of its attention",
    read_by="people, spreadsheets; kvpress (`LUKVPress`) reads the `.npy`",
    source="https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/lukv_press.py",
    writes="file",
    example="budget.csv",
    needs=Needs(profiles=("attention_by_lag", "sink_attention_by_query")),
)
def budget(source: ExportSource, *, sink: Index = 4) -> Exported:
    """The window of each KV head: the fewest last keys beside which little attention is lost.

    The attention that is lost is a mean over the queries that see a key beyond the window, as in
    `distant_mass(1, window)`: the first key is always kept. A KV head has the longest window of its
    query heads. `needs_all` says that the window for 95 % is half of the sequence or longer, where
    a repeated block has its first copy.

    The name of the file chooses its form. `.csv` and `.parquet` have a row for each KV head; `.npy`
    has the array `[99, layers, KV heads]` of the share that each head drops if 1 % to 99 % of the
    whole cache are dropped: keys go to the heads that lose most without them.

    * `sink`: first keys that every head keeps, which count as part of the cache. Only the
      attention to the first of them is known apart, so windows are rather too long than too short.
    """
    suffix = PurePosixPath(str(source.destination)).suffix
    if suffix not in (".csv", ".parquet", ".npy"):
        raise QueryError(
            f"{source.destination}: expected a name that ends in .csv, .parquet or .npy"
        )
    lost = lost_by_window(source)
    table = window_table(source, lost, sink)
    if suffix == ".npy":
        content = _npy(dropped_shares(lost, sink))
    elif suffix == ".csv":
        sink_of_csv = pa.BufferOutputStream()
        csv.write_csv(table, sink_of_csv)
        content = sink_of_csv.getvalue().to_pybytes()
    else:
        metadata = {"headcount": json.dumps(source.provenance, ensure_ascii=False)}
        content = parquet_bytes(table.replace_schema_metadata(metadata)).to_pybytes()
    return Exported(files={"budget": content}, table=table, notes=(_totals(table),))


def lost_by_window(source: ExportSource) -> np.ndarray:
    """The mean attention beyond each window, by KV head: `[layer kv_head window]`.

    Entry w is Σ_{q>w} Σ_{0<k≤q-w} A[q,k] / (T-w-1): the mean over the queries that see a key
    beyond the last w keys and behind the first one. Layers that do not attend are NaN.
    """
    n_ctx = source.run["n_ctx"]
    by_lag = source.profile("attention_by_lag", "lag")
    first_key = source.profile("sink_attention_by_query", "query")
    # A mean over the T-d queries that have a key d positions back, times their number, is the sum.
    # For query d that key is the first one, which is kept in any case.
    mass = by_lag * (n_ctx - np.arange(n_ctx)) - first_key
    # Lags 0 .. w-1 lie in a window of w keys. So entry w adds up the lags from w on.
    beyond = np.cumsum(mass[..., ::-1], axis=-1)[..., ::-1]
    queries = np.maximum(n_ctx - 1 - np.arange(n_ctx), 1)
    # Rounding may leave a little less than nothing.
    lost = np.clip(beyond / queries, 0, 1)
    layers, n_kv_heads = source.kv_shape
    return lost.reshape(layers, n_kv_heads, source.group_size, n_ctx).max(axis=2)


def windows(lost: np.ndarray, share: float) -> np.ndarray:
    """The shortest window of each KV head that leaves a share of the attention."""
    n_ctx = lost.shape[-1]
    is_enough = lost <= 1 - share
    # argmax gives the first place that is enough. Without one, the head needs every key.
    return np.where(is_enough.any(-1), is_enough.argmax(-1), n_ctx)


def window_table(source: ExportSource, lost: np.ndarray, sink: int) -> pa.Table:
    """A row for each KV head: its windows, and what of its cache they keep, in percent."""
    n_ctx = source.run["n_ctx"]
    # A layer that does not attend has no cache, and no row.
    layers, kv_heads = np.nonzero(~np.isnan(lost[..., 0]))
    columns: dict[str, Any] = {
        "label": [f"L{layer}KV{head}" for layer, head in zip(layers, kv_heads, strict=True)],
        "layer": layers,
        "kv_head": kv_heads,
    }
    for share in SHARES:
        columns[f"window_{share}"] = windows(lost, share / 100)[layers, kv_heads]
    for share in SHARES:
        # Window and sink overlap in a short sequence: no head keeps more keys than there are.
        kept = np.minimum(columns[f"window_{share}"] + sink, n_ctx)
        columns[f"cache_{share}"] = np.round(100 * kept / n_ctx, 2)
    columns["needs_all"] = columns["window_95"] >= RETRIEVES_FROM * n_ctx
    return pa.table(columns)


def dropped_shares(lost: np.ndarray, sink: int) -> np.ndarray:
    """The share of its keys that each KV head drops, if 1 % to 99 % of the cache are dropped.

    `[99, layer, kv_head]`. Each further key goes to the head that loses most without it. A layer
    that does not attend has no cache: it takes no part, and its entries are 0.
    """
    n_ctx = lost.shape[-1]
    attends = ~np.isnan(lost[..., 0])
    # A longer window never has more use than a shorter one, so a head fills up in order.
    need = np.minimum.accumulate(lost[attends], axis=-1)
    n_heads = len(need)
    # The first keys of a budget are the sink's; the others are the window's, from w = 0 on.
    need = np.concatenate([np.full((n_heads, sink), np.inf), need], axis=-1)[:, :n_ctx]
    order = np.argsort(-need.reshape(-1), kind="stable")
    head_of_key = order // n_ctx
    shares = np.zeros((COMPRESSION_RATIOS, *attends.shape), np.float32)
    for percent in range(1, COMPRESSION_RATIOS + 1):
        kept_keys = round(len(order) * (1 - percent / 100))
        kept = np.bincount(head_of_key[:kept_keys], minlength=n_heads)
        shares[percent - 1, attends] = 1 - kept / n_ctx
    return shares


def _npy(array: np.ndarray) -> bytes:
    """An array as the content of a `.npy` file."""
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def _totals(table: pa.Table) -> str:
    """What of the whole cache the windows keep, in a line."""
    means = [f"{table[f'cache_{share}'].to_numpy().mean():.1f} %" for share in SHARES]
    whole = int(table["needs_all"].to_numpy(zero_copy_only=False).sum())
    return (
        f"windows for {SHARES[0]}, {SHARES[1]} and {SHARES[2]} % of the attention keep "
        f"{', '.join(means)} of the cache; {whole} of {table.num_rows} KV heads need all of it"
    )
