"""The files of a directory that a model is read from: by name, with their digests.

They are those that transformers reads: one file of weights, or the parts that an index names.
Whatever else lies beside them is no part of the model.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import Any, Literal

from headcount.schemas.errors import ModelError
from headcount.schemas.files.beginnings import BYTES, LFS_POINTER, form_of
from headcount.schemas.files.input_files import open_regular

AdapterChoice = Literal["refuse", "apply", "ignore"]
"""What a scan says of an adapter that lies beside full weights."""

CONFIG = "config.json"

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights as transformers reads them: one file, or else the index of its parts. Of both formats the
first counts. No code in pickles is run.
"""

GGUF = "model.gguf"
"""What the digests of files call a model that is one file."""

PARTS = ("model-*.safetensors", "pytorch_model-*.bin")
"""Names of the parts, where no index is at hand that says them."""

LEGACY_WEIGHTS = ("*.safetensors", "*final.pth", PICKLED[0])
"""Weights in the layout of TransformerLens's old checkpoints; of several kinds the first counts."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Weights of an adapter as the library PEFT writes them; the first that is there counts."""


def check_no_pointer(file: Path) -> None:
    """Refuse a file that Git LFS has not fetched."""
    with open_regular(file) as stream:
        _check_beginning(file, stream.read(BYTES))


def _check_beginning(file: Path, content: bytes) -> None:
    if form_of(content[:BYTES]) == "Git LFS":
        raise ModelError(f"{file}: {LFS_POINTER}")


def read_file(file: Path) -> bytes:
    """The content of a small file of a model."""
    try:
        with open_regular(file) as stream:
            content = stream.read()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from None
    _check_beginning(file, content)
    return content


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(read_file(file).decode())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected an object, got {type(content).__name__}")
    return content


def is_gguf(path: Path) -> bool:
    """Whether a model is a GGUF file, and no directory."""
    return path.is_file()


def layout_of(config: dict[str, Any]) -> str:
    """Whose layout a config.json has: that of transformers, or TransformerLens's old one."""
    return "huggingface" if "model_type" in config else "legacy"


# Weights


def weight_files(path: Path, layout: str) -> list[Path]:
    """The files that a model's weights are read from; one that is missing is refused."""
    if is_gguf(path):
        return [path]
    names = sorted(file.name for file in path.iterdir())
    files = [path / name for name in _weight_names(path, names, layout)]
    if not files:
        raise ModelError(_no_weights(path, names, layout))
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"{file}: not there, and {_index_of(path, names)} names it; fetch the model again"
            )
        check_no_pointer(file)
    return files


def _weight_names(path: Path, names: list[str], layout: str) -> list[str]:
    if layout == "legacy":
        return first_match([name for name in names if name not in ADAPTER_WEIGHTS], LEGACY_WEIGHTS)
    # A rare field, which transformers puts before the usual names.
    named = read_object(path / CONFIG).get("transformers_weights")
    if isinstance(named, str):
        _check_beside([named], path / CONFIG)
        return indexed_names(path / named) if named.endswith(".json") else [named]
    for file, index in (SAFETENSORS, PICKLED):
        if file in names:
            return [file]
        if index in names:
            return indexed_names(path / index)
    return []


def _index_of(path: Path, names: list[str]) -> str:
    return str(path / next(index for _, index in (SAFETENSORS, PICKLED) if index in names))


def _no_weights(path: Path, names: list[str], layout: str) -> str:
    others = first_match(names, PARTS)
    if layout != "legacy" and others:
        index = SAFETENSORS[1] if others[0].endswith(".safetensors") else PICKLED[1]
        return f"{path}: has {others[0]} and no {index}, which says the parts; fetch it again"
    expected = "*.safetensors or *final.pth"
    if layout != "legacy":
        expected = f"{SAFETENSORS[0]} or {PICKLED[0]}, or the index of their parts"
    listed = ", ".join(names[:8]) or "nothing"
    return f"{path}: expected weights as {expected}, found {listed}"


def indexed_names(index: Path) -> list[str]:
    """The files that an index names, in the order of their names."""
    places = read_object(index).get("weight_map")
    files: list[object] = [*places.values()] if isinstance(places, dict) else []
    names = sorted({file for file in files if isinstance(file, str)})
    if not names or not all(isinstance(file, str) for file in files):
        raise ModelError(f"{index}: expected weight_map, a file for each tensor; fetch it again")
    _check_beside(names, index)
    return names


def _check_beside(names: Iterable[str], file: Path) -> None:
    """Refuse names in a file that lead elsewhere: only what lies beside it is a model's."""
    for name in names:
        if name in (".", "..") or Path(name).name != name:
            raise ModelError(f"{file}: names {name!r}, expected files beside it")


def first_match(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that fit the first pattern that any fits."""
    names = sorted(names)
    return next(filter(None, (matching(names, pattern) for pattern in patterns)), [])


def listed_weights(names: Iterable[str]) -> list[str]:
    """Those of a model's files that its weights are probably read from, if only names are known."""
    # Files of subdirectories are never read.
    here = [name for name in names if "/" not in name and name not in ADAPTER_WEIGHTS]
    (safetensors, _), (pickled, _) = SAFETENSORS, PICKLED
    return first_match(here, (safetensors, PARTS[0], *LEGACY_WEIGHTS[:2], pickled, PARTS[1]))


# Adapters


def adapter_files(path: Path) -> list[Path]:
    """What lies in a directory of an adapter: its configuration, and the weights that are read."""
    return [path / name for name in adapter_names(file.name for file in path.iterdir())]


def check_adapter(path: Path, choice: AdapterChoice, layout: str = "huggingface") -> None:
    """Refuse an adapter beside full weights of which nobody says whether it belongs to them."""
    if is_gguf(path):
        if choice == "apply":
            raise ModelError(f"{path}: adapter is 'apply', expected a model's directory for it")
        return
    files = adapter_files(path)
    for file in files:
        check_no_pointer(file)
    names = " and ".join(file.name for file in files)
    if choice == "apply" and len(files) < 2:
        missing = f"only {names} of one" if files else "none"
        raise ModelError(
            f"{path}: adapter is 'apply', and the directory has {missing}; expected "
            f"{ADAPTER_CONFIG} and {ADAPTER_WEIGHTS[0]}"
        )
    if choice == "apply" and layout == "legacy":
        raise ModelError(f"{path}: adapter is 'apply', expected a model of transformers for it")
    if choice == "refuse" and files:
        raise ModelError(
            f'{path}: has an adapter ({names}) beside full weights; set adapter = "apply" to '
            'measure the weights with it, or "ignore" if they are merged already, or remove it'
        )


def adapter_names(names: Iterable[str]) -> list[str]:
    """Those of a model's files that an adapter is read from."""
    names = {*names}
    weights = [name for name in ADAPTER_WEIGHTS if name in names][:1]
    return [name for name in (ADAPTER_CONFIG, *weights) if name in names]


def adapter_alone(path: Path) -> str | None:
    """Why a directory that holds an adapter and no full weights is no model; None if it is not."""
    names = {file.name for file in path.iterdir()}
    if ADAPTER_CONFIG not in names or listed_weights(names):
        return None
    base = read_object(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    return (
        f"{path}: holds an adapter of {base or 'another model'} and no full weights; merge it into "
        "that model (PEFT's merge_and_unload, then save_pretrained), and name the result"
    )


# Digests


def file_digests(path: Path, layout: str, adapter: AdapterChoice = "ignore") -> dict[str, bytes]:
    """SHA-256 of the configuration and of every file of weights, by name."""
    if is_gguf(path):
        # It has the configuration, too. What it is called is no part of it.
        state = path.stat()
        return {GGUF: _digest(path.resolve(), state.st_size, state.st_ctime_ns)}
    # The configuration counts: other settings make another model of the same weights.
    files = [path / CONFIG, *weight_files(path, layout)]
    if adapter == "apply":
        files += adapter_files(path)
    digests: dict[str, bytes] = {}
    for file in files:
        state = file.stat()
        digests[str(file.relative_to(path))] = _digest(
            file.resolve(), state.st_size, state.st_ctime_ns
        )
    return digests


def sha256_of(digests: Mapping[str, bytes]) -> str:
    """What stands for a model's files, from the digests of them."""
    return hashlib.sha256(b"".join(digests.values())).hexdigest()[:16]


@cache
def _digest(file: Path, _size: int, _changed: int) -> bytes:
    """SHA-256 of a file, which is read again only if it has changed: weights may have gigabytes."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").digest()
