"""Columns give the scores of other tools, as the pages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from tests.toys import toy_models as toy


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
