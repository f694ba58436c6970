"""Standard errors: documents are independent, and the sequences of one document are not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from jobs.compaction import compact
from queries.asking import RunDatabase, open_runs
from queries.standard_errors import create_error_macros, errors_sql
from tests.toy_corpora import LENGTH, all_origins, documents, open_corpus, write_jsonl
from tests.toy_models import byte_tokenizer, toy_info
from tests.toy_runs import Row, write_run

T_39 = 2.0227
"""The 0.975 quantile of Student's t with 39 degrees of freedom."""

ORIGINS = (*[3] * 7, 4, *[5] * 5, 6, *[7] * 9, 8)
"""The document of each sequence. Shards are of four, so three documents cross an end."""

PARTS = {3: "ArXiv", 4: "Github", 5: "Github", 6: "ArXiv", 7: "Github", 8: None}

Estimate = tuple[float, float | None, int]
"""A mean, its error, and the number of documents."""


def clustered(values: list[float | None], origins: list[int]) -> Estimate:
    """The mean of defined values, its error, and the number of documents: the definition."""
    defined = [(v, d) for v, d in zip(values, origins, strict=True) if v is not None]
    mean = sum(value for value, _ in defined) / len(defined)
    names = sorted({origin for _, origin in defined})
    total = 0.0
    for name in names:
        of_document = [value for value, origin in defined if origin == name]
        total += len(of_document) ** 2 * (sum(of_document) / len(of_document) - mean) ** 2
    if len(names) < 2:
        return mean, None, len(names)
    return mean, math.sqrt(total * len(names) / (len(names) - 1)) / len(defined), len(names)


def value_of(row: Row) -> float | None:
    """A share that depends on the document most. The last head lacks some values."""
    noise = (row.sequence * 37 % 11) / 100 + row.layer / 50
    if row.intervention != "none":
        noise += (row.sequence % 5 + ORIGINS[row.sequence]) / 50
    if row.head == 2 and row.sequence % 3 == 0:
        return None
    return ORIGINS[row.sequence] / 16 + noise * (1 + row.head)


@pytest.fixture(params=["rows", "merged in part", "merged"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> RunDatabase:
    """A run whose documents are longer than a sequence, merged or not."""
    run = write_run(
        tmp_path,
        name="a-1",
        columns={"sink_mass": value_of},
        family="pile",
        sequences=len(ORIGINS),
        per_shard=4,
        documents=ORIGINS,
        pile_sets=[PARTS[origin] for origin in ORIGINS],
        interventions=["none", "zero_query_bias"],
    )
    rows_of_shard = 4 * 6
    if request.param != "rows":
        # Groups of two shards, which leave the last one of five; or one group of all.
        compact(run, rows_of_shard * (2 if "part" in request.param else 99) + 1)
    return open_runs(run.path)


def expected(row: dict[str, Any], part: str | None = None) -> Estimate:
    """What the definition gives for the head of a row, over all or over one part of the Pile."""
    chosen = [n for n in range(len(ORIGINS)) if part is None or PARTS[ORIGINS[n]] == part]
    rows = [Row(row["intervention"], n, row["layer"], row["head"]) for n in chosen]
    return clustered([value_of(row) for row in rows], [ORIGINS[n] for n in chosen])


def check(
    row: dict[str, Any], mean: str, error: str, wanted: tuple[float, float | None, int]
) -> None:
    assert row["documents"] == wanted[2]
    assert row[mean] == pytest.approx(wanted[0], rel=1e-6)
    assert row[error] == (None if wanted[1] is None else pytest.approx(wanted[1], rel=1e-5))


def test_errors_of_heads_are_over_documents(database: RunDatabase) -> None:
    rows = database.records("FROM head_summaries")
    assert len(rows) == 12
    for row in rows:
        check(row, "mean", "standard_error", expected(row))
    for row in database.records("FROM ranking"):
        check(row, "mean", "standard_error", expected(row))


def test_errors_of_parts_are_over_their_documents(database: RunDatabase) -> None:
    rows = database.records("FROM part_summaries WHERE pile_set_name IS NOT NULL")
    assert len(rows) == 24
    for row in rows:
        check(row, "mean", "standard_error", expected(row, row["pile_set_name"]))
    # What is of no part is one document, which has no error.
    alone = database.records("FROM part_summaries WHERE pile_set_name IS NULL")
    assert {(row["standard_error"], row["documents"]) for row in alone} == {(None, 1)}
    for row in database.records("FROM by_pile_set WHERE head < 2"):
        check(row, "mean_sink_mass", "se_sink_mass", expected(row, row["pile_set_name"]))


def test_errors_of_changes_are_over_documents(database: RunDatabase) -> None:
    rows = database.records("FROM effects")
    assert len(rows) == 6
    for row in rows:
        before, after = (
            [value_of(Row(intervention, n, row["layer"], row["head"])) for n in range(len(ORIGINS))]
            for intervention in ("none", "zero_query_bias")
        )
        changes = [
            None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)
        ]
        check(row, "change", "standard_error", clustered(changes, list(ORIGINS)))


def test_of_synthetic_input_each_sequence_is_a_document(tmp_path: Path) -> None:
    squares = {"sink_mass": lambda row: row.sequence**2 / 100}
    run = write_run(tmp_path, name="a-1", columns=squares, sequences=5)
    values = np.arange(5) ** 2 / 100
    error = values.std(ddof=1) / math.sqrt(5)
    for row in open_runs(run.path).records("FROM head_summaries"):
        check(row, "mean", "standard_error", (values.mean(), error, 5))


def test_a_deviation_of_no_value_or_one_is_null(tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        name="a-1",
        columns={"sink_mass": lambda row: 0.5 if row.head == row.sequence == 1 else None},
        sequences=2,
    )
    rows = open_runs(run.path).rows("SELECT DISTINCT sd_sink_mass FROM by_head")
    assert rows == [(None,)]


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_the_document_of_a_sequence_has_most_of_its_tokens(tmp_path: Path, packing: str) -> None:
    """Of equal ones it is the first. A separator belongs to the document that it ends."""
    file = write_jsonl(tmp_path / "a.jsonl", documents(20, 1, 2, 9, 3, 12))
    tokenizer = str(byte_tokenizer(tmp_path))
    info = toy_info(path=tokenizer, d_vocab=257, bos_token_id=256, eos_token_id=256)
    found = all_origins(open_corpus(info, file, packing))["document"]
    if packing == "document":
        # Each document that is long enough gives its first tokens.
        assert found == [0, 3, 5]
        return
    text = [number for number, n in enumerate((20, 1, 2, 9, 3, 12)) for _ in range(n + 1)]
    wanted = []
    for start in range(0, len(text) - LENGTH + 1, LENGTH):
        numbers = text[start : start + LENGTH]
        wanted.append(max(dict.fromkeys(numbers), key=numbers.count))
    assert found == wanted


def test_an_interval_covers_the_mean_of_the_corpus_as_often_as_it_says() -> None:
    """Forty documents of 1 to 30 sequences, drawn 2,000 times; halves of one corpus do not differ.

    If sequences were independent, intervals would be far too short.
    """
    rng = np.random.default_rng(0)
    runs, n_documents = 2_000, 40
    lengths = rng.integers(1, 31, (runs, n_documents))
    values = np.repeat(rng.normal(size=lengths.shape).ravel(), lengths.ravel())
    values = values + 0.3 * rng.normal(size=len(values))
    document = np.repeat(np.arange(runs * n_documents), lengths.ravel())
    run = document // n_documents
    half = document % 2
    connection = duckdb.connect()
    connection.execute(
        "CREATE SCHEMA ledger; CREATE TABLE ledger.sequences AS SELECT "
        "'' AS run_id, '' AS intervention, 0 AS sequence, '' AS pile_set_name, 0 AS document"
    )
    connection.execute("CREATE TABLE ledger.unrolled_sequences AS FROM ledger.sequences")
    create_error_macros(connection)
    drawn = pa.table({"run": run, "half": half, "document": document, "value": values})
    connection.register("drawn", drawn)

    def answers(key: str) -> dict[str, Any]:
        return connection.execute(f"{errors_sql(key, 'drawn')} ORDER BY ALL").fetchnumpy()

    means = answers("run")
    assert set(means["documents"]) == {n_documents}
    covered = abs(means["mean"]) < T_39 * means["standard_error"]
    assert 0.94 < covered.mean() < 0.96
    spread = np.sqrt(np.bincount(run, values**2) / means["count"] - means["mean"] ** 2)
    assert (abs(means["mean"]) < T_39 * spread / np.sqrt(means["count"])).mean() < 0.5
    halves = answers("run, half")
    first, second = ({k: v[i::2] for k, v in halves.items()} for i in (0, 1))
    z = (first["mean"] - second["mean"]) / np.hypot(
        first["standard_error"], second["standard_error"]
    )
    assert 0.04 < (abs(z) > T_39).mean() < 0.06
