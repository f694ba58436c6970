"""Heads that are opened in rounds: against a trial under an intervention, and by hand."""

from pathlib import Path

import pytest
import torch

from headcount.workers.cache_trial import CacheTrial
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
    trial = CacheTrial(str(model), [], n_ctx=36, sequences=3)
    pieces = trial.pieces["chooses"]
    needles = Asked.of_answers(pieces.tokens, pieces.is_answer)
    gates = HeadGates(trial.replica.model, SINK, RECENT)
    told: list[int] = []
    opened = ((1, 1),)
    measured = gates.asked(needles, opened, told.append)
    assert sum(told) == 3
    # A trial, with the cut as an intervention, says the same.
    cut = trial.measure("chooses", f"stream_groups({SINK},{RECENT},2,x31)")
    assert (measured.recall, measured.loss) == pytest.approx((cut.recall.mean(), cut.needle.mean()))
    recall, loss = gates.whole(needles, told.append)
    whole = trial.measure("chooses", "none")
    assert (recall, loss) == pytest.approx((whole.recall.mean(), whole.needle.mean()))
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
