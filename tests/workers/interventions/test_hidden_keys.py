"""What an edit hides: scores of hidden keys are NULL, and what no mask can change stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headcount.schemas.errors import MeasureError, ScanError
from headcount.schemas.profiles import PROFILES
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.edits import hidden_keys, hide
from headcount.workers.interventions import INTERVENTIONS, intervention_registry
from headcount.workers.model.files.model_info import find_model
from headcount.workers.replica import InterventionMeasurements
from tests.toys import toy_models as toy

MASKS = (
    "mask_keys",
    "mask_keys(0,3)",
    "mask_keys(-4,4)",
    "mask_keys(9,2)",
    "mask_recent_keys",
    "mask_random_span",
    "keep_window(1,5)",
)
N_CTX = 24


@pytest.fixture(scope="module", params=["fused", "dense"])
def replica(request: pytest.FixtureRequest) -> toy.TextReplica:
    path = find_model("bundled:gpt2-mini")
    profiles = ["last_score_by_key", "score_by_pair"]
    curves = ["last_score_by_key"]
    return toy.replica(path, engine=request.param, profiles=profiles, curves=curves)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 250, (3, N_CTX)).astype(np.int32)


@pytest.fixture(scope="module")
def plain(replica: toy.TextReplica, tokens: np.ndarray) -> InterventionMeasurements:
    return replica.measure(tokens)


@pytest.mark.parametrize("mask", MASKS)
def test_no_mask_changes_the_first_layers_queries_and_keys(
    replica: toy.TextReplica, plain: InterventionMeasurements, tokens: np.ndarray, mask: str
) -> None:
    masked = replica.measure(tokens, mask)
    for name in ("sink_mass_shift_only", "sink_mass_content_only", "sink_score_advantage"):
        np.testing.assert_allclose(
            masked.heads[name][:, 0], plain.heads[name][:, 0], rtol=1e-5, atol=1e-7, err_msg=name
        )
    assert (masked.heads["sink_mass"] != plain.heads["sink_mass"]).any()


@pytest.mark.parametrize("mask", MASKS)
def test_a_score_statistic_is_null_where_it_reads_a_hidden_score(
    replica: toy.TextReplica, plain: InterventionMeasurements, tokens: np.ndarray, mask: str
) -> None:
    masked = replica.measure(tokens, mask)
    # The margin averages over all earlier keys, and the spread is of key 0 alone.
    assert np.isnan(masked.heads["sink_logit_margin"]).all()
    hides_first = mask in ("mask_keys", "mask_keys(0,3)", "mask_recent_keys")
    assert np.isnan(masked.heads["sink_logit_spread"]).all() == hides_first
    if not hides_first:
        np.testing.assert_allclose(
            masked.heads["sink_logit_spread"][:, 0],
            plain.heads["sink_logit_spread"][:, 0],
            rtol=1e-5,
        )
    other_statistics = [s for s in STATISTICS if not s.startswith("sink_logit_")]
    for name in other_statistics:
        assert np.array_equal(np.isnan(masked.heads[name]), np.isnan(plain.heads[name])), name


@pytest.mark.parametrize("mask", MASKS)
def test_the_largest_score_is_that_of_the_keys_that_a_mask_leaves(
    replica: toy.TextReplica, plain: InterventionMeasurements, tokens: np.ndarray, mask: str
) -> None:
    masked = replica.measure(tokens, mask).heads["score_max"]
    assert np.isfinite(masked).all()
    # The scores of the first layer are the same; a mask takes some of them away.
    assert (masked[:, 0] <= plain.heads["score_max"][:, 0] + 1e-5).all()
    assert (masked[:, 0] < plain.heads["score_max"][:, 0] - 1e-3).any()


def test_entries_of_curves_and_profiles_are_null_where_their_score_is_hidden(
    replica: toy.TextReplica, plain: InterventionMeasurements, tokens: np.ndarray
) -> None:
    masked = replica.measure(tokens, "mask_keys(-4,4)")
    hidden = np.arange(N_CTX) >= N_CTX - 4
    curve = masked.tables["curves"]["last_score_by_key"]
    assert np.isnan(curve[..., hidden]).all()
    np.testing.assert_allclose(
        curve[:, 0][..., ~hidden],
        plain.tables["curves"]["last_score_by_key"][:, 0][..., ~hidden],
        atol=1e-4,
    )
    profile = masked.means["profiles"]["last_score_by_key"]
    assert np.array_equal(profile.count == 0, np.broadcast_to(hidden, profile.count.shape))
    assert set(np.unique(profile.count)) == {0, 3}
    assert np.isnan(profile.mean[..., hidden]).all()
    assert np.isnan(profile.m2[..., hidden]).all()
    assert np.isfinite(profile.mean[..., ~hidden]).all()
    _query, key = np.tril_indices(N_CTX)
    pairs = masked.means["profiles"]["score_by_pair"]
    assert np.array_equal(np.isnan(pairs.mean[0, 0]), hidden[key])


def test_weights_that_are_not_numbers_are_an_error_under_a_mask_too(tmp_path: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.1.attn.c_attn.bias"][0] = torch.nan

    model_path = toy.save_model(tmp_path / "whole", toy.gpt2())
    spoilt = toy.copy_of(
        model_path, tmp_path / "spoilt", lambda path: toy.change_weights(path, spoil)
    )
    for engine in ("fused", "dense"):
        replica = toy.replica(spoilt, engine=engine, statistics=["sink_logit_margin"])
        with pytest.raises(
            MeasureError, match="layer 1, head 0: sink_logit_margin is not finite for"
        ):
            replica.measure(toy.repeating_tokens(9), "mask_keys")


def test_a_row_with_everything_hidden_is_refused(
    replica: toy.TextReplica, tokens: np.ndarray
) -> None:
    for text in ("keep_window(1,0)+mask_keys", f"mask_keys(1,{N_CTX - 1})+mask_keys"):
        with pytest.raises(ScanError, match=r"hides every key from query \d+"):
            replica.measure(tokens, text)


def test_hidden_scores_are_minus_infinity() -> None:
    scores = torch.zeros(1, 1, 3, 3)
    hidden = torch.tensor([False, True, False])
    edited = hide(scores, hidden & torch.tensor([[False], [False], [True]]))
    assert edited.isneginf().nonzero().tolist() == [[0, 0, 2, 1]]
    assert hidden_keys(edited)[0, 0].nonzero().tolist() == [[2, 1]]


def test_every_profile_of_scores_says_what_it_reads() -> None:
    assert {p.name for p in PROFILES.values() if p.unit == "logits"} == {
        "last_score_by_key",
        "score_by_pair",
    }


def zero_queries(q: torch.Tensor) -> torch.Tensor:
    """Queries are zero."""
    return torch.zeros_like(q)


def zero_first_key(k: torch.Tensor) -> torch.Tensor:
    """The first key is zero."""
    return torch.cat([torch.zeros_like(k[:, :1]), k[:, 1:]], dim=1)


def query_is_bias(q: torch.Tensor) -> torch.Tensor:
    """Query 0 alone is zero."""
    return torch.cat([torch.zeros_like(q[:, :1]), q[:, 1:]], dim=1)


def test_the_cosine_of_a_vector_of_zeros_is_null(
    replica: toy.TextReplica,
    plain: InterventionMeasurements,
    tokens: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervention_registry, "INTERVENTIONS", dict(INTERVENTIONS))
    for edit in (zero_queries, zero_first_key, query_is_bias):
        intervention_registry.intervention(edit)
    null = {
        "zero_queries": {"sink_key_cosine", "earlier_key_cosine"},
        "zero_first_key": {"sink_key_cosine"},
        "query_is_bias": {"sink_key_cosine"},
    }
    cosines = [s for s in STATISTICS if STATISTICS[s].unit == "cosine"]
    assert len(cosines) == 4
    for text, expected in null.items():
        heads = replica.measure(tokens, text).heads
        assert {s for s in cosines if np.isnan(heads[s][:, 0]).all()} == expected
        assert {s for s in cosines if np.isnan(heads[s]).any()} == expected
    assert not any(np.isnan(plain.heads[s]).any() for s in cosines)
