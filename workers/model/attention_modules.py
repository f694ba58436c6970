"""Attention modules that do not look their attention up by name, taken over.

Those of transformers are older than the attention interface, and one is TransformerLens's own. Each
is told apart by the name of its class, and what it computes between its projections is replaced.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.attention_layers import attend_to, is_attending

Module = Any  # an attention module of a library
TakenOver = Callable[..., Any]  # takes the place of a module's method; given the module first


def take_over_modules(model: nn.Module) -> None:
    """Make the attention modules that have no attention interface ask `attending`."""
    for module in model.modules():
        # Class names alone are not unique: OpenAI's GPT has a module that is called `Attention`.
        name = f"{type(module).__module__.split('.')[-2:][0]}.{type(module).__name__}"
        for method, replacements in (("_attn", BETWEEN_PROJECTIONS), ("forward", WHOLE_MODULES)):
            # A module that is taken over already keeps its replacement. One that has no such method
            # asks the attention interface, as it does in newer versions of transformers.
            is_new = method not in vars(module) and hasattr(module, method)
            if name in replacements and is_new:
                ours = partial(replacements[name], module)
                setattr(module, method, partial(_call, getattr(module, method), ours))


def _call(own: Callable[..., Any], ours: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as the library has it)
    return ours(*args, **kwargs) if is_attending() else own(*args, **kwargs)


def _scaled_by(scale: Callable[[Any], float], *, keys_last: bool = False) -> TakenOver:
    """Replace `_attn(query, key, value, mask)`, which returns z `[batch head pos d_v]` first.

    `scale` reads what q·k is multiplied by from the module. With `keys_last` the keys arrive as
    `[batch head d_qk pos]`.
    """

    def attend(
        module: Module, query: Tensor, key: Tensor, value: Tensor, *_: object
    ) -> list[Tensor | None]:
        # GPT-Neo's local layers have their window in the mask alone.
        is_local = getattr(module, "attention_type", None) == "local"
        facts = AttentionFacts(
            scale(module), window=module.config.window_size if is_local else None
        )
        z = attend_to(query, key.mT if keys_last else key, value, facts)
        return [z.transpose(1, 2), None]  # The second is the pattern, which nobody reads.

    return attend


def _bloom(
    module: Module, hidden_states: Tensor, residual: Tensor, alibi: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    # ALiBi, and projections in one matrix.
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    # `alibi [batch·head 1 pos]` holds slope · k. A shift by slope · q changes no pattern.
    slopes = _slopes(alibi[: module.num_heads, 0])
    z = attend_to(query, key, value, AttentionFacts(module.inv_norm_factor, slopes=slopes))
    return residual + module.dense(z.flatten(2)), None


def _falcon(
    module: Module,
    hidden_states: Tensor,
    alibi: Tensor | None,
    *_: object,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **__: object,
) -> tuple[Tensor, None]:
    # Rotary positions, or ALiBi, which is scaled with the scores. The function that rotates is
    # looked up when it is called, because each pass wraps it.
    from transformers.models.falcon import modeling_falcon

    projections = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (projection.transpose(1, 2) for projection in projections)
    slopes = None
    scale = 1 / math.sqrt(module.head_dim)
    if alibi is None:
        assert position_embeddings is not None
        query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        slopes = scale * _slopes(alibi[: module.num_heads, 0])
    z = attend_to(query, key, value, AttentionFacts(scale, slopes=slopes))
    return module.dense(z.flatten(2)), None


def _mpt(
    module: Module, hidden_states: Tensor, position_bias: Tensor | None, *_: object, **__: object
) -> tuple[Tensor, None]:
    # ALiBi, and projections that may be clipped.
    projections = module.Wqkv(hidden_states)
    if module.clip_qkv:
        projections = projections.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (_by_head(part, module.n_heads) for part in projections.chunk(3, dim=2))
    slopes = None if position_bias is None else _slopes(position_bias[:, 0])
    z = attend_to(q, k, v, AttentionFacts(module.softmax_scale, slopes=slopes))
    return module.out_proj(z.flatten(2)), None


def _bart_like(
    module: Module, hidden_states: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    # Four projections, the query's scaled; self-attention alone.
    q, k, v = (
        _by_head(project(hidden_states), module.num_heads)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    z = attend_to(q, k, v, AttentionFacts(module.scaling))
    return module.out_proj(z.flatten(2)), None


def _native(module: Module, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
    # Of legacy files: no rotations, no caps, and always causal.
    q, k, v = (
        project(hidden_states).unflatten(2, (-1, module.d_head)).transpose(1, 2)
        for project in (module.q, module.k, module.v)
    )
    z = attend_to(q, k, v, AttentionFacts(1 / module.scale))
    return module.o(z.flatten(2)), None


def _by_head(projection: Tensor, n_heads: int) -> Tensor:
    """A projection `[batch pos head·d]` as `[batch head pos d]`."""
    return projection.unflatten(2, (n_heads, -1)).transpose(1, 2)


def _slopes(bias: Tensor) -> Tensor:
    """ALiBi's slope of each head from its bias `[head pos]`, which is linear in the position."""
    if bias.shape[1] == 1:
        return bias.new_zeros(len(bias))
    return bias[:, -1] - bias[:, -2]


BETWEEN_PROJECTIONS: Mapping[str, TakenOver] = {
    "gptj.GPTJAttention": _scaled_by(lambda module: 1 / float(module.scale_attn)),
    "codegen.CodeGenAttention": _scaled_by(lambda module: 1 / float(module.scale_attn)),
    "gpt_neo.GPTNeoSelfAttention": _scaled_by(lambda module: 1.0),
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": _scaled_by(
        lambda module: 1 / float(module.norm_factor)
    ),
    "openai.Attention": _scaled_by(
        lambda module: (module.split_size // module.n_head) ** -0.5, keys_last=True
    ),
}
"""Modules whose `_attn` is replaced, by family and name of their class."""

WHOLE_MODULES: Mapping[str, TakenOver] = {
    "bloom.BloomAttention": _bloom,
    "falcon.FalconAttention": _falcon,
    "mpt.MptAttention": _mpt,
    "xglm.XGLMAttention": _bart_like,
    "mvp.MvpAttention": _bart_like,
    "trocr.TrOCRAttention": _bart_like,
    "native.NativeAttention": _native,
}
"""Modules whose `forward` is replaced, by family and name of their class."""
