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
from headcount.workers.model.info.model_files import CONFIG, read_object
from headcount.workers.model.info.text_tokenizer import check_tokenizer_files, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAMES = {"bos_token_id": "bos_token", "eos_token_id": "eos_token"}
"""Fields of configurations, and those in which a tokenizer's files name the same token."""

NAMES_OF_TOKENS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that name a tokenizer's special tokens; the first that has a name counts."""

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class SpecialToken:
    """The token of one field."""

    id: int | None
    note: str = ""  # what a user should know of it


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
    config: Mapping[str, Any],
    d_vocab: int,
    defaults: Mapping[str, object] | None = None,
) -> dict[str, SpecialToken]:
    """The tokens of a model by field, such as `bos_token_id`.

    `config` is what config.json says of the language model, and `defaults` what transformers makes
    of it.
    """
    check_tokenizer_files(path)
    generation = read_object(path / GENERATION) if (path / GENERATION).is_file() else {}
    configurations = {CONFIG: config, GENERATION: generation}
    of_tokenizer = _tokenizer_tokens(path)
    return {
        field: _settled(
            field,
            {file: fields[field] for file, fields in configurations.items() if field in fields},
            of_tokenizer[field],
            d_vocab,
            (defaults or {}).get(field),
        )
        for field in TOKENIZER_NAMES
    }


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
        return SpecialToken(None)
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


def _tokenizer_tokens(path: Path) -> dict[str, _TokenizerToken]:
    """What the tokenizer in a directory says of each field."""
    named = {field: _named_token(path, name) for field, name in TOKENIZER_NAMES.items()}
    try:
        tokenizer = load_tokenizer(path)
    except ModelError:
        # There is none, or it is broken, which only matters to whoever reads text.
        return dict.fromkeys(TOKENIZER_NAMES, _TokenizerToken())
    around = _around_a_text(tokenizer)
    tokens: dict[str, _TokenizerToken] = {}
    for field, token in named.items():
        if token.name:
            tokens[field] = replace(token, id=tokenizer.token_to_id(token.name))
        else:
            tokens[field] = token if token.is_denied else around[field]
    return tokens


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
