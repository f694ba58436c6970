"""Text to token ids, with the tokenizer that lies beside a model."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Container
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headcount.schemas.errors import ModelError
from headcount.workers.model.info.gguf_tokenizer import load_gguf_tokenizer
from headcount.workers.model.info.model_files import (
    CONFIG,
    check_no_pointer,
    is_gguf,
    read_file,
    read_object,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PADDING = 255  # tokens that any model may have beyond its tokenizer's: multiples of up to 256
PADDING_SHARE = 0.1  # share of a large model's tokens that may be padding; DeepSeekMoE 16B: 0.023

VOCABULARIES = ("vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")
"""Files of vocabularies. A tokenizer without a tokenizer.json has one of them."""

SETTINGS = "tokenizer_config.json"

DETAILS = ("merges.txt", SETTINGS, "special_tokens_map.json", "added_tokens.json")
"""Files that say the rest of a tokenizer without a tokenizer.json."""

VOCABULARY_FIELDS = ("vocab", "merges")
"""Fields of `SETTINGS` of which transformers takes a text for the name of a file anywhere."""

CUTS = ("truncation", "padding")  # parts of a tokenizer.json on cutting and padding texts

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
"""Texts whose tokens show how a library applies a tokenizer: letters of many scripts, numbers,
spaces, code, accents written in two ways, and signs that no tokenizer expects.
"""


BRACKETED = re.compile(r"<[^<>\s]{1,62}>|\[[^\[\]\s]{1,62}\]")
"""What nearly all special tokens look like: no other form is looked for, as vocabularies have up to
6,000 of them.
"""

VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]

BYTES = {chr(byte): byte for byte in VISIBLE} | {
    chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in VISIBLE)
}
"""The byte of each sign in vocabularies of bytes, as GPT-2: visible ones are their own."""


def has_tokenizer(path: Path) -> bool:
    """Whether a tokenizer that can be read lies beside a model."""
    try:
        load_tokenizer(path)
    except ModelError:
        return False
    return True


class TextTokenizer:
    """A model's tokenizer. A special token that is written out in a text is text."""

    def __init__(self, path: Path, d_vocab: int) -> None:
        self._path = path
        self._tokenizer = load_tokenizer(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Contrary to its name, this makes "<|endoftext|>" in a text ordinary text.
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        _check_size(path, self._tokenizer.get_vocab(), d_vocab, added)
        self.beyond = {token: added[token].content for token in added if token >= d_vocab}
        """Tokens that the model does not have, by id: a text that uses one cannot be measured."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a tokenizer that another process sent, where the model's files need not be."""
        self.__dict__.update(state)
        # The library does not send this setting along.
        self._tokenizer.encode_special_tokens = True

    @cached_property
    def fingerprint(self) -> str:
        """Identifies what a text becomes.

        It covers what the tokenizer's files say, and the tokens that the library makes of a few
        texts. Another version of the library is the same tokenizer if it makes the same tokens.
        """
        tokenizer_json = self._path / "tokenizer.json"
        if is_gguf(self._path):
            said = json.loads(self._tokenizer.to_str())
            definition = {key: value for key, value in said.items() if key not in CUTS}
        elif tokenizer_json.is_file():
            # Parsed, so that another layout of the same JSON is the same tokenizer.
            said = read_object(tokenizer_json)
            definition = {key: value for key, value in said.items() if key not in CUTS}
        else:
            files = [self._path / name for name in (*VOCABULARIES, *DETAILS)]
            definition = {
                file.name: hashlib.sha256(read_file(file)).hexdigest()
                for file in files
                if file.is_file()
            }
        tokens: list[list[int] | None] = []
        for text in PROBE:
            try:
                tokens.append(self.encode(text))
            except Exception:
                # A tokenizer that refuses a text is identified by that, too. The library raises
                # nothing more precise.
                tokens.append(None)
        content = {"files": definition, "probe": tokens}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def library(self) -> str:
        """The library that applies the tokenizer, and its version."""
        return f"tokenizers {version('tokenizers')}"

    @cached_property
    def ids_end(self) -> int:
        """One more than the largest token id; ids may have gaps."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The special tokens, as a text would spell them."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def spelled_out(self, text: str) -> frozenset[str]:
        """The special tokens that a text spells out, which stay text."""
        return self.special_tokens.intersection(BRACKETED.findall(text))

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Token ids of several texts, which are tokenised on all cores."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def text(self, tokens: list[int]) -> str:
        """The text of a sequence of tokens, special ones included."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def texts(self, tokens: list[int]) -> list[str]:
        """The text of each token. A token that is a part of a character is shown as bytes."""
        return [self._text_of_token(token) for token in tokens]

    def _text_of_token(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            # Vocabularies are padded to round sizes.
            return f"<{token}>"
        if "▁" in name:
            # SentencePiece's space, which decoding drops at the start.
            return name.replace("▁", " ")
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        # \ufffd stands for bytes that are not a whole character.
        if text and "\ufffd" not in text:
            return text
        if any(sign not in BYTES for sign in name):
            return name
        return bytes(BYTES[sign] for sign in name).decode(errors="backslashreplace")


def _check_size(
    path: Path, vocabulary: dict[str, int], d_vocab: int, added: Container[int] = ()
) -> None:
    """Refuse a vocabulary that is not the model's.

    Tokens that were added to it may be beyond the model's, as one of Gemma 3's is.
    """
    beyond = {token for token in vocabulary.values() if token >= d_vocab and token in added}
    if len(beyond) <= PADDING:
        vocabulary = {name: token for name, token in vocabulary.items() if token not in beyond}
    size = len(vocabulary)
    # Ids may have gaps, so the largest one may lie beyond the number of tokens.
    ids_end = max(vocabulary.values(), default=-1) + 1
    least = max(2, d_vocab - max(PADDING, int(PADDING_SHARE * d_vocab)))
    if size < least or max(size, ids_end) > d_vocab:
        raise ModelError(
            f"{path}: its tokenizer has {max(size, ids_end):,} tokens and the model {d_vocab:,}; "
            f"expected {least:,} to {d_vocab:,}, because models are padded by {PADDING} tokens or "
            f"{PADDING_SHARE:.0%} at most; tokenizer files are missing or another model's"
        )


def check_tokenizer_files(path: Path) -> None:
    """Refuse a tokenizer of which Git LFS has not fetched a file."""
    for name in ("tokenizer.json", *VOCABULARIES, *DETAILS):
        if (path / name).is_file():
            check_no_pointer(path / name)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer whose files lie in a directory, in the library that applies it."""
    from tokenizers import Tokenizer

    if is_gguf(path):
        return load_gguf_tokenizer(path)
    check_tokenizer_files(path)
    if (path / "tokenizer.json").is_file():
        try:
            return Tokenizer.from_buffer(read_file(path / "tokenizer.json"))
        except Exception as error:
            raise ModelError(f"{path}/tokenizer.json: not a tokenizer ({error})") from None
    if not any((path / name).is_file() for name in VOCABULARIES):
        raise ModelError(
            f"{path}: no tokenizer files; text needs one (tokenizer.json, or vocab.json and "
            "merges.txt); put them there, or let tokenizer name a directory that has them"
        )
    from transformers import AutoTokenizer

    # A copy, because transformers opens more than what lies in the directory, and by name.
    with tempfile.TemporaryDirectory() as copy:
        _copy_tokenizer(path, Path(copy))
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                copy, local_files_only=True, trust_remote_code=False
            )
            return cast("Tokenizer", tokenizer.backend_tokenizer)
        except Exception as error:
            reason = str(error).strip().split("\n")[0].replace(copy, str(path))
            raise ModelError(f"{path}: its tokenizer cannot be loaded ({reason})") from None


def _copy_tokenizer(path: Path, copy: Path) -> None:
    """Copy the files of a tokenizer without a tokenizer.json, which must name no other files."""
    for name in (CONFIG, *VOCABULARIES, *DETAILS):
        if (path / name).is_file():
            (copy / name).write_bytes(read_file(path / name))
    settings = copy / SETTINGS
    if not settings.is_file():
        return
    fields = read_object(settings)
    for field in VOCABULARY_FIELDS:
        if isinstance(fields.get(field), str):
            raise ModelError(
                f"{path / SETTINGS}: {field} names a file, expected none there; the files of a "
                f"tokenizer are {', '.join((*VOCABULARIES, *DETAILS))}, beside it"
            )
    # What saved it may have written where its files were.
    kept = {name: value for name, value in fields.items() if not name.endswith("_file")}
    settings.write_text(json.dumps(kept), encoding="utf-8")
