"""The explorer's queries give what numpy gives. Its engine keeps time and sees changes."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import shutil
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from headcount.jobs.upkeep.compaction import compact
from headcount.queries.explore import opened, sample
from headcount.queries.explore.axes import BINS, DRAWN_BINS, Axis, axis_of
from headcount.queries.explore.opened import AXIS_ROWS
from headcount.queries.explore.query_engine import MOST_ROWS, Engine
from headcount.schemas.errors import HeadcountError, QueryError
from headcount.schemas.files.run_directory import RunDirectory
from tests.toys.toy_runs import Entry, Row, write_run

LAYERS, HEADS, SEQUENCES, PER_SHARD, N_CTX = 2, 3, 35, 10, 5
PARTS = ["<b>Books</b>", "ArXiv"]
STATISTICS = ["sink_mass", "entropy", "value_norm"]


def sink_mass(row: Row) -> float:
    return (row.sequence * 7 + row.layer * 3 + row.head * 5) % 11 / 11


def entropy(row: Row) -> float | None:
    return None if row.sequence % 10 == 3 else (row.sequence * 5 + row.head) % 7 / 2


def value_norm(row: Row) -> float:
    untouched = row.sequence * 1.5 + row.layer
    return untouched if row.intervention == "none" else 2 * untouched


CELLS: dict[str, Callable[[Row], float | None]] = {
    "sink_mass": sink_mass,
    "entropy": entropy,
    "value_norm": value_norm,
}


def by_index(row: Row) -> list[float]:
    """A profile of a head in one sequence."""
    return [index + row.layer + sink_mass(row) for index in range(N_CTX)]


def profile_rows(shard: int) -> list[Entry]:
    """What a shard has of `attention_by_lag`, which is averaged over its sequences."""
    sequences = range(SEQUENCES)[shard * PER_SHARD : (shard + 1) * PER_SHARD]
    entries: list[Entry] = []
    for layer, head in np.ndindex(LAYERS, HEADS):
        lists = np.array([by_index(Row("none", one, layer, head)) for one in sequences])
        for lag, numbers in enumerate(lists.T):
            place = {"profile": "attention_by_lag", "layer": layer, "head": head, "lag": lag}
            m2 = ((numbers - numbers.mean()) ** 2).sum()
            entries.append({**place, "count": len(numbers), "mean": numbers.mean(), "m2": m2})
    return entries


CURVES = {"profiles": profile_rows, "curves": {"attention_received_by_key": by_index}}
"""Options of a run with a profile and with a curve."""


def write(out: Path, name: str, **options: Any) -> Path:
    options = {"sequences": SEQUENCES, "per_shard": PER_SHARD, "family": "pile"} | options
    interventions = ("none", "zero_key_bias")
    options = {"pile_sets": PARTS, "interventions": interventions} | options
    write_run(out, name, CELLS, **options)
    return out


def values(statistic: str, layer: int, head: int, intervention: str = "none") -> np.ndarray:
    """A statistic of a head by sequence, NaN where it is undefined."""
    numbers = [
        CELLS[statistic](Row(intervention, sequence, layer, head)) for sequence in range(SEQUENCES)
    ]
    return np.array(numbers, np.float32).astype(float)


def bins_of(numbers: np.ndarray, axis: list[float], bins: int = BINS) -> np.ndarray:
    """The bin of each value, -1 where it is undefined."""
    low, high = axis
    found = np.clip(np.floor((numbers - low) * (bins / (high - low))), 0, bins - 1)
    return np.where(np.isnan(numbers), -1, found).astype(int)


IS_ARXIV = np.arange(SEQUENCES) % 2 == 1


class Asker:
    """An engine, asked as a page asks it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.engine = Engine(str(path), **options)
        self.run_id = "toy"

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
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    asker = Asker(write(tmp_path_factory.mktemp("runs"), "toy", **CURVES))
    yield asker
    asker.engine.close()


HEAD = {"layer": 1, "head": 2}


@pytest.mark.parametrize(
    ("declared", "ends", "axis"),
    [
        ((0, 1), (0.02, 0.9), (0, 1)),
        ((0, 1), (0.001, 0.0234), (0, 0.024)),
        ((0, None), (13.14159, 27.1828), (13, 28)),
        ((None, None), (-12.0, 40.0), (-12, 41)),
        ((0, None), (0.0, 0.0), (0, 0.1)),
        ((None, None), (None, None), (0, 1)),
    ],
)
def test_an_axis_has_round_ends_around_what_it_shows(
    declared: tuple[float | None, float | None],
    ends: tuple[float | None, float | None],
    axis: tuple[float, float],
) -> None:
    assert axis_of(declared, *ends) == Axis(*map(float, axis))


def test_the_overview_lists_runs_parts_and_statistics(ask: Asker) -> None:
    answer = ask("overview")
    (run,) = answer["runs"]
    assert run["parts"] == PARTS
    assert run["interventions"] == ["none", "zero_key_bias"]
    assert run["first_statistics"] == STATISTICS
    assert (run["complete"], run["sequences_done"], run["every"]) == (True, SEQUENCES, 1)
    assert {row["name"] for row in answer["statistics"]} == set(STATISTICS)
    assert answer["damage"] == []


@pytest.mark.parametrize(
    ("scope", "chosen"),
    [
        ({}, np.ones(SEQUENCES, bool)),
        ({"part": "ArXiv"}, IS_ARXIV),
        ({"intervention": "zero_key_bias", "part": "<b>Books</b>"}, ~IS_ARXIV),
    ],
)
def test_a_heatmap_is_the_mean_of_every_head(
    ask: Asker, scope: dict[str, str], chosen: np.ndarray
) -> None:
    for statistic in STATISTICS:
        means, counts = ask("heatmap", scope=scope, statistic=statistic)["arrays"]
        for layer in range(LAYERS):
            for head in range(HEADS):
                intervention = scope.get("intervention", "none")
                own = values(statistic, layer, head, intervention)[chosen]
                assert means[layer, head] == pytest.approx(np.nanmean(own))
                assert counts[layer, head] == (~np.isnan(own)).sum()


def test_layers_that_are_not_chosen_are_empty(ask: Asker) -> None:
    means, counts = ask("heatmap", scope={"layers": [1, 1]}, statistic="sink_mass")["arrays"]
    assert np.isnan(means[0]).all()
    assert not np.isnan(means[1]).any()
    assert counts.tolist() == [[0] * HEADS, [SEQUENCES] * HEADS]


def test_histograms_count_every_defined_value(ask: Asker) -> None:
    answer = ask("histograms", head=HEAD, statistics=STATISTICS, scope={"part": "ArXiv"})
    (counts,) = answer["arrays"]
    for index, statistic in enumerate(STATISTICS):
        bins = bins_of(values(statistic, 1, 2)[IS_ARXIV], answer["axes"][statistic], DRAWN_BINS)
        expected = np.bincount(bins[bins >= 0], minlength=DRAWN_BINS)
        assert counts[index].tolist() == expected.tolist()


def test_a_background_is_of_all_heads(ask: Asker) -> None:
    answer = ask("background", statistic="entropy", scope={"layers": [0, 0]})
    every = np.concatenate([values("entropy", 0, head) for head in range(HEADS)])
    bins = bins_of(every, answer["axes"]["entropy"], DRAWN_BINS)
    expected = np.bincount(bins[bins >= 0], minlength=DRAWN_BINS)
    assert answer["arrays"][0].tolist() == expected.tolist()
    assert answer["undefined"] == np.isnan(every).sum() > 0


BRUSH = {"statistic": "value_norm", "first": 40, "last": BINS - 1}
"""Its end is open: the axis ends before the largest values do."""


def in_brush(axes: dict[str, list[float]], layer: int, head: int) -> np.ndarray:
    bins = bins_of(values("value_norm", layer, head), axes["value_norm"])
    return (bins >= BRUSH["first"]) & (bins <= BRUSH["last"])


def test_a_brush_filters_every_histogram_but_its_own(ask: Asker) -> None:
    answer = ask("histograms", head=HEAD, statistics=STATISTICS, brushes=[BRUSH])
    (counts,) = answer["arrays"]
    picked = in_brush(answer["axes"], 1, 2)
    assert 0 < picked.sum() < SEQUENCES
    for index, statistic in enumerate(STATISTICS):
        own = values(statistic, 1, 2)
        rows = own if statistic == "value_norm" else own[picked]
        bins = bins_of(rows, answer["axes"][statistic], DRAWN_BINS)
        assert counts[index].tolist() == np.bincount(bins[bins >= 0], minlength=64).tolist()


@pytest.mark.parametrize("meaning", ["sequences", "rows"])
def test_a_cube_knows_what_every_range_of_a_brush_shows(ask: Asker, meaning: str) -> None:
    answer = ask(
        "cube",
        head=HEAD,
        active="sink_mass",
        statistic="entropy",
        statistics=["entropy", "value_norm"],
        brushes=[BRUSH],
        meaning=meaning,
    )
    counts, sums, defined, picked_rows = answer["arrays"]
    assert answer["rows"] == SEQUENCES * (LAYERS * HEADS if meaning == "rows" else 1)
    axes = answer["axes"]
    for first, last in ((0, BINS - 1), (12, 70), (64, BINS - 1)):
        own_bins = bins_of(values("sink_mass", 1, 2), axes["sink_mass"])
        in_range = (own_bins >= first) & (own_bins <= last)
        picked = in_range & in_brush(axes, 1, 2)
        for index, statistic in enumerate(["entropy", "value_norm"]):
            # A brush does not filter its own histogram.
            rows = values(statistic, 1, 2)[in_range if statistic == "value_norm" else picked]
            bins = bins_of(rows, axes[statistic], DRAWN_BINS)
            expected = np.bincount(bins[bins >= 0], minlength=DRAWN_BINS)
            assert counts[index, first : last + 1].sum(0).tolist() == expected.tolist()
        all_picked = 0
        for layer in range(LAYERS):
            for head in range(HEADS):
                if meaning == "rows":
                    bins = bins_of(values("sink_mass", layer, head), axes["sink_mass"])
                    picked = (bins >= first) & (bins <= last) & in_brush(axes, layer, head)
                all_picked = picked.sum() + (all_picked if meaning == "rows" else 0)
                entropies = values("entropy", layer, head)[picked]
                total = sums[first : last + 1, layer, head].sum()
                assert total == pytest.approx(np.nansum(entropies))
                count = defined[first : last + 1, layer, head].sum()
                assert count == (~np.isnan(entropies)).sum()
        assert picked_rows[first : last + 1].sum() == all_picked > 0


def test_a_card_has_every_statistic_of_a_head(ask: Asker) -> None:
    rows = {row["statistic"]: row for row in ask("card", head=HEAD)["rows"]}
    for statistic in STATISTICS:
        own = values(statistic, 1, 2)
        own = own[~np.isnan(own)]
        row = rows[statistic]
        assert row["count"] == len(own)
        assert row["mean"] == pytest.approx(own.mean())
        assert row["standard_error"] == pytest.approx(own.std(ddof=1) / len(own) ** 0.5)
        assert (row["minimum"], row["maximum"]) == pytest.approx((own.min(), own.max()))
    assert rows["sink_mass"]["uniform_baseline"] == 0.25
    assert rows["value_norm"]["uniform_baseline"] is None


def test_parts_have_a_mean_each(ask: Asker) -> None:
    rows = {row["part"]: row for row in ask("parts", head=HEAD, statistic="value_norm")["rows"]}
    assert rows.keys() == set(PARTS)
    own = values("value_norm", 1, 2)
    assert rows["ArXiv"]["mean"] == pytest.approx(own[IS_ARXIV].mean())
    assert rows["<b>Books</b>"]["count"] == (~IS_ARXIV).sum()


def test_curves_are_means_over_sequences_by_place(ask: Asker) -> None:
    lists = np.array([by_index(Row("none", one, 1, 2)) for one in range(SEQUENCES)])
    # A profile is of all sequences, whatever subset of the Pile is chosen.
    answer = ask("curves", head=HEAD, scope={"part": "ArXiv"})
    averaged, kept = answer["rows"]
    for curve, axis in ((averaged, "lag"), (kept, "key")):
        assert (curve["axis"], curve["profiled"]) == (axis, axis == "lag")
        assert curve["profile"].endswith(f"by_{axis}")
        assert curve["meaning"]
        assert curve["indices"] == list(range(N_CTX))
        assert curve["values"] == pytest.approx(lists.mean(axis=0))
        errors = lists.std(axis=0, ddof=1) / SEQUENCES**0.5
        assert curve["standard_errors"] == pytest.approx(errors, rel=1e-4)
    for sql, curve in zip(answer["sql"], answer["rows"], strict=True):
        table = ask("sql", text=f"SELECT {curve['axis']}, mean FROM ({sql})")
        places, means = zip(*table["rows"], strict=True)
        assert list(places) == curve["indices"]
        assert means == pytest.approx(curve["values"])


def test_a_damaged_profile_leaves_the_curve(tmp_path: Path) -> None:
    write(tmp_path, "toy", **CURVES)
    file = next(tmp_path.glob("*/profiles/intervention=none/*00003.parquet"))
    file.write_bytes(file.read_bytes()[:100])
    asker = Asker(tmp_path)
    lists = np.array([by_index(Row("none", one, 1, 2)) for one in range(3 * PER_SHARD)])
    averaged, kept = asker("curves", head=HEAD)["rows"]
    assert averaged["values"] == pytest.approx(lists.mean(axis=0))
    assert kept["values"] == pytest.approx(lists.mean(axis=0))
    (line,) = asker("overview")["damage"]
    assert "profiles/intervention=none" in line
    asker.engine.close()


@pytest.mark.parametrize("lowest", [False, True])
def test_extremes_are_the_first_sequences_in_order(ask: Asker, lowest: bool) -> None:
    rows = ask(
        "extremes",
        head=HEAD,
        statistic="entropy",
        statistics=STATISTICS,
        brushes=[BRUSH],
        lowest=lowest,
    )["rows"]
    axes = ask("histograms", head=HEAD, statistics=["value_norm"])["axes"]
    own = values("entropy", 1, 2)
    candidates = np.flatnonzero(in_brush(axes, 1, 2) & ~np.isnan(own))
    order = sorted(candidates, key=lambda i: (own[i] if lowest else -own[i], i))[:20]
    assert [row["sequence"] for row in rows] == order
    assert [row["entropy"] for row in rows] == own[order].tolist()
    assert rows[0]["part"] == PARTS[order[0] % 2]


def test_texts_without_a_model_are_token_numbers_and_say_so(ask: Asker) -> None:
    answer = ask("texts", sequences=[7, 3, 10**9], first=2)
    assert [row["sequence"] for row in answer["rows"]] == [7, 3]
    assert answer["rows"][0]["tokens"] == ["0", "1"]
    assert answer["rows"][0]["n_tokens"] == 5
    assert answer["rows"][0]["marked"] == []
    assert answer["note"].startswith("token numbers are shown: model 'toy': ")


def test_the_keys_that_a_statistic_is_about_are_marked(ask: Asker) -> None:
    answer = ask("texts", sequences=[7], first=2, statistic="sink_mass")
    assert answer["rows"][0]["marked"] == [0]


def test_every_panel_shows_sql_that_gives_its_numbers(ask: Asker) -> None:
    (sql,) = ask("heatmap", statistic="sink_mass", scope={"part": "ArXiv"})["sql"]
    answer = ask("sql", text=sql)
    assert answer["columns"] == ["layer", "head", "mean", "count"]
    assert len(answer["rows"]) == LAYERS * HEADS


def test_sql_of_the_user_is_cut_and_says_so(ask: Asker) -> None:
    answer = ask("sql", text="FROM range(5000)")
    assert (len(answer["rows"]), answer["has_more"]) == (MOST_ROWS, True)
    answer = ask("sql", text="SELECT repeat('x', 5000) AS x, 'nan'::DOUBLE AS y, 2::HUGEINT ** 70")
    ((long, undefined, large),) = answer["rows"]
    assert len(long) == 1001
    assert (undefined, large) == ("nan", 2.0**70 if isinstance(large, float) else str(2**70))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "heatmap", "statistic": "sink_mas"}, "did you mean 'sink_mass'"),
    ({"kind": "heatmap", "statistic": 'x" FROM y --'}, "unknown statistic"),
    ({"kind": "heatmap", "statistic": "sink_mass", "scope": {"run_id": "x' OR 1"}}, "unknown run"),
    (
        {"kind": "heatmap", "statistic": "sink_mass", "scope": {"intervention": "';--"}},
        "unknown intervention",
    ),
    ({"kind": "card", "head": {"layer": 2, "head": 0}}, "heads L0H0 to L1H2"),
    ({"kind": "card", "head": {"layer": -1, "head": 0}}, "expected 0 or more, got -1"),
    ({"kind": "card", "head": {"layer": "0; x", "head": 0}}, "valid integer"),
    ({"kind": "card"}, "head: Field required"),
    ({"kind": "drop", "table": "heads"}, "does not match any of the expected tags"),
    ({"kind": "heatmap", "statistic": "sink_mass", "sql": "x"}, "Extra inputs"),
    (
        {"kind": "histograms", "head": HEAD, "statistics": []},
        "statistics: expected 1 or more items, got",
    ),
    (
        {"kind": "histograms", "head": HEAD, "statistics": ["entropy"] * 13},
        "statistics: expected at most 12 items, got",
    ),
    ({"kind": "texts", "sequences": list(range(21))}, "sequences: expected at most 20 items, got"),
    (
        {
            "kind": "extremes",
            "head": HEAD,
            "statistic": "entropy",
            "statistics": ["entropy"],
            "brushes": [{"statistic": "entropy", "first": 0, "last": 128}],
        },
        "last: expected less than 128, got 128",
    ),
]


@pytest.mark.parametrize(("query", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_a_run_does_not_have_is_refused_in_one_line(
    ask: Asker, query: dict[str, Any], why: str
) -> None:
    with pytest.raises(QueryError, match=why) as refusal:
        ask(**query)
    assert "\n" not in str(refusal.value)


def test_a_hostile_part_is_a_part_without_sequences(ask: Asker) -> None:
    part = "' OR true --"
    means, counts = ask("heatmap", statistic="sink_mass", scope={"part": part})["arrays"]
    assert np.isnan(means).all()
    assert counts.sum() == 0


def test_closing_stops_what_is_being_answered(ask: Asker) -> None:
    asker = Asker(Path(ask.engine.path))

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asker.ask("sql", text=ENDLESS)), 0.1)

    asyncio.run(leave())
    began = time.monotonic()
    asker.engine.close()
    assert not asker.engine._running
    assert time.monotonic() - began < 5


# The engine

ENDLESS = "SELECT count(*) FROM range(100000000) a, range(100000) b"


def timed(asking: Callable[[], Coroutine[Any, Any, None]]) -> float:
    """Seconds that something takes."""
    began = time.monotonic()
    asyncio.run(asking())
    return time.monotonic() - began


RECURSIVE = "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x) SELECT max(n) FROM x"


@pytest.mark.parametrize("endless", [ENDLESS, RECURSIVE])
def test_an_endless_query_is_given_up_and_the_next_answered_at_once(
    ask: Asker, monkeypatch: pytest.MonkeyPatch, endless: str
) -> None:
    monkeypatch.setattr(ask.engine, "deadline", 0.1)
    with pytest.raises(QueryError, match=r"stopped after 0\.1 s"):
        ask("sql", text=endless)
    monkeypatch.setattr(ask.engine, "deadline", 20.0)
    assert ask("sql", text="SELECT 1 AS one")["rows"] == [[1]]


def test_a_query_of_the_page_that_nobody_waits_for_is_interrupted(
    ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows are compared with their commits before the first query that reads them.
    ask("histograms", head=HEAD, statistics=["sink_mass"])
    monkeypatch.setattr(opened, "where", lambda _: f" WHERE ({ENDLESS}) > 0")
    ask.engine.runs._axes.clear()
    interrupted = ask.engine.interrupted
    scope = {"part": "ArXiv"}
    forgotten_errors: list[dict[str, Any]] = []

    async def hang_up() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: forgotten_errors.append(context))
        query = ask.ask("background", statistic="sink_mass", scope=scope)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(query, 0.1)
        # The thread is free again: the interrupt has reached DuckDB.
        while ask.engine._running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        gc.collect()

    assert timed(hang_up) < 5
    assert ask.engine.interrupted == interrupted + 1
    assert forgotten_errors == []
    monkeypatch.undo()
    assert ask("background", statistic="sink_mass", scope=scope)["undefined"] == 0


def test_one_query_asked_twice_at_once_is_computed_once(ask: Asker) -> None:
    computed: list[object] = []
    compute = ask.engine._compute

    async def counted(*arguments: Any) -> Any:
        computed.append(arguments)
        return await compute(*arguments)

    async def ask_twice() -> list[dict[str, Any]]:
        query = {"statistic": "value_norm", "scope": {"part": "ArXiv", "layers": [0, 0]}}
        return list(await asyncio.gather(*(ask.ask("heatmap", **query) for _ in range(2))))

    ask.engine._compute = counted  # type: ignore[method-assign]
    first, second = asyncio.run(ask_twice())
    del ask.engine._compute
    assert np.array_equal(first["arrays"][1], second["arrays"][1])
    assert len(computed) == 1


def test_a_page_sees_what_is_committed_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headcount.queries.explore.query_engine.FRESH_SECONDS", 0)
    write(tmp_path / "whole", "toy")
    write(tmp_path / "runs", "toy", commit=[0])
    asker = Asker(tmp_path / "runs")
    before = asker("heatmap", statistic="sink_mass")
    (run,) = asker("overview")["runs"]
    assert (run["complete"], run["sequences_done"]) == (False, 10)
    # Nothing was committed: the answers stay.
    assert asker("overview")["revision"] == before["revision"]
    shutil.rmtree(tmp_path / "runs")
    shutil.copytree(tmp_path / "whole", tmp_path / "runs")
    (run,) = asker("overview")["runs"]
    assert (run["complete"], run["sequences_done"]) == (True, SEQUENCES)
    after = asker("heatmap", statistic="sink_mass")
    assert after["revision"] != before["revision"]
    assert (before["arrays"][1][0, 0], after["arrays"][1][0, 0]) == (10, SEQUENCES)
    asker.engine.close()


def test_a_file_that_is_truncated_under_the_page_leaves_every_answer(tmp_path: Path) -> None:
    write(tmp_path, "toy")
    asker = Asker(tmp_path)
    assert asker("heatmap", statistic="sink_mass")["arrays"][1][0, 0] == SEQUENCES
    file = next(tmp_path.glob("*/heads/intervention=none/*00001.parquet"))
    file.write_bytes(file.read_bytes()[:100])
    answer = asker("heatmap", statistic="sink_mass", scope={"layers": [0, 1]})
    assert answer["arrays"][1][0, 0] == SEQUENCES - 10
    (line,) = asker("overview")["damage"]
    assert "is left out of every view" in line
    shutil.rmtree(tmp_path / "run_id=toy")
    with pytest.raises(HeadcountError) as error:
        asker("heatmap", statistic="entropy")
    assert "\n" not in str(error.value)
    asker.engine.close()


def test_a_compacted_run_answers_from_its_roll_ups(tmp_path: Path, ask: Asker) -> None:
    write(tmp_path, "toy")
    compact(RunDirectory.of(tmp_path, "toy"))
    merged = Asker(tmp_path)
    (run,) = merged("overview")["runs"]
    assert run["has_rollups"]
    for scope in ({}, {"part": "ArXiv", "layers": [1, 1]}):
        query = {"statistic": "entropy", "scope": scope}
        from_rollups = merged("heatmap", **query)
        from_rows = ask("heatmap", **query)
        assert (from_rollups["source"], from_rows["source"]) == ("rollups", "rows")
        for rolled_up, plain in zip(from_rollups["arrays"], from_rows["arrays"], strict=True):
            assert rolled_up == pytest.approx(plain, nan_ok=True)
        for kind in ("card", "parts"):
            query = {"scope": scope, "head": HEAD}
            if kind == "parts":
                query["statistic"] = "value_norm"
            pairs = zip(merged(kind, **query)["rows"], ask(kind, **query)["rows"], strict=True)
            for rolled_up, plain in pairs:
                assert rolled_up == {
                    name: value if isinstance(value, str | None) else pytest.approx(value)
                    for name, value in plain.items()
                }
    merged.engine.close()


def test_axes_from_roll_ups_hold_the_values(tmp_path: Path, ask: Asker) -> None:
    write(tmp_path, "toy")
    compact(RunDirectory.of(tmp_path, "toy"))
    merged = Asker(tmp_path)
    query = {"head": HEAD, "statistics": STATISTICS}
    from_rollups = merged("histograms", **query)["axes"]
    from_rows = ask("histograms", **query)["axes"]
    for statistic in STATISTICS:
        low, high = from_rows[statistic]
        # A bin on an open axis is 4.4 % of the value, and ends are round.
        assert from_rollups[statistic] == pytest.approx([low, high], abs=0.1 * (high - low))
        every = np.concatenate([values(statistic, *cell) for cell in np.ndindex(LAYERS, HEADS)])
        assert from_rollups[statistic][0] <= np.nanmin(every)
        assert from_rollups[statistic][1] >= np.nanmax(every)
    merged.engine.close()


def test_rows_are_compared_with_commits_when_a_query_reads_them(tmp_path: Path) -> None:
    write(tmp_path, "toy")
    compact(RunDirectory.of(tmp_path, "toy"))
    file = next(tmp_path.glob("*/heads/intervention=none/*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(100) + content[104:])
    merged = Asker(tmp_path)
    # Its roll-ups are whole. They are shown before anybody has read 12 GB of rows.
    assert merged("heatmap", statistic="sink_mass")["arrays"][1][0, 0] == SEQUENCES
    assert merged("overview")["damage"] == []
    (counts,) = merged("histograms", head=HEAD, statistics=["sink_mass"])["arrays"]
    assert not counts.any()
    (line,) = merged("overview")["damage"]
    assert "is left out of every view" in line
    merged.engine.close()


def test_a_large_run_is_sampled_and_says_so(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SEQUENCES * LAYERS * HEADS
    monkeypatch.setattr(opened, "LARGE_RUN_ROWS", rows - 1)
    monkeypatch.setattr(opened, "SAMPLE_ROWS", rows // 3)
    asker = Asker(Path(ask.engine.path))
    answer = asker("histograms", head=HEAD, statistics=["sink_mass"])
    assert answer["every"] == 3
    assert answer["arrays"][0].sum() == len(range(0, SEQUENCES, 3))
    # The most extreme sequences are looked for among all.
    extremes = asker("extremes", head=HEAD, statistic="value_norm", statistics=["value_norm"])
    assert [row["sequence"] for row in extremes["rows"]] == list(range(34, 14, -1))
    assert rows < AXIS_ROWS
    asker.engine.close()


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asker]:
    """A merged run that counts as large: one of three sequences is a sample."""
    rows = SEQUENCES * LAYERS * HEADS
    monkeypatch.setattr(opened, "LARGE_RUN_ROWS", rows - 1)
    monkeypatch.setattr(sample, "SAMPLE_ROWS", rows // 3)
    write(tmp_path, "toy")
    compact(RunDirectory.of(tmp_path, "toy"))
    asker = Asker(tmp_path)
    yield asker
    asker.engine.close()


async def until_sample_is_read(asker: Asker, intervention: str = "none") -> None:
    until = time.monotonic() + 20
    while asker.engine.runs.lacks_sample((asker.run_id, intervention)):
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


IN_SAMPLE = np.arange(0, SEQUENCES, 3)


def test_histograms_come_from_roll_ups_until_the_sample_is_in_memory(large: Asker) -> None:
    query = {"head": HEAD, "statistics": STATISTICS}

    async def ask_before_and_after() -> list[dict[str, Any]]:
        before = await large.ask("histograms", **query)
        await until_sample_is_read(large)
        return [before, await large.ask("histograms", **query)]

    before, after = asyncio.run(ask_before_and_after())
    assert (before["source"], before["every"]) == ("rollups", 3)
    assert ("source" in after, after["every"]) == (False, 3)
    for index, statistic in enumerate(STATISTICS):
        numbers = values(statistic, HEAD["layer"], HEAD["head"])
        # Every value counts, and the mean of the picture is within a bin of theirs.
        low, high = before["axes"][statistic]
        counts = before["arrays"][0][index]
        assert counts.sum() == (~np.isnan(numbers)).sum()
        width = (high - low) / DRAWN_BINS
        middles = low + width * (np.arange(DRAWN_BINS) + 0.5)
        tolerance = width + 0.05 * np.nanmax(numbers)
        assert (counts * middles).sum() / counts.sum() == pytest.approx(
            np.nanmean(numbers), abs=tolerance
        )
        bins = bins_of(numbers[IN_SAMPLE], after["axes"][statistic], DRAWN_BINS)
        exact = np.bincount(bins[bins >= 0], minlength=DRAWN_BINS)
        assert after["arrays"][0][index].tolist() == exact.tolist()


@pytest.mark.parametrize("scope", [{}, {"part": "ArXiv"}, {"layers": [1, 1]}], ids=str)
def test_a_sample_in_memory_answers_as_its_rows_do(large: Asker, scope: dict[str, Any]) -> None:
    brush = {"statistic": "value_norm", "first": 10, "last": 90}
    cube = {
        "head": HEAD,
        "active": "entropy",
        "statistic": "sink_mass",
        "statistics": ["sink_mass", "value_norm"],
        "brushes": [brush],
    }
    queries: list[tuple[str, dict[str, Any]]] = [
        ("histograms", {"head": HEAD, "statistics": STATISTICS, "brushes": [brush]}),
        ("cube", cube | {"meaning": "sequences"}),
        ("cube", cube | {"meaning": "rows"}),
        ("background", {"statistic": "entropy"}),
    ]

    async def answers() -> list[dict[str, Any]]:
        return [await large.ask(kind, scope=scope, **fields) for kind, fields in queries]

    async def answers_from_memory() -> list[dict[str, Any]]:
        await large.ask("background", statistic="sink_mass")
        await until_sample_is_read(large)
        return await answers()

    from_memory = asyncio.run(answers_from_memory())
    # The same rows, read from files.
    large.engine.runs.give_up_sample((large.run_id, "none"))
    large.engine.cache.clear()
    from_rows = asyncio.run(answers())
    assert large.engine.interrupted == 0
    for in_memory, in_files in zip(from_memory, from_rows, strict=True):
        assert in_memory["sql"] == in_files["sql"]
        for ours, theirs in zip(in_memory["arrays"], in_files["arrays"], strict=True):
            assert theirs.any()
            assert ours == pytest.approx(theirs)


def test_a_coarse_picture_of_a_part_is_of_that_part(large: Asker) -> None:
    query = {"head": HEAD, "statistics": ["sink_mass"], "scope": {"part": "ArXiv"}}
    answer = large("histograms", **query)
    assert answer["source"] == "rollups"
    assert answer["arrays"][0].sum() == IS_ARXIV.sum()
    background = large("background", statistic="sink_mass", scope={"layers": [1, 1]})
    assert background["arrays"][0].sum() == SEQUENCES * HEADS


def test_samples_make_room_for_those_that_are_asked_for(
    large: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "MOST_SAMPLES", 1)

    async def counts(intervention: str) -> np.ndarray:
        scope = {"intervention": intervention}
        query = {"head": HEAD, "statistics": ["value_norm"], "scope": scope}
        await large.ask("histograms", **query)
        await until_sample_is_read(large, intervention)
        return (await large.ask("histograms", **query))["arrays"][0]

    async def both() -> list[np.ndarray]:
        return [await counts("none"), await counts("zero_key_bias"), await counts("none")]

    first, changed, again = asyncio.run(both())
    assert first.sum() == changed.sum() == len(IN_SAMPLE)
    assert first.tolist() == again.tolist() != changed.tolist()
    (run,) = large("overview")["runs"]
    assert run["waits_for_sample"] == ["zero_key_bias"]
    sql = "SELECT count(*) FROM duckdb_tables() WHERE table_name LIKE 'sample_%'"
    assert large.engine.runs.database.rows(sql) == [(1,)]


def test_a_sample_is_as_small_as_the_memory_for_queries(tmp_path: Path) -> None:
    sizes = {}
    for memory in ("100MB", "200MB", "100GB"):
        connection = duckdb.connect(config={"memory_limit": memory})
        sizes[memory] = sample.rows_in_memory(connection, statistics=24)
    assert sizes["200MB"] == pytest.approx(2 * sizes["100MB"], rel=1e-3)
    assert sizes["100MB"] * (24 * 4) < 100e6 / 4
    assert sizes["100GB"] == sample.SAMPLE_ROWS


def test_a_sample_is_read_again_after_damage(large: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headcount.queries.explore.query_engine.FRESH_SECONDS", 0)
    query = {"head": HEAD, "statistics": ["sink_mass"]}

    async def sampled_counts() -> int:
        await large.ask("histograms", **query)
        await until_sample_is_read(large)
        return int((await large.ask("histograms", **query))["arrays"][0].sum())

    async def before_and_after() -> list[int]:
        before = await sampled_counts()
        root = Path(large.engine.path)
        file = next(root.glob("*/heads/intervention=none/*.parquet"))
        file.write_bytes(file.read_bytes()[:100])
        await large.ask("overview")
        return [before, await sampled_counts()]

    assert asyncio.run(before_and_after()) == [len(IN_SAMPLE), 0]


def test_a_file_that_changes_while_the_sample_is_read_leaves_it(large: Asker) -> None:
    query = {"head": HEAD, "statistics": ["sink_mass"]}
    may_read = threading.Event()

    async def counts() -> int:
        await large.engine.look_again(rows=True)
        large.engine.sample_thread.submit(may_read.wait)
        await large.ask("histograms", **query)
        # Compared with its commit already: only reading it shows that it has changed.
        file = next(Path(large.engine.path).glob("*/heads/intervention=none/*.parquet"))
        file.write_bytes(file.read_bytes()[:100])
        may_read.set()
        await until_sample_is_read(large)
        return int((await large.ask("histograms", **query))["arrays"][0].sum())

    before = large.engine.runs
    assert asyncio.run(counts()) == 0
    assert large.engine.runs is not before
