"""What engines can do with a cache, and how one tells them.

Where it stands: vLLM `vllm/config/cache.py` (`cache_dtype`, `kv_cache_dtype_skip_layers`);
llama.cpp `common/arg.cpp` (`--cache-type-k`, `--cache-type-v`, which needs `--flash-attn on`);
mlx-lm `mlx_lm/generate.py` (`--kv-bits`, `--kv-group-size`, `--quantized-kv-start`), which reads
2,048 tokens of a prompt before it quantises their cache; transformers `layer_types` and
`sliding_window`; DuoAttention `load_attn_pattern`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from headcount.exports.cache_plan.plans import WHOLE, CachePlan, CacheShape, Choice, KVHead
from headcount.exports.shared.registry import sparsity_of
from headcount.workers.model.info.layer_types import has_sliding_layers, layer_types_problem
from headcount.workers.model.model_info import ModelInfo

Unit = Literal["KV head", "layer", "model"]


@dataclass(frozen=True)
class Alternative:
    """Something that each unit of a cache may get."""

    unit: Unit  # the smallest part that can have it alone
    window: bool = False
    keys: str | None = None
    values: str | None = None

    @property
    def kind(self) -> str:
        """What it is, in words."""
        parts = ["window"] * self.window
        parts += [f"keys {self.keys}"] * (self.keys is not None)
        parts += [f"values {self.values}"] * (self.values is not None)
        return ", ".join(parts)

    def on(self, heads: tuple[KVHead, ...]) -> Choice:
        """The choice of it for some heads."""
        return Choice(self.kind, heads, self.window, self.keys, self.values)


@dataclass(frozen=True, kw_only=True)
class CacheEngine:
    """An engine: what it can express, and how it is told."""

    name: str
    takes: str  # what it can do, in words
    alternatives: tuple[Alternative, ...]
    sink: int = 0  # first keys that its windows keep
    whole: int = 0  # first positions that its formats leave as they are
    reads_prompts: bool = False  # with the whole cache, which is cut only then
    rounds_prompts: bool = False  # alone: what is read behind a prompt keeps its 16 bits
    flags: Callable[[CachePlan, CacheShape], str] | None = None  # of its command line
    files: Callable[[CachePlan, CacheShape], Mapping[str, bytes]] | None = None
    problem: Callable[[ModelInfo], str | None] = lambda _: None
    """Why it cannot run a model with a plan; None if it can."""

    def choices(self, shape: CacheShape) -> list[Choice]:
        """Every single choice; none if it can only treat all of a model alike."""
        found: list[Choice] = []
        for alternative in self.alternatives:
            if alternative.unit == "KV head":
                found += [alternative.on((head,)) for head in shape.kv_heads]
            elif alternative.unit == "layer":
                found += [alternative.on(heads) for heads in layers_of(shape).values()]
        return found

    def uniform(self, shape: CacheShape) -> list[CachePlan]:
        """The plans that treat all heads alike: with or without each alternative."""
        untouched = CachePlan.untouched(shape)
        of_all = [each.on(shape.kv_heads) for each in self.alternatives]
        plans: dict[CachePlan, None] = {}
        for chosen in product((False, True), repeat=len(of_all)):
            members = [choice for choice, is_in in zip(of_all, chosen, strict=True) if is_in]
            plans[untouched.with_choices(shape, members)] = None
        del plans[untouched]
        return [*plans]


def layers_of(shape: CacheShape) -> dict[int, tuple[KVHead, ...]]:
    """The KV heads of each layer."""
    layers: dict[int, tuple[KVHead, ...]] = {}
    for layer, head in shape.kv_heads:
        layers[layer] = (*layers.get(layer, ()), (layer, head))
    return layers


def _windows(plan: CachePlan, shape: CacheShape) -> set[KVHead]:
    heads = zip(shape.kv_heads, plan.caches, strict=True)
    return {head for head, cache in heads if cache.window}


def _config_of_transformers(plan: CachePlan, shape: CacheShape) -> dict[str, bytes]:
    """Fields for config.json. A layer that does not attend keeps the type that it has there."""
    windows = _windows(plan, shape)
    types = ("full_attention", "sliding_attention")
    content = {
        "layer_types": [types[heads[0] in windows] for heads in layers_of(shape).values()],
        "sliding_window": shape.recent,
        "use_sliding_window": True,
    }
    return {"config.json": json.dumps(content, indent=1).encode()}


def _pattern_of_duo(plan: CachePlan, shape: CacheShape) -> dict[str, bytes]:
    """1 for a KV head that keeps everything, 0 for one that streams, `[layer kv_head]`."""
    n_layers = 1 + max(layer for layer, _ in shape.kv_heads)
    scores = np.zeros((n_layers, shape.n_kv_heads))
    windows = _windows(plan, shape)
    for layer, head in shape.kv_heads:
        scores[layer, head] = (layer, head) not in windows
    text = io.StringIO()
    np.savetxt(text, scores, fmt="%d", delimiter="\t")
    config = {
        "sink_size": shape.sink,
        "recent_size": shape.recent,
        # What its `sparsify_attention_heads` is told, so that just these heads stream.
        "sparsity": sparsity_of(int((scores == 0).sum()), scores.size),
    }
    return {
        "full_attention_heads.tsv": text.getvalue().encode(),
        "config.json": json.dumps(config, indent=1).encode(),
    }


def _flags_of_vllm(plan: CachePlan, shape: CacheShape) -> str:
    heads = zip(shape.kv_heads, plan.caches, strict=True)
    whole = sorted({layer for (layer, _), cache in heads if cache.keys == WHOLE})
    if len(whole) == len(layers_of(shape)):
        return "--kv-cache-dtype auto"
    skipped = f" --kv-cache-dtype-skip-layers {' '.join(map(str, whole))}" if whole else ""
    return f"--kv-cache-dtype fp8{skipped}"


def _flags_of_llama_cpp(plan: CachePlan, shape: CacheShape) -> str:
    cache = plan.caches[0]
    names = [name.replace(WHOLE, "f16") for name in (cache.keys, cache.values)]
    return f"--flash-attn on --cache-type-k {names[0]} --cache-type-v {names[1]}"


def _flags_of_mlx(plan: CachePlan, shape: CacheShape) -> str:
    name = plan.caches[0].keys
    if name == WHOLE:
        return ""
    bits = name.removeprefix("mlx")
    return f"--kv-bits {bits} --kv-group-size 64 --quantized-kv-start 0"


def _problem_of_blocks(info: ModelInfo, block: int) -> str | None:
    if info.d_head % block == 0:
        return None
    return f"heads of {info.d_head} numbers are not made of blocks of {block}"


def _problem_of_mlx(info: ModelInfo) -> str | None:
    if has_sliding_layers(Path(info.path)):
        return "mlx-lm refuses to quantise the cache of layers with a window"
    return _problem_of_blocks(info, block=64)


def _keys(unit: Unit, *names: str) -> list[Alternative]:
    return [Alternative(unit, keys=name) for name in names]


def _values(unit: Unit, *names: str) -> list[Alternative]:
    return [Alternative(unit, values=name) for name in names]


ENGINES = {
    each.name: each
    for each in (
        CacheEngine(
            name="any",
            takes="windows of KV heads and bits of layers, for code of your own: no file but "
            "plan.json",
            alternatives=(
                Alternative("KV head", window=True),
                *_keys("layer", "affine8", "channel4", "channel3"),
                *_values("layer", "affine8", "rotated4", "rotated3", "rotated2"),
            ),
            sink=4,
            whole=4,
            reads_prompts=True,
            rounds_prompts=True,
        ),
        CacheEngine(
            name="duo",
            takes="windows of KV heads (DuoAttention, kvpress)",
            alternatives=(Alternative("KV head", window=True),),
            sink=4,
            files=_pattern_of_duo,
        ),
        CacheEngine(
            name="transformers",
            takes="windows of layers, without first keys",
            alternatives=(Alternative("layer", window=True),),
            files=_config_of_transformers,
            problem=lambda info: layer_types_problem(Path(info.path)),
        ),
        CacheEngine(
            name="vllm",
            takes="8-bit floats in all layers but some",
            alternatives=(Alternative("layer", keys="fp8", values="fp8"),),
            flags=_flags_of_vllm,
        ),
        CacheEngine(
            name="llama.cpp",
            takes="one type for all keys and one for all values",
            alternatives=(*_keys("model", "q8_0", "q4_0"), *_values("model", "q8_0", "q4_0")),
            flags=_flags_of_llama_cpp,
            problem=partial(_problem_of_blocks, block=32),
        ),
        CacheEngine(
            name="mlx",
            takes="one number of bits for all keys and values",
            alternatives=tuple(
                Alternative("model", keys=name, values=name) for name in ("mlx8", "mlx4", "mlx2")
            ),
            reads_prompts=True,
            flags=_flags_of_mlx,
            problem=_problem_of_mlx,
        ),
    )
}
"""The engines by name."""
