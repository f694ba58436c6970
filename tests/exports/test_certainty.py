"""How sure lists are: errors against the views', tests under simulation, halves of documents."""

from pathlib import Path

import duckdb
import numpy as np
import pytest

from headcount.exports.formats import export_formats
from headcount.exports.shared.certainty import (
    LARGEST_Q,
    MARGIN,
    DocumentSums,
    half_of,
    stability_of,
)
from headcount.exports.shared.source import ExportSource
from headcount.queries.ask.asking import open_runs
from headcount.queries.open.base_views import MACROS
from headcount.schemas.significance import p_above, q_of
from tests.toys.commands import error_of
from tests.toys.toy_models import family
from tests.toys.toy_runs import Cell, write_run


def source_of(runs: Path) -> ExportSource:
    database = open_runs(runs)
    (run,) = database.records("FROM runs")
    return ExportSource(database, run, export_formats()["razor"], {}, runs / "file")


def test_means_and_errors_of_documents_are_those_of_the_views(tmp_path: Path):
    columns: dict[str, Cell] = {
        "induction_score": lambda row: (row.sequence % 5) / 8 + row.layer / 4 + row.head / 16
    }
    documents = (1, 1, 1, 2, 3, 3, 4, 5, 5)
    write_run(tmp_path, "a-1", columns, sequences=9, documents=documents)
    source = source_of(tmp_path)
    scores = source.scores("induction_score")
    sums = source.sums("induction_score")
    assert sums.documents == 5
    assert sorted(sums.numbers) == [1, 1, 2, 2, 3]
    rows = source.database.rows(
        "SELECT layer, head, mean, standard_error, documents, degrees_of_freedom "
        "FROM head_summaries"
    )
    for layer, head, mean, error, number, freedom in rows:
        assert number == 5
        # Σ n_d² = 19 and Σ n_d⁴ = 115, of nine sequences.
        assert freedom == sums.degrees_of_freedom == pytest.approx((1 - 19 / 81) * 19**2 / 115)
        assert scores.means[layer, head] == pytest.approx(mean, abs=1e-15)
        assert scores.errors[layer, head] == pytest.approx(error, rel=1e-12)
        # What uniform attention would score is 1/4 in every sequence of a toy.
        assert scores.excess[layer, head] == pytest.approx(mean - 0.25, abs=1e-15)


def test_a_half_is_of_whole_documents_and_shares_none_with_the_other(tmp_path: Path):
    columns: dict[str, Cell] = {"induction_score": lambda row: 2.0**-row.sequence}
    write_run(tmp_path, "a-1", columns, sequences=6, documents=(1, 1, 2, 3, 3, 4))
    source = source_of(tmp_path)
    for split in range(5):
        halves = [source.half(split, half).sums("induction_score") for half in (0, 1)]
        totals = np.concatenate([half.totals[:, 0, 0] for half in halves])
        # Every document once, whole: 1 + 1/2, 1/4, 1/8 + 1/16, 1/32.
        assert sorted(totals) == [1 / 32, 3 / 16, 1 / 4, 3 / 2]
        assert [half.documents for half in halves] == [2, 2]
    # An odd document is in neither.
    assert sum(half_of(5, 0, half).sum() for half in (0, 1)) == 4
    assert not (half_of(5, 0, 0) & half_of(5, 0, 1)).any()


def test_stability_is_the_jaccard_index_of_what_two_halves_choose():
    same = stability_of(lambda split, half: [1, 2, 3], 10)
    assert (same.median, same.lowest, same.highest, same.verdict) == (1, 1, 1, "stable")
    # One of three is shared, in every second split.
    some = stability_of(lambda split, half: [1, 2 + half * (split % 2)], 10)
    assert (some.median, some.lowest, some.highest) == (pytest.approx(2 / 3), 1 / 3, 1)
    assert some.verdict == "unstable"
    # What no half finds was not found again.
    assert stability_of(lambda split, half: [], 10).median == 0


def test_q_is_that_of_benjamini_and_hochberg():
    # The example of their paper (1995), section 3.2: at 0.05, the four smallest of fifteen.
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262,
         0.5719, 0.6528, 0.7590, 1.0000]  # fmt: skip
    shuffled = np.random.default_rng(0).permutation(15)
    q = q_of(np.array(p)[shuffled])[np.argsort(shuffled)]
    assert (q <= 0.05).tolist() == [True] * 4 + [False] * 11
    assert q[3] == pytest.approx(0.0095 * 15 / 4)
    assert (np.diff(q) >= 0).all()
    # Layers that do not attend are no tests.
    two = q_of(np.array([[0.01, np.nan], [0.02, np.nan]]))
    np.testing.assert_array_equal(two, [[0.02, np.nan], [0.02, np.nan]])


def test_p_is_that_of_the_views():
    connection = duckdb.connect()
    connection.execute(MACROS.read_text())
    t = np.array([[-3.0, 0, 0.25, 1, 2.5, 6, 40]])
    for freedom in (1, 2, 8, 32, 1024):
        p = p_above(t, np.ones(t.shape), freedom, 0)[0]
        tails = ", ".join(f"student_tail({abs(x)}, {freedom}.0)" for x in t[0])
        [two_sided] = connection.execute(f"SELECT {tails}").fetchall()
        expected = [two_sided[0] / -2 + 1, *(value / 2 for value in two_sided[1:])]
        np.testing.assert_allclose(p, expected, rtol=1e-9)


def test_documents_that_all_say_the_same_need_no_spread():
    same, zero = np.array([[0.5, 0.05, 0.0]]), np.zeros((1, 3))
    assert p_above(same, zero, 4, MARGIN).tolist() == [[0, 1, 1]]
    # One document says nothing of others.
    alone = DocumentSums(np.full((1, 1, 3), 0.5), np.ones(1))
    assert np.isnan(p_above(alone.means, alone.errors, 1, MARGIN)).all()


@pytest.mark.long
def test_of_the_heads_in_a_list_one_in_twenty_is_false():
    """Documents of one to three sequences, which agree with one another; of 40 heads 30 are null,
    at the very border of what is no choice.
    """
    draw = np.random.default_rng(4)
    documents, heads, nulls = 32, 40, 30
    truth = np.r_[np.full(nulls, 0.05), np.full(heads - nulls, 0.35)]
    shares: list[float] = []
    found = 0
    for _ in range(2000):
        numbers = draw.integers(1, 4, documents).astype(float)
        of_document = draw.normal(0, 0.3, (documents, 1, heads))
        noise = draw.normal(0, 0.3, (documents, 1, heads)) * np.sqrt(numbers)[:, None, None]
        totals = numbers[:, None, None] * (truth + of_document) + noise
        sums = DocumentSums(totals, numbers)
        p = p_above(sums.means, sums.errors, sums.degrees_of_freedom, MARGIN)
        chosen = (q_of(p) <= LARGEST_Q)[0]
        shares.append(chosen[:nulls].sum() / max(chosen.sum(), 1))
        found += int(chosen[nulls:].sum())
    # Benjamini and Hochberg promise q times the share of nulls: 0.05 · 30/40.
    assert np.mean(shares) == pytest.approx(0.0375, abs=0.01)
    assert found / (2000 * (heads - nulls)) > 0.9


@pytest.mark.long
@pytest.mark.parametrize("config", ["GPT2Config", "LlamaConfig"])
@pytest.mark.parametrize(
    "name",
    [
        "razor",
        "duo",
        "headkv",
        "retrieval-heads",
        "minference",
        "qfilters",
        "qrhead",
        "important-heads",
    ],
)
def test_random_weights_get_no_list(name: str, config: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    sizes = {"n_positions": 256, "max_position_embeddings": 256}
    model = AutoModelForCausalLM.from_config(family(config, **sizes))
    model.save_pretrained(tmp_path / "model")
    words = [name, tmp_path / "runs", "--model", tmp_path / "model", "-o", tmp_path / "list"]
    sizes = ["--set", "n_ctx=160", "--set", "sequences=32"]
    assert "no head of run" in error_of("export", *words, *sizes)
    assert not (tmp_path / "list").exists()
