"""Plug-ins that tests write."""

HEADER = """\
import torch

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.units import Probability
"""

DELIMITERS = '''\
"""Attention to delimiters."""

import torch

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.units import Probability
from headcount.workers.engine.token_pairs import NO_QUERY, TokenPairs

DELIMITERS = [10, 46]  # the ids of "\\n" and "." in a model that reads bytes


@statistic("this file", uniform_baseline=True)
def previous_delimiter_mass(pattern: Pattern, tokens: Tensor) -> Probability:
    """Mean attention to the last delimiter up to the query, 0 before the first.

    1/T Σ_q A[q,d(q)], d(q) = last delimiter at or before q

    >>> previous_delimiter_mass(pattern([[1, 0], [0.25, 0.75]]), torch.tensor([[46, 7]])).item()
    0.625
    """
    return pattern.mass(last_delimiters(tokens)).mean(-1)


def last_delimiters(tokens: Tensor) -> TokenPairs:
    """The last delimiter at or before each query."""
    is_delimiter = torch.isin(tokens, torch.tensor(DELIMITERS, device=tokens.device))
    count = is_delimiter.cumsum(-1).int()
    return TokenPairs("delimiters", count, torch.where(is_delimiter, count, NO_QUERY), lag=0)
'''


OWN_CHANGES = '''\
"""An input family and an intervention."""

import numpy as np

from headcount.schemas.pattern import Tensor
from headcount.schemas.values import Count, Factor
from headcount.workers.inputs import Draw, input_family
from headcount.workers.interventions import intervention


@input_family
def letters(draw: Draw, *, words: Count = 4) -> np.ndarray:
    """Random letters in words of one length, with spaces between them."""
    tokens = draw.rng.integers(ord("a"), ord("z") + 1, draw.length)
    tokens[words :: words + 1] = ord(" ")
    return tokens


@intervention
def shrink_values(v: Tensor, *, factor: Factor = 0.5) -> Tensor:
    """Values are multiplied by a factor."""
    return factor * v
'''


def statistic_file(body: str, name: str = "tried", decorator: str = '@statistic("here")') -> str:
    """A plug-in with one statistic, whose function begins in line 8."""
    return f'''{HEADER}

{decorator}
def {name}(pattern: Pattern, tokens: Tensor) -> Probability:
    """A mean.

    1/T Σ_q A[q,0]
    """
    {body}
'''
