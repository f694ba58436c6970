"""The sink circuit in other models: every cell of model and intervention, against what the source
says of it, done by hand to the modules of transformers.
"""

import csv
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headcount.queries.ask.asking import RunDatabase
from headcount.reproduce.replication_runs import open_replication_runs
from headcount.schemas.errors import ModelError
from headcount.schemas.scans.intervention import parse_intervention
from headcount.workers.interventions import bind
from headcount.workers.known_models import KnownModels
from tests import ROOT
from tests.reproduce.controls import measured_runs, stand_in_files
from tests.toys import published
from tests.toys.random_model import FAMILIES, LIVELY, write_random_model
from tests.toys.toy_replications import REPLICATIONS

REPLICATION = REPLICATIONS["sink_circuit_models"]
SIZES = {"n_layers": 6, "n_heads": 4, "d_head": 16, "d_vocab": 300}
LETTERS = "abcdefghij"

ADDED = dict(zip(LETTERS, [
    "none", "zero_query_bias", "first_position_second", "swap_effective_positions",
    "swap_raw_positions", "zero_first_token", "zero_mlps", "zero_positions", "scale_massive_keys",
    "scale_random_keys",
], strict=True))  # fmt: skip
ROTATED = ADDED | {
    "c": "first_rotation_second", "d": "swap_first_rotations", "e": "swap_first_rotations",
    "h": "zero_rotations", "i": "scale_first_token_keys", "j": "scale_random_token_keys",
}  # fmt: skip
"""What the replication does for each letter, in models that add positions and in those that rotate.
"""
ROTARY = ("qwen2", "llama", "mistral")

UNDEFINED = {(family, "b") for family in ("gpt_neo", "llama", "mistral")}
"""Cells without meaning: there is no query bias."""


def cell_name(family: str, letter: str) -> str:
    """The name of the figure of a cell."""
    if letter == "a":
        return "first key, middle layers: untouched"
    intervention = (ROTATED if family in ROTARY else ADDED)[letter]
    return f"{intervention}: percent of the untouched model"


# The published table


def test_every_cell_is_compared_or_undefined() -> None:
    compared = {(value.model, value.name) for value in REPLICATION.published_values}
    missing: set[tuple[str, str]] = set()
    for model, sizes in REPLICATION.published_models.items():
        family = str(sizes["family"])
        for letter in LETTERS:
            if (model, cell_name(family, letter)) not in compared:
                missing.add((family, letter))
    assert len(REPLICATION.published_models) * len(LETTERS) == 160
    assert missing == {("gpt_neo", "b")} <= UNDEFINED
    page = (ROOT / "docs" / "reference" / "literature.md").read_text(encoding="utf-8")
    assert "queries of GPT-Neo have no bias to set to zero" in page


def test_the_cells_are_those_of_the_sources_table() -> None:
    names = {"GPT-2 355M": "gpt2-medium", "GPT-2 774M": "gpt2-large"}
    published_values = {
        (value.model.rpartition("/")[2].lower(), value.name): value.value
        for value in REPLICATION.published_values
    }
    compared = 0
    with published.data_file("sink_circuit_models.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            # Of GPT-2 small the source also has a mean over seven draws, which is compared instead.
            if row["model"] == "GPT-2 124M":
                continue
            model = names.get(row["model"], row["model"].lower().replace(" ", "-"))
            (family,) = {
                str(sizes["family"])
                for name, sizes in REPLICATION.published_models.items()
                if name.lower().endswith(f"/{model}")
            }
            columns = [row["baseline"], *list(row.values())[3:]]
            for letter, column in zip(LETTERS, columns, strict=True):
                if (family, letter) not in UNDEFINED:
                    assert published_values[model, cell_name(family, letter)] == float(column)
                    compared += 1
    assert compared == 15 * 10 - 3


# Toy models


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp(family) / "model"
    return write_random_model(home, "bundled:gpt2-mini", SIZES | {"family": family}, LIVELY)


@pytest.fixture(scope="module")
def database(path: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDatabase:
    out = tmp_path_factory.mktemp("runs")
    few = REPLICATION.defaults | {"sequences": 3, "sequences_per_shard": 3}
    short = REPLICATION.model_copy(update={"defaults": few})
    with stand_in_files(short):
        runs, _ = measured_runs(short, str(path), out, KnownModels())
    return open_replication_runs(REPLICATION, str(runs))


@pytest.fixture(scope="module")
def figures(database: RunDatabase) -> dict[str, Any]:
    return dict(database.rows("SELECT name, value FROM figures"))


@pytest.mark.long
@pytest.mark.parametrize("letter", LETTERS)
def test_every_cell_is_what_the_source_does(
    family: str, letter: str, path: Path, database: RunDatabase, figures: dict[str, Any]
) -> None:
    if (family, letter) in UNDEFINED:
        assert cell_name(family, letter) not in figures
        models = KnownModels()
        model = models.load(models.describe(str(path)), "raw", "cpu")
        (part,) = bind(parse_intervention("zero_query_bias")).parts
        with pytest.raises(ModelError, match="layer 0 has no b_Q for zero_query_bias to change"):
            part.weights(model)
        return
    rows = database.rows("SELECT tokens FROM replication_sequences WHERE scan = 'untouched'")
    means = {
        each: np.mean([band(path, family, each, torch.tensor([tokens])) for (tokens,) in rows])
        for each in ("a", letter)
    }
    expected = means["a"] if letter == "a" else 100 * means[letter] / means["a"]
    assert figures[cell_name(family, letter)] == pytest.approx(expected, rel=1e-4)
    # A toy whose attention nothing changes would show nothing.
    assert letter == "a" or abs(expected - 100) > 0.1


# By hand


class Parts:
    """Where a family keeps what the interventions change."""

    def __init__(self, path: Path, family: str) -> None:
        from transformers import AutoModelForCausalLM

        eager = {"attn_implementation": "eager", "dtype": torch.float64}
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, **eager).eval()
        self.family = family
        base = self.model.model.decoder if family == "opt" else self.model.base_model
        self.layers = base.layers if family in ("opt", *ROTARY) else base.h
        self.embedding = base.wte if family.startswith("gpt") else base.embed_tokens
        name = "embed_positions" if family == "opt" else "wpe"
        self.positions: Any = getattr(base, name, None)

    def mlp(self, layer: int) -> Any:
        """The module whose output is what the MLP adds."""
        block = self.layers[layer]
        return block.fc2 if self.family == "opt" else block.mlp

    def first_mlp(self, x: Tensor) -> Tensor:
        block = self.layers[0]
        if self.family == "opt":
            return block.fc2(torch.relu(block.fc1(x)))
        return block.mlp(x[None])[0]

    def queries_and_keys(self, layer: int) -> tuple[Tensor | None, Tensor]:
        """The bias of the queries, and the weights of the keys as `[d_model head·d_head]`."""
        block = self.layers[layer]
        if self.family == "gpt2":
            joint, width = block.attn.c_attn, block.ln_1.weight.shape[0]
            return joint.bias[:width], joint.weight[:, width : 2 * width]
        attention = block.attn.attention if self.family == "gpt_neo" else block.self_attn
        return attention.q_proj.bias, attention.k_proj.weight.T


def outliers(x: Tensor) -> list[int]:
    """Coordinates above mean + 3 standard deviations of the sizes, or else the three largest."""
    sizes = x.abs().numpy()
    count = max(3, int((sizes > sizes.mean() + 3 * sizes.std()).sum()))
    return np.argsort(sizes)[-count:].tolist()


def band(path: Path, family: str, letter: str, tokens: Tensor) -> float:
    """Mean attention of the later queries to key 0, from layer 3 to the last but one."""
    parts = Parts(path, family)
    with torch.no_grad(), ExitStack() as hooks:

        def change_output(module: Any, change: Callable[[Tensor], Tensor]) -> None:
            hook = module.register_forward_hook(lambda _module, _args, output: change(output))
            hooks.enter_context(hook)

        options = by_hand(parts, letter, tokens, change_output)
        patterns = parts.model(tokens, output_attentions=True, **options).attentions
    n_ctx, n_layers = tokens.shape[1], len(patterns)
    return torch.stack(patterns)[3 : n_layers - 1, 0, :, n_ctx // 2 :, 0].mean().item()


def by_hand(
    parts: Parts, letter: str, tokens: Tensor, change_output: Callable[..., None]
) -> dict[str, Any]:
    """Make a change; returns the options with which the model is called."""
    layers = range(len(parts.layers))
    if letter in "bij":
        zero_weights(parts, letter, tokens)
    elif letter == "f":
        change_output(parts.embedding, partial(with_row, other=None))
    elif letter == "g":
        for layer in layers:
            change_output(parts.mlp(layer), torch.zeros_like)
    elif parts.positions is None:
        return rotary_options(letter, tokens)
    elif letter == "c":
        change_output(parts.positions, partial(with_row, other=1))
    elif letter == "h":
        change_output(parts.positions, torch.zeros_like)
    elif letter in "de":
        rows = position_rows(parts)
        rows = rows + parts.first_mlp(rows) if letter == "d" else rows
        change_output(parts.mlp(0), partial(swapped, rows=rows))
    return {}


def rotary_options(letter: str, tokens: Tensor) -> dict[str, Any]:
    """By which positions the tokens are rotated."""
    first = {"c": [1, 1], "d": [1, 0], "e": [1, 0]}.get(letter, [0, 1])
    place = torch.tensor([[*first, *range(2, tokens.shape[1])]]) * (letter != "h")
    # With a mask, transformers does not take positions out of order for several sequences.
    return {"position_ids": place, "attention_mask": torch.ones_like(tokens)}


def swapped(mlp_out: Tensor, rows: Tensor) -> Tensor:
    """What the first MLP puts out, with the directions of two rows exchanged."""
    # OPT has one axis for sequences and positions.
    changed = mlp_out.reshape(-1, mlp_out.shape[-1]).clone()
    u0, u1 = (row / row.norm() for row in rows)
    a = changed[0] @ u0
    changed[0] += a * (u1 - u0)
    changed[1] += a * (u0 - u1)
    return changed.view_as(mlp_out)


def position_rows(parts: Parts) -> Tensor:
    """The embeddings of positions 0 and 1; OPT's table begins with two rows that none uses."""
    first = 2 if parts.family == "opt" else 0
    return parts.positions.weight[first : first + 2]


def with_row(output: Tensor, other: int | None) -> Tensor:
    """`[1 pos d_model]` in which position 0 has what another has, or zeros."""
    changed = output.clone()
    changed[:, 0] = 0 if other is None else output[:, other]
    return changed


def zero_weights(parts: Parts, letter: str, tokens: Tensor) -> None:
    """b: query biases. i: what keys read of the outliers of what is first. j: what they read of as
    many others, drawn in each layer.
    """
    if parts.positions is None:
        massive = outliers(parts.embedding.weight[tokens[0, 0]])
    else:
        rows = position_rows(parts)
        massive = outliers((rows + parts.first_mlp(rows))[0])
    generator = random.Random(42)
    for layer in range(len(parts.layers)):
        bias, keys = parts.queries_and_keys(layer)
        if letter == "b":
            assert bias is not None
            bias.zero_()
            continue
        columns = massive
        if letter == "j":
            columns = []
            while len(columns) < len(massive):
                column = generator.randint(0, len(keys) - 1)
                if column not in (*massive, *columns):
                    columns.append(column)
        keys[columns] = 0
