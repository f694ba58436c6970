"""What an error says of a name that is not there: where it is, or what is close."""

import pytest

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase
from headcount.schemas.errors import QueryError

JOINS = {
    "SELECT pile_set_name FROM heads": "FROM heads JOIN sequences USING (run_id, intervention, "
    "sequence)",
    "SELECT h.tokens FROM heads AS h": "FROM heads JOIN sequences USING (run_id, intervention, "
    "sequence)",
    "SELECT sink_mass FROM sequences": "FROM sequences JOIN heads USING (run_id, intervention, "
    "sequence)",
    "SELECT heads.model FROM heads": "FROM heads JOIN runs USING (run_id)",
}


@pytest.mark.parametrize("sql", JOINS)
def test_a_column_of_another_view_is_said_with_the_join(database: RunDatabase, sql: str) -> None:
    with pytest.raises(QueryError, match="is not in") as error:
        run_query(database, sql)
    assert str(error.value).endswith(JOINS[sql])


UNKNOWN = {
    "FROM ranking(statistic := 'sink')": "unknown statistic 'sink': did you mean 'sink_mass'?",
    "FROM outliers(statistic := 'zz')": "unknown statistic 'zz'",
    "FROM head_card(label := 'L9H9')": "unknown label 'L9H9'",
    "FROM head_card(intervention := 'zz')": "unknown intervention 'zz': Known: none",
    "FROM contrasts(this := 'zz')": "unknown pile_set_name 'zz'",
    "FROM contrasts(compare := 'run_id', other := 'a-2')": "unknown run_id 'a-2': did you mean "
    "'a-1'? Known: a-1",
    "FROM contrasts(compare := 'colour')": "unknown compare 'colour': Known: input_family, model, "
    "pile_set_name, run_id",
}


@pytest.mark.parametrize("sql", UNKNOWN)
def test_a_value_that_names_nothing_of_the_runs_is_an_error(
    database: RunDatabase, sql: str
) -> None:
    with pytest.raises(QueryError) as error:
        run_query(database, sql)
    assert str(error.value).startswith(UNKNOWN[sql])


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT heigth FROM (SELECT 1 AS height)", "did you mean 'height'?"),
        ("SELECT zz FROM (SELECT 1 AS height, 2 AS width)", "Near: height"),
        ("FROM rankin", "did you mean 'ranking'? headcount query RUNS lists all"),
    ],
)
def test_a_near_name_is_said_once(database: RunDatabase, sql: str, expected: str) -> None:
    with pytest.raises(QueryError) as error:
        run_query(database, sql)
    message = str(error.value)
    assert message.partition(": ")[2].startswith(expected)
    assert message.count("height") + message.count("ranking") == 1


def test_an_error_lists_close_names_and_no_wall_of_them(database: RunDatabase) -> None:
    for sql in ("sink_head", "SELECT sink_mas FROM by_head"):
        with pytest.raises(QueryError, match="did you mean") as error:
            run_query(database, sql)
        assert str(error.value).count(",") <= 6
        assert "lists all" in str(error.value)
