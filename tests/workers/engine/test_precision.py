"""Number formats: what rounding does to single numbers, that every precision is felt, and what is
refused.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from headcount.schemas.scans.scan import PRECISIONS
from headcount.workers.engine import number_formats
from headcount.workers.engine.number_formats import rounded
from headcount.workers.replica import InterventionMeasurements
from tests.toys import toy_models as toy


@pytest.mark.parametrize(
    ("number_format", "bits"),
    [("float16", 10), ("bfloat16", 7), ("tf32", 10), ("float32", 23), ("float64", 52)],
)
def test_a_format_keeps_its_bits_and_rounds_to_nearest_even(number_format: str, bits: int) -> None:
    last_bit = 2.0**-bits
    # In last bits above 1: what is given, and what comes of it.
    rounded_bits = {0: 0, 1: 1, 3: 3}
    if bits < 23:
        rounded_bits |= {0.5: 0, 1.5: 2, 0.75: 1, 0.25: 0}
    for given, expected in rounded_bits.items():
        for sign in (1, -1):
            number = torch.tensor([sign * (1 + given * last_bit)], dtype=torch.float64)
            assert rounded(number, number_format).item() == sign * (1 + expected * last_bit), given


def test_formats_have_their_range() -> None:
    numbers = torch.tensor([0.0, 70000.0, 1e30, 1e-30])
    assert rounded(numbers, "float16").tolist() == [0.0, torch.inf, torch.inf, 0.0]
    for number_format in ("bfloat16", "tf32"):
        torch.testing.assert_close(rounded(numbers, number_format), numbers, rtol=2**-8, atol=0)


MODELS = ("gpt2", "llama-gqa", "neox", "legacy-safetensors")


def drift(measured: InterventionMeasurements, exact: InterventionMeasurements) -> float:
    """Mean over all values of the difference, relative where values are large."""
    differences = [
        np.abs(measured.heads[name] - exact.heads[name]) / np.maximum(1, np.abs(exact.heads[name]))
        for name in toy.FORWARD_STATISTICS
    ]
    return float(np.nanmean(np.concatenate([d.ravel() for d in differences])))


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(n, marks=pytest.mark.long) for n in MODELS[1:])]
)
def test_every_precision_drifts_as_far_as_its_bits_let_it(shelf: toy.Shelf, name: str) -> None:
    tokens = toy.repeating_tokens(30, batch=4)
    measured = {p: toy.measure(shelf.path(name), tokens, precision=p) for p in PRECISIONS}
    assert {m.method.precision for m in measured.values()} == set(PRECISIONS)
    drifts = {p: drift(m, measured["float64"]) for p, m in measured.items()}
    # Fewer bits drift more: 23 in float32, 10 in tf32 and float16, 7 in bfloat16.
    assert drifts["float32"] < 2e-6
    for ten_bits in ("tf32", "float16", "tf32_linears", "float16_linears"):
        assert 10 * drifts["float32"] < drifts[ten_bits] < 2e-3, ten_bits
    assert 10 * drifts["float32"] < drifts["float16x2_linears"] < drifts["float16_linears"]
    for seven_bits in ("bfloat16", "bfloat16_linears"):
        assert 3 * drifts["tf32"] < drifts[seven_bits] < 3e-2, seven_bits
    # The format of the scores is felt too.
    assert drift(measured["bfloat16"], measured["bfloat16_linears"]) > 10 * drifts["float32"]


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_layer_of_every_block_is_multiplied_in_the_precision(
    shelf: toy.Shelf, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = toy.replica(shelf.path(name))
    weight_shapes: list[tuple[int, ...]] = []

    def record_weight(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight_shapes.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    toy.multiply_with(monkeypatch, record_weight)
    replica.measure(toy.repeating_tokens(8))
    kinds = {"Linear", "Conv1D"}
    layers = [
        m for block in replica.model.blocks for m in block.modules() if type(m).__name__ in kinds
    ]
    assert len(weight_shapes) == len(layers) > 0


@pytest.mark.parametrize(
    "precision",
    [p if "linears" in p else pytest.param(p, marks=pytest.mark.long) for p in PRECISIONS],
)
def test_a_changed_weight_is_felt_in_every_precision(shelf: toy.Shelf, precision: str) -> None:
    tokens, columns = toy.repeating_tokens(20, batch=2), ["query_norm", "entropy", "sink_mass"]
    replica = toy.replica(shelf.path("gpt2"), precision=precision, statistics=columns)
    texts = ("none", "zero_query_bias", "none")
    before, changed, after = (replica.measure(tokens, text).heads for text in texts)
    assert (changed["query_norm"] != before["query_norm"]).all()
    for name in columns:
        np.testing.assert_array_equal(before[name], after[name])


def test_weights_are_split_once_and_again_after_a_change(
    shelf: toy.Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_weights: list[torch.Tensor] = []

    def counting(weight: torch.Tensor) -> torch.Tensor:
        split_weights.append(weight)
        return two_halves(weight)

    two_halves = number_formats._two_halves
    monkeypatch.setattr(number_formats, "_two_halves", counting)
    for name, linears_of_layer in (("gpt2", 4), ("llama-gqa", 7)):
        replica = toy.replica(shelf.path(name), toy.load_model, precision="float16x2_linears")
        tokens = toy.repeating_tokens(20, batch=2)
        before = replica.measure(tokens)
        again = replica.measure(tokens)
        layers = replica.model.info.n_layers
        # After the last attention, nothing is computed that nobody reads.
        assert layers < len(split_weights) <= linears_of_layer * layers
        np.testing.assert_array_equal(before.heads["entropy"], again.heads["entropy"])
        split_weights.clear()
        weight = replica.model.changeable_weight("W_Q", 1)
        assert weight is not None
        weight.tensor.mul_(2)
        changed = replica.measure(tokens)
        # The queries of the layer, in GPT-2 together with keys and values.
        assert len(split_weights) == 1
        assert (changed.heads["entropy"][:, 1] != before.heads["entropy"][:, 1]).all()
        split_weights.clear()


def test_a_part_of_a_weight_is_not_taken_for_the_whole() -> None:
    weight = torch.randn(6, 4)
    halves = number_formats.WeightHalves([weight])
    whole = halves.of(weight)
    assert whole.shape == (6, 8)
    assert halves.of(weight) is whole
    torch.testing.assert_close(halves.of(weight[:3]), whole[:3])
    square = torch.randn(4, 4)
    halves_of_square = number_formats.WeightHalves([square])
    torch.testing.assert_close(halves_of_square.of(square)[:, 0], square[:, 0].half())
    torch.testing.assert_close(halves_of_square.of(square.T)[:, 0], square[0].half())
    weight[0, 0] = 2.0
    assert halves.of(weight)[0, 0] == 2.0
