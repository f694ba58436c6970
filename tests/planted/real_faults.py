"""Faults that are planted into real models: SmolLM2-135M-Instruct and Gemma 3 270M.

`python -m tests.planted.real_faults SMOLLM2 GEMMA [NAME]` takes their two directories, and prints
what `headcount diff` says of each fault, or of that which is called NAME. `known` and `unknown` are
names of all that causes.py knows, and of the others.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.workers.diff.causes import UNKNOWN
from headcount.workers.diff.comparison import Comparison
from headcount.workers.diff.texts import tokenizer_causes
from headcount.workers.loading import bridgeable, model_of
from headcount.workers.model.info.description import describe
from headcount.workers.model.model import Model
from tests.planted.planted_faults import FULL, SLIDING, compared, config, model_in
from tests.toys import toy_models as toy
from tests.toys.model_families import prepare_libraries

SMOLLM2, GEMMA = "SmolLM2", "Gemma"


@dataclass(frozen=True)
class RealFault:
    """A change of a model's files or of the model that is loaded, and what should be said of it."""

    name: str
    model: str
    layer: int | None  # the first faulty one; None outside of the layers
    quantity: str  # empty if the models compute the same, and the tokenizer is at fault
    cause: str
    change: Callable[[Any], object] = lambda _: None
    of_files: Callable[[Path], object] = lambda _: None


def weight(layer: int, module: str) -> Callable[[Any], Tensor]:
    """The weight of a module of a layer of a loaded model."""
    return lambda model: model.model.layers[layer].get_submodule(module).weight.data


def changed(made: Callable[[Tensor], Tensor], *weights: Callable[[Any], Tensor]) -> Any:
    """Weights are replaced by what is made of each."""

    def change(model: Any) -> None:
        for one in weights:
            one(model).copy_(made(one(model).clone()))

    return change


def exchanged(one: Callable[[Any], Tensor], other: Callable[[Any], Tensor]) -> Any:
    def change(model: Any) -> None:
        kept = one(model).clone()
        one(model).copy_(other(model))
        other(model).copy_(kept)

    return change


def in_heads(order: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda w: w.unflatten(0, (len(order), -1))[order].flatten(0, 1)


def in_pairs(d_head: int) -> Callable[[Tensor], Tensor]:
    """Rows in llama.cpp's order."""
    return lambda w: w.unflatten(0, (-1, 2, d_head // 2)).transpose(1, 2).flatten(0, 2)


def without_head(head: int, d_head: int) -> Callable[[Tensor], Tensor]:
    def made(w: Tensor) -> Tensor:
        w[:, head * d_head : (head + 1) * d_head] = 0
        return w

    return made


def with_noise(size: float, rank: int | None = None) -> Callable[[Tensor], Tensor]:
    """With numbers drawn at random; of a rank, as an adapter's are."""

    def made(w: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        if rank is None:
            drawn = torch.randn(w.shape, generator=generator)
        else:
            out = torch.randn(w.shape[0], rank, generator=generator)
            drawn = out @ torch.randn(rank, w.shape[1], generator=generator) / rank**0.5
        return w + size * w.std() * drawn

    return made


def layers_exchanged(model: Any) -> None:
    layers = model.model.layers
    layers[10], layers[11] = layers[11], layers[10]
    for layer in (10, 11):
        layers[layer].self_attn.layer_idx = layer


def put(layer: int, name: str, module: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    """Another module in the place of one of a layer."""

    def change(model: Any) -> None:
        block = model.model.layers[layer]
        block.set_submodule(name, module(block.get_submodule(name)))

    return change


def forward(layer: int, computed: Callable[..., Any]) -> Callable[[Any], None]:
    """A layer computes something else."""

    def change(model: Any) -> None:
        block = model.model.layers[layer]
        block.forward = MethodType(computed, block)

    return change


def skipped(_block: Any, hidden_states: Tensor, *_args: object, **_words: object) -> Tensor:
    return hidden_states


def in_parallel(block: Any, hidden_states: Tensor, *args: Any, **words: Any) -> Tensor:
    """Attention and MLP read the same stream, as in GPT-J."""
    z, *_ = block.self_attn(*args, hidden_states=block.input_layernorm(hidden_states), **words)
    return hidden_states + z + block.mlp(block.post_attention_layernorm(hidden_states))


def normed_after(block: Any, hidden_states: Tensor, *args: Any, **words: Any) -> Tensor:
    """The norm of the MLP comes behind it, as in OLMo 2."""
    z, *_ = block.self_attn(*args, hidden_states=block.input_layernorm(hidden_states), **words)
    hidden_states = hidden_states + z
    return hidden_states + block.post_attention_layernorm(block.mlp(hidden_states))


class CentredNorm(nn.Module):
    """A norm of a stream whose mean is taken off, as in GPT-2."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states - hidden_states.mean(-1, keepdim=True))


class ScaledByPosition(nn.Module):
    """Queries that grow with the position, as in Llama 4."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, hidden_states: Tensor) -> Tensor:
        positions = torch.arange(hidden_states.shape[1])
        return self.projection(hidden_states) * (1 + 0.1 * (positions / 8).floor().log1p())[:, None]


class Capped(nn.Module):
    """What a module puts out, capped: an overflow that was clipped."""

    def __init__(self, module: nn.Module, most: float) -> None:
        super().__init__()
        self.module, self.most = module, most

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.module(hidden_states).clamp(-self.most, self.most)


def granite(**multipliers: float) -> Callable[[Path], None]:
    """A Llama read as a Granite, which multiplies."""
    own = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    own |= {"attention_multiplier": 0.125} | multipliers
    return config(model_type="granite", architectures=["GraniteForCausalLM"], **own)


def embedding(model: Any) -> Tensor:
    return model.model.embed_tokens.weight.data


def rows_exchanged(w: Tensor) -> Tensor:
    w[[1000, 2000]] = w[[2000, 1000]]
    return w


def first_row_lost(w: Tensor) -> Tensor:
    w[0] = 0
    return w


def first_column_turned(w: Tensor) -> Tensor:
    w[:, 0] *= -1
    return w


def in_float8(w: Tensor) -> Tensor:
    scale = w.abs().max() / 448
    return (w / scale).to(torch.float8_e4m3fn).float() * scale


def half_pruned(w: Tensor) -> Tensor:
    """The smaller two of every four weights are 0."""
    fours = w.unflatten(1, (-1, 4))
    kept = torch.zeros_like(fours).scatter(-1, fours.abs().topk(2, dim=-1).indices, 1)
    return (fours * kept).flatten(1)


def of_the_layer_before(model: Any) -> None:
    weight(12, "self_attn.k_proj")(model).copy_(weight(11, "self_attn.k_proj")(model))


def rotary_base(base: float, kind: str | None = None) -> Callable[[Path], None]:
    """Of all layers, or of those of a kind."""

    def change(path: Path) -> None:
        said = json.loads((path / "config.json").read_text())["rope_parameters"]
        (said if kind is None else said[kind])["rope_theta"] = base
        toy.change_config(path, rope_parameters=said)

    return change


def windows_inverted(path: Path) -> None:
    kinds = json.loads((path / "config.json").read_text())["layer_types"]
    toy.change_config(path, layer_types=[FULL if kind == SLIDING else SLIDING for kind in kinds])


def no_qk_norms(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm = nn.Identity()
        layer.self_attn.k_norm = nn.Identity()


def change_tokenizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change_file(path: Path) -> None:
        file = path / "tokenizer.json"
        fields = json.loads(file.read_text(encoding="utf-8"))
        change(fields)
        file.write_text(json.dumps(fields), encoding="utf-8")

    return change_file


def without_digits(fields: dict[str, Any]) -> None:
    steps = fields["pre_tokenizer"]["pretokenizers"]
    fields["pre_tokenizer"]["pretokenizers"] = [s for s in steps if s["type"] != "Digits"]


def bos_twice(fields: dict[str, Any]) -> None:
    single = fields["post_processor"]["single"]
    single.insert(0, single[0])


V, DOWN, OUT = "self_attn.v_proj", "mlp.down_proj", "self_attn.o_proj"
Q, K = "self_attn.q_proj", "self_attn.k_proj"
BY_448 = changed(lambda w: w / 448, weight(9, DOWN))
NO_HEAD_4 = changed(without_head(4, 64), weight(15, OUT))
PERMUTED = changed(in_heads([3, 1, 2, 0, 4, 5, 6, 7, 8]), weight(7, Q))
GROUPS = changed(in_heads([1, 0, 2]), weight(20, K), weight(20, V))
GATE_AND_UP = exchanged(weight(3, "mlp.gate_proj"), weight(3, "mlp.up_proj"))

OF_KNOWN_KINDS = (
    RealFault("v by a tenth", SMOLLM2, 12, "v", "scale",
              changed(lambda w: w * 1.1, weight(12, V))),
    RealFault("scale of float8 lost", SMOLLM2, 9, "MLP", "scale", BY_448),
    RealFault("head of o lost", SMOLLM2, 15, "attention output", "scale", NO_HEAD_4),
    RealFault("heads exchanged", SMOLLM2, 7, "q", "heads", PERMUTED),
    RealFault("groups exchanged", SMOLLM2, 20, "k", "heads", GROUPS),
    RealFault("rows of llama.cpp", SMOLLM2, 5, "q", "rows in another order",
              changed(in_pairs(64), weight(5, Q), weight(5, K))),
    RealFault("gate and up exchanged", SMOLLM2, 3, "MLP", "exchanged", GATE_AND_UP),
    RealFault("k and v exchanged", SMOLLM2, 13, "k", "exchanged",
              exchanged(weight(13, K), weight(13, V))),
    RealFault("layers exchanged", SMOLLM2, 10, "norm", "exchanged", layers_exchanged),
    RealFault("adapter twice", SMOLLM2, 25, "q", "adapter",
              changed(with_noise(0.1, rank=4), weight(25, Q))),
    RealFault("transposed", SMOLLM2, 21, "attention output", "transposed",
              changed(lambda w: w.T, weight(21, OUT))),
    RealFault("1 + weight", SMOLLM2, 17, "norm", "norm",
              changed(lambda w: w + 1, weight(17, "input_layernorm"))),
    RealFault("rotary base", SMOLLM2, 0, "rotation", "rotation", of_files=rotary_base(1e4)),
    RealFault("epsilon", SMOLLM2, 0, "norm", "norm", of_files=config(rms_norm_eps=1e-2)),
    RealFault("GELU for SiLU", SMOLLM2, 0, "MLP", "activation function",
              of_files=config(hidden_act="gelu")),
    RealFault("scores doubled", SMOLLM2, 0, "pattern", "attention scale",
              of_files=granite(attention_multiplier=0.25)),
    RealFault("vocabulary shifted", SMOLLM2, None, "embedding", "vocabulary order",
              changed(lambda w: w.roll(1, 0), embedding)),
    RealFault("no digits step", SMOLLM2, None, "", "tokenizer",
              of_files=change_tokenizer(without_digits)),
    RealFault("a key less", GEMMA, 0, "pattern", "window", of_files=config(sliding_window=511)),
    RealFault("windows inverted", GEMMA, 0, "rotation", "layer types", of_files=windows_inverted),
    RealFault("local rotary base", GEMMA, 0, "rotation", "rotation",
              of_files=rotary_base(1e6, SLIDING)),
    RealFault("no QK norm", GEMMA, 0, "q", "QK norm", no_qk_norms),
    RealFault("scale of scores", GEMMA, 0, "pattern", "attention scale",
              of_files=config(query_pre_attn_scalar=160)),
    RealFault("weight for 1 + weight", GEMMA, 6, "norm", "norm",
              changed(lambda w: w - 1, weight(6, "pre_feedforward_layernorm"))),
    RealFault("heads of o exchanged", GEMMA, 9, "attention output", "heads",
              changed(lambda w: w[:, torch.arange(1024).roll(256)], weight(9, OUT))),
    RealFault("logits capped", GEMMA, None, "final soft cap", "final soft cap",
              of_files=config(final_logit_softcapping=30.0)),
    RealFault("BOS twice", GEMMA, None, "", "bos", of_files=change_tokenizer(bos_twice)),
)  # fmt: skip
"""Faults of the kinds that causes.py knows."""

OF_OTHER_KINDS = (
    RealFault("residuals scaled", SMOLLM2, 0, "residual stream", UNKNOWN,
              of_files=granite(residual_multiplier=0.9)),
    RealFault("logits scaled", SMOLLM2, None, "final soft cap", "final soft cap",
              of_files=granite(logits_scaling=8.0)),
    RealFault("rows of the embedding exchanged", SMOLLM2, None, "embedding", "vocabulary order",
              changed(rows_exchanged, embedding)),
    RealFault("a row of the embedding lost", SMOLLM2, None, "embedding", UNKNOWN,
              changed(first_row_lost, embedding)),
    RealFault("MLP in float8", SMOLLM2, 18, "MLP", UNKNOWN,
              changed(in_float8, *(weight(18, f"mlp.{n}_proj") for n in ("gate", "up", "down")))),
    RealFault("k of the layer before", SMOLLM2, 12, "k", "exchanged", of_the_layer_before),
    RealFault("a layer skipped", SMOLLM2, 14, "layer", UNKNOWN, forward(14, skipped)),
    RealFault("MLP in parallel", SMOLLM2, 6, "residual stream", UNKNOWN,
              forward(6, in_parallel)),
    RealFault("norm behind the MLP", SMOLLM2, 6, "residual stream", UNKNOWN,
              forward(6, normed_after)),
    RealFault("half pruned", SMOLLM2, 22, "MLP", UNKNOWN,
              changed(half_pruned, weight(22, "mlp.up_proj"))),
    RealFault("neurons permuted", SMOLLM2, 8, "MLP", UNKNOWN,
              changed(lambda w: w[:, torch.arange(1536).flip(0)], weight(8, DOWN))),
    RealFault("weights clipped", SMOLLM2, 4, "attention output", UNKNOWN,
              changed(lambda w: w.clamp(-3 * w.std(), 3 * w.std()), weight(4, OUT))),
    RealFault("noise of 1 %", SMOLLM2, 28, "attention output", UNKNOWN,
              changed(with_noise(0.01), weight(28, OUT))),
    RealFault("a neuron lost", SMOLLM2, 19, "MLP", UNKNOWN,
              changed(first_row_lost, weight(19, "mlp.up_proj"))),
    RealFault("a sign turned", SMOLLM2, 2, "MLP", UNKNOWN,
              changed(first_column_turned, weight(2, DOWN))),
    RealFault("embeddings of one length", SMOLLM2, None, "embedding", UNKNOWN,
              changed(lambda w: w / w.norm(dim=1, keepdim=True), embedding)),
    RealFault("mean taken off", SMOLLM2, 16, "norm", UNKNOWN,
              put(16, "input_layernorm", CentredNorm)),
    RealFault("q by position", SMOLLM2, 11, "q", UNKNOWN, put(11, Q, ScaledByPosition)),
    RealFault("MLP clipped", GEMMA, 3, "MLP", UNKNOWN,
              put(3, "mlp", lambda mlp: Capped(mlp, 2.0))),
)  # fmt: skip
"""Faults of kinds that nobody looked at when the causes were written."""


FAULTS = {"known": OF_KNOWN_KINDS, "unknown": OF_OTHER_KINDS}


def faulty(fault: RealFault, whole: Path, folder: Path) -> Model:
    """The model with a fault. Weights are changed in memory, so the files of weights are links."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(whole, folder, copy_function=_linked_if_large)
    fault.of_files(folder)
    info = describe(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        fault.change(loaded)
    return model_of(info, bridgeable(info, loaded, "cpu", torch.float32), "raw")


def _linked_if_large(source: str, to: str) -> None:
    if source.endswith(".safetensors"):
        Path(to).symlink_to(Path(source).resolve())
    else:
        shutil.copyfile(source, to)


def lines_of(comparison: Comparison, of_texts: list[Any]) -> tuple[str, list[str]]:
    """Where it begins, and what is said of it."""
    first = comparison.faults[:1]
    places = [f"{one.layer}, {one.quantity}" for one in first]
    causes = [f"{one.kind}: {one.sentence}" for one in (*comparison.causes, *of_texts)]
    return "".join(places), causes


def main(smollm2: str, gemma: str, only: str | None = None) -> None:
    """Plant each fault, and count what is found, at its place, and with its cause."""
    prepare_libraries()
    places = {SMOLLM2: Path(smollm2), GEMMA: Path(gemma)}
    whole: dict[str, Model] = {}
    for title, faults in FAULTS.items():
        counts = torch.zeros(4, dtype=torch.long)
        for fault in (fault for fault in faults if only in (None, title, fault.name)):
            begun = time.monotonic()
            if fault.model not in whole:
                whole = {fault.model: model_in(places[fault.model])}  # One at a time.
            a = whole[fault.model]
            with tempfile.TemporaryDirectory() as folder:
                b = faulty(fault, places[fault.model], Path(folder) / "faulty")
                of_texts, _ = tokenizer_causes(a.info, b.info)
            try:
                comparison = compared(a, b, sequences=2, n_ctx=64)
            except ModelError as error:
                counts[0] += 1
                print("---", fault.name, fault.model, f"refused: {error}", sep=" | ", flush=True)
                continue
            place, causes = lines_of(comparison, of_texts)
            is_found = bool(comparison.faults or of_texts)
            expected = f"{fault.layer}, {fault.quantity}" if fault.quantity else ""
            kinds = {cause.partition(":")[0] for cause in causes}
            marks = is_found, place == expected, kinds == {fault.cause}
            counts += torch.tensor([1, *marks])
            signs = "".join("+" if mark else "-" for mark in marks)
            row = (signs, fault.name, fault.model, place, *causes)
            print(*row, f"{time.monotonic() - begun:.0f} s", sep=" | ", flush=True)
        number, found, placed, named = counts.tolist()
        print(
            f"{number} faults of {title} kinds: {found} found, {placed} with layer and step, "
            f"{named} with the right cause, or none where none is known"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
