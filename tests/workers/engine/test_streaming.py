"""Heads that see the first keys and the last ones alone, without a matrix of scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headcount.schemas.scans.intervention import parse_intervention
from headcount.workers.engine.changes import Streaming
from headcount.workers.engine.fused_engine import streamed_attention
from headcount.workers.model.attention_facts import (
    MASKED,
    AttentionFacts,
    all_scores,
    pattern_of,
    unseen_keys,
)
from tests.toys import toy_models as toy

N_CTX = toy.N_CTX

FACTS: dict[str, AttentionFacts] = {
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


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize(("sink", "recent"), [(2, 5), (0, 4), (3, 1)])
def test_two_pieces_make_the_output_of_the_hidden_matrix(
    facts: AttentionFacts, sink: int, recent: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(3, 4, N_CTX, 8, generator=generator)
    k, v = torch.randn(2, 3, 2, N_CTX, 8, generator=generator).unbind()
    streaming = Streaming(sink, recent, {1: (0, 3)})

    # The definition: every score in float64, those between the first and the last keys hidden.
    every = [tensor.double().repeat_interleave(2, 1) for tensor in (k, v)]
    scores = all_scores(q.double(), every[0], facts)
    scores = scores.masked_fill(unseen_keys(N_CTX, facts, q.device), MASKED)
    for query in range(N_CTX):
        for key in range(sink, max(sink, query - recent + 1)):
            scores[:, [0, 3], query, key] = MASKED
    expected = pattern_of(scores, facts) @ every[1]

    z = streamed_attention(q, k, v, facts, streaming, layer=1)
    torch.testing.assert_close(z.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_pass_that_shows_no_layer_builds_no_pattern(
    shelf: toy.Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.from_numpy(toy.repeating_tokens(N_CTX, batch=2, distinct=30)).long()
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
                engine.run(tokens, {}, lambda *_: None, (), streams.append, layers=())
        assert calls == layers
        calls.clear()
        torch.testing.assert_close(streams[0].double(), streams[1], rtol=1e-5, atol=1e-5)
