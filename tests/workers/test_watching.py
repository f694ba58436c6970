"""Trainings that are watched: what is logged, what rings, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headcount
from headcount.schemas.watch.alarms import Alarm
from headcount.workers.watching import (
    Sample,
    facts_of,
    leak_between,
    leak_from_later,
    sample_of,
)
from tests.toys.toy_models import CONFIGS, D_VOCAB

TOKENS = torch.randint(D_VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
DOCUMENTS = (torch.arange(12) % 6).expand(3, -1)


def toy_model() -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS["gpt2"]())


def training(where: Path, callback: Any, model: Any = None, **options: Any) -> Any:
    """A Trainer of six steps, quiet but for what is asked of it."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "max_steps": 6}
    arguments: Any = TrainingArguments(
        str(where), learning_rate=1e-3, use_cpu=True, per_device_train_batch_size=3,
        disable_tqdm=True, **(quiet | options),
    )  # fmt: skip
    texts: Any = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
    trainer = Trainer(model or toy_model(), arguments, train_dataset=texts, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    return trainer


def kill_a_head(model: Any) -> None:
    """Take the first head's output away."""
    with torch.no_grad():
        d_head = model.config.n_embd // model.config.n_head
        model.transformer.h[0].attn.c_proj.weight[:d_head] = 0


@pytest.mark.long
def test_tensorboard_has_what_was_measured_beside_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    callback = headcount.MeasureCallback(TOKENS, every=2, log="layers")
    training(tmp_path, callback, report_to="tensorboard").train()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [each.step for each in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    rows = callback.table().to_pandas()
    by_head = rows.groupby(["step", "layer", "head"])["sink_mass"].mean()
    for name, expected in (
        ("mean", by_head.groupby("step").mean()),
        ("max", by_head.groupby("step").max()),
        ("layer_1", by_head[:, 1].groupby("step").mean()),
        ("max_head", by_head.groupby("step").idxmax().map(lambda place: place[2])),
    ):
        logged = events.Scalars(f"train/heads/sink_mass/{name}")
        assert [each.step for each in logged] == [0, 2, 4, 6]
        np.testing.assert_allclose([each.value for each in logged], expected, rtol=1e-6)
    assert {each.value for each in events.Scalars("train/heads/alarms")} == {0}


def test_an_alarm_stops_the_training_and_a_resumed_one_does_not_ring_again(tmp_path: Path) -> None:
    model = toy_model()
    kill_a_head(model)
    options: dict[str, Any] = {"every": 2, "out": tmp_path / "heads"}
    stopping = headcount.MeasureCallback(TOKENS, on_alarm="stop", **options)
    trainer = training(tmp_path, stopping, model, save_strategy="steps", save_steps=1)
    with pytest.warns(RuntimeWarning, match="head_death at step 0, L0H0: A head adds nothing"):
        trainer.train()
    assert trainer.state.global_step < 6
    # Nobody has listened: the training goes on, and what rang stays as it was.
    rang: list[Alarm] = []
    going_on = headcount.MeasureCallback(TOKENS, on_alarm=rang.append, **options)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    training(tmp_path, going_on, model).train(resume_from_checkpoint=str(checkpoint))
    assert rang == []


def test_the_trainer_logs_beside_the_losses(tmp_path: Path) -> None:
    trainer = training(tmp_path, headcount.MeasureCallback(TOKENS, every=2))
    trainer.train()
    history = trainer.state.log_history
    assert [each["step"] for each in history if "loss" in each] == [1, 2, 3, 4, 5, 6]
    logged = [each for each in history if "heads/sink_mass/mean" in each]
    assert [each["step"] for each in logged] == [0, 2, 4, 6]
    assert {each["heads/alarms"] for each in logged} == {0}


def test_a_loop_of_ones_own_gets_the_same_and_may_be_stopped() -> None:
    model = toy_model()
    rang: list[Alarm] = []
    numbers = headcount.watch(model, TOKENS, 0, on_alarm=rang.append)
    rows = headcount.measure(model, TOKENS, ["sink_mass"])["sink_mass"].to_numpy()
    assert numbers["heads/sink_mass/mean"] == pytest.approx(rows.mean())
    assert (numbers["heads/alarms"], rang) == (0, [])
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.01)
    kill_a_head(model)
    with pytest.raises(headcount.Error, match="head_death at step 5, L0H0"):
        headcount.watch(model, TOKENS, 5, on_alarm="stop")
    with pytest.raises(headcount.Error, match="on_alarm"):
        headcount.watch(model, TOKENS, 6, on_alarm="shout")  # pyright: ignore


@pytest.mark.parametrize(
    ("more", "leaks"),
    [
        pytest.param({"use_cache": False}, False, id="mask of documents"),
        pytest.param({"use_cache": True}, True, id="a cache"),
        pytest.param(
            {"use_cache": False, "attention_mask": torch.ones(3, 12, dtype=torch.long)}, True,
            id="a mask of ones",
        ),
    ],
)  # fmt: skip
def test_documents_that_see_each_other_are_told_by_the_model_itself(
    more: dict[str, Any], leaks: bool
) -> None:
    model = toy_model().train()
    sample = sample_of({"input_ids": TOKENS, "labels": TOKENS, "position_ids": DOCUMENTS, **more})
    assert sample.inputs is not None
    assert sample.has_documents
    leak = leak_between(model, sample.inputs)
    assert leak > 1e-3 if leaks else leak == 0
    assert model.training


def test_a_sample_counts_what_repeats_but_not_the_padding() -> None:
    tokens = torch.tensor([[1, 2, 1, 2], [3, 4, 0, 0]])
    assert sample_of({"input_ids": tokens}).repeated == 1 - 5 / 8
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    sample = sample_of({"input_ids": tokens, "attention_mask": mask})
    assert (sample.repeated, sample.has_documents) == (1 - 4 / 6, False)
    assert sample_of({"inputs_embeds": tokens}).repeated is None


def test_a_sample_tells_labels_that_are_shifted_and_batches_apart() -> None:
    tokens = torch.tensor([[1, 2, 3, 3], [4, 5, 6, 7]])
    shifted = torch.tensor([[2, 3, 3, -100], [-100, 6, 7, -100]])
    own, next_ones = (sample_of({"input_ids": tokens, "labels": x}) for x in (tokens, shifted))
    # Of five labels one is the next token and its own.
    assert (own.shifted, next_ones.shifted) == (0, 4 / 5)
    assert sample_of({"input_ids": tokens}).shifted is None
    assert own.batch == next_ones.batch != sample_of({"input_ids": tokens + 1}).batch


def test_predictions_that_follow_later_tokens_are_told_by_the_model_itself() -> None:
    model = toy_model().train()
    mask = torch.ones_like(TOKENS)
    mask[:, -3:] = 0  # What is padding is no later token.
    for more in ({}, {"attention_mask": mask}):
        inputs = sample_of({"input_ids": TOKENS, **more}).inputs
        assert inputs is not None
        assert leak_from_later(model, inputs) == 0
        everything = {"attention_mask": torch.zeros(1, 1, *2 * TOKENS.shape[1:])}
        leak = leak_from_later(model, {**inputs, **everything})
        assert leak is not None
        assert leak > 1e-3
    assert leak_from_later(model, {"input_ids": TOKENS[:, :1]}) is None


def test_a_changed_scale_is_in_the_facts_of_its_layer_alone() -> None:
    model = toy_model()
    before = facts_of(model, Sample()).attention
    model.train()
    assert facts_of(model, Sample()).attention == before
    attention = next(part for part in model.modules() if hasattr(part, "scaling"))
    attention.scaling = 1.0
    after = facts_of(model, Sample()).attention
    assert {layer for layer in before if after[layer] != before[layer]} == {"0"}


def test_sharded_weights_are_refused_in_one_line_before_the_first_step(tmp_path: Path) -> None:
    from torch.distributed import device_mesh, fsdp

    distributed: Any = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        model: Any = toy_model()
        fsdp.fully_shard(model, mesh=device_mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(headcount.Error, match=r"sharded; save whole .* watch DIR") as refusal:
            headcount.watch(model, TOKENS, 0)
    finally:
        distributed.destroy_process_group()
    assert "\n" not in str(refusal.value)
    # As DeepSpeed marks the weights that it takes apart.
    marked = toy_model()
    marked.transformer.wte.weight.ds_id = 0
    trainer = training(tmp_path, headcount.MeasureCallback(TOKENS), marked)
    with pytest.raises(headcount.Error, match="ZeRO-3"):
        trainer.train()
    assert trainer.state.global_step == 0
