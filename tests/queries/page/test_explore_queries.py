"""The explorer's queries give what SQL gives from the files. Its engine keeps time."""

import asyncio
import gc
import json
import math
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from headcount.jobs.upkeep.compaction import compact
from headcount.queries.answers import page_runs, run_facts
from headcount.queries.answers.axes import BINS, DRAWN_BINS, Axis, axis_of
from headcount.queries.explore.query_engine import Engine
from headcount.queries.explore.sql_process import MOST_ROWS
from headcount.schemas.errors import HeadcountError, QueryError
from headcount.schemas.files.run_directory import RunDirectory
from tests.toys.toy_runs import Entry, Row, flip_middle_bit, one_line, write_run

Files = duckdb.DuckDBPyConnection
LAYERS, HEADS, SEQUENCES, PER_SHARD, N_CTX = 2, 3, 35, 10, 5
MERGED = "heads/intervention=none/merged-*.parquet"
"""The file of all whole shards, once they are merged."""
LEFT = SEQUENCES % PER_SHARD
"""Sequences of the short shard behind them. So few are read without a sample."""
SUBSETS = ["<b>Books</b>", "ArXiv"]
ROWS = SEQUENCES * LAYERS * HEADS
"""Rows of an intervention."""


def sink_mass(row: Row) -> float:
    return (row.sequence * 7 + row.layer * 3 + row.head * 5) % 11 / 11


def entropy(row: Row) -> float | None:
    return None if row.sequence % 10 == 3 else (row.sequence * 5 + row.head) % 7 / 2


def value_norm(row: Row) -> float:
    return (row.sequence * 1.5 + row.layer) * (1 if row.intervention == "none" else 2)


CELLS: dict[str, Callable[[Row], float | None]] = {
    "sink_mass": sink_mass,
    "entropy": entropy,
    "value_norm": value_norm,
}
STATISTICS = list(CELLS)
IN_ORDER = ["sink_mass", "value_norm", "entropy"]
"""As the registry has them."""


def by_index(row: Row) -> list[float]:
    """A profile of a head in one sequence."""
    return [index + row.layer + sink_mass(row) for index in range(N_CTX)]


def profile_rows(shard: int) -> list[Entry]:
    """What a shard has of `attention_by_lag`, which is averaged over its sequences."""
    sequences = range(SEQUENCES)[shard * PER_SHARD : (shard + 1) * PER_SHARD]
    entries: list[Entry] = []
    for layer, head in np.ndindex(LAYERS, HEADS):
        lists = np.array([by_index(Row("none", one, layer, head)) for one in sequences])
        place = {"profile": "attention_by_lag", "layer": layer, "head": head, "count": len(lists)}
        m2 = ((lists - lists.mean(0)) ** 2).sum(0)
        numbers = zip(lists.mean(0), m2, strict=True)
        entries += [
            place | {"lag": i, "mean": mean, "m2": m2} for i, (mean, m2) in enumerate(numbers)
        ]
    return entries


CURVES = {"profiles": profile_rows, "curves": {"attention_received_by_key": by_index}}
"""Options of a run with a profile and with a curve."""


def write(out: Path, name: str, **options: Any) -> Path:
    defaults = {"sequences": SEQUENCES, "per_shard": PER_SHARD, "family": "pile"}
    defaults |= {"pile_sets": SUBSETS, "interventions": ("none", "zero_key_bias")}
    write_run(out, name, CELLS, **defaults | options)
    return out


class Asker:
    """An engine, asked as a page asks it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.engine = Engine(str(path), **options)
        self.run_id = "toy"
        self.close = self.engine.close

    def __call__(self, kind: str, **fields: Any) -> dict[str, Any]:
        return asyncio.run(self.ask(kind, **fields))

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        if kind not in ("overview", "sql"):
            fields["scope"] = {"run_id": self.run_id} | fields.get("scope", {})
        return unpacked(await self.engine.ask(json.dumps({"kind": kind, **fields}).encode()))


def unpacked(answer: bytes) -> dict[str, Any]:
    """The header of an answer, and its arrays in their shapes."""
    (length,) = struct.unpack_from("<I", answer)
    header = json.loads(answer[4 : 4 + length])
    place = 4 + length
    arrays: list[np.ndarray] = []
    for kind, shape in header["arrays"]:
        array = np.frombuffer(answer, kind, math.prod(shape), place).reshape(shape)
        arrays.append(array)
        place += -(-array.nbytes // 8) * 8
    return header | {"arrays": arrays}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("runs"), "toy", **CURVES)


@pytest.fixture(scope="module")
def compacted(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows, merged, with roll-ups."""
    path = copy_of(runs, tmp_path_factory.mktemp("compacted"))
    compact(RunDirectory.of(path, "toy"))
    return path


Opener = Callable[..., Asker]


@pytest.fixture
def open_at() -> Iterator[Opener]:
    with ExitStack() as opened:
        yield lambda path, **options: opened.enter_context(closing(Asker(path, **options)))


@pytest.fixture(scope="module")
def ask(runs: Path) -> Iterator[Asker]:
    with closing(Asker(runs)) as asker:
        yield asker


@pytest.fixture(scope="module")
def merged(compacted: Path) -> Iterator[Asker]:
    with closing(Asker(compacted)) as asker:
        yield asker


# What a query gives, in SQL over the files alone


@pytest.fixture(scope="module")
def files(runs: Path) -> Files:
    """The rows of the Parquet files, read without anything of ours."""
    connection = duckdb.connect()
    heads, sequences = (
        f"read_parquet('{runs}/*/{table}/*/*.parquet', hive_partitioning = true)"
        for table in ("heads", "sequences")
    )
    connection.execute(
        f"CREATE TABLE heads AS SELECT h.*, pile_set_name AS subset FROM {heads} AS h "
        f"JOIN {sequences} USING (intervention, sequence)"
    )
    return connection


HEAD = {"layer": 1, "head": 2}
CELLS_OF_MAP = (LAYERS, HEADS)
BRUSH = {"statistic": "value_norm", "first": 40, "last": BINS - 1}
"""Its end is open: the axis ends before the largest values do."""


class Oracle:
    """What a query gives: a method for each kind, of arrays, then of what the header says."""

    def __init__(self, files: Files, asked: dict[str, Any], axes: Any, every: int) -> None:
        """Of a sample, one of `every` sequences counts."""
        self.files, self.asked, self.axes = files, asked, axes
        self.statistic = asked.get("statistic")
        scope = asked.get("scope", {})
        subset = scope.get("subset", "").replace("'", "''")
        of_run = f"FROM heads WHERE intervention = '{scope.get('intervention', 'none')}'"
        self.of_subset = f" AND subset = '{subset}'" if subset else ""
        self.in_sample = f" AND sequence % {every} = 0"
        first, last = scope.get("layers", (0, LAYERS))
        layers = f"layer BETWEEN {first} AND {last}"
        self.of_scope = f"{of_run}{self.of_subset}{self.in_sample} AND {layers}"
        # The chosen layers do not hide a chosen head.
        self.of_head = f"{of_run}{self.of_subset}{self.in_sample} AND layer = 1 AND head = 2"

    def rows(self, sql: str) -> list[dict[str, Any]]:
        return self.files.sql(sql).to_arrow_table().to_pylist()

    def array(self, shape: tuple[int, ...], sql: str) -> np.ndarray:
        """The last column by all others, which are places. NULL is neither place nor number."""
        array = np.zeros(shape)
        for *place, number in self.files.execute(sql).fetchall():
            if None not in (*place, number):
                array[tuple(place)] = number
        return array

    def bin(self, name: str, bins: int = BINS) -> str:
        low, high = self.axes[name]
        number = f"floor(({name}::DOUBLE - {low}::DOUBLE) * {bins / (high - low)}::DOUBLE)"
        # Not `greatest`, which leaves NULL out.
        inside = f"WHEN {number} >= {bins} THEN {bins - 1} ELSE {number}"
        return f"(CASE WHEN {number} < 0 THEN 0 {inside} END)::INT"

    def in_brushes(self, but: str | None = None) -> str:
        """A brush filters every histogram but its own."""
        return "".join(
            f" AND {self.bin(brush['statistic'])} BETWEEN {brush['first']} AND {brush['last']}"
            for brush in self.asked.get("brushes", ())
            if brush["statistic"] not in (but, self.asked.get("active"))
        )

    def counts(self, statistic: str, rows: str, *keys: str) -> np.ndarray:
        bins = ", ".join([*keys, self.bin(statistic, DRAWN_BINS)])
        shape = (*[BINS] * len(keys), DRAWN_BINS)
        return self.array(shape, f"SELECT {bins}, count(*) {rows} GROUP BY ALL")

    def heatmap(self) -> tuple[Any, ...]:
        names = [self.statistic] if self.statistic else IN_ORDER
        keys, shape, rows = "layer, head", CELLS_OF_MAP, self.of_scope
        if "head" in self.asked:
            keys, shape, rows = "0, 0", (1, 1), self.of_head
        error = "stddev_samp({x}::DOUBLE) / sqrt(count({x}))"
        freedom = "CASE WHEN count({x}) > 1 THEN count({x}) - 1 END"
        means = ("avg({x})", error, "min({x})", "max({x})", freedom)
        counts = ("count({x})", "count({x})", "count(*) - count({x})")
        arrays = [np.full((len(names), *shape), math.nan) for _ in means]
        arrays += [np.zeros((len(names), *shape)) for _ in counts]
        for place, name in enumerate(names):
            columns = ", ".join(means + counts).format(x=name)
            sql = f"SELECT {keys}, {columns} {rows} GROUP BY ALL"
            for layer, head, *numbers in self.files.execute(sql).fetchall():
                for array, number in zip(arrays, numbers, strict=True):
                    array[place, layer, head] = number
        return *arrays, self.percentiles(arrays[0])

    @staticmethod
    def percentiles(means: np.ndarray) -> np.ndarray:
        """Percent of the other heads with a smaller mean."""
        percents = np.full(means.shape, math.nan)
        for of_heads, own in zip(means.astype(np.float32), percents, strict=True):
            others = of_heads[~np.isnan(of_heads)]
            for place in np.argwhere(~np.isnan(of_heads)) if len(others) > 1 else ():
                smaller = np.count_nonzero(others < of_heads[tuple(place)])
                own[tuple(place)] = 100 * smaller / (len(others) - 1)
        return percents

    def histograms(self) -> tuple[Any, ...]:
        names = self.asked["statistics"]
        rows = self.of_head if "head" in self.asked else self.of_scope
        return (np.array([self.counts(s, rows + self.in_brushes(s)) for s in names]),)

    def cube(self) -> tuple[Any, ...]:
        active, names = self.bin(self.asked["active"]), self.asked["statistics"]
        key, rows = "sequence", self.of_head
        if self.asked["meaning"] == "rows":
            key, rows = "sequence, layer, head", self.of_scope
        picked = f"(SELECT {key}, {active} AS active {rows}{self.in_brushes()})"
        joined = self.of_scope.replace("heads", f"heads JOIN {picked} USING ({key})", 1)
        numbers = f"({self.statistic}) {joined} GROUP BY ALL"
        sums_and_counts = (
            self.array((BINS, *CELLS_OF_MAP), f"SELECT active, layer, head, {of}{numbers}")
            for of in ("sum", "count")
        )
        return (
            np.array([self.counts(s, self.of_head + self.in_brushes(s), active) for s in names]),
            *sums_and_counts,
            self.array((BINS,), f"SELECT active, count(*) FROM {picked} GROUP BY ALL"),
            self.array((), f"SELECT count(*) {rows}"),
        )

    def summary(self, name: str) -> str:
        return (
            f"count({name}) AS count, avg({name}) AS mean, count({name}) AS documents, "
            f"stddev_samp({name}::DOUBLE) / sqrt(count({name})) AS standard_error"
        )

    def subsets(self) -> tuple[Any, ...]:
        rows = f"{self.of_head.replace(self.of_subset, '')} GROUP BY subset ORDER BY mean DESC"
        return (self.rows(f"SELECT subset, {self.summary(str(self.statistic))} {rows}"),)

    def extremes(self) -> tuple[Any, ...]:
        # Every sequence counts: a sample would lack the extremes.
        rows = self.of_head.replace(self.in_sample, "") + self.in_brushes()
        order = f"{self.statistic} {'ASC' if self.asked['lowest'] else 'DESC'}, sequence LIMIT 20"
        names = ", ".join(STATISTICS)
        sql = f"{rows} AND {self.statistic} IS NOT NULL ORDER BY {order}"
        return (self.rows(f"SELECT sequence, subset, {names}, NULL AS file, NULL AS row {sql}"),)


CUBE = {"kind": "cube", "active": "sink_mass", "statistic": "entropy", "statistics": STATISTICS[1:]}
QUERIES = [
    *({"kind": "heatmap", "statistic": name} for name in (*STATISTICS, None)),
    {"kind": "heatmap", "head": HEAD},
    {"kind": "histograms", "statistics": ["entropy"]},
    {"kind": "subsets", "head": HEAD, "statistic": "value_norm"},
    {"kind": "histograms", "head": HEAD, "statistics": STATISTICS, "brushes": [BRUSH]},
    # Its own brush is no condition: a cube has all ranges of it.
    CUBE
    | {"head": HEAD, "meaning": "sequences"}
    | {"brushes": [BRUSH, {"statistic": "sink_mass", "first": 0, "last": 9}]},
    CUBE | {"head": HEAD, "meaning": "rows", "brushes": [BRUSH]},
    *(
        {"kind": "extremes", "head": HEAD, "statistic": "entropy", "statistics": STATISTICS}
        | {"lowest": lowest, "brushes": [BRUSH]}
        for lowest in (False, True)
    ),
]
SAMPLED = {"histograms", "cube"}
SCOPES: list[dict[str, Any]] = [
    {},
    {"subset": "ArXiv", "layers": [0, 0]},
    {"intervention": "zero_key_bias", "subset": "<b>Books</b>", "layers": [0, 1]},
    {"subset": "' OR true --"},
]


async def hold_to_sql(
    ask: Asker, files: Files, scope: dict[str, Any], every: int = 1, sampled: set[str] = SAMPLED
) -> list[str]:
    """Ask every query and compare the answers. Returns the SQL that the page shows."""
    shown: list[str] = []
    for asked in QUERIES:
        answer = await ask.ask(**asked, scope=scope)
        kind = asked["kind"]
        if kind == "extremes":
            histograms = await ask.ask("histograms", head=HEAD, statistics=STATISTICS, scope=scope)
            answer["axes"] = histograms["axes"]
        every_of_kind = every if kind in sampled else 1
        oracle = Oracle(files, asked | {"scope": scope}, answer.get("axes"), every_of_kind)
        *arrays, last = getattr(oracle, kind)()
        if isinstance(last, list):
            assert answer["rows"] == [pytest.approx(row) for row in last], kind
        elif last.ndim == 0:
            assert answer["rows"] == last, kind
        else:
            arrays.append(last)
        for ours, theirs in zip(answer["arrays"], arrays, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=kind)
        shown += answer["sql"]
    return shown


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_every_query_gives_what_sql_gives(ask: Asker, files: Files, scope: dict[str, Any]) -> None:
    for sql in asyncio.run(hold_to_sql(ask, files, scope)):
        # Of these the one has no condition, and the other every condition.
        if scope in (SCOPES[0], SCOPES[2]):
            assert ask("sql", text=sql)["rows"], sql


@pytest.mark.parametrize("scope", [SCOPES[0], SCOPES[2]], ids=str)
def test_roll_ups_give_what_sql_gives_from_rows(
    merged: Asker, files: Files, scope: dict[str, Any]
) -> None:
    asyncio.run(hold_to_sql(merged, files, scope))
    assert merged("heatmap", statistic="entropy", scope=scope)["source"] == "rollups"


def test_changes_are_means_over_pairs(ask: Asker, merged: Asker) -> None:
    sql = (
        "SELECT layer, head, change, standard_error, pairs FROM effects "
        "WHERE statistic = 'value_norm' ORDER BY ALL"
    )
    rows = np.array(ask("sql", text=sql)["rows"])
    for asker in (ask, merged):
        scope = {"intervention": "zero_key_bias"}
        answer = asker("heatmap", statistic="value_norm", changes=True, scope=scope)
        mean, error, *_, count, _, _ = answer["arrays"]
        np.testing.assert_allclose(mean.ravel(), rows[:, 2])
        np.testing.assert_allclose(error.ravel(), rows[:, 3])
        assert count.ravel().tolist() == rows[:, 4].tolist()


@pytest.mark.parametrize(("declared", "ends", "axis"), [
    ((0, 1), (0.02, 0.9), (0, 1)),
    ((0, 1), (0.001, 0.0234), (0, 0.024)),
    ((0, None), (13.14159, 27.1828), (13, 28)),
    ((None, None), (-12.0, 40.0), (-12, 41)),
    ((0, None), (0.0, 0.0), (0, 0.1)),
    ((None, None), (None, None), (0, 1)),
])  # fmt: skip
def test_an_axis_has_round_ends_around_what_it_shows(declared: Any, ends: Any, axis: Any) -> None:
    assert axis_of(declared, *ends) == Axis(*map(float, axis))


def test_axes_from_a_large_sample_show_its_values(
    compacted: Path, open_at: Opener, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_facts, "AXIS_ROWS", ROWS // STRIDE)
    axes = open_at(compacted)("histograms", head=HEAD, statistics=STATISTICS)["axes"]
    for statistic, (low, high) in axes.items():
        ends = f"SELECT min({statistic}), max({statistic}) FROM heads WHERE intervention = 'none'"
        [(smallest, largest)] = files.execute(f"{ends} AND sequence % {STRIDE} = 0").fetchall()
        assert low <= smallest < largest <= high < 1.2 * largest


def test_the_overview_lists_runs_subsets_and_statistics(ask: Asker, merged: Asker) -> None:
    answer = ask("overview")
    (run,) = answer["runs"]
    expected = {"subsets": SUBSETS, "interventions": ["none", "zero_key_bias"], "complete": True}
    expected |= {"first_statistics": STATISTICS, "sequences_done": SEQUENCES, "every": 1}
    assert run == run | expected | {"has_rollups": False}
    assert merged("overview")["runs"][0]["has_rollups"]
    assert {row["name"] for row in answer["statistics"]} == set(STATISTICS)
    assert answer["damage"] == []


def test_curves_are_means_over_sequences_by_place(ask: Asker) -> None:
    lists = np.array([by_index(Row("none", one, 1, 2)) for one in range(SEQUENCES)])
    errors = pytest.approx(lists.std(axis=0, ddof=1) / SEQUENCES**0.5, rel=1e-4)
    # A profile is of all sequences, whatever subset of the Pile is chosen.
    answer = ask("curves", head=HEAD, scope={"subset": "ArXiv"})
    for sql, curve, axis in zip(answer["sql"], answer["rows"], ("lag", "key"), strict=True):
        assert (curve["axis"], curve["profiled"]) == (axis, axis == "lag")
        assert curve["profile"].endswith(f"by_{axis}")
        assert curve["meaning"]
        assert curve["indices"] == list(range(N_CTX))
        assert curve["values"] == pytest.approx(lists.mean(axis=0))
        assert curve["standard_errors"] == errors
        table = ask("sql", text=f"SELECT {axis}, mean FROM ({sql})")
        assert table["rows"] == [
            [place, pytest.approx(mean)] for place, mean in enumerate(curve["values"])
        ]


def test_a_damaged_profile_leaves_the_curve(runs: Path, tmp_path: Path, open_at: Opener) -> None:
    cut(copy_of(runs, tmp_path), "profiles/intervention=none/*00003.parquet")
    asker = open_at(tmp_path)
    lists = np.array([by_index(Row("none", one, 1, 2)) for one in range(3 * PER_SHARD)])
    means = pytest.approx(lists.mean(axis=0))
    assert [curve["values"] for curve in asker("curves", head=HEAD)["rows"]] == [means, means]
    (line,) = asker("overview")["damage"]
    assert "profiles/intervention=none" in line


def test_texts_without_a_model_are_token_numbers_with_marked_keys(ask: Asker) -> None:
    answer = ask("texts", sequences=[7, 3, 10**9], first=2)
    assert [row["sequence"] for row in answer["rows"]] == [7, 3]
    row = answer["rows"][0]
    assert (row["tokens"], row["n_tokens"], row["marked"]) == (["0", "1"], 5, [])
    assert answer["note"].startswith("token numbers are shown: model 'toy': ")
    (row,) = ask("texts", sequences=[7], first=2, statistic="sink_mass")["rows"]
    assert row["marked"] == [0]


def test_sql_of_the_user_is_cut_and_says_so(ask: Asker) -> None:
    answer = ask("sql", text="FROM range(5000)")
    assert (len(answer["rows"]), answer["has_more"]) == (MOST_ROWS, True)
    answer = ask("sql", text="SELECT repeat('x', 5000) AS x, 'nan'::DOUBLE AS y, 2::HUGEINT ** 70")
    ((long, undefined, large),) = answer["rows"]
    assert (len(long), undefined) == (1001, "nan")
    assert large == (2.0**70 if isinstance(large, float) else str(2**70))


SINKS = {"kind": "heatmap", "statistic": "sink_mass"}
BEYOND = {"statistic": "entropy", "first": 0, "last": 128}
ENTROPIES = {"kind": "extremes", "head": HEAD, "statistic": "entropy", "statistics": ["entropy"]}
HISTOGRAMS = {"kind": "histograms", "head": HEAD}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "heatmap", "statistic": "sink_mas"}, "did you mean 'sink_mass'"),
    ({"kind": "heatmap", "statistic": 'x" FROM y --'}, "unknown statistic"),
    (SINKS | {"scope": {"run_id": "x' OR 1"}}, "unknown run"),
    (SINKS | {"scope": {"intervention": "';--"}}, "unknown intervention"),
    ({"kind": "curves", "head": {"layer": 2, "head": 0}}, "heads L0H0 to L1H2"),
    ({"kind": "curves", "head": {"layer": 0, "head": 3}}, "heads L0H0 to L1H2"),
    ({"kind": "curves", "head": {"layer": -1, "head": 0}}, "expected 0 or more, got -1"),
    ({"kind": "curves", "head": {"layer": "0; x", "head": 0}}, "valid integer"),
    ({"kind": "cube"}, "head: Field required"),
    ({"kind": "texts", "sequences": [1, 2], "heads": [HEAD]}, "one for each of 2 sequences, got 1"),
    ({"kind": "drop", "table": "heads"}, "does not match any of the expected tags"),
    (SINKS | {"sql": "x"}, "Extra inputs"),
    (HISTOGRAMS | {"statistics": []}, "statistics: expected 1 or more items, got"),
    (HISTOGRAMS | {"statistics": ["entropy"] * 13}, "statistics: expected at most 12 items, got"),
    ({"kind": "texts", "sequences": list(range(21))}, "sequences: expected at most 20 items, got"),
    (ENTROPIES | {"brushes": [BEYOND]}, "last: expected less than 128, got 128"),
]


@pytest.mark.parametrize(("query", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_a_run_does_not_have_is_refused(ask: Asker, query: dict[str, Any], why: str) -> None:
    with one_line(QueryError, why):
        ask(**query)


# The engine

ENDLESS = "SELECT count(*) FROM range(100000000) a, range(100000) b"
RECURSIVE = "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x) SELECT max(n) FROM x"


@pytest.mark.parametrize("endless", [ENDLESS, pytest.param(RECURSIVE, marks=pytest.mark.long)])
def test_an_endless_query_is_given_up_and_the_next_answered_at_once(
    runs: Path, open_at: Opener, endless: str
) -> None:
    ask = open_at(runs, deadline=1.0)
    with pytest.raises(QueryError, match=r"stopped after 1 s"):
        ask("sql", text=endless)
    assert ask("sql", text="SELECT 1 AS one")["rows"] == [[1]]


def test_closing_stops_what_is_being_answered(runs: Path) -> None:
    asker = Asker(runs)

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asker.ask("sql", text=ENDLESS)), 0.1)

    asyncio.run(leave())
    began = time.monotonic()
    asker.close()
    assert not asker.engine._running
    assert time.monotonic() - began < 5


def test_a_query_nobody_waits_for_is_interrupted(
    ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows are compared with their commits before the first query that reads them.
    ask("histograms", **SINK_HISTOGRAM)
    monkeypatch.setattr(page_runs, "where", lambda _: f" WHERE ({ENDLESS}) > 0")
    ask.engine.runs._axes.clear()
    # No test before this one has asked for it.
    query = {"statistics": ["sink_mass"], "scope": {"subset": "ArXiv", "layers": [0, 1]}}
    interrupted = ask.engine.interrupted
    forgotten_errors: list[dict[str, Any]] = []

    async def hang_up() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: forgotten_errors.append(context))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask.ask("histograms", **query), 0.1)
        # The thread is free again: the interrupt has reached DuckDB.
        while ask.engine._running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        gc.collect()

    began = time.monotonic()
    asyncio.run(hang_up())
    assert time.monotonic() - began < 5
    assert (ask.engine.interrupted, forgotten_errors) == (interrupted + 1, [])
    monkeypatch.undo()
    assert ask("histograms", **query)["arrays"][0].sum() == SEQUENCES // 2 * LAYERS * HEADS


def test_a_query_asked_twice_is_computed_once(ask: Asker) -> None:
    scope = {"run_id": ask.run_id, "subset": "ArXiv", "layers": [1, 1]}
    query = json.dumps({"kind": "heatmap", "statistic": "value_norm", "scope": scope}).encode()

    async def ask_twice() -> list[bytes]:
        return await asyncio.gather(*(ask.engine.ask(query) for _ in range(2)))

    first, second = asyncio.run(ask_twice())
    # Not only equal: the second waits for the answer to the first.
    assert first is second


# News and damage


def copy_of(runs: Path, to: Path) -> Path:
    return shutil.copytree(runs, to, dirs_exist_ok=True)


def cut(runs: Path, files: str) -> None:
    file = next(runs.glob(f"run_id=toy/{files}"))
    file.write_bytes(file.read_bytes()[:100])


def sink_count(asker: Asker, **fields: Any) -> int:
    """Sequences that the heatmap of sinks counts of a head."""
    return asker("heatmap", statistic="sink_mass", **fields)["arrays"][5][0, 0, 0]


def test_a_page_sees_new_commits(runs: Path, tmp_path: Path, open_at: Opener) -> None:
    # A replica writes data files first and the commit last.
    for later in copy_of(runs, tmp_path).glob("*/commits/*[123].json"):
        later.unlink()
    asker = open_at(tmp_path, fresh_seconds=0)

    def shown() -> tuple[bool, int, int, int]:
        """What the overview and a heatmap say, and their revision."""
        answer, overview = asker("heatmap", statistic="sink_mass"), asker("overview")
        (run,) = overview["runs"]
        count = answer["arrays"][5][0, 0, 0]
        return run["complete"], run["sequences_done"], count, overview["revision"]

    *before, revision = shown()
    assert before == [False, PER_SHARD, PER_SHARD]
    assert asker("overview")["damage"] == []
    # Nothing was committed: the answers stay.
    assert shown() == (*before, revision)
    copy_of(runs, tmp_path)
    # The page asks for the news, then for what they change.
    asker("overview")
    *after, other_revision = shown()
    assert after == [True, SEQUENCES, SEQUENCES]
    assert other_revision != revision


def test_a_cut_file_leaves_every_answer(runs: Path, tmp_path: Path, open_at: Opener) -> None:
    asker = open_at(copy_of(runs, tmp_path))
    assert sink_count(asker) == SEQUENCES
    cut(tmp_path, "heads/intervention=none/*00001.parquet")
    assert sink_count(asker, scope={"layers": [0, 1]}) == SEQUENCES - PER_SHARD
    (line,) = asker("overview")["damage"]
    assert "is left out of every view" in line
    shutil.rmtree(tmp_path / "run_id=toy")
    with one_line(HeadcountError):
        asker("heatmap", statistic="entropy")


# Samples of large runs

STRIDE = 16
"""One of so many sequences is a sample of so small a run."""

SINK_HISTOGRAM = {"head": HEAD, "statistics": ["sink_mass"]}


def let_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_facts, "LARGE_RUN_ROWS", ROWS - 1)


is_large = pytest.fixture(let_be_large)


@pytest.fixture
def large_copy(compacted: Path, tmp_path: Path, open_at: Opener, is_large: None) -> Asker:
    """A large run whose files a test may change."""
    return open_at(copy_of(compacted, tmp_path), fresh_seconds=0)


def tables_of_samples(asker: Asker) -> int:
    sql = "SELECT count(*) FROM duckdb_tables() WHERE regexp_matches(table_name, '^sample_[0-9]')"
    # Past the views, which a question about the database itself would make and describe.
    return asker.engine.runs.database.connection.execute(sql).fetchall()[0][0]


def sampled(asker: Asker) -> int:
    """How many sequences a histogram counts, which must say that they are a sample."""
    asker.engine.cache.clear()
    answer = asker("histograms", **SINK_HISTOGRAM)
    assert answer["every"] == STRIDE
    return answer["arrays"][0].sum()


@pytest.mark.usefixtures("is_large")
def test_a_large_run_without_a_sample_is_read_in_part_and_says_so(
    runs: Path, open_at: Opener, files: Files
) -> None:
    asker = open_at(runs)
    everything = {str(asked["kind"]) for asked in QUERIES} - {"extremes"}
    asyncio.run(hold_to_sql(asker, files, {}, STRIDE, everything))
    assert asker("overview")["runs"][0]["every"] == STRIDE
    assert tables_of_samples(asker) == 0


@pytest.mark.usefixtures("is_large")
def test_a_merged_sample_is_its_rows(
    compacted: Path, runs: Path, open_at: Opener, files: Files
) -> None:
    large, unmerged = open_at(compacted), open_at(runs)
    asyncio.run(hold_to_sql(large, files, SCOPES[2], STRIDE))
    for scope in (SCOPES[0], SCOPES[2]):
        query = SINK_HISTOGRAM | {"scope": scope}
        answers = [asker("histograms", **query) for asker in (large, unmerged)]
        assert answers[0]["sql"] == answers[1]["sql"]
    assert tables_of_samples(large) == 2
    assert large.engine.interrupted == 0


def test_a_sample_is_read_again_after_damage(large_copy: Asker) -> None:
    path = Path(large_copy.engine.path)
    assert sampled(large_copy) == len(range(0, SEQUENCES, STRIDE))
    cut(path, MERGED.replace("heads", "samples"))
    large_copy("overview")
    # Its rows are there.
    assert sampled(large_copy) == len(range(0, SEQUENCES, STRIDE))
    (line,) = large_copy("overview")["damage"]
    assert line.endswith(f"headcount compact {path / 'run_id=toy'} writes it again")
    cut(path, MERGED)
    large_copy("overview")
    # So few are read without a sample.
    assert large_copy("histograms", **SINK_HISTOGRAM)["arrays"][0].sum() == LEFT


def test_a_sample_is_compared_with_its_commit_before_it_is_read(large_copy: Asker) -> None:
    path = Path(large_copy.engine.path)
    flip_middle_bit(next(path.glob(f"run_id=toy/{MERGED.replace('heads', 'samples')}")))
    assert sampled(large_copy) == len(range(0, SEQUENCES, STRIDE))
    first, second = (large_copy("overview") for _ in range(2))
    assert len(first["damage"]) == 1
    # Damage that is known is no news.
    assert first["revision"] == second["revision"]


def test_a_file_that_changes_before_the_sample_is_read_leaves_it(large_copy: Asker) -> None:
    asyncio.run(large_copy.engine.look_again(rows=True))
    before = large_copy.engine.runs
    # Compared with its commit already: only reading it shows that it has changed.
    cut(Path(large_copy.engine.path), MERGED.replace("heads", "samples"))
    assert sampled(large_copy) == len(range(0, SEQUENCES, STRIDE))
    assert large_copy.engine.runs is not before


@pytest.mark.usefixtures("is_large")
def test_what_was_measured_after_a_merge_is_in_the_sample(
    runs: Path, tmp_path: Path, open_at: Opener
) -> None:
    late = "*-000001.*"
    for file in copy_of(runs, tmp_path).glob(f"run_id=toy/commits/{late}"):
        file.unlink()
    compact(RunDirectory.of(tmp_path, "toy"))
    copy_of(runs, tmp_path)
    assert tables_of_samples(asker := open_at(tmp_path)) == 0
    assert sampled(asker) == len(range(0, SEQUENCES, STRIDE))
    compact(RunDirectory.of(tmp_path, "toy"))
    assert sampled(asker := open_at(tmp_path)) == len(range(0, SEQUENCES, STRIDE))
    assert tables_of_samples(asker) == 1
