"""Statistics of queries, keys and values against the pattern itself, built in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import headcount
from tests.toys.refusals import refused


def pattern_of(
    q: Tensor, k: Tensor, scale: float | None, window: int | None, softcap: float | None,
    slopes: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`[batch head query key]`, a query at a time."""
    batch, heads, n_ctx, d = q.shape
    k = k.repeat_interleave(heads // k.shape[1], 1)
    pattern = torch.zeros(batch, heads, n_ctx, n_ctx, dtype=q.dtype)
    for query in range(n_ctx):
        first = 0 if window is None else max(0, query - window + 1)
        keys = torch.arange(first, query + 1)
        scores = (k[:, :, keys] @ q[:, :, query, :, None])[..., 0] * (scale or d**-0.5)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if slopes is not None:
            scores = scores + slopes[:, None] * (keys - query)
        if sinks is not None:
            scores = torch.cat([scores, sinks[None, :, None].expand(batch, -1, 1)], -1)
        pattern[:, :, query, keys] = scores.softmax(-1)[..., : len(keys)]
    return pattern


def maybe(generator: torch.Generator, value: Any) -> Any:
    return value if torch.rand((), generator=generator) < 0.5 else None


@pytest.mark.parametrize("shapes", [50, pytest.param(200, marks=pytest.mark.long)])
def test_they_are_those_of_the_pattern_in_many_shapes(shapes: int) -> None:
    generator = torch.Generator().manual_seed(7)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for _ in range(shapes):
        batch, kv_heads, group, n_ctx = number(1, 4), number(1, 4), number(1, 4), number(2, 70)
        heads, d_qk, d_v = kv_heads * group, number(1, 20), number(1, 20)
        q, k = normal(batch, heads, n_ctx, d_qk) * 3, normal(batch, kv_heads, n_ctx, d_qk)
        v = normal(batch, kv_heads, n_ctx, d_v)
        special = {
            "scale": maybe(generator, 0.7), "window": maybe(generator, number(2, 80)),
            "softcap": maybe(generator, 2.5), "slopes": maybe(generator, normal(heads).abs()),
            "sinks": maybe(generator, normal(heads)),
        }  # fmt: skip
        tokens = torch.randint(0, 6, (batch, n_ctx), generator=generator)
        pattern = pattern_of(q, k, **special)
        values = v.repeat_interleave(group, 1)
        is_copy = (tokens[:, :, None] == tokens[:, None]).tril(-1)[:, None]
        # A key follows a copy if the token before it is the query's.
        follows = torch.zeros_like(is_copy)
        follows[..., 1:] = is_copy[..., :-1]
        lags = (torch.arange(n_ctx)[:, None] - torch.arange(n_ctx)).clamp(min=0)
        expected = {
            "entropy": torch.special.entr(pattern).sum(-1).mean(-1),
            "mean_distance": (pattern * lags).sum(-1).mean(-1),
            "self_attention": pattern.diagonal(dim1=2, dim2=3).mean(-1),
            "previous_token_score": pattern.diagonal(-1, 2, 3).mean(-1),
            "head_output_norm": (pattern @ values).norm(dim=-1).mean(-1),
            "value_norm": values.norm(dim=-1).mean(-1),
        }
        if special["window"] is None:
            expected["sink_mass"] = pattern[:, :, 1:, 0].mean(-1)
            has_copy = is_copy.any(-1)  # [batch 1 query]
            masses = (pattern * follows).sum(-1) * has_copy
            expected["induction_score"] = masses.sum(-1) / has_copy.sum(-1)
        measured = headcount.attention_statistics(q, k, v, list(expected), tokens=tokens, **special)
        for name, value in expected.items():
            torch.testing.assert_close(
                measured[name], value, atol=1e-9, rtol=1e-9, equal_nan=True, check_dtype=False
            )


def test_a_word_means_what_the_tensors_suffice_for() -> None:
    q, k = torch.randn(1, 4, 8, 3), torch.randn(1, 2, 8, 3)
    standard = headcount.attention_statistics(q, k, k)
    assert {"sink_mass", "entropy", "value_norm"} <= standard.keys()
    assert not {"resid_pre_norm", "induction_score"} & standard.keys()
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert "induction_score" in headcount.attention_statistics(q, k, k, tokens=tokens)
    assert all(value.shape == (1, 4) for value in standard.values())


def test_what_is_no_attention_is_one_line() -> None:
    q, k = torch.randn(1, 4, 8, 3), torch.randn(1, 2, 8, 3)

    def told(**changed: Any) -> str:
        arguments = {"q": q, "k": k, "v": k} | changed
        return refused(headcount.Error, headcount.attention_statistics, **arguments)

    assert told(q=[1]) == "q: expected a Tensor, got [1]"
    assert "kv_head a divisor of 4, got [1, 3, 8, 3]" in told(k=torch.randn(1, 3, 8, 3))
    assert "v: expected [1, 2, 8] and d_v, got [1, 2, 7, 3]" in told(v=k[:, :, 1:])
    assert "float32 or float64" in told(q=q.half())
    assert told(window=0) == "window: expected 1 or more, got 0"
    assert "attention is causal" in told(mask=None)
    assert "sinks: expected the shape [4], got [2]" in told(sinks=torch.zeros(2))
    assert "resid_pre: use headcount.measure" in told(statistics=["resid_pre_norm"])
    assert "use tokens" in told(statistics=["induction_score"])
    assert "expected q, k and v that are finite" in told(q=q / 0)
    with pytest.raises(headcount.Error, match="tokens: expected integers"):
        headcount.attention_statistics(q, k, k, tokens=torch.zeros(1, 8))
