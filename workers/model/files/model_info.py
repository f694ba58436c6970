"""Where a model lies and what it is, read from its files without loading it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headcount.schemas.errors import ModelError, unknown
from headcount.schemas.files.places import reason
from headcount.workers.model.files.bundled_models import BUNDLED, BUNDLED_MODELS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*final.pth"]
"""What is downloaded of a model. If no weights are among it, `PICKLED_WEIGHTS` are, too."""

PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model-*.bin")
"""Weights in the older format of transformers: one file, or its parts. No code in them is run."""

HUB_SECONDS = 10.0
"""Give up after this many seconds if the Hub does not say which files a model has."""

SHAPE = ("n_layers", "n_heads", "d_model", "d_head", "n_ctx", "d_vocab")
"""Fields of a config of TransformerLens, also of a legacy config.json, that say a model's shape."""

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


@dataclass(frozen=True)
class ModelInfo:
    """What a model's files say about it, in TransformerLens's words."""

    path: str
    name: str
    layout: str
    sha256: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    n_ctx: int
    d_vocab: int
    bos_token_id: int | None
    eos_token_id: int | None
    files: tuple[tuple[str, str], ...] = ()  # name and fingerprint of those that `sha256` covers
    attention_layers: tuple[int, ...] | None = None  # that attend; None if all do
    n_kv_heads: int | None = None  # heads with keys and values of their own, which others share
    family: str = ""  # of models of transformers, as their config.json names it

    @property
    def attention_layers_or_all(self) -> tuple[int, ...]:
        """The layers that attend."""
        return (
            tuple(range(self.n_layers)) if self.attention_layers is None else self.attention_layers
        )

    @property
    def record(self) -> dict[str, Any]:
        """The description for a run's manifest, without the place it was loaded from."""
        fields = asdict(self)
        # What `files` covers needs no word of its own.
        del fields["path"], fields["family"]
        fields["files"] = dict(self.files)
        # Left out where it says nothing, so that runs from before keep their identity.
        if self.attention_layers is None:
            del fields["attention_layers"]
        else:
            fields["attention_layers"] = list(self.attention_layers)
        return fields

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it the same model; `sha256` stands for its files."""
        return {key: value for key, value in self.record.items() if key != "files"}


def local_directory(spec: str, revision: str | None = None) -> Path | None:
    """The directory of a model that is bundled or local; None if its name is one of the Hub."""
    local = Path(os.path.expanduser(spec))
    if revision is not None and (spec.startswith("bundled:") or local.is_dir()):
        kind = "a directory of this machine" if local.is_dir() else "a model of headcount"
        raise ModelError(
            f"revision: expected with a model of the Hub only, and {spec} is {kind}, got "
            f"{revision!r}; leave it out"
        )
    if spec.startswith("bundled:"):
        name = spec.removeprefix("bundled:")
        directory = BUNDLED_MODELS / name
        is_inside = ".." not in directory.parts and not os.path.isabs(name)
        if not is_inside or not (directory / "config.json").is_file():
            raise ModelError(f"model: {unknown('bundled model', name, BUNDLED)}")
        return directory
    if local.is_dir():
        return local
    # A name on the Hub is OWNER/NAME, so this was meant as a path.
    if spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise ModelError(f"model {spec!r}: no such directory")
    return None


def find_model(spec: str, revision: str | None = None, *, download: bool = True) -> Path:
    """The directory of a model: bundled, local, or downloaded once from the Hub.

    Without `download`, a model of the Hub must have been downloaded before.
    """
    if (directory := local_directory(spec, revision)) is not None:
        return directory
    from huggingface_hub import snapshot_download

    def downloaded(patterns: list[str]) -> Path:
        options = {"revision": revision, "local_files_only": not download}
        return Path(snapshot_download(spec, allow_patterns=patterns, **options))

    try:
        directory = downloaded(HUB_FILES)
        # Most repositories that have pickled weights have the same as safetensors.
        if not weight_names(os.listdir(directory)):
            directory = downloaded([*HUB_FILES, *PICKLED_WEIGHTS])
        return directory
    except Exception as error:
        raise ModelError(
            f"model {spec!r}: neither a directory, nor bundled:NAME, nor to be had from the Hub "
            f"({reason(error)})"
        ) from None


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
    if weight_names(digests) != weight_names(files):
        raise ModelError(f"model {model!r}: the Hub gives no digests of its weights")
    return digests


def describe(path: Path, digests: dict[str, bytes] | None = None) -> ModelInfo:
    """What a model is, by its config.json and `digests` of its files; nothing is loaded."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ModelError(f"{path}: no readable config.json; expected a model directory") from None
    except ValueError as error:
        raise ModelError(f"{path}/config.json: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}/config.json: expected an object, got {type(config).__name__}")
    if "model_type" not in config:
        layout, shape = "legacy", _legacy_shape(path, config)
    else:
        from transformers import AutoConfig

        try:
            loaded = AutoConfig.from_pretrained(
                path, trust_remote_code=False, local_files_only=True
            )
            text = text_config(loaded)
        except Exception as error:
            raise ModelError(
                f"{path}/config.json: not a causal language model that can be scanned "
                f"({reason(error)})"
            ) from None
        layout, shape = "huggingface", shape_of(text, f"{path}/config.json")
    digests = digests or file_digests(path, layout)
    files = tuple((name, digest.hex()[:16]) for name, digest in digests.items())
    return ModelInfo(str(path), path.name, layout, sha256_of(digests), **shape, files=files)


def no_token(info: ModelInfo, field: str, word: str) -> str:
    """Why a model has no special token, which `field` of its config would name."""
    try:
        config = json.loads((Path(info.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    token = config.get(field)
    if token is None:
        return f"{info.name} names no {word} token"
    return (
        f"{info.name}: {field} is {token!r} in its config.json, expected 0 to {info.d_vocab - 1}, "
        f"so it has no {word} token"
    )


def weight_files(path: Path, layout: str) -> list[Path]:
    """The files that a model's weights are read from: safetensors, or else pickled ones."""
    names = sorted(os.listdir(path))
    weights = weight_names(names, layout)
    if not weights:
        raise ModelError(
            f"{path}: expected weights as *.safetensors or {PICKLED_WEIGHTS[0]}, found "
            f"{', '.join(names[:8]) or 'nothing'}"
        )
    return [path / name for name in weights]


def weight_names(names: Iterable[str], layout: str = "legacy") -> list[str]:
    """Those of a model's files that its weights are read from, in the order of their names."""
    # The Hub also names files of subdirectories, which nothing reads.
    names = sorted(name for name in names if "/" not in name)
    legacy = ("*final.pth",) if layout == "legacy" else ()
    found = (matching(names, each) for each in ("*.safetensors", *legacy, *PICKLED_WEIGHTS))
    return next(filter(None, found), [])


def sha256_of(digests: dict[str, bytes]) -> str:
    """What stands for a model's files, from the digests of them."""
    return hashlib.sha256(b"".join(digests.values())).hexdigest()[:16]


def file_digests(path: Path, layout: str) -> dict[str, bytes]:
    """SHA-256 of the configuration and of every file of weights, by name."""
    digests: dict[str, bytes] = {}
    # The configuration counts: other settings make another model of the same weights.
    for file in [path / "config.json", *weight_files(path, layout)]:
        state = file.stat()
        digests[file.name] = _digest(file.resolve(), state.st_size, state.st_ctime_ns)
    return digests


@cache
def _digest(file: Path, _size: int, _changed: int) -> bytes:
    """SHA-256 of a file, which is read again only if it has changed: weights may have gigabytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


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


def text_config(config: Any) -> PretrainedConfig:  # noqa: ANN401 (whatever a model has)
    """The part of a config that describes the language model, which a model that also sees images
    or hears keeps apart.
    """
    return config.get_text_config(decoder=True)


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
        "bos_token_id": _token(getattr(config, "bos_token_id", None), shape["d_vocab"]),
        "eos_token_id": _token(getattr(config, "eos_token_id", None), shape["d_vocab"]),
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
    bos_of_tokenizer = TOKENIZER_BOS.get(str(config.get("tokenizer_name")))
    bos = config.get("bos_token_id", bos_of_tokenizer)
    return shape | {
        "n_kv_heads": shape["n_heads"],
        "bos_token_id": _token(bos, config["d_vocab"]),
        "eos_token_id": _token(config.get("eos_token_id", bos), config["d_vocab"]),
    }


def _check_positive(where: str, shape: dict[str, Any]) -> None:
    for name, value in shape.items():
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{where}: {name} is {value!r}, expected a positive integer")


def _token(token_ids: object, d_vocab: int) -> int | None:
    """A special token's id; None if the config names none that is in the vocabulary."""
    # Some configs list several end-of-text tokens. The first one is used.
    token = token_ids[0] if isinstance(token_ids, list) and token_ids else token_ids
    return token if isinstance(token, int) and 0 <= token < d_vocab else None
