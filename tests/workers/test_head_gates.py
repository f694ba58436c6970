"""Heads that are opened in rounds: against the engine under an intervention, and by hand."""

from pathlib import Path

import pytest
import torch

from headcount.workers.head_check import HeadTrial
from headcount.workers.head_gates import Asked, HeadGates
from tests.toys import toy_models as toy

SINK, RECENT = 2, 5


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(("LlamaConfig", {"num_key_value_heads": 2}), id="llama"),
        pytest.param(
            (
                "Gemma2Config",
                {"attn_logit_softcapping": 0.5, "sliding_window": 12, "head_dim": 8, **toy.GQA},
            ),
            id="gemma2",
        ),
    ],
)
def test_gains_are_slopes_of_the_loss_between_a_cut_and_a_whole_cache(
    config: tuple[str, dict[str, object]], tmp_path: Path
) -> None:
    name, options = config
    model = toy.save_model(tmp_path / "model", toy.family(name, **options))
    trial = HeadTrial(str(model), SINK, RECENT, n_ctx=24, sequences=3)
    question = trial._question("needles", 4)
    needles = Asked.of_answers(*question)
    gates = HeadGates(trial.replica.model, SINK, RECENT)
    told: list[int] = []
    opened = ((1, 1),)
    measured = gates.asked(needles, opened, told.append)
    assert sum(told) == 3
    # The engine, with the cut as an intervention, says the same.
    answers = trial._answers(opened, ("needles",), 4)
    assert measured.recall == answers.recall
    whole, _ = gates.whole(needles, told.append)
    assert whole == trial._answers(trial.kv_heads, ("needles",), 4).recall
    for layer, head in [(0, 0), (1, 0), (1, 1)]:
        losses = []
        for step in (-0.02, 0.02):
            opened = torch.zeros(2, 2)
            opened[1, 1] = 1
            opened[layer, head] += step
            with torch.no_grad():
                losses.append(gates._measured(needles, opened, told.append)[1])
        slope = (losses[1] - losses[0]) / 0.04
        assert measured.of_all[layer, head] == pytest.approx(-slope, rel=0.02, abs=2e-5)
