"""What an answer prints: digits that a number means, every time, and columns that are aligned."""

import io
import json

import pytest

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase
from headcount.queries.ask.formats import Format, write
from headcount.queries.ask.text_tables import text_table
from headcount.schemas.text_columns import in_columns

TENTH = "0.1::FLOAT"
NESTED = {
    f"[{TENTH}, NULL]": [0.1, None],
    f"[[{TENTH}], []]": [[0.1], []],
    f"[{TENTH}]::FLOAT[1]": [0.1],
    f"{{'a': {TENTH}, 'b': [{TENTH}]}}": {"a": 0.1, "b": [0.1]},
    f"MAP {{{TENTH}: {TENTH}}}": [(0.1, 0.1)],
    f"union_value(a := {TENTH})": 0.1,
    "CASE WHEN false THEN {'a': 1} END": None,
}


@pytest.mark.parametrize("sql", NESTED)
def test_a_float32_prints_the_digits_that_it_means_wherever_it_stands(
    database: RunDatabase, sql: str
) -> None:
    # In the second row, after one that is NULL.
    query = f"SELECT unnest([NULL, x]) AS x FROM (SELECT {sql} AS x)"
    assert list(run_query(database, query).rows()) == [(None,), (NESTED[sql],)]


TIMES = {
    "DATE '12345-01-02'": "12345-01-02",
    "DATE '0044-03-15 (BC)'": "0044-03-15 (BC)",
    "DATE '-infinity'": "-infinity",
    "'infinity'::TIMESTAMP": "infinity",
    "TIMESTAMP '12345-01-02 03:04:05.5'": "12345-01-02 03:04:05.5",
    "TIMESTAMP_S '0001-01-01 (BC) 00:00:00'": "0001-01-01 (BC) 00:00:00",
    "TIMESTAMP_MS '12345-01-02 03:04:05.006'": "12345-01-02 03:04:05.006",
    "TIMESTAMP_NS '2020-01-02 03:04:05.123456789'": "2020-01-02 03:04:05.123456789",
    "TIME '24:00:00'": "24:00:00",
}


@pytest.mark.parametrize("sql", TIMES)
def test_a_time_that_python_does_not_have_prints_as_duckdb_writes_it(
    database: RunDatabase, sql: str
) -> None:
    query = (
        f"SELECT {sql} AS x, [{sql}] AS list, {{'a': {sql}}} AS struct, ({sql})::VARCHAR AS text"
    )
    text = TIMES[sql]
    assert list(run_query(database, query).rows()) == [(text, [text], {"a": text}, text)]


LARGEST = str(2**128 - 1)
TEXTS = {
    f"{LARGEST}::UHUGEINT": LARGEST,
    f"'{LARGEST}000'::BIGNUM": f"{LARGEST}000",
    "'10101'::BIT": "10101",
    "'12:34:56+05:30'::TIMETZ": "12:34:56+05:30",
    "123::VARIANT": "123",
}


@pytest.mark.parametrize("sql", TEXTS)
def test_a_value_that_arrow_has_otherwise_is_text_wherever_it_stands(
    database: RunDatabase, sql: str
) -> None:
    text = TEXTS[sql]
    query = f"""
        SELECT 1 AS "a b", x, x AS x, [x] AS list, [x]::{{}}[1] AS array, {{'a "b': x}} AS struct,
            MAP {{1: x}} AS map, union_value(a := x) AS union, row(x, 2) AS tuple
        FROM (SELECT {sql} AS x)
    """.replace("{}", sql.rpartition("::")[2])
    ((one, *values, pair),) = run_query(database, query).rows()
    assert one == 1
    assert values == [text, text, [text], [text], {'a "b': text}, [(1, text)], text]
    assert [*pair.values()] == [text, 2]


def test_types_of_other_values_stay(database: RunDatabase) -> None:
    query = "SELECT 1::HUGEINT AS h, 'x'::ENUM('x', 'UHUGEINT') AS e, '{}'::JSON AS j, NULL AS n"
    answer = run_query(database, f"{query}, 5::UHUGEINT AS u")
    types = list(map(str, answer.schema.types))
    assert types[:2] == ["decimal128(38, 0)", "dictionary<values=string, indices=uint8, ordered=0>"]
    assert types[-1] == "string"
    assert next(iter(answer.rows()))[2:] == ("{}", None, "5")


def printed(database: RunDatabase, answer_format: Format, query: str) -> str:
    out = io.StringIO()
    write(run_query(database, query), answer_format, out)
    return out.getvalue()


def test_every_format_writes_structs_and_times(database: RunDatabase) -> None:
    query = f"SELECT {{'a': {TENTH}}} AS x, DATE '12345-01-02' AS day"
    assert printed(database, "csv", query) == 'x,day\n"{""a"": 0.1}",12345-01-02\n'
    assert json.loads(printed(database, "json", query)) == [{"x": {"a": 0.1}, "day": "12345-01-02"}]
    assert "{a: 0.1}   12345-01-02" in printed(database, "table", query)
    assert "| 12345-01-02 |" in printed(database, "markdown", query)


def test_columns_are_aligned_by_the_cells_that_characters_take() -> None:
    # Two cells, an accent of none, and an emoji of two.
    rows = [("头", 1), ("e\u0301", 2), ("🙂", 3), ("ab", 4)]
    assert text_table(["n", "x"], rows).splitlines() == [
        "n   x", "头  1", "e\u0301   2", "🙂  3", "ab  4"
    ]  # fmt: skip
    assert in_columns([("头", "x"), ("ab", "y")]) == ["头  x", "ab  y"]
