"""A scan of some layers or heads: the same numbers as a scan of all of them, and nothing else
computed, kept or written.
"""

from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch

from headcount.jobs.plan.plan import Plan, make_plan
from headcount.jobs.plan.resolved_scan import resolve
from headcount.jobs.upkeep.compaction import compact
from headcount.queries.answers.numbers import NUMBERS
from headcount.queries.ask.asking import open_runs
from headcount.queries.report.html_page import unpacked
from headcount.queries.report.report import write_report
from headcount.schemas.errors import MeasureError
from headcount.schemas.profiles import PROFILES
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.weight_statistics import WEIGHT_STATISTICS
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.inputs.sequences import ShardInput
from headcount.workers.shard import intervention_tables
from tests.toys import toy_models as toy
from tests.toys.runs_here import begun, measured
from tests.toys.toy_runs import ask

T = 12
TOKENS = toy.repeating_tokens(T, batch=3)
PARTNERS = (TOKENS * 7 + 1) % toy.D_VOCAB
ALL_INTERVENTIONS = ["none", "mask_keys(0,1)", "zero_random_heads(entropy,1.2)", "patch_head(0,1)"]
SUBSETS: dict[str, dict[str, Any]] = {
    "first layer": {"layers": [0]},
    "two layers": {"layers": [2, 0]},
    "last layer": {"layers": [2]},
    "one head": {"heads": ["L1H3"]},
    "heads": {"heads": ["L2H0", "L0H1", "L2H3"]},
}
EVERYTHING: dict[str, Any] = {
    "statistics": "all",
    "profiles": toy.FORWARD_PROFILES,
    "curves": [name for name in toy.FORWARD_PROFILES if PROFILES[name].axis != "pair"],
    "weight_statistics": list(WEIGHT_STATISTICS),
    "predictions": ["loss", "final_logits"],
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = toy.family("LlamaConfig", num_key_value_heads=2, num_hidden_layers=3)
    return toy.save_model(tmp_path_factory.mktemp("llama") / "toy", config)


def tables(replica: toy.TextReplica, intervention: str) -> dict[str, pa.Table]:
    """Every table that a shard of the tokens would be written to."""
    shard = ShardInput(0, 0, TOKENS, {}, [])
    measurements = replica.measure(TOKENS, intervention, partner=PARTNERS)
    return intervention_tables(replica.scan, shard, measurements) | replica.weights()


def chosen(table: pa.Table, subset: dict[str, Any]) -> pa.Table:
    """The rows of a subset; those of a whole layer or model have no head or no layer."""
    if "layer" not in table.column_names:
        return table
    heads = set(subset.get("heads", ()))
    layers = set(subset.get("layers", ())) | {int(name[1 : name.index("H")]) for name in heads}

    def belongs(layer: int | None, head: int | None) -> bool:
        of_layer = layer is None or layer in layers
        return of_layer and (head is None or not heads or f"L{layer}H{head}" in heads)

    places = zip(table["layer"].to_pylist(), table["head"].to_pylist(), strict=True)
    return table.filter(pa.array([belongs(*place) for place in places], pa.bool_()))


def assert_same(actual: pa.Table, expected: pa.Table, exact: bool) -> None:
    """Equal rows, in equal order; sliced products may round otherwise, and M2 squares that."""
    assert actual.schema == expected.schema
    for name in actual.column_names:
        pair = [table[name].combine_chunks() for table in (actual, expected)]
        if isinstance(pair[0], pa.ListArray):
            pair = [column.flatten() for column in pair]
        if exact or not pa.types.is_floating(pair[0].type):
            assert pair[0].equals(pair[1]), name
        else:
            numbers = [np.array(column.to_pylist(), float) for column in pair]
            np.testing.assert_allclose(*numbers, rtol=5e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("name", "engine", "subsets"), [
    ("gpt2", "fused", ["two layers", "heads"]),
    *(
        pytest.param(name, engine, list(SUBSETS), marks=pytest.mark.long)
        for name, engine in product(("gpt2", "llama"), ("fused", "dense"))
    ),
])  # fmt: skip
def test_every_number_of_some_heads_is_that_of_the_whole_scan(
    name: str, engine: str, subsets: list[str], request: pytest.FixtureRequest
):
    path = request.getfixturevalue(name)
    fields = {"n_ctx": T, "engine": engine, **EVERYTHING}
    whole = toy.replica(path, **fields)
    expected = {name: tables(whole, name) for name in ALL_INTERVENTIONS}
    for subset in map(SUBSETS.__getitem__, subsets):
        part = toy.replica(path, **fields, **subset)
        for name in ALL_INTERVENTIONS:
            tables_of_part = tables(part, name)
            assert tables_of_part.keys() == expected[name].keys()
            assert all(tables_of_part[table].num_rows for table in ("heads", "curves", "profiles"))
            for table, rows in tables_of_part.items():
                assert_same(rows, chosen(expected[name][table], subset), "layers" in subset)


def blocks_run(replica: toy.TextReplica, *arguments: Any, **options: Any) -> list[int]:
    """The layers that a measurement begins, in order."""
    layers_run: list[int] = []

    def noting(layer: int) -> Any:
        return lambda _module, _args: layers_run.append(layer)

    with ExitStack() as hooks:
        for layer, block in enumerate(replica.model.blocks):
            hooks.callback(block.register_forward_pre_hook(noting(layer)).remove)
        replica.measure(*arguments, **options)
    return layers_run


def test_a_pass_ends_after_the_last_layer_that_something_needs(gpt2: Path):
    assert blocks_run(toy.replica(gpt2, n_ctx=T), TOKENS) == [0, 1, 2]
    assert blocks_run(toy.replica(gpt2, n_ctx=T, layers=[1]), TOKENS) == [0, 1]
    assert blocks_run(toy.replica(gpt2, n_ctx=T, heads=["L0H3"]), TOKENS) == [0]
    predicting = toy.replica(gpt2, n_ctx=T, layers=[0], predictions=["loss"])
    assert blocks_run(predicting, TOKENS) == [0, 1, 2]
    changed = toy.replica(gpt2, n_ctx=T, layers=[1]).measure(TOKENS, "mask_keys(0,1)")
    assert changed.method.built_layers == [0, 1]


def test_the_pattern_of_a_layer_between_is_not_asked(gpt2: Path, monkeypatch: pytest.MonkeyPatch):
    replica = toy.replica(gpt2, n_ctx=T, layers=[0, 2], statistics="standard")
    replica.measure(TOKENS)
    questions_of_sweeps: list[set[str]] = []
    sweep = FusedPattern._sweep

    def recording_sweep(self: FusedPattern, questions: set[str]) -> None:
        questions_of_sweeps.append(set(questions))
        sweep(self, questions)

    monkeypatch.setattr(FusedPattern, "_sweep", recording_sweep)
    replica.measure(TOKENS)
    # The last one is of the uniform pattern, for uniform baselines.
    everything = {"entropy", "copies", "successors"}
    by_layer = [questions & everything for questions in questions_of_sweeps[:3]]
    assert by_layer == [everything, set(), everything]


def test_a_number_that_is_none_is_in_the_layer_and_the_head_of_the_model(tmp_path: Path):
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = [name for name in tensors if name.endswith("h.2.attn.c_attn.weight")]
        tensors[name][:, 8:16] = torch.nan

    path = toy.save_model(tmp_path / "toy", toy.gpt2())
    toy.change_weights(path, spoil)
    toy.replica(path, n_ctx=T, layers=[0, 1]).measure(TOKENS)
    with pytest.raises(MeasureError, match="layer 2, head 1: "):
        toy.replica(path, n_ctx=T, heads=["L0H0", "L2H0", "L2H1"]).measure(TOKENS)


# Runs


def fields_of(out: Path, model: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "model": str(model), "n_ctx": T, "sequences": 4, "sequences_per_shard": 2,
        "input": {"family": "repeated_random"}, "out": str(out),
    }  # fmt: skip
    return base | changes


def begin(out: Path, model: Path, **changes: Any) -> Plan:
    return begun(fields_of(out, model, **changes))


def finished(out: Path, model: Path, **changes: Any) -> Plan:
    return measured(begin(out, model, **changes))


def test_one_choice_is_one_run_however_it_is_named(tmp_path: Path, gpt2: Path):
    def run_id(**changes: Any) -> str:
        return make_plan(parse_scan(fields_of(tmp_path, gpt2, **changes)), "toy").run.run_id

    every_head = [f"L{layer}H{head}" for layer in range(3) for head in range(4)]
    assert run_id() == run_id(layers="all") == run_id(layers=[0, 2, 1]) == run_id(heads=every_head)
    assert run_id(layers=[2]) == run_id(heads=every_head[8:]) != run_id()
    two = ["L2H1", "L0H3"]
    assert run_id(heads=two) == run_id(heads=two[::-1]) != run_id(heads=["L0H3"])
    assert run_id(layers=[0]) != run_id(layers=[1])

    whole = resolve(parse_scan(fields_of(tmp_path, gpt2, layers=[0, 1, 2])))
    assert not {"layers", "heads"} & whole.identity["scan"].keys()
    part = resolve(parse_scan(fields_of(tmp_path, gpt2, heads=two)))
    assert part.identity["scan"]["heads"] == ["L0H3", "L2H1"]


def test_a_run_of_some_heads_is_merged_and_asked(tmp_path: Path, gpt2: Path):
    fields = {"heads": ["L2H0", "L0H1", "L2H3"], "profiles": ["key_norm_by_key"]}
    plan = finished(tmp_path, gpt2, **fields)
    heads = [(0, 1), (2, 0), (2, 3)]
    for _ in range(2):
        runs = open_runs(plan.run.path)
        for question, rows in {
            "SELECT count(*) FROM heads": [(4 * 3,)],
            "SELECT DISTINCT layer, head FROM heads ORDER BY ALL": heads,
            "SELECT layer, head, label FROM by_head": [(*at, "L{}H{}".format(*at)) for at in heads],
            "SELECT layer, heads FROM by_layer": [(0, 1), (2, 2)],
            "SELECT layer FROM layer_norms": [(0,), (2,)],
            "SELECT DISTINCT layer, head FROM profiles ORDER BY ALL": heads,
            "SELECT rank FROM sink_heads ORDER BY rank": [(1,), (2,), (3,)],
        }.items():
            assert ask(runs, question) == rows, question
        assert compact(plan.run).problems == []


def test_a_run_says_which_heads_it_measured(tmp_path: Path, gpt2: Path):
    for changes in ({}, {"layers": [2, 0]}, {"heads": ["L2H0", "L0H1"]}):
        begin(tmp_path, gpt2, **changes)
    runs = ask(tmp_path, "SELECT measured_heads FROM runs ORDER BY ALL")
    assert runs == [("L0H1, L2H0",), ("all",), ("layers 0, 2",)]


def test_a_mean_over_a_layer_needs_all_of_its_heads(tmp_path: Path, gpt2: Path):
    scores = "FROM inactive_scores WHERE score LIKE 'AVVN%'"
    question = f"SELECT DISTINCT score, layer {scores} ORDER BY ALL"
    whole = finished(tmp_path / "a", gpt2, layers=[1])
    assert ask(whole.run.path, question) == [("AVVN", 1), ("AVVN (LN)", 1)]
    incomplete_heads = ["L1H0", "L2H0", "L2H1", "L2H2", "L2H3"]
    part = finished(tmp_path / "b", gpt2, heads=incomplete_heads)
    assert ask(part.run.path, question) == [("AVVN", 1), ("AVVN", 2), ("AVVN (LN)", 2)]


@pytest.mark.long
def test_a_report_leaves_cells_blank_that_were_not_measured(tmp_path: Path, gpt2: Path):
    plan = finished(tmp_path, gpt2, heads=["L2H0", "L0H1", "L2H3"])
    write_report(open_runs(str(plan.run.path)), tmp_path / "report.html")
    data = cast(dict[str, Any], unpacked((tmp_path / "report.html").read_text("utf-8")))
    (answer,) = (one for key, one in data["answers"].items() if key.startswith("heatmap/"))
    means_of_all = answer["arrays"][NUMBERS.index("mean")]
    by_statistic = [means_of_all[place : place + 12] for place in range(0, len(means_of_all), 12)]
    maps = [means for means in by_statistic if any(means)]
    assert len(maps) > 10
    for means in maps:
        assert len(means) == 3 * 4
        assert [place for place, mean in enumerate(means) if mean is not None] == [1, 8, 11]
    (run,) = data["overview"]["runs"]
    assert run["measured_heads"] == "L0H1, L2H0, L2H3"
