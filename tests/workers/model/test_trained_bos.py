"""Whether sequences begin with BOS: as in the model's training unless the scan says otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest

from headcount.jobs.plan.plan import Plan, make_plan
from headcount.queries.answers.page_runs import _input_words
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.model.info.description import describe
from headcount.workers.model.info.trained_bos import PREPENDS_NONE
from tests.toys import toy_models as toy
from tests.toys.commands import printed

BOS_EOS = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA = {"model_type": "llama", "bos_token_id": 256, "eos_token_id": 257}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
SAME = {"bos_token_id": 256, "eos_token_id": 256}


def write_tokenizer(path: Path, puts_bos: bool = False) -> None:
    """A tokenizer of bytes, <s> = 256 and </s> = 257, which may put <s> before every text."""
    from tokenizers import Tokenizer, processors

    file = str(toy.byte_tokenizer(path, "<s>") / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(["</s>"])
    if puts_bos:
        template: Any = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
        tokenizer.post_processor = template
    tokenizer.save(file)


def save_llama(path: Path, puts_bos: bool = False) -> Path:
    """A tiny Llama that reads bytes."""
    toy.save_model(path, toy.family("LlamaConfig", vocab_size=258, **LLAMA))
    write_tokenizer(path, puts_bos)
    return path


NOT_BEFORE = "its tokenizer puts none before a text, and "


@pytest.mark.parametrize(("config", "settings", "puts_bos", "is_first", "evidence"), [
    (LLAMA, BOS_EOS, True, True, "its tokenizer puts it before every text"),
    (LLAMA, BOS_EOS | {"add_bos_token": True}, False, True,
     "its tokenizer puts it before every text"),
    # As SmolLM2-Instruct, whose token begins turns of a conversation.
    (LLAMA, BOS_EOS, False, False, NOT_BEFORE + "it does not end texts"),
    (LLAMA, BOS_EOS | {"add_bos_token": False}, False, False, NOT_BEFORE + "it does not end texts"),
    # As GPT-2.
    (GPT2 | SAME, {"bos_token": "<s>", "eos_token": "<s>"}, False, True,
     "it ends texts, so the next one follows it, and TransformerLens puts it before a text of gpt2 "
     "models"),
    # As Qwen.
    (LLAMA | SAME | {"model_type": "qwen2"}, {"bos_token": None}, False, False,
     "its tokenizer says that it has none"),
    # As Pythia.
    (LLAMA | SAME | {"model_type": "gpt_neox"}, None, False, False,
     NOT_BEFORE + "TransformerLens puts none before a text of gpt_neox models"),
    (LLAMA, None, None, True,
     "it has no tokenizer, and TransformerLens puts it before a text of llama models"),
    (LLAMA | {"bos_token_id": None}, None, None, False, "it names no beginning-of-sequence token"),
])  # fmt: skip
def test_sequences_begin_as_the_tokenizer_and_transformerlens_say(
    tmp_path: Path,
    config: dict[str, Any],
    settings: dict[str, Any] | None,
    puts_bos: bool | None,
    is_first: bool,
    evidence: str,
) -> None:
    sizes = {"vocab_size": 258, "hidden_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64}
    sizes["num_key_value_heads"] = 2
    toy.write_config(tmp_path, sizes | config)
    (tmp_path / "model.safetensors").write_bytes(b"weights that nobody loads")
    if puts_bos is not None:
        write_tokenizer(tmp_path, puts_bos)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    info = describe(tmp_path)
    assert (info.begins_with_bos("auto"), info.bos.evidence) == (is_first, evidence)
    assert [info.begins_with_bos(bos) for bos in (True, False)] == [True, False]


def test_the_families_without_bos_are_those_of_transformerlens() -> None:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    sizes: dict[str, Any] = {"d_model": 16, "d_head": 8, "n_layers": 2, "n_ctx": 16, "n_heads": 2}
    sizes |= {"d_vocab": 16, "d_mlp": 16, "n_key_value_heads": 2}
    without: set[str] = set()
    for family, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        # Another adapter needs a library of images.
        if name not in SUPPORTED_ARCHITECTURES or family == "gemma3n":
            continue
        config = TransformerBridgeConfig(**sizes, architecture=name)
        SUPPORTED_ARCHITECTURES[name](config)
        if not config.default_prepend_bos:
            without.add(family)
    assert without == PREPENDS_NONE


def scan_of(model: Path | str, out: Path, **changes: Any) -> Scan:
    fields = {"model": str(model), "n_ctx": 8, "sequences": 2, "out": str(out)}
    return parse_scan(fields | {"input": {"family": "uniform_random"}} | changes)


def plan_of(scan: Scan) -> Plan:
    return make_plan(scan, "toy")


def test_auto_is_the_run_of_what_it_means(tmp_path: Path) -> None:
    gpt2, llama = (tmp_path / name for name in ("gpt2", "llama"))
    toy.save_byte_model(gpt2)
    save_llama(llama)
    ids, firsts = {}, {}
    for model in (gpt2, llama):
        for bos in ("auto", True, False):
            plan = plan_of(scan_of(model, tmp_path / "runs", bos=bos))
            assert plan.manifest.identity["scan"]["bos"] is plan.sequences.has_bos
            ids[model, bos] = plan.run.run_id
            firsts[model, bos] = int(plan.sequences.shard(0).tokens[0, 0])
    assert ids[gpt2, "auto"] == ids[gpt2, True] != ids[gpt2, False]
    # Not beside each other in one run, although both have the name.
    assert len({ids[llama, bos] for bos in ("auto", True, False)}) == 3
    is_bos = {key: token == 256 for key, token in firsts.items()}
    assert is_bos == {key: key[1] is True or key == (gpt2, "auto") for key in is_bos}
    # A job is named before anybody has read the model.
    for model in (gpt2, llama):
        assert scan_of(model, tmp_path / "runs").run_id("toy") == ids[model, "auto"]


def test_plan_scan_doctor_and_manifest_say_how_sequences_begin_and_why(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "llama", puts_bos=True)
    evidence = "its tokenizer puts it before every text"
    file = tmp_path / "toy.toml"
    fields = f'model = "{model}"\nn_ctx = 8\nsequences = 2\nout = "{tmp_path}/runs"\n'
    file.write_text(fields + '[input]\nfamily = "uniform_random"\n')
    doctor = printed("doctor", "--model", model)
    assert f"sequences begin with BOS, token 256: {evidence}" in " ".join(doctor.split())
    assert "although" not in printed("scan", file, "--replicas", 0)
    against = printed("scan", file, "--replicas", 0, "--set", "bos=false")
    told = f"sequences begin without BOS, token 256, although {evidence}"
    assert told in " ".join(against.split())
    sql = "SELECT bos, bos_evidence FROM runs"
    rows = printed("query", tmp_path / "runs", sql, "--format", "csv")
    assert {*rows.splitlines()} >= {f"{bos},{evidence}" for bos in (True, False)}
    manifests = [
        Manifest.model_validate_json(path.read_text())
        for path in (tmp_path / "runs").glob("run_id=*/manifest.json")
    ]
    begins = {manifest.identity["scan"]["bos"]: manifest.model["bos"] for manifest in manifests}
    record = {"is_first": True, "is_strong": True, "evidence": evidence}
    assert begins == {True: record, False: record}


def test_a_report_says_how_sequences_begin_and_why() -> None:
    run = {"input_options": "{}", "documents": None, "bos": True, "bos_evidence": "it is so"}
    assert _input_words(run) == "with BOS (it is so)"
    # An older run did not record why.
    assert _input_words(run | {"bos": False, "bos_evidence": None}) == "without BOS"
    assert _input_words(run | {"bos": None}) == ""
