"""A model's weights in float64, in TransformerLens's shapes, read from its files.

Projections are `[head d_model d_head]`, or `[head d_head d_model]` for W_O; x @ W + b everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

Array = np.ndarray
T = TypeVar("T")


@dataclass
class Norm:
    """LayerNorm, or RMSNorm where it does not subtract the mean."""

    weight: Array
    bias: Array | None
    eps: float
    subtracts_mean: bool

    def __call__(self, x: Array) -> Array:
        if self.subtracts_mean:
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weight
        return x if self.bias is None else x + self.bias


@dataclass
class Layer:
    """One layer; a bias that the model does not have is None."""

    norm_before_attention: Norm
    W_Q: Array
    W_K: Array
    W_V: Array
    W_O: Array
    b_Q: Array | None
    b_K: Array | None
    b_V: Array | None
    b_O: Array | None
    scale: float
    """What q·k is multiplied by."""
    norm_before_mlp: Norm | None = None
    mlp: Callable[[Array], Array] | None = None
    q_norm: Norm | None = None
    """Applied to every query before it is rotated."""
    k_norm: Norm | None = None
    norm_after_attention: Norm | None = None
    """Applied to what the attention adds to the stream."""
    norm_after_mlp: Norm | None = None
    distance_slopes: Array | None = None
    """ALiBi: head h adds slope[h] times key less query to its scores."""
    soft_cap: float | None = None
    """s becomes cap tanh(s/cap)."""
    window: int | None = None
    """How many keys a query sees, its own among them."""
    sink: Array | None = None
    """The learned score of each head's sink, which has no value."""


@dataclass
class Weights:
    """All of a model."""

    name: str
    W_E: Array
    W_pos: Array | None
    """`[pos d_model]`; row i is what is added at position i. None where positions are rotations."""
    layers: list[Layer]
    final_norm: Norm
    W_U: Array
    b_U: Array
    parallel: bool = False
    """Whether the MLP reads the same stream as the attention."""
    rotated: int = 0
    """How many of the first coordinates of q and k are rotated."""
    rotary_base: float = 10000.0
    norm_of_embeddings: Norm | None = None
    mlp_is_a_module: bool = True
    """Whether the product can ask the first MLP alone: only then are effective positions known."""
    n_heads: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_heads = len(self.layers[0].W_Q)

    @property
    def rotary(self) -> bool:
        return self.rotated > 0

    def shared(self, x: Array) -> Array:
        """Repeat what query heads share: `[key_head …]` becomes `[head …]`."""
        return np.repeat(x, self.n_heads // len(x), axis=0)

    def effective_positions(self) -> Array | None:
        """EPE[j] = W_pos[j] + MLP_0(W_pos[j]), without the norm; W_pos[j] where there is no MLP."""
        if self.W_pos is None or not self.mlp_is_a_module:
            return None
        mlp = self.layers[0].mlp
        return self.W_pos if mlp is None else self.W_pos + mlp(self.W_pos)


# Activation functions


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


FUNCTIONS = {
    "relu": relu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": gelu,
    "silu": silu,
}


def plain_mlp(W_in: Array, b_in: Array, W_out: Array, b_out: Array, name: str) -> Any:
    function = FUNCTIONS[name]
    return lambda x: function(x @ W_in + b_in) @ W_out + b_out


def gated_mlp(W_gate: Array, W_in: Array, W_out: Array, name: str) -> Any:
    function = FUNCTIONS[name]
    return lambda x: (function(x @ W_gate) * (x @ W_in)) @ W_out


# Files


def read_weights(path: Path) -> Weights:
    """The weights of a model directory."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tensors = read_tensors(path)
    readers = {
        "gpt2": read_gpt2,
        "gpt_bigcode": read_bigcode,
        "bloom": read_bloom,
        "gemma2": read_gemma2,
        "phi": read_phi,
        "gpt_neo": read_gpt_neo,
        "gpt_neox": read_neox,
        "llama": read_llama,
        "qwen2": read_llama,
        "qwen3": read_llama,
        "opt": read_opt,
    }
    read = readers[config["model_type"]] if "model_type" in config else read_legacy
    return read(path.name, config, tensors)


def read_tensors(path: Path) -> dict[str, Array]:
    files = sorted(path.glob("*.safetensors"))
    if files:
        return {name: tensor for file in files for name, tensor in read_safetensors(file).items()}
    (file,) = path.glob("*final.pth")
    return {
        name: tensor.double().numpy()
        for name, tensor in torch.load(file, "cpu", weights_only=True).items()
    }


def read_safetensors(file: Path) -> dict[str, Array]:
    """The tensors of a file: the length of a JSON header, the header, then the numbers."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "F32", f"{file}: {name} is {entry['dtype']}"
        first, last = entry["data_offsets"]
        numbers = np.frombuffer(content[start + first : start + last], dtype="<f4")
        tensors[name] = numbers.reshape(entry["shape"]).astype(np.float64)
    return tensors


def three(parts: Iterable[T]) -> tuple[T, T, T]:
    """Of queries, keys and values."""
    q, k, v = parts
    return q, k, v


def by_head(matrix: Array, d_head: int) -> Array:
    """`[d_model, head · d_head]` becomes `[head d_model d_head]`."""
    d_model, width = matrix.shape
    return matrix.reshape(d_model, width // d_head, d_head).transpose(1, 0, 2)


def from_heads(matrix: Array, d_head: int) -> Array:
    """`[head · d_head, d_model]` becomes `[head d_head d_model]`."""
    return matrix.reshape(-1, d_head, matrix.shape[-1])


def unembedding(tensors: dict[str, Array], W_E: Array, name: str = "lm_head.weight") -> Array:
    """The unembedding, which may be the embedding itself."""
    return tensors.get(name, W_E).T


def read_gpt2(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    n_heads, d_model = config["n_head"], config["n_embd"]
    d_head = d_model // n_heads
    eps = config["layer_norm_epsilon"]
    layers: list[Layer] = []
    for number in range(config["n_layer"]):
        prefix = f"transformer.h.{number}"
        W = np.split(tensors[f"{prefix}.attn.c_attn.weight"], 3, axis=1)
        b = np.split(tensors[f"{prefix}.attn.c_attn.bias"], 3)
        scale = 1 / math.sqrt(d_head)
        if config["scale_attn_by_inverse_layer_idx"]:
            scale /= number + 1
        layers.append(
            Layer(
                Norm(tensors[f"{prefix}.ln_1.weight"], tensors[f"{prefix}.ln_1.bias"], eps, True),
                *three(by_head(part, d_head) for part in W),
                from_heads(tensors[f"{prefix}.attn.c_proj.weight"], d_head),
                *three(part.reshape(n_heads, d_head) for part in b),
                tensors[f"{prefix}.attn.c_proj.bias"],
                scale,
                Norm(tensors[f"{prefix}.ln_2.weight"], tensors[f"{prefix}.ln_2.bias"], eps, True),
                plain_mlp(
                    tensors[f"{prefix}.mlp.c_fc.weight"],
                    tensors[f"{prefix}.mlp.c_fc.bias"],
                    tensors[f"{prefix}.mlp.c_proj.weight"],
                    tensors[f"{prefix}.mlp.c_proj.bias"],
                    config["activation_function"],
                ),
            )
        )
    W_E = tensors["transformer.wte.weight"]
    final = Norm(tensors["transformer.ln_f.weight"], tensors["transformer.ln_f.bias"], eps, True)
    W_U = unembedding(tensors, W_E)
    return Weights(
        name, W_E, tensors["transformer.wpe.weight"], layers, final, W_U, np.zeros(W_U.shape[1])
    )


def read_gpt_neo(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """GPT-Neo: scores are not scaled, and queries, keys and values have no biases."""
    d_head = config["hidden_size"] // config["num_heads"]
    eps = config["layer_norm_epsilon"]
    layers: list[Layer] = []
    for number in range(config["num_layers"]):
        prefix = f"transformer.h.{number}"
        attention = f"{prefix}.attn.attention"
        layers.append(
            Layer(
                Norm(tensors[f"{prefix}.ln_1.weight"], tensors[f"{prefix}.ln_1.bias"], eps, True),
                *three(by_head(tensors[f"{attention}.{x}_proj.weight"].T, d_head) for x in "qkv"),
                from_heads(tensors[f"{attention}.out_proj.weight"].T, d_head),
                None,
                None,
                None,
                tensors[f"{attention}.out_proj.bias"],
                1.0,
                Norm(tensors[f"{prefix}.ln_2.weight"], tensors[f"{prefix}.ln_2.bias"], eps, True),
                plain_mlp(
                    tensors[f"{prefix}.mlp.c_fc.weight"].T,
                    tensors[f"{prefix}.mlp.c_fc.bias"],
                    tensors[f"{prefix}.mlp.c_proj.weight"].T,
                    tensors[f"{prefix}.mlp.c_proj.bias"],
                    config["activation_function"],
                ),
            )
        )
    W_E = tensors["transformer.wte.weight"]
    final = Norm(tensors["transformer.ln_f.weight"], tensors["transformer.ln_f.bias"], eps, True)
    W_U = unembedding(tensors, W_E)
    return Weights(
        name, W_E, tensors["transformer.wpe.weight"], layers, final, W_U, np.zeros(W_U.shape[1])
    )


def read_llama(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """Llama, Qwen2 (biases of queries, keys and values) and Qwen3 (norms of queries and keys)."""
    d_head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    eps = config["rms_norm_eps"]

    def norm(weight: Array | None) -> Norm | None:
        return None if weight is None else Norm(weight, None, eps, False)

    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        biases = [tensors.get(f"{attention}.{x}_proj.bias") for x in "qkv"]
        layers.append(
            Layer(
                Norm(tensors[f"{prefix}.input_layernorm.weight"], None, eps, False),
                *three(by_head(tensors[f"{attention}.{x}_proj.weight"].T, d_head) for x in "qkv"),
                from_heads(tensors[f"{attention}.o_proj.weight"].T, d_head),
                *three(None if bias is None else bias.reshape(-1, d_head) for bias in biases),
                None,
                1 / math.sqrt(d_head),
                Norm(tensors[f"{prefix}.post_attention_layernorm.weight"], None, eps, False),
                gated_mlp(
                    tensors[f"{prefix}.mlp.gate_proj.weight"].T,
                    tensors[f"{prefix}.mlp.up_proj.weight"].T,
                    tensors[f"{prefix}.mlp.down_proj.weight"].T,
                    config["hidden_act"],
                ),
                norm(tensors.get(f"{attention}.q_norm.weight")),
                norm(tensors.get(f"{attention}.k_norm.weight")),
            )
        )
    W_E = tensors["model.embed_tokens.weight"]
    W_U = unembedding(tensors, W_E)
    final = Norm(tensors["model.norm.weight"], None, eps, False)
    base = config["rope_parameters"]["rope_theta"]
    b_U = np.zeros(W_U.shape[1])
    return Weights(name, W_E, None, layers, final, W_U, b_U, rotated=d_head, rotary_base=base)


def read_neox(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """GPT-NeoX: a part of each query and key is rotated; attention and MLP may be parallel."""
    n_heads = config["num_attention_heads"]
    d_head = config["hidden_size"] // n_heads
    eps = config["layer_norm_eps"]
    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        prefix = f"gpt_neox.layers.{number}"
        # The rows lie as head, then query, key and value, then d_head.
        W = tensors[f"{prefix}.attention.query_key_value.weight"].reshape(n_heads, 3, d_head, -1)
        b = tensors[f"{prefix}.attention.query_key_value.bias"].reshape(n_heads, 3, d_head)
        layers.append(
            Layer(
                Norm(
                    tensors[f"{prefix}.input_layernorm.weight"],
                    tensors[f"{prefix}.input_layernorm.bias"],
                    eps,
                    True,
                ),
                *three(W[:, part].transpose(0, 2, 1) for part in range(3)),
                from_heads(tensors[f"{prefix}.attention.dense.weight"].T, d_head),
                *three(b[:, part] for part in range(3)),
                tensors[f"{prefix}.attention.dense.bias"],
                1 / math.sqrt(d_head),
                Norm(
                    tensors[f"{prefix}.post_attention_layernorm.weight"],
                    tensors[f"{prefix}.post_attention_layernorm.bias"],
                    eps,
                    True,
                ),
                plain_mlp(
                    tensors[f"{prefix}.mlp.dense_h_to_4h.weight"].T,
                    tensors[f"{prefix}.mlp.dense_h_to_4h.bias"],
                    tensors[f"{prefix}.mlp.dense_4h_to_h.weight"].T,
                    tensors[f"{prefix}.mlp.dense_4h_to_h.bias"],
                    config["hidden_act"],
                ),
            )
        )
    W_E = tensors["gpt_neox.embed_in.weight"]
    final = Norm(
        tensors["gpt_neox.final_layer_norm.weight"],
        tensors["gpt_neox.final_layer_norm.bias"],
        eps,
        True,
    )
    W_U = tensors["embed_out.weight"].T
    rope = config["rope_parameters"]
    return Weights(
        name,
        W_E,
        None,
        layers,
        final,
        W_U,
        np.zeros(W_U.shape[1]),
        config["use_parallel_residual"],
        rotated=int(d_head * rope["partial_rotary_factor"]),
        rotary_base=rope["rope_theta"],
    )


def read_opt(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """OPT: the table of positions begins with two rows that no position uses."""
    n_heads = config["num_attention_heads"]
    d_head = config["hidden_size"] // n_heads
    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.decoder.layers.{number}"
        attention = f"{prefix}.self_attn"
        layers.append(
            Layer(
                Norm(
                    tensors[f"{prefix}.self_attn_layer_norm.weight"],
                    tensors[f"{prefix}.self_attn_layer_norm.bias"],
                    1e-5,
                    True,
                ),
                *three(by_head(tensors[f"{attention}.{x}_proj.weight"].T, d_head) for x in "qkv"),
                from_heads(tensors[f"{attention}.out_proj.weight"].T, d_head),
                *three(
                    tensors[f"{attention}.{x}_proj.bias"].reshape(n_heads, d_head) for x in "qkv"
                ),
                tensors[f"{attention}.out_proj.bias"],
                1 / math.sqrt(d_head),
                Norm(
                    tensors[f"{prefix}.final_layer_norm.weight"],
                    tensors[f"{prefix}.final_layer_norm.bias"],
                    1e-5,
                    True,
                ),
                plain_mlp(
                    tensors[f"{prefix}.fc1.weight"].T,
                    tensors[f"{prefix}.fc1.bias"],
                    tensors[f"{prefix}.fc2.weight"].T,
                    tensors[f"{prefix}.fc2.bias"],
                    config["activation_function"],
                ),
            )
        )
    W_E = tensors["model.decoder.embed_tokens.weight"]
    final = Norm(
        tensors["model.decoder.final_layer_norm.weight"],
        tensors["model.decoder.final_layer_norm.bias"],
        1e-5,
        True,
    )
    W_U = unembedding(tensors, W_E)
    W_pos = tensors["model.decoder.embed_positions.weight"][2:]
    b_U = np.zeros(W_U.shape[1])
    return Weights(name, W_E, W_pos, layers, final, W_U, b_U, mlp_is_a_module=False)


def read_bigcode(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """GPT-BigCode: learned positions, and one key and one value for all query heads."""
    n_heads, d_model = config["n_head"], config["n_embd"]
    d_head = d_model // n_heads
    eps = config["layer_norm_epsilon"]
    layers: list[Layer] = []
    for number in range(config["n_layer"]):
        prefix = f"transformer.h.{number}"
        places = [d_model, d_model + d_head]
        W = np.split(tensors[f"{prefix}.attn.c_attn.weight"].T, places, axis=1)
        b = np.split(tensors[f"{prefix}.attn.c_attn.bias"], places)
        layers.append(
            Layer(
                Norm(tensors[f"{prefix}.ln_1.weight"], tensors[f"{prefix}.ln_1.bias"], eps, True),
                *three(by_head(part, d_head) for part in W),
                from_heads(tensors[f"{prefix}.attn.c_proj.weight"].T, d_head),
                *three(part.reshape(-1, d_head) for part in b),
                tensors[f"{prefix}.attn.c_proj.bias"],
                1 / math.sqrt(d_head),
                Norm(tensors[f"{prefix}.ln_2.weight"], tensors[f"{prefix}.ln_2.bias"], eps, True),
                plain_mlp(
                    tensors[f"{prefix}.mlp.c_fc.weight"].T,
                    tensors[f"{prefix}.mlp.c_fc.bias"],
                    tensors[f"{prefix}.mlp.c_proj.weight"].T,
                    tensors[f"{prefix}.mlp.c_proj.bias"],
                    config["activation_function"],
                ),
            )
        )
    W_E = tensors["transformer.wte.weight"]
    final = Norm(tensors["transformer.ln_f.weight"], tensors["transformer.ln_f.bias"], eps, True)
    W_U = unembedding(tensors, W_E)
    return Weights(
        name, W_E, tensors["transformer.wpe.weight"], layers, final, W_U, np.zeros(W_U.shape[1])
    )


def read_bloom(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """BLOOM: no positions are embedded; scores rise with the position of the key (ALiBi)."""
    n_heads = config["n_head"]
    assert n_heads & (n_heads - 1) == 0, "slopes are written for a power of two"
    d_head = config["hidden_size"] // n_heads
    eps = config["layer_norm_epsilon"]
    slopes = np.array([2 ** (-8 * (head + 1) / n_heads) for head in range(n_heads)])

    def norm(prefix: str) -> Norm:
        return Norm(tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"], eps, True)

    layers: list[Layer] = []
    for number in range(config["n_layer"]):
        prefix = f"transformer.h.{number}"
        W = tensors[f"{prefix}.self_attention.query_key_value.weight"].reshape(
            n_heads, 3, d_head, -1
        )
        b = tensors[f"{prefix}.self_attention.query_key_value.bias"].reshape(n_heads, 3, d_head)
        layers.append(
            Layer(
                norm(f"{prefix}.input_layernorm"),
                *three(W[:, part].transpose(0, 2, 1) for part in range(3)),
                from_heads(tensors[f"{prefix}.self_attention.dense.weight"].T, d_head),
                *three(b[:, part] for part in range(3)),
                tensors[f"{prefix}.self_attention.dense.bias"],
                1 / math.sqrt(d_head),
                norm(f"{prefix}.post_attention_layernorm"),
                plain_mlp(
                    tensors[f"{prefix}.mlp.dense_h_to_4h.weight"].T,
                    tensors[f"{prefix}.mlp.dense_h_to_4h.bias"],
                    tensors[f"{prefix}.mlp.dense_4h_to_h.weight"].T,
                    tensors[f"{prefix}.mlp.dense_4h_to_h.bias"],
                    "gelu_new",
                ),
                distance_slopes=slopes,
            )
        )
    W_E = tensors["transformer.word_embeddings.weight"]
    W_U = unembedding(tensors, W_E)
    return Weights(
        name,
        W_E,
        None,
        layers,
        norm("transformer.ln_f"),
        W_U,
        np.zeros(W_U.shape[1]),
        norm_of_embeddings=norm("transformer.word_embeddings_layernorm"),
    )


def read_gemma2(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """Gemma 2 without capped scores: norms of 1 + weight, also after attention and MLP."""
    assert config["attn_logit_softcapping"] is None
    d_head, eps = config["head_dim"], config["rms_norm_eps"]

    def norm(prefix: str) -> Norm:
        return Norm(1 + tensors[f"{prefix}.weight"], None, eps, False)

    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        layers.append(
            Layer(
                norm(f"{prefix}.input_layernorm"),
                *three(by_head(tensors[f"{attention}.{x}_proj.weight"].T, d_head) for x in "qkv"),
                from_heads(tensors[f"{attention}.o_proj.weight"].T, d_head),
                None,
                None,
                None,
                None,
                1 / math.sqrt(config["query_pre_attn_scalar"]),
                norm(f"{prefix}.pre_feedforward_layernorm"),
                gated_mlp(
                    tensors[f"{prefix}.mlp.gate_proj.weight"].T,
                    tensors[f"{prefix}.mlp.up_proj.weight"].T,
                    tensors[f"{prefix}.mlp.down_proj.weight"].T,
                    config["hidden_activation"],
                ),
                norm_after_attention=norm(f"{prefix}.post_attention_layernorm"),
                norm_after_mlp=norm(f"{prefix}.post_feedforward_layernorm"),
            )
        )
    W_U = tensors["model.embed_tokens.weight"].T
    W_E = W_U.T * math.sqrt(config["hidden_size"])
    base = config["rope_parameters"]["rope_theta"]
    b_U = np.zeros(W_U.shape[1])
    return Weights(
        name, W_E, None, layers, norm("model.norm"), W_U, b_U, rotated=d_head, rotary_base=base
    )


def read_phi(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """Phi: attention and MLP side by side behind one norm; a part of q and k is rotated."""
    n_heads = config["num_attention_heads"]
    d_head = config["hidden_size"] // n_heads
    eps = config["layer_norm_eps"]
    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        norm = Norm(
            tensors[f"{prefix}.input_layernorm.weight"],
            tensors[f"{prefix}.input_layernorm.bias"],
            eps,
            True,
        )
        layers.append(
            Layer(
                norm,
                *three(by_head(tensors[f"{attention}.{x}_proj.weight"].T, d_head) for x in "qkv"),
                from_heads(tensors[f"{attention}.dense.weight"].T, d_head),
                *three(
                    tensors[f"{attention}.{x}_proj.bias"].reshape(n_heads, d_head) for x in "qkv"
                ),
                tensors[f"{attention}.dense.bias"],
                1 / math.sqrt(d_head),
                norm,
                plain_mlp(
                    tensors[f"{prefix}.mlp.fc1.weight"].T,
                    tensors[f"{prefix}.mlp.fc1.bias"],
                    tensors[f"{prefix}.mlp.fc2.weight"].T,
                    tensors[f"{prefix}.mlp.fc2.bias"],
                    config["hidden_act"],
                ),
            )
        )
    rope = config["rope_parameters"]
    return Weights(
        name,
        tensors["model.embed_tokens.weight"],
        None,
        layers,
        Norm(
            tensors["model.final_layernorm.weight"],
            tensors["model.final_layernorm.bias"],
            eps,
            True,
        ),
        tensors["lm_head.weight"].T,
        tensors["lm_head.bias"],
        parallel=True,
        rotated=int(d_head * rope["partial_rotary_factor"]),
        rotary_base=rope["rope_theta"],
    )


def read_legacy(name: str, config: dict[str, Any], tensors: dict[str, Array]) -> Weights:
    """The files of old TransformerLens, which already have its names and shapes."""
    assert config["normalization_type"] == "LN", config["normalization_type"]
    assert config["attn_only"], "an old file with MLPs"
    eps = config["eps"]
    layers: list[Layer] = []
    for number in range(config["n_layers"]):
        prefix = f"blocks.{number}"
        layers.append(
            Layer(
                Norm(tensors[f"{prefix}.ln1.w"], tensors[f"{prefix}.ln1.b"], eps, True),
                tensors[f"{prefix}.attn.W_Q"],
                tensors[f"{prefix}.attn.W_K"],
                tensors[f"{prefix}.attn.W_V"],
                tensors[f"{prefix}.attn.W_O"],
                tensors[f"{prefix}.attn.b_Q"],
                tensors[f"{prefix}.attn.b_K"],
                tensors[f"{prefix}.attn.b_V"],
                tensors[f"{prefix}.attn.b_O"],
                1 / math.sqrt(config["d_head"]),
            )
        )
    W_U = tensors["unembed.W_U"]
    b_U = tensors.get("unembed.b_U", np.zeros(W_U.shape[1]))
    final = Norm(tensors["ln_final.w"], tensors["ln_final.b"], eps, True)
    return Weights(name, tensors["embed.W_E"], tensors["pos_embed.W_pos"], layers, final, W_U, b_U)
