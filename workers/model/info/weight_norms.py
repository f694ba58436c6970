"""Norms of the weights in a checkpoint's files, without loading the model."""

from pathlib import Path

import torch
from safetensors import safe_open

from headcount.schemas.watch.history import Facts, layer_of
from headcount.workers.model.info.model_files import CONFIG, layout_of, read_object, weight_files

UNEMBEDDINGS = ("lm_head.weight", "embed_out.weight", "output.weight")


def facts_of_files(directory: Path) -> Facts:
    """What the weights of a checkpoint say, as of a model in memory; nothing of pickled ones."""
    config = read_object(directory / CONFIG)
    files = weight_files(directory, layout_of(config))
    if any(file.suffix != ".safetensors" for file in files):
        return Facts()
    norms: dict[str, float] = {}
    embeddings: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dict
                weight = weights.get_tensor(name)
                norms[name] = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
                if layer_of(name) is None and weight.dim() == 2:
                    embeddings[name] = weight
    is_tied = bool(config.get("tie_word_embeddings"))
    return Facts(norms, untied=_untied(embeddings) if is_tied else None)


def _untied(embeddings: dict[str, torch.Tensor]) -> float:
    """How far the unembedding is from the embedding. Weights that are tied are saved once."""
    unembedding = next((embeddings[name] for name in UNEMBEDDINGS if name in embeddings), None)
    if unembedding is None:
        return 0.0
    distances = [
        float((weight - unembedding).norm() / weight.norm())
        for name, weight in embeddings.items()
        if name not in UNEMBEDDINGS and weight.shape == unembedding.shape
    ]
    return min(distances, default=0.0)
