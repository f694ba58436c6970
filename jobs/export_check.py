"""The check of an exported choice of heads: an ablation of the model that was measured.

Exports (`exports`) run no models. `headcount.py` hands this function to them. Imports wait until
they are needed, because every command loads this file.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pyarrow as pa


def check_exported_heads(
    model: str,
    heads: Collection[tuple[int, int]],
    sink: int,
    recent: int,
    device: Literal["auto", "cpu", "cuda"],
) -> pa.Table:
    """What the model loses if only these KV heads `(layer, kv_head)` keep their whole cache.

    The table is that of `jobs.head_check.check_heads`.
    """
    from jobs.head_check import check_heads
    from workers.process import prepare_process

    prepare_process()
    return check_heads(model, heads, sink, recent, device=device)
