"""Notebooks: opening runs, asking them, measuring a model in memory, and scanning from Python."""

import copy
import html
import pickle
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import headcount
from headcount.schemas.scans.scan_file import load_scan
from tests import ROOT
from tests.toys.toy_models import D_VOCAB, family, gpt2, save_model

TOLERANCE = 1e-6
STATISTICS = ["sink_mass", "induction_score", "entropy", "value_norm", "head_result_norm"]
"""Of patterns and of vectors; one reads weights of the layer."""

INTERVENTIONS = ["none", "zero_query_bias"]
N_CTX = 12


def fields_of(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model), "n_ctx": N_CTX, "sequences": 6, "sequences_per_shard": 3,
        "statistics": STATISTICS, "input": {"family": "repeated_random"}, "out": str(out),
    } | changes  # fmt: skip


def numbers(rows: pa.Table) -> dict[str, np.ndarray]:
    """The columns of statistics, in the order intervention, sequence, layer, head."""
    order = [(name, "ascending") for name in ("intervention", "sequence", "layer", "head")]
    words = rows["intervention"].cast(pa.string())
    in_order = rows.set_column(rows.schema.get_field_index("intervention"), "intervention", words)
    in_order = in_order.sort_by(order)
    return {name: in_order[name].to_numpy() for name in STATISTICS}


def assert_same(first: pa.Table, second: pa.Table, tolerance: float = TOLERANCE) -> None:
    expected = numbers(second)
    for name, values in numbers(first).items():
        np.testing.assert_allclose(values, expected[name], atol=tolerance, rtol=tolerance)
        assert np.ptp(values) > 0, name


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a GPT-2 and the runs of a scan of it."""
    directory = tmp_path_factory.mktemp("python")
    save_model(directory / "gpt2", gpt2())
    fields = fields_of(directory / "gpt2", directory / "runs", interventions=INTERVENTIONS)
    headcount.scan(fields, name="toy", quiet=True).close()
    return directory


@pytest.fixture(scope="module")
def runs(toy: Path) -> Iterator[Any]:
    with headcount.open(toy / "runs") as opened:
        yield opened


def loaded(path: Path) -> Any:
    """A model as a user loads it: no choice of attention, and ready to be trained."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).train()


@pytest.fixture(scope="module")
def untrained(toy: Path) -> Any:
    return loaded(toy / "gpt2")


def tokens_of(runs: Any) -> np.ndarray:
    query = "SELECT tokens FROM sequences WHERE intervention = 'none' ORDER BY sequence"
    return np.array([tokens for (tokens,) in runs.sql(query)])


# Opening and asking


def test_the_names_are_there() -> None:
    assert set(headcount.__all__) <= set(dir(headcount))
    with pytest.raises(AttributeError, match="no attribute 'opne'"):
        _ = headcount.opne  # pyright: ignore[reportAttributeAccessIssue]


def test_one_answer_in_every_form(runs: Any) -> None:
    answer = runs.sql("SELECT label, avg(sink_mass) AS mass FROM heads GROUP BY ALL ORDER BY 1")
    assert answer.columns == ["label", "mass"]
    assert answer.arrow().num_rows == len(answer.df()) == len(answer.pl()) == len(answer) == 12
    assert [row[0] for row in answer][:2] == ["L0H0", "L0H1"]
    assert list(answer.df()["mass"]) == [mass for _, mass in answer.rows()]
    assert list(answer.pl()["label"]) == list(answer.df()["label"])
    empty = runs.sql("SELECT layer, sink_mass FROM heads WHERE false")
    assert (empty.rows(), len(empty)) == ([], 0)
    assert list(empty.df().columns) == list(empty.pl().columns) == ["layer", "sink_mass"]


def test_notebooks_show_few_rows_and_escape_them(runs: Any) -> None:
    query = "SELECT '<script>' AS \"a<b\", 0.123456::DOUBLE AS n, NULL AS nothing"
    shown = runs.sql(query)._repr_html_()
    assert "<script>" not in shown
    for cells in ("<th>a&lt;b</th>", "<td>&lt;script&gt;</td><td>0.1235</td><td>–</td>"):
        assert cells in shown
    assert repr(runs.sql(query)) == "a<b       n       nothing\n<script>  0.1235  –"
    many = runs.sql("SELECT layer, head FROM heads")
    assert (len(many), many._repr_html_().count("<tr>")) == (144, 21)
    for shown in (repr(many), many._repr_html_()):
        assert "more rows: df(), pl() and arrow() have all" in shown
    for shown in (repr(runs), runs._repr_html_()):
        assert "6 of 6" in shown
        assert str(runs.path) in shown


def test_a_copy_of_opened_runs_opens_them_for_itself(toy: Path) -> None:
    runs = headcount.open(toy / "runs", memory="1GB")
    answer = runs.sql("SELECT entropy FROM heads")
    for again in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
        assert again.rows() == answer.rows() != []
    other = pickle.loads(pickle.dumps(runs))
    runs.close()
    assert repr(runs) == f"{toy / 'runs'} (closed)"
    assert other.memory == "1GB"
    assert len(other.sql("heads")) == len(answer)


# Scanning


def test_a_scan_file_with_overrides_is_the_run_of_the_command(toy: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        f'model = "{toy}/gpt2"\nn_ctx = 8\nsequences = 2\nstatistics = ["entropy"]\n'
        f'input.family = "uniform_random"\nout = "{tmp_path}/runs"\n'
    )
    changes: Any = {"statistics": ["sink_mass"], "input.family": "repeated_random"}
    with headcount.scan(file, quiet=True, **changes) as run:
        (manifest,) = run.sql("SELECT name, input_family, statistics FROM runs").rows()
        assert manifest == ("own", "repeated_random", ["sink_mass"])
        kept = (Path(str(run.path)) / "scan.toml").read_text(encoding="utf-8")
    assert kept.endswith('# --set statistics=["sink_mass"]\n# --set input.family="repeated_random"')


def test_the_text_of_a_dict_is_a_scan_file(toy: Path) -> None:
    (run,) = (toy / "runs").glob("run_id=*")
    kept = load_scan(run / "scan.toml")
    assert f"run_id={kept.run_id('toy')}" == run.name
    assert [str(each) for each in kept.interventions] == INTERVENTIONS


def test_a_model_that_cannot_be_loaded_leaves_no_run_behind(toy: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(toy / "gpt2", tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(headcount.Error, match="the weights cannot be loaded"):
        headcount.scan(fields_of(broken, tmp_path / "runs"), quiet=True)
    assert list((tmp_path / "runs").iterdir()) == []


# Measuring a model in memory


def test_measured_rows_are_those_of_a_scan(toy: Path, runs: Any, untrained: Any) -> None:
    model, tokens = untrained, tokens_of(runs)
    rows = headcount.measure(model, tokens, STATISTICS, interventions=INTERVENTIONS, run_id="mine")
    (run,) = (toy / "runs").glob("run_id=*")
    files = [pq.ParquetFile(file).read() for file in run.rglob("heads/**/*.parquet")]
    assert len(files) == 4
    scanned = pa.concat_tables(files)
    assert rows.schema.equals(scanned.schema, check_metadata=True)
    assert set(rows["run_id"].to_pylist()) == {"mine"}
    assert_same(rows, scanned)
    # A part of it is the same part, and one sequence may come without its axis.
    part = headcount.measure(model, tokens[1].tolist(), STATISTICS, layers=[1], batch_size=1)
    assert part.num_rows == 4
    condition = "sequence = 1 AND layer = 1 AND intervention = 'none' ORDER BY head"
    expected = runs.sql(f"SELECT entropy FROM heads WHERE {condition}").arrow()
    np.testing.assert_allclose(part["entropy"], expected["entropy"], atol=TOLERANCE)


def state_of(model: Any) -> dict[str, Any]:
    """What somebody may notice of a model and of the generators, beside the values of weights."""
    parts = dict(model.named_modules())
    return {
        "learning": {
            name: (weight.data_ptr(), weight.requires_grad, weight.grad is None)
            for name, weight in model.named_parameters()
        },
        "modules": {name: (type(part).__name__, part.training) for name, part in parts.items()},
        "hooks": [
            {key: list(value) for key, value in vars(part).items() if key.endswith("_hooks")}
            for part in parts.values()
        ],
        "config": model.config.to_dict() | {"attention": model.config._attn_implementation},
        "random": (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()),
        "settings": (torch.is_grad_enabled(), torch.get_num_threads()),
    }


def trained(model: Any) -> torch.optim.Optimizer:
    """An optimizer after one step, with gradients left in the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(2 * N_CTX).reshape(2, N_CTX) % D_VOCAB
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    return optimizer


TOKENS = torch.randint(D_VOCAB, (3, N_CTX), generator=torch.Generator().manual_seed(1))


def test_a_measured_model_is_left_as_it_was(toy: Path) -> None:
    model = loaded(toy / "gpt2")
    calls: list[object] = []
    model.transformer.h[1].attn.register_forward_hook(lambda *_: calls.append(None))
    trained(model)
    calls.clear()
    output = model.eval()(TOKENS).logits.detach()
    model.train()
    model.transformer.h[0].eval()
    calls.clear()
    next(model.parameters()).requires_grad_(False)
    before, weights = state_of(model), [*model.parameters()]
    kept = [(weight.detach().clone(), weight.grad.clone()) for weight in weights]
    headcount.measure(model, TOKENS, STATISTICS, interventions=INTERVENTIONS)
    # Effects have a backward pass of their own.
    effects = ["effect_mean", "effect_window(1,3)", "gradient_norm"]
    headcount.measure(model, TOKENS, effects, interventions=["none", "zero_head(0,1)"])
    assert state_of(model) == before
    assert all(torch.equal(now, then) for now, (then, _) in zip(weights, kept, strict=True))
    assert all(torch.equal(now.grad, then) for now, (_, then) in zip(weights, kept, strict=True))
    assert calls == []
    assert torch.equal(model.eval()(TOKENS).logits, output)
    # It can still be trained, and its hooks run.
    model(TOKENS, labels=TOKENS).loss.backward()
    assert len(calls) == 2


def test_a_model_is_measured_as_it_is_at_that_step(toy: Path) -> None:
    model = loaded(toy / "gpt2")
    before = headcount.measure(model, TOKENS, STATISTICS)
    trained(model)
    after = headcount.measure(model, TOKENS, STATISTICS)
    assert_same(after, headcount.measure(copy.deepcopy(model), TOKENS, STATISTICS))
    assert np.abs(numbers(after)["entropy"] - numbers(before)["entropy"]).max() > 1e-3
    # New tensors in the old modules, and values written over the old ones.
    other = {name: value * 1.5 for name, value in model.state_dict().items()}
    for assign in (True, False):
        model.load_state_dict(other, assign=assign)
        rows = headcount.measure(model, TOKENS, STATISTICS)
        assert_same(rows, headcount.measure(copy.deepcopy(model), TOKENS, STATISTICS))
        other = {name: value * 0.5 for name, value in model.state_dict().items()}


def test_weights_that_a_bridge_has_copied_are_copied_anew() -> None:
    """The bridge of GPT-NeoX splits queries, keys and values into weights of its own."""
    from transformers import AutoModelForCausalLM

    names = ["sink_mass", "sink_score_shift"]  # The second one reads these weights.
    model = AutoModelForCausalLM.from_config(family("GPTNeoXConfig"))
    before = headcount.measure(model, TOKENS, names, engine="dense")
    trained(model)
    after = headcount.measure(model, TOKENS, names, engine="dense")
    expected = headcount.measure(copy.deepcopy(model), TOKENS, names, engine="dense")
    for name in expected.schema.names[7:]:
        np.testing.assert_array_equal(after[name], expected[name])
    assert not np.array_equal(before["sink_mass"], after["sink_mass"])


def test_half_precision_weights_and_autocast_are_measured_in_float32(toy: Path) -> None:
    model = loaded(toy / "gpt2").bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        rows = headcount.measure(model, TOKENS, STATISTICS)
    assert_same(rows, headcount.measure(copy.deepcopy(model).float(), TOKENS, STATISTICS))


def test_what_wraps_a_model_is_looked_through(toy: Path, untrained: Any) -> None:
    model = loaded(toy / "gpt2")
    forward = model.forward
    # As libraries do that cast what a model returns.
    model.forward = lambda *words, **named: forward(*words, **named)
    parallel = nn.Module()
    parallel.module = model
    rows = headcount.measure(parallel, TOKENS, STATISTICS)
    assert_same(rows, headcount.measure(untrained, TOKENS, STATISTICS))


def test_a_bridge_is_measured_as_it_is(untrained: Any) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    from headcount.workers.bridge.booting import stub_tokenizer

    with stub_tokenizer() as tokenizer:
        bridge = TransformerBridge.boot_transformers(
            "toy", hf_model=copy.deepcopy(untrained), tokenizer=tokenizer
        )
    calls: list[object] = []
    bridge.add_hook("blocks.0.attn.hook_z", lambda value, hook: calls.append(None))
    rows = headcount.measure(bridge, TOKENS, STATISTICS)
    assert_same(rows, headcount.measure(untrained, TOKENS, STATISTICS), 1e-5)
    # The hooks of a bridge are how it is changed, so they run.
    assert calls


# Training


def test_the_trainer_measures_before_during_and_after(toy: Path, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = loaded(toy / "gpt2")
    start = headcount.measure(model, TOKENS, ["sink_mass"])
    callback = headcount.MeasureCallback(
        TOKENS, every=2, statistics=["sink_mass"], out=tmp_path / "heads"
    )
    quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    arguments = TrainingArguments(
        str(tmp_path / "training"), max_steps=5, learning_rate=0.01, use_cpu=True,
        per_device_train_batch_size=2, disable_tqdm=True, **quiet,
    )  # fmt: skip
    texts: Any = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
    trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[callback])
    trainer.train()
    rows = callback.table()
    steps = rows["step"].to_numpy()
    assert sorted(set(steps.tolist())) == [0, 2, 4, 5]
    masses = rows["sink_mass"].to_numpy()
    end = headcount.measure(model, TOKENS, ["sink_mass"])
    for step, expected in ((0, start), (5, end)):
        np.testing.assert_array_equal(masses[steps == step], expected["sink_mass"])
    assert start["sink_mass"] != end["sink_mass"]
    files = sorted((tmp_path / "heads").iterdir())
    assert len(files) == 4
    assert pa.concat_tables(map(pq.read_table, files)).num_rows == rows.num_rows


def arguments_of(where: Path, **options: Any) -> Any:
    from transformers import TrainingArguments

    quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "logging_steps": 1}
    return TrainingArguments(
        str(where), learning_rate=0.01, use_cpu=True, per_device_train_batch_size=2, seed=1,
        disable_tqdm=True, **(quiet | options),
    )  # fmt: skip


def training(model: Any, where: Path, callbacks: list[Any], **options: Any) -> Any:
    """A Trainer on three texts, whose log has the loss of every step."""
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback

    texts: Any = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
    arguments = arguments_of(where, **options)
    trainer = Trainer(model, arguments, train_dataset=texts, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    return trainer


def end_of(trainer: Any) -> dict[str, Any]:
    """What a training leaves: losses, weights and the state of every generator."""
    weights = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    generators = (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate())
    history = [one for one in trainer.state.log_history if "heads/alarms" not in one]
    logged = [(one.get("loss"), one.get("grad_norm")) for one in history]
    return {"weights": weights, "random": generators, "logged": logged}


@pytest.mark.parametrize("broken", ["nothing", "out", "weights"])
def test_a_training_goes_on_bit_by_bit_whatever_becomes_of_measuring(
    toy: Path, tmp_path: Path, broken: str
) -> None:
    from transformers import TrainerCallback

    # One token longer than the texts of the training, so that its last position is in none.
    measured = torch.cat([TOKENS, TOKENS[:, :1]], dim=1)

    class Breaking(TrainerCallback):
        """Makes a position NaN that only the measured sequences have."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if broken == "weights" and state.global_step == 3:
                with torch.no_grad():
                    others["model"].transformer.wpe.weight[N_CTX] = torch.nan

    def trained_with(callbacks: list[Any]) -> Any:
        model = loaded(toy / "gpt2")
        trainer = training(model, tmp_path, [Breaking(), *callbacks], max_steps=5)
        trainer.train()
        return trainer

    expected = end_of(trained_with([]))
    out = tmp_path / "heads"
    if broken == "out":
        out.write_text("a file")
    callback = headcount.MeasureCallback(measured, every=2, statistics=["sink_mass"], out=out)
    if broken == "nothing":
        ended = end_of(trained_with([callback]))
        assert sorted(set(callback.table()["step"].to_pylist())) == [0, 2, 4, 5]
    else:
        first = {"out": 0, "weights": 4}[broken]
        with pytest.warns(RuntimeWarning, match=f"measures no more from step {first} on") as told:
            ended = end_of(trained_with([callback]))
        ours = [one for one in told if issubclass(one.category, RuntimeWarning)]
        assert len(ours) == 1
        assert "\n" not in str(ours[0].message)
    for name, weight in expected["weights"].items():
        assert torch.equal(weight.nan_to_num(), ended["weights"][name].nan_to_num()), name
    assert ended["logged"] == expected["logged"]
    assert ended["random"] == expected["random"]


def test_who_wants_the_error_gets_it(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "heads").write_text("a file")
    callback = headcount.MeasureCallback(
        TOKENS, statistics=["sink_mass"], out=tmp_path / "heads", on_error="raise"
    )
    with pytest.raises(headcount.Error, match="heads"):
        training(loaded(toy / "gpt2"), tmp_path, [callback], max_steps=2).train()


def test_wrong_arguments_are_refused_before_the_first_step(toy: Path, tmp_path: Path) -> None:
    words = "statistics: expected 'standard', 'all' or 'effects', or a list, got 'sink_mass'"
    wrong: Any = "sink_mass"
    for refuse in (
        lambda: headcount.MeasureCallback(TOKENS, statistics=wrong),
        lambda: headcount.measure(loaded(toy / "gpt2"), TOKENS, wrong),
    ):
        with pytest.raises(headcount.Error, match=words):
            refuse()
    trainer = training(
        loaded(toy / "gpt2"), tmp_path, [headcount.MeasureCallback(TOKENS + D_VOCAB)], max_steps=2
    )
    with pytest.raises(headcount.Error, match="tokens: expected ids from 0 to"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_files_of_one_training_are_not_mixed_with_another(toy: Path, tmp_path: Path) -> None:
    def steps() -> list[int]:
        return sorted(int(file.stem[5:]) for file in (tmp_path / "heads").iterdir())

    def callback(**options: Any) -> Any:
        named: dict[str, Any] = {"every": 2, "statistics": ["sink_mass"]} | options
        return headcount.MeasureCallback(TOKENS, out=tmp_path / "heads", **named)

    def trainer_of(measuring: Any, **options: Any) -> Any:
        saved = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4} | options
        return training(loaded(toy / "gpt2"), tmp_path / "saved", [measuring], **saved)

    first = callback()
    trainer_of(first).train()
    assert steps() == [0, 2, 4, 6]
    before = {file: file.read_bytes() for file in (tmp_path / "heads").iterdir()}
    again = trainer_of(callback())
    with pytest.raises(headcount.Error, match=r"holds 4 steps of an earlier training, 0 to 6"):
        again.train()
    assert again.state.global_step == 0
    # Going on from the checkpoint is the same training: what lay beyond it is measured again.
    other = trainer_of(callback(statistics=["entropy"]), max_steps=8)
    with pytest.raises(headcount.Error, match="has step 4 of another training"):
        other.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-4"))
    assert {file: file.read_bytes() for file in (tmp_path / "heads").iterdir()} == before
    resumed = callback(every=3)
    trainer_of(resumed, max_steps=7).train(
        resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-4")
    )
    assert steps() == [0, 2, 4, 6, 7]
    rows = [pq.read_table(file) for file in sorted((tmp_path / "heads").iterdir())]
    at_four = first.table()["step"].to_numpy() == 4
    np.testing.assert_allclose(
        rows[2]["sink_mass"], first.table()["sink_mass"].to_numpy()[at_four], rtol=1e-6
    )
    # In memory, a callback has the last training alone.
    assert sorted(set(resumed.table()["step"].to_pylist())) == [4, 6, 7]


# Cards and the notebook


def test_a_card_is_a_file_and_a_frame(runs: Any, tmp_path: Path) -> None:
    head = runs.head("L1H2")
    (mean,) = [each.mean for each in head.card.statistics if each.name == "entropy"]
    query = "SELECT avg(entropy) FROM heads WHERE label = 'L1H2' AND intervention = 'none'"
    assert mean == pytest.approx(runs.sql(query).rows()[0][0], rel=1e-6)
    head.save(tmp_path / "card.html")
    assert (tmp_path / "card.html").read_text(encoding="utf-8") == head.html()
    shown = head.show(height=300)._repr_html_()
    inside = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" (.*)></iframe>', shown)
    assert inside is not None
    assert html.unescape(inside[1]) == head.html()
    assert "height: 300px" in inside[2]


@pytest.mark.long
def test_jupyter_runs_the_whole_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, where no other file of ours lies and nothing leads to a network."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    # Only here: they take half a second, and bring warnings of their own.
    import nbformat
    from nbclient import NotebookClient

    (tmp_path / "elsewhere").mkdir()
    file = ROOT / "docs" / "guide" / "notebook.ipynb"
    notebook = nbformat.read(file, as_version=nbformat.NO_CONVERT)
    # Outputs that are stored would be of another version one day.
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    nbformat.validate(notebook)
    place = {"metadata": {"path": str(tmp_path / "elsewhere")}}
    NotebookClient(notebook, timeout=300, resources=place).execute()
    shown = {
        cell["id"]: cell["outputs"][-1]["data"]["text/html"]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and cell["outputs"]
    }
    assert list(shown) == ["scan", "sql", "heatmap", "card", "effect"]
    assert "<td>64 of 64</td>" in shown["scan"]
    assert shown["sql"].count("<tr>") == 1 + 16
    assert shown["heatmap"].count("<td id=") == 16
    assert shown["card"].startswith("<iframe srcdoc=")
    assert "zero_query_bias" in shown["effect"]
