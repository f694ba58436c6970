"""Alarms: which rules ring, since when and for which heads. One function for all doors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headcount.schemas.watch.history import History, MeasuredStep
from headcount.schemas.watch.rules import RULES, Rule

MOST_NAMED = 4  # heads that an alarm's line names; the others are counted


@dataclass(frozen=True)
class Alarm:
    """A rule that rang, for the first time in a training."""

    rule: str
    step: int  # since when
    value: float  # the reading that is furthest beyond the threshold
    threshold: float
    heads: tuple[str, ...]  # as L1H2; L1 is a whole layer, and none means the whole model
    meaning: str
    advice: str
    source: str
    is_notice: bool  # whether it happens in sound pretraining too, and should stop nothing

    @property
    def lines(self) -> tuple[str, str, str]:
        """What rings, what people did about it, and who said so."""
        named = ", ".join(self.heads[:MOST_NAMED]) or "the model"
        others = len(self.heads) - MOST_NAMED
        more = f" and {others} more" if others > 0 else ""
        side = "above" if RULES[self.rule].rings == "above" else "below"
        kind = "notice: " if self.is_notice else ""
        return (
            f"{kind}{self.rule} at step {self.step}, {named}{more}: {self.meaning} "
            f"({self.value:.3g}, {side} {self.threshold:.3g})",
            f"what people did: {self.advice}",
            f"source: {self.source}",
        )

    def __str__(self) -> str:
        return "; ".join(self.lines)


def alarms(measured: Sequence[MeasuredStep]) -> list[Alarm]:
    """The alarms of a training from its measured steps, in the order in which they rang.

    A rule rings once. Rules of which something was not measured stay silent.
    """
    if not measured:
        return []
    history = History(measured)
    rung = [alarm for rule in RULES.values() if (alarm := _first(rule, history)) is not None]
    return sorted(rung, key=lambda alarm: alarm.step)


def readings_of(rule: Rule, history: History) -> np.ndarray | None:
    """A rule's readings `[step layer head]`; None where its statistics were not measured."""
    if not history.has(rule.reads):
        return None
    # Where all heads are undefined, so is what is made of them.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return rule.readings(history)


def _first(rule: Rule, history: History) -> Alarm | None:
    readings = readings_of(rule, history)
    if readings is None:
        return None
    rings = rule.passes(readings)
    steps = np.flatnonzero(rings.any(axis=(1, 2)))
    if not steps.size:
        return None
    first = steps[0]
    values = np.where(rings[first], readings[first], np.nan)
    furthest = np.nanmax if rule.rings == "above" else np.nanmin
    return Alarm(
        rule.name, history.steps[first], float(furthest(values)), rule.threshold,
        tuple(_names(rings[first], history.n_layers)), rule.meaning, rule.advice, rule.source,
        rule.is_notice,
    )  # fmt: skip


def _names(rings: np.ndarray, n_layers: int) -> list[str]:
    """The heads or layers of `[layer head]` that ring."""
    layers, heads = rings.shape
    if layers == 1 and n_layers > 1:
        return []
    if heads == 1:
        return [f"L{layer}" for layer in np.flatnonzero(rings[:, 0])]
    return [f"L{layer}H{head}" for layer, head in np.argwhere(rings)]
