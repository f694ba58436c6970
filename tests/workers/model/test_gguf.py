"""Models in GGUF files: the numbers of the same weights elsewhere, and what is said and refused."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.schemas.errors import ModelError
from headcount.schemas.files.manifest import Manifest
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.info.description import describe, find_model, find_tokenizer
from headcount.workers.model.info.gguf_file import read_gguf
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from tests.toys import toy_models as toy
from tests.toys.commands import error_of, printed
from tests.toys.gguf_files import write_gguf
from tests.toys.refusals import refused
from tests.workers.model.test_trained_bos import write_tokenizer

pytest.importorskip("gguf", reason="the library that reads GGUF files: pip install gguf")


def save_tokenizer(path: Path, pair: str) -> None:
    """Bytes but one, a pair of letters as one token, <s> = 256 and </s> = 257."""
    write_tokenizer(path)
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    letters = sorted(vocabulary.keys() - {"ÿ"}, key=vocabulary.get)
    tokenizer["model"]["vocab"] = {token: i for i, token in enumerate([*letters, pair])}
    tokenizer["model"]["merges"] = [[*pair]]
    file.write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with fewer KV heads than heads, and a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("models") / "llama"
    fields = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257}
    toy.save_model(path, toy.family("LlamaConfig", num_key_value_heads=2, **fields))
    save_tokenizer(path, "th")
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return path


@pytest.fixture(scope="module")
def gguf(llama: Path) -> Path:
    return write_gguf(llama.parent / "model.gguf", llama, **TOKENS)


TOKENS = {"tokenizer__ggml__bos_token_id": 256, "tokenizer__ggml__eos_token_id": 257}


def heads_of(path: Path, **changes: Any) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(258, size=(3, 17)).astype(np.int32)
    fields = {"n_ctx": 17, "statistics": "all", "predictions": ["loss"]} | changes
    measured = toy.replica(path, **fields).measure(tokens)
    return {**measured.heads, "loss": measured.tables["sequences"]["loss"]}


@pytest.mark.parametrize("engine", ["fused", "dense"])
def test_a_file_gives_the_numbers_of_the_same_weights(llama: Path, gguf: Path, engine: str) -> None:
    options = {} if engine == "fused" else {"engine": "dense", "statistics": "standard"}
    expected, found = heads_of(llama, **options), heads_of(gguf, **options)
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_half_precision_gives_the_numbers_of_the_rounded_weights(
    llama: Path, tmp_path: Path
) -> None:
    rounded = tmp_path / "rounded"
    shutil.copytree(llama, rounded)

    def round_to_half(tensors: dict[str, Any]) -> None:
        for name, weight in tensors.items():
            if weight.dim() > 1:
                tensors[name] = weight.half().float()

    toy.change_weights(rounded, round_to_half)
    file = write_gguf(tmp_path / "half.gguf", rounded, np.float16, **TOKENS)
    assert describe(file).quantisation.startswith("F16 (tensors: ")
    expected, found = heads_of(rounded), heads_of(file)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_a_file_describes_the_model_of_its_directory(
    llama: Path, gguf: Path, tmp_path: Path
) -> None:
    info, in_directory = describe(gguf), describe(llama)
    same = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_head", "n_ctx", "d_vocab", "family")
    same += ("bos_token_id", "eos_token_id")
    assert [getattr(info, name) for name in same] == [getattr(in_directory, name) for name in same]
    formats = "F32 (tensors: 21 F32)"
    assert (info.layout, info.quantisation) == ("gguf", formats)
    assert info.notes == (f"the weights are those of a GGUF file, {formats}",)
    # The content is the identity: a copy of another name, beside files of another model, is it.
    (tmp_path / "config.json").write_text("not read")
    (tmp_path / "tokenizer.json").write_text("not read")
    copy = Path(shutil.copy(gguf, tmp_path / "copy.gguf"))
    assert describe(copy).identity | {"name": ""} == info.identity | {"name": ""}
    assert TextTokenizer(copy, 258).fingerprint == TextTokenizer(gguf, 258).fingerprint
    text = "Straße 123\n\tx"
    assert TextTokenizer(gguf, 258).encode(text) == TextTokenizer(llama, 258).encode(text)
    other = write_gguf(tmp_path / "other.gguf", llama, **TOKENS, llama__vocab_size=258)
    assert describe(other).sha256 != info.sha256


def test_scan_plan_doctor_and_manifest_say_the_quantisation(gguf: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "some text that is long enough"}\n' * 4)
    file = tmp_path / "toy.toml"
    fields = f'model = "{gguf}"\nn_ctx = 12\nsequences = 4\nout = "{tmp_path}/runs"\n'
    file.write_text(fields + f'[input]\nfamily = "pile"\nfiles = "{texts}"\n')
    for words in (["doctor", "--model", gguf], ["plan", file], ["scan", file]):
        told = " ".join(printed(*words).split())
        assert "a GGUF file, F32 (tensors: 21 F32)" in told
    (path,) = (tmp_path / "runs").glob("run_id=*/manifest.json")
    manifest = Manifest.model_validate_json(path.read_text())
    assert manifest.model["quantisation"] == "F32 (tensors: 21 F32)"
    assert manifest.places["model"] == str(gguf)
    assert manifest.identity["tokenizer"] == TextTokenizer(gguf, 258).fingerprint
    # A moved file is the same model.
    gone = Path(shutil.copy(gguf, tmp_path / "moved.gguf"))
    printed("resume", path.parent, "--set", f"model={json.dumps(str(gone))}")


@pytest.mark.parametrize(("fields", "is_first"), [
    ({"tokenizer__ggml__add_bos_token": True}, True),
    ({"tokenizer__ggml__add_bos_token": False}, False),
    ({}, False),
])  # fmt: skip
def test_the_file_says_whether_texts_begin_with_bos(
    llama: Path, tmp_path: Path, fields: dict[str, Any], is_first: bool
) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama, **TOKENS, **fields)
    assert describe(file).begins_with_bos("auto") is is_first


def test_what_a_tokenizer_has_lost_is_said(llama: Path, tmp_path: Path) -> None:
    # Bytes need no step that splits digits, so a merge of two stands for its loss.
    path = tmp_path / "m"
    shutil.copytree(llama, path)
    save_tokenizer(path, "12")
    told = {
        name: describe(
            write_gguf(tmp_path / f"{name}.gguf", path, **TOKENS, tokenizer__ggml__pre=name)
        ).notes[1:]
        for name in ("smollm", "gpt-2", "llama-bpe", "of-nobody")
    }
    advice = "set tokenizer to the directory or Hub id of the original"
    assert told == {
        "smollm": (
            "its tokenizer (smollm) has lost the step that splits off digits: '1234567890' is 9 "
            f"tokens, expected 10; {advice}",
        ),
        "gpt-2": (),
        "llama-bpe": (),
        "of-nobody": (
            "its tokenizer splits texts in a way (of-nobody) that transformers does not know, and "
            f"so as GPT-2's does; {advice}",
        ),
    }


# Another tokenizer


def test_a_tokenizer_of_another_place_belongs_to_the_run(
    llama: Path, gguf: Path, tmp_path: Path
) -> None:
    # As the Trainer's checkpoints, which have none.
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(llama, checkpoint, ignore=shutil.ignore_patterns("tokenizer*"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "some text that is long enough"}\n' * 4)
    file = tmp_path / "toy.toml"
    fields = f'model = "{checkpoint}"\nn_ctx = 12\nsequences = 4\nout = "{tmp_path}/runs"\n'
    file.write_text(fields + f'[input]\nfamily = "pile"\nfiles = "{texts}"\n')
    assert "no tokenizer files" in error_of("scan", file)
    for tokenizer in (llama, gguf):
        printed("scan", file, "--set", f"tokenizer={json.dumps(str(tokenizer))}")
    paths = sorted((tmp_path / "runs").glob("run_id=*/manifest.json"))
    manifests = [Manifest.model_validate_json(path.read_text()) for path in paths]
    expected = {str(path): TextTokenizer(path, 258).fingerprint for path in (llama, gguf)}
    found = {each.places["tokenizer"]: each.identity["tokenizer"] for each in manifests}
    assert found == expected
    # BOS is that of the tokenizer, and so is whether it is put first.
    assert {each.identity["model"]["bos_token_id"] for each in manifests} == {256}
    assert all("its tokenizer puts none" in each.model["bos"]["evidence"] for each in manifests)
    printed("resume", paths[0].parent)


def test_a_tokenizer_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    scan = toy.toy_scan(input={"family": "text", "files": "bundled:LICENSE"})
    for d_vocab in (200, 600):
        path = tmp_path / str(d_vocab)
        path.mkdir()
        toy.write_config(path, config | {"vocab_size": d_vocab})
        (path / "model.safetensors").write_bytes(b"weights that nobody loads")
        sequences = Sequences(scan, describe(path, tokenizer=llama))
        told = refused(ModelError, lambda of=sequences: of.tokenizer)
        assert f"{llama}: its tokenizer has 25" in told
        assert f"and the model {d_vocab};" in told
    told = refused(ModelError, find_tokenizer, str(tmp_path / "nowhere"))
    assert told == f"tokenizer '{tmp_path}/nowhere': no such directory"
    told = refused(ModelError, find_tokenizer, str(llama / "config.json"))
    assert told.endswith("is a file; expected a directory, or a file that ends in .gguf")


# Bad files


def test_files_that_cannot_be_read_are_refused_in_a_line(
    llama: Path, gguf: Path, tmp_path: Path
) -> None:
    content = gguf.read_bytes()
    file = tmp_path / "m.gguf"
    for size in (0, 3, 4, 20, 30, 200, 3000, len(content) // 2, len(content) - 40):
        file.write_bytes(content[:size])
        told = refused(ModelError, describe, file)
        assert str(file) in told
        assert "\n" not in told
        assert told.endswith("fetch it again") or "is no GGUF file" in told
    file.write_bytes(b"PK\3\4" + content[4:])
    assert refused(ModelError, describe, file) == (
        f"{file}: is no GGUF file; expected one that begins with GGUF"
    )
    file.write_bytes(content[:4] + b"\x09" + content[5:])
    assert "version 9, expected 2 or 3" in refused(ModelError, describe, file)


@pytest.mark.parametrize(("fields", "told"), [
    ({"architecture": "spiral"}, "transformers cannot read it (GGUF model with architecture spiral "
     "is not supported yet.)"),
    ({"split__count": 3}, "is one of 3 parts; join them with llama-gguf-split --merge"),
    ({"llama__rope__scaling__type": "yarn"}, "stretches rotary positions "
     "(llama.rope.scaling.type), which transformers does not read from a GGUF file; take the "
     "model's safetensors"),
])  # fmt: skip
def test_what_transformers_would_misread_is_refused(
    llama: Path, tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama, **fields)
    assert refused(ModelError, describe, file) == f"{file}: {told}"


def test_a_file_without_a_weight_is_refused(llama: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", llama, leave_out="layers.1.mlp.up_proj", **TOKENS)
    told = refused(ModelError, heads_of, file)
    assert told == (
        f"{file}: weights missing or of another shape: model.layers.1.mlp.up_proj.weight (1 in all)"
    )


def test_a_directory_of_files_asks_for_the_name_of_one(gguf: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(gguf, tmp_path / name)
    assert refused(ModelError, describe, tmp_path) == (
        f"{tmp_path}: no readable config.json; expected one, or the name of a GGUF file, such as "
        f"model = '{tmp_path}/a.gguf' (it has a.gguf, b.gguf)"
    )
    told = refused(ModelError, find_model, str(tmp_path / "c.gguf"))
    assert told == f"model '{tmp_path}/c.gguf': no such file"


def test_without_the_library_a_line_says_what_to_install(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where there is no such package.
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    assert refused(ModelError, read_gguf, gguf) == (
        f"{gguf}: the library that reads GGUF is not installed: pip install 'headcount[gguf]'"
    )
