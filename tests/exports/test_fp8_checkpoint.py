"""`headcount export fp8-kv-checkpoint`: what vLLM would read, and what transformers reads.

vLLM itself reads such folders in `tests/vllm`, where it is installed. Here the rules of its loader
stand as the source of 0.32 says them, below `vllm/model_executor`:
`layers/quantization/compressed_tensors/compressed_tensors.py` (`from_config`,
`CompressedTensorsKVCacheMethod`), `layers/quantization/base_config.py` (`get_cache_scale_mapper`)
and `model_loader/weight_utils.py` (`get_quant_config`, `filter_duplicate_safetensors_files`).
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.exports.test_exports import HEADS, KV_HEADS, LAYERS, write_toy
from tests.toys.commands import error_of, printed
from tests.toys.toy_models import family, gpt2, save_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of 4 query heads on 2 KV heads, and such a model in one and in many
    files.
    """
    directory = tmp_path_factory.mktemp("checkpoints")
    columns = {
        # Scales are 1/64 to 8/64 for the query heads of both layers, 4/64 and 8/64 for KV heads.
        "query_absmax": lambda row: 7.0 * (1 + row.head + HEADS * row.layer),
        "key_absmax": lambda row: 28.0 * (1 + row.head // 2),
        "value_absmax": lambda row: 56.0 * (1 + row.head // 2),
    }
    write_toy(directory / "runs", "a-1", columns)
    save_model(directory / "one", family("LlamaConfig", num_key_value_heads=KV_HEADS))
    model = AutoModelForCausalLM.from_pretrained(directory / "one")
    model.save_pretrained(directory / "many", max_shard_size="20KB")
    assert len(list((directory / "many").glob("*.safetensors"))) > 2
    (directory / "one/tokenizer.json").write_text("{}")
    return directory


def export(home: Path, checkpoint: Path, folder: Path, *words: object) -> tuple[object, ...]:
    """The command that writes a checkpoint with scales."""
    runs = home / "runs"
    return ("export", "fp8-kv-checkpoint", runs, "--checkpoint", checkpoint, "-o", folder, *words)


def refused(words: tuple[object, ...], message: str) -> None:
    told = error_of(*words)
    assert re.search(message, told), told
    assert "\n" not in told


def read_as_vllm(folder: Path) -> dict[str, list[float]]:
    """The scales that vLLM's attention layers of this model would have, without a parallel one."""
    config = json.loads((folder / "config.json").read_text())
    # Of `get_quant_config`.
    quantised = config.get("quantization_config") or config["compression_config"]
    assert quantised["quant_method"] == "compressed-tensors"
    assert quantised["config_groups"] == {}
    total_heads, total_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    # Of `validate_kv_cache_scheme`.
    scheme = quantised["kv_cache_scheme"]
    assert (scheme["type"], scheme["num_bits"], scheme["symmetric"]) == ("float", 8, True)
    assert scheme["strategy"] in ("tensor", "attn_head")
    # Of `filter_duplicate_safetensors_files`: the files that the index names, which must be there.
    names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    assert names == {path.name for path in folder.glob("*.safetensors")}
    # Of `create_weights`.
    n_scales = total_kv_heads if scheme["strategy"] == "attn_head" else 1
    letters = ("q", "k", "v")
    parameters = {
        f"model.layers.{layer}.self_attn.attn.{letter}_scale": [1.0] * n_scales
        for layer in range(config["num_hidden_layers"])
        for letter in letters
    }
    for file in names:
        for name, tensor in load_file(folder / file).items():
            # Of `get_cache_scale_mapper`.
            remapped = re.sub(r"(?<!\.attn)\.([qkv])_scale$", r".attn.\1_scale", name)
            if not name.endswith("_scale"):
                continue
            numbers = tensor.ravel()
            # Of `_tp_aware_loader`: query heads of a group share the largest of their scales.
            if scheme["strategy"] == "attn_head" and name.endswith("q_scale"):
                numbers = numbers.reshape(-1, total_heads // total_kv_heads).max(1)
            assert len(numbers) == len(parameters[remapped])
            parameters[remapped] = numbers.tolist()
    return parameters


@pytest.mark.parametrize(("name", "strategy", "expected"), [
    ("many", "attn_head", {"q": [[2, 4], [6, 8]], "k": [[4, 8]] * 2, "v": [[8, 16]] * 2}),
    ("one", "tensor", {"q": [[4], [8]], "k": [[8]] * 2, "v": [[16]] * 2}),
])  # fmt: skip
def test_vllm_finds_every_scale_and_transformers_the_same_model(
    name: str,
    strategy: str,
    expected: Mapping[str, list[list[int]]],
    home: Path,
    tmp_path: Path,
):
    folder = tmp_path / "made"
    output = printed(*export(home, home / name, folder, "--strategy", strategy))
    assert "note: attention modules: model.layers.{layer}.self_attn\n" in output
    assert read_as_vllm(folder) == {
        f"model.layers.{layer}.self_attn.attn.{letter}_scale": [n / 64 for n in of_layers[layer]]
        for letter, of_layers in expected.items()
        for layer in range(LAYERS)
    }
    tokens = torch.arange(12)[None]
    before = AutoModelForCausalLM.from_pretrained(home / name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    after, report = loaded
    assert torch.equal(after(tokens).logits, before(tokens).logits)
    assert report["unexpected_keys"] == load_file(folder / "kv_scales.safetensors").keys()
    assert not report["missing_keys"]
    # Weights take no room, the others are as they were.
    weights = home / name / next(path.name for path in (home / name).glob("*.safetensors"))
    assert weights.stat().st_nlink >= 2
    assert (folder / "tokenizer.json").is_file() == (name == "one")
    # The same command makes the same folder in place of this one.
    printed(*export(home, home / name, folder, "--strategy", strategy, "--replace"))
    if name == "many":
        sizes = json.loads((folder / INDEX).read_text())["metadata"]
        scales = 4 * LAYERS * (HEADS + 2 * KV_HEADS)
        in_file = json.loads((home / "many" / INDEX).read_text())["metadata"]["total_size"]
        assert sizes["total_size"] == in_file + scales


def test_scales_stand_below_a_module_that_has_the_name_of_vllms_layer(home: Path, tmp_path: Path):
    """vLLM puts no second `attn` into a name, and finds no `h.0.attn.k_scale` in GPT-2."""
    save_model(tmp_path / "gpt2", gpt2(n_layer=LAYERS))
    printed(*export(home, tmp_path / "gpt2", tmp_path / "made"))
    assert load_file(tmp_path / "made/kv_scales.safetensors").keys() == {
        f"transformer.h.{layer}.attn.attn.{letter}_scale"
        for layer in range(LAYERS)
        for letter in "qkv"
    }


def test_a_scheme_joins_the_config_of_weights_that_are_quantised(home: Path, tmp_path: Path):
    copy = _changed(home, tmp_path, quantization_config=QUANTISED | {"kv_cache_scheme": None})
    printed(*export(home, copy, tmp_path / "made"))
    config = json.loads((tmp_path / "made/config.json").read_text())
    assert "compression_config" not in config
    scheme = config["quantization_config"].pop("kv_cache_scheme")
    assert config["quantization_config"] == QUANTISED
    assert scheme == {
        "num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False,
        "symmetric": True,
    }  # fmt: skip


QUANTISED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
}
SCALE = "model.layers.0.self_attn.k_scale"


@pytest.mark.parametrize(("config", "tensors", "words", "message"), [
    ({"num_key_value_heads": 4}, {}, (), r"num_key_value_heads is 4, expected 2 as in run a-1"),
    ({"quantization_config": {"quant_method": "awq"}}, {}, (), r"weights are quantised by awq"),
    ({"quantization_config": QUANTISED | {"kv_cache_scheme": {"num_bits": 8}}}, {}, (),
     r"has a kv_cache_scheme already; expected none"),
    ({}, {SCALE: [1.0]}, (), rf"has scales already, such as {SCALE}"),
    ({}, {}, ("--prefix", "h.{layer}.attn"),
     r"expected h\.\{layer\}\.attn in the 2 layers that attend in the run, got model\.layers\."
     r"\{layer\}\.self_attn in 2; say --prefix model\.layers\.\{layer\}\.self_attn$"),
    ({}, {"vision.layers.0.attn.q": [1.0], "vision.layers.1.attn.q": [1.0]}, (),
     r"say --prefix .* or vision\.layers\.\{layer\}\.attn"),
    ({}, {"model.layers.2.self_attn.q": [1.0]}, (),
     r"got model\.layers\.\{layer\}\.self_attn in 3$"),
    ({}, None, (), r"expected a checkpoint in safetensors"),
])  # fmt: skip
def test_a_checkpoint_that_cannot_take_the_scales_is_refused_in_a_line(
    config: dict[str, Any],
    tensors: Mapping[str, list[float]] | None,
    words: tuple[str, ...],
    message: str,
    home: Path,
    tmp_path: Path,
):
    copy = _changed(home, tmp_path, tensors, **config)
    refused(export(home, copy, tmp_path / "made", *words), message)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_checkpoint_is_not_replaced_by_its_export(home: Path, tmp_path: Path):
    copy = _changed(home, tmp_path)
    refused(
        export(home, copy, copy, "--replace"), "is the checkpoint itself; expected another folder"
    )


def test_a_folder_has_no_adapter_that_was_not_measured(home: Path, tmp_path: Path):
    """Transformers would apply it to weights that were measured without it."""
    model, made = tmp_path / "model", tmp_path / "made"
    shutil.copytree(home / "one", model)
    (model / "tokenizer.json").unlink()
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        (model / name).write_bytes(b"{}")
    scan = ("fp8-kv-checkpoint", tmp_path / "runs", "--model", model, "-o", made)
    scan = (*scan, "--set", "sequences=2", "--set", "n_ctx=12")
    told = error_of("export", *scan)
    assert 'set adapter = "apply" to measure the weights with it, or "ignore"' in told
    told = error_of("export", *scan, "--set", "adapter=apply")
    assert "merge it into the weights, and name the result with --checkpoint" in told
    assert not (tmp_path / "runs").exists()
    printed("export", *scan, "--set", "adapter=ignore")
    assert not list(made.glob("adapter*"))
    assert (made / "kv_scales.safetensors").is_file()
    # This run says nothing of an adapter, as its model had none.
    refused(
        export(home, model, tmp_path / "other"),
        r"has an adapter \(adapter_config.json and adapter_model",
    )


def test_another_checkpoint_is_not_replaced(home: Path, tmp_path: Path):
    """Names of its files are those of the export, but for the scales."""
    shutil.copytree(home / "many", tmp_path / "made")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()}
    refused(
        export(home, home / "many", tmp_path / "made", "--replace"),
        "which is no part of this export; choose another",
    )
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "made").iterdir()} == before


def test_of_an_index_and_one_file_the_file_is_what_models_are_read_from(home: Path, tmp_path: Path):
    copy = _changed(home, tmp_path, {})
    index = {"weight_map": {"model.layers.0.self_attn.q_proj.weight": "absent.safetensors"}}
    (copy / INDEX).write_text(json.dumps(index))
    printed(*export(home, copy, tmp_path / "made"))
    assert read_as_vllm(tmp_path / "made").keys() == SCALES
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    tokens = torch.arange(12)[None]
    before = AutoModelForCausalLM.from_pretrained(home / "one")
    assert torch.equal(loaded(tokens).logits, before(tokens).logits)


SCALES = {
    f"model.layers.{layer}.self_attn.attn.{letter}_scale"
    for layer in range(LAYERS)
    for letter in "qkv"
}


def _changed(
    home: Path,
    directory: Path,
    tensors: Mapping[str, list[float]] | None = MappingProxyType({}),
    **config: Any,
) -> Path:
    """A checkpoint of the same model with other fields and more tensors; None: no tensors."""
    copy = directory / "copy"
    copy.mkdir()
    fields = json.loads((home / "one/config.json").read_text()) | config
    (copy / "config.json").write_text(json.dumps(fields))
    if tensors is not None:
        more = {name: np.array(values, np.float32) for name, values in tensors.items()}
        save_file(load_file(home / "one/model.safetensors") | more, copy / "model.safetensors")
    return copy
