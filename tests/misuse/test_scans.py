"""Scan files and overrides that have no meaning, or another meaning than their text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headcount.workers.model.files.model_info import describe
from tests.toys import toy_models as toy

KNOWN = (
    "bad_rows, bad_rows_in_a_row, batch_size, bos, corpora, curves, engine, heads, input, "
    "interventions, layers, model, n_ctx, out, precision, predictions, profiles, revision, seed, "
    "sequences, sequences_per_shard, statistics, unused_weights, weight_processing, "
    "weight_statistics"
)
BIG = 2**63


FIELDS = [
    ({"model": ""}, "model: expected a string that is not empty, got ''"),
    ({"model": [1]}, "model: expected a text, or a list of texts, got [1]"),
    ({"model": {"name": "a"}}, "model: expected a string, got {name = 'a'}"),
    ({"model": True}, "model: expected a string, got true"),
    ({"model": "a\0b"}, r"model: expected text without control characters, got 'a\x00b'"),
    ({"model": "a" * 256}, f"model: expected names of at most 255 bytes, got '{'a' * 58}…"),
    ({"revision": ""}, "revision: expected a string that is not empty, got ''"),
    ({"weight_processing": "Raw"}, "weight_processing: expected 'raw' or 'folded', got 'Raw'"),
    ({"engine": "fast"}, "engine: expected 'fused' or 'dense', got 'fast'"),
    ({"engine": {}}, "engine: expected 'fused' or 'dense', got {}"),
    ({"bos": "yes"}, "bos: expected true or false, got 'yes'"),
    ({"bos": 0}, "bos: expected true or false, got 0"),
    ({"input": "pile"}, "input: expected a table, got 'pile'"),
    ({"input": [{"family": "pile"}]}, "input: expected a table, got [{family = 'pile'}]"),
    ({"input": {}}, "input.family: missing; expected the name of an input family"),
    ({"interventions": "none"}, "interventions: expected an array, got 'none'"),
    ({"interventions": {"none": 1}}, "interventions: expected an array, got {none = 1}"),
    (
        {"statistics": "entropy"},
        "statistics: expected 'standard' or 'all', or an array, got 'entropy'",
    ),
    ({"statistics": [1.5]}, "statistics.0: expected a string, got 1.5"),
    ({"profiles": "all"}, "profiles: expected an array, got 'all'"),
    ({"n_ctx": 0}, "n_ctx: expected 1 or more, got 0"),
    ({"n_ctx": 2**31}, "n_ctx: expected at most 2,147,483,647, got 2147483648"),
    ({"n_ctx": float("nan")}, "n_ctx: expected an integer, got nan"),
    ({"n_ctx": float("inf")}, "n_ctx: expected an integer, got inf"),
    ({"n_ctx": 1e300}, "n_ctx: expected an integer, got 1e+300"),
    ({"n_ctx": 8.0}, "n_ctx: expected an integer, got 8.0"),
    ({"n_ctx": False}, "n_ctx: expected an integer, got false"),
    ({"sequences": 0}, "sequences: expected 1 or more, or 'all', got 0"),
    ({"sequences": -1}, "sequences: expected 1 or more, or 'all', got -1"),
    ({"sequences": "All"}, "sequences: expected an integer or 'all', got 'All'"),
    (
        {"sequences": BIG},
        "sequences: expected at most 9,223,372,036,854,775,807 or 'all', got 9223372036854775808",
    ),
    (
        {"sequences": BIG - 1},
        "sequences: 9,223,372,036,854,775,807 make 36,028,797,018,963,968 shards, expected at most "
        "10,000,000; raise sequences_per_shard (256) or lower sequences",
    ),
    (
        {"sequences": 10**7 + 1, "sequences_per_shard": 1},
        "sequences: 10,000,001 make 10,000,001 shards, expected at most 10,000,000; raise "
        "sequences_per_shard (1) or lower sequences",
    ),
    ({"sequences_per_shard": 0}, "sequences_per_shard: expected 1 or more, got 0"),
    (
        {"sequences_per_shard": 10**9},
        "sequences_per_shard: expected at most 1,000,000, got 1000000000",
    ),
    ({"batch_size": 0}, "batch_size: expected 1 or more, or 'auto', got 0"),
    ({"batch_size": "large"}, "batch_size: expected an integer or 'auto', got 'large'"),
    ({"seed": -1}, "seed: expected 0 or more, got -1"),
    ({"seed": BIG}, "seed: expected at most 9,223,372,036,854,775,807, got 9223372036854775808"),
    ({"seed": 1.0}, "seed: expected an integer, got 1.0"),
    ({"out": ""}, "out: expected a string that is not empty, got ''"),
    ({"out": " "}, "out: expected a directory that can be written, got ' '"),
    (
        {"out": "bundled:LICENSE"},
        "out: expected a directory that can be written, got 'bundled:LICENSE'",
    ),
    ({"out": "x/" + "ä" * 128}, f"out: expected names of at most 255 bytes, got '{'ä' * 58}…"),
    ({"out": "a\nb"}, r"out: expected text without control characters, got 'a\nb'"),
    ({"out": "abfs://a/b"}, "abfs://a/b: expected a path, file://, s3:// or gs://"),
    (
        {"out": "runs/run_id=a-12345678"},
        "out: expected a directory that holds runs, got 'runs/run_id=a-12345678'; a name that "
        "begins "
        "like run_id= is one of a run",
    ),
    (
        {"out": "intervention=none/runs"},
        "out: expected a directory that holds runs, got 'intervention=none/runs'; a name that "
        "begins "
        "like intervention= is one of a run",
    ),
    ({"file": "a"}, f"unknown key 'file': did you mean 'profiles'? Known: {KNOWN}"),
    ({"family": "pile"}, "family: stands outside of [input]; move it below"),
]


@pytest.mark.parametrize(("changes", "line"), FIELDS)
def test_a_field_that_means_nothing_is_refused(
    plan_error: Callable[..., list[str]], changes: dict[str, Any], line: str
):
    assert plan_error(**changes) == [f"TMP/toy.toml: {line}"]


INPUTS = [
    ("uniform_random", {"low": -3}, "input.low: expected 0 or more, got -3"),
    (
        "uniform_random",
        {"low": 257},
        "input.low: expected 0 to 256, the token ids of bytes, got 257",
    ),
    ("uniform_random", {"high": -1}, "input.high: expected 1 or more, got -1"),
    ("uniform_random", {"high": 0}, "input.high: expected 1 or more, got 0"),
    (
        "uniform_random",
        {"high": 100_000},
        "input.high: expected 1 to 257, the tokens of bytes, got 100000",
    ),
    ("uniform_random", {"low": 5, "high": 5}, "input.low: expected less than high = 5, got 5"),
    ("uniform_random", {"low": 9, "high": 5}, "input.low: expected less than high = 5, got 9"),
    ("uniform_random", {"low": 1.0}, "input.low: expected an integer, got 1.0"),
    ("uniform_random", {"low": float("nan")}, "input.low: expected an integer, got nan"),
    ("uniform_random", {"low": True}, "input.low: expected an integer, got true"),
    ("uniform_random", {"distinct": "yes"}, "input.distinct: expected true or false, got 'yes'"),
    (
        "uniform_random",
        {"low": 256},
        "input: ordinary token ids from low = 256 on: expected 1 or more, got 0; widen low and "
        "high",
    ),
    (
        "uniform_random",
        {"seed": 3},
        "input.seed: seed is a field of the scan; move it above [input]",
    ),
    (
        "uniform_random",
        {"n_ctx": 3},
        "input.n_ctx: n_ctx is a field of the scan; move it above [input]",
    ),
    (
        "uniform_random",
        {"file": "a"},
        "input.file: unknown option of uniform_random 'file': Known: distinct, high, low",
    ),
    (
        "repeated_random",
        {"period": 0},
        "input.period: expected 1 to 7, the tokens in a sequence, got 0",
    ),
    (
        "repeated_random",
        {"period": 99},
        "input.period: expected 1 to 7, the tokens in a sequence, got 99",
    ),
    ("corrupted_repeat", {}, "input.rate: missing; the family corrupted_repeat needs it"),
    ("corrupted_repeat", {"rate": -0.1}, "input.rate: expected a probability, 0 to 1, got -0.1"),
    ("corrupted_repeat", {"rate": 2}, "input.rate: expected a probability, 0 to 1, got 2.0"),
    ("corrupted_repeat", {"rate": float("nan")}, "input.rate: expected a finite number, got nan"),
    (
        "corrupted_repeat",
        {"rate": 0.5, "replacement": -1},
        "input.replacement: expected an ordinary token id of the model (0 to 255), got -1",
    ),
    (
        "single_token_repeat",
        {"token": 256},
        "input.token: expected an ordinary token id of the model (0 to 255), got 256",
    ),
    (
        "single_token_repeat",
        {"token": 3, "low": 5},
        "input: single_token_repeat takes token, or low and high, got both; leave out one",
    ),
    ("unigram_random", {"exponent": -1e9}, "input.exponent: expected 0 or more, got -1000000000.0"),
    ("unigram_random", {"exponent": 1e9}, "input.exponent: expected at most 10, got 1000000000.0"),
    (
        "unigram_random",
        {"exponent": float("inf")},
        "input.exponent: expected a finite number, got inf",
    ),
    ("backcopy", {"text": ""}, "input.text: expected a string that is not empty, got ''"),
    (
        "backcopy",
        {"text": "bundled:../../etc/passwd"},
        "input.text: bundled:../../etc/passwd is no file of headcount; expected bundled:LICENSE, "
        "or one in "
        "bundled:models/",
    ),
    (
        "unigram_text",
        {"files": "a.txt", "shuffle": 3},
        "input.shuffle: unigram_text counts the tokens of all documents, so their order means "
        "nothing; leave it out",
    ),
    (
        "abac",
        {"second": 3},
        "input.second: expected 4 to 5, so that the second A and its C stand between "
        "the first and the last; got 3",
    ),
    ("ngram_overlap", {"n": 1}, "input.n: expected 2 or more, the tokens of a sub-sequence, got 1"),
    ("ngram_overlap", {"n": 10**9}, "input.n: expected at most 10,000, got 1000000000"),
    ("text", {"files": ""}, "input.files: expected a string that is not empty or an array, got ''"),
    ("text", {"files": []}, "input.files: expected at least one path or glob, got []"),
    ("text", {"files": ["a", ""]}, "input.files.1: expected a string that is not empty, got ''"),
    ("text", {"files": {"a": 1}}, "input.files: expected a string or an array, got {a = 1}"),
    (
        "text",
        {"files": "bundled:../.."},
        "input.files: bundled:../.. is no file of headcount; expected bundled:LICENSE, or one "
        "in bundled:models/",
    ),
    (
        "text",
        {"files": ["bundled:LICENSE", "bundled:models/../pyproject.toml"]},
        "input.files: bundled:models/../pyproject.toml is no file of headcount; expected "
        "bundled:LICENSE, or one "
        "in bundled:models/",
    ),
    (
        "text",
        {"files": "bundled:/etc/passwd"},
        "input.files: bundled:/etc/passwd is no file of headcount; expected bundled:LICENSE, or "
        "one in "
        "bundled:models/",
    ),
    (
        "text",
        {"files": "bundled:LICENSE", "packing": "all"},
        "input.packing: expected 'document' or 'concat', got 'all'",
    ),
    (
        "repeated_text",
        {"files": "bundled:LICENSE", "chunk": 0},
        "input.chunk: expected 1 or more tokens, got 0",
    ),
    (
        "repeated_text",
        {"files": "bundled:LICENSE", "chunk": 8},
        "input.chunk: expected 1 to 7, the tokens in a sequence, got 8",
    ),
    (
        "pile",
        {"files": "bundled:LICENSE", "split": "test"},
        "input.split: expected with a dataset only, got files; leave it out",
    ),
    (
        "backcopy",
        {"text": "bundled:LICENSE", "mix": 0.5},
        "input.mix: expected with variant = 'interpolate' "
        "only, got mix = 0.5 and variant = 'backcopy'",
    ),
]


@pytest.mark.parametrize(("family", "options", "line"), INPUTS)
def test_an_option_that_means_nothing_is_refused(
    plan_error: Callable[..., list[str]], family: str, options: dict[str, Any], line: str
):
    assert plan_error(input={"family": family, **options}) == [line]


def test_options_that_need_a_field_are_refused_without_it(plan_error: Callable[..., list[str]]):
    repeated = {"family": "repeated_text", "files": "bundled:LICENSE", "chunk": 3}
    assert plan_error(bos=False, input=repeated | {"repeat_bos": True}) == [
        "input.repeat_bos: expected with bos = true only; leave it out"
    ]


OVERRIDES = [
    ("n_ctx", "--set n_ctx: expected key=value, for instance --set n_ctx=128"),
    ("", "--set : expected key=value, for instance --set n_ctx=128"),
    ("=", "--set =: expected key=value, for instance --set n_ctx=128"),
    (".n_ctx=8", "--set .n_ctx=8: expected key=value, for instance --set n_ctx=128"),
    ("input.=8", "--set input.=8: expected key=value, for instance --set n_ctx=128"),
    ("input..low=8", "--set input..low=8: expected key=value, for instance --set n_ctx=128"),
    ("n_ctx.x=8", "--set n_ctx.x=8: n_ctx is a value, not a table"),
    ("input.family.x=8", "--set input.family.x=8: family is a value, not a table"),
    ("n_ctx=", "TMP/toy.toml: n_ctx: expected an integer, got ''"),
    ("n_ctx==8", "TMP/toy.toml: n_ctx: expected an integer, got '=8'"),
    ("n_ctx='8'", "TMP/toy.toml: n_ctx: expected an integer, got '8'"),
    ("n_ctx=8.0", "TMP/toy.toml: n_ctx: expected an integer, got 8.0"),
    ("n_ctx=8 x", "TMP/toy.toml: n_ctx: expected an integer, got '8 x'"),
    ("n_ctx=2020-01-01", "TMP/toy.toml: n_ctx: expected an integer, got '2020-01-01'"),
    ("bos=False", "TMP/toy.toml: bos: expected true or false, got 'False'"),
    ("input=pile", "TMP/toy.toml: input: expected a table, got 'pile'"),
    ("input={}", "TMP/toy.toml: input.family: missing; expected the name of an input family"),
    ("input.low.x=3", "input.low: expected an integer, got {x = 3}"),
    ("interventions=none", "TMP/toy.toml: interventions: expected an array, got 'none'"),
    (
        "statistics=[entropy]",
        "--set statistics=[entropy]: not a TOML value; strings in it stand in quotation marks, for "
        """instance --set 'statistics=["entropy"]'""",
    ),
    (
        'model="a',
        '--set model="a: not a TOML value; strings in it stand in quotation marks, for instance '
        """--set 'statistics=["entropy"]'""",
    ),
    (
        "n_ctx=8\nmodel='x'",
        """TMP/toy.toml: n_ctx: expected text without control characters, got "8\\nmodel='x'\"""",
    ),
    ("input.n_ctx=8", "input.n_ctx: n_ctx is a field of the scan; move it above [input]"),
    ("n_ctxt=8", f"TMP/toy.toml: unknown key 'n_ctxt': did you mean 'n_ctx'? Known: {KNOWN}"),
    (
        "input.lo=8",
        "input.lo: unknown option of uniform_random 'lo': did you mean 'low'? Known: "
        "distinct, high, low",
    ),
]


@pytest.mark.parametrize(("override", "line"), OVERRIDES)
def test_an_override_that_means_nothing_is_refused(
    plan_error: Callable[..., list[str]], override: str, line: str
):
    assert [line.replace("\\n", "\n") for line in plan_error(override)] == [
        line.replace("\\n", "\n")
    ]


def test_of_an_override_given_twice_the_last_counts(plan_error: Callable[..., list[str]]):
    assert plan_error("n_ctx=0", "n_ctx=65") == ["n_ctx: 65 is beyond the 64 positions of bytes"]


FILES = [
    (
        "below [input]",
        'n_ctx = 8\nsequences = 2\n[input]\nfamily = "uniform_random"\nmodel = "MODEL"\n',
        ["model: stands below [input]; move it above"],
    ),
    (
        "all below [input]",
        '[input]\nfamily = "uniform_random"\nmodel = "MODEL"\nn_ctx = 8\nsequences = 2\n',
        [f"{key}: stands below [input]; move it above" for key in ("model", "n_ctx", "sequences")],
    ),
    (
        "a family without its table",
        'model = "MODEL"\nn_ctx = 8\nsequences = 2\nfamily = "uniform_random"\n',
        [
            "input: missing; expected where sequences come from: a family and its options",
            "family: stands outside of [input]; move it below",
        ],
    ),
    ("nested too deeply", f"n_ctx = {'[' * 5000}", ["not valid TOML: nested too deeply"]),
    (
        "an integer of 5,000 digits",
        f"n_ctx = {'9' * 5000}",
        ["not valid TOML: an integer has too many digits"],
    ),
]


@pytest.mark.parametrize(
    ("text", "lines"), [row[1:] for row in FILES], ids=[row[0] for row in FILES]
)
def test_a_file_that_says_it_elsewhere_is_refused(
    command: Callable[..., tuple[int, list[str]]],
    tmp_path: Path,
    model: Path,
    text: str,
    lines: list[str],
):
    file = tmp_path / "toy.toml"
    file.write_text(text.replace("MODEL", str(model)))
    assert command("plan", file) == (2, [f"error: {file}: {line}" for line in lines])
    assert command("scan", file) == (2, [f"error: {file}: {line}" for line in lines])


def test_a_mark_of_the_encoding_is_no_mistake(plan_error: Callable[..., list[str]], tmp_path: Path):
    from headcount.schemas.scans.scan import load_scan

    plan_error(n_ctx=65)
    file = tmp_path / "toy.toml"
    plain = file.read_bytes()
    file.write_bytes(b"\xef\xbb\xbf" + plain)
    assert load_scan(file).n_ctx == 65


MODELS = [
    (
        "bundled, with a revision",
        {"model": "bundled:gpt2-mini", "revision": "main"},
        "revision: expected with a model of the Hub only, and bundled:gpt2-mini is a model of "
        "headcount, "
        "got 'main'; leave it out",
    ),
    (
        "a directory, with a revision",
        {"revision": "v1"},
        "revision: expected with a model of the Hub only, and MODEL is a directory of this "
        "machine, got "
        "'v1'; leave it out",
    ),
    (
        "bundled, elsewhere",
        {"model": "bundled:../../etc"},
        "model: unknown bundled model '../../etc': Known: attn-only-2l-mini, backcopy-1l-mini, "
        "backcopy-3l-mini, backcopy-dynamics-mini, gpt2-mini, needle-mini",
    ),
    ("no directory", {"model": "./nowhere"}, "model './nowhere': no such directory"),
]


@pytest.mark.parametrize(("changes", "line"), [r[1:] for r in MODELS], ids=[r[0] for r in MODELS])
def test_a_model_that_is_not_there_is_refused(
    plan_error: Callable[..., list[str]], changes: dict[str, Any], line: str
):
    (found,) = plan_error(**changes)
    assert found.startswith(line)


def change(**fields: Any) -> Callable[[Path], object]:
    return lambda path: toy.change_config(path, **fields)


def llama(**fields: Any) -> Callable[[Path], object]:
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "vocab_size": 257,
    }
    return lambda path: (path / "config.json").write_text(json.dumps(sizes | fields))


CONFIGS = [
    (
        change(bos_token_id=999),
        "m: bos_token_id is 999 in its config.json, expected 0 to 256, so it has "
        "no beginning-of-sequence token; set bos = false",
    ),
    (
        change(bos_token_id=-1),
        "m: bos_token_id is -1 in its config.json, expected 0 to 256, so it has no "
        "beginning-of-sequence token; set bos = false",
    ),
    (change(bos_token_id=None), "m names no beginning-of-sequence token; set bos = false"),
    (
        llama(num_key_value_heads=3),
        "TMP/m/config.json: num_key_value_heads is 3, expected a divisor of "
        "num_attention_heads = 4",
    ),
    (
        llama(num_key_value_heads=8),
        "TMP/m/config.json: num_key_value_heads is 8, expected a divisor of "
        "num_attention_heads = 4",
    ),
    (
        llama(num_key_value_heads=-1),
        "TMP/m/config.json: num_key_value_heads is -1, expected a divisor of "
        "num_attention_heads = 4",
    ),
    (llama(head_dim=-8), "TMP/m/config.json: head_dim is -8, expected a positive integer"),
    (
        lambda p: (p / "config.json").write_text('{"model_type": "bloom"}'),
        "TMP/m/config.json: a bloom model "
        "names no max_position_embeddings, which a scan needs; add what is missing to it, or "
        "choose another model",
    ),
]


@pytest.mark.parametrize(("edit", "line"), CONFIGS)
def test_a_config_that_cannot_be_is_refused(
    plan_error: Callable[..., list[str]],
    tmp_path: Path,
    model: Path,
    edit: Callable[[Path], object],
    line: str,
):
    assert plan_error(model=str(toy.copy_of(model, tmp_path / "m", edit))) == [line]


def test_a_bloom_is_as_long_as_it_was_trained(tmp_path: Path):
    path = toy.save_model(tmp_path / "bloom", toy.family("BloomConfig"))
    config = json.loads((path / "config.json").read_text())
    del config["max_position_embeddings"]
    (path / "config.json").write_text(json.dumps(config | {"seq_length": 24}))
    assert describe(path).n_ctx == 24


WEIGHT = "transformer.h.0.attn.c_attn.weight"


NOT_FINITE = (
    "layer 0, head 0: sink_mass is not finite for sequence 0 of the shard; expected a finite "
    "number: look at the model's weights and precision"
)
NO_PATTERN = "m: layer 0 has no attention pattern"
NOT_NUMBERS = f"{WEIGHT} holds numbers that are NaN or infinite"
TOO_LARGE = f"{WEIGHT} holds 1e+38, which overflows"


@pytest.mark.parametrize(
    ("engine", "value", "places", "line"),
    [
        ("fused", float("nan"), None, f"{NOT_FINITE}: {NOT_NUMBERS}"),
        ("fused", float("inf"), 1, f"{NOT_FINITE}: {NOT_NUMBERS}"),
        ("fused", 1e38, None, f"{NOT_FINITE}: {TOO_LARGE}"),
        ("dense", float("nan"), None, f"{NOT_FINITE}: {NOT_NUMBERS}"),
        # The dense engine looks at the patterns before it measures.
        ("dense", float("inf"), 1, f"{NO_PATTERN}: {NOT_NUMBERS}"),
        ("dense", 1e38, None, f"{NO_PATTERN}: {TOO_LARGE}"),
    ],
)
def test_weights_that_make_no_numbers_are_named(
    plan_error: Callable[..., list[str]],
    tmp_path: Path,
    model: Path,
    engine: str,
    value: float,
    places: int | None,
    line: str,
):
    def spoil(path: Path) -> None:
        toy.change_weights(path, lambda weights: weights[WEIGHT][:places].fill_(value))

    assert plan_error(model=str(toy.copy_of(model, tmp_path / "m", spoil)), engine=engine) == [line]


@pytest.mark.parametrize("words", [["scan"], ["plan"], ["submit", "--address", "http://nowhere"]])
def test_a_field_of_a_scan_is_no_option_and_says_how_it_is_set(
    command: Callable[..., tuple[int, list[str]]], words: list[str]
) -> None:
    for typed, advice in [
        (["--n_ctx", "128"], "--n_ctx: a field of a scan, and no option; write --set n_ctx=128"),
        (["--n-ctx=128"], "--n-ctx: a field of a scan, and no option; write --set n_ctx=128"),
        (
            ["--input.files", "*.jsonl"],
            "--input.files: a field of a scan, and no option; write --set 'input.files=*.jsonl'",
        ),
    ]:
        assert command(*words, "toy.toml", *typed) == (2, [f"error: {advice}"])
    code, lines = command(*words, "toy.toml", "--devise", "cpu")
    assert code == 2
    assert any("No such option: --devise" in line and "--device" in line for line in lines), lines
