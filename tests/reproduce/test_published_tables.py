"""The published tables that replications compare with: complete, and as the sources measured them.

That they are narrow enough to tell a wrong model is held by `test_controls`.
"""

import hashlib
import random
import re
import shutil
from pathlib import Path

import duckdb
import numpy as np
import pytest

from headcount.reproduce.replication_runs import plan_replication
from headcount.reproduce.verdicts import has_sizes
from tests.toys import published
from tests.toys import toy_models as toy
from tests.toys.toy_replications import REPLICATIONS

HEADS = [f"L{layer}H{head}" for layer in range(12) for head in range(12)]
EVALUATED = 64
"""The profiler looks at the last 64 queries."""

COMPARED = {
    "first_keys": "8cbc3df12cab2c3a",
    "masked_keys": "4894f620d8dbc385",
    "sink_circuit": "3f0ff03eb86942d9",
    "sink_circuit_models": "b4fb579c7bbe303d",
}
"""Digests of published values, after those that stand in tables of their sources were compared."""


@pytest.mark.parametrize("name", COMPARED)
def test_published_values_are_those_that_were_compared_with_their_sources(name: str) -> None:
    values = REPLICATIONS[name].published_values
    text = "".join(f"{value.model} {value.name} {value.value!r}\n" for value in values)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == COMPARED[name]


# The profiler: every head


def test_every_head_is_compared_at_every_length() -> None:
    lengths = (64, 128, 256, 512, 768, 1024)
    columns = [f"T = {n_ctx}: first {first}" for n_ctx in lengths for first in (1, 4, 8)]
    columns += [f"T = 512, without BOS: {what}" for what in ("first 1", "first 4", "entropy")]
    files = ("first_keys_heads.csv", "first_keys_even_heads.csv")
    checks = [check for check in REPLICATIONS["first_keys"].check if check.file in files]
    names = {value.name for check in checks for value in check.values}
    assert names == {f"{head}, {column}" for head in HEADS for column in columns}


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


@pytest.mark.parametrize("name", ["first_keys", "masked_keys", "induction_heads"])
def test_a_model_with_more_positions_than_gpt2_is_not_gpt2(name: str) -> None:
    sizes = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_vocab": 50257}
    published_sizes = REPLICATIONS[name].published_sizes
    assert has_sizes(toy.toy_info(**sizes, n_ctx=1024), published_sizes)
    # GPT-Neo 125M
    assert not has_sizes(toy.toy_info(**sizes, n_ctx=2048), published_sizes)
