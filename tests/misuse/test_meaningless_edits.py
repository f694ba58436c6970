"""Interventions that mean nothing, that a model cannot have, or whose options are no numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from headcount.schemas.errors import ScanError
from headcount.schemas.scans.intervention import parse_intervention
from headcount.workers.interventions import INTERVENTIONS, bind
from headcount.workers.model.files.model_info import ModelInfo
from tests.toys import toy_models as toy

INFO = ModelInfo(
    path="/nowhere/toy", name="toy", layout="huggingface", sha256="0" * 16, n_layers=3, n_heads=4,
    d_model=32, d_head=8, n_ctx=64, d_vocab=61, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
N_CTX = 16

REFUSED = [
    # Parts that say nothing.
    (
        "none+none",
        "none is the untouched model and stands alone; leave it out, or name it as an "
        "intervention of its own",
    ),
    (
        "none+zero_first_value",
        "none is the untouched model and stands alone; leave it out, or name "
        "it as an intervention of its own",
    ),
    (
        "zero_first_value+none",
        "none is the untouched model and stands alone; leave it out, or name "
        "it as an intervention of its own",
    ),
    ("zero_query_bias+zero_query_bias", "expected each edit once, got zero_query_bias 2 times"),
    (
        "swap_first_key(3)+zero_mlps+swap_first_key(3)",
        "expected each edit once, got swap_first_key(3) 2 times",
    ),
    # Masks that hide nothing, everything, or less than they say.
    ("mask_keys(0,0)", "count: expected 1 or more, got 0"),
    ("mask_keys(0,-1)", "count: expected 1 or more, got -1"),
    ("mask_keys(0,16)", "hides every key; expected count at most 15, got 16"),
    (
        "mask_keys(0,500)",
        "hides the keys 0 to 499 of 16 tokens; expected count at most 16, got 500",
    ),
    ("mask_keys(-4,5)", "hides the keys 12 to 16 of 16 tokens; expected count at most 4, got 5"),
    (
        "mask_keys(16)",
        "first: expected -16 to 15, the keys of 16 tokens (negative: from the end), got 16",
    ),
    (
        "mask_keys(-17,2)",
        "first: expected -16 to 15, the keys of 16 tokens (negative: from the end), got -17",
    ),
    ("mask_keys(0.5)", "first: expected an integer, got 0.5"),
    # Masks that are gone.
    ("mask_first_keys", "mask_first_keys is gone; write mask_keys(0,1)"),
    ("mask_first_keys(4)", "mask_first_keys is gone; write mask_keys(0,4)"),
    ("mask_last_keys(8)", "mask_last_keys is gone; write mask_keys(-8,8)"),
    (
        "mask_middle_keys",
        "mask_middle_keys is gone; write mask_keys(HALF,4), where HALF is half of n_ctx",
    ),
    (
        "mask_random_keys(3,1)",
        "mask_random_keys is gone; write mask_random_span(3), whose keys stand in a row",
    ),
    ("mask_recent_keys(0)", "count: expected 1 or more, got 0"),
    ("mask_recent_keys(16)", "count: expected at most 15 (n_ctx - 1), got 16"),
    ("mask_random_span(9)", "count: expected at most 8 (half of n_ctx), got 9"),
    ("mask_random_span(4,-1)", "draw: expected 0 or more, got -1"),
    ("keep_window(0,0)", "keeps no key; expected sinks or window of 1 or more"),
    ("keep_window(4,12)", "hides nothing; expected sinks + window below n_ctx = 16, got 16"),
    ("keep_window(99,1)", "hides nothing; expected sinks + window below n_ctx = 16, got 100"),
    ("keep_window(-1,4)", "sinks: expected 0 or more, got -1"),
    ("keep_window(1,-4)", "window: expected 0 or more, got -4"),
    # Doses.
    ("scale_query_bias(1e300)", "alpha: expected at most 1,000,000, got 1e+300"),
    ("scale_query_bias(-1e7)", "alpha: expected -1,000,000 or more, got -10000000"),
    ("scale_query_bias(1e999)", "alpha: expected a finite number, got inf"),
    ("scale_query_bias(-1e999)", "alpha: expected a finite number, got -inf"),
    ("scale_query_bias(nan)", "alpha: expected a number, got 'nan'"),
    ("scale_query_bias(inf)", "alpha: expected a number, got 'inf'"),
    ("scale_query_bias(0x10)", "alpha: expected a number, got '0x10'"),
    ("blend_position(3,1e999)", "alpha: expected a finite number, got inf"),
    ("random_query_bias(-1)", "draw: expected 0 or more, got -1"),
    ("random_query_bias(0.5)", "draw: expected an integer, got 0.5"),
    (
        "random_query_bias(9223372036854775808)",
        "draw: expected at most 9,223,372,036,854,775,807, got 9223372036854775808",
    ),
    ("scale_massive_keys(0,0)", "count: expected 1 or more, got 0"),
    ("scale_massive_keys(0,33)", "count: expected at most 32 (d_model), got 33"),
    ("scale_random_keys(-1)", "draw: expected 0 or more, got -1"),
    ("scale_random_keys(0,0,17)", "count: expected at most 16 (half of d_model), got 17"),
    (
        "set_massive_activation(0,32,1)",
        "dimension: expected at most 31 (d_model - 1), got 32",
    ),
    ("set_massive_activation(0,1,1,16)", "position 16 of a sequence, which has 16"),
    ("zero_massive_activations(0,0)", "size: expected more than 0, got 0"),
    ("ideal_induction(0,4)", "head 4 of toy, which has 4"),
    # Thresholds that no head can be beyond.
    ("zero_inactive_heads(entropy,nan)", "threshold: expected a number, got 'nan'"),
    ("zero_inactive_heads(entropy,1e999)", "threshold: expected a finite number, got inf"),
    ("zero_inactive_heads(entropy,0)", "threshold: expected more than 0, got 0"),
    ("zero_inactive_heads(value_norm,-2)", "threshold: expected more than 0, got -2"),
    ("zero_inactive_heads(sink_alpha,1)", "threshold: expected 0 or more and below 1, got 1"),
    ("zero_inactive_heads(sink_alpha,-0.1)", "threshold: expected 0 or more and below 1, got -0.1"),
    ("zero_inactive_heads(sink_alpha,-1,layer_mean)", "threshold: expected 0 or more, got -1"),
    ("zero_random_heads(entropy,0)", "threshold: expected more than 0, got 0"),
    ("zero_random_heads(entropy,1,raw,-3)", "draw: expected 0 or more, got -3"),
    ("zero_entropy_sinks(0,0.5)", "row: expected more than 0, got 0"),
    ("zero_entropy_sinks(0.5,1)", "column: expected less than 1, got 1"),
    ("entropy_sinks_to_first(-1,0.5)", "row: expected more than 0, got -1"),
    # Places that are not there.
    ("zero_head(3,0)", "layer 3 of toy, which has 3"),
    ("zero_head(-1,0)", "layer: expected 0 or more, got -1"),
    ("zero_head(0,4)", "head 4 of toy, which has 4"),
    ("zero_head(0,-1)", "head: expected 0 or more, got -1"),
    ("zero_head(0.5,0)", "layer: expected an integer, got 0.5"),
    (
        "zero_head(9999999999999999999999,0)",
        "layer: expected at most 2,147,483,647, got 9999999999999999999999",
    ),
    ("zero_mlp(3)", "layer 3 of toy, which has 3"),
    ("zero_token(16)", "position 16 of a sequence, which has 16"),
    ("swap_first_key(0)", "position: expected 1 or more, got 0"),
    ("swap_first_value(0)", "position: expected 1 or more, got 0"),
    ("swap_first_value(16)", "position 16 of a sequence, which has 16"),
]


def refusal(text: str, n_ctx: int = N_CTX) -> str:
    """What is said of an intervention; empty where nothing is wrong."""
    try:
        bind(parse_intervention(text)).check(INFO, n_ctx)
    except ScanError as error:
        return str(error)
    return ""


def canonical(text: str) -> str:
    return str(parse_intervention(text))


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_an_intervention_that_means_nothing_is_refused(text: str, problem: str):
    whole = refusal(text)
    assert whole.startswith("interventions: '")
    assert whole == f"interventions: '{canonical(text)}': {problem}"


BAD = {
    int: ("nan", "inf", "x", "0.5", "1e999", "-1", "1e300"),
    float: ("nan", "-inf", "x", "1e999"),
}

OPTIONS = [
    (name, number, text)
    for name, registered in INTERVENTIONS.items()
    for number, parameter in enumerate(registered.options.values())
    for type_, texts in BAD.items()
    if type_ in (parameter.annotation, *get_args(parameter.annotation))
    for text in texts
    # A plain `int` has no range of its own.
    if not (parameter.annotation is int and text == "-1")
]


@pytest.mark.parametrize(("name", "number", "text"), OPTIONS)
def test_every_option_refuses_what_is_no_number_of_its_range(name: str, number: int, text: str):
    options = INTERVENTIONS[name].options
    good = [
        str(names[0]) if (names := INTERVENTIONS[name].allowed_names.get(key)) else "1"
        for key in options
    ]
    key = list(options)[number]
    bad = f"{name}({','.join([*good[:number], text, *good[number + 1 :]])})"
    assert refusal(bad).startswith(f"interventions: '{canonical(bad)}': {key}: expected ")


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "scale_query_bias(1)",  # The end of a series of doses, which does nothing.
        "blend_first_position(1)",
        "mask_keys(0,15)",
        "mask_keys(-16,15)",
        "mask_keys(15,1)",
        "mask_random_span(8)",
        "keep_window(0,15)",
        "keep_window(4,0)",
        "zero_inactive_heads(sink_alpha,0)",
        "zero_inactive_heads(sink_alpha,2,layer_mean)",
        "scale_query_bias(0.5)+scale_query_bias(2)",
        "swap_first_key(15)",
    ],
)
def test_what_means_something_is_taken(text: str):
    assert refusal(text) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "mask_recent_keys",
            "n_ctx = 1 leaves nothing to hide (count is at most n_ctx - 1); raise n_ctx",
        ),
        ("mask_keys", "n_ctx = 1 leaves nothing to hide; raise n_ctx"),
        (
            "mask_random_span",
            "n_ctx = 1 leaves nothing to hide (count is at most half of n_ctx); raise n_ctx",
        ),
        ("swap_effective_positions", "positions 0 and 1 of a sequence, which has 1; raise n_ctx"),
        ("swap_raw_positions", "positions 0 and 1 of a sequence, which has 1; raise n_ctx"),
        ("swap_first_key(1)", "position 1 of a sequence, which has 1"),
    ],
)
def test_a_sequence_of_one_token_has_nothing_to_exchange_or_hide(text: str, problem: str):
    assert refusal(text, n_ctx=1) == f"interventions: '{text}': {problem}"


LAYERS = "+".join(f"zero_head(0,{head})" for head in range(30))


@pytest.mark.parametrize(
    ("interventions", "line"),
    [
        (
            ["mask_keys(0,0)"],
            "interventions: 'mask_keys(0,0)': count: expected 1 or more, got 0",
        ),
        (
            ["none", "zero_inactive_heads(entropy,nan)"],
            (
                "interventions: 'zero_inactive_heads(entropy,nan)': threshold: expected a "
                "number, got 'nan'"
            ),
        ),
        (
            ["mask_recent_keys"],
            "interventions: 'mask_recent_keys': count: expected at most 3 (n_ctx - 1), got 4",
        ),
        (
            ["mask_keys(-2,3)"],
            "interventions: 'mask_keys(-2,3)': hides the keys 2 to 4 of 4 tokens; expected count "
            "at most 2, got 3",
        ),
        (
            ["mask_keys(-3,3)+mask_keys(0,3)"],
            "interventions: an edit hides every key from query 1; leave each query a key",
        ),
        (
            [LAYERS],
            "TMP/toy.toml: interventions: expected at most 240 characters, for it names a "
            "directory, got "
            f"{len(LAYERS)}: {LAYERS[:60]}…",
        ),
        (
            ["zero_head(0,0)", "zero_head( 0 , 0.0 )"],
            "TMP/toy.toml: interventions: expected at least one name, each once, got "
            "['zero_head(0,0)', "
            "'zero_head(0,0)']",
        ),
        ([""], "TMP/toy.toml: interventions.0: expected NAME, NAME(1,0.5) or A+B, got ''"),
        (
            ["none\n"],
            (
                "TMP/toy.toml: interventions.0: expected text without control characters, got "
                "'none\\n'"
            ),
        ),
        ([["none"]], "TMP/toy.toml: interventions.0: expected a string, got ['none']"),
        ([], "TMP/toy.toml: interventions: expected at least one name, each once, got []"),
        ("none", "TMP/toy.toml: interventions: expected an array, got 'none'"),
    ],
)
def test_a_plan_refuses_it(plan_error: Callable[..., list[str]], interventions: Any, line: str):
    assert plan_error(n_ctx=4, interventions=interventions) == [line]


def test_weights_that_a_dose_overflows_are_named(
    plan_error: Callable[..., list[str]], model: Path, tmp_path: Path
):
    weight = "transformer.h.0.attn.c_attn.bias"
    path = toy.copy_of(
        model, tmp_path / "m", lambda p: toy.change_weights(p, lambda w: w[weight].fill_(1e38))
    )
    (line,) = plan_error(model=str(path), interventions=["scale_query_bias(1000000)"])
    assert line.endswith(f": {weight} holds numbers that are NaN or infinite")
