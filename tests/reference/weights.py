"""A model's weights in float64, in TransformerLens's shapes, read from its files.

Projections are `[head d_model d_head]`, or `[head d_head d_model]` for W_O; x @ W + b everywhere.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

Array = np.ndarray


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
    b_U: Array | float = 0.0
    parallel: bool = False
    """Whether the MLP reads the same stream as the attention."""
    rotated: int = 0
    """How many of the first coordinates of q and k are rotated."""
    rotary_base: float = 10000.0
    norm_of_embeddings: Norm | None = None
    final_soft_cap: float | None = None
    """A logit x becomes cap tanh(x/cap)."""
    n_heads: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_heads = len(self.layers[0].W_Q)

    @property
    def rotary(self) -> bool:
        return self.rotated > 0

    def shared(self, x: Array) -> Array:
        """Repeat what query heads share: `[key_head …]` becomes `[head …]`."""
        return np.repeat(x, self.n_heads // len(x), axis=0)

    def logits(self, stream: Array) -> Array:
        """`[pos d_model]` becomes `[pos d_vocab]`."""
        logits, cap = self.final_norm(stream) @ self.W_U + self.b_U, self.final_soft_cap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def effective_positions(self) -> Array | None:
        """EPE[j] = W_pos[j] + MLP_0(W_pos[j]), without the norm; W_pos[j] where there is no MLP."""
        if self.W_pos is None:
            return None
        mlp = self.layers[0].mlp
        return self.W_pos if mlp is None else self.W_pos + mlp(self.W_pos)


# Activation functions


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


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


# Files


def read_weights(path: Path) -> Weights:
    """The weights of a model directory."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    readers = {
        "gpt2": read_gpt2,
        "gpt_bigcode": read_bigcode,
        "bloom": read_bloom,
        "gemma2": read_gemma2,
        "granite": read_granite,
        "phi": read_phi,
        "gpt_neo": read_gpt_neo,
        "gpt_neox": read_neox,
        "llama": read_llama,
        "qwen2": read_llama,
        "qwen3": read_llama,
        "mistral": read_llama,
        "gpt_oss": read_llama,
        "opt": read_opt,
    }
    read = readers[config["model_type"]] if "model_type" in config else read_legacy
    return read(path.name, config, read_tensors(path))


def read_tensors(path: Path) -> dict[str, Array]:
    (file,) = (*path.glob("*.safetensors"), *path.glob("*final.pth"))
    is_old = file.suffix == ".pth"
    stored = torch.load(file, "cpu", weights_only=True) if is_old else load_file(file)
    return {name: tensor.double().numpy() for name, tensor in stored.items()}


Three = tuple[Sequence[Array], Sequence[Array | None]]
"""W and b of queries, keys and values."""


@dataclass
class Part:
    """The modules of a part of a model, by what follows the part's own name."""

    tensors: dict[str, Array]
    name: str
    eps: float
    """Of its norms."""
    d_head: int = 0
    subtracts_mean: bool = True
    """Whether its norms do."""
    one_more: bool = False
    """Whether a norm multiplies by 1 + weight."""
    stores_transposed: bool = True
    """Whether a linear layer is stored as `[to from]`, as most are."""

    def W(self, module: str) -> Array:
        """The matrix of a linear layer, `[from to]`."""
        weight = self.tensors[f"{self.name}.{module}.weight"]
        return weight.T if self.stores_transposed else weight

    def b(self, module: str) -> Array | None:
        return self.tensors.get(f"{self.name}.{module}.bias")

    def norm(self, module: str) -> Norm:
        weight = self.tensors[f"{self.name}.{module}.weight"]
        return Norm(weight + self.one_more, self.b(module), self.eps, self.subtracts_mean)

    def norm_if_any(self, module: str) -> Norm | None:
        return self.norm(module) if f"{self.name}.{module}.weight" in self.tensors else None

    def mlp(self, first: str, last: str, name: str) -> Callable[[Array], Array]:
        function, W_in, W_out = FUNCTIONS[name], self.W(first), self.W(last)
        b_in, b_out = self.b(first), self.b(last)
        return lambda x: function(x @ W_in + b_in) @ W_out + b_out

    def gated_mlp(self, name: str) -> Callable[[Array], Array]:
        W_gate, W_in, W_out = (self.W(f"mlp.{x}_proj") for x in ("gate", "up", "down"))
        function = FUNCTIONS[name]
        return lambda x: (function(x @ W_gate) * (x @ W_in)) @ W_out

    def three(self, modules: str) -> Three:
        """Queries, keys and values that have a layer each."""
        names = [modules.format(x) for x in "qkv"]
        biases = [self.b(name) for name in names]
        return (
            [by_head(self.W(name), self.d_head) for name in names],
            [None if bias is None else bias.reshape(-1, self.d_head) for bias in biases],
        )

    def side_by_side(self, module: str, ends: int | list[int]) -> Three:
        """Queries, keys and values that lie side by side in one layer."""
        W, b = self.W(module), self.tensors[f"{self.name}.{module}.bias"]
        return (
            [by_head(part, self.d_head) for part in np.split(W, ends, axis=1)],
            [part.reshape(-1, self.d_head) for part in np.split(b, ends)],
        )

    def in_turn(self, module: str) -> Three:
        """Queries, keys and values that lie in one layer as head, then q, k, v, then d_head."""
        W, b = self.W(module), self.tensors[f"{self.name}.{module}.bias"]
        by_subset = W.reshape(len(W), -1, 3, self.d_head).transpose(2, 1, 0, 3)
        return list(by_subset), list(b.reshape(-1, 3, self.d_head).transpose(1, 0, 2))

    def layer(
        self,
        three: Three,
        output: str,
        norms: tuple[str, str],
        mlp: Callable[[Array], Array],
        **others: Any,
    ) -> Layer:
        """A layer: q, k and v, the module of W_O, the norms before attention and MLP."""
        (W_Q, W_K, W_V), (b_Q, b_K, b_V) = three
        # `[head · d_head, d_model]` becomes `[head d_head d_model]`.
        matrix = self.W(output)
        W_O = matrix.reshape(-1, self.d_head, matrix.shape[-1])
        before_attention, before_mlp = (self.norm(name) for name in norms)
        return Layer(
            *(before_attention, W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, self.b(output)),
            **{"scale": 1 / math.sqrt(self.d_head), "norm_before_mlp": before_mlp, "mlp": mlp}
            | others,
        )


def by_head(matrix: Array, d_head: int) -> Array:
    """`[d_model, head · d_head]` becomes `[head d_model d_head]`."""
    d_model, width = matrix.shape
    return matrix.reshape(d_model, width // d_head, d_head).transpose(1, 0, 2)


Config = dict[str, Any]
Tensors = dict[str, Array]


def like_gpt2(name: str, tensors: Tensors, layers: list[Layer], eps: float) -> Weights:
    """Embeddings and a last norm of the names of GPT-2."""
    W_E, W_pos = tensors["transformer.wte.weight"], tensors["transformer.wpe.weight"]
    final = Part(tensors, "transformer", eps).norm("ln_f")
    return Weights(name, W_E, W_pos, layers, final, tensors.get("lm_head.weight", W_E).T)


def read_gpt2(name: str, config: Config, tensors: Tensors) -> Weights:
    d_head, eps = config["n_embd"] // config["n_head"], config["layer_norm_epsilon"]
    layers: list[Layer] = []
    for number in range(config["n_layer"]):
        part = Part(tensors, f"transformer.h.{number}", eps, d_head, stores_transposed=False)
        three = part.side_by_side("attn.c_attn", 3)
        mlp = part.mlp("mlp.c_fc", "mlp.c_proj", config["activation_function"])
        layers.append(part.layer(three, "attn.c_proj", ("ln_1", "ln_2"), mlp))
        if config["scale_attn_by_inverse_layer_idx"]:
            layers[-1].scale /= number + 1
    return like_gpt2(name, tensors, layers, eps)


def read_gpt_neo(name: str, config: Config, tensors: Tensors) -> Weights:
    """GPT-Neo: scores are not scaled, and queries, keys and values have no biases."""
    d_head, eps = config["hidden_size"] // config["num_heads"], config["layer_norm_epsilon"]
    layers: list[Layer] = []
    for number in range(config["num_layers"]):
        part = Part(tensors, f"transformer.h.{number}", eps, d_head)
        three = part.three("attn.attention.{}_proj")
        mlp = part.mlp("mlp.c_fc", "mlp.c_proj", config["activation_function"])
        output = "attn.attention.out_proj"
        layers.append(part.layer(three, output, ("ln_1", "ln_2"), mlp, scale=1.0))
    return like_gpt2(name, tensors, layers, eps)


def read_bigcode(name: str, config: Config, tensors: Tensors) -> Weights:
    """GPT-BigCode: learned positions, and one key and one value for all query heads."""
    d_model, eps = config["n_embd"], config["layer_norm_epsilon"]
    d_head = d_model // config["n_head"]
    layers: list[Layer] = []
    for number in range(config["n_layer"]):
        part = Part(tensors, f"transformer.h.{number}", eps, d_head)
        three = part.side_by_side("attn.c_attn", [d_model, d_model + d_head])
        mlp = part.mlp("mlp.c_fc", "mlp.c_proj", config["activation_function"])
        layers.append(part.layer(three, "attn.c_proj", ("ln_1", "ln_2"), mlp))
    return like_gpt2(name, tensors, layers, eps)


def like_llama(
    name: str, config: Config, tensors: Tensors, layers: list[Layer], last: Part
) -> Weights:
    """Embeddings, a last norm and rotations of the names of Llama."""
    W_E = tensors["model.embed_tokens.weight"]
    W_U = tensors.get("lm_head.weight", W_E).T
    base, width = config["rope_parameters"]["rope_theta"], layers[0].W_Q.shape[-1]
    final = last.norm("norm")
    return Weights(name, W_E, None, layers, final, W_U, rotated=width, rotary_base=base)


def window_of(config: Config, number: int) -> int | None:
    """How many keys a query of a layer sees; layers may be of two kinds."""
    types = config.get("layer_types")
    slides = types[number] == "sliding_attention" if types else config["model_type"] == "mistral"
    return config["sliding_window"] if slides else None


def read_llama(name: str, config: Config, tensors: Tensors) -> Weights:
    """Llama, Mistral (a window), Qwen2 (biases of queries, keys and values), Qwen3 (norms of
    queries and keys) and GPT-OSS (biases, learned sinks, a window in some layers).
    """
    d_head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    last = Part(tensors, "model", config["rms_norm_eps"], d_head, subtracts_mean=False)
    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        part = replace(last, name=f"model.layers.{number}")
        sinks = tensors.get(f"{part.name}.self_attn.sinks")
        layers.append(
            part.layer(
                part.three("self_attn.{}_proj"),
                "self_attn.o_proj",
                ("input_layernorm", "post_attention_layernorm"),
                part.gated_mlp(config["hidden_act"]) if sinks is None else experts(part, config),
                q_norm=part.norm_if_any("self_attn.q_norm"),
                k_norm=part.norm_if_any("self_attn.k_norm"),
                window=window_of(config, number),
                sink=sinks,
            )
        )
    return like_llama(name, config, tensors, layers, last)


def read_granite(name: str, config: Config, tensors: Tensors) -> Weights:
    """Granite: Llama, whose embeddings, layers and logits are multiplied, written into weights."""
    weights = read_llama(name, config, tensors)

    def multiplied(mlp: Callable[[Array], Array]) -> Callable[[Array], Array]:
        return lambda x: mlp(x) * config["residual_multiplier"]

    for layer in weights.layers:
        assert layer.mlp is not None
        layer.scale, layer.mlp = config["attention_multiplier"], multiplied(layer.mlp)
        layer.W_O = layer.W_O * config["residual_multiplier"]
    weights.W_U = weights.W_U / config["logits_scaling"]
    return replace(weights, W_E=weights.W_E * config["embedding_multiplier"])


def read_gemma2(name: str, config: Config, tensors: Tensors) -> Weights:
    """Gemma 2: norms of 1 + weight, also after attention and MLP; capped scores and logits, and a
    window in some layers.
    """
    last = Part(tensors, "model", config["rms_norm_eps"], config["head_dim"], False, one_more=True)
    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        part = replace(last, name=f"model.layers.{number}")
        layers.append(
            part.layer(
                part.three("self_attn.{}_proj"),
                "self_attn.o_proj",
                ("input_layernorm", "pre_feedforward_layernorm"),
                part.gated_mlp(config["hidden_activation"]),
                scale=1 / math.sqrt(config["query_pre_attn_scalar"]),
                norm_after_attention=part.norm("post_attention_layernorm"),
                norm_after_mlp=part.norm("post_feedforward_layernorm"),
                soft_cap=config["attn_logit_softcapping"],
                window=window_of(config, number),
            )
        )
    weights = like_llama(name, config, tensors, layers, last)
    weights.final_soft_cap = config["final_logit_softcapping"]
    return replace(weights, W_E=weights.W_E * math.sqrt(config["hidden_size"]))


def experts(part: Part, config: Config) -> Callable[[Array], Array]:
    """The best experts of a token, weighted by the softmax of their scores.

    Columns of gate and input lie in turn, and both are clipped.
    """
    names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
    W_in, b_in, W_out, b_out = (part.tensors[f"{part.name}.mlp.experts.{x}"] for x in names)
    W_router, b_router = part.W("mlp.router"), part.b("mlp.router")
    count, alpha, limit = (
        config[name] for name in ("num_experts_per_tok", "swiglu_alpha", "swiglu_limit")
    )

    def expert(x: Array, i: int) -> Array:
        product = x @ W_in[i] + b_in[i]
        gate, up = np.minimum(product[::2], limit), np.clip(product[1::2], -limit, limit)
        return (up + 1) * gate / (1 + np.exp(-alpha * gate)) @ W_out[i] + b_out[i]

    def of_token(x: Array) -> Array:
        scores = x @ W_router + b_router
        best = np.argsort(-scores)[:count]
        shares = np.exp(scores[best] - scores[best].max())
        return sum(shares[j] * expert(x, i) for j, i in enumerate(best)) / shares.sum()

    return lambda stream: np.array([of_token(x) for x in stream])


def partly_rotated(d_head: int, rope: dict[str, Any]) -> dict[str, Any]:
    width = int(d_head * rope["partial_rotary_factor"])
    return {"rotated": width, "rotary_base": rope["rope_theta"]}


def read_neox(name: str, config: Config, tensors: Tensors) -> Weights:
    """GPT-NeoX: a part of each query and key is rotated; attention and MLP may be parallel."""
    d_head = config["hidden_size"] // config["num_attention_heads"]
    last = Part(tensors, "gpt_neox", config["layer_norm_eps"], d_head)
    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        part = replace(last, name=f"gpt_neox.layers.{number}")
        three = part.in_turn("attention.query_key_value")
        norms = ("input_layernorm", "post_attention_layernorm")
        mlp = part.mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", config["hidden_act"])
        layers.append(part.layer(three, "attention.dense", norms, mlp))
    W_E, W_U = tensors["gpt_neox.embed_in.weight"], tensors["embed_out.weight"].T
    return Weights(
        *(name, W_E, None, layers, last.norm("final_layer_norm"), W_U),
        parallel=config["use_parallel_residual"],
        **partly_rotated(d_head, config["rope_parameters"]),
    )


def read_phi(name: str, config: Config, tensors: Tensors) -> Weights:
    """Phi: attention and MLP side by side behind one norm; a part of q and k is rotated."""
    d_head = config["hidden_size"] // config["num_attention_heads"]
    last = Part(tensors, "model", config["layer_norm_eps"], d_head)
    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        part = replace(last, name=f"model.layers.{number}")
        three, norms = part.three("self_attn.{}_proj"), ("input_layernorm", "input_layernorm")
        mlp = part.mlp("mlp.fc1", "mlp.fc2", config["hidden_act"])
        layers.append(part.layer(three, "self_attn.dense", norms, mlp))
    W_E, W_U = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"].T
    return Weights(
        *(name, W_E, None, layers, last.norm("final_layernorm"), W_U, tensors["lm_head.bias"]),
        parallel=True,
        **partly_rotated(d_head, config["rope_parameters"]),
    )


def read_opt(name: str, config: Config, tensors: Tensors) -> Weights:
    """OPT: the table of positions begins with two rows that no position uses."""
    d_head = config["hidden_size"] // config["num_attention_heads"]
    last = Part(tensors, "model.decoder", 1e-5, d_head)
    layers: list[Layer] = []
    for number in range(config["num_hidden_layers"]):
        part = replace(last, name=f"model.decoder.layers.{number}")
        three, norms = part.three("self_attn.{}_proj"), ("self_attn_layer_norm", "final_layer_norm")
        mlp = part.mlp("fc1", "fc2", config["activation_function"])
        layers.append(part.layer(three, "self_attn.out_proj", norms, mlp))
    W_E = tensors["model.decoder.embed_tokens.weight"]
    W_pos = tensors["model.decoder.embed_positions.weight"][2:]
    W_U, final = tensors.get("lm_head.weight", W_E).T, last.norm("final_layer_norm")
    return Weights(name, W_E, W_pos, layers, final, W_U)


def read_bloom(name: str, config: Config, tensors: Tensors) -> Weights:
    """BLOOM: no positions are embedded; scores rise with the position of the key (ALiBi)."""
    n_heads = config["n_head"]
    assert n_heads & (n_heads - 1) == 0, "slopes are written for a power of two"
    slopes = np.array([2 ** (-8 * (head + 1) / n_heads) for head in range(n_heads)])
    d_head = config["hidden_size"] // n_heads
    last = Part(tensors, "transformer", config["layer_norm_epsilon"], d_head)
    layers: list[Layer] = []
    for number in range(config["n_layer"]):
        part = replace(last, name=f"transformer.h.{number}")
        three = part.in_turn("self_attention.query_key_value")
        norms = ("input_layernorm", "post_attention_layernorm")
        mlp = part.mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "gelu_new")
        output = "self_attention.dense"
        layers.append(part.layer(three, output, norms, mlp, distance_slopes=slopes))
    W_E = tensors["transformer.word_embeddings.weight"]
    W_U, final = tensors.get("lm_head.weight", W_E).T, last.norm("ln_f")
    of_embeddings = last.norm("word_embeddings_layernorm")
    return Weights(name, W_E, None, layers, final, W_U, norm_of_embeddings=of_embeddings)


def read_legacy(name: str, config: Config, tensors: Tensors) -> Weights:
    """The files of old TransformerLens, which already have its names and shapes."""
    assert config["normalization_type"] == "LN", config["normalization_type"]
    assert config["attn_only"], "an old file with MLPs"

    def norm(place: str) -> Norm:
        return Norm(tensors[f"{place}.w"], tensors[f"{place}.b"], config["eps"], True)

    layers: list[Layer] = []
    for number in range(config["n_layers"]):
        block = f"blocks.{number}"
        names = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
        stored: dict[str, Any] = {x: tensors[f"{block}.attn.{x}"] for x in names}
        layers.append(Layer(norm(f"{block}.ln1"), **stored, scale=1 / math.sqrt(config["d_head"])))
    W_E, W_pos, W_U = (tensors[x] for x in ("embed.W_E", "pos_embed.W_pos", "unembed.W_U"))
    b_U = tensors.get("unembed.b_U", 0.0)
    return Weights(name, W_E, W_pos, layers, norm("ln_final"), W_U, b_U)
