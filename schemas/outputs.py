"""What a model predicts: columns of the `sequences` table, each one function, as statistics are.

The unembedding is computed only where a scan asks for one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from schemas.errors import ScanError, unknown
from schemas.pattern import Tensor
from schemas.statistics.registry import documentation_of, evaluate, fingerprint_of

PREDICTIONS: dict[str, str] = {
    "token_loss": "-ln p(t[i] | t[<i]) of every token, NaN for the first [batch pos]",
    "final_logit": "logit after the last token of every token of the sequence [batch pos]",
    "final_logprob": "ln p after the last token of every token of the sequence [batch pos]",
}
"""Every name that an output may take as a parameter."""


@dataclass(frozen=True)
class Output:
    """A registered output: the function and everything that is derived from it."""

    name: str
    compute: Callable[..., Tensor]
    unit: str
    range: tuple[float, float]
    source: str
    meaning: str
    formula: str
    per_token: bool
    """Whether it is a list, parallel to `tokens`."""

    @property
    def description(self) -> str:
        """Meaning and formula on one line."""
        return f"{self.meaning} {' '.join(self.formula.split())}"

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it."""
        return {
            "unit": self.unit,
            "range": [bound if math.isfinite(bound) else None for bound in self.range],
            "source": self.source,
            "meaning": self.meaning,
            "formula": self.formula,
            "description": self.description,
            "per_token": self.per_token,
            "fingerprint": self.fingerprint,
        }

    @property
    def fingerprint(self) -> str:
        """Changes if and only if the formula's code changes."""
        return fingerprint_of(self.compute)


OUTPUTS: dict[str, Output] = {}

F = TypeVar("F", bound=Callable[..., Tensor])


def output(*, unit: str, range: tuple[float, float], source: str, per_token: bool = False) -> Callable[[F], F]:
    """Register a function as an output: it returns `[batch]`, or `[batch pos]` with NaN where a token has no value."""

    def register(function: F) -> F:
        name = function.__name__
        for parameter in function.__code__.co_varnames[: function.__code__.co_argcount]:
            if parameter not in PREDICTIONS:
                raise ValueError(f"output {name!r}: {unknown('prediction', parameter, PREDICTIONS)}")
        meaning, formula = documentation_of(function, f"output {name!r}")
        OUTPUTS[name] = Output(name, function, unit, range, source, meaning, formula, per_token)
        return function

    return register


def select_outputs(wanted: Iterable[str]) -> tuple[Output, ...]:
    """The outputs of a scan, in registry order."""
    names = list(wanted)
    for name in names:
        if name not in OUTPUTS:
            raise ScanError(f"outputs: {unknown('output', name, OUTPUTS)}")
    return tuple(o for o in OUTPUTS.values() if o.name in names)


def compute_outputs(outputs: Iterable[Output], predictions: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns of some outputs."""
    return {o.name: evaluate(o.compute, predictions) for o in outputs}


@output(unit="nats", range=(0, math.inf), source="standard")
def loss(token_loss: Tensor) -> Tensor:
    """Mean cross-entropy of the next token.

    1/(T-1) Σ_{i≥1} -ln p(t[i] | t[<i])

    >>> loss(nats([nan, 1, 3])).item()
    2.0
    """
    return token_loss[:, 1:].mean(-1)


@output(unit="nats", range=(0, math.inf), source="Olsson et al. 2022")
def loss_early(token_loss: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens in the first half: of a repeated block, its first copy.

    1/⌊(T-1)/2⌋ Σ_{1≤i≤⌊(T-1)/2⌋} -ln p(t[i] | t[<i])

    >>> loss_early(nats([nan, 1, 2, 5, 7])).item()
    1.5
    """
    return token_loss[:, 1 : (token_loss.shape[1] + 1) // 2].mean(-1)


@output(unit="nats", range=(0, math.inf), source="Olsson et al. 2022")
def loss_late(token_loss: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens in the second half: of a repeated block, its second copy.

    1/⌈(T-1)/2⌉ Σ_{i>⌊(T-1)/2⌋} -ln p(t[i] | t[<i])

    >>> loss_late(nats([nan, 1, 2, 5, 7])).item()
    6.0
    """
    return token_loss[:, (token_loss.shape[1] + 1) // 2 :].mean(-1)


@output(unit="nats", range=(0, math.inf), source="standard", per_token=True)
def losses(token_loss: Tensor) -> Tensor:
    """Cross-entropy of each token, NULL for the first.

    -ln p(t[i] | t[<i])
    """
    return token_loss


@output(unit="probability", range=(0, 1), source="Farrell 2023", per_token=True)
def final_probabilities(final_logprob: Tensor) -> Tensor:
    """Probability after the last token of each token of the sequence, whatever its place.

    p(t[i] | t[0], …, t[T-1])
    """
    return final_logprob.exp()


@output(unit="logit", range=(-math.inf, math.inf), source="Farrell 2023", per_token=True)
def final_logits(final_logit: Tensor) -> Tensor:
    """Logit after the last token of each token of the sequence; only differences within a sequence mean anything.

    logit(t[i] | t[0], …, t[T-1])
    """
    return final_logit
