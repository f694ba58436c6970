"""The published tables that replications compare with: complete, and as the sources print them.

That they are narrow enough to tell a wrong model is held by `test_controls`.
"""

from __future__ import annotations

import csv
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest

from headcount.reproduce.published_values import PublishedValue
from headcount.reproduce.replication import replications
from headcount.reproduce.replication_runs import plan_replication
from headcount.reproduce.verdicts import has_sizes
from tests.toys import published
from tests.toys import toy_models as toy

REPLICATIONS = replications()
HEADS = [f"L{layer}H{head}" for layer in range(12) for head in range(12)]
EVALUATED = 64
"""The profiler looks at the last 64 queries."""

INTERVENTION_OF_COLUMN = {
    "b_nullify_query_bias": "zero_query_bias",
    "c_remove_first_position": "first_position_second",
    "d_swap_effective_positions": "swap_effective_positions",
    "e_swap_raw_positions": "swap_raw_positions",
    "f_nullify_first_token": "zero_first_token",
    "g_no_mlp": "zero_mlps",
    "h_no_positions": "zero_positions",
    "i_zero_massive_key_columns": "scale_massive_keys",
    "j_zero_random_key_columns": "scale_random_keys",
}
"""Our interventions by column of the published table, which begins with the source's letter."""

INTERVENTIONS_OF_FAMILY = {
    "gpt2": "bcdefghij",
    "gpt-neo": "cdefghij",
    "opt": "bcfgh",
    "Qwen2.5": "bfg",
}
"""Which of them a family's models can have."""


def values(replication: str, file: str = "", model: str = "") -> dict[str, PublishedValue]:
    """What a replication compares with, by name, as its checks read it."""
    return {
        value.name: value
        for check in REPLICATIONS[replication].check
        for value in check.values
        if value.model == model and check.file.startswith(file)
    }


def all_heads() -> dict[str, PublishedValue]:
    heads = values("first_keys", "first_keys_heads.csv")
    return heads | values("first_keys", "first_keys_even_heads.csv")


def source_rows(file: str) -> Iterator[dict[str, str]]:
    """A table of a source. The test is skipped where it is not at hand."""
    with published.data_file(file).open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


def profiler_rows(file: str) -> Iterator[dict[str, str]]:
    return source_rows(f"attention_sink_profiler/{file}")


# The sink circuit


def test_the_table_of_sixteen_models_is_the_published_one() -> None:
    rows = list(source_rows("sink_circuit_models.csv"))
    sizes = REPLICATIONS["sink_circuit_models"].published_models
    assert len(rows) == len(sizes) == 16
    # The rows are in the order of the models of the source: by family, then by parameters.
    by_size = sorted(sizes, key=lambda m: int(sizes[m]["n_layers"]) * int(sizes[m]["d_model"]) ** 2)
    for family, letters in INTERVENTIONS_OF_FAMILY.items():
        prefix = {"gpt2": "GPT-2", "gpt-neo": "GPT-Neo", "opt": "OPT"}.get(family, family)
        family_rows = [row for row in rows if row["model"].startswith(f"{prefix} ")]
        models = [model for model in by_size if f"/{family}" in model]
        for row, model in zip(family_rows, models, strict=True):
            ours = values("sink_circuit_models", model=model)
            assert ours["first key, middle layers: untouched"].value == float(row["baseline"])
            for column, intervention in INTERVENTION_OF_COLUMN.items():
                value = ours.get(f"{intervention}: percent of the untouched model")
                assert (value is not None) == (column[0] in letters)
                assert value is None or value.value == float(row[column])


def test_the_table_of_interventions_is_the_published_one() -> None:
    ours = {name: value.value for name, value in values("sink_circuit").items()}
    letters = {
        f"int_{column[0]}": intervention for column, intervention in INTERVENTION_OF_COLUMN.items()
    }
    letters |= {"int_a": "none", "int_j": "scale_random_keys(42)"}
    for row in source_rows("sink_circuit_bos_attention_by_dataset.csv"):
        name = f"{letters[row['intervention']]}, {row['dataset']}"
        assert ours[name] == float(row["mean_bos_attention"])
    for row in source_rows("sink_circuit_bos_attention_overall.csv"):
        intervention = letters[row["intervention"]]
        assert ours[f"{intervention}: first key, layers 3 to 10"] == float(
            row["mean_bos_attention"]
        )
        assert ours[f"{intervention}: standard error"] == float(row["stderr"])


# The profiler: every head


def test_every_head_is_compared_at_every_length() -> None:
    lengths = (64, 128, 256, 512, 768, 1024)
    columns = [f"T = {n_ctx}: first {first}" for n_ctx in lengths for first in (1, 4, 8)]
    columns += [f"T = 512, without BOS: {what}" for what in ("first 1", "first 4", "entropy")]
    assert set(all_heads()) == {f"{head}, {column}" for head in HEADS for column in columns}


def test_heads_are_the_sources() -> None:
    heads = all_heads()
    for row in profiler_rows("attention_sink_summary_gpt2.csv"):
        head = f"L{row['layer']}H{row['head']}, T = {row['seq_len']}"
        for first in (1, 4, 8):
            expected = pytest.approx(float(row[f"sink_share_first_{first}"]), rel=1e-5)
            assert heads[f"{head}: first {first}"].value == expected
    columns = ("sink_share_first_1", "sink_share_first_4", "normalized_entropy")
    for row in profiler_rows("experiment3_head_classification.csv"):
        for what, column in zip(("first 1", "first 4", "entropy"), columns, strict=True):
            name = f"L{row['layer']}H{row['head']}, T = 512, without BOS: {what}"
            assert heads[name].value == pytest.approx(float(row[column]), rel=1e-5)


def test_layers_of_the_larger_model_are_the_sources() -> None:
    rows = list(profiler_rows("attention_sink_summary_gpt2medium.csv"))
    for name, value in values("first_keys", "first_keys_medium.csv").items():
        layer, n_ctx, first = re.findall(r"\d+", name)
        of_layer = [row for row in rows if (row["layer"], row["seq_len"]) == (layer, n_ctx)]
        shares = [float(row[f"sink_share_first_{first}"]) for row in of_layer]
        assert value.value == pytest.approx(np.mean(shares), rel=1e-5)


@pytest.mark.long
def test_the_paragraph_is_repeated_as_the_source_repeats_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    paragraph = published.data_file(published.PARAGRAPH)
    tokenizer_file = published.data_file("gpt2-tokenizer/tokenizer.json")
    # A tiny model with GPT-2's positions and tokenizer.
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 4, "n_layer": 1, "n_head": 1}
    config = toy.gpt2(**sizes, bos_token_id=50256, eos_token_id=50256)
    reader = toy.save_model(tmp_path / "gpt2", config)
    shutil.copytree(tokenizer_file.parent, reader, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    text = paragraph.read_text(encoding="utf-8")
    copy = tokenizer.encode(text).ids
    # The source puts the name of BOS and a space before each copy.
    copy_with_bos = tokenizer.encode("<|endoftext|> " + text).ids
    assert (len(copy), len(copy_with_bos)) == (56, 57)
    replication = REPLICATIONS["first_keys"]
    scans = {name: replication.scan[name] for name in ("length-6", "natural-3")}
    short = replication.model_copy(update={"scan": scans})
    plans = plan_replication(short, str(reader), str(tmp_path), text=str(paragraph))
    with_bos, without_bos = [plan.sequences.shard(0).tokens for plan in plans]
    np.testing.assert_array_equal(with_bos, [np.resize(copy_with_bos, 1024)])
    np.testing.assert_array_equal(without_bos, [np.resize(copy, 512)])
    # masked_keys reads the same sequence, and only one.
    masked = REPLICATIONS["masked_keys"].defaults
    assert masked["input"] == replication.scan["natural-3"]["input"]
    assert (masked["bos"], masked["sequences"]) == (False, 1)


# The profiler: hidden keys


def source_spans(n_ctx: int) -> dict[str, tuple[int, int]]:
    """First key and number of keys of the source's masks, by the source's names."""
    spans = {f"first_{count}": (0, count) for count in (1, 4, 8)}
    for count in (4, 8):
        spans[f"middle_{count}"] = (n_ctx // 2 - count // 2, count)
        spans[f"recent_{count}"] = (n_ctx - EVALUATED - count, count)
    draws = random.Random(123 + n_ctx)
    for count in (4, 8):
        for draw in range(3):
            last_start = n_ctx - EVALUATED - count - 1
            spans[f"random_{count}_trial{draw}"] = (draws.randint(1, last_start), count)
    return spans


@pytest.mark.parametrize("n_ctx", [256, 512, 1024])
def test_the_hidden_spans_are_the_sources(n_ctx: int) -> None:
    def keys(name: str) -> tuple[int, int]:
        first, count = map(int, re.findall(r"-?\d+", name))
        return first % n_ctx, count

    replication = REPLICATIONS["masked_keys"]
    untouched, *interventions = replication.scan[f"tokens-{n_ctx}"]["interventions"]
    assert untouched == "none"
    assert {keys(intervention) for intervention in interventions} == set(
        source_spans(n_ctx).values()
    )
    spans = duckdb.connect().execute(replication.view["spans"]).fetchall()
    assert source_spans(n_ctx) == {
        f"{span}_trial{draw}" if span.startswith("random") else span: keys(name)
        for scan, name, span, draw in spans
        if scan == f"tokens-{n_ctx}"
    }


def test_ratios_are_the_sources() -> None:
    ratios = values("masked_keys", "masked_keys")
    found: set[str] = set()

    def compare(name: str, row: dict[str, str]) -> None:
        found.add(f"T = {row['seq_len']}, {name}")
        expected = pytest.approx(float(row["ppl_ratio"]), abs=1e-5)
        assert ratios[f"T = {row['seq_len']}, {name}"].value == expected

    for row in profiler_rows("experiment2g_masked_key_ablation.csv"):
        if row["mask_group"] != "baseline":
            first, count = source_spans(int(row["seq_len"]))[row["mask_name"]]
            is_random = row["mask_name"].startswith("random")
            compare(f"keys {first} to {first + count - 1}" if is_random else row["mask_name"], row)
    for row in profiler_rows("experiment2g_masked_key_ablation_agg.csv"):
        compare(row["mask_name"], row)
    assert set(ratios) == found


@pytest.mark.parametrize("name", ["first_keys", "masked_keys", "induction_sinks"])
def test_a_model_with_more_positions_than_gpt2_is_not_gpt2(name: str) -> None:
    sizes = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_vocab": 50257}
    published_sizes = REPLICATIONS[name].published_sizes
    assert has_sizes(toy.toy_info(**sizes, n_ctx=1024), published_sizes)
    # GPT-Neo 125M
    assert not has_sizes(toy.toy_info(**sizes, n_ctx=2048), published_sizes)
