"""The fused pattern answers every question as the matrix would, and never holds the matrix."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headcount.schemas.scans.intervention import parse_intervention
from headcount.workers.engine.changes import Streaming
from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.engine.engine import PassRequest
from headcount.workers.engine.fused_engine import streamed_attention
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.tile_sweep import (
    ENTROPY,
    LARGEST_SCORE,
    RECEIVED,
    Above,
    Distant,
    Question,
    Swept,
)
from headcount.workers.engine.token_pairs import STORED_PER_QUERY, TokenPairs, find_matches
from headcount.workers.model.attention_facts import AttentionFacts
from tests.reference.attention_answers import defined_pattern, defined_scores
from tests.toys import toy_models as toy


def random_inputs(
    batch: int, heads: int, n_ctx: int, d_head: int, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_ctx)
    q, k, v = (
        spread * torch.randn(batch, heads, n_ctx, d_head, generator=generator) for _ in range(3)
    )
    return q, k, v, torch.randint(5, (batch, n_ctx), generator=generator)


DISTANT = ((0, 1), (4, 3), (3, 64), (80, 500))
"""Options of distant keys: within a tile, over tiles, and beyond every sequence."""

ABOVE = (1, 3)


def masks(n_ctx: int, batch: int) -> tuple[Tensor, Tensor]:
    """Some keys, and some queries: none in the first of several sequences or of several tiles."""
    place = torch.arange(n_ctx)
    keys = (place % 5 < 2).expand(batch, -1)
    queries = (place[None] + torch.arange(batch)[:, None]) % 7 == 3
    queries = queries & (place % 128 >= 64 if n_ctx > 100 else place >= 0)
    return keys, queries & (torch.arange(batch) > 0)[:, None] if batch > 1 else queries


def own_pairs(keys: Tensor) -> TokenPairs:
    """Of each query the last key of a mask before it: pairs that no sweep was told of."""
    count = keys.cumsum(-1).int()
    before = torch.nn.functional.pad(count[:, :-1], (1, 0))
    return TokenPairs("copies", before, count.where(keys, -1), lag=1)


def all_answers(
    pattern: FusedPattern | DensePattern, matches: dict[str, TokenPairs]
) -> dict[str, Tensor]:
    n_ctx = pattern.n_ctx
    keys, queries = masks(n_ctx, len(pattern.received()))
    return {
        **{f"key {k}": pattern.key(k) for k in range(min(4, n_ctx))},
        **{f"lag {d}": pattern.lag(d) for d in range(min(3, n_ctx))},
        **{name: pattern.mass(pairs) for name, pairs in matches.items()},
        **{f"distant {s} {r}": pattern.distant(s, r) for s, r in DISTANT},
        "entropy": pattern.entropy(),
        "distance": pattern.distance(),
        "score 0": pattern.score(0),
        "received": pattern.received(),
        "by lag": pattern.by_lag(),
        "row": pattern.row(n_ctx // 2),
        "rows": pattern.rows(max(n_ctx - 5, 0)),
        "largest score": pattern.largest_score(),
        **{f"above {first}": pattern.above(first) for first in ABOVE},
        "own pairs": pattern.mass(own_pairs(keys)),
        "labelled mass": pattern.labelled_mass(keys, queries),
        "strongest key": pattern.strongest_key(queries),
        "labelled seen": pattern.labelled_seen(keys),
        "row scores": pattern.row_scores(n_ctx - 1),
        "earlier score": pattern.earlier_score()[..., 2:],
    }


def test_a_score_of_the_future_may_be_huge():
    q = torch.ones(1, 1, 3, 1)
    k = torch.tensor([0.0, 0.0, 400.0])[None, None, :, None]
    pattern = FusedPattern(q, k, k, AttentionFacts(1.0), {})
    assert pattern.dense()[0, 0].tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]]
    assert pattern.received()[0, 0].tolist() == [0.5, 0.25, 1]
    assert pattern.row(1)[0, 0].tolist() == [0.5, 0.5, 0]
    assert pattern.rows(1)[0, 0, 0].tolist() == [0.5, 0.5, 0]


def test_scores_of_ten_thousand_stay_finite_and_entropy_stays_positive():
    q, k, v, tokens = random_inputs(1, 2, 70, 8, spread=80.0)
    facts = AttentionFacts(8**-0.5)
    fused = FusedPattern(q, k, v, facts, find_matches(tokens))
    # The dense one has no rounding of its own, so what differs is the fused one's error.
    dense = DensePattern.of(q.double(), k.double(), facts)
    assert dense.scores[dense.scores.isfinite()].abs().max() > 1e4
    assert (fused.entropy() >= 0).all()
    torch.testing.assert_close(fused.entropy().double(), dense.entropy(), rtol=1e-3, atol=2e-3)
    # The largest score is 3.1e4, which float32 holds to 2e-3: no answer can be better than that.
    torch.testing.assert_close(fused.key(0).double(), dense.key(0), rtol=0, atol=5e-3)
    assert fused.z.isfinite().all()
    attention = (fused.key(0), fused.lag(0), fused.row(40), fused.rows(3), fused.dense())
    assert [answer.max().item() for answer in attention if answer.max() > 1] == []


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("alphabet", [1, 97])
@pytest.mark.parametrize("n_ctx", [1024, pytest.param(4096, marks=pytest.mark.long)])
def test_no_tensor_grows_with_the_square_of_n_ctx(n_ctx: int, alphabet: int):
    heads, d_head = 2, 16
    q, k, v, _ = random_inputs(1, heads, n_ctx, d_head)
    with Largest() as largest:
        # A single token repeated makes all pairs copies of one another.
        matches = find_matches(torch.arange(n_ctx)[None] % alphabet)
        questions: set[Question] = {ENTROPY, RECEIVED, LARGEST_SCORE, *matches}
        questions |= {Distant(*numbers) for numbers in DISTANT}
        questions |= {Above(first) for first in ABOVE}
        all_answers(FusedPattern(q, k, v, AttentionFacts(0.25), matches, questions), matches)
    # The largest are a tile [head query key] and its pairs [pair 3]. It has an eighth of the
    # queries, until the scores of one head would be more than 4 MB.
    queries = {1024: 128, 4096: 256}[n_ctx]
    assert largest.numel <= max(max(heads, 3) * queries * n_ctx, heads * n_ctx * d_head)
    stored = (found for pairs in matches.values() for found in pairs._stored_members.values())
    stored_numbers = sum(m.numel() for found in stored for m in found)
    assert stored_numbers <= len(matches) * 3 * STORED_PER_QUERY * n_ctx
    assert (stored_numbers > 0) == (alphabet > 1)


def test_a_question_asked_once_is_answered_by_the_next_sweep():
    q, k, v, tokens = random_inputs(1, 2, 40, 4)
    matches = find_matches(tokens)
    questions: set[Question] = set()
    first = FusedPattern(q, k, v, AttentionFacts(0.5), matches, questions)
    first.entropy()
    first.mass(matches["copies"])
    assert questions == {"entropy", "copies"}
    second = FusedPattern(q, k, v, AttentionFacts(0.5), matches, questions)
    assert {"entropy", "copies"} <= set(second._answers)
    assert "successors" not in second._answers


# Facts of a layer


def facts_of(**facts: Any) -> AttentionFacts:
    """Facts of four query heads."""
    generator = torch.Generator().manual_seed(5)
    drawn = {name: torch.randn(4, generator=generator) for name in ("slopes", "sink")}
    drawn["slopes"] = drawn["slopes"].abs() / 4
    chosen: dict[str, Any] = {name: drawn[name] for name in drawn if facts.pop(name, False)}
    return AttentionFacts(0.5, **facts, **chosen)


FACTS = {
    "none": facts_of(),
    "window": facts_of(window=5),
    "window of one tile": facts_of(window=64),
    "window over tiles": facts_of(window=90),
    "cap": facts_of(soft_cap=1.5),
    "slopes": facts_of(slopes=True),
    "sink": facts_of(sink=True),
    "all": facts_of(window=70, soft_cap=2.0, slopes=True, sink=True),
    "window beyond n_ctx": facts_of(window=500, sink=True),
}


def grouped_inputs(n_ctx: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four query heads on two key heads, and values of another width."""
    generator = torch.Generator().manual_seed(n_ctx)
    q = torch.randn(2, 4, n_ctx, 6, generator=generator)
    k = torch.randn(2, 2, n_ctx, 6, generator=generator)
    v = torch.randn(2, 2, n_ctx, 3, generator=generator)
    return q, k, v, torch.randint(5, (2, n_ctx), generator=generator)


@cache
def defined_by_hand(name: str, n_ctx: int) -> dict[str, Tensor]:
    """Every answer in float64 from the whole matrices."""
    q, k, v, tokens = grouped_inputs(n_ctx)
    S = defined_scores(q, k, FACTS[name])
    A = defined_pattern(S, FACTS[name])
    seen = S[0, 0].isfinite()
    behind = torch.arange(n_ctx)[:, None] - torch.arange(n_ctx)
    past = seen | (behind < 0)  # What lies behind the window is NaN, the future is not.
    shown = A.masked_fill(~past, torch.nan)
    keys, queries = masks(n_ctx, len(A))
    by_lag = [shown.diagonal(-d, dim1=-2, dim2=-1) for d in range(n_ctx)]
    earlier = [S[..., i, 1:i].mean(-1) for i in range(2, n_ctx)]
    answers = {f"key {key}": shown[..., key] for key in range(min(4, n_ctx))}
    answers |= {f"lag {d}": by_lag[d] for d in range(min(3, n_ctx))}
    for sink, recent in DISTANT:
        distant = seen & (behind >= recent) & (torch.arange(n_ctx) >= sink)
        mass = (A * distant).sum(-1).masked_fill(~distant.any(-1), torch.nan)
        answers[f"distant {sink} {recent}"] = mass
    for first in ABOVE:
        largest = A[..., :first].amax(-1, keepdim=True)
        above = (largest < A).sum(-1).double()
        answers[f"above {first}"] = above.masked_fill(~seen[:, 0], torch.nan)
    last_keys = [[k for k in range(i) if keys[0, k]][-1:] for i in range(n_ctx)]
    return answers | {
        "own pairs": torch.stack([A[..., i, last_keys[i]].sum(-1) for i in range(n_ctx)], -1),
        "copies": (A * ((tokens[:, :, None] == tokens[:, None]) & (behind > 0))[:, None]).sum(-1),
        "entropy": -torch.xlogy(A, A).sum(-1),
        "distance": (A * behind).sum(-1),
        "score 0": S[..., 0].masked_fill(~seen[:, 0], torch.nan),
        "received": A.sum(-2) / seen.sum(0),
        "by lag": torch.stack([diagonal.mean(-1) for diagonal in by_lag], -1),
        "row": shown[..., n_ctx // 2, :],
        "rows": A[..., max(n_ctx - 5, 0) :, :],
        "row scores": S[..., n_ctx - 1, :].masked_fill(~seen[-1], torch.nan),
        "earlier score": torch.stack(earlier, -1).masked_fill(~seen[2:, 1], torch.nan),
        "gate": 1 - A.sum(-1),
        "matrix": shown,
        "z": A @ v.double().repeat_interleave(2, 1),
        "largest score": S.amax(-1),
        "labelled mass": torch.einsum("bhqk,bk,bq->bhq", A, keys.double(), queries.double()),
        "strongest key": A.argmax(-1) * queries[:, None],
        "labelled seen": (seen.tril()[None] & keys[:, None]).sum(-1),
    }


def assert_close(answer: Tensor, expected: Tensor, question: str) -> None:
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 4e-6, "equal_nan": True}
    close["msg"] = lambda message: f"{question}: {message}"
    torch.testing.assert_close(answer.double(), expected.double(), **close)


def tiles_as_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: AttentionFacts,
    labels: Sequence[TokenPairs],
    **_: object,
) -> Swept:
    """What a kernel answers, which is not everything that a pattern is asked."""
    pairs = {f"pair {i}": replace(label, name=f"pair {i}") for i, label in enumerate(labels)}
    pattern = FusedPattern(q, k, v, facts, pairs, {"entropy", *pairs})
    masses = tuple(pattern.mass(pair) for pair in pairs.values())
    return Swept(pattern.z, pattern.lse, pattern.distance(), pattern.entropy(), masses)


def test_a_tiny_distant_mass_is_exact():
    n_ctx, sink, recent, slope = 2048, 4, 64, 0.2
    q, k, v, _ = random_inputs(1, 1, n_ctx, 8)
    facts = AttentionFacts(8**-0.5, slopes=torch.tensor([slope]))
    mass = FusedPattern(q, k, v, facts, {}).distant(sink, recent)[0, 0].double()
    place = torch.arange(n_ctx)
    is_distant = (place[:, None] - place >= recent) & (place >= sink)
    pattern = defined_pattern(defined_scores(q, k, facts), facts)[0, 0]
    expected = (pattern * is_distant).sum(-1)[sink + recent :]
    torch.testing.assert_close(mass[sink + recent :], expected, rtol=1e-5, atol=0)
    # What is left by 1 - first - recent keys could not be this exact where it is small.
    assert expected.median() < 1e-4


# 64 queries make a tile: one short of it, exactly, one more, and two with a remainder.
@pytest.mark.parametrize(("name", "n_ctx"), [
    *((name, 131) for name in FACTS),
    ("window", 7), ("all", 7), *(("none", n) for n in (3, 63, 64, 65)),
])  # fmt: skip
def test_both_patterns_answer_by_the_facts_of_a_layer(name: str, n_ctx: int):
    q, k, v, tokens = grouped_inputs(n_ctx)
    facts, expected = FACTS[name], defined_by_hand(name, n_ctx)
    matches = {"copies": find_matches(tokens)["copies"]}
    fused = FusedPattern(q, k, v, facts, matches)
    dense = DensePattern.of(q.double(), k.double(), facts)
    every = [0, 1, 2, 3]
    assert fused.window == dense.window == min(facts.window or n_ctx, n_ctx)
    patterns = [(every, fused), (every, dense), ([3, 1], fused.only([3, 1]))]
    # The second time, the questions are known before the sweep.
    questions: set[Question] = set()
    swept_by_kernel = (
        (every, FusedPattern(q, k, v, facts, matches, questions, sweep=tiles_as_kernel))
        for _ in range(2)
    )
    for heads, pattern in chain(patterns, swept_by_kernel):
        answers = all_answers(pattern, matches)
        answers |= {"gate": pattern.gate(), "matrix": pattern.dense(), "z": fused.z[:, heads]}
        assert set(answers) == set(expected)
        if facts.sink is None:
            assert answers.pop("gate").isnan().all()
        for question, answer in answers.items():
            # How many keys a query sees is the same in every head.
            is_shared = question == "labelled seen"
            of_heads = expected[question] if is_shared else expected[question][:, heads]
            assert_close(answer, of_heads, question)
        n_seen = pattern.seen(matches["copies"])
        assert (n_seen > 0).equal(expected["copies"].sum(1) > 0)
    assert {LARGEST_SCORE, RECEIVED, Distant(4, 3), Above(3)} <= questions


@pytest.mark.parametrize("n_ctx", [5, 70])
def test_keys_that_tie_are_not_above_the_first_ones(n_ctx: int):
    zeros = torch.zeros(1, 1, n_ctx, 2)
    # Scores 0 and 1e-6, which tie, and one that is larger by 1e-4.
    k = torch.zeros_like(zeros)
    k[..., 1:, 0], k[..., 3, 0] = 1e-6, 1e-4
    facts = AttentionFacts(1.0)
    for pattern in (FusedPattern(zeros + 1, k, k, facts, {}), DensePattern.of(zeros + 1, k, facts)):
        expected = [0.0] * 3 + [1.0] * (n_ctx - 3)
        assert pattern.above(1)[0, 0].tolist() == pattern.above(3)[0, 0].tolist() == expected
        assert pattern.above(4)[0, 0].tolist() == [0.0] * n_ctx


def test_broken_scores_are_not_a_rank():
    q, k, v, _ = random_inputs(1, 1, 6, 4)
    q[:, :, 4] = torch.nan
    facts = AttentionFacts(1.0)
    for pattern in (FusedPattern(q, k, v, facts, {}), DensePattern.of(q, k, facts)):
        assert pattern.above(1)[0, 0].isnan().tolist() == [False] * 4 + [True, False]


def test_the_tiles_of_a_window_hold_no_keys_behind_it():
    n_ctx, window = 2048, 100
    q, k, v, tokens = random_inputs(1, 2, n_ctx, 16)
    with Largest() as largest:
        matches = find_matches(tokens)
        all_sizes = FusedPattern(q, k, v, AttentionFacts(0.25, window=window), {}, {"entropy"})
        all_sizes.received()
    assert largest.numel <= 2 * n_ctx * 16  # The queries, or keys, or values.
    assert 2 * 64 * (window + 63) < 2 * n_ctx * 16
    assert matches["copies"].count_within(window).max() < window


# Heads that see the first keys and the last ones alone


STREAMED_FACTS = {
    "plain": AttentionFacts(0.35),
    "window": AttentionFacts(0.35, window=11),
    "narrow window": AttentionFacts(0.35, window=3),
    "capped, with a learned sink and ALiBi": AttentionFacts(
        0.35,
        soft_cap=2.0,
        slopes=torch.tensor([0.5, 0.1, 0.02, 0.3]),
        sink=torch.tensor([0.5, -1.0, 2.0, 0.0]),
    ),
}


@pytest.mark.parametrize("facts", STREAMED_FACTS.values(), ids=STREAMED_FACTS)
@pytest.mark.parametrize(("sink", "recent"), [(2, 5), (0, 4), (3, 1)])
def test_two_pieces_make_the_output_of_the_hidden_matrix(
    facts: AttentionFacts, sink: int, recent: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(3, 4, toy.N_CTX, 8, generator=generator)
    k, v = torch.randn(2, 3, 2, toy.N_CTX, 8, generator=generator).unbind()
    streaming = Streaming(sink, recent, {1: (0, 3)})

    # The keys between the first and the last ones are hidden.
    scores = defined_scores(q, k, facts)
    for query in range(toy.N_CTX):
        scores[:, [0, 3], query, sink : max(sink, query - recent + 1)] = -torch.inf
    expected = defined_pattern(scores, facts) @ v.double().repeat_interleave(2, 1)

    z = streamed_attention(q, k, v, facts, streaming, layer=1)
    torch.testing.assert_close(z.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_pass_that_shows_no_layer_builds_no_pattern(
    shelf: toy.Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.from_numpy(toy.repeating_tokens(toy.N_CTX, batch=2, distinct=30)).long()
    calls: list[int] = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments[5])
        return streamed_attention(*arguments)

    monkeypatch.setattr("headcount.workers.engine.fused_engine.streamed_attention", counted)
    streamed = "stream_other_heads(2,5,L0H1,L1H0,L1H1)"
    # A second change of the scores is one that the two pieces do not know.
    for intervention, layers in ((streamed, [0, 1]), (f"{streamed}+mask_keys(7,1)", [])):
        streams: list[Tensor] = []  # after the last norm
        for fields in ({}, {"engine": "dense", "precision": "float64"}):
            replica = shelf.replica("llama-gqa", **fields)
            with replica.engine_under(parse_intervention(intervention), None) as engine:
                engine.run(
                    PassRequest(tokens=tokens, read_late=(), on_final=streams.append, layers=())
                )
        assert calls == layers
        calls.clear()
        torch.testing.assert_close(streams[0].double(), streams[1], rtol=1e-5, atol=1e-5)
