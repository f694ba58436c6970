"""Faults of conversion that are planted into tiny models, and changes that are harmless.

`python -m tests.planted.planted_faults` prints what `headcount diff` says of each.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.workers.diff.causes import UNKNOWN
from headcount.workers.diff.comparison import Comparer, Comparison
from headcount.workers.diff.texts import inputs_of, sequence_length
from headcount.workers.loading import load_model
from headcount.workers.model.info.description import describe
from headcount.workers.model.model import Model
from tests.toys import toy_models as toy
from tests.toys.gguf_files import write_gguf

FULL, SLIDING = "full_attention", "sliding_attention"
D_HEAD, LAYERS, N_CTX = 8, 4, 160
SIZES: dict[str, Any] = {
    "num_hidden_layers": LAYERS, "max_position_embeddings": N_CTX, "num_key_value_heads": 2,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    **SIZES, "head_dim": D_HEAD, "sliding_window": 16,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
}  # fmt: skip

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: toy.gpt2(n_layer=LAYERS, n_positions=N_CTX),
    "llama": lambda: toy.family("LlamaConfig", **SIZES),
    "qwen2": lambda: toy.family("Qwen2Config", **SIZES),
    "qwen3": lambda: toy.family("Qwen3Config", head_dim=D_HEAD, **SIZES),
    "neox": lambda: toy.family("GPTNeoXConfig", rotary_pct=0.5, **SIZES),
    "gemma2": lambda: toy.family(
        "Gemma2Config", attn_logit_softcapping=2.0, final_logit_softcapping=4.0, **GEMMA
    ),
    "gemma3": lambda: toy.family("Gemma3TextConfig", **GEMMA),
}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """A change of a copy of a model, and what should be said of it."""

    name: str
    family: str
    change: Callable[[Path], object]
    layer: int | None  # the first faulty one; None outside of the layers
    quantity: str
    cause: str


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda path: toy.change_config(path, **fields)


def rope(**fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        said = json.loads((path / "config.json").read_text())
        toy.change_config(path, rope_parameters=said["rope_parameters"] | fields)

    return change


def weights(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    return lambda path: toy.change_weights(path, change)


def times(name: str, factor: float, heads: slice = slice(None)) -> Callable[[Path], None]:
    def change(tensors: Tensors) -> None:
        rows = slice((heads.start or 0) * D_HEAD, heads.stop and heads.stop * D_HEAD)
        tensors[name][rows] *= factor

    return weights(change)


def put(name: str, made: Callable[[Tensors], Tensor]) -> Callable[[Path], None]:
    return weights(lambda tensors: tensors.__setitem__(name, made(tensors).clone().contiguous()))


def heads_of(name: str, order: list[int]) -> Callable[[Tensors], Tensor]:
    """The rows of a projection with its heads in another order."""
    return lambda tensors: tensors[name].unflatten(0, (-1, D_HEAD))[order].flatten(0, 1)


def both(*changes: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        for each in changes:
            each(path)

    return change


def exchange(first: str, second: str) -> Callable[[Path], None]:
    """Exchange what is called after two beginnings of names."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(first)]:
            other = second + name.removeprefix(first)
            tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()

    return weights(change)


def without_qk_norm(path: Path) -> None:
    """As if a Qwen 3 were taken for a Llama."""
    toy.change_config(path, model_type="llama", architectures=["LlamaForCausalLM"])
    for letter in "qk":
        names = [f"model.layers.{n}.self_attn.{letter}_norm.weight" for n in range(LAYERS)]
        weights(lambda tensors, names=names: [tensors.pop(name) for name in names])(path)


def in_pairs(name: str) -> Callable[[Path], None]:
    """The rows of a projection in llama.cpp's order."""
    halves = (-1, 2, D_HEAD // 2)
    return put(name, lambda t: t[name].unflatten(0, halves).transpose(1, 2).flatten(0, 2))


def noisy(name: str, size: float) -> Callable[[Path], None]:
    def made(tensors: Tensors) -> Tensor:
        noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
        return tensors[name] + size * tensors[name].std() * noise

    return put(name, made)


def low_rank(name: str, rank: int) -> Callable[[Path], None]:
    """An adapter, once more."""

    def made(tensors: Tensors) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        out, into = tensors[name].shape
        factors = (
            torch.randn(out, rank, generator=generator),
            torch.randn(rank, into, generator=generator),
        )
        return tensors[name] + 0.01 * factors[0] @ factors[1]

    return put(name, made)


def tied(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def no_head_2(tensors: Tensors) -> None:
    tensors[of(0, "o")][:, 2 * D_HEAD : 3 * D_HEAD] = 0


def no_value_in_head_0(tensors: Tensors) -> None:
    for kind in ("weight", "bias"):
        tensors[f"transformer.h.3.attn.c_attn.{kind}"][..., 64 : 64 + D_HEAD] = 0


def of(layer: int, projection: str) -> str:
    """The weight of a projection of a layer's attention."""
    return f"model.layers.{layer}.self_attn.{projection}_proj.weight"


def ordered(layer: int, projection: str, order: list[int]) -> Callable[[Path], None]:
    return put(of(layer, projection), heads_of(of(layer, projection), order))


GROUPS = both(ordered(2, "k", [1, 0]), ordered(2, "v", [1, 0]))
PAIRS = both(in_pairs(of(1, "q")), in_pairs(of(1, "k")))
LINEAR = rope(rope_type="linear", factor=4.0)
INVERTED = config(layer_types=[FULL, FULL, SLIDING, FULL])
MLP = "model.layers.3.mlp."
LESS_ONE = weights(lambda t: t["model.layers.1.input_layernorm.weight"].sub_(1))
WPE, C_PROJ = "transformer.wpe.weight", "transformer.h.2.attn.c_proj.weight"
LATER = put(WPE, lambda t: t[WPE].roll(1, 0))
TRANSPOSED = put(C_PROJ, lambda t: t[C_PROJ].T)
NO_BIAS = times("model.layers.2.self_attn.k_proj.bias", 0)
EXCHANGED_LAYERS = exchange("model.layers.1.", "model.layers.2.")
NO_SCALE = times("model.embed_tokens.weight", 32**-0.5)

FAULTS = tuple(
    Fault(*fields)
    for fields in (
        ("a key less", "gemma3", config(sliding_window=15), 0, "pattern", "window"),
        ("a key more", "gemma2", config(sliding_window=17), 0, "pattern", "window"),
        ("no windows", "gemma2", config(layer_types=[FULL] * 4), 0, "pattern", "window"),
        ("layer types inverted", "gemma2", INVERTED, 0, "pattern", "layer types"),
        ("rotary base", "llama", rope(rope_theta=5e5), 0, "rotation", "rotation"),
        ("rotary scaling", "llama", LINEAR, 0, "rotation", "rotation"),
        ("half a rotation", "neox", rope(partial_rotary_factor=0.25), 0, "rotation", "rotation"),
        ("no QK norm", "qwen3", without_qk_norm, 0, "q", "QK norm"),
        ("no cap", "gemma2", config(attn_logit_softcapping=None), 0, "pattern", "soft cap"),
        ("no last cap", "gemma2", config(final_logit_softcapping=None), None,
         "final soft cap", "final soft cap"),
        ("scale of scores", "gemma2", config(query_pre_attn_scalar=8), 0,
         "pattern", "attention scale"),
        ("bias lost", "qwen2", NO_BIAS, 2, "k", "bias"),
        ("bias of an MLP lost", "gpt2", times("transformer.h.1.mlp.c_fc.bias", 0), 1,
         "MLP", "bias"),
        ("v doubled", "llama", times(of(3, "v"), 2), 3, "v", "scale"),
        ("a head of q by a tenth", "llama", times(of(1, "q"), 1.1, slice(2, 3)), 1, "q", "scale"),
        ("heads of o exchanged", "llama", weights(
            lambda t: t.update({of(2, "o"): t[of(2, "o")].roll(D_HEAD, 1).contiguous()})
        ), 2, "attention output", "heads"),
        ("head of o lost", "llama", weights(no_head_2), 0, "attention output", "scale"),
        ("adapter twice", "llama", low_rank(of(3, "q"), 2), 3, "q", "adapter"),
        ("unembedding tied", "llama", weights(tied), None, "unembedding", "exchanged"),
        ("norms exchanged", "llama", exchange(
            "model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm"
        ), 1, "norm", "exchanged"),
        ("vocabulary shifted", "llama", put(
            "model.embed_tokens.weight", lambda t: t["model.embed_tokens.weight"].roll(1, 0)
        ), None, "embedding", "vocabulary order"),
        ("noise of 1 %", "llama", noisy(of(2, "o"), 0.01), 2, "attention output", UNKNOWN),
        ("a head twice", "llama", ordered(1, "q", [0, 1, 1, 3]), 1, "q", "heads"),
        ("heads permuted", "qwen3", ordered(0, "q", [2, 0, 3, 1]), 0, "q", "heads"),
        ("groups exchanged", "llama", GROUPS, 2, "k", "heads"),
        ("rows of llama.cpp", "llama", PAIRS, 1, "q", "rows in another order"),
        ("gate and up exchanged", "gemma3", exchange(f"{MLP}gate_proj", f"{MLP}up_proj"), 3,
         "MLP", "exchanged"),
        ("layers exchanged", "qwen3", EXCHANGED_LAYERS, 1, "norm", "exchanged"),
        ("1 + weight", "gemma3", LESS_ONE, 1, "norm", "norm"),
        ("epsilon", "llama", config(rms_norm_eps=0.05), 0, "norm", "norm"),
        ("GELU", "gpt2", config(activation_function="gelu"), 0, "MLP", "activation function"),
        ("positions one later", "gpt2", LATER, None, "embedding", "position embeddings"),
        ("transposed", "gpt2", TRANSPOSED, 2, "attention output", "transposed"),
        ("v of a head is 0", "gpt2", weights(no_value_in_head_0), 3, "v", "scale"),
        ("residuals in series", "neox", config(use_parallel_residual=False), 0,
         "residual stream", UNKNOWN),
        ("embeddings not scaled", "gemma3", NO_SCALE, None, "embedding", "scale"),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Harmless:
    """A change that leaves a model what it is, but for rounding to a format."""

    name: str
    change: Callable[[Path], object]
    rounding: str = ""
    families: tuple[str, ...] = tuple(FAMILIES)


def saved_again(**options: Any) -> Callable[[Path], None]:
    """What transformers writes of what it has read."""

    def change(path: Path) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path)
        (path / "model.safetensors").unlink()
        model.save_pretrained(path, **options)

    return change


def reversed_tensors(tensors: Tensors) -> None:
    for name in reversed([*tensors]):
        tensors[name] = tensors.pop(name)


def each_matrix(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def change_all(tensors: Tensors) -> None:
        tensors.update({name: change(w) for name, w in tensors.items() if w.dim() > 1})

    return weights(change_all)


def in_integers(levels: int, block: int) -> Callable[[Tensor], Tensor]:
    """Weights as integers times the scale of their block of a row."""

    def change(weight: Tensor) -> Tensor:
        blocks = weight.unflatten(-1, (-1, block))
        scale = blocks.abs().amax(-1, keepdim=True) / levels
        return ((blocks / scale).round() * scale).flatten(-2)

    return change


def permuted_throughout(tensors: Tensors) -> None:
    """Heads of layer 1 in another order, in all four projections: each group as a whole."""
    order = [2, 3, 0, 1]
    for letter, heads in (("q", order), ("k", [1, 0]), ("v", [1, 0])):
        tensors[of(1, letter)] = heads_of(of(1, letter), heads)(tensors)
    outwards = tensors[of(1, "o")]
    tensors[of(1, "o")] = outwards.unflatten(1, (-1, D_HEAD))[:, order].flatten(1).contiguous()


def scaled_throughout(tensors: Tensors) -> None:
    """q twice as large and k half as large, v three times and o a third."""
    for letter, factor in (("q", 2), ("k", 1 / 2), ("v", 3), ("o", 1 / 3)):
        tensors[of(1, letter)] *= factor


def folded(tensors: Tensors) -> None:
    """The weights of norms in the projections that read them."""
    readers = {"input_layernorm": ("q", "k", "v"), "post_attention_layernorm": ("gate", "up")}
    for layer in range(LAYERS):
        for norm, letters in readers.items():
            weight = tensors[f"model.layers.{layer}.{norm}.weight"]
            part = "self_attn" if norm == "input_layernorm" else "mlp"
            for letter in letters:
                tensors[f"model.layers.{layer}.{part}.{letter}_proj.weight"] *= weight
            weight.fill_(1)


def one_file(path: Path) -> None:
    """A GGUF file of the same weights in float16 in the place of the directory."""
    file = write_gguf(path.parent / "one.gguf", path, np.float16)
    shutil.rmtree(path)
    file.rename(path)


HARMLESS = (
    Harmless("the same files", lambda _: None),
    Harmless("saved again", saved_again()),
    Harmless("in shards", saved_again(max_shard_size="20KB")),
    Harmless("tensors in another order", weights(reversed_tensors)),
    Harmless("stored in float16", each_matrix(Tensor.half), "float16"),
    Harmless("stored in bfloat16", each_matrix(Tensor.bfloat16), "bfloat16"),
    Harmless("SDPA", config(_attn_implementation="sdpa"), families=("llama", "gemma3")),
    Harmless("a pickle", toy.pickle_weights, families=("gpt2", "qwen3")),
    Harmless("heads permuted throughout", weights(permuted_throughout), families=("llama",)),
    Harmless("folded norms", weights(folded), families=("llama", "qwen2", "qwen3")),
    Harmless("scales that cancel", weights(scaled_throughout), families=("llama",)),
    Harmless("a scale that a norm undoes",
             times(of(1, "q"), 1.1), families=("qwen3",)),
    Harmless("8 bits", each_matrix(in_integers(127, 16)), "8-bit", ("llama", "gemma2", "qwen3")),
    Harmless("4 bits", each_matrix(in_integers(7, 16)), "4-bit", ("llama", "gemma2", "qwen3")),
    Harmless("GGUF in float16", one_file, "float16", ("llama",)),
)  # fmt: skip


def harmless(folder: Path) -> Iterator[tuple[str, Harmless, Comparison]]:
    """What is said of every change that is harmless, and its family."""
    for change in HARMLESS:
        for family in change.families:
            whole = folder / family
            if not whole.exists():
                toy.save_model(whole, FAMILIES[family]())
            other = toy.copy_of(whole, folder / "changed.gguf", change.change)
            yield family, change, compared(model_in(whole), model_in(other))
            shutil.rmtree(other) if other.is_dir() else other.unlink()


def is_harmless(change: Harmless, comparison: Comparison) -> bool:
    return not comparison.faults and comparison.rounding == change.rounding


def compared(a: Model, b: Model, sequences: int = 8, n_ctx: int = 96) -> Comparison:
    """What is said of two models."""
    repeats = inputs_of(a.info, min(n_ctx, sequence_length(a, b)))["repeats"]
    return Comparer(a, b, lambda _words, _share: None).compare({"repeats": repeats[:sequences]})


def model_in(path: Path) -> Model:
    return load_model(describe(path), "raw", "cpu")


def planted(folder: Path) -> Iterator[tuple[Fault, Comparison]]:
    """What is said of every fault."""
    for fault in FAULTS:
        whole = folder / fault.family
        if not whole.exists():
            toy.save_model(whole, FAMILIES[fault.family]())
        faulty = toy.copy_of(whole, folder / "faulty", fault.change)
        yield fault, compared(model_in(whole), model_in(faulty))
        shutil.rmtree(faulty)


def row_of(fault: Fault, comparison: Comparison) -> tuple[str, ...]:
    """A fault, and what was said: whether found, where, what, and which cause."""
    first = comparison.faults[:1]
    place = [f"{one.layer}, {one.quantity}" for one in first]
    causes = [f"{cause.kind}: {cause.sentence}" for cause in comparison.causes]
    return fault.name, fault.family, comparison.verdict, *place, *causes


def is_placed(fault: Fault, comparison: Comparison) -> bool:
    first = comparison.faults[:1]
    return [(one.layer, one.quantity) for one in first] == [(fault.layer, fault.quantity)]


def is_named(fault: Fault, comparison: Comparison) -> bool:
    return {cause.kind for cause in comparison.causes} == {fault.cause}


def main(only_harmless: bool = False) -> None:
    from tests.toys.model_families import prepare_libraries

    prepare_libraries()
    rows: list[tuple[Fault, Comparison]] = []
    with tempfile.TemporaryDirectory() as folder:
        for fault, comparison in () if only_harmless else planted(Path(folder)):
            checks = is_placed(fault, comparison), is_named(fault, comparison)
            marks = "".join("+" if is_right else "-" for is_right in checks)
            print(marks, *row_of(fault, comparison), sep=" | ", flush=True)
            rows.append((fault, comparison))
        alarms: list[bool] = []
        for family, change, comparison in harmless(Path(folder)):
            mark = "+" if is_harmless(change, comparison) else "-"
            said = comparison.verdict, comparison.rounding
            print(mark, change.name, family, *said, sep=" | ", flush=True)
            alarms.append(comparison.verdict == "different")
    print(f"{len(alarms)} harmless changes: {sum(alarms)} alarms")
    found = sum(comparison.verdict == "different" for _, comparison in rows)
    placed, named = (sum(check(*row) for row in rows) for check in (is_placed, is_named))
    print(
        f"{len(rows)} faults: {found} found, {placed} with layer and quantity, {named} with cause"
    )


if __name__ == "__main__":
    main("harmless" in sys.argv)
