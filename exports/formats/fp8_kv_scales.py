"""The format `fp8-kv-scales`: how a cache of 8-bit floats is scaled."""

from __future__ import annotations

import numpy as np

from headcount.exports.formats.head_profiles import input_notes
from headcount.exports.registry import Exported, Needs, Part, export_format
from headcount.exports.source import ExportSource
from headcount.schemas.errors import QueryError

LARGEST_E4M3 = 448.0
"""The largest number of the format float8_e4m3fn."""

STATISTICS = {"q": "query_absmax", "k": "key_absmax", "v": "value_absmax"}
"""The statistic that each scale is made of."""


@export_format(
    "Scales of an 8-bit KV cache, by KV head",
    read_by="vLLM and llm-compressor (`kv_cache_scheme` with `strategy: attn_head`)",
    source="https://github.com/vllm-project/vllm/pull/30141",
    writes="file",
    example="kv_scales.safetensors",
    load="""\
from safetensors.numpy import load_file

scales = load_file("kv_scales.safetensors")
print(scales["model.layers.0.self_attn.k_scale"].ravel())  # one for each KV head
""",
    needs=Needs(statistics=("query_absmax", "key_absmax", "value_absmax")),
)
def fp8_kv_scales(
    source: ExportSource,
    *,
    quantile: Part | None = None,
    prefix: str = "model.layers.{layer}.self_attn",
) -> Exported:
    """Safetensors with `k_scale`, `v_scale` and `q_scale` of every layer, one number a head.

    A scale is the largest component of any key, value or query of the head, divided by 448, the
    largest number of float8_e4m3fn. Tensors are float32 of shape `[heads, 1, 1]`: KV heads for k
    and v, query heads for q. Keys and queries are measured after rotation, as a cache holds them.
    Where no component differs from 0, the scale is 1.

    * `quantile`: use this quantile of the largest components of sequences instead of the largest
      of all, for example 0.999. A rare outlier is then clipped, and all else keeps more digits.
    * `prefix`: name of the attention module of a layer in the checkpoint; `{layer}` is its number.
    """
    if "{layer}" not in prefix:
        raise QueryError(f"--prefix: expected a name with {{layer}} in it, got {prefix!r}")
    tensors: dict[str, np.ndarray] = {}
    for letter, statistic in STATISTICS.items():
        largest = _largest(source, statistic, quantile)
        if letter != "q":
            # Query heads that share keys have the same values, so their largest is that of each.
            largest = largest.reshape(*source.kv_shape, source.group_size).max(axis=2)
        # A scale of 0 would divide by 0.
        scales = np.where(largest > 0, largest / LARGEST_E4M3, 1).astype(np.float32)
        for layer, of_layer in enumerate(scales):
            # A layer that does not attend has no keys.
            if not np.isnan(largest[layer]).any():
                name = f"{prefix.replace('{layer}', str(layer))}.{letter}_scale"
                tensors[name] = of_layer[:, None, None]
    content = source.safetensors_file(tensors)
    return Exported(files={"kv_scales": content}, notes=input_notes(source))


def _largest(source: ExportSource, statistic: str, quantile: float | None) -> np.ndarray:
    """The largest component of each query head, or a quantile of the largest ones of its sequences:
    the upper end of its bin, so never less.

    Bins are at most 4.4 % wide. No quantile exceeds the maximum, which is exact.
    """
    largest = source.matrix(statistic, "any_value(maximum)")
    if quantile is None:
        return largest
    bins = source.by_head(statistic, "list([high, count] ORDER BY bin)", "distributions")
    for head, of_head in bins.items():
        ends, counts = np.transpose(of_head)
        ranks = np.cumsum(counts)
        # The first bin with which at least this share of the sequences is counted.
        end = ends[np.searchsorted(ranks, quantile * ranks[-1])]
        largest[head] = min(end, largest[head])
    return largest
