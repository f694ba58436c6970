"""Engines read what `cache-plan` tells them, and lose in each text what the plan says.

`make engines` and `make vllm` make their environments.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headcount.exports.cache_plan.engines import ENGINES
from headcount.exports.cache_plan.plans import CachePlan, CacheShape, Choice
from headcount.workers.cache_trial import CacheTrial
from headcount.workers.interventions import stored_caches
from tests import ROOT
from tests.engines.in_engine import ENVIRONMENTS, flags_of, text_losses
from tests.toys.gguf_files import write_gguf
from tests.toys.toy_models import change_config
from tests.toys.wide_llama import wide_llama

pytestmark = pytest.mark.long

HEADS = tuple((layer, head) for layer in range(4) for head in range(4))
SHAPE = CacheShape(
    kv_heads=HEADS,
    n_kv_heads=4,
    d_head=64,
    n_ctx=256,
    sink=0,
    recent=0,
    whole=0,
    end=256,
    own_windows={},
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are blocks of 64, as a directory and as a GGUF file."""
    home = tmp_path_factory.mktemp("engines")
    model = wide_llama(home / "llama", 4)
    # llama.cpp reads no byte-level tokenizer that merges nothing.
    bare = shutil.ignore_patterns("tokenizer*")
    write_gguf(
        home / "llama.gguf",
        shutil.copytree(model, home / "bare", ignore=bare),
        tokenizer__ggml__model="no_vocab",
        llama__vocab_size=257,
        llama__attention__key_length=64,
        llama__attention__value_length=64,
    )
    # mlx-lm 0.32 looks for the base of rotations where transformers had it before version 5.
    config = json.loads((model / "config.json").read_text())
    change_config(model, rope_theta=config["rope_parameters"]["rope_theta"])
    return home


def told_and_measured(
    engine: str, file: Path, home: Path, *choices: Choice
) -> tuple[np.ndarray, np.ndarray]:
    """Losses of texts behind the whole cache and behind that of a plan, in the engine and by us:
    `[flags sequence]` each.
    """
    folder = ROOT / ENVIRONMENTS[engine]
    if not (folder / ".installed").exists():
        made_by = "vllm" if engine == "vllm" else "engines"
        pytest.skip(f"needs {engine} in {folder.name}: make {made_by}")
    trial = CacheTrial(
        str(home / "llama"),
        [],
        n_ctx=256,
        sequences=4,
        reads_prompts=ENGINES[engine].reads_prompts,
    )
    plan = CachePlan.untouched(SHAPE).with_choices(SHAPE, choices)
    names = ["none", plan.intervention(SHAPE)]
    measured = np.array([trial.measure("reports", name).text for name in names])
    flags = [flags_of(engine, SHAPE), flags_of(engine, SHAPE, *choices)]
    return text_losses(engine, file, trial.pieces["reports"], trial.prompt, flags), measured


def check_changes(found: np.ndarray, expected: np.ndarray, rtol: float) -> None:
    """That changes of texts are the same, up to a share of their size."""
    changes, ours = found[1] - found[0], expected[1] - expected[0]
    assert np.linalg.norm(changes - ours) < rtol * np.linalg.norm(ours)


@pytest.mark.parametrize("bits", [2, 4])
def test_mlx_lm_quantises_the_cache_behind_a_prompt(bits: int, home: Path):
    choice = Choice("", HEADS, keys=f"mlx{bits}", values=f"mlx{bits}")
    found, expected = told_and_measured("mlx", home / "llama", home, choice)
    check_changes(found, expected, 1e-3)


def test_llama_cpp_rotates_values_and_rounds_them(home: Path):
    choice = Choice("", HEADS, values="q4_0")
    found, expected = told_and_measured("llama.cpp", home / "llama.gguf", home, choice)
    check_changes(found, expected, 0.1)


def test_llama_cpp_rotates_keys_and_rounds_them_in_the_order_of_its_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """The halves of a head that rotary embeddings turn together lie beside each other there. Its
    queries are rounded as well, to 8 bits.
    """
    order = torch.arange(64).view(2, 32).T.flatten()
    in_blocks = stored_caches._in_blocks
    monkeypatch.setattr(
        stored_caches,
        "_in_blocks",
        lambda x, name: in_blocks(x[..., order], name)[..., order.argsort()],
    )
    choice = Choice("", HEADS, keys="q4_0")
    found, expected = told_and_measured("llama.cpp", home / "llama.gguf", home, choice)
    check_changes(found, expected, 0.3)


def towards_0(x: Tensor) -> Tensor:
    """Floats of 8 bits as vLLM's kernels for CPUs make them: they cut digits off."""
    held = x.clamp(-stored_caches.LARGEST_FP8, stored_caches.LARGEST_FP8)
    steps = 2.0 ** (held.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (held / steps).trunc() * steps


def test_vllm_stores_some_layers_in_8_bit_floats(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(stored_caches.STORE, "fp8", towards_0)
    layers_1_to_3 = Choice("", HEADS[4:], keys="fp8", values="fp8")
    found, expected = told_and_measured("vllm", home / "llama", home, layers_1_to_3)
    check_changes(found, expected, 1e-3)
