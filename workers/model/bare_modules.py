"""The parts of a Hugging Face model that TransformerLens does not name: found by what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.workers.model.files.model_info import ModelInfo

ATTENTION = ("self_attn", "attn", "attention", "self_attention", "mixer", "temporal_block")
"""Names of a layer's attention module in transformers."""

MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")  # names of a layer's MLP, the same

POSITIONS = ("wpe", "position_embeddings", "positions_embed", "embed_positions")
"""Names of the module that embeds positions, the same."""

PROJECTIONS = {
    "Q": ("q_proj", "query", "wq"),
    "K": ("k_proj", "key", "wk"),
    "V": ("v_proj", "value", "wv"),
    "O": ("o_proj", "out_proj", "dense", "wo"),
}
"""Names of an attention's projections, by their letter in `W_Q` and its like."""


def find_blocks(model: Any, info: ModelInfo) -> list[nn.Module]:  # noqa: ANN401 (any model of transformers)
    """The layers of a language model: its largest list of as many modules as it has layers."""
    for root in (model.get_decoder(), model):
        # A model that also sees images or hears has a language model inside.
        parts = root.modules() if isinstance(root, nn.Module) else ()
        lists = [m for m in parts if isinstance(m, nn.ModuleList) and len(m) == info.n_layers]
        if lists:
            return list(max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters())))
    raise ModelError(f"{info.path}: no list of {info.n_layers} layers was found in its modules")


def find_modules(model: Any, blocks: Sequence[nn.Module]) -> dict[str, list[nn.Module]]:  # noqa: ANN401
    """The modules whose outputs are activations, by activation; none where it is not known."""
    unembedding = model.get_output_embeddings()
    return {
        "embed": [model.get_input_embeddings()],
        "pos_embed": [],
        "normed": [],
        "attn_out": child_of_each(blocks, ATTENTION),
        "mlp_out": child_of_each(blocks, MLP),
        "normed_final": [],
        "unembed": [] if unembedding is None else [unembedding],
    }


def child_of_each(blocks: Sequence[nn.Module], names: Sequence[str]) -> list[nn.Module]:
    """The child of each block that has one of these names; empty if a block has none of them."""
    children = [child for block in blocks if (child := _child(block, names)) is not None]
    return children if len(children) == len(blocks) else []


def _child(block: nn.Module, names: Sequence[str]) -> nn.Module | None:
    children = (getattr(block, name, None) for name in names)
    return next((child for child in children if isinstance(child, nn.Module)), None)


def projection(block: nn.Module, name: str, info: ModelInfo) -> Tensor | None:
    """`W_Q`, `W_K`, `W_V [head d_model d]`, `W_O [head d d_model]` or `b_Q`, `b_K`, `b_V [head d]`.

    None if the layer has no linear module of a known name and shape that holds it.
    """
    kind, letter = name.split("_")
    attention = _child(block, ATTENTION)
    linear = None if attention is None else _child(attention, PROJECTIONS.get(letter, ()))
    if not isinstance(linear, nn.Linear):
        return None
    if letter == "O":
        fits = linear.out_features == info.d_model and linear.in_features % info.n_heads == 0
        if kind != "W" or not fits:
            return None
        # PyTorch stores `[out in]`: [d_model head·d] becomes [head d d_model].
        return linear.weight.T.unflatten(0, (info.n_heads, -1))
    width = info.d_head
    n_heads = linear.out_features // width
    # Queries may come with a gate in the same matrix, and keys in a latent space.
    has_heads = linear.out_features % width == 0 and n_heads and info.n_heads % n_heads == 0
    if not has_heads or (letter == "Q" and n_heads != info.n_heads):
        return None
    if kind == "b":
        return None if linear.bias is None else linear.bias.unflatten(0, (n_heads, width))
    if linear.in_features != info.d_model:
        return None
    # [head·d d_model] becomes [head d_model d].
    return linear.weight.unflatten(0, (n_heads, width)).transpose(1, 2)


LIBRARIES = (
    "torch.nn.modules.",
    "transformers.activations",
    "transformers.models.",
    "transformers.pytorch_utils",
    "transformer_lens.",
    "headcount.workers.model.",
)
"""Where the classes lie whose modules compute with their weights as they are."""


def attention_or_block(block: nn.Module) -> nn.Module:
    """The attention module of a layer; the layer if it has none of a known name."""
    return _child(block, ATTENTION) or block


def foreign_module(module: nn.Module) -> str | None:
    """The name and class of a part that may compute with another weight than it shows."""
    for name, part in module.named_modules():
        weight = part._parameters.get("weight")
        is_plain = type(part).__module__.startswith(LIBRARIES)
        if not is_plain or type(weight) not in (nn.Parameter, type(None)):
            return f"{name} ({type(part).__name__})" if name else type(part).__name__
    return None


def output_projection(block: nn.Module) -> nn.Module | None:
    """The module of a layer that projects z; None if it has none of a known name."""
    attention = _child(block, ATTENTION)
    return None if attention is None else _child(attention, PROJECTIONS["O"])


def part_names(model: nn.Module) -> set[str]:
    """The last names of all modules of a model: `wpe`, `rotary_emb` and the like."""
    return {name.rpartition(".")[2] for name, _ in model.named_modules()}
