"""The thresholds from sound trainings, and what the rules find in others."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.trainings.plan import FAULTS, SOUND
from benchmarks.trainings.training import EVERY, STEPS, Recording
from headcount.schemas.watch.alarms import alarms, readings_of
from headcount.schemas.watch.history import History
from headcount.schemas.watch.rules import RULES, THRESHOLDS

CALIBRATING = SOUND[::2]
"""Half of the sound trainings, of every architecture, data set and rate."""

SPREADS = 3  # standard deviations above the mean loss of sound trainings: the band's upper edge


def calibrate(recordings: Sequence[Recording]) -> None:
    """Write each rule's threshold: a margin beyond its extreme in the calibrating trainings."""
    sound = [recording for recording in recordings if recording.training in CALIBRATING]
    with THRESHOLDS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("rule", "extreme", "trainings", "threshold"))
        for rule in RULES.values():
            sign = 1 if rule.rings == "above" else -1
            extremes: list[float] = []
            for recording in sound:
                readings = readings_of(rule, History(recording.measured))
                if readings is not None and not np.isnan(readings).all():
                    extremes.append(sign * float(np.nanmax(sign * readings)))
            # No sound training is in half precision.
            extreme = sign * max((sign * value for value in extremes), default=0)
            beyond = max(extreme, rule.least) * rule.margin
            threshold = beyond if sign > 0 else extreme / rule.margin
            writer.writerow((rule.name, f"{extreme:.4g}", len(extremes), f"{threshold:.3g}"))


@dataclass(frozen=True)
class Judgement:
    """What the rules found in one training."""

    name: str
    fault: str | None
    begins: int
    rang: tuple[tuple[str, int], ...]  # rules, and the steps at which they rang
    left: int | None  # the step at which the loss left its band

    @property
    def named_at(self) -> int | None:
        """The step at which a right rule rang; None if none did."""
        right = FAULTS.get(self.fault or "", ())
        steps = [step for rule, step in self.rang if rule in right and step >= self.begins]
        return min(steps, default=None)

    @property
    def lead(self) -> float | None:
        """Which share of the run lies between the alarm and the loss; None if either is missing."""
        if self.named_at is None or self.left is None:
            return None
        return (self.left - self.named_at) / STEPS


def judged(recordings: Sequence[Recording]) -> list[Judgement]:
    """What the rules find in every training that calibrated none of them."""
    bands = _bands(recordings)
    judgements: list[Judgement] = []
    for recording in recordings:
        training = recording.training
        if training in CALIBRATING:
            continue
        rung = [alarm for alarm in alarms(recording.measured) if not alarm.is_notice]
        rang = tuple((alarm.rule, alarm.step) for alarm in rung)
        edge = bands[training.architecture, training.data]
        beyond = np.flatnonzero(_smooth(recording.losses) > edge)
        # What was wrong before the fault began is none of it.
        left = [step for step in ((beyond + 1) * EVERY).tolist() if step > training.begins]
        judgements.append(
            Judgement(training.name, training.fault, training.begins, rang, min(left, default=None))
        )
    return judgements


def _smooth(losses: Sequence[float]) -> np.ndarray:
    """Mean losses of the steps between two measured ones."""
    return np.array(losses).reshape(-1, EVERY).mean(axis=1)


def _bands(recordings: Sequence[Recording]) -> dict[tuple[str, str], np.ndarray]:
    """The band's upper edge at each measured step, for each architecture and data set.

    It is as wide as the sound trainings of all rates: what is slower than the slowest rate has
    left it.
    """
    losses = defaultdict[tuple[str, str], list[np.ndarray]](list)
    for recording in recordings:
        training = recording.training
        if training in CALIBRATING:
            losses[training.architecture, training.data].append(_smooth(recording.losses))
    return {
        of: np.mean(each, axis=0) + SPREADS * np.std(each, axis=0) for of, each in losses.items()
    }


def table(judgements: Sequence[Judgement]) -> str:
    """The table of the guide, in Markdown."""
    sound = [each for each in judgements if each.fault is None]
    alarmed = [each for each in sound if each.rang]
    faulty = [each for each in judgements if each.fault is not None]
    named = [each for each in faulty if each.named_at is not None]
    rows = ["| fault | named | by | steps after it began | loss left its band | lead, of the run |"]
    rows.append("|---|---|---|---|---|---|")
    for fault, right in FAULTS.items():
        of_fault = [each for each in faulty if each.fault == fault]
        found = [each for each in of_fault if each.named_at is not None]
        delays = [each.named_at - each.begins for each in found if each.named_at is not None]
        leads = [each.lead for each in of_fault if each.lead is not None]
        left = sum(each.left is not None for each in of_fault)
        rules = [rule for rule in right if any(rule in dict(each.rang) for each in found)]
        rows.append(
            f"| {fault} | {len(found)} of {len(of_fault)} | {', '.join(f'`{r}`' for r in rules)} | "
            f"{f'{median(delays):g}' if delays else ''} | {left} of {len(of_fault)} | "
            f"{f'{median(leads):.0%}' if leads else 'never left'} |"
        )
    leads = [each.lead for each in faulty if each.lead is not None]
    silent = sum(each.named_at is not None and each.left is None for each in faulty)
    rows.append("")
    rows.append(
        f"Alarms in {len(alarmed)} of {len(sound)} sound trainings that calibrated nothing. "
        f"{len(named)} of {len(faulty)} faults were named by a right rule. In {len(leads)} of "
        f"these the loss left its band, a median of {median(leads):.0%} of the run after the "
        f"alarm; in {silent} it never did."
    )
    rows += [f"\n{each.name}: {each.rang}, loss left {each.left}" for each in alarmed]
    rows += [f"\nnot named: {each.name}: {each.rang}" for each in faulty if each.named_at is None]
    return "\n".join(rows)
