"""The profiler's tables in the replications `first_keys` and `masked_keys`.

They are complete, at the places of the source, and narrow enough to tell a wrong model.
"""

from __future__ import annotations

import csv
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pytest

from headcount.reproduce.replication import Replication, replications
from headcount.reproduce.replication_runs import plan_replication
from headcount.reproduce.verdicts import has_sizes
from tests.toys import published
from tests.toys import toy_models as toy

REPLICATIONS = replications()
LENGTHS = (64, 128, 256, 512, 768, 1024)
HEADS = [f"L{layer}H{head}" for layer in range(12) for head in range(12)]
EVALUATED = 64
"""The source looks at the last 64 queries."""


def numbers(replication: str, file: str) -> dict[str, tuple[float, float]]:
    """Published value and tolerance by name, as a check reads them from its file."""
    (check,) = [check for check in REPLICATIONS[replication].check if check.file == file]
    return {value.name: (value.value, value.allowed_distance) for value in check.values}


def all_heads() -> dict[str, tuple[float, float]]:
    heads = numbers("first_keys", "first_keys_heads.csv")
    return heads | numbers("first_keys", "first_keys_even_heads.csv")


def source_rows(file: str) -> Iterator[dict[str, str]]:
    """A table of the source. The test is skipped where it is not at hand."""
    with source_file(file).open(encoding="utf-8") as lines:
        yield from csv.DictReader(lines)


def source_file(name: str) -> Path:
    paths = [folder / "attention_sink_profiler" / name for folder in published.DATA]
    for path in paths:
        if path.is_file():
            return path
    pytest.skip(f"the source's {name} is not beside the project")


def uniform_share(n_ctx: int, first: int) -> float:
    """What uniform attention gives the first keys, mean over the evaluated queries."""
    queries = range(n_ctx - EVALUATED, n_ctx)
    return sum(min(first, query + 1) / (query + 1) for query in queries) / EVALUATED


# Every head


def test_every_head_is_compared_at_every_length() -> None:
    with_bos = {
        f"{head}, T = {n_ctx}: first {first}"
        for head in HEADS
        for n_ctx in LENGTHS
        for first in (1, 4, 8)
    }
    without_bos = {
        f"{head}, T = 512, without BOS: {what}"
        for head in HEADS
        for what in ("first 1", "first 4", "entropy")
    }
    assert set(all_heads()) == with_bos | without_bos


def test_heads_are_the_sources() -> None:
    heads = all_heads()
    for row in source_rows("attention_sink_summary_gpt2.csv"):
        head = f"L{row['layer']}H{row['head']}, T = {row['seq_len']}"
        for first in (1, 4, 8):
            value, _ = heads[f"{head}: first {first}"]
            assert value == pytest.approx(float(row[f"sink_share_first_{first}"]), rel=1e-5)
    columns = {
        "first 1": "sink_share_first_1",
        "first 4": "sink_share_first_4",
        "entropy": "normalized_entropy",
    }
    for row in source_rows("experiment3_head_classification.csv"):
        for what, column in columns.items():
            name = f"L{row['layer']}H{row['head']}, T = 512, without BOS: {what}"
            assert heads[name][0] == pytest.approx(float(row[column]), rel=1e-5)


def test_layers_of_the_larger_model_are_the_sources() -> None:
    rows = list(source_rows("attention_sink_summary_gpt2medium.csv"))
    layers = numbers("first_keys", "first_keys_medium.csv")
    for name, (value, _) in layers.items():
        layer, n_ctx, first = re.findall(r"\d+", name)
        shares = [
            float(row[f"sink_share_first_{first}"])
            for row in rows
            if row["layer"] == layer and row["seq_len"] == n_ctx
        ]
        assert value == pytest.approx(np.mean(shares), rel=1e-5)


def test_uniform_attention_is_not_taken_for_a_published_head() -> None:
    shares = numbers("first_keys", "first_keys_heads.csv")
    shares |= numbers("first_keys", "first_keys_medium.csv")
    for name, (value, tolerance) in shares.items():
        if not name.endswith("entropy"):
            n_ctx, first = re.findall(r"T = (\d+).*first (\d)", name)[0]
            assert abs(uniform_share(int(n_ctx), int(first)) - value) > 1.1 * tolerance, name


def test_odds_that_are_eight_percent_off_are_near_enough_and_a_quarter_is_not() -> None:
    def moved(share: float, factor: float) -> float:
        odds = factor * share / (1 - share)
        return odds / (1 + odds)

    for name, (share, tolerance) in all_heads().items():
        if not name.endswith("entropy"):
            assert abs(moved(share, 1.08) - share) <= tolerance, name
            # Below a thousandth it is the absolute part of the tolerance that counts.
            if share > 1e-3:
                assert abs(moved(share, 1.25) - share) > tolerance, name


# The passage


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with GPT-2's positions and tokenizer."""
    config = toy.gpt2(
        vocab_size=50257,
        n_positions=1024,
        n_embd=4,
        n_layer=1,
        n_head=1,
        bos_token_id=50256,
        eos_token_id=50256,
    )
    path = toy.save_model(tmp_path_factory.mktemp("gpt2"), config)
    tokenizer = next((data / "gpt2-tokenizer" for data in published.DATA), None)
    if tokenizer is None or not tokenizer.is_dir():
        pytest.skip("GPT-2's tokenizer is not beside the project")
    for file in tokenizer.iterdir():
        shutil.copyfile(file, path / file.name)
    return str(path)


def test_the_paragraph_is_repeated_as_the_source_repeats_it(reader: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    paragraph = source_file("paragraph.txt")
    tokenizer = Tokenizer.from_file(f"{reader}/tokenizer.json")
    text = paragraph.read_text(encoding="utf-8")
    copy = tokenizer.encode(text).ids
    # The source puts the name of BOS and a space before each copy.
    copy_with_bos = tokenizer.encode("<|endoftext|> " + text).ids
    assert (len(copy), len(copy_with_bos)) == (56, 57)
    replication = REPLICATIONS["first_keys"]
    scans = {name: replication.scan[name] for name in ("length-6", "natural-3")}
    plans = plan_replication(
        replication.model_copy(update={"scan": scans}), reader, str(tmp_path), text=str(paragraph)
    )
    with_bos, without_bos = [plan.sequences.shard(0).tokens for plan in plans]
    np.testing.assert_array_equal(with_bos, [np.resize(copy_with_bos, 1024)])
    np.testing.assert_array_equal(without_bos, [np.resize(copy, 512)])
    # masked_keys reads the same sequence, and only one.
    masked = REPLICATIONS["masked_keys"].defaults
    assert masked["input"] == replication.scan["natural-3"]["input"]
    assert (masked["bos"], masked["sequences"]) == (False, 1)


# Hidden keys


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
    replication = REPLICATIONS["masked_keys"]
    interventions = replication.scan[f"tokens-{n_ctx}"]["interventions"]
    assert interventions[0] == "none"
    hidden: set[tuple[int, int]] = set()
    for name in interventions[1:]:
        first, count = map(int, re.findall(r"-?\d+", name))
        hidden.add((first % n_ctx, count))
    assert hidden == set(source_spans(n_ctx).values())
    spans = duckdb.connect().execute(replication.view["spans"]).fetchall()
    names = {
        (f"{span}_trial{draw}" if span.startswith("random") else span): re.findall(r"-?\d+", name)
        for scan, name, span, draw in spans
        if scan == f"tokens-{n_ctx}"
    }
    assert {
        name: (int(first) % n_ctx, int(count)) for name, (first, count) in names.items()
    } == source_spans(n_ctx)


def test_ratios_are_named_and_averaged_as_the_source_does(
    named_ratios: Callable[[dict[tuple[str, str], float]], dict[str, float]],
) -> None:
    # The source's own ratios. At 512 tokens two of its three spans of four keys are the same.
    ratios = {
        ("tokens-512", "mask_keys(0,1)"): 0.9924335114012817,
        ("tokens-512", "mask_keys(177,4)"): 1.0018626883828252,
        ("tokens-512", "mask_keys(399,4)"): 1.0999278128181211,
    }
    expected = {
        "T = 512, first_1": 0.9924335114012817,
        "T = 512, keys 177 to 180": 1.0018626883828252,
        "T = 512, keys 399 to 402": 1.0999278128181211,
        "T = 512, random_4_mean": 1.0345510631945904,
    }
    assert named_ratios(ratios) == pytest.approx(expected, rel=1e-9)


@pytest.fixture
def named_ratios() -> Callable[[dict[tuple[str, str], float]], dict[str, float]]:
    """The replication's view of names, asked about given ratios."""

    def ask(ratios: dict[tuple[str, str], float]) -> dict[str, float]:
        database = duckdb.connect()
        database.execute("CREATE TABLE costs (scan TEXT, intervention TEXT, ratio DOUBLE)")
        rows = [(scan, name, ratio) for (scan, name), ratio in ratios.items()]
        database.executemany("INSERT INTO costs VALUES (?, ?, ?)", rows)
        for view in ("spans", "span_ratios", "named_ratios"):
            database.execute(f"CREATE VIEW {view} AS {REPLICATIONS['masked_keys'].view[view]}")
        return dict(database.execute("FROM named_ratios").fetchall())

    return ask


def test_ratios_are_the_sources() -> None:
    ratios = numbers("masked_keys", "masked_keys.csv")
    ratios |= numbers("masked_keys", "masked_keys_small.csv")
    names = {"untouched"}
    for row in source_rows("experiment2g_masked_key_ablation.csv"):
        if row["mask_group"] == "baseline":
            continue
        first, count = source_spans(int(row["seq_len"]))[row["mask_name"]]
        is_random = row["mask_name"].startswith("random")
        keys = f"keys {first} to {first + count - 1}" if is_random else row["mask_name"]
        names.add(f"T = {row['seq_len']}, {keys}")
        value, _ = ratios[f"T = {row['seq_len']}, {keys}"]
        assert value == pytest.approx(float(row["ppl_ratio"]), abs=1e-5)
    for row in source_rows("experiment2g_masked_key_ablation_agg.csv"):
        name = f"T = {row['seq_len']}, {row['mask_name']}"
        names.add(name)
        assert ratios[name][0] == pytest.approx(float(row["ppl_ratio"]), abs=1e-5)
    assert set(ratios) == names - {"untouched"}


def test_hiding_nothing_is_told_from_hiding_keys_unless_the_file_says_why_not() -> None:
    for value, tolerance in numbers("masked_keys", "masked_keys.csv").values():
        assert abs(value - 1) > tolerance
    for value, tolerance in numbers("masked_keys", "masked_keys_small.csv").values():
        assert abs(value - 1) <= tolerance


# Sizes


@pytest.mark.parametrize("name", ["first_keys", "masked_keys", "induction_sinks"])
def test_a_model_with_more_positions_than_gpt2_is_not_gpt2(name: str) -> None:
    replication: Replication = REPLICATIONS[name]
    sizes = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_vocab": 50257}
    assert has_sizes(toy.toy_info(**sizes, n_ctx=1024), replication.published_sizes)
    # GPT-Neo 125M
    assert not has_sizes(toy.toy_info(**sizes, n_ctx=2048), replication.published_sizes)
