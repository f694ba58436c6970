"""The recipe of the published Bigram-Backcopy models: what it draws, what it trains, and that a
scan takes what it keeps.
"""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from headcount.models import backcopy as training
from headcount.workers.inputs.families.bigram_backcopy import (
    BUNDLED_TEXT,
    Bigrams,
    bigrams_of,
    chain_of,
    follow,
)
from headcount.workers.model.info.description import describe
from tests.reference.definitions import definitions
from tests.toys.toy_models import measure


def tokens_of(table: Bigrams, batch: int = 300, length: int = 33) -> np.ndarray:
    return next(training.sequences(table, batch, length, 0, "cpu")).numpy()


def test_training_draws_fresh_batches_of_the_input_family_behind_bos():
    table = bigrams_of(BUNDLED_TEXT, 3)
    first, second = islice(training.sequences(table, 5, 33, 0, "cpu"), 2)
    assert first.tolist() == tokens_of(table, batch=5).tolist() != second.tolist()
    generator = torch.Generator().manual_seed(0)
    places = torch.rand(32, 5, generator=generator, dtype=torch.float64).numpy()
    expected = [follow(chain_of(table), places[:, i], np.ones(32, bool)) for i in range(5)]
    assert (first[:, 0] == 65).all()
    assert (first[:, 1:].numpy() - table.first_id).tolist() == np.array(expected).tolist()


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.long)])
def test_the_recipe_gives_checkpoints_that_a_scan_takes(optimizer: str, tmp_path: Path):
    small = "--layers 2 --dim 16 --length 20 --batch 32 --steps 80 --checkpoints 0 40 --seed 0"
    rate = "0.01" if optimizer == "adamw" else "0.1"
    words = [*small.split(), "--optimizer", optimizer, "--lr", rate, "--out", str(tmp_path)]
    training.train(training.arguments().parse_args(words))
    steps = [f"step-{step:06}" for step in (0, 40, 80)]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == steps
    info = describe(tmp_path)
    sizes = (info.n_layers, info.n_heads, info.d_model, info.d_vocab, info.n_ctx)
    assert sizes == (2, 1, 16, 67, 20)
    first, _, last = (describe(tmp_path / step).sha256 for step in steps)
    assert info.sha256 == last != first
    tokens = tokens_of(bigrams_of(BUNDLED_TEXT, 3), 4, 20).astype(np.int32)
    losses: list[float] = []
    for step in steps:
        measurements = measure(tmp_path / step, tokens, predictions=["losses"])
        expected = definitions(tmp_path / step, tokens)
        for name in ("value_result_norm", "sink_logit_spread", "sink_resid_post_top3"):
            np.testing.assert_allclose(
                measurements.heads[name], expected[name], rtol=1e-5, atol=1e-5
            )
        losses.append(float(measurements.sequences["losses"][:, 1:].mean()))
    assert losses[0] > losses[1] > losses[2]
    assert losses[0] - losses[2] > 0.5


def test_the_published_model_has_no_biases_in_linear_layers_and_an_output_of_its_own():
    args = training.arguments().parse_args(["--out", "nowhere"])
    table = bigrams_of(BUNDLED_TEXT, 3)
    model = training.make_model(table, args.layers, args.dim, args.length, args.seed)
    rate = training.LEARNING_RATES[args.optimizer]
    optimiser = training.make_optimiser(model, args.optimizer, rate)
    trained = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    linear = ("c_attn.bias", "c_proj.bias", "c_fc.bias")
    biases = [bias for name, bias in model.named_parameters() if name.endswith(linear)]
    assert len(biases) == 3 * 4
    assert not any(bias.any() or id(bias) in trained for bias in biases)
    assert model.lm_head.weight is not model.transformer.wte.weight
    # Embedding, positions, output; four matrices of attention, eight of the MLP and two norms a
    # layer; the last norm.
    d = args.dim
    parameters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert parameters == (67 + 256 + 67) * d + 3 * (12 * d * d + 4 * d) + 2 * d
    options = ("lr", "weight_decay", "betas", "eps")
    assert {option: optimiser.defaults[option] for option in options} == {
        "lr": 3e-4, "weight_decay": 1e-4, "betas": (0.9, 0.99), "eps": 1e-8,
    }  # fmt: skip
    assert (args.batch, args.length, args.steps, model.config.n_head) == (512, 256, 10_000, 1)
