"""Rules of a watched training, on histories of a few numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headcount.schemas.watch.alarms import Alarm, alarms
from headcount.schemas.watch.history import FACTS, Facts, MeasuredStep, measured_step
from headcount.schemas.watch.rules import RULES, WATCHED, calibrations

QUIET: dict[str, Any] = {
    "score_max": 1.0,
    "entropy_normalised": 0.9,
    "sink_mass": 0.1,
    "head_result_norm": 2.0,
    "induction_score": 0.5,
    "resid_post_norm": 5.0,
    "sink_resid_post_norm": 5.0,
}
"""A model of two layers and three heads in which nothing is wrong."""


def history(facts: Sequence[Facts] = (), **changed: Sequence[Any]) -> list[MeasuredStep]:
    """Steps 0, 10, …; a statistic that is named has a value a step, `[layer head]` or a number."""
    count = len(facts) or len(next(iter(changed.values())))
    steps: list[MeasuredStep] = []
    for place in range(count):
        values = QUIET | {name: series[place] for name, series in changed.items()}
        heads = {
            name: np.broadcast_to(value, (2, 3)).astype(float) for name, value in values.items()
        }
        # Weights that grow are never those of before.
        own = facts[place] if facts else Facts({"h.0.w": place + 1.0, "h.1.w": place + 2.0})
        steps.append(MeasuredStep(10 * place, heads, own))
    return steps


def only(measured: Sequence[MeasuredStep]) -> Alarm:
    (alarm,) = alarms(measured)
    return alarm


def head(layer: int, number: int, value: float, others: float) -> np.ndarray:
    """A value of one head, and another of all others."""
    values = np.full((2, 3), float(others))
    values[layer, number] = value
    return values


def test_every_rule_is_calibrated_beyond_what_was_sound() -> None:
    assert set(calibrations()) == set(RULES)
    assert set(WATCHED) == set(QUIET)
    for rule in RULES.values():
        calibration = calibrations()[rule.name]
        distance = calibration.threshold - calibration.extreme
        assert distance > 0 if rule.rings == "above" else distance < 0, rule.name
        assert rule.meaning.endswith(".")


def test_nothing_rings_where_nothing_changes_but_the_weights() -> None:
    assert alarms(history(sink_mass=[0.1, 0.1, 0.1])) == []
    assert alarms([]) == []


CASES: dict[str, tuple[dict[str, Sequence[Any]], int, tuple[str, ...]]] = {
    "score_growth": ({"score_max": [1, 2, head(1, 2, 1e4, 2)]}, 20, ("L1H2",)),
    "entropy_collapse": ({"entropy_normalised": [0.9, [[1e-4] * 3, [0.9] * 3]]}, 10, ("L0",)),
    "head_death": ({"head_result_norm": [2, head(0, 1, 0, 2), 2]}, 10, ("L0H1",)),
    "sink_onset": ({"sink_mass": [0.1, 0.05, [[0.05] * 3, [0.99] * 3]]}, 20, ("L1",)),
    "sink_loss": ({"sink_mass": [0.99, [[0.99] * 3, [0.01] * 3]]}, 10, ("L1",)),
    "massive_growth": ({"sink_resid_post_norm": [5, 5, [[5] * 3, [5e3] * 3]]}, 20, ("L1",)),
    "induction_loss": ({"induction_score": [head(1, 0, 0.9, 0), 0, 0]}, 10, ("L1H0",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_rings_alone_at_its_step_and_names_its_heads(name: str) -> None:
    changed, step, heads = CASES[name]
    alarm = only(history(**changed))
    assert (alarm.rule, alarm.step, alarm.heads) == (name, step, heads)
    assert alarm.threshold == calibrations()[name].threshold
    assert f"{name} at step {step}, {heads[0]}: {RULES[name].meaning}" in str(alarm)
    # What follows cannot change what has rung.
    assert only(history(**changed)[: step // 10 + 1]) == alarm


def test_copying_that_moves_to_another_head_is_not_lost() -> None:
    assert alarms(history(induction_score=[head(1, 0, 0.9, 0), head(0, 2, 0.9, 0)])) == []


def test_what_is_undefined_or_not_measured_does_not_ring() -> None:
    nothing = np.full((2, 3), np.nan)
    assert alarms(history(score_max=[nothing, nothing], induction_score=[0.9, nothing])) != []
    assert alarms(history(score_max=[nothing, nothing])) == []
    measured = history(score_max=[1e9, 1e9])
    without = [MeasuredStep(m.step, {"sink_mass": m.heads["sink_mass"]}, m.facts) for m in measured]
    assert alarms(without) == []


def norms(*values: float) -> Facts:
    names = ("h.0.attn.weight", "h.0.ln.weight", "h.1.attn.weight", "h.1.ln.weight", "wte.weight")
    return Facts(dict(zip(names, values, strict=True)))


def test_a_layer_that_stops_changing_is_frozen() -> None:
    steps = [norms(1, 1, 1, 1, 1), norms(2, 2, 2, 2, 1), norms(3, 3, 2, 2, 1)]
    alarm = only(history(steps))
    assert (alarm.rule, alarm.step, alarm.heads) == ("frozen_layer", 20, ("L1",))


def test_a_layer_that_only_decays_is_frozen_but_not_one_with_a_single_weight_that_learns() -> None:
    steps = [norms(1, 1, 1, 1, 1), norms(2, 3, 0.99, 1, 2), norms(3, 4, 0.98, 1, 3)]
    assert alarms(history(steps)) == []
    decaying = [norms(1, 1, 4, 2, 1), norms(2, 3, 3.96, 1.98, 2)]
    alarm = only(history(decaying))
    assert (alarm.rule, alarm.step, alarm.heads) == ("frozen_layer", 10, ("L1",))


def test_updates_are_lost_where_some_trained_weights_stay() -> None:
    steps = [norms(1, 1, 1, 1, 1), norms(2, 1, 2, 2, 1)]
    narrow = [Facts(each.norms, narrow=list(each.norms)) for each in steps]
    alarm = only(history(narrow))
    assert (alarm.rule, alarm.step, alarm.heads, alarm.value) == ("lost_updates", 10, ("L0",), 0.5)
    # In float32, what stays the same has a gradient of 0.
    assert alarms(history(steps)) == []


def test_weights_of_an_earlier_step_are_found() -> None:
    steps = [norms(1, 1, 1, 1, 1), norms(2, 2, 2, 2, 2), norms(1, 1, 1, 1, 1)]
    alarm = only(history(steps))
    assert (alarm.rule, alarm.step, alarm.heads) == ("earlier_weights", 20, ())
    assert only(history([steps[0], steps[0]])).rule == "earlier_weights"


def test_facts_of_the_weights_and_of_the_data_ring() -> None:
    grown = [Facts({"h.0.w": step + 1.0}, untied=untied) for step, untied in enumerate((0, 0.5))]
    assert only(history(grown)).rule == "tied_head"
    leaking = [Facts({"h.0.w": 1.0}), Facts({"h.0.w": 2.0}, leak=0.2)]
    assert only(history(leaking)).rule == "document_leak"
    shares = [0.5, 0.52, 0.48, 0.5, 0.51, 0.99]
    data = [Facts({"h.0.w": step + 1.0}, repeated=share) for step, share in enumerate(shares)]
    alarm = only(history(data))
    assert (alarm.rule, alarm.step) == ("data_change", 50)
    looks_ahead = [Facts({"h.0.w": 1.0}, ahead=0), Facts({"h.0.w": 2.0}, ahead=0.2)]
    assert only(history(looks_ahead)).rule == "future_leak"
    labels = [Facts({"h.0.w": 1.0}, shifted=0.01), Facts({"h.0.w": 2.0}, shifted=0.9)]
    assert only(history(labels)).rule == "shifted_labels"


def test_a_batch_that_comes_three_times_in_a_row_rings() -> None:
    def stuck(*batches: str | None) -> list[MeasuredStep]:
        return history(
            [Facts({"h.0.w": step + 1.0}, batch=batch) for step, batch in enumerate(batches)]
        )

    alarm = only(stuck("a", "b", "c", "c", "c"))
    assert (alarm.rule, alarm.step, alarm.heads) == ("repeated_batch", 40, ())
    # A later epoch reads it again, and of some steps nothing is known.
    assert alarms(stuck("a", "b", "a", "a", "b", "a")) == []
    assert alarms(stuck(None, None, None, None)) == []


def test_a_layer_whose_attention_was_set_otherwise_rings() -> None:
    settings = ({"0": "a", "1": "b"}, {"0": "a", "1": "b", "2": "c"}, {"0": "a", "1": "d"})
    steps = [Facts({"h.0.w": step + 1.0}, attention=each) for step, each in enumerate(settings)]
    alarm = only(history(steps))
    assert (alarm.rule, alarm.step, alarm.heads) == ("changed_attention", 20, ("L1",))


def test_rows_become_heads_and_carry_their_facts() -> None:
    table = pa.table(
        {
            "layer": pa.array([0, 0, 1, 0, 0, 1], pa.int16()),
            "head": pa.array([0, 1, 1, 0, 1, 1], pa.int16()),
            "score_max": pa.array([1, 2, 3, 5, None, 2], pa.float32()),
            "sink_mass": pa.array([0.25, None, 1, 0.75, None, 0.5], pa.float32()),
        }
    )
    facts = Facts({"h.0.w": 1 / 3}, ["h.0.b"], 0.0, None, 0.5)
    step = measured_step(7, facts.added_to(table))
    assert step.facts == facts
    nan = np.nan
    np.testing.assert_array_equal(step.heads["score_max"], [[5, 2], [nan, 3]])
    np.testing.assert_array_equal(step.heads["sink_mass"], [[0.5, nan], [nan, 0.75]])
    assert measured_step(7, table.replace_schema_metadata({FACTS: b""})).facts == Facts()
