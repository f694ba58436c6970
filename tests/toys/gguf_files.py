"""GGUF files of tiny Llamas, as llama.cpp's converter would write them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Names of modules in the format, by their names in transformers."""

NORMAL, CONTROL = 1, 3  # types of tokens


def write_gguf(path: Path, model: Path, dtype: Any = np.float32, **fields: Any) -> Path:
    """Write the Llama and the byte-level tokenizer of a directory into one file.

    `fields` are added, with `__` for a dot; the tensors whose name has `leave_out` are left out.
    """
    from gguf import GGUFWriter, LlamaFileType
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    writer = GGUFWriter(path, fields.pop("architecture", "llama"))
    leave_out = fields.pop("leave_out", None)
    writer.add_name("toy")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    kind = LlamaFileType.ALL_F32 if dtype == np.float32 else LlamaFileType.MOSTLY_F16
    writer.add_file_type(kind)
    if (model / "tokenizer.json").is_file():
        _add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()))
    for name, value in fields.items():
        _add_field(writer, name.replace("__", "."), value)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, weight in load_file(model / "model.safetensors").items():
        if leave_out is not None and leave_out in name:
            continue
        # Of vectors llama.cpp keeps all digits.
        stored = weight.astype(dtype if weight.ndim > 1 else np.float32)
        for part, count in heads.items():
            if f"self_attn.{part}_proj" in name:
                stored = _in_pairs(stored, count)
        writer.add_tensor(_gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_field(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_uint32(name, value)


def _in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's order: the two halves that rotate together lie beside each other."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.{kind}"
    layer, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    added = [each["content"] for each in tokenizer["added_tokens"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(token for token, _ in tokens), *added])
    writer.add_token_types([NORMAL] * len(tokens) + [CONTROL] * len(added))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
