"""The SQL of replications on made-up rows: what it makes of them.

That a claim can fail is held by `test_controls`: random weights must not pass it.
"""

import math
from typing import Any

import duckdb
import pytest

from tests.toys.toy_replications import REPLICATIONS


def opened(name: str, views: tuple[str, ...] = (), **tables: str) -> duckdb.DuckDBPyConnection:
    """A connection with some of a replication's views, over tables given as SQL."""
    connection = duckdb.connect()
    for table, sql in tables.items():
        connection.execute(f"CREATE TABLE {table} AS {sql}")
    for view in views:
        connection.execute(f"CREATE VIEW {view} AS {REPLICATIONS[name].view[view]}")
    return connection


# Sinks


@pytest.mark.parametrize(("alpha", "cosine", "expected"), [
    # The cosine is NULL in models with rotary positions.
    ("0.0", "NULL", [(0, False), ("rotary", 0, True), (0, False)]),
    ("0.0", "0.5", [(0, False), ("learned absolute", 0, False), (0, False)]),
    ("SINKS", "NULL", [(100, True), ("rotary", 100, False), (100, True)]),
    ("SINKS", "0.5", [(100, True), ("learned absolute", 100, True), (100, True)]),
])  # fmt: skip
def test_sink_rates_of_one_token_depend_on_the_kind_of_positions_and_no_sinks_show_nothing(
    alpha: str, cosine: str, expected: list[tuple[Any, ...]]
) -> None:
    alpha = alpha.replace("SINKS", "(scan <> 'random' AND scan <> 'natural-long')::INT")
    heads = f"""
        SELECT *, ({alpha})::FLOAT AS sink_alpha, ({cosine})::FLOAT AS sink_key_cosine
        FROM (SELECT unnest(['natural', 'random', 'repeated', 'natural-long']) AS scan),
             range(3) AS s(sequence)
    """
    connection = opened("sink_rates", ("sequence_rates", "rates"), replication_heads=heads)
    claims = REPLICATIONS["sink_rates"].claim[:3]
    text, one_token, length = (connection.execute(each.sql).fetchall()[0] for each in claims)
    kind = one_token[0].partition(" positions")[0]
    assert [text[1:], (kind, *one_token[1:]), length[1:]] == expected


def test_slopes_are_of_each_data_set_and_then_averaged() -> None:
    # Two data sets whose logits fall by 0.5 and by 0.25 for each unit of ln(query + 1).
    curve = "list_transform(range(40), lambda q: 1 / (1 + exp(-(0.3 - slope * ln(q + 1)))))"
    connection = opened(
        "sink_circuit_lengths",
        ("by_query", "slopes"),
        replication_curves=f"""
            SELECT 'tokens-40' AS scan, sequence, 'none' AS intervention, 'r' AS run_id, layer,
                   {curve} AS sink_attention_by_query
            FROM (VALUES (0, 0.5), (1, 0.5), (2, 0.25)) AS t(sequence, slope), range(12) l(layer)
        """,
        replication_sequences="""
            SELECT 'tokens-40' AS scan, sequence, 'none' AS intervention,
                   CASE WHEN sequence < 2 THEN 'sst2' ELSE 'gsm8k' END AS pile_set_name
            FROM range(3) AS t(sequence)
        """,
        runs="SELECT 'r' AS run_id, 12 AS n_layers",
    )
    rows = connection.execute("SELECT pile_set_name, slope FROM slopes ORDER BY slope").fetchall()
    assert rows == [("sst2", pytest.approx(-0.5)), ("gsm8k", pytest.approx(-0.25))]


def test_histograms_are_densities_with_empty_bins_and_end_where_the_source_ends() -> None:
    connection = opened(
        "sink_circuit_structure",
        ("spread", "densities"),
        # Of 40 values of other keys a quarter lies above 75, and layer 9 is not of the middle.
        shifts="""
            SELECT 3 AS layer, 0 AS head, 1 + i % 4 AS position, 25.0 * (1 + i % 4) - 1 AS shift
            FROM range(40) AS t(i) UNION ALL VALUES (3, 0, 0, 100.0), (9, 0, 0, 1e6)
        """,
        middle="SELECT 3 AS layer, 0 AS head",
        couplings="SELECT 0.0 AS coupling, false AS massive",
    )

    def drawn(figure: int, kind: str) -> list[tuple[float, float]]:
        sql = "SELECT x, density FROM densities WHERE figure = ? AND kind = ? AND density > 0"
        return sorted(connection.execute(sql, [figure, kind]).fetchall())

    width, whole = 75 / 39, 100 / 39
    assert drawn(1, "other keys") == [
        pytest.approx(((math.floor(shift / width) + 0.5) * width, 1 / 3 / width))
        for shift in (24, 49, 74)
    ]
    assert drawn(6, "first key") == [pytest.approx((100 - whole / 2, 1 / whole))]
    counts = connection.execute("SELECT count(*) FROM densities WHERE figure IN (1, 6)").fetchone()
    assert counts == (4 * 39,)


def test_a_step_of_a_training_is_in_the_name_of_its_scan() -> None:
    connection = opened(
        "sink_circuit_training",
        ("band", "by_step", "of_weights"),
        # Attention .5 to the first key: an intervention leaves .4, another .05.
        replication_heads="""
            SELECT 'texts-step-000400' AS scan, 'r' AS run_id, layer, *
            FROM (VALUES ('none', 0.5), ('zero_query_bias', 0.4), ('first_position_second', 0.05))
                     AS t(intervention, sink_mass_late), range(3, 11) AS l(layer)
        """,
        # Layers 0 to 2 do not count.
        replication_weights="""
            SELECT 'texts-step-000400' AS scan, 'r' AS run_id, *
            FROM (VALUES ('first_effective_position', NULL, NULL, -7.0),
                         ('first_effective_position', NULL, NULL, 2.0),
                         ('bias_position_cosine', 0, 5, 0.6), ('bias_position_cosine', 0, 2, -0.9),
                         ('bias_position_cosine', 1, 5, -0.4)) AS t(weight, position, layer, value)
        """,
        runs="SELECT 'r' AS run_id, 12 AS n_layers",
    )
    sql = "SELECT step, first, removed_by_bias, removed_by_position FROM by_step"
    ((step, *removed),) = connection.execute(sql).fetchall()
    assert step == 400
    assert [float(value) for value in removed] == pytest.approx([0.5, 20, 90])
    ((largest, alignment),) = connection.execute(
        "SELECT largest, alignment FROM of_weights"
    ).fetchall()
    assert (float(largest), float(alignment)) == (7.0, 0.6)


def test_the_residual_norm_at_bos_is_compared_with_the_other_positions() -> None:
    # Norms 2, 4 and 6: at BOS 2, at the others 5 on average, at all 4.
    heads = """
        SELECT 'task' AS scan, 'none' AS intervention, 0 AS head, 'r' AS run_id,
               2.0::FLOAT AS sink_resid_post_norm, 4.0::FLOAT AS resid_post_norm,
               1.0 AS sink_mass_triggers, 1.0 AS sink_mass_others, 1.0 AS previous_token_triggers,
               1.0 AS sink_logit_margin
    """
    connection = opened(
        "active_dormant_one_layer",
        ("head",),
        replication_heads=heads,
        runs="SELECT 'r' AS run_id, 3 AS n_ctx",
    )
    assert connection.execute("SELECT resid_ratio FROM head").fetchall() == [(0.4,)]


def test_ratios_are_named_and_averaged_as_the_source_does() -> None:
    # The source's own ratios. At 512 tokens two of its three spans of four keys are the same.
    costs = """
        SELECT 'tokens-512' AS scan, * FROM (VALUES
            ('mask_keys(0,1)', 0.9924335114012817::DOUBLE),
            ('mask_keys(177,4)', 1.0018626883828252), ('mask_keys(399,4)', 1.0999278128181211)
        ) AS t(intervention, ratio)
    """
    views = ("spans", "span_ratios", "named_ratios")
    connection = opened("masked_keys", views, costs=costs)
    assert dict(connection.execute("FROM named_ratios").fetchall()) == pytest.approx(
        {
            "T = 512, first_1": 0.9924335114012817,
            "T = 512, keys 177 to 180": 1.0018626883828252,
            "T = 512, keys 399 to 402": 1.0999278128181211,
            "T = 512, random_4_mean": 1.0345510631945904,
        },
        rel=1e-9,
    )


# Induction heads


def test_the_published_heads_have_the_roles_that_were_published() -> None:
    heads = """
        SELECT 'repeated' AS scan, * FROM (VALUES
            (0, 0, 0.19, 0.02), (0, 3, 0.50, 0.02), (1, 6, 0.02, 0.33), (1, 7, 0.02, 0.12)
        ) AS t(layer, head, previous_token_score, induction_score)
    """
    connection = opened("sequence_patching", ("roles",), replication_heads=heads)
    roles = connection.execute("SELECT role FROM roles ORDER BY layer, head").fetchall()
    assert [role for (role,) in roles] == [
        "other heads of layer 0",
        "previous-token heads",
        "induction heads",
        "other heads of layer 1",
    ]


def recency(slope: float, exponents: tuple[float, ...] = (-0.5,)) -> duckdb.DuckDBPyConnection:
    """The views of `recency_bias` on a last row that rises by `slope` from key to key, in every
    intervention, and on outputs of layer 0 that shrink with these exponents.
    """
    interventions = (
        "['zero_positions', 'zero_positions+keep_head(0,1)', 'zero_positions+keep_head(0,2)']"
    )
    return opened(
        "recency_bias",
        ("last_row", "recency", "tokens_alone", "shrinking"),
        strongest="SELECT 1 AS layer, 6 AS head",
        interventions=f"SELECT unnest({interventions}) AS intervention",
        replication_profiles=f"""
            SELECT 'random-50' AS scan, intervention, 1 AS layer, 6 AS head,
                   'last_attention_by_key' AS profile, NULL::INT AS query, key::INT AS key,
                   0.02 + {slope} * (key - 24.5) AS mean, 0.01 AS standard_error
            FROM interventions, range(50) AS t(key)
            UNION ALL
            SELECT 'random-50', 'zero_positions', 0, head - 1, 'head_output_norm_by_query', q, NULL,
                   3 * (q + 1) ** {[*exponents]}[head], 0.01
            FROM range(50) AS t(q), range(1, {len(exponents) + 1}) AS h(head)
        """,
    )


def test_the_slope_on_tokens_alone_is_counted_in_standard_errors() -> None:
    rows = recency(0.001).execute("FROM tokens_alone ORDER BY all_heads, kept").fetchall()
    # Σ (key - 24.5)² over the keys 1 to 48 is 48 (48² - 1) / 12.
    in_errors = pytest.approx(0.001 * math.sqrt(48 * (48**2 - 1) / 12) / 0.01)
    assert [row[:2] for row in rows] == [(False, "1"), (False, "2"), (True, "")]
    assert [row[2:] for row in rows] == [(pytest.approx(1.0), in_errors)] * 3


def test_heads_whose_outputs_shrink_are_counted() -> None:
    checks = REPLICATIONS["recency_bias"].check
    (shrinking,) = [each for each in checks if "tokens alone: L0H7" in each.sql]
    exponents = (-0.5, -0.45, -0.55, -0.41, -0.59, -0.5, -0.5, 0.0)
    measured = dict(recency(0.001, exponents).execute(shrinking.sql).fetchall())
    assert list(measured.values()) == [2, 7, 0]
    assert set(measured) == set(shrinking.published)
