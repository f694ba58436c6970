"""Where a model lies and what it is, read from its files without loading it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ModelError, unknown
from schemas.places import reason

BUNDLED_MODELS = Path(__file__).parent.parent.parent / "models"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*final.pth"]

LEGACY_PLAIN = {
    "positional_embedding_type": "standard",
    "shortformer_pos": False,
    "attention_dir": "causal",
    "use_attn_scale": True,
    "use_local_attn": False,
    "parallel_attn_mlp": False,
    "scale_attn_by_inverse_layer_idx": False,
}
"""Fields of a legacy config.json that would change the pattern, with the one value that is
supported.
"""

TOKENIZER_BOS = {"NeelNanda/gpt-neox-tokenizer-digits": 1}
"""Beginning-of-sequence tokens by tokenizer, where the config.json of a legacy model names it and
no token.
"""


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
    files: tuple[tuple[str, str], ...] = ()
    """Name and fingerprint of each file that `sha256` covers."""

    @property
    def record(self) -> dict[str, Any]:
        """The description without the place it was loaded from."""
        return {key: value for key, value in asdict(self).items() if key != "path"}

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it the same model: `sha256` stands for its files."""
        return {key: value for key, value in self.record.items() if key != "files"}


def find_model(spec: str, revision: str | None = None) -> Path:
    """The directory of a model: bundled, local, or fetched from the Hub (which needs the network
    once).
    """
    if spec.startswith("bundled:"):
        name = spec.removeprefix("bundled:")
        known = [p.parent.name for p in BUNDLED_MODELS.glob("*/config.json")]
        if name not in known:
            raise ModelError(f"model: {unknown('bundled model', name, known)}")
        return BUNDLED_MODELS / name
    local = Path(os.path.expanduser(spec))
    if local.is_dir():
        return local
    if spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        raise ModelError(f"model {spec!r}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:
        raise ModelError(
            f"model {spec!r}: neither a directory, nor bundled:NAME, nor to be had from the Hub "
            f"({reason(error)})"
        ) from None


def describe(path: Path) -> ModelInfo:
    """Read what a model is from its config.json and fingerprint its weights; loads nothing."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise ModelError(f"{path}: no readable config.json; expected a model directory") from None
    except ValueError as error:
        raise ModelError(f"{path}/config.json: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}/config.json: expected an object, got {type(config).__name__}")
    layout, shape = (
        ("huggingface", _hf_shape(path))
        if "model_type" in config
        else ("legacy", _legacy_shape(path, config))
    )
    digests = _digests(path, layout)
    whole = hashlib.sha256(b"".join(digests.values())).hexdigest()[:16]
    files = tuple((name, digest.hex()[:16]) for name, digest in digests.items())
    return ModelInfo(str(path), path.name, layout, whole, **shape, files=files)


def weight_files(path: Path, layout: str) -> list[Path]:
    """The files a model's weights are read from: safetensors, or a legacy `.pth`."""
    files = sorted(path.glob("*.safetensors"))
    if not files and layout == "legacy":
        files = sorted(path.glob("*final.pth"))
    if not files:
        found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"{path}: expected weights as *.safetensors, found {found}; convert them, nothing is "
            "unpickled"
        )
    return files


def _digests(path: Path, layout: str) -> dict[str, bytes]:
    """SHA-256 of the configuration and of every file of weights, by name."""
    digests: dict[str, bytes] = {}
    for file in [path / "config.json", *weight_files(path, layout)]:
        with file.open("rb") as stream:
            digests[file.name] = hashlib.file_digest(stream, "sha256").digest()
    return digests


def _hf_shape(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        shape = {
            "n_layers": config.num_hidden_layers,
            "n_heads": config.num_attention_heads,
            "d_model": config.hidden_size,
            "n_ctx": config.max_position_embeddings,
            "d_vocab": config.vocab_size,
        }
        _check_positive(shape)
        d_head = getattr(config, "head_dim", None) or shape["d_model"] // shape["n_heads"]
    except Exception as error:
        raise ModelError(
            f"{path}/config.json: not a causal language model that can be scanned ({reason(error)})"
        ) from None
    return shape | {
        "d_head": d_head,
        "bos_token_id": _token(getattr(config, "bos_token_id", None), shape["d_vocab"]),
        "eos_token_id": _token(getattr(config, "eos_token_id", None), shape["d_vocab"]),
    }


def _legacy_shape(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    names = ("n_layers", "n_heads", "d_model", "d_head", "n_ctx", "d_vocab")
    missing = [name for name in names if not isinstance(config.get(name), int)]
    if missing:
        raise ModelError(
            f"{path}/config.json: has neither model_type (Hugging Face) nor {', '.join(missing)} "
            "(legacy TransformerLens)"
        )
    shape = {name: config[name] for name in names}
    try:
        _check_positive(shape)
    except ValueError as error:
        raise ModelError(f"{path}/config.json: {error}") from None
    bos = config.get("bos_token_id", TOKENIZER_BOS.get(str(config.get("tokenizer_name"))))
    return shape | {
        "bos_token_id": _token(bos, config["d_vocab"]),
        "eos_token_id": _token(config.get("eos_token_id", bos), config["d_vocab"]),
    }


def _check_positive(shape: dict[str, Any]) -> None:
    for name, value in shape.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected a positive integer")


def _token(token: Any, d_vocab: int) -> int | None:
    """A special token's id; none where the config names none that the vocabulary has."""
    token = token[0] if isinstance(token, list) and token else token
    return token if isinstance(token, int) and 0 <= token < d_vocab else None
