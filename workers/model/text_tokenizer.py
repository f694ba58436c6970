"""Text to token ids, with the tokenizer that lies beside a model."""

from __future__ import annotations

import hashlib
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from schemas.errors import ModelError


def _byte_names() -> dict[str, int]:
    """The signs by which vocabularies of bytes name them: a visible one is itself (GPT-2)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = _byte_names()


class TextTokenizer:
    """A model's tokenizer; special tokens written out in a text are text."""

    def __init__(self, path: Path, d_vocab: int) -> None:
        self._tokenizer = _load(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        size = self._tokenizer.get_vocab_size()
        if size < 2 or size > d_vocab:
            raise ModelError(
                f"{path}: its tokenizer has {size} tokens and the model {d_vocab}; tokenizer files "
                "are missing or another model's"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Identifies what a text becomes: the whole tokenizer, and the library that applies it."""
        content = f"tokenizers {version('tokenizers')}\0{self._tokenizer.to_str()}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """The same for several texts, on all cores."""
        return [e.ids for e in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def text(self, tokens: list[int]) -> str:
        """The text of some tokens, special ones included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def texts(self, tokens: list[int]) -> list[str]:
        """The text of each token; of one that is a part of a character, its bytes."""
        return [self._one(token) for token in tokens]

    def _one(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return f"<{token}>"  # Vocabularies are padded to round sizes.
        if "▁" in name:
            return name.replace(
                "▁", " "
            )  # SentencePiece's space, which decoding drops at the start.
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if text and "\ufffd" not in text:
            return text
        if not BYTES.keys() >= set(name):
            return name
        return bytes(BYTES[sign] for sign in name).decode(errors="backslashreplace")


def _load(path: Path) -> Any:
    from tokenizers import Tokenizer

    if (path / "tokenizer.json").is_file():
        try:
            return Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:
            raise ModelError(f"{path}/tokenizer.json: not a tokenizer ({error})") from None
    if not any(
        (path / name).is_file()
        for name in ("vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")
    ):
        raise ModelError(
            f"{path}: no tokenizer files; text needs one (tokenizer.json, or vocab.json and "
            "merges.txt)"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"{path}: its tokenizer cannot be loaded ({reason})") from None
