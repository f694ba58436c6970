"""p and q of views: exact tails of Student's t, Benjamini and Hochberg by their definition, and how
often intervals and discoveries are right where the truth is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.statistics import STATISTICS
from tests.toys.toy_runs import Cell, Row, write_run

# t, degrees of freedom, and P(|T| > t) by mpmath's incomplete beta function with 40 digits.
TAILS = [
    (0.5, 1, 0.704832764699), (12.706, 1, 0.0500008023581), (1e6, 1, 6.36619772367e-7),
    (0.1, 2, 0.929465438414), (4.303, 2, 0.0499925249852), (1e3, 2, 9.99998500002e-7),
    (1e6, 2, 9.99999999999e-13), (2.9, 3.5, 0.0518543619611), (100, 3.5, 3.55774261555e-7),
    (3e3, 3.5, 2.40695237425e-12), (0.001, 7, 0.999230017245), (2.365, 7, 0.0499723722748),
    (30, 7, 1.17884688807e-8), (150, 7, 1.54424462303e-13), (1, 29, 0.325581988016),
    (2.045, 29, 0.0500240759224), (12, 29, 9.06070833314e-13), (1.962, 999, 0.0500398017967),
    (5, 999, 6.7683618958e-7), (7.3, 999, 5.86565504737e-13), (1.96, 1e6, 0.0499960675828),
    (5, 1e9, 5.73303231780e-7), (0, 5, 1),
]  # fmt: skip


def p_of(t: float, df: float) -> float:
    """P(|T| > t), by the midpoint rule over u = t + s/(1-s) of the density."""
    share = (np.arange(200_000) + 0.5) / 200_000
    u = abs(t) + share / (1 - share)
    density = (1 + u**2 / df) ** (-(df + 1) / 2) / (1 - share) ** 2
    whole = (1 + (share / (1 - share)) ** 2 / df) ** (-(df + 1) / 2) / (1 - share) ** 2
    return float(density.sum() / whole.sum())


def quantile(p: float, df: float) -> float:
    """The t that p of all differences exceed in size."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if p_of(middle, df) > p else (low, middle)
    return low


def q_of(p: dict[str, float]) -> dict[str, float]:
    """The smallest level at which Benjamini and Hochberg pick a head."""

    def is_picked(head: str, level: float) -> bool:
        ordered = sorted(p.values())
        passing = [one for i, one in enumerate(ordered, 1) if one <= level * i / len(p)]
        return bool(passing) and p[head] <= max(passing)

    levels = sorted(one * len(p) / i for one in p.values() for i in range(1, len(p) + 1))
    # The level itself may lie below what rounding made of it.
    return {head: next(a for a in levels if is_picked(head, a * (1 + 1e-12))) for head in p}


def test_tails_of_student_are_exact(database: RunDatabase) -> None:
    rows = ", ".join(f"({t}::DOUBLE, {df}::DOUBLE)" for t, df, _ in TAILS)
    found = database.rows(f"SELECT student_tail(t, df), df FROM (VALUES {rows}) AS cases (t, df)")
    for (p, df), (*_, exact) in zip(found, TAILS, strict=True):
        assert p == pytest.approx(exact, rel=1e-5 if df > 1 else 4e-4, abs=0)


@pytest.mark.parametrize(
    ("test", "p"),
    [
        # A difference, its error, degrees of freedom, and the size of what differs.
        ("4.303, 1, 2, 0", pytest.approx(0.04999252, rel=1e-5)),
        ("-4.303, 1, 2, 0", pytest.approx(0.04999252, rel=1e-5)),
        ("1, NULL, 0, 0", None), ("1, 0.5, 0, 0", None), ("NULL, 1, 5, 0", None),
        # All documents agree; and what float32 makes of equal numbers.
        ("0.25, 0, 3, 1", 0), ("0, 0, 3, 1", 1), ("1e-7, 1e-9, 9, 1", 1),
    ],
)  # fmt: skip
def test_p_of_few_documents_and_of_documents_that_agree(
    database: RunDatabase, test: str, p: Any
) -> None:
    assert database.rows(f"SELECT two_sided_p({test})") == [(p,)]


DOCUMENTS = (0, 0, 1, 2, 2, 2, 3, 4, 5, 5)
STRENGTHS = (0, 0.02, 0.3, 0.5, 0.5, 0.8)


def noisy(row: Row) -> float | None:
    """A change by head that differs between documents. One head is undefined in all but one."""
    if row.head == len(STRENGTHS):
        return 0.5 if row.sequence == 0 else None
    # Heads 3 and 4 are equal: their p are ties.
    key = [row.sequence, 3 if row.head == 4 else row.head, row.layer]
    of_document = np.random.default_rng([DOCUMENTS[row.sequence], *key[1:]]).normal()
    noise = 0.2 * of_document + 0.05 * np.random.default_rng(key).normal()
    return float(0.5 + (row.intervention != "none") * (STRENGTHS[row.head] + noise))


def check_q(rows: list[dict[str, Any]], heads: int, difference: str, error: str) -> None:
    """Hold p and q of one table to their definitions."""
    p = {
        row["label"]: p_of(row[difference] / row[error], row["effective_documents"] - 1)
        for row in rows if row[error]
    }  # fmt: skip
    q = q_of(p)
    assert len(p) == heads
    assert len({round(value, 9) for value in q.values()}) > 2
    for row in rows:
        assert row["p"] == (pytest.approx(p[row["label"]], rel=1e-4) if row["label"] in p else None)
        assert row["q"] == (pytest.approx(q[row["label"]], rel=1e-4) if row["label"] in q else None)


FACTS: dict[str, Any] = {"sequences": 10, "heads": 7, "layers": 1, "documents": DOCUMENTS}


def test_changes_have_p_and_q_over_the_heads_of_a_table(tmp_path: Path) -> None:
    both = ("none", "zero_mlps")
    columns: dict[str, Cell] = {"sink_mass": noisy, "entropy": lambda row: 0.5 + row.head / 8}
    write_run(tmp_path, "a-1", columns, interventions=both, **FACTS)
    write_run(tmp_path, "b-2", columns, interventions=both[:1], **FACTS)
    database = open_runs(tmp_path)
    rows = database.records("effects")
    check_q([r for r in rows if r["statistic"] == "sink_mass"], 6, "change", "standard_error")
    # What does not change at all.
    assert {(row["p"], row["q"]) for row in rows if row["statistic"] == "entropy"} == {(1, 1)}
    # A condition does not change the table that q is over.
    label = "label = 'L0H2' AND statistic = 'sink_mass'"
    assert database.records(f"FROM effects WHERE {label}") == [
        row for row in rows if (row["label"], row["statistic"]) == ("L0H2", "sink_mass")
    ]


def test_two_runs_and_two_groups_have_p_and_q(tmp_path: Path) -> None:
    one = {"sink_mass": lambda row: noisy(row._replace(intervention="none"))}
    two = {"sink_mass": lambda row: noisy(row._replace(intervention="other"))}
    write_run(tmp_path, "a-1", one, **FACTS)
    write_run(tmp_path, "b-2", two, model="other", **FACTS)
    database = open_runs(tmp_path)
    check_q(
        database.records("FROM run_changes WHERE run_id = 'b-2'"), 6, "change", "standard_error"
    )
    for row in database.records("FROM contrasts(compare := 'model')"):
        errors = [
            database.rows(
                f"SELECT standard_error FROM head_summaries WHERE model = '{row[side]}' "
                f"AND label = '{row['label']}'"
            )[0][0]
            for side in ("this", "other")
        ]
        if None in errors:
            assert (row["p"], row["q"]) == (None, None)
            continue
        squares = np.array(errors) ** 2
        # Ten sequences, of documents of 2, 1, 3, 1, 1 and 2.
        df = squares.sum() ** 2 / (squares**2 / (100 / 20 - 1)).sum()
        expected = p_of(row["z"], df) if row["difference"] else 1
        assert row["p"] == pytest.approx(expected, rel=1e-4)


def test_heads_are_held_to_the_uniform_baseline(tmp_path: Path) -> None:
    def score(row: Row) -> float | None:
        value = noisy(row._replace(intervention="zero_mlps"))
        return None if value is None else value - 0.3

    norms = dict.fromkeys(
        ("sink_value_norm", "value_norm", "sink_resid_pre_norm", "resid_pre_norm"),
        lambda row: 1.0,
    )
    columns = {"sink_mass": score, "induction_score": score, "match_coverage": lambda row: 1.0}
    write_run(tmp_path, "a-1", columns | norms, uniform_baseline=0.25, **FACTS)
    database = open_runs(tmp_path)
    for query, mean in {
        "sink_heads": "sink_mass", "induction_heads": "induction_score", "ranking": "mean",
        "FROM ranking(statistic := 'induction_score')": "mean",
    }.items():  # fmt: skip
        rows = database.records(query)
        for row in rows:
            row["above"] = None if row[mean] is None else row[mean] - 0.25
        check_q(rows, 6, "above", "standard_error")
    for row in database.records("induction_heads"):
        is_high = row["induction_score"] >= 0.4
        assert row["is_induction"] == (is_high and (None if row["q"] is None else row["q"] <= 0.05))
    high = "SELECT label FROM induction_heads WHERE induction_score >= 0.4"
    assert 0 < len(database.rows(f"{high} AND is_induction")) < len(database.rows(high))


TABLES = ("zero_mlps", *(f"zero_head(0,{head})" for head in range(19)))
"""Interventions: each gives a table of heads for every statistic."""

TRUE_HEADS, TRUE_CHANGE = 10, 40.0
"""The heads that every second table has a change in, and how large it is."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "covered", "false_of_mixed", "false_of_null"),
    [
        # Nine tenths are null, so 4.5 % are expected; of null tables every discovery is false.
        ((3,) * 8, (0.94, 0.96), (0.04, 0.06), 0.07),
        ((1, 2, 3, 4, 5) * 4, (0.94, 0.96), (0.04, 0.06), 0.1),
        # One document has half of all sequences: its share alone makes every error too large.
        ((24, *[1] * 24), (0.97, 1), (0, 0.01), 0.01),
    ],
)
def test_intervals_and_discoveries_are_as_often_right_as_they_say(
    tmp_path: Path,
    sizes: tuple[int, ...],
    covered: tuple[float, float],
    false_of_mixed: tuple[float, float],
    false_of_null: float,
) -> None:
    """Sequences of one document are alike: a half of their variance is the document's."""
    layers, heads = 4, 25
    documents = np.repeat(np.arange(len(sizes)), sizes)
    names = [one.name for one in STATISTICS.values() if one.standard]
    rng = np.random.default_rng(1)
    shape = (len(TABLES), len(names), layers, heads)
    noise = rng.normal(size=(*shape, len(sizes)))[..., documents]
    noise += rng.normal(size=noise.shape)
    change = np.zeros(shape)
    # The first heads of every second statistic.
    change.reshape(*shape[:2], -1)[:, ::2, :TRUE_HEADS] = TRUE_CHANGE
    values = noise + change[..., None]

    def cell(statistic: int) -> Cell:
        def value(row: Row) -> float:
            if row.intervention == "none":
                return 0.5
            place = (TABLES.index(row.intervention), statistic, row.layer, row.head, row.sequence)
            return 0.5 + float(values[place])

        return value

    write_run(
        tmp_path, "a-1", {name: cell(i) for i, name in enumerate(names)}, layers=layers,
        heads=heads, sequences=len(documents), per_shard=100, documents=documents.tolist(),
        interventions=("none", *TABLES),
    )  # fmt: skip
    changes = np.full(shape, np.nan)
    errors, q = changes.copy(), changes.copy()
    for row in open_runs(tmp_path).records("effects"):
        place = (
            TABLES.index(row["intervention"]), names.index(row["statistic"]), row["layer"],
            row["head"],
        )  # fmt: skip
        changes[place], errors[place], q[place] = row["change"], row["standard_error"], row["q"]
        assert row["documents"] == len(sizes)
    df = sum(sizes) ** 2 / sum(size**2 for size in sizes) - 1
    coverage = (abs(changes - change) <= quantile(0.05, df) * errors).mean()
    picked = (q <= 0.05).reshape(*shape[:2], -1)
    false = (picked & (change == 0).reshape(picked.shape)).sum(-1)
    shares = false / np.maximum(1, picked.sum(-1))
    assert picked[:, ::2, :TRUE_HEADS].all()
    assert covered[0] <= coverage <= covered[1]
    assert false_of_mixed[0] <= shares[:, ::2].mean() <= false_of_mixed[1]
    assert shares[:, 1::2].mean() <= false_of_null
