"""`headcount export` of what is made of queries, columns and diagonals."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import headcount
from headcount.exports.formats import export_formats
from headcount.exports.formats.expected_attention import expected_attention
from headcount.exports.formats.qfilters import signed_directions
from headcount.exports.shared.source import choose_run
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.errors import QueryError
from headcount.schemas.profiles.columns_and_diagonals import CANDIDATES
from tests.reference.forward import forward
from tests.reference.weights import read_weights
from tests.toys.commands import printed
from tests.toys.toy_models import family, save_model

LAYERS, HEADS, KV_HEADS, D_HEAD, N_CTX, SEQUENCES = 2, 4, 2, 8, 24, 6
FORMATS = ("expected-attention", "qfilters", "minference")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model whose query heads share keys, a run of it, and its exports."""
    directory = tmp_path_factory.mktemp("exports")
    save_model(directory / "llama", family("LlamaConfig", num_key_value_heads=KV_HEADS))
    formats = [export_formats()[name] for name in FORMATS]
    fields = {"model": str(directory / "llama"), "out": str(directory / "runs")}
    fields |= {"n_ctx": N_CTX, "sequences": SEQUENCES, "sequences_per_shard": 4}
    needs = [export.needs(export.parsed_options({})) for export in formats]
    statistics = {"entropy", *(name for each in needs for name in each.statistics)}
    fields |= {"input": {"family": "uniform_random"}, "statistics": sorted(statistics)}
    fields["profiles"] = [name for each in needs for name in each.profiles]
    headcount.scan(fields, name="toy", quiet=True).close()
    for name in FORMATS:
        words = ["export", name, str(directory / "runs"), "-o", str(directory / name)]
        assert "note: " in printed(*words)
    return directory


@pytest.fixture(scope="module")
def database(home: Path) -> Iterator[RunDatabase]:
    opened = open_runs(home / "runs")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def queries(home: Path, database: RunDatabase) -> dict[str, np.ndarray]:
    """Queries of all sequences by the reference model, `[layer head sequence pos d_head]`, before
    and after their rotation.
    """
    weights = read_weights(home / "llama")
    rows = database.rows("SELECT tokens FROM sequences ORDER BY sequence")
    runs = [forward(weights, tokens) for (tokens,) in rows]
    return {
        name: np.stack([[getattr(layer, name) for layer in run.layers] for run in runs], axis=2)
        for name in ("q", "q_rotated")
    }


def test_expected_attention_has_mean_and_covariance_of_the_queries_of_all_sequences(
    home: Path, queries: dict[str, np.ndarray]
):
    folder = home / "expected-attention"
    tensors = load_file(folder / "model.safetensors")
    assert tensors["query_mean"].shape == (LAYERS, HEADS, D_HEAD)
    assert tensors["query_cov"].shape == (LAYERS, HEADS, D_HEAD, D_HEAD)
    for layer, head in np.ndindex(LAYERS, HEADS):
        later = queries["q"][layer, head, :, 4:].reshape(-1, D_HEAD)
        close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
        np.testing.assert_allclose(tensors["query_mean"][layer, head], later.mean(0), **close)
        np.testing.assert_allclose(tensors["query_cov"][layer, head], np.cov(later.T), **close)
    config = json.loads((folder / "config.json").read_text())
    assert config["headcount"]["model"] == "llama"
    sizes = {"num_layers": LAYERS, "num_heads": HEADS, "head_dim": D_HEAD, "n_sink": 4}
    sizes |= {"num_samples": SEQUENCES, "sample_seq_len": N_CTX}
    assert config.items() >= sizes.items()
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert json.loads(file.metadata()["headcount"]) == config["headcount"]


def test_qfilters_are_the_first_singular_vectors_of_rotated_queries(
    home: Path, queries: dict[str, np.ndarray]
):
    filters = load_file(home / "qfilters/model.safetensors")["q_filters"]
    assert filters.shape == (LAYERS, KV_HEADS, D_HEAD)
    for layer, kv_head in np.ndindex(LAYERS, KV_HEADS):
        of_group: list[np.ndarray] = []
        for head in (2 * kv_head, 2 * kv_head + 1):
            rotated = queries["q_rotated"][layer, head].reshape(-1, D_HEAD)
            direction = np.linalg.svd(rotated, full_matrices=False).Vh[0]
            of_group.append(-np.sign(rotated.mean(0) @ direction) * direction)
        expected = np.mean(of_group, axis=0)
        np.testing.assert_allclose(filters[layer, kv_head], expected, rtol=1e-4, atol=1e-4)
    config = json.loads((home / "qfilters/config.json").read_text())
    assert config.items() >= {"num_kv_heads": KV_HEADS, "kv_head_dim": D_HEAD}.items()
    ambiguous = config["ambiguous_kv_heads"]
    assert ambiguous
    first = ", ".join(f"{layer}-{head}" for layer, head in ambiguous)
    output = printed("export", "qfilters", home / "runs", "-o", home / "qfilters", "--replace")
    note = f"{len(ambiguous)} of 4 filters may point the wrong way (layer-KV head: {first}); "
    assert f"note: {note}config.json lists them\n" in output


def test_a_filter_is_ambiguous_where_its_sign_is_within_the_error_or_its_heads_cancel():
    def along(angle: float, of_mean: float) -> tuple[np.ndarray, np.ndarray]:
        """Queries with a mean square of 4 along a direction, and of 1 across it."""
        direction = np.array([np.cos(angle), np.sin(angle)])
        return of_mean * direction, np.eye(2) + 3 * np.outer(direction, direction)

    def is_ambiguous(*heads: tuple[float, float]) -> bool:
        mean, second_moment = zip(*(along(*head) for head in heads), strict=True)
        # One layer. With a mean of 1 and 12 sequences, two errors are 2 √((4 - 1) / 12) = 1.
        filters, ambiguous = signed_directions(
            np.array([mean]), np.array([second_moment]), group_size=len(heads), sequences=12
        )
        away = [-np.array([np.cos(angle), np.sin(angle)]) * np.sign(m) for angle, m in heads]
        np.testing.assert_allclose(filters, [[np.mean(away, axis=0)]], atol=1e-12)
        return bool(ambiguous)

    assert not is_ambiguous((0.3, 1.01))
    assert not is_ambiguous((0.3, -1.01))
    assert is_ambiguous((0.3, 0.99))
    assert is_ambiguous((0.3, 1.5), (0.3, 0.99))
    # Two heads cancel where their angle is obtuse, and three whose average is below 0.577.
    degree = np.pi / 180
    assert not is_ambiguous((0, 1.5), (90 * degree, 1.5))
    assert is_ambiguous((0, 1.5), (91 * degree, 1.5))
    assert not is_ambiguous((0, 1.5), (91 * degree, -1.5))
    assert is_ambiguous((0, 1.5), (120 * degree, 1.5), (240 * degree, 1.5))
    assert not is_ambiguous((0, 1.5), (0, 1.5), (180 * degree - 1.6, 1.5))


def test_minference_takes_the_candidate_with_the_largest_share(home: Path, database: RunDatabase):
    # MInference reads the list layer by layer, and the keys of an object as heads.
    layers = [
        {int(head): pattern for head, pattern in layer.items()}
        for layer in json.loads((home / "minference").read_text())
    ]
    assert len(layers) == LAYERS
    rows = database.rows(
        """
        SELECT layer, head, candidate, sum(count * mean) / sum(count)
        FROM profiles WHERE profile = 'column_diagonal_attention_by_candidate'
        GROUP BY ALL ORDER BY ALL
        """
    )
    shares = np.array([share for *_, share in rows]).reshape(LAYERS, HEADS, len(CANDIDATES))
    for layer, head in np.ndindex(LAYERS, HEADS):
        kind, n_columns, n_diagonals, share = layers[layer][head]
        best = CANDIDATES.index((n_columns, n_diagonals))
        assert kind == "vertical_and_slash"
        assert share == pytest.approx(shares[layer, head].max(), abs=1e-6)
        assert shares[layer, head, best] == shares[layer, head].max()


def test_sequences_of_first_tokens_alone_have_no_queries_to_come(database: RunDatabase):
    export = export_formats()["expected-attention"]
    source = choose_run(database, export, {}, Path("nowhere"))
    with pytest.raises(QueryError, match="n_ctx is 4; expected more than the 4 first tokens"):
        expected_attention(replace(source, run={**source.run, "n_ctx": 4}))
