"""Which token begins a sequence and which ends a text, where the files of a model disagree."""

import json
from pathlib import Path
from typing import Any

import pytest

from headcount.schemas.errors import ModelError
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.info.description import describe
from tests.toys import toy_models as toy
from tests.toys.refusals import refused

BASE = {"model_type": "llama", "vocab_size": 261, "hidden_size": 8, "num_hidden_layers": 1}
BASE |= {"num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of 259 tokens: bytes, <s> = 256, </s> = 257 and <eot> = 258."""
    from tokenizers import Tokenizer

    path = toy.byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), "<s>") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["</s>", "<eot>"])
    return tokenizer.to_str()


def described(
    path: Path, tokenizer: str, config: dict[str, Any], files: dict[str, Any]
) -> tuple[Any, ...]:
    """Both tokens of a model with these files, and what is said of them."""
    path.mkdir()
    toy.write_config(path, BASE | config)
    (path / "model.safetensors").write_bytes(b"weights that nobody loads")
    for name, content in files.items():
        text = tokenizer if content == "the tokenizer" else json.dumps(content)
        (path / f"{name}.json").write_text(text)
    info = describe(path)
    return info.bos_token_id, info.eos_token_id, *info.notes


NAMED = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
RIGHT = {"bos_token_id": 256, "eos_token_id": 257}
T = {"tokenizer": "the tokenizer"}


@pytest.mark.parametrize(("config", "files", "expected"), [
    # All say the same; also with one of several.
    (RIGHT, T | {"tokenizer_config": NAMED, "generation_config": RIGHT}, (256, 257)),
    ({"bos_token_id": 256, "eos_token_id": [258, 257]}, T | {"tokenizer_config": NAMED},
     (256, 257)),
    # config.json names none, and Llama's are 1 and 2.
    ({}, T | {"tokenizer_config": NAMED},
     (256, 257, "config.json does not name bos_token_id; its tokenizer's 256 (<s>) is used",
      "config.json does not name eos_token_id; its tokenizer's 257 (</s>) is used")),
    ({}, T | {"special_tokens_map": NAMED},
     (256, 257, "config.json does not name bos_token_id; its tokenizer's 256 (<s>) is used",
      "config.json does not name eos_token_id; its tokenizer's 257 (</s>) is used")),
    ({"bos_token_id": None, "eos_token_id": None}, T | {"tokenizer_config": NAMED}, (256, 257)),
    ({}, {}, (None, None, "no file names bos_token_id, and transformers' 1 is not used",
              "no file names eos_token_id, and transformers' 2 is not used")),
    ({}, T, (None, None, "no file names bos_token_id, and transformers' 1 is not used",
             "no file names eos_token_id, and transformers' 2 is not used")),
    ({}, {"generation_config": {"bos_token_id": 5, "eos_token_id": [6, 7]}}, (5, 6)),
    # They disagree.
    ({"bos_token_id": 1, "eos_token_id": [2, 3]}, T | {"tokenizer_config": NAMED},
     (256, 257, "bos_token_id is 1 in config.json; its tokenizer's 256 (<s>) is used",
      "eos_token_id is [2, 3] in config.json; its tokenizer's 257 (</s>) is used")),
    (RIGHT, T | {"tokenizer_config": NAMED, "generation_config": {"bos_token_id": 1}},
     (256, 257, "bos_token_id is 1 in generation_config.json; its tokenizer's 256 (<s>) is used")),
    (RIGHT, {"generation_config": {"eos_token_id": [3]}},
     (256, 257, "eos_token_id is [3] in generation_config.json; config.json's 257 is used")),
    ({"bos_token_id": 999, "eos_token_id": -1}, T | {"tokenizer_config": NAMED},
     (256, 257, "bos_token_id is 999 in config.json; its tokenizer's 256 (<s>) is used",
      "eos_token_id is -1 in config.json; its tokenizer's 257 (</s>) is used")),
    # The tokenizer has none, or names what it does not have.
    (RIGHT, T | {"tokenizer_config": {"bos_token": None}},
     (256, 257,
      "its tokenizer says that it has no bos_token; bos_token_id of config.json, 256, is used")),
    (RIGHT, T | {"tokenizer_config": {"bos_token": "<nowhere>"}},
     (256, 257, "its tokenizer names <nowhere> as bos_token and does not have it; bos_token_id of "
      "config.json, 256, is used")),
    (RIGHT | {"vocab_size": 258}, T | {"tokenizer_config": {"eos_token": "<eot>"}},
     (256, 257, "its tokenizer's 258 (<eot>) is no token of the model; eos_token_id of "
      "config.json, 257, is used")),
    # What says nothing, and a model without a tokenizer.
    (RIGHT, T, (256, 257)),
    (RIGHT, {}, (256, 257)),
    ({"bos_token_id": None}, {"generation_config": RIGHT}, (None, 257)),
])  # fmt: skip
def test_the_tokenizer_s_own_token_counts_and_what_disagrees_is_said(
    tmp_path: Path,
    tokenizer: str,
    config: dict[str, Any],
    files: dict[str, Any],
    expected: tuple[Any, ...],
) -> None:
    assert described(tmp_path / "m", tokenizer, config, files) == expected


def test_tokens_that_a_tokenizer_puts_around_a_text_are_its_own(tmp_path: Path, tokenizer: str):
    fields = json.loads(tokenizer)
    special = {
        token: {"id": token, "ids": [number], "tokens": [token]}
        for token, number in (("<s>", 256), ("<eot>", 258))
    }
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<eot>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }
    assert described(tmp_path / "m", json.dumps(fields), {"bos_token_id": 256}, T) == (
        256,
        258,
        "config.json does not name eos_token_id; its tokenizer's 258 (<eot>) is used",
    )


def test_the_text_part_of_a_model_names_its_own_tokens(tmp_path: Path, tokenizer: str):
    text = {**BASE, "model_type": "gemma3_text", "head_dim": 4, "num_key_value_heads": 1}
    path = tmp_path / "m"
    fields = {"model_type": "gemma3", "eos_token_id": [257, 258]}
    for part, expected in (({}, (None, 257)), ({"bos_token_id": 3, "eos_token_id": 4}, (3, 4))):
        told = described(path, tokenizer, fields | {"text_config": text | part}, {})
        assert told[:2] == expected
        path = tmp_path / "n"


def test_a_legacy_model_s_tokens_are_compared_with_its_tokenizer_s(tmp_path: Path, tokenizer: str):
    path = toy.save_legacy(tmp_path / "m", "safetensors", d_vocab=261)
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "tokenizer_config.json").write_text(json.dumps(NAMED))
    info = describe(path)
    assert (info.bos_token_id, info.eos_token_id) == (256, 257)
    assert info.notes[0] == "bos_token_id is 0 in config.json; its tokenizer's 256 (<s>) is used"


def test_a_default_that_no_file_states_is_refused_where_it_would_be_used(
    tmp_path: Path, tokenizer: str
):
    described(tmp_path / "m", tokenizer, {}, {})
    info = describe(tmp_path / "m")
    told = refused(ModelError, Sequences, toy.toy_scan(bos=True), info)
    assert told == "m: no file names bos_token_id, and transformers' 1 is not used; set bos = false"
    for bos in ("auto", False):
        assert not Sequences(toy.toy_scan(bos=bos), info).has_bos
