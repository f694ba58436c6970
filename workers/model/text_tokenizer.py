"""Text to token ids, with the tokenizer that lies beside a model."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from schemas.errors import ModelError

PADDING = 255
"""Tokens that a model may have beyond its tokenizer's, whatever its size: vocabularies are padded to
multiples of 64, 128 or 256.
"""

PADDING_SHARE = 0.1
"""Share of a model's tokens that may be padding; DeepSeekMoE 16B has 0.023."""

VOCABULARIES = ("vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")
"""Files, one of which a tokenizer without a tokenizer.json has."""

DETAILS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that say the rest of such a tokenizer."""

CUTS = ("truncation", "padding")
"""Parts of a tokenizer.json that say how a text is cut and filled up, which we never do."""

PROBE = (
    "The quick brown fox jumps over the lazy dog.",
    "It's 1,024.50 € on 2024-02-29; don't they'll I'VE",
    "  two spaces\n\n\tthree\r\n    four    ",
    "def f(x):\n    return x**2 != 0  # <|endoftext|> <s> [MASK]",
    "Ångström café ﬁne Straße İstanbul e\u0301 \u00e9",
    "東京 テスト 中文分词 한국어 العربية हिन्दी ไทย",
    "👩‍👩‍👧 \u200b\u00a0\ufeff\u2028 \x00\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 000000000 =========",
)
"""Texts whose tokens show what a library makes of a tokenizer: letters of all kinds, numbers, spaces,
code, accents written in two ways, what no tokenizer expects.
"""


def _byte_names() -> dict[str, int]:
    """The signs by which vocabularies of bytes name them: a visible one is itself (GPT-2)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


BYTES = _byte_names()


class TextTokenizer:
    """A model's tokenizer; special tokens written out in a text are text."""

    def __init__(self, path: Path, d_vocab: int) -> None:
        self._path = path
        self._tokenizer = _load(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        _check_size(path, self._tokenizer.get_vocab(), d_vocab)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies what a text becomes: what the tokenizer's files say, and the tokens that the
        library makes of a few texts. Another version of the library is the same tokenizer as long
        as it makes the same tokens of these.
        """
        content = {
            "files": _definition(self._path),
            "probe": [self._encode_or_refuse(text) for text in PROBE],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def library(self) -> str:
        """The library that applies it, and its version."""
        return f"tokenizers {version('tokenizers')}"

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
            # SentencePiece's space, which decoding drops at the start.
            return name.replace("▁", " ")
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if text and "\ufffd" not in text:
            return text
        if not BYTES.keys() >= set(name):
            return name
        return bytes(BYTES[sign] for sign in name).decode(errors="backslashreplace")

    def _encode_or_refuse(self, text: str) -> list[int] | None:
        """Token ids of a text; none of one that the tokenizer refuses, which tells it apart, too."""
        try:
            return self.encode(text)
        except Exception:  # The library raises nothing more precise.
            return None


def _check_size(path: Path, vocabulary: dict[str, int], d_vocab: int) -> None:
    """Refuse another model's tokenizer, as far as its size shows that it is one."""
    size, ids = len(vocabulary), max(vocabulary.values(), default=-1) + 1
    least = max(2, d_vocab - max(PADDING, int(PADDING_SHARE * d_vocab)))
    if size < least or max(size, ids) > d_vocab:
        raise ModelError(
            f"{path}: its tokenizer has {max(size, ids):,} tokens and the model {d_vocab:,}; "
            f"expected {least:,} to {d_vocab:,}, because models are padded by {PADDING} tokens or "
            f"{PADDING_SHARE:.0%} at most; tokenizer files are missing or another model's"
        )


def _definition(path: Path) -> dict[str, Any]:
    """What a tokenizer's files say: a tokenizer.json in its own words, whatever its layout; of other
    files the fingerprints.
    """
    whole = path / "tokenizer.json"
    if whole.is_file():
        content = json.loads(whole.read_text(encoding="utf-8"))
        return {key: value for key, value in content.items() if key not in CUTS}
    files = [path / name for name in (*VOCABULARIES, *DETAILS)]
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()
    }


def _load(path: Path) -> Any:
    from tokenizers import Tokenizer

    if (path / "tokenizer.json").is_file():
        try:
            return Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:
            raise ModelError(f"{path}/tokenizer.json: not a tokenizer ({error})") from None
    if not any((path / name).is_file() for name in VOCABULARIES):
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
