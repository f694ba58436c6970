"""The thresholds from sound trainings, and what the rules find in others."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.trainings.faults import FAULTS
from benchmarks.trainings.plan import CALIBRATING, FRESH_SOUND, LATER_SOUND, SOUND
from benchmarks.trainings.training import EVERY, STEPS, Recording
from headcount.schemas.watch.alarms import alarms, readings_of
from headcount.schemas.watch.history import History
from headcount.schemas.watch.rules import RULES, THRESHOLDS

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
                    extremes.append(float(np.nanmax(sign * readings)))
            extreme = sign * max(extremes)
            beyond = max(extreme, rule.least) * rule.margin
            threshold = beyond if sign > 0 else extreme / rule.margin
            writer.writerow((rule.name, f"{extreme:.4g}", len(extremes), f"{threshold:.3g}"))


@dataclass(frozen=True)
class Judgement:
    """What the rules found in one training."""

    recording: Recording
    rang: dict[str, int]  # rules that are no notices, and the steps at which they rang
    left: int | None  # the step at which the loss left its band

    @property
    def named_at(self) -> int | None:
        """The step at which a right rule rang; None if none did."""
        training = self.recording.training
        right = FAULTS[training.fault].right if training.fault else ()
        return self._first([rule for rule in self.rang if rule in right])

    @property
    def rang_at(self) -> int | None:
        """The step at which any rule rang after the fault had begun; None if none did."""
        return self._first(self.rang)

    def _first(self, rules: Sequence[str] | dict[str, int]) -> int | None:
        # What rang before the fault began is a false alarm.
        steps = [self.rang[rule] for rule in rules]
        begins = self.recording.training.begins
        return min((step for step in steps if step >= begins), default=None)

    @property
    def lead(self) -> float | None:
        """Which share of the run lies between the alarm and the loss; None if either is missing."""
        if self.rang_at is None or self.left is None:
            return None
        return (self.left - self.rang_at) / STEPS

    def __str__(self) -> str:
        rang = ", ".join(f"{rule} at {step}" for rule, step in self.rang.items()) or "nothing rang"
        left = "stayed in its band" if self.left is None else f"left its band at {self.left}"
        ended = f"; measuring ended: {self.recording.refusal}" if self.recording.refusal else ""
        return f"{self.recording.training.name}: {rang}; loss {left}{ended}"


def judged(recordings: Sequence[Recording]) -> list[Judgement]:
    """What the rules find in every training that calibrated none of them."""
    bands = _bands(recordings)
    judgements: list[Judgement] = []
    for recording in recordings:
        training = recording.training
        if training in CALIBRATING:
            continue
        rung = alarms(recording.measured)
        rang = {alarm.rule: alarm.step for alarm in rung if not alarm.is_notice}
        edge = bands[training.architecture, training.data]
        beyond = np.flatnonzero(_smooth(recording.losses) > edge)
        # What was wrong before the fault began is none of it.
        left = [step for step in ((beyond + 1) * EVERY).tolist() if step > training.begins]
        judgements.append(Judgement(recording, rang, min(left, default=None)))
    return judgements


def _smooth(losses: Sequence[float]) -> np.ndarray:
    """Mean losses of each ten steps."""
    return np.array(losses).reshape(-1, EVERY).mean(axis=1)


def _bands(recordings: Sequence[Recording]) -> dict[tuple[str, str], np.ndarray]:
    """The band's upper edge at each tenth step, for each architecture and data set.

    It is as wide as the sound trainings of all rates: what is slower than the slowest rate has
    left it. A band judges no rule, so trainings that judge have a band of their own.
    """
    losses = defaultdict[tuple[str, str], list[np.ndarray]](list)
    for recording in recordings:
        training = recording.training
        if training in (*SOUND[::2], *FRESH_SOUND, *LATER_SOUND):
            losses[training.architecture, training.data].append(_smooth(recording.losses))
    return {
        of: np.mean(each, axis=0) + SPREADS * np.std(each, axis=0) for of, each in losses.items()
    }


HEAD = (
    "fault", "named", "by another rule", "not found", "rules", "steps after it began",
    "loss left its band", "lead, of the run",
)  # fmt: skip


def table(judgements: Sequence[Judgement]) -> str:
    """A table of the guide, in Markdown, and below it each training that went otherwise."""
    sound = [each for each in judgements if each.recording.training.fault is None]
    faulty = [each for each in judgements if each.recording.training.fault is not None]
    bounds = [
        (each.left - each.recording.training.begins) / STEPS
        for each in faulty
        if each.left is not None
    ]
    rows = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for name, fault in FAULTS.items():
        of_fault = [each for each in faulty if each.recording.training.fault == name]
        if of_fault:
            rows.append(f"| {' | '.join([fault.meaning, *_counts(of_fault)])} |")
    rows.append(f"| all | {' | '.join(_counts(faulty))} |")
    false = [each for each in sound if each.rang]
    rows.append(
        f"\nAlarms in {len(false)} of {len(sound)} sound trainings. The loss left its band a "
        f"median of {median(bounds):.0%} of the run after a fault began; no alarm leads by more.\n"
    )
    rows += [f"* {each}" for each in false]
    rows += [f"* {each}" for each in faulty if each.named_at is None]
    return "\n".join(rows)


def _counts(faulty: Sequence[Judgement]) -> list[str]:
    """What was found in some trainings with faults: the columns of the table."""
    named = [each for each in faulty if each.named_at is not None]
    another = [each for each in faulty if each.named_at is None and each.rang_at is not None]
    delays = [
        each.rang_at - each.recording.training.begins for each in faulty if each.rang_at is not None
    ]
    leads = [each.lead for each in faulty if each.lead is not None]
    rules = sorted({rule for each in faulty for rule in each.rang})
    return [
        f"{len(named)} of {len(faulty)}",
        str(len(another)),
        str(len(faulty) - len(named) - len(another)),
        ", ".join(f"`{rule}`" for rule in rules),
        f"{median(delays):g}" if delays else "",
        str(sum(each.left is not None for each in faulty)),
        f"{median(leads):.0%}" if leads else "",
    ]
