"""A tokenizer may have tokens that its model does not have: only what uses them is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from headcount.schemas.errors import ModelError, ScanError
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.info.description import describe
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from tests.toys import toy_models as toy
from tests.toys.commands import error_of, printed
from tests.toys.refusals import refused

TEXTS = ["no picture here at all", "a <pic> and more text", "spelled out: <img>, that is text"]


def save_model(path: Path) -> Path:
    """A model of 257 tokens whose tokenizer also has <pic>, and <img>, a special one."""
    toy.save_byte_model(path)
    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([AddedToken("<pic>")])
    tokenizer.add_special_tokens([AddedToken("<img>", special=True)])
    tokenizer.save(file)
    return path


def scan_file(path: Path, **fields: Any) -> Path:
    """A scan of the model; two of the texts are longer than a sequence."""
    texts = path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    lines = {"model": str(path / "m"), "n_ctx": 12, "sequences": "all", "out": str(path / "runs")}
    options = {"family": "pile", "files": str(texts)} | fields.pop("input", {})
    toml = [f"{key} = {json.dumps(value)}" for key, value in {**lines, **fields}.items()]
    toml += ["[input]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
    (path / "toy.toml").write_text("\n".join(toml))
    return path / "toy.toml"


@pytest.mark.parametrize("shuffle", [False, True])
def test_only_texts_with_a_token_beyond_the_model_are_left_out(
    tmp_path: Path, shuffle: bool
) -> None:
    save_model(tmp_path / "m")
    file = scan_file(tmp_path, bad_rows=0.5, input={"shuffle": shuffle})
    # An estimate counts it, too.
    printed("plan", file)
    told = " ".join(printed("scan", file, "--replicas", 0).split())
    assert "1 bad row left out: " in told
    assert "texts.jsonl, line 2 (token 257 (<pic>) is none of the model's)" in told
    # A special token is text, and is counted.
    assert "Texts spell out special tokens, which stay text (<img> in 1)" in told
    (manifest,) = (tmp_path / "runs").glob("run_id=*/manifest.json")
    assert json.loads(manifest.read_text())["sequences"] == 2
    printed("scan", file, "--replicas", 0)


def test_more_such_texts_than_bad_rows_allows_are_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path / "m")
    told = " ".join(error_of("scan", scan_file(tmp_path), "--replicas", 0).split())
    assert "1 of 3 documents are bad, more than bad_rows = 0.01" in told
    assert "line 2 (token 257 (<pic>) is none of the model's)" in told


def test_a_drawn_text_with_such_a_token_is_refused(tmp_path: Path) -> None:
    info = describe(save_model(tmp_path / "m"))
    words = {"keys": ["a"], "values": ["b"], "fact": "<pic> {key} {value}", "question": "{key} "}
    options = {"family": "text_needle", **words}
    scan = toy.toy_scan(n_ctx=64, input=options)
    assert refused(ScanError, Sequences(scan, info).shard, 0) == (
        "input family text_needle: sequence 0 uses token 257 (<pic>), which is none of the 257 "
        "tokens of m; choose another text"
    )


def test_tokens_that_were_not_added_make_it_another_model_s(tmp_path: Path) -> None:
    toy.save_byte_model(tmp_path / "m")
    told = refused(ModelError, TextTokenizer, tmp_path / "m", 250)
    assert "its tokenizer has 256 tokens and the model 250" in told
    # One of many added tokens is no picture of Gemma's.
    file = str(tmp_path / "m" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens([f"<{number}>" for number in range(256)])
    tokenizer.save(file)
    told = refused(ModelError, TextTokenizer, tmp_path / "m", 257)
    assert "its tokenizer has 513 tokens and the model 257" in told
