"""Every example of docs/guide/sql.md has an answer, and keeps runs and interventions apart."""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from tests import ROOT
from tests.toys.toy_runs import Cell, Row, write_run

Array = np.ndarray
N_CTX = 9


class Measured(NamedTuple):
    database: RunDatabase
    tokens: Array
    """`[sequence pos]`."""
    patterns: Array
    """By the model's own library: `[sequence layer head query key]`."""

    def records(self, sql: str, **condition: str) -> list[dict[str, Any]]:
        """The rows of an answer that are of this run, and fulfil other conditions."""
        return [
            row
            for row in self.database.records(sql)
            if row["run_id"].startswith("gpt2")
            and all(row[name] == value for name, value in condition.items())
        ]


PAGE = ROOT / "docs" / "guide" / "sql.md"
BEFORE, KEYS_AND_TOKENS, AFTER = PAGE.read_text(encoding="utf-8").partition("## Keys and tokens")
OF_STATISTICS, OF_MORE = (
    re.findall(r"```sql\n(.*?)```", part, flags=re.DOTALL) for part in (BEFORE, AFTER)
)
SQL_EXAMPLES = [*OF_STATISTICS, *OF_MORE]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> RunDatabase:
    path = tmp_path_factory.mktemp("runs")

    def value(row: Row) -> float:
        place = row.sequence * 31 + row.layer * 7 + row.head * 3 + len(row.intervention)
        return place * 0.37 % 1

    # The runs differ in entropy, so an example that mixes them gives other rows.
    entropies: dict[str, Cell] = {"a-1": lambda row: 3 * value(row) ** 2, "b-2": value}
    for name, entropy in entropies.items():
        write_run(
            path, name, {"sink_mass": value, "entropy": entropy}, heads=6, sequences=8,
            interventions=("none", "zero_query_bias"), pile_sets=("Github", "ArXiv"), family="pile",
        )  # fmt: skip
    return open_runs(path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Runs with curves, profiles, predictions and weight statistics, of a toy GPT-2 and of one that
    differs in the size of a coordinate.
    """
    import torch
    from transformers import GPT2LMHeadModel

    from tests.toys import toy_models as toy
    from tests.toys.runs_here import measure_here

    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.wpe.weight"][0, 5] = 90
        weights["transformer.h.0.mlp.c_proj.weight"][:] = 0

    path = tmp_path_factory.mktemp("measured")
    model = toy.save_model(path / "models" / "gpt2", toy.gpt2())
    other = path / "models" / "other"
    toy.copy_of(model, other, lambda to: toy.change_weights(to, enlarge))
    profiles = ("attention_by_pair", "attention_received_by_key", "sink_resid_post_by_dimension")
    for each in (model, other):
        fields = {
            "model": str(each), "out": str(path / "runs"), "n_ctx": N_CTX, "sequences": 5,
            "sequences_per_shard": 2, "bos": False,
            "input": {"family": "uniform_random", "high": 7},
            "statistics": ["sink_mass", "entropy", "resid_post_spread", "resid_post_spread_share"],
            "predictions": ["losses"], "profiles": list(profiles),
            "curves": ["attention_received_by_key", "sink_attention_by_query"],
            "weight_statistics": ["key_composition", "first_effective_position"],
        }  # fmt: skip
        measure_here(fields, each.name)
    database = open_runs(path / "runs")
    sql = "SELECT tokens FROM sequences WHERE run_id[:4] = 'gpt2' ORDER BY sequence"
    tokens = np.array([tokens for (tokens,) in database.rows(sql)])
    gpt2: Any = GPT2LMHeadModel.from_pretrained(model, attn_implementation="eager").eval()
    with torch.inference_mode():
        output = gpt2(torch.from_numpy(tokens).long(), output_attentions=True)
    return Measured(database, tokens, torch.stack(output.attentions, 1).double().numpy())


@pytest.mark.parametrize("sql", SQL_EXAMPLES, ids=lambda sql: sql.split("\n")[0][:50])
def test_examples_mix_nothing(database: RunDatabase, measured: Measured, sql: str) -> None:
    runs = database if sql in OF_STATISTICS else measured.database
    answer = run_query(runs, sql)
    rows = list(answer.rows())
    assert rows
    # These are about columns, not about rows of a run.
    if "FROM statistics" in sql or "SUMMARIZE" in sql:
        return
    assert "run_id" in answer.schema.names
    assert "intervention" in answer.schema.names or "intervention = 'none'" in sql or "none" in sql


# What the page says of keys and tokens, against the patterns of the model's own library


def test_attention_by_token_is_the_sum_over_pairs(measured: Measured) -> None:
    _, tokens, patterns = measured
    rows = measured.records("attention_by_token", label="L1H2")
    groups = {(row["token"], row["first"]) for row in rows}
    assert groups == {(t, k == 0) for text in tokens.tolist() for k, t in enumerate(text)}
    total = 0.0
    for row in rows:
        keys = [
            (i, k)
            for i, text in enumerate(tokens.tolist())
            for k, token in enumerate(text)
            if (token, k == 0) == (row["token"], row["first"])
        ]
        received = [patterns[i, 1, 2, k:, k] for i, k in keys]
        uniform = [1 / (q + 1) for _, k in keys for q in range(k, N_CTX)]
        together = np.concatenate(received)
        assert row == row | {
            "keys": len(keys),
            "attention": pytest.approx(together.mean(), rel=1e-5),
            "uniform_baseline": pytest.approx(np.mean(uniform), rel=1e-9),
            "attention_ratio": pytest.approx(row["attention"] / row["uniform_baseline"]),
            "sink_keys": np.mean([values.mean() > 0.3 for values in received]),
            "share": pytest.approx(together.sum() / tokens.size, rel=1e-5),
        }
        total += row["share"]
    assert total == pytest.approx(1)


def test_bars_of_keys_have_the_variance_over_queries(measured: Measured) -> None:
    patterns = measured.patterns
    rows = measured.records("key_bars", label="L2H1")
    assert [row["key"] for row in rows] == list(range(N_CTX))
    for key, row in enumerate(rows):
        received = patterns[:, 2, 1, key:, key]
        assert row["queries"] == N_CTX - key
        assert row["received_mean"] == pytest.approx(received.mean(), rel=1e-5)
        assert row["received_variance"] == pytest.approx(received.var(), rel=1e-4, abs=1e-9)
        assert row["is_bar"] == (received.mean() > 0.018 and received.var() < 0.01)
    means = [row["received_mean"] for row in rows]
    assert [row["decay"] for row in rows[1:]] == pytest.approx(np.divide(means[1:], means[:-1]))
