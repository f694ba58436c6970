"""The replications of induction heads and of Bigram-Backcopy: their views on made-up rows, and
figures that cannot be passed by nothing.
"""

from __future__ import annotations

import math

import duckdb
import pytest

from headcount.reproduce.replication import replications

NAMES = (
    "recency_bias",
    "previous_token",
    "position_geometry",
    "longer_sequences",
    "sequence_patching",
    "active_dormant",
    "active_dormant_one_layer",
    "backcopy_dynamics",
)
REPLICATIONS = {name: replication for name, replication in replications().items() if name in NAMES}


def recency(slope: float, exponents: tuple[float, ...] = (-0.5,)) -> duckdb.DuckDBPyConnection:
    """The views of `recency_bias` on a last row that rises by `slope` from key to key, in every
    intervention, and on outputs of layer 0 that shrink with these exponents.
    """
    connection = duckdb.connect()
    connection.execute(
        """
        CREATE TABLE interventions AS
        SELECT unnest(['zero_positions', 'zero_positions+keep_head(0,1)',
                       'zero_positions+keep_head(0,2)']) AS intervention
        """
    )
    connection.execute(
        f"""
        CREATE TABLE replication_profiles AS
        SELECT 'random-50' AS scan, intervention, 1 AS layer, 6 AS head,
               'last_attention_by_key' AS profile, NULL::INT AS query, key::INT AS key,
               0.02 + {slope} * (key - 24.5) AS mean, 0.01 AS standard_error
        FROM interventions, range(50) AS t(key)
        """
    )
    for head, exponent in enumerate(exponents):
        connection.execute(
            f"""
            INSERT INTO replication_profiles
            SELECT 'random-50', 'zero_positions', 0, {head}, 'head_output_norm_by_query', q, NULL,
                   3 * (q + 1) ** {exponent}, 0.01
            FROM range(50) AS t(q)
            """
        )
    connection.execute("CREATE TABLE strongest AS SELECT 1 AS layer, 6 AS head")
    for name in ("last_row", "recency", "tokens_alone", "shrinking"):
        connection.execute(f"CREATE VIEW {name} AS {REPLICATIONS['recency_bias'].view[name]}")
    return connection


def claim(replication: str, beginning: str) -> str:
    """The SQL of the claim whose words begin so."""
    (sql,) = [one.sql for one in REPLICATIONS[replication].claim if one.words.startswith(beginning)]
    return sql


def test_the_slope_on_tokens_alone_is_counted_in_standard_errors() -> None:
    rows = recency(0.001).execute("FROM tokens_alone ORDER BY all_heads, kept").fetchall()
    # Σ (key - 24.5)² over the keys 1 to 48 is 48 (48² - 1) / 12.
    in_errors = pytest.approx(0.001 * math.sqrt(48 * (48**2 - 1) / 12) / 0.01)
    assert [row[:2] for row in rows] == [(False, "1"), (False, "2"), (True, "")]
    assert [row[2:] for row in rows] == [(pytest.approx(1.0), in_errors)] * 3


@pytest.mark.parametrize(("slope", "holds", "heads"), [(0.001, True, 2), (-0.001, False, 0)])
def test_the_trend_without_positions_can_fail(slope: float, holds: bool, heads: int) -> None:
    connection = recency(slope)
    without = connection.execute(claim("recency_bias", "the trend needs no")).fetchall()
    assert [row[2] for row in without] == [holds]
    single = connection.execute(claim("recency_bias", "on tokens alone it needs")).fetchall()
    assert [row[1:] for row in single] == [(heads, holds)]


def test_heads_whose_outputs_shrink_are_counted() -> None:
    (check,) = [
        check for check in REPLICATIONS["recency_bias"].check if "tokens alone: L0H7" in check.sql
    ]
    exponents = (-0.5, -0.45, -0.55, -0.41, -0.59, -0.5, -0.5, 0.0)
    measured = dict(recency(0.001, exponents).execute(check.sql).fetchall())
    assert list(measured.values()) == [2, 7, 0]
    assert set(measured) == set(check.published)


@pytest.mark.parametrize(("near", "holds"), [(0.15, True), (0.11, False)])
def test_c_must_gain_where_it_is_near(near: float, holds: bool) -> None:
    connection = duckdb.connect()
    connection.execute(
        f"""
        CREATE TABLE attention_to AS
        SELECT unnest([4, 7, 10]) AS position, 1 AS layer, 6 AS head, 0.1 AS b,
               unnest([0.09, 0.11, {near}]) AS c
        """
    )
    connection.execute("CREATE TABLE strongest AS SELECT 1 AS layer, 6 AS head")
    sql = claim("recency_bias", "the strongest induction head prefers C most")
    ((_, gain, is_so),) = connection.execute(sql).fetchall()
    # C over B is 0.9 and 1.1 at first.
    assert (gain, is_so) == (pytest.approx(near / 0.1 - 1), holds)


@pytest.mark.parametrize(("ideal", "holds"), [(0.1, True), (2.0, False)])
def test_the_ideal_pattern_must_do_what_the_head_does(ideal: float, holds: bool) -> None:
    connection = duckdb.connect()
    connection.execute(
        f"""
        CREATE TABLE risk (intervention TEXT, after_trigger DOUBLE, after_other DOUBLE);
        INSERT INTO risk VALUES ('none', 0.2, 2.4), ('zero_attention(0)', 8, 2.4),
                                ('ideal_backcopy(0,0)', {ideal}, 2.4)
        """
    )
    sql = claim("active_dormant_one_layer", "with the ideal pattern")
    ((_, share, is_so),) = connection.execute(sql).fetchall()
    assert (share, is_so) == (pytest.approx(ideal / 8), holds)


@pytest.mark.parametrize("name", NAMES)
def test_no_figure_is_passed_by_nothing(name: str) -> None:
    for check in REPLICATIONS[name].check:
        for value in check.values:
            why = check.why_random_passes(value.name) or check.why_null_passes(value.name)
            if value.value != 0 and not why:
                assert not value.is_near(0.0), value.name


def test_p_of_b_without_bos_is_compared_by_its_size() -> None:
    (check,) = [
        check
        for check in REPLICATIONS["previous_token"].check
        if "P(B), without-bos" in check.published
    ]
    without, ratio = check.values
    # Twice the published value is as right as half of it; the probability with BOS is not.
    assert [without.is_near(p) for p in (3.6e-6, 1.5e-5, 0.0551)] == [True, True, False]
    # Nothing gained by BOS is a ratio of 1.
    assert [ratio.is_near(r) for r in (7590, 2000, 1)] == [True, True, False]
