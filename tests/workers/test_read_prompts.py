"""Models that read on behind prompts: against one pass, and against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from headcount.workers.cache_trial import CacheTrial
from headcount.workers.loading import load_model
from headcount.workers.model.info.description import describe
from headcount.workers.model.model import Model
from headcount.workers.read_prompts import ReadPrompts, final_stream, whole_attention
from tests.reference.reference_changes import rotation
from tests.toys import toy_models as toy
from tests.toys.windowed_models import N_CTX, check_moves, cut_to_windows, reading_model

TOKENS = np.random.default_rng(0).integers(2, toy.D_VOCAB, (3, 31))


def saved(config: Any, folder: Path) -> Model:
    return load_model(describe(toy.save_model(folder / "model", config)), "raw", "cpu")


@pytest.mark.parametrize(
    "name",
    [
        "gpt2", "opt", "neox", "granite", "llama-gqa", "mistral-window-20", "mistral-window-6",
        "gemma2-low-caps", "gpt-oss", "bloom",
    ],
)  # fmt: skip
def test_reading_on_is_one_pass(name: str, tmp_path: Path):
    """Windows are longer than what is read behind the prompt, or shorter."""
    model = saved(toy.CONFIGS[name](), tmp_path)
    prompts = ReadPrompts(model, TOKENS, 19)
    assert prompts.is_exact
    with torch.no_grad():
        behind = prompts.read_on(slice(1, 3), whole_attention)
        whole = final_stream(model, torch.from_numpy(TOKENS[1:]), whole_attention)
    torch.testing.assert_close(behind, whole[:, 19:], atol=1e-5, rtol=1e-4)


def test_a_state_beside_keys_and_values_is_noticed(tmp_path: Path):
    types = ["conv", "full_attention"]
    model = saved(toy.family("Lfm2Config", layer_types=types, **toy.GQA), tmp_path)
    assert not ReadPrompts(model, TOKENS, 19).is_exact


class RoundingCache(DynamicCache):
    """A cache that rounds keys and values of a layer whenever they are read: those of a prompt,
    once it has been read.
    """

    prompt = 0

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.prompt and layer_idx == 2:
            return to_levels(keys, 4, self.prompt), to_levels(values, 2, self.prompt)
        return keys, values


def to_levels(x: torch.Tensor, bits: int, end: int) -> torch.Tensor:
    """From the fifth position to the last one of a prompt, the nearest of 2^bits levels between the
    ends of each row, which is rotated before.
    """
    turn = torch.from_numpy(rotation(x.shape[-1]))
    rotated = x[:, :, 4:end] @ turn
    low, high = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    changed = x.clone()
    changed[:, :, 4:end] = (((rotated - low) / step).round() * step + low) @ turn
    return changed


@pytest.mark.long
def test_transformers_says_the_same_behind_a_prompt():
    """With a cache that rounds, and masks of every head in float64: nothing of ours."""
    trial = CacheTrial("bundled:llama-mini", [], n_ctx=N_CTX, sequences=3, reads_prompts=True)
    prompt = trial.prompt
    assert 64 < prompt < 192
    plan = (
        f"stream_groups(4,24,4,x4102)+store_keys(rotated4,4,{prompt},4,x00f)"
        f"+store_values(rotated2,4,{prompt},4,x00f)"
    )
    model = reading_model()
    tokens = torch.from_numpy(trial.pieces["chooses"].tokens)
    cache = RoundingCache()
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits[:, prompt:].log_softmax(-1)
        model(tokens[:, :prompt], past_key_values=cache)
        cache.prompt = prompt
        cut_to_windows(model, ((0, 2), (1, 0), (3, 1)), first=prompt)
        positions = torch.arange(prompt, N_CTX)[None]
        after = model(tokens[:, prompt:], past_key_values=cache, position_ids=positions).logits
    measured = trial.measure("chooses", plan)
    check_moves(trial, measured, before, after.log_softmax(-1), first=prompt)
