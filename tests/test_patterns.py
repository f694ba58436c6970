"""The fused pattern answers every question as the matrix would, and never holds the matrix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.engine.dense_pattern import DensePattern
from workers.engine.fused_pattern import FusedPattern, uniform_pattern
from workers.engine.token_pairs import STORED_PER_QUERY, TokenPairs, find_matches
from workers.model.attention_facts import AttentionFacts


def both_patterns(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor
) -> tuple[FusedPattern, DensePattern]:
    """The two patterns of q, k, v `[batch head pos d_head]`; the dense one is made in float64."""
    scale = q.shape[-1] ** -0.5
    # The dense one has no rounding of its own, so what differs is the fused one's error.
    facts = AttentionFacts(scale)
    fused = FusedPattern(q, k, v, facts, find_matches(tokens))
    scores = (q.double() @ k.double().mT) * scale
    causal = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return fused, DensePattern(causal.softmax(-1), causal, q.double(), k.double(), facts)


def random_inputs(
    batch: int, heads: int, n_ctx: int, d_head: int, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_ctx)
    q, k, v = (
        spread * torch.randn(batch, heads, n_ctx, d_head, generator=generator) for _ in range(3)
    )
    return q, k, v, torch.randint(5, (batch, n_ctx), generator=generator)


def all_answers(
    pattern: FusedPattern | DensePattern, matches: dict[str, TokenPairs]
) -> dict[str, Tensor]:
    answers = {f"key {k}": pattern.key(k) for k in range(min(4, pattern.n_ctx))}
    answers |= {f"lag {d}": pattern.lag(d) for d in range(min(3, pattern.n_ctx))}
    answers |= {name: pattern.mass(pairs) for name, pairs in matches.items()}
    answers |= {
        "entropy": pattern.entropy(),
        "distance": pattern.distance(),
        "score 0": pattern.score(0),
    }
    answers |= {
        "received": pattern.received(),
        "by lag": pattern.by_lag(),
        "row": pattern.row(pattern.n_ctx // 2),
    }
    answers["rows"] = pattern.rows(max(pattern.n_ctx - 5, 0))
    answers |= {"row scores": pattern.row_scores(pattern.n_ctx - 1)}
    return answers | {"earlier score": pattern.earlier_score()[..., 2:]}


# 64 queries make a tile: one short of it, exactly, one more, and two with a remainder.
@pytest.mark.parametrize("n_ctx", [1, 2, 3, 63, 64, 65, 131])
@pytest.mark.parametrize("batch", [1, 3])
def test_fused_equals_dense(n_ctx: int, batch: int) -> None:
    q, k, v, tokens = random_inputs(batch, 2, n_ctx, 7)
    fused, dense = both_patterns(q, k, v, tokens)
    matches = find_matches(tokens)
    expected = all_answers(dense, matches)
    for name, answer in all_answers(fused, matches).items():
        torch.testing.assert_close(
            answer.double(),
            expected[name].double(),
            rtol=1e-5,
            atol=2e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    torch.testing.assert_close(fused.z.double(), dense.pattern @ v.double(), rtol=1e-5, atol=1e-6)


def test_fused_equals_dense_where_the_matrix_itself_is_asked_for() -> None:
    q, k, v, tokens = random_inputs(3, 2, 11, 7)
    fused, dense = both_patterns(q, k, v, tokens)
    torch.testing.assert_close(fused.dense().double(), dense.dense(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(
        fused.dense_scores().double().tril(), dense.dense_scores().tril(), rtol=1e-5, atol=2e-6
    )


def test_both_take_a_bias_out_of_the_queries() -> None:
    q, k, v, tokens = random_inputs(2, 3, 70, 4)
    bias = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    expected, _ = both_patterns(q - bias[:, None], k, v, tokens)
    for pattern in both_patterns(q, k, v, tokens):
        assert pattern.scale == 0.5
        pattern_without_bias = pattern.without(bias)
        torch.testing.assert_close(
            pattern_without_bias.dense().float(), expected.dense(), rtol=1e-5, atol=2e-6
        )


def test_a_score_of_the_future_may_be_huge() -> None:
    q = torch.ones(1, 1, 3, 1)
    k = torch.tensor([0.0, 0.0, 400.0])[None, None, :, None]
    pattern = FusedPattern(q, k, k, AttentionFacts(1.0), {})
    assert pattern.dense()[0, 0].tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]]
    assert pattern.received()[0, 0].tolist() == [0.5, 0.25, 1]
    assert pattern.row(1)[0, 0].tolist() == [0.5, 0.5, 0]
    assert pattern.rows(1)[0, 0, 0].tolist() == [0.5, 0.5, 0]


def test_tiles_of_several_sequences_equal_tiles_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, tokens = random_inputs(5, 2, 100, 4)
    matches = find_matches(tokens)
    together = all_answers(FusedPattern(q, k, v, AttentionFacts(0.5), matches), matches)
    monkeypatch.setattr("workers.engine.fused_pattern.TILE_BYTES", {"cpu": 1})
    alone = all_answers(FusedPattern(q, k, v, AttentionFacts(0.5), matches), matches)
    for name, answer in together.items():
        torch.testing.assert_close(answer, alone[name], rtol=1e-5, atol=1e-6)


def test_scores_of_ten_thousand_stay_finite_and_entropy_stays_positive() -> None:
    q, k, v, tokens = random_inputs(1, 2, 70, 8, spread=80.0)
    fused, dense = both_patterns(q, k, v, tokens)
    assert dense.scores[dense.scores.isfinite()].abs().max() > 1e4
    assert (fused.entropy() >= 0).all()
    torch.testing.assert_close(fused.entropy().double(), dense.entropy(), rtol=1e-3, atol=2e-3)
    # float32 holds a score of 1e4 to 1e-3, and no answer can be better than its scores.
    torch.testing.assert_close(fused.key(0).double(), dense.key(0), rtol=0, atol=3e-3)
    assert fused.z.isfinite().all()
    attention = {
        "key": fused.key(0),
        "lag": fused.lag(0),
        "row": fused.row(40),
        "rows": fused.rows(3),
        "matrix": fused.dense(),
    }
    assert {name for name, answer in attention.items() if answer.max() > 1} == set()


def test_all_attention_on_one_key_has_no_entropy() -> None:
    k = torch.zeros(1, 1, 9, 2)
    k[..., 0, 0] = 50
    q = torch.zeros(1, 1, 9, 2)
    q[..., 0] = 50
    pattern = FusedPattern(q, k, k, AttentionFacts(1.0), {})
    assert pattern.entropy().tolist() == [[[0.0] * 9]]
    assert pattern.key(0).tolist() == [[[1.0] * 9]]


def test_uniform_pattern_attends_to_all_keys_alike() -> None:
    tokens = torch.tensor([[7, 8, 7, 8, 7]])
    matches = find_matches(tokens)
    pattern = uniform_pattern(matches, tokens)
    torch.testing.assert_close(pattern.key(0)[0, 0], torch.tensor([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]))
    torch.testing.assert_close(
        pattern.mass(matches["copies"])[0, 0], torch.tensor([0, 0, 1 / 3, 1 / 4, 2 / 5])
    )
    torch.testing.assert_close(
        pattern.entropy()[0, 0], torch.tensor([math.log(n) for n in range(1, 6)])
    )


def test_matches_are_the_earlier_copies_and_what_follows_them() -> None:
    matches = find_matches(torch.tensor([[7, 8, 7, 7]]))
    pairs = {
        name: torch.stack(p.members(slice(0, 1), 0, 4), dim=1).tolist()
        for name, p in matches.items()
    }
    assert pairs["copies"] == [[0, 2, 0], [0, 3, 0], [0, 3, 2]]
    assert pairs["successors"] == [[0, 2, 1], [0, 3, 1], [0, 3, 3]]
    assert matches["copies"].count.tolist() == [[0, 0, 1, 2]]


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("n_ctx", [1024, 4096])
@pytest.mark.parametrize("alphabet", [1, 97])
def test_no_tensor_grows_with_the_square_of_n_ctx(n_ctx: int, alphabet: int) -> None:
    heads, d_head = 2, 16
    q, k, v, _ = random_inputs(1, heads, n_ctx, d_head)
    with Largest() as largest:
        # A single token repeated makes all pairs copies of one another.
        matches = find_matches(torch.arange(n_ctx)[None] % alphabet)
        all_answers(FusedPattern(q, k, v, AttentionFacts(0.25), matches), matches)
    # The largest are the tile [head 64 key], its pairs [pair 3] and the values with their two extra
    # columns.
    assert largest.numel <= max(max(heads, 3) * 64 * n_ctx, heads * n_ctx * (d_head + 2))
    stored_numbers = sum(
        m.numel()
        for pairs in matches.values()
        for found in pairs._stored_members.values()
        for m in found
    )
    assert stored_numbers <= len(matches) * 3 * STORED_PER_QUERY * n_ctx
    assert (stored_numbers > 0) == (alphabet > 1)


def test_a_question_asked_once_is_answered_by_the_next_sweep() -> None:
    q, k, v, tokens = random_inputs(1, 2, 40, 4)
    matches = find_matches(tokens)
    questions: set[str] = set()
    first = FusedPattern(q, k, v, AttentionFacts(0.5), matches, questions)
    first.entropy()
    first.mass(matches["copies"])
    assert questions == {"entropy", "copies"}
    second = FusedPattern(q, k, v, AttentionFacts(0.5), matches, questions)
    assert {"entropy", "copies"} <= set(second._answers)
    assert "successors" not in second._answers
