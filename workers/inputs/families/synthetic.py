"""Random tokens: drawn uniformly, repeated, corrupted, or drawn as often as they occur in text."""

import numpy as np

from headcount.schemas.errors import ScanError
from headcount.schemas.values import Share, Zipf
from headcount.workers.inputs.input_registry import (
    Draw,
    Labelled,
    input_family,
    random_tokens,
    token_range,
)


@input_family(draws=random_tokens)
def uniform_random(draw: Draw) -> np.ndarray:
    """Tokens drawn uniformly from `low .. high-1`, or the vocabulary."""
    return draw.tokens(draw.length)


@input_family(draws=random_tokens)
def repeated_random(draw: Draw, *, period: int | None = None) -> np.ndarray:
    """A block of `period` random tokens, repeated to the end; twice if no period is given.

    * `period`: tokens in the block. The default is half of the sequence, rounded up.
    """
    return np.resize(_block(draw, period), draw.length)


@input_family(stream="repeated_random", draws=random_tokens)
def corrupted_repeat(
    draw: Draw, *, rate: Share, replacement: int | None = None, period: int | None = None
) -> Labelled:
    """A repeated block in whose copies each token is replaced with probability `rate` (after
    induction-under-erasures).

    The block is the one of `repeated_random` for the same seed and sequence. Replaced positions are
    labelled "replaced".

    * `rate`: a probability.
    * `replacement`: the token id in its place. Default: a random one, which may be the same again.
    """
    block = _block(draw, period)
    tokens = np.resize(block, draw.length)
    is_replaced = draw.rng.random(draw.length) < rate
    # The block itself stays; only its copies are corrupted.
    is_replaced[: len(block)] = False
    replaced = np.flatnonzero(is_replaced)
    if replacement is None:
        # One token for every position is drawn, whatever the number of replaced ones.
        tokens[replaced] = draw.tokens(draw.length, distinct=False)[replaced]
    else:
        tokens[replaced] = _ordinary(draw, "replacement", replacement)
    return Labelled(tokens, {"replaced": replaced})


@input_family(draws=token_range)
def single_token_repeat(draw: Draw, *, token: int | None = None) -> np.ndarray:
    """One token, over and over: `token`, or a random one for each sequence (Gu et al. 2024)."""
    if token is not None and (draw.low or draw.high):
        raise ScanError(
            "input: single_token_repeat takes token, or low and high, got both; leave out one"
        )
    drawn = draw.tokens(1)[0] if token is None else _ordinary(draw, "token", token)
    return np.full(draw.length, drawn)


@input_family(draws=token_range)
def unigram_random(draw: Draw, *, exponent: Zipf = 1) -> np.ndarray:
    """Independent tokens, as frequent as Zipf's law says in the order of their ids.

    p(id) ∝ rank(id)^-exponent, with rank 1 for the lowest id.

    * `exponent`: of Zipf's law.
    """
    ids = draw.ids()
    weights = np.arange(1, len(ids) + 1, dtype=float) ** -exponent
    return draw.rng.choice(ids, size=draw.length, p=weights / weights.sum())


def _block(draw: Draw, period: int | None) -> np.ndarray:
    """Random tokens to repeat; by default half of the sequence, rounded up."""
    period = (draw.length + 1) // 2 if period is None else period
    if not 1 <= period <= draw.length:
        raise ScanError(
            f"input.period: expected 1 to {draw.length}, the tokens in a sequence, got {period}"
        )
    return draw.tokens(period)


def _ordinary(draw: Draw, option: str, token: int) -> int:
    """The token of an option; a special one is refused."""
    if token not in draw.ordinary:
        raise ScanError(
            f"input.{option}: expected an ordinary token id of the model ({draw.ordinary[0]} to "
            f"{draw.ordinary[-1]}), got {token}"
        )
    return token
