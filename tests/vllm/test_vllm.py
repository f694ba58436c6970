"""vLLM reads `fp8-kv-checkpoint`, caches with its scales, and loses nothing where keys are large.

`make vllm` installs vLLM's build for CPUs, which takes 3.1 GB, and AVX-512 for an 8-bit cache; then
`python -m pytest -m long -s tests/vllm` prints the table.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from headcount.workers.model.info.bundled_models import BUNDLED
from tests import ROOT
from tests.toys.commands import printed
from tests.toys.toy_models import gpt2, save_model
from tests.toys.wide_llama import wide_llama

INTERPRETER = ROOT / ".venv-vllm/bin/python"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (INTERPRETER.parents[1] / ".installed").exists(),
        reason="needs vLLM in .venv-vllm: make vllm",
    ),
]

TEXT = ["input.family=text", "input.files=bundled:LICENSE", "input.packing=concat", "n_ctx=128"]
OF_TEXT = [word for setting in [*TEXT, "sequences=32"] for word in ("--set", setting)]
LOUD = 100.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
    # It calls a function in its worker only if it may pickle it.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    # What it compiles for these few tokens needs a C++ compiler, and a path without spaces.
    "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and folders `MODEL-STRATEGY` with the scales of each."""
    home = tmp_path_factory.mktemp("vllm")
    wide_llama(home / "llama", 2)
    wide_llama(home / "loud", 2, keys=LOUD)
    save_model(home / "gpt2", gpt2(vocab_size=257, n_positions=256, n_embd=64, n_head=2))
    for file in BUNDLED["llama-mini"].glob("tokenizer*"):
        shutil.copy(file, home / "gpt2")
    for model, strategy in (
        ("llama", "tensor"), ("llama", "attn_head"), ("loud", "tensor"), ("gpt2", "attn_head"),
    ):  # fmt: skip
        folder = home / f"{model}-{strategy}"
        words = [home / f"runs-{model}", "--model", home / model, *OF_TEXT, "--strategy", strategy]
        printed("export", "fp8-kv-checkpoint", *words, "-o", folder)
    return home


@pytest.fixture(scope="module")
def rows(home: Path) -> dict[str, dict[str, Any]]:
    """What vLLM says, by folder and type of its cache: in ours the checkpoint says the type."""
    names = [
        "llama:auto", "llama:fp8", "llama-tensor:auto", "llama-attn_head:auto", "loud:fp8",
        "loud-tensor:auto", "gpt2-attn_head:auto",
    ]  # fmt: skip
    command = [INTERPRETER, Path(__file__).with_name("compare.py")]
    command += [str(home / name) for name in names]
    environment = os.environ | ENVIRONMENT | {"VLLM_CACHE_ROOT": str(home / "cache")}
    compared = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert compared.returncode == 0, compared.stderr[-3000:]
    rows = dict(zip(names, json.loads(compared.stdout.splitlines()[-1]), strict=True))
    for name, row in rows.items():
        print(name, f"{row['divergence']:.4f} {row['loss']:.4f}")
    return rows


@pytest.mark.parametrize(
    "name", ["llama-tensor", "llama-attn_head", "loud-tensor", "gpt2-attn_head"]
)
def test_vllms_layers_have_our_scales(
    name: str, home: Path, rows: dict[str, dict[str, Any]]
) -> None:
    written = load_file(home / name / "kv_scales.safetensors")
    layers = rows[f"{name}:auto"]["layers"]
    for module, layer in layers.items():
        assert layer["cache"] == "fp8"
        prefix = module if name.startswith("gpt2") else module.removesuffix(".attn")
        scales = {kind: written.pop(f"{prefix}.{kind}_scale").ravel() for kind in "qkv"}
        # Query heads that share keys take the largest of their scales.
        scales["q"] = scales["q"].reshape(len(scales["k"]), -1).max(1)
        assert {kind: layer[kind] for kind in "qkv"} == {k: v.tolist() for k, v in scales.items()}
        assert layer["applied"] == [scales["k"].max(), scales["v"].max()]
    assert not written


def test_an_8_bit_cache_predicts_nearly_the_same(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["llama:auto"]["divergence"] < 1e-6
    for name in ("llama-tensor:auto", "llama-attn_head:auto"):
        assert 1e-4 < rows[name]["divergence"] < 0.03
        assert rows[name]["loss"] == pytest.approx(rows["llama:auto"]["loss"], rel=0.01)


def test_large_keys_lose_nothing_with_our_scales_and_much_with_vllms(
    rows: dict[str, dict[str, Any]],
) -> None:
    ours, default, before = (
        rows[name] for name in ("loud-tensor:auto", "loud:fp8", "llama-tensor:auto")
    )
    # What is divided by its own scale is the same number.
    assert ours["loss"] == pytest.approx(before["loss"], abs=1e-3)
    same = np.equal(ours["answers"], before["answers"])
    assert same.mean() > 0.9
    assert all(layer["applied"] == [1, 1] for layer in default["layers"].values())
    assert default["divergence"] > 10 * ours["divergence"]
