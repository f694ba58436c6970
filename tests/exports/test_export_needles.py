"""Formats made of needles and passages, against attention that transformers computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import headcount
from headcount.exports.registry import export_format_named
from headcount.exports.source import choose_run
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.errors import QueryError
from tests.toys.toy_runs import Row, write_run

MODEL = "bundled:gpt2-mini"
SHAPE = (3, 8)
N_CTX = 96
INPUTS = {
    "needle": {"family": "needle", "needles": 2},
    "passages": {"family": "passages", "passages": 3},
}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDatabase]:
    """A run over needles and one over passages."""
    directory = tmp_path_factory.mktemp("runs")
    mass = [f"labelled_key_mass({keys})" for keys in ("gold,query", "other,query", "gold,answer")]
    fields = {
        "model": MODEL,
        "n_ctx": N_CTX,
        "sequences": 12,
        "statistics": ["retrieval_score", *mass],
        "out": str(directory),
    }
    for name, input_options in INPUTS.items():
        headcount.scan(fields | {"input": input_options}, name=name, quiet=True).close()
    opened = open_runs(directory)
    yield opened
    opened.connection.close()


class Sequence(NamedTuple):
    """A sequence of a run, and what transformers makes of it."""

    tokens: np.ndarray
    labels: np.ndarray
    attention: np.ndarray
    """`[layer head query key]`."""


@pytest.fixture(scope="module")
def sequences(database: RunDatabase) -> dict[str, list[Sequence]]:
    """All sequences, by input family."""
    from transformers import GPT2LMHeadModel

    from headcount.workers.model.files.model_info import find_model

    model = GPT2LMHeadModel.from_pretrained(find_model(MODEL), attn_implementation="eager").eval()
    by_family: dict[str, list[Sequence]] = {}
    for name in INPUTS:
        rows = database.rows(
            f"SELECT tokens, labels FROM sequences WHERE input_family = '{name}' ORDER BY sequence"
        )
        with torch.no_grad():
            tokens = torch.tensor([row[0] for row in rows])
            layers = model(tokens, output_attentions=True).attentions
        attention = torch.stack(layers, 1).numpy()
        by_family[name] = [
            Sequence(np.array(row[0]), np.array(row[1]), pattern)
            for row, pattern in zip(rows, attention, strict=True)
        ]
    return by_family


def labelled_mass(sequence: Sequence, keys: str, queries: str) -> np.ndarray:
    """Mean attention of the queries with one label to the keys with another, `[layer head]`."""
    rows = sequence.attention[:, :, sequence.labels == queries]
    return rows[..., sequence.labels == keys].sum(-1).mean(-1)


def retrieval_scores(sequence: Sequence) -> np.ndarray:
    """How often the highest key before a token of the answer is that token, `[layer head]`."""
    hits = np.zeros(SHAPE)
    answer = np.flatnonzero(sequence.labels == "answer")
    for position in answer:
        key = sequence.attention[:, :, position - 1].argmax(-1)
        is_same = sequence.tokens[key] == sequence.tokens[position]
        hits += is_same & (sequence.labels[key] == "gold")
    return hits / len(answer)


def made(database: RunDatabase, name: str, run_id: str | None = None, **options: Any) -> str:
    """The content of the file that a format makes of its run."""
    export = export_format_named(name)
    all_options = export.defaults | options
    run_ids = () if run_id is None else (run_id,)
    source = choose_run(database, export, all_options, Path("nowhere"), run_ids)
    (content,) = export.make(source, **all_options).files.values()
    return content.decode()


def read_as_headkv(text: str) -> np.ndarray:
    """Mean scores `[layer head]`, as HeadKV reads them: the first line, heads in order."""
    scores = json.loads(text.splitlines()[0])
    assert list(scores) == [f"{layer}-{head}" for layer, head in np.ndindex(SHAPE)]
    return np.array([np.mean(values) for values in scores.values()]).reshape(SHAPE)


def test_retrieval_heads_are_scored_in_every_sequence(
    database: RunDatabase, sequences: dict[str, list[Sequence]]
) -> None:
    text = made(database, "retrieval-heads")
    expected = np.array([retrieval_scores(sequence) for sequence in sequences["needle"]])
    scores_line, provenance_line = text.splitlines()
    scores = json.loads(scores_line)
    for layer, head in np.ndindex(SHAPE):
        assert scores[f"{layer}-{head}"] == pytest.approx(expected[:, layer, head])
    assert read_as_headkv(text) == pytest.approx(expected.mean(0))
    assert json.loads(provenance_line)["headcount"]["input"]["needles"] == 2
    assert json.loads(made(database, "retrieval-heads", only_scores=True)) == scores


def test_headkv_has_the_mass_on_the_value_or_the_retrieval_score(
    database: RunDatabase, sequences: dict[str, list[Sequence]]
) -> None:
    masses = [labelled_mass(sequence, "gold", "answer") for sequence in sequences["needle"]]
    expected = pytest.approx(np.mean(masses, 0), abs=1e-5)
    assert read_as_headkv(made(database, "headkv")) == expected
    copied = made(database, "headkv", score="copy")
    assert copied.splitlines()[0] == made(database, "retrieval-heads").splitlines()[0]


def test_retrieval_can_be_asked_by_depth(
    database: RunDatabase, sequences: dict[str, list[Sequence]]
) -> None:
    rows = database.rows(
        "SELECT list_position(labels, 'gold') / len(labels) AS depth, max(retrieval_score) "
        "FROM heads JOIN sequences USING (run_id, sequence) "
        "WHERE sequences.input_family = 'needle' GROUP BY sequence, depth ORDER BY sequence"
    )
    for (depth, highest), sequence in zip(rows, sequences["needle"], strict=True):
        assert depth == pytest.approx((np.argmax(sequence.labels == "gold") + 1) / N_CTX)
        assert highest == pytest.approx(retrieval_scores(sequence).max())


def gold_and_other(sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """Mass of the query on the gold passage and on another one, `[sequence layer head]`."""
    gold = np.array([labelled_mass(sequence, "gold", "query") for sequence in sequences])
    other = np.array([labelled_mass(sequence, "other", "query") for sequence in sequences])
    # There are three passages.
    return gold, other / 2


def test_qrhead_names_the_heads_that_find_the_passage(
    database: RunDatabase, sequences: dict[str, list[Sequence]]
) -> None:
    text = made(database, "qrhead", heads=5)
    config = yaml.safe_load(text)
    # As QRRetriever reads it.
    heads = [tuple(map(int, head.split("-"))) for head in config["attn_head_set"].split(",")]
    gold, other = gold_and_other(sequences["passages"])
    lead = (gold - other).mean(0)
    in_order = np.argsort(-lead, axis=None)[:5]
    assert heads == [tuple(map(int, np.unravel_index(place, SHAPE))) for place in in_order]
    assert config["model_name_or_path"] == MODEL
    assert json.loads(text.splitlines()[0].removeprefix("# "))["format"] == "qrhead"

    # Heads that lead by chance are never among them.
    all_heads = yaml.safe_load(made(database, "qrhead", heads=24))["attn_head_set"].split(",")
    deviation = gold.std(0, ddof=1) + other.std(0, ddof=1)
    is_certain = lead > 2 * deviation / np.sqrt(len(gold))
    assert len(all_heads) == is_certain.sum() < (lead > 0).sum()


def test_important_heads_lead_by_more_than_their_spread(
    database: RunDatabase, sequences: dict[str, list[Sequence]]
) -> None:
    config = json.loads(made(database, "important-heads"))
    gold, other = gold_and_other(sequences["passages"])
    spread = gold.std(0, ddof=1) + other.std(0, ddof=1)
    is_chosen = (gold - other).mean(0) > spread
    # As vLLM-Hook reads it.
    chosen = {(layer, head) for layer, head in config["params"]["important_heads"]}
    assert chosen == {(int(layer), int(head)) for layer, head in np.argwhere(is_chosen)}
    assert 5 <= len(chosen) < is_chosen.size
    assert config["hookq"]["hookq_mode"] == "all_tokens"
    assert config["headcount"]["run_id"].startswith("passages")
    two = json.loads(made(database, "important-heads", deviations=0, heads=2))
    assert two["params"]["important_heads"] == config["params"]["important_heads"][:2]


def test_what_no_head_does_makes_no_file(tmp_path: Path, database: RunDatabase) -> None:
    with pytest.raises(QueryError, match="leads by 50 standard deviations; lower --deviations"):
        made(database, "important-heads", deviations=50)
    write_run(tmp_path, "a-1", {"retrieval_score": lambda _: 0.0}, family="needle")
    opened = open_runs(tmp_path)
    with pytest.raises(QueryError, match="every head of run a-1 scores 0, and HeadKV divides"):
        made(opened, "headkv", score="copy")
    with pytest.raises(QueryError, match="a-1 did not measure labelled_key_mass_gold_answer; "):
        made(opened, "headkv")
    opened.connection.close()


def test_a_needle_beyond_the_window_scores_nothing(tmp_path: Path) -> None:
    # Of four needles, the heads of layer 0 see the last one alone.
    def mass(row: Row) -> float | None:
        return None if row.layer == 0 and row.sequence < 3 else 0.5

    write_run(tmp_path, "a-1", {"labelled_key_mass(gold,answer)": mass}, family="needle")
    opened = open_runs(tmp_path)
    scores = json.loads(made(opened, "headkv").splitlines()[0])
    opened.connection.close()
    assert scores["0-2"] == [0, 0, 0, 0.5]
    assert scores["1-0"] == [0.5] * 4


def test_one_command_goes_from_a_model_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    words = ["--model", "bundled:attn-only-2l-mini", "--set", "sequences=4"]
    command = ["export", "retrieval-heads", str(tmp_path / "runs"), "-o", str(file), *words]
    result = CliRunner().invoke(headcount.app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    scores = json.loads(file.read_text().splitlines()[0])
    assert [len(values) for values in scores.values()] == [4] * 16
    # The induction heads of this model are in its second layer.
    means = {head: np.mean(values) for head, values in scores.items()}
    assert not any(means[f"0-{head}"] for head in range(8))
    assert sum(mean > 0.5 for mean in means.values()) >= 4
    assert "highest mean scores (layer-head): 1-" in result.output
