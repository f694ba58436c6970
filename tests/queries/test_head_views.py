"""The views of inactive heads and of attention to the first keys, against direct computation."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.workers.model.info.description import find_model
from tests.toys.toy_runs import Cell, Entry, ask, write_run

# All queries here go through `run_query`, which makes the views that they name.

COLUMNS = [
    "sink_alpha", "entropy", "head_output_norm", "head_output_norm_last", "sink_value_norm",
    "value_norm", "head_result_norm",
]  # fmt: skip
Inactive = tuple[Any, dict[str, np.ndarray]]
QUANTILES = [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.toys import toy_models as toy

    return toy.save_model(tmp_path_factory.mktemp("gpt2") / "toy", toy.gpt2())


def open_new_run(out: Path, model: Path, **changes: Any) -> RunDatabase:
    from tests.toys.runs_here import measure_here

    fields = {"model": str(model), "out": str(out), "n_ctx": 21, "sequences": 7, "seed": 3}
    fields |= {"input": {"family": "uniform_random"}, "statistics": COLUMNS}
    measure_here(fields | {"sequences_per_shard": 4} | changes)
    return open_runs(str(out))


def scores_of(database: RunDatabase) -> dict[str, list[float]]:
    """The values of each score, by layer, sequence and head."""
    values = "list(value ORDER BY layer, sequence, head)"
    return dict(ask(database, f"SELECT score, {values} FROM inactive_scores GROUP BY score"))


# Inactive heads


@pytest.fixture(scope="module")
def inactive(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Inactive:
    """A run of the toy model, and its scores by the definitions of Sandoval-Segura et al.:
    `[layer sequence head]`.
    """
    database = open_new_run(tmp_path_factory.mktemp("inactive"), gpt2, bos=False)
    rows = ask(database, f"SELECT {', '.join(COLUMNS)} FROM heads ORDER BY layer, sequence, head")
    columns = np.array(rows).T.reshape(len(COLUMNS), 3, 7, 4)
    names = ["AWFT", "AEQD", "AHON", "FTVVN", "AVVN", "FullHeadOutput"]
    plain = dict(zip(names, [columns[i] for i in (0, 1, 2, 4, 5, 6)], strict=True))
    normalised = {
        f"{name} (LN)": score / score.mean(-1, keepdims=True) for name, score in plain.items()
    }
    last, average = columns[3], plain["AHON"]
    # What DuckDB's `md5_number_lower` gives, as a number from 0 to 1.
    drawn = np.empty(last.shape)
    for layer, sequence, head in np.ndindex(*last.shape):
        digest = hashlib.md5(f"{sequence} {layer} {head}".encode()).digest()
        drawn[layer, sequence, head] = int.from_bytes(digest[8:], "little") / 2**64
    return database, plain | normalised | {
        "LTHON": last,
        "LTHON (LN)": last / average.mean(-1, keepdims=True),
        "LTHON (HN)": last / average,
        "Random": drawn,
    }


def test_inactive_scores_equal_their_definitions(inactive: Inactive) -> None:
    database, expected = inactive
    of_score = scores_of(database)
    ends = dict(ask(database, "SELECT DISTINCT score, inactive FROM inactive_scores"))
    assert len(of_score) == 16
    assert of_score.keys() == expected.keys()
    for score, values in expected.items():
        assert ends[score] == ("above" if score in ("AWFT", "AWFT (LN)") else "below")
        found = of_score[score]
        np.testing.assert_allclose(found, values.ravel(), rtol=1e-5, atol=1e-5, err_msg=score)


def test_flags_shares_and_overlaps_follow_from_the_scores(inactive: Inactive) -> None:
    database, _ = inactive
    scores = scores_of(database)
    shares: dict[tuple[str, float], list[tuple[float, ...]]] = {}
    columns = "score, quantile, inactive_share, threshold, sequences"
    sql = f"SELECT {columns} FROM inactive_heads ORDER BY layer, head"
    for score, quantile, *row in ask(database, sql):
        shares.setdefault((score, quantile), []).append(tuple(row))
    flags: dict[tuple[str, float], np.ndarray] = {}
    for score, values in scores.items():
        for quantile in QUANTILES:
            above = score.startswith("AWFT")
            threshold = np.quantile(values, 1 - quantile if above else quantile)
            passed = np.array(values) > threshold if above else np.array(values) < threshold
            flags[score, quantile] = passed.reshape(3, 7, 4)
            expected = [(share, threshold, 7) for share in flags[score, quantile].mean(1).ravel()]
            np.testing.assert_allclose(shares[score, quantile], expected, rtol=1e-9)
    assert shares.keys() == flags.keys()
    assert not any(flags[score, 0].any() for score in scores)
    assert {flags[score, 0.25].sum() for score in scores} == {21}
    columns = "score, other_score, quantile, n, other_n, n_both, iou"
    overlaps = ask(database, f"SELECT {columns} FROM inactive_overlap")
    assert len(overlaps) == 16 * 16 * 6
    for score, other, quantile, *counts, iou in overlaps:
        own, others = flags[score, quantile], flags[other, quantile]
        both = (own & others).sum()
        assert counts == [own.sum(), others.sum(), both]
        assert iou == pytest.approx(both / (own | others).sum())


def test_scores_without_columns_are_left_out(tmp_path: Path) -> None:
    # Heads 0, 1, 2 give 0.1, 0.2 and 0.3, in both layers and all sequences.
    write_run(tmp_path, "a-1", {"sink_alpha": lambda row: (row.head + 1) / 10})
    cells: dict[str, Cell] = {
        "value_norm": lambda row: 0.0,
        "entropy": lambda row: row.sequence + 1.0,
    }
    write_run(tmp_path, "b-1", cells)
    database = open_runs(str(tmp_path))
    scores = "SELECT run_id, list(DISTINCT score ORDER BY score) FROM inactive_scores GROUP BY 1"
    # A layer without any length has no mean to be compared with.
    assert dict(ask(database, scores)) == {
        "a-1": ["AWFT", "AWFT (LN)", "Random"],
        "b-1": ["AEQD", "AEQD (LN)", "AVVN", "Random"],
    }
    of_scores = "FROM inactive_scores WHERE score = 'AWFT (LN)' ORDER BY ALL"
    query = f"SELECT DISTINCT head, value {of_scores}"
    np.testing.assert_allclose(ask(database, query), [(0, 0.5), (1, 1), (2, 1.5)], atol=1e-6)
    # A third of the numbers are 0.3, so the threshold is that, and nothing is above it.
    of_layer = "WHERE score = 'AWFT' AND quantile = 0.3 AND layer = 1 ORDER BY ALL"
    query = f"SELECT head, inactive_share FROM inactive_heads {of_layer}"
    assert ask(database, query) == [(0, 0), (1, 0), (2, 0)]
    of_entropy = "WHERE score = 'AEQD' AND quantile = 0.25"
    query = f"SELECT DISTINCT threshold FROM inactive_heads {of_entropy}"
    assert ask(database, query) == [(1.75,)]
    nothing = write_run(tmp_path / "none", "a-1", {"sink_alpha": lambda row: 0.5}, commit=[])
    database = open_runs(nothing.path)
    for view in ("scores", "flags", "heads", "overlap"):
        assert ask(database, f"FROM inactive_{view}") == []
    assert ask(database, "FROM first_keys") == []


# The last queries and the first keys


def test_first_keys_of_a_scan_equal_their_definitions(tmp_path: Path) -> None:
    path, n_ctx = find_model("bundled:gpt2-mini"), 100
    sizes = {"n_ctx": n_ctx, "sequences": 3, "sequences_per_shard": 1}
    database = open_new_run(tmp_path, path, profiles=["tail_attention_by_key"], **sizes)
    query = "SELECT mean FROM profiles ORDER BY shard, layer, head, key"
    tails = np.array(ask(database, query)).reshape(3, 3, 8, n_ctx)
    uniform = np.tril(np.ones((n_ctx, n_ctx)) / np.arange(1, n_ctx + 1)[:, None])[-64:].mean(0)
    expected = {f"first_{k}": tails[..., :k].sum(-1) for k in (1, 4, 8)}
    expected |= {f"boost_{k}": tails[..., :k].sum(-1) / uniform[:k].sum() for k in (1, 4, 8)}
    expected |= {"peak_key": tails.argmax(-1), "peak_mass": tails.max(-1)}
    expected["tail_entropy"] = -(tails * np.log(tails + 1e-300)).sum(-1) / math.log(n_ctx)
    for name, values in expected.items():
        found = ask(database, f"SELECT {name} FROM first_keys ORDER BY shard, layer, head")
        close = {"rtol": 1e-5, "atol": 1e-5, "err_msg": name}
        np.testing.assert_allclose(np.ravel(found), values.ravel(), **close)


def tail_profile(head: int, masses: dict[int, float], n_ctx: int) -> list[Entry]:
    entry = {"layer": 0, "head": head, "profile": "tail_attention_by_key", "count": 1, "m2": 0.0}
    return [entry | {"key": key, "mean": masses.get(key, 0.0)} for key in range(n_ctx)]


def test_classes_of_heads(tmp_path: Path) -> None:
    n_ctx = 10
    heads = [
        ({3: 0.625, 9: 0.375}, "strong_sink"),
        # Half is not more than half.
        ({0: 0.25, 3: 0.25, 9: 0.5}, "moderate"),
        (dict.fromkeys(range(2, 10), 0.125) | {2: 0.125, 3: 0.0625, 4: 0.1875}, "distributed"),
        ({3: 0.125, 9: 0.875}, "recency"),
        # Key 8 is not beyond 0.8 T.
        ({3: 0.125, 8: 0.875}, "mixed"),
    ]
    entries = [
        entry
        for head, (masses, _) in enumerate(heads)
        for entry in tail_profile(head, masses, n_ctx)
    ]
    cells: dict[str, Cell] = {"sink_alpha": lambda row: 0.5}
    write_run(tmp_path, "a-1", cells, n_ctx=n_ctx, heads=5, profiles=lambda shard: entries)
    database = open_runs(str(tmp_path))
    columns = "head_class, peak_key, peak_mass"
    classes = ask(database, f"SELECT {columns} FROM first_keys WHERE shard = 1 ORDER BY head")
    peaks = [(3, 0.625), (9, 0.5), (4, 0.1875), (9, 0.875), (8, 0.875)]
    assert classes == [(name, *peak) for (_, name), peak in zip(heads, peaks, strict=True)]
    harmonic = sum(1 / (q + 1) for q in range(n_ctx)) / n_ctx
    query = "SELECT boost_1, first_8 FROM first_keys WHERE shard = 0 AND head = 1"
    assert ask(database, query) == [(pytest.approx(0.25 / harmonic), 0.5)]


def test_uniform_attention_is_the_published_expectation(tmp_path: Path) -> None:
    """The columns uniform_first_1, 4 and 8 of attention-sink-profiler, which a boost divides by."""
    entries = tail_profile(0, {0: 1.0}, 64)
    cells: dict[str, Cell] = {"sink_alpha": lambda row: 0.5}
    write_run(tmp_path, "a-1", cells, n_ctx=64, heads=1, profiles=lambda shard: entries)
    query = "SELECT 1 / boost_1, 1 / boost_4, 1 / boost_8 FROM first_keys WHERE shard = 0"
    expected = [(0.0741232954, 0.2287848482, 0.3782542201)]
    np.testing.assert_allclose(ask(open_runs(str(tmp_path)), query), expected, rtol=1e-7)
