"""The parts of a Hugging Face model that TransformerLens does not name: found by what they are."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.workers.model.model_info import ModelInfo

ATTENTION = ("self_attn", "attn", "attention", "self_attention", "mixer", "temporal_block")
"""Names of a layer's attention module in transformers."""

MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")  # names of a layer's MLP, the same

MLP_OF_LAYER = ("fc1", "activation_fn", "fc2")  # names of its parts in a layer of OPT, in order

POSITIONS = ("wpe", "position_embeddings", "positions_embed", "embed_positions")
"""Names of the module that embeds positions, the same."""

PROJECTIONS = {
    "Q": ("q_proj", "query", "wq"),
    "K": ("k_proj", "key", "wk"),
    "V": ("v_proj", "value", "wv"),
    "O": ("o_proj", "out_proj", "dense", "wo"),
}
"""Names of an attention's projections, by their letter in `W_Q` and its like."""

ROWS_OF_PIECE = 1024  # of an MLP: fewer make products slower, more do not fit the caches


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
        "rotary_positions": rotary_modules(model),
        "key_input": key_projections(blocks),
        "normed": [],
        "attn_out": child_of_each(blocks, ATTENTION),
        "mlp_out": child_of_each(blocks, MLP),
        "first_mlp": first_mlp(blocks[0]),
        "normed_final": [],
        "unembed": [] if unembedding is None else [unembedding],
    }


def first_mlp(block: nn.Module) -> list[nn.Module]:
    """The MLP of a layer as one module; empty if it has none, or none of a known name."""
    mlp = child_of(block, MLP)
    if mlp is not None:
        return [mlp]
    parts = [part for name in MLP_OF_LAYER if (part := child_of(block, [name])) is not None]
    # It shares the parts, and the layer goes on running them itself.
    return [nn.Sequential(*parts)] if len(parts) == len(MLP_OF_LAYER) else []


def key_projections(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The module of each layer that makes keys alone; empty if a layer has none."""
    attentions = child_of_each(blocks, ATTENTION)
    return child_of_each(attentions, PROJECTIONS["K"]) if attentions else []


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that make the angles by which queries and keys are rotated."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if "rotary" in name.rpartition(".")[2] and not is_inside:
            found[name] = module
    return list(found.values())


def child_of_each(blocks: Sequence[nn.Module], names: Sequence[str]) -> list[nn.Module]:
    """The child of each block that has one of these names; empty if a block has none of them."""
    children = [child for block in blocks if (child := child_of(block, names)) is not None]
    return children if len(children) == len(blocks) else []


def child_of(block: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """The first child of a module that has one of these names."""
    children = (getattr(block, name, None) for name in names)
    return next((child for child in children if isinstance(child, nn.Module)), None)


def first_of(output: Any) -> Any:  # noqa: ANN401 (what a module returns)
    """What a module returns, or the first of several things."""
    return output[0] if isinstance(output, tuple | list) and output else output


def projection(block: nn.Module, name: str, info: ModelInfo) -> Tensor | None:
    """`W_Q`, `W_K`, `W_V [head d_model d]`, `W_O [head d d_model]` or `b_Q`, `b_K`, `b_V [head d]`.

    None if the layer has no linear module of a known name and shape that holds it.
    """
    kind, letter = name.split("_")
    attention = child_of(block, ATTENTION)
    linear = None if attention is None else child_of(attention, PROJECTIONS.get(letter, ()))
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


def foreign_module(module: nn.Module) -> str | None:
    """The name and class of a part that may compute with another weight than it shows."""
    for name, part in module.named_modules():
        weight = part._parameters.get("weight")
        is_plain = type(part).__module__.startswith(LIBRARIES)
        if not is_plain or type(weight) not in (nn.Parameter, type(None)):
            return f"{name} ({type(part).__name__})" if name else type(part).__name__
    return None


# MLPs that take a long input in pieces. An MLP acts on each position alone, and between its layers
# it holds several times the stream's numbers. Whole, these were the largest tensors of a pass over
# a long sequence. In pieces they stay in the caches of a CPU, which is faster too.


@contextmanager
def mlps_in_pieces(mlps: Iterable[nn.Module]) -> Iterator[None]:
    """Within it, those of the modules that surely act on each position alone work in pieces."""
    # Imported here, because a model is loaded by then, and with it the library.
    from transformers.pytorch_utils import Conv1D

    divided: list[nn.Module] = []
    for mlp in mlps:
        # All weights belong to linear layers. A mixture of experts is left as it is.
        owners = [module for module in mlp.modules() if module._parameters or module._buffers]
        is_positionwise = owners and all(isinstance(own, nn.Linear | Conv1D) for own in owners)
        # Layers may share a module.
        if is_positionwise and "forward" not in vars(mlp):
            # An attribute of the instance, so that hooks of the module still see the whole output.
            mlp.forward = partial(_forward_in_pieces, mlp.forward)
            divided.append(mlp)
    try:
        yield
    finally:
        for mlp in divided:
            del mlp.forward


def _forward_in_pieces(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as the module has it)
    """The output for `[batch pos d_model]`, computed for some rows at a time."""
    stream = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(stream, Tensor) or stream.dim() != 3:
        return forward(*args, **kwargs)
    rows = stream.flatten(0, 1)
    if len(rows) <= ROWS_OF_PIECE:
        return forward(stream)
    output = torch.empty_like(rows)
    for start in range(0, len(rows), ROWS_OF_PIECE):
        piece = slice(start, start + ROWS_OF_PIECE)
        output[piece] = forward(rows[None, piece])[0]
    return output.view_as(stream)


class InPlaceGelu(nn.Module):
    """PyTorch's tanh GELU in one pass, written over the output of a linear layer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """GELU of the inputs, in their memory, unless somebody wants its gradient."""
        if inputs.requires_grad:
            return nn.functional.gelu(inputs, approximate="tanh")
        return torch.ops.aten.gelu_(inputs, approximate="tanh")


def fuse_gelu(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Replace transformers' tanh GELU, which takes eight passes, by the same formula in one."""
    from transformers.activations import NewGELUActivation

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, make())
