"""Number formats: what rounding does to single numbers, that every precision is felt, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2LMHeadModel

from headcount.schemas.scans.precision import PRECISIONS
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine import number_formats
from headcount.workers.engine.number_formats import LinearProducts, linears_in, rounded
from headcount.workers.replica import InterventionMeasurements
from tests.toys import toy_models as toy


@pytest.mark.parametrize(
    ("number_format", "bits"),
    [("float16", 10), ("bfloat16", 7), ("tf32", 10), ("float32", 23), ("float64", 52)],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_format_keeps_its_bits_and_rounds_to_nearest_even(
    number_format: str, bits: int, sign: float
) -> None:
    last_bit = 2.0**-bits
    representable = {1.0: 1.0, 1 + last_bit: 1 + last_bit, 1 + 3 * last_bit: 1 + 3 * last_bit}
    between = {
        1 + last_bit / 2: 1.0,
        1 + 3 * last_bit / 2: 1 + 2 * last_bit,
        1 + 0.75 * last_bit: 1 + last_bit,
        1 + 0.25 * last_bit: 1.0,
    }
    for value, expected in (representable | (between if bits < 23 else {})).items():
        result = rounded(torch.tensor([sign * value], dtype=torch.float64), number_format)
        assert result.item() == sign * expected, value


def test_formats_have_their_range() -> None:
    numbers = torch.tensor([0.0, 70000.0, 1e30, 1e-30])
    assert rounded(numbers, "float16").tolist() == [0.0, torch.inf, torch.inf, 0.0]
    for number_format in ("bfloat16", "tf32"):
        torch.testing.assert_close(rounded(numbers, number_format), numbers, rtol=2**-8, atol=0)


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 5), (1, 1), (3, 64)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("conv", [True, False])
def test_linear_layers_in_float32_are_what_they_were(
    shape: tuple[int, ...], with_bias: bool, conv: bool
) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, 24),
        torch.randn(10, 24),
        torch.randn(10) if with_bias else None,
    )
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.inference_mode(), linears_in("float32", "cpu"):
        if conv and bias is not None:
            stored = weight.T.contiguous()
            result = torch.addmm(bias, x.view(-1, 24), stored).view(*shape, 10)
            stored.zero_()
            assert torch.equal(
                torch.addmm(bias, x.view(-1, 24), stored)[0], bias
            )  # No copy of a weight is kept.
        else:
            result = F.linear(x, weight, bias)
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)


CONFIGS = {
    "gpt2": toy.gpt2,
    "llama": lambda: toy.family("LlamaConfig", num_key_value_heads=2),
    "neox": lambda: toy.family("GPTNeoXConfig"),
    "legacy": None,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("precision")
    return {
        name: toy.save_legacy(root / name, "safetensors")
        if config is None
        else toy.save_model(root / name, config())
        for name, config in CONFIGS.items()
    }


def drift(measured: InterventionMeasurements, exact: InterventionMeasurements) -> float:
    """Mean over all values of the difference, relative where values are large."""
    differences = [
        np.abs(measured.heads[name] - exact.heads[name]) / np.maximum(1, np.abs(exact.heads[name]))
        for name in STATISTICS
    ]
    return float(np.nanmean(np.concatenate([d.ravel() for d in differences])))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_precision_drifts_as_far_as_its_bits_let_it(
    paths: dict[str, Path], name: str
) -> None:
    tokens = toy.repeating_tokens(30, batch=4)
    measured = {p: toy.measure(paths[name], tokens, precision=p) for p in PRECISIONS}
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


@pytest.mark.parametrize("name", CONFIGS)
def test_every_linear_layer_of_every_block_is_multiplied_in_the_precision(
    paths: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = toy.replica(paths[name])
    weight_shapes: list[tuple[int, ...]] = []

    def record_weight(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight_shapes.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    monkeypatch.setattr(
        "headcount.workers.engine.fused_engine.linears_in", lambda *_: LinearProducts(record_weight)
    )
    replica.measure(toy.repeating_tokens(8))
    kinds = {"Linear", "Conv1D"}
    layers = [
        m for block in replica.model.blocks for m in block.modules() if type(m).__name__ in kinds
    ]
    assert len(weight_shapes) == len(layers) > 0


def test_float64_is_the_library_s_own_forward_pass_in_float64(paths: dict[str, Path]) -> None:
    tokens = toy.repeating_tokens(30, batch=2)
    model: Any = (
        GPT2LMHeadModel.from_pretrained(paths["gpt2"], attn_implementation="eager").double().eval()
    )
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens).long(), output_attentions=True, output_hidden_states=True
        )
    patterns = torch.stack(out.attentions, dim=1)
    heads = toy.measure(paths["gpt2"], tokens, precision="float64").heads
    lag = patterns.diagonal(-1, 3, 4).mean(-1).numpy()
    entropy = -torch.xlogy(patterns, patterns).sum(-1).mean(-1).numpy()
    stream = torch.stack(out.hidden_states[:-1], dim=1).norm(dim=-1).mean(-1).numpy()
    # Columns are stored as float32, which holds seven digits.
    np.testing.assert_allclose(heads["previous_token_score"], lag, rtol=3e-7, atol=1e-12)
    np.testing.assert_allclose(heads["entropy"], entropy, rtol=3e-7, atol=1e-12)
    np.testing.assert_allclose(heads["resid_pre_norm"][..., 0], stream, rtol=3e-7, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_dense_engine_computes_in_float64_too(paths: dict[str, Path], name: str) -> None:
    tokens = toy.repeating_tokens(20, batch=2)
    fused, dense = (
        toy.measure(paths[name], tokens, precision="float64", engine=e) for e in ("fused", "dense")
    )
    for column in STATISTICS:
        # Hugging Face computes the softmax of eager attention in float32 whatever the model is in.
        np.testing.assert_allclose(
            dense.heads[column], fused.heads[column], rtol=1e-6, atol=3e-7, err_msg=column
        )


def test_a_changed_weight_is_felt_in_every_precision(paths: dict[str, Path]) -> None:
    tokens = toy.repeating_tokens(20, batch=2)
    for precision in PRECISIONS:
        replica = toy.replica(paths["gpt2"], precision=precision)
        before, changed, after = (
            replica.measure(tokens, i) for i in ("none", "zero_query_bias", "none")
        )
        assert (changed.heads["query_norm"] != before.heads["query_norm"]).all(), precision
        for name in STATISTICS:
            assert np.array_equal(before.heads[name], after.heads[name], equal_nan=True), (
                precision,
                name,
            )


def test_weights_are_split_once_and_again_after_a_change(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    split_weights: list[torch.Tensor] = []

    def counting(weight: torch.Tensor) -> torch.Tensor:
        split_weights.append(weight)
        return two_halves(weight)

    two_halves = number_formats._two_halves
    monkeypatch.setattr(number_formats, "_two_halves", counting)
    for name, linears_of_layer in (("gpt2", 4), ("llama", 7)):
        replica = toy.replica(paths[name], precision="float16x2_linears")
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
