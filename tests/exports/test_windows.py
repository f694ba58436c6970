"""Layers and heads that get a sliding window: what they cost is what transformers says."""

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headcount.exports.formats import export_formats
from headcount.exports.formats.windows.window_choice import (
    ChoicePlan,
    cost,
    estimates_of,
    grown,
    least_costly,
    plan_of_choice,
    pools,
)
from headcount.exports.shared.certainty import half_of
from headcount.exports.shared.confirmation import documents_of
from headcount.exports.shared.source import ExportSource, choose_run
from headcount.queries.ask.asking import open_runs
from headcount.schemas.errors import QueryError
from tests.toys.commands import error_of, printed
from tests.toys.toy_models import family, save_model
from tests.toys.toy_runs import Cell, write_run

LAYERS, HEADS, KV_HEADS, N_CTX, SEQUENCES, WINDOW = 3, 4, 2, 24, 8, 5
REPORTS = ~half_of(SEQUENCES, 0, 0)


# The choice


def source_of(home: Path, documents: tuple[int | None, ...]) -> ExportSource:
    """A toy run of two layers of four heads, six sequences of them in these documents."""
    columns: dict[str, Cell] = {
        "effect_window(0,2)": lambda row: 10 * row.layer + row.head + row.sequence / 4
    }
    write_run(home, "a-1", columns, heads=4, sequences=6, documents=documents)
    format_ = export_formats()["swa-layers"]
    options = format_.parsed_options({"window": "2"})
    return choose_run(open_runs(home), format_, options, home / "out.json")


def test_effects_of_the_heads_of_a_group_add_up(tmp_path: Path):
    source = source_of(tmp_path, (None,))
    pairs = estimates_of(source, 2, "effect_window(0,2)", 2)
    assert pairs == {(0, 0): [1, 1.5], (0, 1): [5, 5.5], (1, 0): [21, 21.5], (1, 1): [25, 25.5]}
    layers = estimates_of(source, 1, "effect_window(0,2)", 1)
    assert layers == {(0, 0): [6], (1, 0): [46]}
    assert documents_of(source, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_documents_are_numbered_and_too_few_are_refused(tmp_path: Path):
    documents = documents_of(source_of(tmp_path / "six", (7, 7, 9, 9, 4, 2)), 6)
    assert documents[0] == documents[1] != documents[2] == documents[3]
    assert len({*documents.tolist()}) == 4
    few = source_of(tmp_path / "few", (7, 7, 7, 9, 9, 9))
    with pytest.raises(QueryError, match="expected 4 documents or more in its first 6 sequences"):
        documents_of(few, 6)


def test_candidates_are_added_by_what_they_cost_together():
    singles = {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 9.0}
    asked: list[list[frozenset[int]]] = []

    def costs_of(sets: Sequence[Sequence[int]]) -> np.ndarray:
        asked.append([frozenset(members) for members in sets])
        # 1 and 3 do the same work: one of them may go, and not both.
        return np.array([sum(singles[i] for i in s) + 50 * ({1, 3} <= {*s}) for s in sets])

    ranking = least_costly([5, 4, 3, 2, 1, 0], np.array([9.0, 4, 3, 2, 1, 0]), 6)
    assert ranking == [0, 1, 2, 3, 4, 5]
    # Two of four come first alone. Then one of the next four, and one of the next three.
    assert grown(ranking, 4, costs_of) == [0, 1, 2, 4]
    assert asked == [
        [frozenset({0, 1, index}) for index in (2, 3, 4, 5)],
        [frozenset({0, 1, 2, index}) for index in (4, 5, 3)],
    ]
    asked.clear()
    assert grown(ranking, 1, costs_of) == [0]
    assert grown([3, 1], 2, costs_of) == [3, 1]
    assert asked == []


@pytest.mark.parametrize(("kept", "count"), [(30, 5), (30, 15), (6, 4), (4, 4), (1, 1), (90, 45)])
def test_a_plan_knows_which_sets_are_measured(kept: int, count: int):
    sizes: list[int] = []

    def costs_of(sets: Sequence[Sequence[int]]) -> np.ndarray:
        sizes.append(len(sets))
        return np.zeros(len(sets))

    chosen = grown(range(kept), count, costs_of)
    assert len({*chosen}) == count
    # All of the candidates are measured together at last, if that was no question.
    last = [1] if kept == count > 1 else []
    assert sizes + last == pools(kept, count)


def test_all_are_measured_on_few_sequences_first_if_that_saves_passes():
    documents = np.arange(16)
    chooses = documents % 2 == 0
    # 30 on 4 sequences, 15 on all; then 4 and 3 sets of sequences, each with the untouched model.
    few = plan_of_choice(30, 5, documents, chooses)
    assert few == ChoicePlan(4, 15, 4, 4 * 31 + 16 * 16 + 16 * 5 + 16 * 4)
    # Half of them are chosen: three quarters would be measured twice.
    half = plan_of_choice(30, 15, documents, chooses)
    assert half == ChoicePlan(None, 30, 4, 16 * (31 + 15 + 7 + 4))
    # A few sequences that are of one document choose nothing.
    of_one = np.array([0] * 8 + list(range(1, 9)))
    assert plan_of_choice(30, 5, of_one, of_one % 2 == 0).few is None


def test_errors_are_over_documents():
    changes, documents = np.array([1.0, 3, 2, 2]), np.array([5, 5, 8, 9])
    # x̄ = 2, so no document deviates, though sequences do.
    assert cost(changes, documents) == {"delta_nll": 2, "standard_error": 0, "documents": 3}
    of_each = cost(changes, np.arange(4))
    assert of_each["standard_error"] == pytest.approx(np.std(changes, ddof=1) / 2)


# Against transformers


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and the runs of one export."""
    home = tmp_path_factory.mktemp("windows")
    config = family(
        "Qwen3Config", num_hidden_layers=LAYERS, num_key_value_heads=KV_HEADS, head_dim=8
    )
    save_model(home / "qwen3", config)
    statistics = [f"effect_window({sink},{WINDOW})" for sink in (0, 1)]
    sets = (f"sequences={SEQUENCES}", f"n_ctx={N_CTX}", f"statistics={json.dumps(statistics)}")
    words = ["swa-layers", home / "runs", "--model", home / "qwen3", "-o", home / "swa.json"]
    words += ["--window", WINDOW, "--layers", 2]
    printed("export", *words, *(word for text in sets for word in ("--set", text)))
    return home


def losses_of(
    home: Path, hidden: Callable[[int], Tensor] | None = None, **fields: Any
) -> np.ndarray:
    """The losses of the sequences of the run in transformers: `[sequence]`.

    `fields` are put into the config. `hidden` says which keys a layer's queries do not see,
    `[head query key]`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(home / "qwen3", **fields)
    model = AutoModelForCausalLM.from_pretrained(
        home / "qwen3", config=config, attn_implementation="eager"
    )
    rows = open_runs(home / "runs").rows(
        "SELECT any_value(tokens) FROM sequences GROUP BY sequence ORDER BY sequence"
    )
    tokens = torch.tensor([row for (row,) in rows])
    future = torch.ones(N_CTX, N_CTX, dtype=torch.bool).triu(1)

    def with_mask(layer: int, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        assert hidden is not None
        unseen = future | hidden(layer)
        mask = torch.zeros(unseen.shape).masked_fill(unseen, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": mask[None]}

    for layer, block in enumerate(model.model.layers if hidden else ()):
        block.self_attn.register_forward_pre_hook(partial(with_mask, layer), with_kwargs=True)
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses.mean(1).double().numpy()


@pytest.mark.long
def test_transformers_loses_what_the_file_of_layers_says(home: Path):
    content = json.loads((home / "swa.json").read_text())
    config = content["transformers"]
    untouched = losses_of(home)

    def change(layer_types: list[str]) -> float:
        changed = losses_of(home, **config | {"layer_types": layer_types})
        return (changed - untouched)[REPORTS].mean()

    assert config["layer_types"].count("sliding_attention") == 2
    assert change(config["layer_types"]) == pytest.approx(content["joint"]["delta_nll"], abs=1e-5)
    assert abs(content["joint"]["delta_nll"]) > 0.01
    chosen = [i for i, kind in enumerate(config["layer_types"]) if kind == "sliding_attention"]
    assert content["sliding_window_layers"] == chosen
    assert len(content["layers"]) == LAYERS
    for row in content["layers"]:
        types = ["full_attention"] * LAYERS
        types[row["layer"]] = "sliding_attention"
        assert change(types) == pytest.approx(row["delta_nll"], abs=1e-5)
        assert row["documents"] == SEQUENCES // 2
        assert row["chosen"] == (row["layer"] in chosen)
    singles = [row["delta_nll"] for row in content["layers"] if row["chosen"]]
    assert content["joint"]["sum_of_singles"] == pytest.approx(sum(singles))


@pytest.mark.long
def test_a_second_export_measures_nothing_again(home: Path):
    runs = sorted(path.name for path in (home / "runs").iterdir())
    commits = {path: path.stat().st_mtime_ns for path in (home / "runs").rglob("commits/*")}
    words = ("swa-layers", home / "runs", "-o", home / "again.json", "--window", WINDOW)
    printed("export", *words, "--layers", 2)
    again, first = (json.loads((home / name).read_text()) for name in ("again.json", "swa.json"))
    assert again == first
    assert commits == {path: path.stat().st_mtime_ns for path in (home / "runs").rglob("commits/*")}
    assert sorted(path.name for path in (home / "runs").iterdir()) == runs
    assert len(runs) == 3


@pytest.mark.long
def test_a_model_with_these_heads_behind_a_window_loses_what_the_file_says(home: Path):
    words = ("hybrid-heads", home / "runs", "-o", home / "heads.json", "--window", WINDOW)
    printed("export", *words, "--sink", 1, "--heads", 2)
    content = json.loads((home / "heads.json").read_text())
    behind = torch.arange(N_CTX)[:, None] - torch.arange(N_CTX)
    between = (behind >= WINDOW) & (torch.arange(N_CTX) >= 1)

    def change(chosen: Collection[tuple[int, int]]) -> float:
        def hidden(layer: int) -> Tensor:
            streams = [(layer, head // (HEADS // KV_HEADS)) in chosen for head in range(HEADS)]
            return between & torch.tensor(streams)[:, None, None]

        return (losses_of(home, hidden) - losses_of(home))[REPORTS].mean()

    chosen = [(layer, head) for layer, head in content["sliding_window_heads"]]
    assert len(chosen) == 2
    assert change(chosen) == pytest.approx(content["joint"]["delta_nll"], abs=1e-5)
    assert len(content["heads"]) == LAYERS * KV_HEADS
    for row in content["heads"]:
        assert change([(row["layer"], row["kv_head"])]) == pytest.approx(row["delta_nll"], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("words", "message"), [
    ("swa-layers --layers 4", "--layers 4: expected 1 to 3, as many as qwen3 has"),
    ("swa-layers --sequences 3", "3 sequences measured: expected 4 documents or more"),
    ("hybrid-heads --sink 1 --heads 7", "--heads 7: expected 1 to 6"),
])  # fmt: skip
def test_what_cannot_be_chosen_is_refused(words: str, message: str, home: Path):
    name, *options = words.split()
    named = ("export", name, home / "runs", "-o", home / "x.json", "--window", WINDOW)
    assert message in error_of(*named, *options)
