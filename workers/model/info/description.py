"""Where a model lies and what it is, read from its files without loading it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headcount.schemas.errors import ModelError, RunError, unknown
from headcount.schemas.files.input_files import check_input_directory, check_real_path
from headcount.schemas.reasons import reason
from headcount.workers.model.info.bundled_models import BUNDLED, BUNDLED_MODELS
from headcount.workers.model.info.gguf_file import SUFFIX, gguf_config, read_gguf
from headcount.workers.model.info.model_files import (
    ADAPTER_WEIGHTS,
    CONFIG,
    LEGACY_WEIGHTS,
    PICKLED,
    SAFETENSORS,
    AdapterChoice,
    adapter_alone,
    adapter_files,
    check_adapter,
    file_digests,
    first_match,
    indexed_names,
    is_gguf,
    layout_of,
    listed_weights,
    read_object,
    sha256_of,
)
from headcount.workers.model.info.special_tokens import (
    TOKENIZER_NAMES,
    WORDS,
    first_in_vocabulary,
    special_tokens,
)
from headcount.workers.model.model_info import SHAPE, ModelInfo, text_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from headcount.schemas.scans.scan import Scan

HUB_FILES = ["*.json", "*.model", "*.txt", *ADAPTER_WEIGHTS]
"""What is downloaded of a model before its weights: configuration, tokenizer, index, adapter."""

HUB_SECONDS = 10.0
"""Give up after this many seconds if the Hub does not say which files a model has."""

LEGACY_PLAIN = {
    "positional_embedding_type": "standard",
    "shortformer_pos": False,
    "attention_dir": "causal",
    "use_attn_scale": True,
    "use_local_attn": False,
    "parallel_attn_mlp": False,
    "scale_attn_by_inverse_layer_idx": False,
}
"""Fields of a legacy config.json that would change the pattern, each with its supported value."""

TOKENIZER_BOS = {"NeelNanda/gpt-neox-tokenizer-digits": 1}
"""Beginning-of-sequence tokens of legacy models whose config.json names a tokenizer alone."""


def local_directory(spec: str, revision: str | None = None, field: str = "model") -> Path | None:
    """The directory or GGUF file of a model, or of what a `field` names, that is bundled or local;
    None if its name is one of the Hub.
    """
    local = Path(os.path.expanduser(spec))
    if revision is not None and (spec.startswith("bundled:") or local.exists()):
        kind = "file" if local.is_file() else "directory"
        kind = f"a {kind} of this machine" if local.exists() else "a model of headcount"
        raise ModelError(
            f"revision: expected with a model of the Hub only, and {spec} is {kind}, got "
            f"{revision!r}; leave it out"
        )
    if spec.startswith("bundled:"):
        name = spec.removeprefix("bundled:")
        directory = BUNDLED_MODELS / name
        is_inside = ".." not in directory.parts and not os.path.isabs(name)
        if not is_inside or not (directory / CONFIG).is_file():
            raise ModelError(f"{field}: {unknown('bundled model', name, BUNDLED)}")
        return directory
    if local.is_file():
        check_real_path(spec, os.path.realpath(local))
        if local.suffix.lower() != SUFFIX:
            expected = f"expected a directory, or a file that ends in {SUFFIX}"
            raise ModelError(f"{field} {spec!r}: is a file; {expected}")
        return local
    if local.is_dir():
        if (local / CONFIG).exists():
            check_input_directory(local)
        else:
            # Perhaps the directory of many checkpoints, of which each is looked at by itself.
            check_real_path(spec, os.path.realpath(local))
        return local
    # A name on the Hub is OWNER/NAME, so this was meant as a path.
    if spec.startswith((".", "/", "~")) or spec.count("/") > 1 or spec.endswith(SUFFIX):
        kind = "file" if spec.endswith(SUFFIX) else "directory"
        raise ModelError(f"{field} {spec!r}: no such {kind}")
    return None


def find_tokenizer(spec: str | None, *, download: bool = True) -> Path | None:
    """The directory or GGUF file of a tokenizer; None if there is none to find."""
    if spec is None or (directory := local_directory(spec, field="tokenizer")) is not None:
        return None if spec is None else directory
    from huggingface_hub import snapshot_download

    try:
        options: dict[str, Any] = {"ignore_patterns": ["*/*"], "local_files_only": not download}
        return Path(snapshot_download(spec, allow_patterns=HUB_FILES, **options))
    except Exception as error:
        raise ModelError(
            f"tokenizer {spec!r}: neither a directory, nor a GGUF file, nor to be had from the Hub "
            f"({reason(error)})"
        ) from None


def find_model(spec: str, revision: str | None = None, *, download: bool = True) -> Path:
    """The directory of a model: bundled, local, or downloaded once from the Hub.

    Without `download`, a model of the Hub must have been downloaded before.
    """
    if (directory := local_directory(spec, revision)) is not None:
        return directory
    from huggingface_hub import snapshot_download

    def downloaded(patterns: list[str]) -> Path:
        options = {"revision": revision, "local_files_only": not download}
        # Of a directory in it, such as original/ or onnx/, nothing is read.
        return Path(
            snapshot_download(spec, allow_patterns=patterns, ignore_patterns=["*/*"], **options)
        )

    try:
        directory = downloaded(HUB_FILES)
        # Most repositories that have pickled weights have the same as safetensors.
        for weights in _hub_weights(directory):
            if first_match(os.listdir(downloaded(weights)), weights):
                break
        return directory
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model {spec!r}: neither a directory, nor bundled:NAME, nor to be had from the Hub "
            f"({reason(error)})"
        ) from None


def _hub_weights(directory: Path) -> Iterator[list[str]]:
    """Names of the weights that a model of the Hub may have, in the order in which they count."""
    for file, index in (SAFETENSORS, PICKLED):
        yield [file]
        if (directory / index).is_file():
            yield indexed_names(directory / index)
    yield from ([pattern] for pattern in LEGACY_WEIGHTS)


@cache
def hub_digests(model: str, revision: str | None) -> dict[str, str]:
    """What the Hub says of the files of a model, by name, without downloading any.

    It is the SHA-256 of a large file, as all weights are, and Git's digest of a small one.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(
            model, revision=revision, timeout=HUB_SECONDS, files_metadata=True
        )
        files = {
            file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id
            for file in info.siblings or []
        }
    except Exception as error:
        raise ModelError(
            f"model {model!r}: the Hub does not say which files it has ({reason(error)})"
        ) from None
    # A mirror of the Hub may list files without digests.
    digests = {name: digest for name, digest in files.items() if digest}
    if listed_weights(digests) != listed_weights(files):
        raise ModelError(f"model {model!r}: the Hub gives no digests of its weights")
    return digests


class _Configuration(NamedTuple):
    """What the configuration of a model says."""

    layout: str
    shape: dict[str, Any]  # and special tokens, by the fields of `ModelInfo`
    tokens: dict[str, Any]  # fields of the configuration, those of special tokens among them
    defaults: dict[str, Any] | None = None  # what transformers makes of them
    quantisation: str = ""


def describe(
    path: Path,
    digests: dict[str, bytes] | None = None,
    adapter: AdapterChoice = "refuse",
    tokenizer: Path | None = None,
) -> ModelInfo:
    """What a model is, by its configuration and `digests` of its files; nothing is loaded.

    `adapter` says what an adapter beside the weights is for, `tokenizer` where a tokenizer lies
    that is not the model's own.
    """
    configuration = _gguf_configuration(path) if is_gguf(path) else _configuration(path)
    layout, shape = configuration.layout, configuration.shape
    check_adapter(path, adapter, layout)
    digests = digests or file_digests(path, layout, adapter)
    special = special_tokens(
        path,
        tokenizer or path,
        configuration.tokens,
        shape["d_vocab"],
        shape.get("family", ""),
        configuration.defaults,
    )
    shape |= special.ids
    files = tuple((name, digest.hex()[:16]) for name, digest in digests.items())
    return ModelInfo(
        str(path),
        path.name,
        layout,
        sha256_of(digests),
        **shape,
        files=files,
        has_adapter=adapter == "apply",
        bos=special.bos,
        quantisation=configuration.quantisation,
        tokenizer_path="" if tokenizer is None else str(tokenizer),
        notes=(*_notes_on_files(path, adapter), *special.notes),
    )


def described(scan: Scan) -> ModelInfo:
    """What the model of a scan is."""
    path, tokenizer = find_model(scan.model, scan.revision), find_tokenizer(scan.tokenizer)
    return describe(path, None, scan.adapter, tokenizer)


def check_same_model(model: str, here: ModelInfo, driver: ModelInfo) -> None:
    """Refuse to measure for a driver whose model is another one than this machine's."""
    if here.sha256 != driver.sha256:
        raise RunError(
            f"model {model}: this node has weights {here.sha256}, the driver {driver.sha256}; "
            "copy the driver's files there"
        )
    if here.identity != driver.identity:
        raise RunError(
            f"model {model}: on this node its files name other special tokens than on the driver; "
            "copy the driver's files there"
        )


def _configuration(path: Path) -> _Configuration:
    """The configuration of a model in a directory."""
    if path.is_dir() and (problem := adapter_alone(path)):
        raise ModelError(problem)
    if not (path / CONFIG).is_file():
        raise ModelError(f"{path}: no readable config.json; expected {_expected_model(path)}")
    config = read_object(path / CONFIG)
    if layout_of(config) == "legacy":
        return _Configuration("legacy", _legacy_shape(path, config), _legacy_tokens(config))
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        text = text_config(loaded)
    except Exception as error:
        raise ModelError(
            f"{path}/config.json: not a causal language model that can be scanned ({reason(error)})"
        ) from None
    shape = shape_of(text, f"{path}/config.json")
    _check_rotation(text, f"{path}/config.json")
    tokens = _text_fields(config, loaded, text)
    return _Configuration("huggingface", shape, tokens, vars(text))


def _gguf_configuration(path: Path) -> _Configuration:
    """The configuration of a model in a GGUF file."""
    file = read_gguf(path)
    text = text_config(gguf_config(path))
    tokens = {field: file.fields.get(f"tokenizer.ggml.{field}") for field in TOKENIZER_NAMES}
    shape = shape_of(text, str(path))
    return _Configuration("gguf", shape, tokens, quantisation=file.quantisation)


def _expected_model(path: Path) -> str:
    """What a directory without a configuration should be."""
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else []
    if not files:
        return "a model directory"
    names = ", ".join(file.name for file in files[:3])
    return f"one, or the name of a GGUF file, such as model = '{files[0]}' (it has {names})"


def _check_rotation(config: PretrainedConfig, where: str) -> None:
    """Refuse rotary positions of a type that transformers cannot make."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: Any = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    # Where layers differ, each type of layer has its own.
    for each in (parameters, *parameters.values()):
        kind = each.get("rope_type", "default") if isinstance(each, dict) else "default"
        known = {"default", *ROPE_INIT_FUNCTIONS}
        if kind not in known:
            raise ModelError(f"{where}: {unknown('rope_type', str(kind), known)}")


def _text_fields(
    config: dict[str, Any], loaded: PretrainedConfig, text_config: PretrainedConfig
) -> dict[str, Any]:
    """What config.json says of the language model, which may be a part of the model."""
    parts = [name for name in loaded.sub_configs if getattr(loaded, name, None) is text_config]
    fields = dict(config)
    for name in parts:
        part = config.get(name)
        stated = part if isinstance(part, dict) else {}
        fields |= {field: value for field, value in stated.items() if value is not None}
    return fields


def _notes_on_files(path: Path, adapter: AdapterChoice) -> Iterator[str]:
    """What is said of files that another program might read otherwise."""
    if is_gguf(path):
        yield f"the weights are those of a GGUF file, {read_gguf(path).quantisation}"
        return
    names = ", ".join(file.name for file in adapter_files(path))
    if names:
        yield f"the adapter ({names}) is {'applied' if adapter == 'apply' else 'ignored'}"
    weights, index = SAFETENSORS
    if (path / weights).is_file() and (path / index).is_file():
        others = [name for name in indexed_names(path / index) if name != weights]
        if others:
            yield f"the weights are those of {weights}; {index} names others, which are not read"


HUGGING_FACE_SHAPE = {
    "n_layers": ("decoder_layers", "num_decoder_layers", "num_hidden_layers"),
    "n_heads": ("decoder_attention_heads", "num_attention_heads"),
    "d_model": ("hidden_size",),
    # A model without embeddings of positions, as BLOOM, names the length it was trained on.
    "n_ctx": (
        *("seq_length", "max_seq_len", "max_target_positions", "model_max_length"),
        "max_position_embeddings",
    ),
    "d_vocab": ("vocab_size",),
}
"""Our names of the model's shape, and the fields of a Hugging Face config that may hold it. The
decoder's come first, because only decoders are language models.
"""


def shape_of(config: PretrainedConfig, where: str) -> dict[str, Any]:
    """Shape and special tokens of a config of transformers; `where` it is, for errors."""
    shape: dict[str, Any] = {}
    for name, fields in HUGGING_FACE_SHAPE.items():
        values = (_field(config, field) for field in fields)
        shape[name] = next((value for value in values if value is not None), None)
    # A model that is not a transformer, for example Mamba, lacks some of them.
    absent = [HUGGING_FACE_SHAPE[name][-1] for name, value in shape.items() if value is None]
    if shape["n_heads"] is None:
        raise ModelError(
            f"{where}: a {config.model_type} model names no {HUGGING_FACE_SHAPE['n_heads'][-1]}: "
            "it has no attention heads to measure; choose another model"
        )
    if absent:
        raise ModelError(
            f"{where}: a {config.model_type} model names no {' and no '.join(absent)}, "
            "which a scan needs; add what is missing to it, or choose another model"
        )
    _check_positive(where, shape)
    return shape | {
        "d_head": _d_head(config, shape, where),
        "n_kv_heads": _field(config, "num_key_value_heads") or shape["n_heads"],
        "attention_layers": _attention_layers(config, shape["n_layers"], where),
        **{
            field: first_in_vocabulary(getattr(config, field, None), shape["d_vocab"])
            for field in TOKENIZER_NAMES
        },
        "family": config.model_type,
    }


def _field(config: PretrainedConfig, name: str) -> Any:  # noqa: ANN401 (whatever a config holds)
    """A field of a config; None if it has none. Where it differs by layer, the largest."""
    try:
        return getattr(config, name, None)
    except Exception:
        # transformers raises an error of its own for fields that differ by layer.
        return max(getattr(layer, name, None) or 0 for layer in config.per_layer_config) or None


NOT_ATTENDING = ("linear_attention", "conv", "moe", "mlp", "mamba", "mamba2", "recurrent")
"""Types of layers without softmax attention, in the words of Hugging Face's `layer_types`."""

SPARSE = ("indexed_attention", "compressed_sparse_attention")
SPARSE += ("heavily_compressed_attention", "minimax_m3_sparse")
"""Types of layers that choose or compress the keys of each query, which short sequences hide."""


def _attention_layers(
    config: PretrainedConfig, n_layers: int, where: str
) -> tuple[int, ...] | None:
    """The layers that attend, None if all; refused if some choose their keys."""
    # The two names of one list, and the layers that only look at images.
    types = _field(config, "layer_types") or _field(config, "layers_block_type")
    across = _field(config, "cross_attention_layers") or ()
    if not isinstance(types, list | tuple) or len(types) != n_layers:
        types = ["full_attention"] * n_layers
    sparse = sorted({*types} & {*SPARSE})
    if sparse:
        raise ModelError(
            f"{where}: layer_types has {sparse[0]}, whose queries see keys that the model chooses "
            "or compresses; such layers cannot be measured yet"
        )
    attending = tuple(
        layer
        for layer, kind in enumerate(types)
        if kind not in NOT_ATTENDING and layer not in across
    )
    return None if len(attending) == n_layers else attending


def _d_head(config: PretrainedConfig, shape: dict[str, Any], where: str) -> int:
    n_heads = shape["n_heads"]
    # Latent attention (DeepSeek's MLA) joins two parts of its own widths.
    widths = [_field(config, f"qk_{part}_head_dim") for part in ("nope", "rope")]
    if all(isinstance(width, int) for width in widths):
        return sum(widths)
    n_kv_heads = _field(config, "num_key_value_heads") or n_heads
    if not isinstance(n_kv_heads, int) or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ModelError(
            f"{where}: num_key_value_heads is {n_kv_heads!r}, expected a divisor of "
            f"num_attention_heads = {n_heads}"
        )
    d_head = _field(config, "head_dim")
    if d_head is None:
        if shape["d_model"] % n_heads:
            raise ModelError(
                f"{where}: hidden_size is {shape['d_model']}, expected a multiple of "
                f"num_attention_heads = {n_heads}"
            )
        d_head = shape["d_model"] // n_heads
    _check_positive(where, {"head_dim": d_head})
    return d_head


def _legacy_shape(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in SHAPE if not isinstance(config.get(name), int)]
    if missing:
        raise ModelError(
            f"{path}/config.json: has neither model_type (Hugging Face) nor {', '.join(missing)} "
            "(legacy TransformerLens)"
        )
    shape = {name: config[name] for name in SHAPE}
    _check_positive(f"{path}/config.json", shape)
    return shape | {"n_kv_heads": shape["n_heads"]}


def _legacy_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """The special tokens of a legacy config.json, some of which name a tokenizer alone."""
    bos = config.get("bos_token_id", TOKENIZER_BOS.get(str(config.get("tokenizer_name"))))
    return {"bos_token_id": bos, "eos_token_id": config.get("eos_token_id", bos)}


def _check_positive(where: str, shape: dict[str, Any]) -> None:
    for name, value in shape.items():
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{where}: {name} is {value!r}, expected a positive integer")


def no_token(info: ModelInfo, field: str) -> str:
    """Why a model has no special token, which `field` of its config would name."""
    note = next((note for note in info.notes if field in note), None)
    return f"{info.name}: {note}" if note else f"{info.name} names no {WORDS[field]} token"
