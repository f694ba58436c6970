"""The recipe of the published Bigram-Backcopy models: what it draws, what it trains, and that a
scan takes what it keeps.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from headcount.models import backcopy as training
from headcount.workers.inputs.families.bigram_backcopy import (
    BUNDLED_TEXT,
    Bigrams,
    Chain,
    bigrams_of,
    chain_of,
    follow,
)
from headcount.workers.model.files.model_info import describe, find_model
from tests.reference.definitions import definitions
from tests.toys.toy_models import measure


def tokens_of(table: Bigrams, batch: int = 300, length: int = 33) -> np.ndarray:
    return next(training.sequences(table, batch, length, 0, "cpu")).numpy()


@pytest.mark.parametrize("variant", ["backcopy", "dormant_markov", "interpolate"])
def test_tensors_of_many_sequences_follow_the_chain_of_one(variant: Any):
    rng = np.random.default_rng(0)
    places, copied = rng.random((20, 7)), rng.random((20, 7)) < 0.5
    chain = chain_of(bigrams_of(BUNDLED_TEXT, 3), variant)
    tensors = Chain(torch.from_numpy(chain.rows), torch.from_numpy(chain.wakes), chain.copies)
    together = torch.stack(
        follow(tensors, torch.from_numpy(places), torch.from_numpy(copied))
    ).numpy()
    single_sequences = [follow(chain, places[:, i], copied[:, i]) for i in range(7)]
    assert together.T.tolist() == np.array(single_sequences).tolist()
    assert np.isin(together, [0, 1, 2]).any()


def test_training_draws_the_input_family_behind_bos():
    table = bigrams_of(BUNDLED_TEXT, 3)
    tokens = tokens_of(table, batch=5)
    places = torch.rand(
        32, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).numpy()
    expected = [follow(chain_of(table), places[:, i], np.ones(32, bool)) for i in range(5)]
    assert (tokens[:, 0] == 65).all()
    assert (tokens[:, 1:] - table.first_id).tolist() == np.array(expected).tolist()


def test_every_batch_is_fresh_and_a_seed_draws_the_same_again():
    first, second = islice(training.sequences(bigrams_of(BUNDLED_TEXT, 3), 4, 20, 7, "cpu"), 2)
    same_seed = next(training.sequences(bigrams_of(BUNDLED_TEXT, 3), 4, 20, 7, "cpu"))
    assert first.tolist() == same_seed.tolist() != second.tolist()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_recipe_gives_checkpoints_that_a_scan_takes(
    optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    small = "--layers 2 --dim 16 --length 20 --batch 32 --steps 80 --checkpoints 0 40 --seed 0"
    rate = "0.01" if optimizer == "adamw" else "0.1"
    words = [*small.split(), "--optimizer", optimizer, "--lr", rate, "--out", str(tmp_path)]
    training.train(training.arguments().parse_args(words))
    steps = [f"step-{step:06}" for step in (0, 40, 80)]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == steps
    info = describe(tmp_path)
    assert (info.n_layers, info.n_heads, info.d_model, info.d_vocab, info.n_ctx) == (
        2,
        1,
        16,
        67,
        20,
    )
    assert (
        info.sha256 == describe(tmp_path / steps[-1]).sha256 != describe(tmp_path / steps[0]).sha256
    )
    tokens = tokens_of(bigrams_of(BUNDLED_TEXT, 3), 4, 20).astype(np.int32)
    losses = []
    for step in steps:
        measurements = measure(tmp_path / step, tokens, predictions=["losses"])
        assert measurements.method.engine == "fused"
        expected = definitions(tmp_path / step, tokens)
        for name in (
            "value_result_norm",
            "sink_value_result_norm",
            "sink_logit_spread",
            "sink_resid_post_top3",
        ):
            np.testing.assert_allclose(
                measurements.heads[name], expected[name], rtol=1e-5, atol=1e-5
            )
        model = GPT2LMHeadModel.from_pretrained(tmp_path / step)
        with torch.no_grad():
            logprobs = model(torch.from_numpy(tokens).long()).logits.log_softmax(-1)
        of_next = logprobs[:, :-1].gather(-1, torch.from_numpy(tokens).long()[:, 1:, None])[..., 0]
        np.testing.assert_allclose(
            measurements.sequences["losses"][:, 1:], -of_next, rtol=1e-5, atol=1e-5
        )
        losses.append(-of_next.mean().item())
    assert losses[0] > losses[1] > losses[2]
    assert losses[0] - losses[2] > 0.5


def test_the_published_model_has_no_biases_in_linear_layers_and_an_output_of_its_own():
    args = training.arguments().parse_args(["--out", "nowhere"])
    model = training.make_model(
        bigrams_of(BUNDLED_TEXT, 3), args.layers, args.dim, args.length, args.seed
    )
    optimiser = training.make_optimiser(
        model, args.optimizer, training.LEARNING_RATES[args.optimizer]
    )
    trained = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    biases = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith(("c_attn.bias", "c_proj.bias", "c_fc.bias"))
    ]
    assert len(biases) == 3 * 4
    assert not any(parameter.any() or id(parameter) in trained for parameter in biases)
    assert model.lm_head.weight is not model.transformer.wte.weight
    # Embedding, positions, output; four matrices of attention, eight of the MLP and two norms a
    # layer; the last norm.
    d_model = args.dim
    assert (
        sum(parameter.numel() for parameter in trained_of(model))
        == 67 * d_model
        + 256 * d_model
        + 67 * d_model
        + 3 * (12 * d_model * d_model + 4 * d_model)
        + 2 * d_model
    )
    options = ("lr", "weight_decay", "betas", "eps")
    assert {option: optimiser.defaults[option] for option in options} == {
        "lr": 3e-4, "weight_decay": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8,
    }  # fmt: skip
    assert (args.batch, args.length, args.steps, model.config.n_head) == (512, 256, 10_000, 1)


def trained_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_the_bundled_model_is_its_last_checkpoint():
    model = find_model("bundled:backcopy-dynamics-mini")
    steps = sorted(model.glob("step-*"))
    assert len(steps) == 6
    assert describe(steps[-1]).sha256 == describe(model).sha256
    assert len({describe(step).sha256 for step in steps}) == 6
