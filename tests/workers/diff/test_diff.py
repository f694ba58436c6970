"""Whether two models are the same, where they begin to differ, and what that looks like."""

from __future__ import annotations

import csv
import html
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headcount
from headcount.exports.diff.difference import stored_tokens
from headcount.queries.report.html_page import unpacked
from headcount.schemas.files.run_directory import RunDirectory, find_runs
from headcount.workers.diff.causes import CAUSES, UNKNOWN
from headcount.workers.diff.number_grids import rounding_between
from headcount.workers.diff.texts import inputs_of, tokenizer_causes
from headcount.workers.model.info.description import describe, find_model
from tests.planted import planted_faults as planted
from tests.toys import toy_models as toy
from tests.toys.commands import Ended, ended, error_of, printed
from tests.toys.model_families import prepare_libraries


@pytest.fixture(autouse=True)
def _quiet_libraries(one_thread: None) -> None:
    prepare_libraries()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("models") / "llama", planted.FAMILIES["llama"]())


def diff(a: object, b: object, *words: object) -> Ended:
    return ended("diff", a, b, *words)


def change_of(name: str) -> Any:
    """The change of files that is planted under a name."""
    return next(each.change for each in (*planted.FAULTS, *planted.HARMLESS) if each.name == name)


def said(end: Ended, word: str) -> list[str]:
    """The texts behind a word."""
    lines = end.stdout.splitlines()
    return [line[11:] for line in lines if line[:11].strip() == word]


def test_every_fault_that_is_planted_is_found_at_its_place_with_its_cause(
    llama: Path, tmp_path: Path
) -> None:
    faulty = toy.copy_of(llama, tmp_path / "faulty", change_of("a head of q by a tenth"))
    end = diff(llama, faulty)
    assert (end.code, said(end, "verdict")) == (
        1, ["different: B does not compute what A computes"],
    )  # fmt: skip
    (begins,) = said(end, "begins")
    assert begins.startswith("layer 1, q (self_attn.q_proj), head 2 of 4: by 0.1 of its size")
    assert said(end, "looks like") == ["scale: layer 1: q is 1.1 times A's in head 2"]
    (heads,) = said(end, "heads")
    assert heads.startswith("L1H2 ")
    assert re.search(r"above noise with q ≤ \S+\)$", heads)
    assert len(end.stdout.splitlines()) <= 20
    assert diff(llama, faulty, "--allow", "scale").code == 0


def test_the_same_model_in_another_form_is_the_same(llama: Path, tmp_path: Path) -> None:
    other = toy.copy_of(llama, tmp_path / "other", change_of("scales that cancel"))
    end = diff(llama, other, "--json")
    record = json.loads(end.stdout)
    assert (end.code, record["verdict"], record["faults"]) == (0, "same", [])
    assert record["losses"]["repeats"]["change"] == pytest.approx(0, abs=1e-5)
    assert record["noise"] < 1e-5


def test_rounding_is_named_and_may_be_refused(llama: Path, tmp_path: Path) -> None:
    rounded = toy.copy_of(llama, tmp_path / "rounded", change_of("stored in bfloat16"))
    end = diff(llama, rounded)
    sentence = "rounding: B is A but for weights that are rounded to bfloat16"
    assert (end.code, said(end, "verdict")) == (0, [sentence])
    # Four projections of attention, three of the MLP, in four layers; and both embeddings.
    assert said(end, "rounded") == ["30 weights to bfloat16"]
    assert diff(llama, rounded, "--allow", "float16").code == 1
    assert diff(llama, rounded, "--allow", "bfloat16", "--allow", "scale").code == 0


def test_every_layer_is_compared_from_the_input_of_a(llama: Path, tmp_path: Path) -> None:
    """Two faults show by themselves, and no layer between or behind them does."""
    names = [planted.of(0, "v"), planted.of(2, "o")]
    faulty = toy.copy_of(llama, tmp_path / "faulty", planted.both(
        *(planted.times(name, 2) for name in names)
    ))  # fmt: skip
    comparison = planted.compared(planted.model_in(llama), planted.model_in(faulty))
    places = [(one.layer, one.quantity) for one in comparison.faults]
    assert places == [(0, "v"), (2, "attention output")]
    assert list(comparison.causes.values()) == [[0], [2]]


def test_a_fault_without_a_cause_is_said_beside_those_that_have_one(
    llama: Path, tmp_path: Path
) -> None:
    faulty = toy.copy_of(llama, tmp_path / "faulty", planted.both(
        planted.times(planted.of(1, "v"), 2), planted.noisy(planted.of(1, "o"), 0.01)
    ))  # fmt: skip
    end = diff(llama, faulty, "--allow", "scale")
    assert (end.code, said(end, "looks like")) == (1, [
        "scale: layer 1: v is 2 times A's",
        "unlike anything known: layer 1: no known cause leaves this",
    ])  # fmt: skip
    assert diff(llama, faulty, "--allow", "scale", "--allow", "unlike anything known").code == 0


def test_a_window_longer_than_the_input_is_compared_by_its_mask(tmp_path: Path) -> None:
    fields = {"num_key_value_heads": 2, "max_position_embeddings": 9000}
    config = toy.family("MistralConfig", sliding_window=4000, **fields)
    whole = toy.save_model(tmp_path / "whole", config)
    faulty = toy.copy_of(whole, tmp_path / "faulty", planted.config(sliding_window=3999))
    comparison = planted.compared(planted.model_in(whole), planted.model_in(faulty))
    (cause,) = comparison.causes
    assert cause.sentence == "a query sees the last 3,999 keys, and A's the last 4,000 keys"
    assert comparison.causes[cause] == [0, 1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Tensor.half, "float16"),
        (Tensor.bfloat16, "bfloat16"),
        (planted.in_integers(127, 32), "8-bit"),
        (planted.in_integers(7, 32), "4-bit"),
        # Whole rows share a scale, too.
        (planted.in_integers(127, 96), "8-bit"),
        (lambda weight: weight * 1.001, None),
        (lambda weight: weight + 1e-3, None),
        # On the grid, but further away than rounding goes.
        (lambda weight: (weight * 1.1).half(), None),
        (lambda weight: planted.in_integers(7, 32)(weight * 1.1), None),
        (lambda weight: planted.in_integers(7, 32)(weight.roll(1, 0)), None),
    ],
    ids=[
        *("float16", "bfloat16", "8-bit", "4-bit", "8-bit by row", "scaled", "shifted"),
        *("half of another", "4-bit of another", "4-bit in another order"),
    ],
)  # fmt: skip
def test_a_format_explains_what_its_rounding_can_do_and_no_more(change: Any, expected: str | None):
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    changed = change(weight).float()
    assert rounding_between(weight, changed) == expected
    assert rounding_between(changed, weight) == expected


def test_what_changes_a_model_on_a_grid_by_less_than_a_step_is_no_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = planted.in_integers(7, 32)(torch.randn(64, 96, generator=generator))
    change = torch.randn(64, 2, generator=generator) @ torch.randn(2, 96, generator=generator)
    assert rounding_between(weight, weight + 0.02 * change) is None
    # Two formats of one weight lie on grids both.
    original = torch.randn(64, 96, generator=generator)
    pair = [planted.in_integers(levels, 32)(original) for levels in (7, 127)]
    assert rounding_between(*pair) == "4-bit"


def test_a_fault_beneath_coarse_rounding_is_found(llama: Path, tmp_path: Path) -> None:
    quantised = planted.both(
        planted.each_matrix(planted.in_integers(7, 16)), planted.rope(rope_theta=10100.0)
    )
    faulty = toy.copy_of(llama, tmp_path / "faulty", quantised)
    comparison = planted.compared(planted.model_in(llama), planted.model_in(faulty))
    assert (comparison.verdict, comparison.rounding) == ("different", "4-bit")
    assert {one.quantity for one in comparison.faults} == {"rotation"}


def test_a_fault_in_a_norm_of_queries_is_found_beneath_their_rounding(tmp_path: Path) -> None:
    """In Gemma 3 the norm is not seen by itself: its fault shows where the projection's would."""
    whole = toy.save_model(tmp_path / "whole", planted.FAMILIES["gemma3"]())
    norm = planted.noisy("model.layers.1.self_attn.q_norm.weight", 0.5)
    rounded = planted.both(planted.each_matrix(Tensor.bfloat16), norm)
    faulty = toy.copy_of(whole, tmp_path / "faulty", rounded)
    comparison = planted.compared(planted.model_in(whole), planted.model_in(faulty))
    assert (comparison.verdict, comparison.rounding) == ("different", "bfloat16")
    assert [(one.layer, one.quantity) for one in comparison.faults] == [(1, "q")]


# Tokenizers


def with_merge(path: Path) -> None:
    """A tokenizer that joins the digits 1 and 2."""
    file = path / "tokenizer.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    fields["model"]["vocab"]["12"] = fields["model"]["vocab"].pop("ÿ")
    fields["model"]["merges"] = [["1", "2"]]
    file.write_text(json.dumps(fields), encoding="utf-8")


def with_bos(count: int) -> Any:
    """A tokenizer that puts BOS before a text so many times."""

    def change(path: Path) -> None:
        file = path / "tokenizer.json"
        fields = json.loads(file.read_text(encoding="utf-8"))
        special = {"id": "<|endoftext|>", "type_id": 0}
        one = {"Sequence": {"id": "A", "type_id": 0}}
        fields["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [*[{"SpecialToken": special}] * count, one],
            "pair": [one, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {
                "id": "<|endoftext|>", "ids": [toy.BYTE_BOS], "tokens": ["<|endoftext|>"],
            }},
        }  # fmt: skip
        file.write_text(json.dumps(fields), encoding="utf-8")

    return change


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (with_merge, "tokenizer", "3 of 33 texts become other tokens, such as '12|3"),
        (with_bos(2), "bos", "its tokenizer puts BOS 2 times before a text, and A's BOS"),
        (with_bos(0), "bos", "its tokenizer puts no BOS before a text, and A's BOS"),
    ],
    ids=("digits", "doubled", "missing"),
)
def test_tokenizers_are_compared_on_texts_and_by_what_they_put_first(
    change: Any, kind: str, sentence: str, tmp_path: Path
) -> None:
    whole = toy.save_byte_model(tmp_path / "whole")
    with_bos(1)(whole)
    other = toy.copy_of(whole, tmp_path / "other", change)
    causes, _ = tokenizer_causes(describe(whole), describe(other))
    assert causes[-1].kind == kind
    assert causes[0].sentence.startswith(sentence)
    assert tokenizer_causes(describe(whole), describe(whole)) == ([], "the same on 33 texts")


def test_a_model_with_another_tokenizer_is_different(tmp_path: Path) -> None:
    whole = toy.save_byte_model(tmp_path / "whole")
    other = toy.copy_of(whole, tmp_path / "other", with_merge)
    end = diff(whole, other)
    assert (end.code, said(end, "verdict")) == (1, [
        "different: the models compute the same from the same tokens, and their tokenizers differ"
    ])  # fmt: skip
    assert diff(whole, other, "--allow", "tokenizer").code == 0


# The page


def runs_beside(page: Path) -> dict[str, RunDirectory]:
    """The runs that were measured for a page, by their names."""
    runs = find_runs(page.with_name(f"{page.stem}-runs"))
    return {run.run_id.rpartition("-")[0]: run for run in runs}


@pytest.mark.long
def test_a_page_shows_both_sides_on_the_sequences_that_were_compared(tmp_path: Path) -> None:
    whole = toy.save_byte_model(tmp_path / "whole")
    faulty = toy.copy_of(whole, tmp_path / "faulty", planted.weights(
        lambda t: t["transformer.h.0.mlp.c_proj.weight"].mul_(2)
    ))  # fmt: skip
    page = tmp_path / "page.html"
    end = diff(whole, faulty, "--report", page)
    assert end.code == 1
    runs = runs_beside(page)
    assert [*runs] == ["a-repeats", "a-texts", "b-repeats", "b-texts"]
    n_ctx = stored_tokens(runs["a-texts"]).shape[1]
    for name, tokens in inputs_of(describe(whole), n_ctx).items():
        for side in "ab":
            np.testing.assert_array_equal(stored_tokens(runs[f"{side}-{name}"]), tokens)
    text = page.read_text(encoding="utf-8")
    for word in ("verdict", "begins", "looks like"):
        (line,) = said(end, word)
        assert f"<dt>{word}</dt><dd>{html.escape(line, quote=False)}" in text.replace("&#39;", "'")
    data: Any = unpacked(text)
    assert len(data["overview"]["runs"]) == 4
    # The last line asks for rows that the page has, too.
    (further,) = said(end, "further")
    words = [*shlex.split(further)[1:], "--format", "csv"]
    rows = [*csv.DictReader(ended(*words).stdout.splitlines())]
    assert {(row["run_id"], row["other_run"]) for row in rows} == {
        (runs["b-texts"].run_id, runs["a-texts"].run_id)
    }
    change = next(row for row in rows if float(row["change"]))
    assert f'<td class="words">{change["statistic"]}</td>' in text
    assert error_of("diff", whole, faulty, "--report", tmp_path / "page.txt") == (
        f"{tmp_path}/page.txt: expected a name that ends in .html or .htm"
    )


# What cannot be compared


@pytest.mark.long
def test_a_run_stands_for_its_model_and_has_the_input(llama: Path, tmp_path: Path) -> None:
    faulty = toy.copy_of(llama, tmp_path / "faulty", change_of("a head of q by a tenth"))
    file = tmp_path / "both.toml"
    file.write_text(
        f'model = ["{llama}", "{faulty}"]\nout = "{tmp_path}/runs"\nn_ctx = 40\nsequences = 6\n'
        'sequences_per_shard = 2\nstatistics = ["entropy"]\n[input]\nfamily = "uniform_random"\n'
    )
    printed("scan", file, "--replicas", "0")
    with headcount.open(tmp_path / "runs") as runs:
        ids = dict(runs.sql("SELECT model, run_id FROM runs").rows())
        tokens = runs.sql(
            f"SELECT tokens FROM sequences WHERE run_id = '{ids[str(llama)]}' ORDER BY sequence"
        ).rows()
    a, b = (RunDirectory.of(tmp_path / "runs", ids[str(model)]) for model in (llama, faulty))
    assert stored_tokens(a).tolist() == [list(row) for (row,) in tokens]
    end = diff(a.path, b.path)
    assert said(end, "looks like") == ["scale: layer 1: q is 1.1 times A's in head 2"]
    assert said(end, "input")[0].startswith(f"6 sequences of {a.run_id} of 40 of A's tokens")
    # What it advises to ask for is there, of the head that changed.
    (further,) = said(end, "further")
    words = [*shlex.split(further)[1:], "--format", "csv"]
    rows = [*csv.DictReader(ended(*words).stdout.splitlines())]
    assert {row["other_run"] for row in rows} == {a.run_id}
    assert any(float(row["change"]) for row in rows if (row["layer"], row["head"]) == ("1", "2"))
    # Both sides are measured already, so a page needs nothing more.
    page = tmp_path / "page.html"
    assert diff(a.path, b.path, "--report", page).code == 1
    assert not page.with_name("page-runs").exists()
    data: Any = unpacked(page.read_text(encoding="utf-8"))
    assert {run["run_id"] for run in data["overview"]["runs"]} == {
        a.run_id, b.run_id,
    }  # fmt: skip
    # One side may be a model, which then is measured on the run's sequences; the same weights are
    # the same.
    end = diff(llama, a.path, "--report", page)
    assert (end.code, said(end, "verdict")[0][:5]) == (0, "same:")
    (measured,) = runs_beside(page).values()
    np.testing.assert_array_equal(stored_tokens(measured), stored_tokens(a))
    shutil.rmtree(faulty)
    assert "; instead of the run name its model, where it lies now" in error_of(
        "diff", a.path, b.path
    )


def test_what_cannot_be_compared_is_refused_in_a_line(llama: Path, tmp_path: Path) -> None:
    expected = "expected two forms of one model, of which every layer and head can be compared"
    assert error_of("diff", llama, find_model("bundled:gpt2-mini")) == (
        f"n_layers is 4 in A and 3 in B; {expected}"
    )
    larger = toy.family("LlamaConfig", **planted.SIZES | {"vocab_size": 71})
    toy.save_model(tmp_path / "larger", larger)
    assert error_of("diff", llama, tmp_path / "larger") == (
        f"d_vocab is 61 in A and 71 in B; {expected}"
    )
    assert error_of("diff", llama, tmp_path).startswith(f"{tmp_path}: no readable config.json")
    assert error_of("diff", "runs/run_id=one-1a2b3c4d", llama) == (
        f"{Path.cwd()}/runs/run_id=one-1a2b3c4d: no manifest.json; expected the directory of a "
        "run; bring back a copy"
    )
    assert error_of("diff", llama, llama, "--allow", "roundings").startswith(
        "--allow: unknown kind 'roundings': did you mean 'rounding'? Known: "
    )
    nan = planted.weights(lambda t: t[planted.of(2, "v")].fill_(torch.nan))
    toy.copy_of(llama, tmp_path / "other", nan)
    assert error_of("diff", llama, tmp_path / "other") == (
        f"{tmp_path}/other: layer 2 puts out NaN or infinity "
        "(model.layers.2.self_attn.v_proj.weight holds numbers that are NaN or infinite), "
        "expected numbers; nothing can be compared behind it"
    )
    encoder = toy.save_model(tmp_path / "bert", toy.family("BertConfig"))
    error = error_of("diff", encoder, encoder)
    assert error.startswith(f"{encoder}: ")
    assert "expected a causal language model" in error


# All that are planted: a minute or two


@pytest.mark.long
def test_planted_faults_are_found_and_named(tmp_path: Path) -> None:
    rows = [*planted.planted(tmp_path)]
    missed = [fault.name for fault, found in rows if found.verdict != "different"]
    misplaced = [fault.name for fault, found in rows if not planted.is_placed(fault, found)]
    misnamed = [fault.name for fault, found in rows if not planted.is_named(fault, found)]
    assert (missed, misplaced, misnamed) == ([], [], [])
    kinds = {fault.cause for fault, _ in rows}
    assert kinds == {*CAUSES, UNKNOWN}


@pytest.mark.long
def test_no_harmless_change_raises_an_alarm(tmp_path: Path) -> None:
    rows = [*planted.harmless(tmp_path)]
    assert len(rows) >= 40
    assert [
        (change.name, family) for family, change, found in rows
        if not planted.is_harmless(change, found)
    ] == []  # fmt: skip
