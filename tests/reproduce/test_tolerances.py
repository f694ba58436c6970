"""Tolerances: 99 of 100 right models pass, and none is without its reason."""

import re
from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import pytest
from pydantic import ValidationError

from headcount.reproduce.replication import (
    COVERAGE,
    Check,
    PublishedValue,
    prediction_factor,
)
from headcount.reproduce.verdicts import judge
from tests.toys import toy_models as toy
from tests.toys.toy_replications import REPLICATIONS, toy_replication
from tests.toys.toy_runs import without_runs

DRAWS = 40_000
"""Pairs of a source and of a right model. Their shares scatter by 0.0005."""


@pytest.mark.parametrize(("draws", "student"), [(2, 63.657), (3, 9.925), (5, 4.604), (7, 3.707)])
def test_the_factor_is_students_and_its_interval_holds_one_more_draw(
    draws: int, student: float
) -> None:
    # The quantiles are those of the printed tables.
    assert prediction_factor(draws) == pytest.approx(student * np.sqrt(1 + 1 / draws), rel=2e-4)
    normal = np.random.default_rng(draws).standard_normal((DRAWS, draws + 1))
    published, measured = normal[:, :-1], normal[:, -1]
    distance = np.abs(measured - published.mean(1))
    share = (distance <= prediction_factor(draws) * published.std(1, ddof=1)).mean()
    assert share == pytest.approx(COVERAGE, abs=0.002)


def passing_share(published: PublishedValue, spread: float, draws: int) -> float:
    """The share of right models that pass, if the published spread is that of `draws` values."""
    generator = np.random.default_rng(0)
    normal = generator.standard_normal((DRAWS, draws + 1))
    published_means, own_spreads = normal[:, :-1].mean(1), normal[:, :-1].std(1, ddof=1)
    # The tolerance is the same multiple of every source's own spread.
    tolerances = (published.tolerance or 0) / spread * own_spreads
    return float((np.abs(normal[:, -1] - published_means) <= tolerances).mean())


@pytest.mark.parametrize("name", ["sink_circuit_training", "sink_circuit_models", "sink_circuit"])
def test_no_figure_with_a_published_spread_fails_a_model_that_is_right(name: str) -> None:
    values = [value for value in REPLICATIONS[name].published_values if value.spread is not None]
    assert len(values) >= 8
    for value in values[:: len(values) // 8]:
        assert value.spread is not None
        share = passing_share(value, value.spread, value.draws)
        assert share > COVERAGE - 0.002, value.full_name


@pytest.mark.parametrize("sample", [
    lambda generator, shape: generator.standard_normal(shape) + 3,
    # One sequence in fifty makes the mean, as with the probability of the right token.
    lambda generator, shape: generator.binomial(1, 0.02, shape) * generator.random(shape),
])  # fmt: skip
def test_means_over_sequences_pass_by_their_own_scatter(
    sample: Callable[[np.random.Generator, tuple[int, int]], Any],
) -> None:
    generator, sequences = np.random.default_rng(0), 1000
    source, model = (sample(generator, (4000, sequences)) for _ in range(2))
    means, scatters = model.mean(1), model.std(1, ddof=1)
    near = [
        PublishedValue("p", published, None, sequences=sequences).is_near(mean, scatter)
        for published, mean, scatter in zip(source.mean(1), means, scatters, strict=True)
    ]
    assert np.mean(near) >= COVERAGE - 0.003
    # A tenth more than the mean is seen where the scatter is small.
    biased = PublishedValue("p", 3.3, None, sequences=sequences)
    assert not biased.is_near(3.0, 1.0)
    assert not biased.is_near(3.3, None)


def test_the_scatter_is_a_third_column_and_a_record_has_no_verdict() -> None:
    checks = [
        Check(
            sql="VALUES ('a', 1.0, 0.5), ('b', 2.0, 0.5)",
            published={"a": 1.1, "b": 1},
            sequences=200,
        ),
        Check(sql="VALUES ('c', 9)", published={"c": 1}, record="of other texts", stated="2026-04"),
    ]
    replication = toy_replication(check=checks, stated="2025-01")
    info, database = toy.toy_info(n_layers=1), without_runs(duckdb.connect())
    near, far, record = judge("toy", replication, info, "m", database)
    assert near.tolerance == pytest.approx(3 * 0.1 * 0.5)
    assert [each.verdict for each in (near, far, record)] == ["pass", "fail", "record"]
    assert (record.reason, record.tolerance) == ("of other texts", None)
    assert [near.stated, record.stated] == ["2025-01", "2026-04"]
    elsewhere = judge("toy", replication, toy.toy_info(n_layers=2), "m", database)
    assert {each.verdict for each in elsewhere} == {"not comparable"}


@pytest.mark.parametrize(("fields", "problem"), [
    ({"tolerance": 0.1}, "a: expected tolerance_reason, what its tolerance follows from"),
    ({"spread": 0.1}, "a: spread: expected draws, 2 or more, got 0"),
    ({}, "a: no tolerance, in the file or in the check"),
])  # fmt: skip
def test_a_tolerance_without_a_reason_is_a_line(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(problem)):
        Check.model_validate({"sql": "", "published": {"a": 1}} | fields)


def test_a_tolerance_of_nothing_is_of_what_a_source_counts_or_names() -> None:
    reasons = {
        check.tolerance_reason
        for replication in REPLICATIONS.values()
        for check in replication.check
        for value in check.values
        if value.tolerance == 0
    }
    assert reasons == {"a count", "heads that sources name", "heads near a limit, in float16"}
