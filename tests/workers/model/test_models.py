"""Models of several architectures: both engines agree, and what cannot be right is refused."""

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from headcount.schemas.errors import MeasureError, ModelError
from headcount.schemas.statistics import STATISTICS
from headcount.workers.loading import load_model
from headcount.workers.model.attention_check import settle_attention
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.bare_modules import ROWS_OF_PIECE, mlps_in_pieces
from headcount.workers.model.info.description import describe, find_model
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from headcount.workers.replica import InterventionMeasurements
from tests.toys import toy_models as toy
from tests.toys.hub_server import MODEL, hub
from tests.toys.refusals import refused

pytestmark = pytest.mark.usefixtures("one_thread")

AGREEING = ["gpt2-reordered", "llama-wide-heads", "gemma2-capped"]
"""Those that `test_reference` does not recompute."""


def differences(
    first: InterventionMeasurements, second: InterventionMeasurements
) -> dict[str, float]:
    """Statistics that differ by more than rounding, and how far, relative where they are large."""
    largest: dict[str, float] = {}
    for name in toy.FORWARD_STATISTICS:
        x, y = first.heads[name], second.heads[name]
        assert (np.isnan(x) == np.isnan(y)).all(), name
        largest[name] = float(np.nanmax(np.abs(x - y) / np.maximum(1, np.abs(y)), initial=0))
    return {name: value for name, value in largest.items() if not value < 1e-5}


def problem_of(path: Path | str, **changes: Any) -> str:
    """The one line with which a model is refused, somewhere between its description and its first
    measurement.
    """
    tokens = toy.repeating_tokens(4)
    return refused(ModelError, toy.measure, find_model(str(path)), tokens, **changes)


# Agreement


@pytest.mark.parametrize(
    ("name", "n_ctx"),
    # A window that nearly fits, and that fits exactly.
    [*product(AGREEING, [17]), ("mistral-window-20", 20), ("mistral-window-20", 21)],
)
def test_both_engines_agree_on_every_statistic(shelf: toy.Shelf, name: str, n_ctx: int):
    tokens = toy.repeating_tokens(n_ctx, batch=2)
    fused, dense = (shelf.replica(name, engine).measure(tokens) for engine in ("fused", "dense"))
    assert (fused.method.engine, dense.method.engine) == ("fused", "dense")
    assert differences(fused, dense) == {}


# The scale of scores


def test_a_scale_that_is_not_the_model_s_own_is_refused(tmp_path: Path) -> None:
    # TransformerLens scales the scores of this model although its files say not to.
    path = toy.save_model(tmp_path / "unscaled", toy.gpt2(scale_attn_weights=False))
    problem = (
        r"^unscaled: the scores of layer 2 could not be made as 1 · q·k: their softmax differs by "
        r"0\.\d+ from the pattern \(allowed 0.0001\); TransformerLens computes other scores$"
    )
    with pytest.raises(ModelError, match=problem):
        load_model(describe(path), "raw", "cpu").scale(2)
    assert "could not be made as 1 · q·k" in problem_of(path, engine="dense")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpt2", lambda facts: {"scale": facts.scale * 1.01}),
        ("mistral-window-20", lambda facts: {"window": facts.window and facts.window - 1}),
        ("gemma2-capped", lambda facts: {"soft_cap": None}),
        ("bloom", lambda facts: {"slopes": facts.slopes * 1.01}),
    ],
)
def test_facts_that_are_not_the_model_s_own_are_refused(
    shelf: toy.Shelf,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    wrong: Callable[[AttentionFacts], dict[str, Any]],
) -> None:
    from headcount.workers.model import attention_layers, attention_modules

    right = attention_layers.attend_to

    def attend_wrongly(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, facts: AttentionFacts
    ) -> torch.Tensor:
        return right(q, k, v, replace(facts, **wrong(facts)))

    for module in (attention_layers, attention_modules):
        monkeypatch.setattr(module, "attend_to", attend_wrongly)
    problem = load_model(describe(shelf.path(name)), "raw", "cpu").attention_problem
    # A window that no mask has is named at once. Everything else shows in the stream.
    expected = "its attention has a mask" if name == "mistral-window-20" else "the stream after"
    assert problem is not None
    assert problem.startswith(expected)


# Attention that the fused engine does not know


def test_a_layer_that_does_not_attend_is_named_alone(shelf: toy.Shelf) -> None:
    model = load_model(describe(shelf.path("gpt2")), "raw", "cpu")
    model.blocks[1].forward = lambda stream, *_args, **_words: stream
    assert settle_attention(model.info, model.bare, model.blocks).problem == (
        "no attention that can be measured in layer 1, expected by its config.json"
    )


def test_attention_that_is_not_a_window_is_refused(tmp_path: Path) -> None:
    # Llama 4's queries see the keys of their own chunk.
    sizes = {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, **toy.GQA}
    config = toy.family("Llama4TextConfig", attention_chunk_size=8, **sizes)
    assert problem_of(toy.save_model(tmp_path / "chunks", config)) == (
        "chunks: its attention has a mask that is not a window of the latest keys, which the fused "
        "engine does not know; use engine = 'dense'"
    )


def test_a_model_that_its_library_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    # Every token wants four experts, and there are two.
    config = toy.family("GptOssConfig", head_dim=8, num_local_experts=2, **toy.GQA)
    path = toy.save_model(tmp_path / "broken", config)
    for engine in ("fused", "dense"):
        assert "transformers cannot run it" in problem_of(path, engine=engine)


@pytest.mark.parametrize("name", ["gpt2", "legacy-pth"])
def test_folded_weights_keep_the_patterns_and_change_the_values(shelf: toy.Shelf, name: str):
    tokens = toy.repeating_tokens(17)
    outputs = {"predictions": ["losses", "final_probabilities"]}
    raw, folded = (
        toy.measure(shelf.path(name), tokens, weight_processing=weights, **outputs)
        for weights in ("raw", "folded")
    )
    assert folded.method.engine == "dense"
    for output, values in raw.sequences.items():
        np.testing.assert_allclose(folded.sequences[output], values, rtol=1e-4, atol=1e-7)
    # What a folded MLP makes of positions is not known; the legacy model has none.
    for column in [s.name for s in STATISTICS.values() if "effective" in s.parameters]:
        if name == "gpt2":
            assert np.isnan(folded.heads[column]).all()
            raw.heads[column][:] = np.nan
    differing = differences(raw, folded)
    assert not {"sink_mass", "entropy", "induction_score"} & differing.keys()
    assert differing["value_norm"] > 1e-3


# Finding, describing and loading


def test_a_model_is_described_without_loading_it(shelf: toy.Shelf, tmp_path: Path):
    for name, layout, eos in (("llama-gqa", "huggingface", 1), ("legacy-pth", "legacy", 0)):
        info = describe(shelf.path(name))
        sizes = (info.n_layers, info.n_heads, info.d_model, info.d_head, info.n_ctx, info.d_vocab)
        assert (info.layout, sizes) == (layout, (2, 4, 32, 8, 40, 61))
        assert (info.bos_token_id, info.eos_token_id) == (0, eos)
    outside = config_with(bos_token_id=61, eos_token_id=[7, 8])
    info = describe(toy.copy_of(shelf.path("gpt2"), tmp_path / "m", outside))
    assert (info.bos_token_id, info.eos_token_id) == (None, 7)


def test_the_description_knows_the_weights_and_not_their_place(shelf: toy.Shelf, tmp_path: Path):
    description = describe(shelf.path("gpt2")).record
    assert describe(toy.copy_of(shelf.path("gpt2"), tmp_path / "gpt2")).record == description
    toy.change_weights(
        tmp_path / "gpt2", lambda tensors: tensors["transformer.wpe.weight"].view(-1)[5].add_(1e-3)
    )
    changed = describe(tmp_path / "gpt2")
    differing = {key for key in description if changed.record[key] != description[key]}
    assert differing == {"sha256", "files"}
    assert changed.files[0] == ("config.json", description["files"]["config.json"])
    assert changed.files[1][1] != description["files"]["model.safetensors"]
    assert "files" not in changed.identity


def test_the_first_token_of_a_legacy_model_is_its_own_or_that_of_its_tokenizer(tmp_path: Path):
    path = toy.save_legacy(tmp_path / "m", "safetensors")
    config = {key: value for key, value in toy.LEGACY_CONFIG.items() if key != "bos_token_id"}
    known = {"tokenizer_name": "NeelNanda/gpt-neox-tokenizer-digits"}
    for fields, bos in [
        (known, 1), (known | {"bos_token_id": 5}, 5), ({"tokenizer_name": "another"}, None),
        ({"bos_token_id": 61}, None),
    ]:  # fmt: skip
        toy.write_config(path, config | fields)
        assert describe(path).bos_token_id == bos


def config_with(**changes: Any) -> Callable[[Path], object]:
    return lambda path: toy.change_config(path, **changes)


class Payload:
    """Pickles into a call: whoever unpickles it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickled_weights_are_read_where_there_are_no_others(shelf: toy.Shelf, tmp_path: Path):
    tokens = toy.repeating_tokens(13)
    expected = toy.measure(shelf.path("opt"), tokens)
    path = toy.copy_of(shelf.path("opt"), tmp_path / "one", toy.pickle_weights)
    one_file = describe(path)
    assert [name for name, _ in one_file.files] == ["config.json", "pytorch_model.bin"]
    assert differences(toy.measure(path, tokens), expected) == {}
    # In two parts, with an index, as large models have them.
    tensors = torch.load(path / "pytorch_model.bin")
    names = sorted(tensors)
    parts = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    parted = toy.copy_of(path, tmp_path / "two", lambda copy: (copy / "pytorch_model.bin").unlink())
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, parted / file)
    places = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {}, "weight_map": places}
    (parted / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert [name for name, _ in describe(parted).files] == ["config.json", *parts]
    assert differences(toy.measure(parted, tokens), expected) == {}
    # A file beside safetensors is not what is loaded, and so no part of the model.
    both = toy.copy_of(shelf.path("opt"), tmp_path / "both")
    shutil.copy(path / "pytorch_model.bin", both)
    assert describe(both).sha256 == describe(shelf.path("opt")).sha256 != one_file.sha256


def test_pickled_weights_are_downloaded_where_there_are_no_others(
    shelf: toy.Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pickled = toy.copy_of(shelf.path("opt"), tmp_path / "hub" / "main", toy.pickle_weights)
    both = toy.copy_of(shelf.path("opt"), tmp_path / "hub" / "converted")
    shutil.copy(pickled / "pytorch_model.bin", both)
    with hub(tmp_path / "hub", tmp_path / "cache", monkeypatch):
        for revision, weights in ("main", "pytorch_model.bin"), ("converted", "model.safetensors"):
            for download in (True, False):
                directory = find_model(MODEL, revision, download=download)
                names = {path.name for path in directory.iterdir()}
                assert names == {"config.json", "generation_config.json", weights}


def test_code_in_weights_is_refused_and_not_run(shelf: toy.Shelf, tmp_path: Path):
    made = tmp_path / "made-by-the-payload"
    code = {"code": Payload(made)}
    in_bin = toy.copy_of(shelf.path("opt"), tmp_path / "bin")
    toy.pickle_weights(in_bin, code)
    in_pth = toy.copy_of(shelf.path("legacy-pth"), tmp_path / "pth")
    torch.save(toy.legacy_state() | code, in_pth / "toy_final.pth")
    for file in (in_bin / "pytorch_model.bin", in_pth / "toy_final.pth"):
        assert problem_of(file.parent) == (
            f"{file}: not read, as it is no pickle of tensors alone (unsupported GLOBAL "
            "posix.mkdir); where you trust it, convert it to safetensors"
        )
        assert not made.exists()
    # Of an archive PyTorch gives its advice in another error.
    file = in_bin / "pytorch_model.bin"
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            archive.addfile(tarfile.TarInfo(name))
    assert problem_of(in_bin) == (
        f"{file}: not read, as it is no pickle of tensors alone (legacy .tar); where you trust it, "
        "convert it to safetensors"
    )


# Tokenizers


def test_a_tokenizer_gives_the_same_tokens_one_by_one_and_together(shelf: toy.Shelf):
    tokenizer = TextTokenizer(shelf.path("bytes"), 257)
    texts = ["To be", "", "ä€😀", "<|endoftext|>", "a" * 5000]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == [list(text.encode()) for text in texts]


def test_truncation_and_padding_of_the_tokenizer_file_are_off(shelf: toy.Shelf, tmp_path: Path):
    from tokenizers import Tokenizer

    path = toy.copy_of(shelf.path("bytes"), tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(path / "tokenizer.json"))
    assert TextTokenizer(path, 257).encode_many(["abcdef", "a"]) == [list(b"abcdef"), list(b"a")]


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    told = refused(ModelError, TextTokenizer, tmp_path, 61)
    assert told.startswith(f"{tmp_path}/tokenizer.json: not a tokenizer (")


def test_a_slow_tokenizer_s_files_are_read(shelf: toy.Shelf, tmp_path: Path):
    path = toy.copy_of(shelf.path("bytes"), tmp_path / "m")
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(vocabulary))
    (path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert TextTokenizer(path, 257).encode("abba") == [2, 1, 0]


# Numbers that are none


@pytest.mark.parametrize(("weight", "n_ctx", "fields", "problem"), [
    ("h.1.attn.c_attn", 4, {"engine": "dense"},
     "layer 1, head 0: sink_mass is not finite for sequence 0 of the shard"),
    ("ln_f", 4, {"predictions": ["loss"]}, "loss is not finite for sequence 0 of the shard"),
    ("ln_f", 1, {"predictions": ["final_logits"]},
     "final_logits is not finite at position 0 for sequence 0 of the shard"),
])  # fmt: skip
def test_nan_in_a_weight_is_named_with_what_it_spoils(
    shelf: toy.Shelf, tmp_path: Path, weight: str, n_ctx: int, fields: dict[str, Any], problem: str
):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"transformer.{weight}.weight"][3].fill_(torch.nan)

    path = toy.copy_of(shelf.path("gpt2"), tmp_path / "m")
    toy.change_weights(path, spoil)
    tokens = toy.repeating_tokens(n_ctx, batch=2)
    assert refused(MeasureError, toy.measure, path, tokens, **fields) == (
        f"{problem}; expected a finite number: look at the model's weights and precision: "
        f"transformer.{weight}.weight holds numbers that are NaN or infinite"
    )


def test_weights_that_the_configuration_does_not_use_are_refused_unless_a_scan_ignores_them(
    shelf: toy.Shelf, tmp_path: Path
) -> None:
    path = toy.copy_of(shelf.path("gpt2"), tmp_path / "deep", config_with(n_layer=2))
    tokens = toy.repeating_tokens(8)
    # A twelfth is c_attn.bias, which the library takes for a mask that it once stored.
    assert problem_of(path) == (
        f"{path}: 11 tensors of the weights have no place in the model of config.json: "
        "transformer.h.2.attn.c_attn.weight, transformer.h.2.attn.c_proj.bias, "
        "transformer.h.2.attn.c_proj.weight, …; correct config.json, or set unused_weights = "
        '"ignore" to measure without them'
    )
    assert toy.measure(path, tokens, unused_weights="ignore").heads["entropy"].shape[1] == 2


MASK = torch.ones(1, 1, 40, 40, dtype=torch.bool)
STORED: dict[str, tuple[str, ...]] = {
    "gpt2": ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias"),
    "gpt-neo": ("transformer.h.{}.attn.attention.bias",),
    "neox": (
        "gpt_neox.layers.{}.attention.bias", "gpt_neox.layers.{}.attention.rotary_emb.inv_freq",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_masks_and_angles_that_older_libraries_stored_are_no_unused_weights(
    shelf: toy.Shelf, tmp_path: Path, name: str
) -> None:
    path = toy.copy_of(shelf.path(name), tmp_path / name)

    def add(weights: dict[str, torch.Tensor]) -> None:
        for layer, place in product(range(2), STORED[name]):
            weights[place.format(layer)] = MASK.clone()

    toy.change_weights(path, add)
    assert np.isfinite(toy.measure(path, toy.repeating_tokens(8)).heads["entropy"]).all()


# MLPs that work in pieces


LLAMA = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2))
GPT2 = GPT2MLP(40, GPT2Config(n_embd=16))


@pytest.mark.parametrize("mlp", [LLAMA, GPT2.eval()], ids=lambda mlp: type(mlp).__name__)
@pytest.mark.parametrize("strided", [False, True])
@torch.inference_mode()
def test_pieces_are_small_and_make_the_same_numbers(mlp: nn.Module, strided: bool) -> None:
    stream = torch.randn(3, 900, 16)
    if strided:
        stream = stream.transpose(0, 1).contiguous().transpose(0, 1)
    whole = mlp(stream.contiguous())
    calls: list[int] = []
    shown: list[object] = []
    linear = next(child for child in mlp.children() if next(child.parameters(), None) is not None)
    hooks = [
        linear.register_forward_hook(lambda _module, args, _output: calls.append(args[0].shape[1])),
        mlp.register_forward_hook(lambda _module, _args, output: shown.append(output)),
    ]
    # Layers may share a module.
    with mlps_in_pieces([mlp, mlp]):
        output = mlp(stream)
    assert "forward" not in vars(mlp)
    for hook in hooks:
        hook.remove()
    assert calls == [ROWS_OF_PIECE, ROWS_OF_PIECE, 2700 - 2 * ROWS_OF_PIECE]
    # A hook of the module sees the whole output, as without pieces.
    assert len(shown) == 1
    assert shown[0] is output
    torch.testing.assert_close(output, whole, rtol=1e-6, atol=1e-7)


def test_what_may_mix_positions_is_left_whole() -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_local_experts=2
    )
    with_own_weights = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    modules = [MixtralSparseMoeBlock(config), with_own_weights, nn.Conv1d(9, 9, 3), nn.Identity()]
    with mlps_in_pieces(modules):
        assert not any("forward" in vars(module) for module in modules)
