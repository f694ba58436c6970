"""Which token begins a sequence, and which one ends a text: what the files of a model say of it.

The tokenizer's own counts, then config.json, then generation_config.json. What transformers fills
in where config.json says nothing is a number of its class: an ordinary token of most tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headcount.schemas.errors import ModelError
from headcount.workers.model.info.gguf_file import read_gguf
from headcount.workers.model.info.gguf_tokenizer import losses
from headcount.workers.model.info.model_files import CONFIG, is_gguf, read_object
from headcount.workers.model.info.text_tokenizer import (
    SETTINGS,
    check_tokenizer_files,
    load_tokenizer,
)
from headcount.workers.model.info.trained_bos import OwnBos, trained_bos
from headcount.workers.model.model_info import TrainedBos

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAMES = {"bos_token_id": "bos_token", "eos_token_id": "eos_token"}
"""Fields of configurations, and those in which a tokenizer's files name the same token."""

WORDS = {"bos_token_id": "beginning-of-sequence", "eos_token_id": "end-of-text"}
"""What these tokens are called in messages."""

NAMES_OF_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name a tokenizer's special tokens; the first that has a name counts."""

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class SpecialToken:
    """The token of one field."""

    id: int | None
    note: str = ""  # what a user should know of it


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens of a model by field, such as `bos_token_id`, and what its tokenizer puts first."""

    tokens: dict[str, SpecialToken]
    bos: TrainedBos
    lost: tuple[str, ...] = ()  # what a tokenizer from a GGUF file has lost

    @property
    def ids(self) -> dict[str, int | None]:
        """The ids by field."""
        return {field: token.id for field, token in self.tokens.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of them."""
        notes = (token.note for token in self.tokens.values() if token.note)
        return (*notes, *self.lost)


@dataclass(frozen=True)
class _TokenizerToken:
    """What a tokenizer says of a token."""

    id: int | None = None
    name: str = ""
    is_denied: bool = False  # whether its files say that there is none

    @property
    def words(self) -> str:
        return f"{self.id} ({self.name})" if self.name else str(self.id)


def special_tokens(
    path: Path,
    tokenizer_path: Path,
    config: Mapping[str, Any],
    d_vocab: int,
    family: str,
    defaults: Mapping[str, object] | None = None,
) -> SpecialTokens:
    """The special tokens of a model of a family.

    `config` is what config.json says of the language model, and `defaults` what transformers makes
    of it.
    """
    check_tokenizer_files(tokenizer_path)
    generation = read_object(path / GENERATION) if (path / GENERATION).is_file() else {}
    name = path.name if is_gguf(path) else CONFIG
    configurations = {name: config, GENERATION: generation}
    tokenizer = _own_tokenizer(tokenizer_path)
    of_tokenizer = _tokenizer_tokens(tokenizer_path, tokenizer)
    tokens = {
        field: _settled(
            field,
            {file: fields[field] for file, fields in configurations.items() if field in fields},
            of_tokenizer[field],
            d_vocab,
            (defaults or {}).get(field),
        )
        for field in TOKENIZER_NAMES
    }
    bos, eos = (tokens[field].id for field in TOKENIZER_NAMES)
    own_bos = None if tokenizer is None else _own_bos(tokenizer_path, tokenizer, bos)
    lost = losses(tokenizer_path, tokenizer) if tokenizer and is_gguf(tokenizer_path) else ()
    return SpecialTokens(tokens, trained_bos(family, bos, eos, own_bos), tuple(lost))


def _own_bos(path: Path, tokenizer: Tokenizer, bos: int | None) -> OwnBos:
    """What a tokenizer says of the beginning of a text."""
    if is_gguf(path):
        return OwnBos(bos is not None and read_gguf(path).puts_bos_first)
    first = _around_a_text(tokenizer)["bos_token_id"].id
    settings = read_object(path / SETTINGS) if (path / SETTINGS).is_file() else {}
    # transformers puts the token first if it is told so, whatever tokenizer.json does.
    return OwnBos(
        is_put_first=bos is not None and (first == bos or settings.get("add_bos_token") is True),
        is_denied=_named_token(path, "bos_token").is_denied,
    )


def token_ids(value: object) -> list[int]:
    """The ids that a field names: one, or several of which any will do."""
    values: list[object] = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]


def first_in_vocabulary(value: object, d_vocab: int) -> int | None:
    """The first id that a field names and the vocabulary has."""
    return next((each for each in token_ids(value) if 0 <= each < d_vocab), None)


def _settled(
    field: str,
    values: Mapping[str, object],
    of_tokenizer: _TokenizerToken,
    d_vocab: int,
    default: object,
) -> SpecialToken:
    """The token of a field, by its value in each configuration that has the field."""
    stated = {file: value for file, value in values.items() if token_ids(value)}
    if of_tokenizer.id is not None and 0 <= of_tokenizer.id < d_vocab:
        # transformers itself would take its default.
        is_wrong = CONFIG not in stated and default not in (None, of_tokenizer.id)
        note = f"{CONFIG} does not name {field}" if is_wrong else ""
        note = _contradiction(field, stated, of_tokenizer.id) or note
        used = f"; its tokenizer's {of_tokenizer.words} is used"
        return SpecialToken(of_tokenizer.id, note + used if note else "")
    # A null in config.json says that there is none.
    if values.get(CONFIG, 0) is None or not stated:
        unused = f"no file names {field}, and transformers' {default} is not used"
        return SpecialToken(None, "" if default is None else unused)
    file = next(iter(stated))
    token = first_in_vocabulary(stated[file], d_vocab)
    if token is None:
        ids = f"expected 0 to {d_vocab - 1}, so it has no {WORDS[field]} token"
        return SpecialToken(None, f"{field} is {stated[file]!r} in its {file}, {ids}")
    note = _contradiction(field, stated, token)
    used = f"; {file}'s {token} is used"
    return SpecialToken(token, note + used if note else _doubt(field, file, token, of_tokenizer))


def _contradiction(field: str, stated: Mapping[str, object], token: int) -> str:
    """The first configuration that does not name a token; empty if all do."""
    others = (file for file, value in stated.items() if token not in token_ids(value))
    file = next(others, None)
    return f"{field} is {stated[file]} in {file}" if file else ""


def _doubt(field: str, file: str, token: int, of_tokenizer: _TokenizerToken) -> str:
    """Why the tokenizer does not agree with a configuration; empty if it does not disagree."""
    name = TOKENIZER_NAMES[field]
    used = f"{field} of {file}, {token}, is used"
    if of_tokenizer.is_denied:
        return f"its tokenizer says that it has no {name}; {used}"
    if of_tokenizer.id is not None:
        return f"its tokenizer's {of_tokenizer.words} is no token of the model; {used}"
    if of_tokenizer.name:
        return f"its tokenizer names {of_tokenizer.name} as {name} and does not have it; {used}"
    return ""


def _own_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a directory; None if there is none, or a broken one, which only matters to
    whoever reads text.
    """
    try:
        return load_tokenizer(path)
    except ModelError:
        return None


def _tokenizer_tokens(path: Path, tokenizer: Tokenizer | None) -> dict[str, _TokenizerToken]:
    """What the tokenizer in a directory says of each field."""
    if tokenizer is None:
        return dict.fromkeys(TOKENIZER_NAMES, _TokenizerToken())
    if is_gguf(path):
        return {field: _gguf_token(path, tokenizer, field) for field in TOKENIZER_NAMES}
    around = _around_a_text(tokenizer)
    tokens: dict[str, _TokenizerToken] = {}
    for field, name in TOKENIZER_NAMES.items():
        token = _named_token(path, name)
        if token.name:
            tokens[field] = replace(token, id=tokenizer.token_to_id(token.name))
        else:
            tokens[field] = token if token.is_denied else around[field]
    return tokens


def _gguf_token(path: Path, tokenizer: Tokenizer, field: str) -> _TokenizerToken:
    """The token that a GGUF file names."""
    token = read_gguf(path).fields.get(f"tokenizer.ggml.{field}")
    name = None if token is None else tokenizer.id_to_token(token)
    return _TokenizerToken(token, name or "")


def _named_token(path: Path, name: str) -> _TokenizerToken:
    """The token that a tokenizer's files name, without its id."""
    for file in NAMES_OF_TOKENS:
        fields = read_object(path / file) if (path / file).is_file() else {}
        if name in fields:
            value = fields[name]
            # Written as a text, or with how the text around it is treated.
            text = value.get("content") if isinstance(value, dict) else value
            return _TokenizerToken(None, text or "", is_denied=not text)
    return _TokenizerToken()


def _around_a_text(tokenizer: Tokenizer) -> dict[str, _TokenizerToken]:
    """The tokens that a tokenizer puts before and behind every text."""
    around = dict.fromkeys(TOKENIZER_NAMES, _TokenizerToken())
    try:
        encoding = tokenizer.encode("a", add_special_tokens=True)
    except Exception:
        # A vocabulary without this letter; the library raises nothing more precise.
        return around
    special = encoding.special_tokens_mask
    for field, place in zip(TOKENIZER_NAMES, (0, -1), strict=True):
        if len(special) > 1 and special[place]:
            around[field] = _TokenizerToken(encoding.ids[place], encoding.tokens[place])
    return around
