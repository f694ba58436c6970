"""The catalogue in long sequences, with folded weights, and against scores of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from tests.toys import toy_models as toy


def repeated(period: int, batch: int = 3, d_vocab: int = toy.D_VOCAB) -> np.ndarray:
    """A block of random tokens twice, after one more token."""
    block = np.random.default_rng(period).integers(2, d_vocab, size=(batch, period))
    return np.concatenate([block[:, :1] * 0, block, block], axis=1).astype(np.int32)


def test_raw_and_folded_weights_write_the_same_and_split_scores_differently(gpt2: Path):
    tokens = repeated(10)
    raw, folded = (
        toy.measure(gpt2, tokens, weight_processing=weights, engine="dense").heads
        for weights in ("raw", "folded")
    )
    tolerances: dict[str, dict[str, Any]] = {
        "second_key_mass_late": {"atol": 1e-5},
        "sink_score_advantage": {"rtol": 1e-4, "atol": 1e-4},
    }
    for name, close in tolerances.items():
        np.testing.assert_allclose(folded[name], raw[name], **close)
    assert np.abs(folded["sink_shift_advantage"] - raw["sink_shift_advantage"]).max() > 0.1


def test_formulas_of_the_catalogue_follow_from_columns(gpt2: Path):
    """TransformerLens's detector scores, from the docs' formulas: `mul` = Σ A∘D / ΣA, `abs` = 1 - T
    mean |A - D|.
    """
    tokens = toy.repeating_tokens(21, batch=1)
    model: Any = GPT2LMHeadModel.from_pretrained(gpt2, attn_implementation="eager").double().eval()
    with torch.no_grad():
        output = model(torch.from_numpy(tokens).long(), output_attentions=True)
        a = torch.stack(output.attentions, 1)[0].numpy()
    t = tokens[0]
    duplicate = np.tril(t[:, None] == t[None], -1).astype(float)
    induction = np.tril(np.concatenate([np.zeros((21, 1)), duplicate[:, :-1]], axis=1))
    measured = toy.measure(gpt2, tokens).heads
    heads = {name: values[0].astype(float) for name, values in measured.items()}
    for detection, column in ((duplicate, "duplicate_score"), (induction, "induction_score")):
        mul = heads[column] * heads["match_coverage"]
        np.testing.assert_allclose(mul, (a * detection).sum((-2, -1)) / a.sum((-2, -1)), atol=1e-6)
        wanted = 1 - 21 * np.abs(a - detection).mean((-2, -1))
        np.testing.assert_allclose(2 * mul - heads["match_count"], wanted, atol=1e-5)
    previous = heads["previous_token_score"] * 20 / 21
    wanted = 1 - 21 * np.abs(a - np.eye(21, k=-1)).mean((-2, -1))
    np.testing.assert_allclose(2 * previous - 20 / 21, wanted, atol=1e-5)
    late = a[:, :, 10:]
    rest = 1 - heads["sink_mass_late"] - heads["next4_mass_late"]
    np.testing.assert_allclose(rest, late[..., 5:].sum(-1).mean(-1), atol=1e-6)
