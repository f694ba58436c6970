"""The format `expected-attention`: mean and covariance of the queries of every head."""

import numpy as np

from headcount.exports.formats.head_profiles import input_name, input_notes, moments_of_heads
from headcount.exports.shared.registry import Exported, Needs, export_format
from headcount.exports.shared.source import ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.profiles.query_moments import FIRST_TOKENS


def problem_of_length(n_ctx: int) -> str | None:
    """Why sequences are too short. None if they are not."""
    if n_ctx > FIRST_TOKENS:
        return None
    return (
        f"n_ctx is {n_ctx}; expected more than the {FIRST_TOKENS} first tokens, which this format "
        "leaves out"
    )


@export_format(
    "Mean and covariance of each head's queries before rotation",
    read_by="kvpress (`ExpectedAttentionStatsPress(stats_folder=…)`)",
    source="https://github.com/NVIDIA/kvpress/blob/main/kvpress/presses/"
    "expected_attention_with_stats.py",
    writes="folder",
    example="exp_att_stats_my-model",
    load="""\
from safetensors.numpy import load_file

moments = load_file("exp_att_stats_my-model/model.safetensors")
print(moments["query_mean"].shape, moments["query_cov"].shape)
""",
    needs=Needs(profiles=("query_mean", "query_second_moment"), about_text=True),
    refusal=lambda setting, _: problem_of_length(setting.n_ctx),
    file_patterns=("model.safetensors", "config.json"),
    libraries=("safetensors",),
)
def expected_attention(source: ExportSource) -> Exported:
    """What queries to come are like, so that a cache can keep the keys that they will look at.

    `model.safetensors` has `query_mean [layer head d_head]` and `query_cov [layer head d_head
    d_head]`, and `config.json` the sizes and the data, as `ExpectedAttentionStats` of kvpress saves
    them. Queries are those before their rotation and after any norm, the first 4 of each sequence
    left out. The covariance is over all other queries of all sequences, divided by their number
    less 1. It is the second moment less the product of the means, so where a mean is a hundred
    times its spread, three of the seven digits of the covariance remain.
    """
    run = source.run
    if (problem := problem_of_length(run["n_ctx"])) is not None:
        raise QueryError(f"run {source.run_id}: {problem}")
    queries_of_sequence = run["n_ctx"] - FIRST_TOKENS
    mean, second_moment = moments_of_heads(source, "query")
    queries = run["sequences_done"] * queries_of_sequence
    # Cov(x, y) = E[xy] - E[x] E[y]. kvpress divides by the number of queries less 1.
    covariance = second_moment - mean[..., :, None] * mean[..., None, :]
    covariance *= queries / max(queries - 1, 1)
    tensors = {"query_mean": mean.astype(np.float32), "query_cov": covariance.astype(np.float32)}
    # kvpress makes its object of these fields and ignores others.
    config = {
        "num_layers": run["n_layers"],
        "num_heads": run["n_heads"],
        "head_dim": run["d_head"],
        "dataset_name": input_name(source),
        "model_name": source.model_name,
        "num_samples": run["sequences_done"],
        "sample_seq_len": run["n_ctx"],
        "n_sink": FIRST_TOKENS,
    }
    return Exported(
        files={
            "model.safetensors": source.safetensors_file(tensors),
            "config.json": source.json_file(config, indent=1),
        },
        notes=input_notes(source),
    )
