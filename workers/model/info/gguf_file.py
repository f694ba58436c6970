"""GGUF files, in which llama.cpp keeps a model and its tokenizer.

transformers reads them with the library `gguf`. What a file says of itself is read here, because
that library takes 20 seconds for a vocabulary of 262,144 tokens.
"""

from __future__ import annotations

import logging
import math
import mmap
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from headcount.schemas.errors import ModelError
from headcount.schemas.files.input_files import open_regular
from headcount.schemas.reasons import reason
from headcount.workers.model.info.model_files import check_no_pointer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)

LIBRARY = "gguf"
INSTALL = "pip install 'headcount[gguf]'"

NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""The types of numbers in the format, as `struct` calls them."""

TEXT, LIST = 8, 9  # the other types

SHORT_LIST = 4096  # items of a list that is about layers, and not about the vocabulary

ROTATION_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that stretch rotary positions, which transformers does not read."""


@dataclass(frozen=True)
class GgufFile:
    """What a file says of its model."""

    path: Path
    fields: dict[str, Any]  # of a long list, or one of texts, only its length
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # type and shape by name

    @property
    def architecture(self) -> str:
        """The family in llama.cpp's words, such as `llama`."""
        return str(self.fields.get("general.architecture"))

    @property
    def d_vocab(self) -> int | None:
        """Tokens that the embedding has; None if there is no such tensor."""
        _, shape = self.tensors.get("token_embd.weight", ("", ()))
        return shape[-1] if shape else None

    @property
    def quantisation(self) -> str:
        """The formats of the weights: what the file calls them, and how many tensors have each."""
        from gguf.constants import LlamaFileType

        counts = Counter(kind for kind, _ in self.tensors.values()).most_common()
        listed = ", ".join(f"{count} {kind}" for kind, count in counts)
        try:
            name = LlamaFileType(self.fields["general.file_type"]).name
        except (KeyError, ValueError):
            return f"tensors: {listed}"
        return f"{name.removeprefix('MOSTLY_').removeprefix('ALL_')} (tensors: {listed})"

    @property
    def puts_bos_first(self) -> bool:
        """Whether its tokenizer puts BOS before every text."""
        # Older files do not say it, and llama.cpp does so for SentencePiece's vocabularies.
        default = self.fields.get("tokenizer.ggml.model") == "llama"
        return bool(self.fields.get("tokenizer.ggml.add_bos_token", default))


def read_gguf(path: Path) -> GgufFile:
    """What a file says of itself; a file that is not whole is refused."""
    if find_spec(LIBRARY) is None:
        raise ModelError(f"{path}: the library that reads GGUF is not installed: {INSTALL}")
    state = path.stat()
    return _read(path, state.st_size, state.st_ctime_ns)


@cache
def _read(path: Path, size: int, _changed: int) -> GgufFile:
    check_no_pointer(path)
    with open_regular(path) as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{path}: is no GGUF file; expected one that begins with GGUF")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                file, end = _Header(content).read(path)
            except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
                raise ModelError(
                    f"{path}: not a whole GGUF file ({reason(error)}); fetch it again"
                ) from None
    if end > size:
        raise ModelError(
            f"{path}: has {size:,} bytes, and its tensors end at {end:,}; fetch it again"
        )
    parts = file.fields.get("split.count", 0)
    if parts > 1:
        raise ModelError(
            f"{path}: is one of {parts} parts; join them with llama-gguf-split --merge"
        )
    return file


class _Header:
    """The beginning of a file: its fields and its table of tensors."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = len(MAGIC)

    def read(self, path: Path) -> tuple[GgufFile, int]:
        """What the file says, and where its last tensor ends."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version}, expected {' or '.join(map(str, VERSIONS))}")
        tensor_count, field_count = self._number("Q"), self._number("Q")
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = self._text()
            fields[name] = self._value(self._number("I"))
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        end = 0
        for _ in range(tensor_count):
            name = self._text()
            shape = tuple(self._number("Q") for _ in range(self._number("I")))
            kind = GGMLQuantizationType(self._number("I"))
            tensors[name] = kind.name, shape
            in_block, block_bytes = GGML_QUANT_SIZES[kind]
            end = max(end, self._number("Q") + math.prod(shape) // in_block * block_bytes)
        alignment = fields.get("general.alignment", 32)
        begin = -(-self.at // alignment) * alignment  # Rounded up.
        return GgufFile(path, fields, tensors), begin + end

    def _number(self, kind: str) -> Any:  # noqa: ANN401 (whatever the file holds)
        (number,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(kind)
        return number

    def _text(self) -> str:
        length = self._number("Q")
        begin, self.at = self.at, self.at + length
        if self.at > len(self.content):
            raise ValueError("it ends within a text")
        return self.content[begin : self.at].decode()

    def _value(self, kind: int) -> Any:  # noqa: ANN401 (whatever the file holds)
        if kind == TEXT:
            return self._text()
        if kind != LIST:
            return self._number(_number_type(kind))
        item, count = self._number("I"), self._number("Q")
        if item == TEXT:
            for _ in range(count):
                length = self._number("Q")
                self.at += length
            return count
        numbers = _number_type(item)
        if count <= SHORT_LIST:
            return [self._number(numbers) for _ in range(count)]
        self.at += count * struct.calcsize(numbers)
        return count


def _number_type(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"a value of type {kind}")
    return NUMBERS[kind]


# As transformers reads it


@contextmanager
def gguf_alone(path: Path, what: str = "it") -> Iterator[dict[str, Any]]:
    """The words that make transformers read a file, and nothing that lies beside it.

    `what` it reads is for errors.
    """
    import gguf

    reader = import_module("transformers.modeling_gguf_pytorch_utils")

    def silent(tensors: Any, **_: object) -> Any:  # noqa: ANN401 (of the library)
        return tensors

    logger = logging.getLogger("transformers")
    with ExitStack() as stack:
        # Without the vocabulary, it warns that special tokens are none of it.
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        (Path(directory) / "model.gguf").symlink_to(path.resolve())
        stack.enter_context(mock.patch.object(gguf, "GGUFReader", _quick_reader()))
        stack.enter_context(mock.patch.object(reader, "tqdm", silent))
        try:
            yield {
                "pretrained_model_name_or_path": directory,
                "gguf_file": "model.gguf",
                "local_files_only": True,
            }
        except ModelError:
            raise
        except Exception as error:
            problem = reason(error) if str(error) else type(error).__name__
            problem = problem.replace(f"{directory}/model.gguf", path.name)
            raise ModelError(f"{path}: transformers cannot read {what} ({problem})") from None


@cache
def _quick_reader() -> type:
    """The library's reader without long lists: transformers reads weights and sizes through it."""
    import numpy as np
    from gguf import GGUFReader, GGUFValueType

    class QuickReader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:  # noqa: ANN401
            if raw_type != LIST:
                return super()._get_field_parts(orig_offs, raw_type)
            content: Any = self.data
            item, count = struct.unpack_from("<IQ", content, orig_offs)
            if count <= SHORT_LIST:
                return super()._get_field_parts(orig_offs, raw_type)
            at = orig_offs + struct.calcsize("<IQ")
            if item == TEXT:
                for _ in range(count):
                    at += 8 + struct.unpack_from("<Q", content, at)[0]
            else:
                at += count * struct.calcsize(NUMBERS[item])
            head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            return at - orig_offs, head, [], [GGUFValueType.ARRAY, GGUFValueType(item)]

    return QuickReader


def gguf_config(path: Path) -> PretrainedConfig:
    """The configuration that transformers makes of a file."""
    from transformers import AutoConfig

    file = read_gguf(path)
    with gguf_alone(path) as words:
        # Where the file does not say it, transformers counts the tokens of the tokenizer.
        sizes: dict[str, Any] = {} if file.d_vocab is None else {"vocab_size": file.d_vocab}
        config = AutoConfig.from_pretrained(**words, **sizes)
    _check_rotation(file, config)
    return config


def _check_rotation(file: GgufFile, config: PretrainedConfig) -> None:
    """Refuse a file whose rotary positions are stretched, which transformers does not read."""
    stretching = [name for name in ROTATION_TENSORS if f"{name}.weight" in file.tensors]
    prefix = f"{file.architecture}.rope.scaling."
    stretching += [
        name
        for name, value in file.fields.items()
        if name.startswith(prefix) and value not in ("none", 1.0)
    ]
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    kinds = {
        each.get("rope_type")
        for each in (parameters, *parameters.values())
        if isinstance(each, dict)
    }
    if stretching and kinds <= {None, "default"}:
        raise ModelError(
            f"{file.path}: stretches rotary positions ({stretching[0]}), which transformers does "
            "not read from a GGUF file; take the model's safetensors"
        )
