"""The formats `fp8-kv-scales` and `fp8-kv-checkpoint`: how a cache of 8-bit floats is scaled."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headcount.exports.formats.head_profiles import input_notes
from headcount.exports.shared.registry import Exported, Needs, Options, Part, Setting, export_format
from headcount.exports.shared.source import ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.reasons import reason

LARGEST_E4M3 = 448.0  # the largest number of the format float8_e4m3fn

STATISTICS = {"q": "query_absmax", "k": "key_absmax", "v": "value_absmax"}
"""The statistic that each scale is made of."""

ABSMAX = Needs(statistics=tuple(STATISTICS.values()), about_text=True)

SCALES = "kv_scales.safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
RENAMED = "model-00001-of-00001.safetensors"  # the only file of weights, beside that of scales

UNQUANTISED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "frozen",
    "config_groups": {},
    "ignore": [],
}
"""A model in which compressed-tensors quantised no weights. vLLM wants `config_groups`."""


def problem_of_prefix(prefix: str) -> str | None:
    """Why a name cannot be that of the attention modules. None if it can."""
    if "{layer}" in prefix:
        return None
    return f"--prefix: expected a name with {{layer}} in it, got {prefix!r}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can take scales."""

    directory: Path
    config: dict[str, Any]  # its config.json
    index: dict[str, Any]  # which of `files` holds which tensor
    prefix: str  # name of the attention module of a layer
    files: dict[str, Path]  # its files by the names that they get beside the scales


def checkpoint_of(setting: Setting, options: Options) -> Checkpoint:
    """The checkpoint that gets the scales. It is an error if it cannot take them."""
    # Imported here: a run's other exports do without its model.
    from headcount.workers.model.info.description import find_model
    from headcount.workers.model.info.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

    model = options["checkpoint"]
    directory = find_model(model or setting.model, None if model else setting.revision)
    if directory.is_file():
        raise QueryError(f"{directory}: is one file; --checkpoint names the directory of the model")
    if not isinstance(setting.destination, Path):
        raise QueryError(f"{setting.destination}: expected a folder of this disk, to link weights")
    if setting.destination.resolve() == directory.resolve():
        raise QueryError(f"{directory}: is the checkpoint itself; expected another folder")
    _check_adapter(setting, directory, is_named=model is not None)
    config, index = _config(directory), _index(directory)
    text = config.get("text_config", config)
    expected = {
        "num_attention_heads": setting.n_heads,
        "num_key_value_heads": setting.n_kv_heads or setting.n_heads,
    }
    run = setting.directory
    subject = "that is measured" if run is None else run.name.replace("run_id=", "as in run ")
    for name, heads in expected.items():
        # Models without groups have no number of KV heads, or call it otherwise.
        if text.get(name, heads) != heads:
            raise QueryError(
                f"{directory}/config.json: {name} is {text[name]}, expected {heads} {subject}; "
                "--checkpoint names the directory of the model that was measured"
            )
    layers = sorted(setting.attention_layers)
    prefix = _attention_module(directory, index["weight_map"], layers, options["prefix"])
    names = {f"{_owner(prefix).replace('{layer}', str(layers[0]))}.{each}_scale" for each in "qkv"}
    if already := sorted(names & index["weight_map"].keys()):
        raise QueryError(f"{directory}: has scales already, such as {already[0]}; expected none")
    # Transformers would apply an adapter to the weights, and they were measured without.
    others = {ADAPTER_CONFIG, *ADAPTER_WEIGHTS}
    paths = (path for path in directory.iterdir() if path.is_file() and path.name not in others)
    files = {path.name: path for path in paths}
    # With a file of the default name beside it, transformers would not look into the index.
    if WEIGHTS in files:
        files[RENAMED] = files.pop(WEIGHTS)
        index["weight_map"] = dict.fromkeys(index["weight_map"], RENAMED)
    return Checkpoint(directory, config, index, prefix, files)


def _check_adapter(setting: Setting, directory: Path, *, is_named: bool) -> None:
    """It is an error unless the weights of a checkpoint alone are what was measured.

    `is_named` says that --checkpoint names it, so it need not be the measured directory.
    """
    from headcount.workers.model.info.model_files import adapter_files

    if setting.adapter == "apply" and not is_named:
        raise QueryError(
            f"{directory}: was measured with its adapter, which a folder with scales does not "
            "apply; merge it into the weights, and name the result with --checkpoint"
        )
    names = " and ".join(file.name for file in adapter_files(directory))
    if names and setting.adapter != "ignore":
        raise QueryError(
            f"{directory}: has an adapter ({names}), expected weights alone, as they were "
            "measured; remove it, or name another directory with --checkpoint"
        )


def refusal_of_checkpoint(setting: Setting, options: Options) -> str | None:
    """What is there must be an export of this checkpoint."""
    own = {*checkpoint_of(setting, options).files, "config.json", INDEX, SCALES}
    folder = setting.destination
    names = sorted(os.listdir(folder)) if isinstance(folder, Path) and folder.is_dir() else []
    # Another checkpoint may have files of the same names, but no scales.
    others = [name for name in names if name not in own] if SCALES in names else names
    if not others:
        return None
    return f"{folder}: holds {others[0]}, which is no part of this export; choose another"


def _owner(prefix: str) -> str:
    """The module that owns the scales: vLLM's own layer, which lies in the attention as `attn`.

    vLLM adds that to their names, but not where `.attn.` is there already, as in
    `h.0.attn.k_scale` of GPT-2.
    """
    return f"{prefix}.attn" if prefix.endswith(".attn") else prefix


@export_format(
    "Scales of an 8-bit KV cache, by KV head",
    read_by="what puts scales into a checkpoint of its own; for vLLM there is `fp8-kv-checkpoint`",
    source="https://github.com/vllm-project/vllm/pull/30141",
    writes="file",
    example="kv_scales.safetensors",
    load="""\
from safetensors.numpy import load_file

scales = load_file("kv_scales.safetensors")
print(scales["model.layers.0.self_attn.k_scale"].ravel())  # one for each KV head
""",
    needs=ABSMAX,
    refusal=lambda _, options: problem_of_prefix(options["prefix"]),
    libraries=("safetensors",),
)
def fp8_kv_scales(
    source: ExportSource,
    *,
    quantile: Part | None = None,
    prefix: str = "model.layers.{layer}.self_attn",
) -> Exported:
    """Safetensors with `k_scale`, `v_scale` and `q_scale` of every layer, one number a head.

    A scale is the largest component of any key, value or query of the head, divided by 448, the
    largest number of float8_e4m3fn. Tensors are float32 of shape `[heads, 1, 1]`: KV heads for k
    and v, query heads for q. Keys and queries are measured after rotation, as a cache holds them.
    Where no component differs from 0, the scale is 1.

    * `quantile`: use this quantile of the largest components of sequences instead of the largest
      of all, for example 0.999. A rare outlier is then clipped, and all else keeps more digits.
    * `prefix`: name of the attention module of a layer in the checkpoint; `{layer}` is its number.
    """
    content = source.safetensors_file(_tensors(scales_of_heads(source, quantile), prefix))
    return Exported(files={"kv_scales": content}, notes=input_notes(source))


@export_format(
    "A checkpoint whose 8-bit KV cache has scales, by KV head",
    read_by="vLLM (`vllm serve FOLDER`)",
    source="https://docs.vllm.ai/en/v0.25.0/features/quantization/quantized_kvcache/",
    writes="folder",
    example="my-model-fp8-kv",
    load="""\
import json

with open("my-model-fp8-kv/config.json") as file:
    config = json.load(file)
print(config["compression_config"]["kv_cache_scheme"]["strategy"])
""",
    needs=ABSMAX,
    refusal=refusal_of_checkpoint,
    libraries=("safetensors",),
)
def fp8_kv_checkpoint(
    source: ExportSource,
    *,
    checkpoint: str | None = None,
    strategy: Literal["attn_head", "tensor"] = "attn_head",
    quantile: Part | None = None,
    prefix: str | None = None,
) -> Exported:
    """The model's own files, the scales of `fp8-kv-scales` as one more, and a config that says so.

    Weights and tokenizer are links to the model's files, or copies on another disk.
    `kv_scales.safetensors` has the scales and the index names it. `config.json` gets a
    `compression_config` of compressed-tensors, which quantises no weights and the cache to
    float8_e4m3fn. vLLM reads it where there is no `quantization_config`. Transformers ignores it:
    the model loads as before, and the scales are reported as unexpected. If compressed-tensors has
    quantised the weights, the scheme goes into the `quantization_config` that is there. vLLM 0.32
    for CPUs loads the folder of a Llama and that of a GPT-2.

    * `checkpoint`: directory of the model in safetensors, if it is not the one that was measured.
    * `strategy`: a scale for every head (attn_head), which vLLM applies with Flash Attention 3, or
      the largest of a layer (tensor), for the other backends.
    * `quantile`: as in `fp8-kv-scales`.
    * `prefix`: name of the attention module of a layer in the checkpoint; `{layer}` is its number.
      By default, the only one that the checkpoint has.
    """
    made_for = checkpoint_of(source.setting, source.options)
    config, index = made_for.config, made_for.index
    scales = scales_of_heads(source, quantile)
    if strategy == "tensor":
        scales = {
            letter: {layer: of_heads.max(keepdims=True) for layer, of_heads in of_layers.items()}
            for letter, of_layers in scales.items()
        }
    tensors = _tensors(
        scales, _owner(made_for.prefix), shape=(-1, 1, 1) if strategy == "attn_head" else (1,)
    )
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    scheme: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    scheme |= {"dynamic": False, "symmetric": True}
    config[key] = {**(config.get(key) or UNQUANTISED), "kv_cache_scheme": scheme}
    index["weight_map"] |= dict.fromkeys(tensors, SCALES)
    if "total_size" in index["metadata"]:
        index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    # The header of the scales says the options, but not where a checkpoint lies.
    source = replace(source, options={**source.options, "checkpoint": made_for.directory.name})
    files: dict[str, bytes | Path] = {
        **made_for.files,
        "config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(),
        INDEX: json.dumps(index, indent=2).encode(),
        SCALES: source.safetensors_file(tensors),
    }
    return Exported(
        files=files, notes=(f"attention modules: {made_for.prefix}", *input_notes(source))
    )


def _config(directory: Path) -> dict[str, Any]:
    """The checkpoint's config.json, if a scheme of its cache has room in it."""
    config = _json_object(directory / "config.json")
    subject = f"{directory}/config.json: "
    if "compression_config" in config:
        raise QueryError(f"{subject}has a compression_config already; expected none")
    quantised = config.get("quantization_config") or UNQUANTISED
    if quantised.get("quant_method") != UNQUANTISED["quant_method"]:
        raise QueryError(
            f"{subject}its weights are quantised by {quantised.get('quant_method')}, where vLLM "
            "takes no scheme of the cache; expected none, or compressed-tensors"
        )
    if quantised.get("kv_cache_scheme"):
        raise QueryError(f"{subject}has a kv_cache_scheme already; expected none")
    return config


def _index(directory: Path) -> dict[str, Any]:
    """Which file of the checkpoint holds which tensor."""
    # Of both, models are read from the one file.
    if not (directory / WEIGHTS).is_file():
        if not (directory / INDEX).is_file():
            raise QueryError(
                f"{directory}: has neither {INDEX} nor {WEIGHTS}; expected a checkpoint in "
                "safetensors"
            )
        return {"metadata": {}, "weight_map": {}} | _json_object(directory / INDEX)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / WEIGHTS, "np") as file:
            return {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), WEIGHTS)}
    except SafetensorError as error:
        raise QueryError(f"{directory / WEIGHTS}: not safetensors ({error})") from None


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QueryError(f"{file}: expected an object in JSON ({reason(error)})") from None
    if not isinstance(content, dict):
        raise QueryError(f"{file}: expected an object in JSON, got {type(content).__name__}")
    return content


def _attention_module(
    directory: Path, names: Iterable[str], layers: list[int], prefix: str | None
) -> str:
    """The name of the attention module of a layer, which must be there in these layers alone.

    Names are as `model.layers.0.self_attn.q_proj.weight` and `transformer.h.0.attn.c_attn.bias`.
    """
    found: dict[str, set[int]] = {}
    for name in names:
        if match := re.match(r"(.+?)\.(\d+)\.((?:\w+\.)*?\w*(?:attn|attention))\.", name):
            before, layer, after = match.groups()
            found.setdefault(f"{before}.{{layer}}.{after}", set()).add(int(layer))
    fitting = [module for module, of_module in found.items() if of_module == set(layers)]
    if prefix in fitting:
        return prefix
    if prefix is None and len(fitting) == 1:
        return fitting[0]
    has = ", ".join(f"{module} in {len(of_module)}" for module, of_module in found.items())
    advice = f"; say --prefix {' or '.join(fitting)}" if fitting else ""
    raise QueryError(
        f"{directory}: expected {prefix or 'one attention module'} in the {len(layers)} layers "
        f"that attend in the run, got {has or 'none'}{advice}"
    )


def scales_of_heads(
    source: ExportSource, quantile: float | None
) -> dict[str, dict[int, np.ndarray]]:
    """The scales of q, k and v of every layer that attends, one number a head."""
    scales: dict[str, dict[int, np.ndarray]] = {}
    for letter, statistic in STATISTICS.items():
        largest = _largest(source, statistic, quantile)
        if letter != "q":
            # Query heads that share keys have the same values, so their largest is that of each.
            largest = largest.reshape(*source.kv_shape, source.group_size).max(axis=2)
        # A scale of 0 would divide by 0.
        of_heads = np.where(largest > 0, largest / LARGEST_E4M3, 1).astype(np.float32)
        # A layer that does not attend has no keys.
        attends = ~np.isnan(largest).any(axis=1)
        scales[letter] = {int(layer): of_heads[layer] for layer in np.flatnonzero(attends)}
    return scales


def _tensors(
    scales: dict[str, dict[int, np.ndarray]], prefix: str, shape: tuple[int, ...] = (-1, 1, 1)
) -> dict[str, np.ndarray]:
    """The scales by the names that they have in a checkpoint."""
    return {
        f"{prefix.replace('{layer}', str(layer))}.{letter}_scale": of_heads.reshape(shape)
        for letter, of_layers in scales.items()
        for layer, of_heads in of_layers.items()
    }


def _largest(source: ExportSource, statistic: str, quantile: float | None) -> np.ndarray:
    """The largest component of each query head, or a quantile of the largest ones of its sequences:
    the upper end of its bin, so never less.

    Bins are at most 4.4 % wide. No quantile exceeds the maximum, which is exact.
    """
    largest = source.matrix(statistic, "any_value(maximum)")
    if quantile is None:
        return largest
    bins = source.by_head(statistic, "list([high, count] ORDER BY bin)", "distributions")
    for head, of_head in bins.items():
        ends, counts = np.transpose(of_head)
        ranks = np.cumsum(counts)
        # The first bin with which at least this share of the sequences is counted.
        end = ends[np.searchsorted(ranks, quantile * ranks[-1])]
        largest[head] = min(end, largest[head])
    return largest
