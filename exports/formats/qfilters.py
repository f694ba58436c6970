"""The format `qfilters`: the direction along which the queries of a KV head look."""

from __future__ import annotations

import numpy as np

from headcount.exports.formats.head_profiles import input_notes, moments_of_heads
from headcount.exports.registry import Exported, Needs, export_format
from headcount.exports.source import ExportSource


@export_format(
    "The direction of every KV head's queries, by which keys are judged",
    read_by="kvpress (`QFilterPress`, from nthngdy/MODEL_qfilt where one stands), Q-Filters",
    source="https://github.com/NathanGodey/qfilters/blob/main/make_filters.py",
    writes="folder",
    example="nthngdy/my-model_qfilt",
    load="""\
from safetensors.numpy import load_file

filters = load_file("nthngdy/my-model_qfilt/model.safetensors")["q_filters"]
print(filters.shape)  # [layer kv_head d_head]
""",
    needs=Needs(profiles=("rotated_query_mean", "rotated_query_second_moment")),
)
def qfilters(source: ExportSource) -> Exported:
    """One vector for every KV head: a key that points along it gets little attention.

    `model.safetensors` has `q_filters [layer kv_head d_head]`, and `config.json` the sizes, as
    `QFilters` saves them. Queries are those after their rotation, because the cache holds rotated
    keys. As in `make_filters`, a query head's direction is the first right singular vector of its
    queries, which are not centred: here the first eigenvector of their second moment. Its sign is
    turned against the queries, and the directions of a KV head's query heads are averaged. Where
    `make_filters` asks on which side most queries lie, this asks on which side their mean lies. It
    draws 3,000 queries, and this uses all.
    """
    mean, second_moment = moments_of_heads(source, "rotated_query")
    # Eigenvectors are columns, in ascending order of their eigenvalues.
    directions = np.linalg.eigh(second_moment).eigenvectors[..., -1]
    projection = (directions * mean).sum(-1, keepdims=True)
    # An eigenvector may as well point the other way.
    away_from_queries = np.where(projection > 0, -directions, directions)
    n_layers, n_kv_heads = source.kv_shape
    d_head = source.run["d_head"]
    groups = away_from_queries.reshape(n_layers, n_kv_heads, source.group_size, d_head)
    filters = groups.mean(2)
    config = {
        "num_layers": n_layers,
        "num_kv_heads": n_kv_heads,
        "kv_head_dim": d_head,
    }
    tensors = {"q_filters": filters.astype(np.float32)}
    return Exported(
        files={
            "model.safetensors": source.safetensors_file(tensors),
            "config.json": source.json_file(config, indent=1),
        },
        notes=input_notes(source),
    )
