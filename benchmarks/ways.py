"""What is run: ways to put tokens through a model, and the models and tokens that they get.

Weights are random, because speed does not depend on them. Tokens are drawn by Zipf's law: of 1024
tokens each then has 6.5 earlier copies (on the Pile 5 to 7), so statistics of repeated tokens cost
what they cost on text.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
)

from headcount import attention_statistics as statistics_of_tensors
from headcount import watch
from headcount.schemas.formulas import evaluate
from headcount.schemas.measured_heads import find_heads
from headcount.schemas.scans.scan import PRECISIONS
from headcount.schemas.statistics import STATISTICS
from headcount.workers.bridge.bridge import bridge_of
from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.engine.fused_engine import FusedEngine
from headcount.workers.engine.number_formats import HALVES, linears_in
from headcount.workers.engine.prediction_inputs import CHUNK_BYTES
from headcount.workers.engine.token_pairs import find_matches
from headcount.workers.gradients.gradient_engine import GradientEngine
from headcount.workers.loading import load_model
from headcount.workers.measurements.batch import Requested, collect, launch
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.info.description import describe
from headcount.workers.model.layer_weights import READABLE_WEIGHTS, attention_weights
from headcount.workers.model.model import Model

Run = Callable[[Tensor], object]
"""Takes tokens `[batch pos]`."""

Way = Callable[[Path, str, str], Run]
"""Takes a model's directory, a device and a precision."""

STANDARD = STATISTICS.select("standard")

CACHED = ("resid_pre", "resid_post", "q", "k", "v", "z", "pattern", "attn_scores")
"""Activations that `run_with_cache` keeps of every layer."""


LAYERS_OF_TENSORS = 10
"""One attention alone would be too short to be timed."""


def bare(path: Path, device: str, precision: str) -> Run:
    """Hugging Face's forward pass: eager modules, SDPA, no unembedding; measures nothing."""
    return _forward(
        _hugging_face(path, device, precision), device, _factors_of_bare(device, precision)
    )


def bare_same_products(path: Path, device: str, precision: str) -> Run:
    """The same forward pass, its linear layers multiplied by the library that headcount asks."""
    linears = PRECISIONS[precision].linears
    return _forward(_hugging_face(path, device, precision), device, linears_format=linears)


def product(path: Path, device: str, precision: str) -> Run:
    """No model: one square matrix product with a row for each token, for the machine's peak."""

    def run(tokens: Tensor) -> object:
        factor = _square_factor(tokens.shape[1], tokens.device)
        with linears_in(PRECISIONS[precision].linears, device):
            return F.linear(factor, factor)

    return run


@cache
def _square_factor(rows: int, device: torch.device) -> Tensor:
    return torch.randn(rows, rows, generator=torch.Generator().manual_seed(0)).to(device)


def compiled(path: Path, device: str, precision: str, backend: str = "inductor") -> Run:
    """The same forward pass under torch.compile."""
    model = _hugging_face(path, device, precision)
    # Every timed shape is compiled for itself, as a user who wants speed would do.
    compiled_model = torch.compile(model, dynamic=False, backend=backend)
    return _forward(compiled_model, device, _factors_of_bare(device, precision))


def fused(path: Path, device: str, precision: str) -> Run:
    """headcount's fused engine, all standard statistics."""
    engine = FusedEngine(load_model(describe(path), "raw", device), precision)
    heads = find_heads("all", "all", engine.model.info)
    requested = Requested({STATISTICS.field: STANDARD}, heads)
    # The first pass learns which questions the statistics ask of a pattern; warming up covers that.
    return lambda tokens: collect(launch(engine, requested, tokens))


def bare_loss(path: Path, device: str, precision: str) -> Run:
    """Hugging Face's forward pass with the mean loss of the next tokens, some rows at a time."""
    model = _hugging_face(path, device, precision, AutoModelForCausalLM)
    unembedding = model.get_output_embeddings()
    rows_of_chunk = CHUNK_BYTES // (4 * unembedding.out_features)

    def run(tokens: Tensor) -> object:
        stream = model.base_model(tokens, use_cache=False).last_hidden_state[:, :-1]
        rows = zip(
            stream.flatten(0, 1).split(rows_of_chunk),
            tokens[:, 1:].flatten().split(rows_of_chunk),
            strict=True,
        )
        losses = [F.cross_entropy(unembedding(row), token, reduction="none") for row, token in rows]
        return torch.cat(losses).mean()

    return run


def gradients(path: Path, device: str, precision: str) -> Run:
    """headcount's gradient engine, gradients alone: forward and backward."""
    return _effects(path, device, precision, "gradient_norm")


def direct_effects(path: Path, device: str, precision: str) -> Run:
    """headcount's gradient engine, direct effects alone: no way back through layers."""
    return _effects(path, device, precision, "direct_effect")


def all_effects(path: Path, device: str, precision: str) -> Run:
    """headcount's gradient engine, all effects on the loss."""
    return _effects(path, device, precision, "effects")


def _effects(path: Path, device: str, precision: str, statistics: str) -> Run:
    engine = GradientEngine(load_model(describe(path), "raw", device), precision)
    heads = find_heads("all", "all", engine.model.info)
    requested = Requested({STATISTICS.field: STATISTICS.select([statistics])}, heads)

    def run(tokens: Tensor) -> object:
        # Tensors of inference mode can never have gradients.
        with torch.inference_mode(False), torch.no_grad():
            return collect(launch(engine, requested, tokens.clone()))

    return run


def training_step(path: Path, device: str, precision: str) -> Run:
    """A step of a training: forward, backward, AdamW."""
    model = _hugging_face(path, device, precision, AutoModelForCausalLM)
    optimizer = torch.optim.AdamW(model.train().requires_grad_().parameters(), 1e-3)

    def run(tokens: Tensor) -> object:
        # Tensors of inference mode can never have gradients.
        with torch.inference_mode(False):
            batch = tokens.clone()
            model(batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def watching(path: Path, device: str, precision: str) -> Run:
    """`headcount.watch`: what a callback does in a training at the steps that it measures."""
    model = _hugging_face(path, device, precision, AutoModelForCausalLM).train()
    steps = count()
    rang: list[object] = []  # the weights stay as they are, which rings

    def run(tokens: Tensor) -> object:
        with torch.inference_mode(False):
            batch = tokens.clone()
            inputs = {"input_ids": batch, "labels": batch}
            return watch(model, batch, next(steps), batch=inputs, on_alarm=rang.append)

    return run


def attention(path: Path, device: str, precision: str) -> Run:
    """PyTorch's `scaled_dot_product_attention` of random q, k and v, for ten layers."""
    call = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return _of_tensors(path, device, call)


def attention_statistics(path: Path, device: str, precision: str) -> Run:
    """`headcount.attention_statistics` of the same tensors, all standard statistics."""
    return _of_tensors(path, device, statistics_of_tensors)


def _of_tensors(path: Path, device: str, call: Callable[..., object]) -> Run:
    def run(tokens: Tensor) -> object:
        factors = _random_factors(path, device, *tokens.shape)
        return [call(*factors) for _ in range(LAYERS_OF_TENSORS)]

    return run


@cache
def _random_factors(path: Path, device: str, batch: int, n_ctx: int) -> list[Tensor]:
    """q, k and v of a model's heads: `[batch head pos d_head]`."""
    config = AutoConfig.from_pretrained(path)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    generator = torch.Generator().manual_seed(0)
    d_head = config.hidden_size // heads
    return [
        torch.randn(batch, n_heads, n_ctx, d_head, generator=generator).to(device)
        for n_heads in (heads, kv_heads, kv_heads)
    ]


def run_with_cache(path: Path, device: str, precision: str) -> Run:
    """TransformerLens's run_with_cache, then the same statistics from the cache, all in float32."""
    model = load_model(describe(path), "raw", device)
    layers = range(model.info.n_layers)
    hook_names = {layer: _cached_hook_names(model, layer) for layer in layers}
    # Without a filter the cache would hold the MLPs' activations too.
    names_filter = [name for layer in layers for name in hook_names[layer].values()]

    def run(tokens: Tensor) -> object:
        _, cache = bridge_of(model).running.run_with_cache(tokens, names_filter=names_filter)
        matches = find_matches(tokens)
        measured: list[Tensor] = []
        for layer in layers:
            cached = {name: cache[hook_name] for name, hook_name in hook_names[layer].items()}
            activations = {**_layer_activations(model, layer, cached), **matches}
            measured += [evaluate(statistic.function, activations) for statistic in STANDARD]
        return measured

    return run


def _cached_hook_names(model: Model, layer: int) -> dict[str, str]:
    """The hook of each cached activation: queries and keys as attention multiplies them."""
    bridge = bridge_of(model)
    hook_names = {name: bridge.hook_name(name, layer) for name in CACHED}
    for name in ("q", "k"):
        rotated = bridge.hook_name(f"rot_{name}", layer)
        if bridge.has_hook(rotated):
            hook_names[name] = rotated
    return hook_names


def _layer_activations(model: Model, layer: int, cached: dict[str, Tensor]) -> dict[str, Any]:
    """What statistics read of a layer, made of what the cache holds of it."""
    activations: dict[str, Any] = dict(cached)
    for name in ("k", "v"):
        # Several query heads may share one key head; statistics want one for each query head.
        repeats = model.info.n_heads // cached[name].shape[2]
        activations[name] = cached[name].repeat_interleave(repeats, 2)
    q = activations["q"].transpose(1, 2)
    k = activations["k"].transpose(1, 2)
    activations["pattern"] = DensePattern(
        cached["pattern"], cached["attn_scores"], q, k, AttentionFacts(model.scale(layer))
    )
    return activations | attention_weights(model, layer, READABLE_WEIGHTS)


WAYS: dict[str, Way] = {
    way.__name__: way
    for way in (
        *(bare, bare_same_products, compiled, fused, run_with_cache, product),
        *(bare_loss, gradients, direct_effects, all_effects, training_step, watching),
        *(attention, attention_statistics),
    )
}


def bare_format(precision: str) -> str:
    """The number format in which Hugging Face's forward pass stands beside one of our precisions.

    Hugging Face does not have float16x2; the faster float16 stands for it.
    """
    return PRECISIONS[precision].linears.removesuffix("x2")


def _hugging_face(path: Path, device: str, precision: str, model_class: Any = AutoModel) -> Any:  # noqa: ANN401 (any model of transformers)
    """A model, by default without its unembedding. A half precision is the format of the whole
    model, the residual stream included.
    """
    dtype = HALVES.get(bare_format(precision), torch.float32)
    model = model_class.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval().requires_grad_(False).to(device)


def _factors_of_bare(device: str, precision: str) -> str:
    """The mode of products in which a bare pass runs; empty for PyTorch's own."""
    # TF32 is not a format of tensors: it is a mode of products that has to be switched on.
    return "tf32" if device == "cuda" and bare_format(precision) == "tf32" else ""


def _forward(model: Callable[..., object], device: str, linears_format: str) -> Run:
    """A forward pass whose linear layers multiply in a format."""

    def run(tokens: Tensor) -> object:
        with linears_in(linears_format, device):
            return model(tokens, use_cache=False)

    return run


def make_gpt2_small(path: Path, **sizes: int) -> Path:
    """A GPT-2 of GPT-2 small's shape, or of other sizes."""
    fields: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, **sizes}
    return _make(path, GPT2Config(**fields))


def make_llama(path: Path, **sizes: int) -> Path:
    """A Llama of any shape: rotary positions, RMSNorm, SwiGLU."""
    fields: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, **sizes}
    return _make(path, LlamaConfig(**fields))


def _make(path: Path, config: PreTrainedConfig) -> Path:
    """A model with random weights, saved in a directory."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def draw_tokens(path: Path, batch: int, n_ctx: int) -> Tensor:
    """Tokens `[batch pos]` for a model; token r has a probability in proportion to 1/(r+1)."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    probabilities = 1 / torch.arange(1, config["vocab_size"] + 1, dtype=torch.float64)
    # The process that is weighed gets the same tokens as the one that is timed.
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(probabilities, batch * n_ctx, replacement=True, generator=generator)
    return tokens.view(batch, n_ctx)
