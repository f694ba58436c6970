"""A tiny random model of every causal language model family of the installed transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

N_LAYERS, N_HEADS, N_KV_HEADS, D_MODEL, D_HEAD, WINDOW, N_CTX, D_VOCAB = 4, 4, 2, 32, 8, 8, 24, 64

SIZES: dict[str, Any] = {
    "vocab_size": D_VOCAB,
    "hidden_size": D_MODEL,
    "d_model": D_MODEL,
    "n_embd": D_MODEL,
    "dim": D_MODEL,
    "word_embed_proj_dim": D_MODEL,
    "embedding_size": D_MODEL,
    "embedding_dim": D_MODEL,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "d_inner": 48,
    "ffn_hidden_size": 48,
    "dff": 48,
    "dim_ff": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": N_LAYERS,
    "n_layer": N_LAYERS,
    "n_layers": N_LAYERS,
    "num_layers": N_LAYERS,
    "decoder_layers": N_LAYERS,
    "encoder_layers": 1,
    "num_attention_heads": N_HEADS,
    "n_head": N_HEADS,
    "n_heads": N_HEADS,
    "num_heads": N_HEADS,
    "decoder_attention_heads": N_HEADS,
    "encoder_attention_heads": N_HEADS,
    "num_key_value_heads": N_KV_HEADS,
    "head_dim": D_HEAD,
    "global_head_dim": D_HEAD,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "seq_length": 64,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_k": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
"""Fields of configurations and the sizes that all tiny models have."""


def families() -> list[str]:
    """Every family by its `model_type`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


EXTRA: dict[str, dict[str, Any]] = {}


def tiny_config(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[family], EXTRA.get(family, {}))


def _tiny(cls, extra):
    default = cls()
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    amap = getattr(cls, "attribute_map", {})
    names = fields | set(vars(default))
    kw = {}
    for k, v in SIZES.items():
        if k in names and amap.get(k, k) == k:
            old = getattr(default, k, None)
            if k in ("sliding_window", "window_size", "attention_window_size") and old is None:
                continue
            if k == "num_key_value_heads" and old == getattr(default, "num_attention_heads", 0):
                v = N_HEADS
            if k in ("head_dim", "q_lora_rank") and old is None:
                continue
            if isinstance(old, (list, tuple)):
                continue
            kw[k] = v
    types = getattr(default, "layer_types", None)
    if isinstance(types, list) and types:
        first = types[:N_LAYERS]
        distinct = list(dict.fromkeys(types))
        if set(first) != set(distinct):
            first = (distinct * N_LAYERS)[: max(N_LAYERS, len(distinct))]
        kw["layer_types"] = first
        for k in ("num_hidden_layers", "n_layer"):
            if k in kw:
                kw[k] = len(first)
    for name, sub in getattr(cls, "sub_configs", {}).items():
        d = getattr(default, name, None)
        if d is None:
            continue
        try:
            kw[name] = _tiny(type(d), extra.get(name, {}))
        except Exception as e:
            pass
    kw.update(extra)
    return cls(**kw)


def tiny_model(config, seed=0):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 3_000_000:
        raise ValueError(f"tiny model has {size:,} parameters")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, w in model.named_parameters():
            if w.is_floating_point():
                w.copy_(torch.randn(w.shape, generator=g) * (0.3 if w.dim() > 1 else 0.2))
                if w.dim() == 1 and name.endswith("weight"):
                    w.add_(1)
    return model.eval().requires_grad_(False)
