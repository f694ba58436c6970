"""The statistics of the catalogue equal their definitions, written out one query at a time in
float64 from raw weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.engine import Activations
from headcount.workers.model.files.model_info import find_model
from headcount.workers.model.model import bridge_of
from headcount.workers.replica import InterventionMeasurements
from tests.reference.definitions import Columns, definitions
from tests.toys import toy_models as toy


def repeated(period: int, first: bool, batch: int = 3, d_vocab: int = toy.D_VOCAB) -> np.ndarray:
    """A block of random tokens twice; with `first`, after one more token."""
    block = (
        np.random.default_rng(period).integers(2, d_vocab, size=(batch, period)).astype(np.int32)
    )
    return np.concatenate([block[:, :first] * 0, block, block], axis=1)


def check_columns(measured: InterventionMeasurements, expected: Columns) -> None:
    for name, values in expected.items():
        scale = 1 if STATISTICS[name].range == (0, 1) else np.maximum(1, np.abs(values))
        np.testing.assert_array_equal(np.isnan(measured.heads[name]), np.isnan(values), name)
        difference = np.nan_to_num(np.abs(measured.heads[name] - values) / scale)
        assert difference.max() <= 1e-5, name


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("catalogue") / "gpt2", toy.gpt2())


@pytest.mark.parametrize("engine", ["fused", "dense"])
@pytest.mark.parametrize(("period", "first"), [(2, False), (2, True), (13, True), (20, False)])
def test_columns_equal_their_definitions(gpt2: Path, engine: str, period: int, first: bool) -> None:
    tokens = repeated(period, first)
    check_columns(toy.measure(gpt2, tokens, engine=engine), definitions(gpt2, tokens))


def test_columns_of_a_trained_model_equal_their_definitions() -> None:
    path = find_model("bundled:gpt2-mini")
    tokens = repeated(100, True, batch=1, d_vocab=256)
    check_columns(toy.measure(path, tokens), definitions(path, tokens))


def test_raw_and_folded_weights_write_the_same_and_split_scores_differently(gpt2: Path) -> None:
    tokens = repeated(10, True)
    raw, folded = (
        toy.measure(gpt2, tokens, weight_processing=weights, engine="dense").heads
        for weights in ("raw", "folded")
    )
    np.testing.assert_allclose(
        folded["second_key_mass_late"], raw["second_key_mass_late"], atol=1e-5
    )
    np.testing.assert_allclose(
        folded["sink_score_advantage"], raw["sink_score_advantage"], rtol=1e-4, atol=1e-4
    )
    assert np.abs(folded["sink_shift_advantage"] - raw["sink_shift_advantage"]).max() > 0.1


def test_the_shift_is_the_loss_of_score_without_the_query_bias(gpt2: Path) -> None:
    tokens = repeated(10, True)
    replica = toy.replica(gpt2, interventions=["none", "zero_query_bias"])
    before, after = (replica.measure(tokens, name).heads for name in ("none", "zero_query_bias"))
    lost = before["sink_score_advantage"][:, 0] - after["sink_score_advantage"][:, 0]
    np.testing.assert_allclose(before["sink_shift_advantage"][:, 0], lost, rtol=1e-4, atol=1e-4)
    for name in (
        "score_shift",
        "sink_score_shift",
        "sink_score_shift_lead",
        "sink_shift_advantage",
    ):
        assert (after[name] == 0).all(), name
    # Without the bias, the content is all there is.
    np.testing.assert_allclose(after["sink_mass_content_only"], after["sink_mass_late"], atol=1e-6)
    np.testing.assert_allclose(
        before["sink_mass_content_only"][:, 0], after["sink_mass_late"][:, 0], atol=1e-6
    )
    # With no score left, attention is uniform.
    uniform = np.mean([1 / (q + 1) for q in range(10, 21)])
    np.testing.assert_allclose(after["sink_mass_shift_only"], uniform, rtol=1e-5)


def test_rotary_models_have_no_shift(tmp_path: Path) -> None:
    for name in ("LlamaConfig", "Qwen2Config"):
        path = toy.save_model(tmp_path / name, toy.family(name, num_key_value_heads=2))
        heads = toy.measure(path, repeated(10, True)).heads
        undefined = {column for column, values in heads.items() if np.isnan(values).all()}
        of_shifts = {
            "score_shift",
            "sink_score_shift",
            "sink_score_shift_lead",
            "sink_shift_advantage",
        }
        of_shifts |= {
            "sink_score_advantage",
            "sink_mass_shift_only",
            "sink_mass_content_only",
            "sink_key_cosine",
            "earlier_key_cosine",
            "sink_position_cosine",
            "other_position_cosine",
        }
        # The sequences are too short for a key that is distant by default.
        of_shifts |= {"distant_mass_4_64", "distant_mass_last_4_64"}
        # These tokens have no labels, and these models no learned sink.
        assert undefined == of_shifts | {
            "sink_gate",
            "sink_mass_triggers",
            "sink_mass_others",
            "previous_token_triggers",
            "labelled_key_mass_gold_query",
            "retrieval_score",
        }


def test_what_heads_write_is_what_the_model_adds_to_its_stream(tmp_path: Path) -> None:
    """With one head and no biases or MLP, the result is the difference of the residual streams."""
    path = toy.save_legacy(tmp_path / "one", "safetensors")
    replica = toy.replica(path)
    tokens = torch.from_numpy(repeated(10, True)).long()
    streams: list[Activations] = []
    for block in bridge_of(replica.model).blocks:
        block.attn.b_O.zero_()
        block.attn.W_O[1:] = 0
    with torch.inference_mode():
        replica.engine.run(
            tokens, {}, lambda _, seen: streams.append(seen) if "resid_post" in seen else None
        )
    heads = replica.measure(tokens.int().numpy()).heads
    for layer, seen in enumerate(streams):
        written = (seen["resid_post"] - seen["resid_pre"]).norm(dim=-1)
        np.testing.assert_allclose(
            heads["head_result_norm"][:, layer, 0], written.mean(1), rtol=1e-5
        )
        np.testing.assert_allclose(
            heads["head_result_norm_last"][:, layer, 0], written[:, -1], rtol=1e-5
        )
    assert (heads["head_result_norm"][..., 1:] == 0).all()


def test_diagonals_are_undefined_without_a_repeated_block(gpt2: Path) -> None:
    tokens = repeated(6, True)
    tokens[1, 9] += 1 if tokens[1, 9] < toy.D_VOCAB - 1 else -1
    diagonals = [s for s in STATISTICS if s.endswith(("_diagonal", "_strict"))]
    assert len(diagonals) == 3
    measured = toy.measure(gpt2, tokens)
    for name in diagonals:
        assert np.isnan(measured.heads[name]).all((1, 2)).tolist() == [False, True, False], name
        assert np.isnan(measured.sequences[f"uniform_{name}"]).tolist() == [False, True, False], (
            name
        )
        assert np.isnan(toy.measure(gpt2, repeated(1, True)).heads[name]).all()


def test_the_uniform_baseline_level_of_strict_induction(gpt2: Path) -> None:
    uniform_baseline = toy.measure(gpt2, repeated(19, True)).sequences
    keys = [1 / (q + 1) for q in range(20, 39)]
    np.testing.assert_allclose(
        uniform_baseline["uniform_induction_diagonal_strict"], np.mean(keys), rtol=1e-5
    )
    whole = (19 * np.mean(keys) + 1 / 19 + 1 / 20) / 21
    np.testing.assert_allclose(uniform_baseline["uniform_induction_diagonal"], whole, rtol=1e-5)


def test_formulas_of_the_catalogue_follow_from_columns(gpt2: Path) -> None:
    """TransformerLens's detector scores, from the docs' formulas: `mul` = Σ A∘D / ΣA, `abs` = 1 - T
    mean |A - D|.
    """
    tokens = toy.repeating_tokens(21, batch=1)
    model: Any = GPT2LMHeadModel.from_pretrained(gpt2, attn_implementation="eager").double().eval()
    with torch.no_grad():
        a = torch.stack(
            model(torch.from_numpy(tokens).long(), output_attentions=True).attentions, 1
        )[0].numpy()
    t = tokens[0]
    duplicate = np.tril(t[:, None] == t[None], -1).astype(float)
    induction = np.tril(np.concatenate([np.zeros((21, 1)), duplicate[:, :-1]], axis=1))
    heads = {
        name: values[0].astype(float) for name, values in toy.measure(gpt2, tokens).heads.items()
    }
    for detection, column in ((duplicate, "duplicate_score"), (induction, "induction_score")):
        mul = heads[column] * heads["match_coverage"]
        np.testing.assert_allclose(mul, (a * detection).sum((-2, -1)) / a.sum((-2, -1)), atol=1e-6)
        wanted = 1 - 21 * np.abs(a - detection).mean((-2, -1))
        np.testing.assert_allclose(2 * mul - heads["match_count"], wanted, atol=1e-5)
    previous = heads["previous_token_score"] * 20 / 21
    wanted = 1 - 21 * np.abs(a - np.eye(21, k=-1)).mean((-2, -1))
    np.testing.assert_allclose(2 * previous - 20 / 21, wanted, atol=1e-5)
    late = a[:, :, 10:]
    np.testing.assert_allclose(
        1 - heads["sink_mass_late"] - heads["next4_mass_late"],
        late[..., 5:].sum(-1).mean(-1),
        atol=1e-6,
    )
