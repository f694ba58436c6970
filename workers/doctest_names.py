"""Names for the doctests of formulas: small patterns, vectors and tokens from plain lists."""

from __future__ import annotations

import math

import torch

from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.engine.token_pairs import TokenPairs, find_matches
from headcount.workers.model.attention_facts import AttentionFacts

UNSCALED = AttentionFacts(1.0)


def pattern(rows: list[list[float]]) -> DensePattern:
    """A pattern of one sequence and one head, from its matrix."""
    matrix = torch.tensor(rows)[None, None]
    return DensePattern(matrix, matrix, matrix, _unit_vectors(matrix), UNSCALED)


def gated(rows: list[list[float]]) -> DensePattern:
    """A pattern of one sequence and one head with a learned sink, which has what rows leave."""
    matrix = torch.tensor(rows)[None, None]
    facts = AttentionFacts(1.0, sink=torch.zeros(1))
    return DensePattern(matrix, matrix, matrix, _unit_vectors(matrix), facts)


def scores(rows: list[list[float]]) -> DensePattern:
    """A pattern of one sequence and one head, from its pre-softmax scores."""
    matrix = torch.tensor(rows, dtype=torch.float32)
    causal = matrix.masked_fill(torch.ones_like(matrix).triu(1).bool(), -torch.inf)[None, None]
    return DensePattern(causal.softmax(-1), causal, causal, _unit_vectors(causal), UNSCALED)


def products(q: torch.Tensor, k: torch.Tensor) -> DensePattern:
    """The pattern of queries and keys `[batch pos head d_head]`, whose products are not scaled."""
    return DensePattern.of(q.transpose(1, 2), k.transpose(1, 2), UNSCALED)


def _unit_vectors(matrix: torch.Tensor) -> torch.Tensor:
    """Keys whose products with the rows of a matrix are the matrix."""
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)


def vectors(*rows: list[float]) -> torch.Tensor:
    """One vector per position, of one sequence and one head: `[batch pos head d_head]`."""
    return torch.tensor(rows, dtype=torch.float32)[None, :, None]


def stream(*rows: list[float]) -> torch.Tensor:
    """One vector per position of one sequence: `[batch pos d_model]`."""
    return torch.tensor(rows, dtype=torch.float32)[None]


def triggers(marks: list[int]) -> dict[str, torch.Tensor]:
    """Which positions of one sequence are labelled "trigger"."""
    return {"trigger": torch.tensor([marks]).bool()}


def nats(values: list[float]) -> torch.Tensor:
    """One loss per position of one sequence: `[batch pos]`."""
    return torch.tensor([values])


def candidates(*tokens: list[int]) -> torch.Tensor:
    """The most probable tokens of one sequence in each of some passes: `[pass batch token]`."""
    return torch.tensor(tokens)[:, None]


def head(weight: list[float] | list[list[float]]) -> torch.Tensor:
    """A weight of one head: `[head …]`."""
    return torch.tensor(weight, dtype=torch.float32)[None]


def copies(tokens: list[int]) -> TokenPairs:
    """The earlier copies of each token of one sequence."""
    return find_matches(torch.tensor([tokens]))["copies"]


def successors(tokens: list[int]) -> TokenPairs:
    """The keys that follow an earlier copy of each token of one sequence."""
    return find_matches(torch.tensor([tokens]))["successors"]


MAKERS = [pattern, gated, scores, products, vectors, stream, head, nats, candidates, triggers]
MAKERS += [copies, successors]
NAMES = {maker.__name__: maker for maker in MAKERS} | {"nan": math.nan, "math": math}
