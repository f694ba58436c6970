"""`headcount doctor --model NAME` says how a model would be measured."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.jobs.commands.model_report import report_model
from headcount.schemas.errors import HeadcountError
from headcount.workers.replica import Replica
from tests.toys import model_families, toy_models
from tests.toys.commands import ended

Families = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _quiet_libraries() -> None:
    model_families.prepare_libraries()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """Tiny models by family, each saved once."""
    folder = tmp_path_factory.mktemp("models")

    def saved(family: str) -> Path:
        model: Any = model_families.tiny_model(family)
        model.save_pretrained(folder / family)
        return folder / family

    return cache(saved)


def replica_of(path: Path, change: dict[str, Any]) -> Replica:
    """A replica of a small scan."""
    return toy_models.replica(path, **{"n_ctx": 16, "statistics": ["sink_mass"]} | change)


def report_of(model: Path) -> dict[str, list[str]]:
    """The texts of a tiny model's report, by their words."""
    texts: dict[str, list[str]] = {}
    for word, text in report_model(str(model)):
        texts.setdefault(word, []).append(text)
    return texts


def test_layers_with_windows_and_sinks_are_told_apart(families: Families) -> None:
    report = report_of(families("gpt_oss"))
    assert report["model"] == ["gpt_oss: 2 layers of 4 heads, d_head 8, up to 64 tokens"]
    assert report["engine"] == ["fused, and dense"]
    assert report["attention"] == [
        "layer 0: scale 0.3536, window of 8 tokens, learned sinks",
        "layer 1: scale 0.3536, learned sinks",
    ]
    names, reason = report["NULL"][0].split(": ")
    assert reason == "positions rotate queries and keys"
    assert "score_shift" in names.split(", ")
    assert not any("sink_gate" in text for text in report["NULL"])
    behind_window, uniform_baseline = report["NULL"][-2:]
    names, rest = behind_window.split(": ")
    assert rest == (
        "layer 0, from n_ctx = 18 on; no query sees what they are about in its window of 8 tokens"
    )
    assert uniform_baseline.startswith(
        "uniform baselines: from n_ctx = 9 on; the layers differ in their window"
    )
    # As it is when they are measured.
    behind = names.split(", ")
    replica = replica_of(families("gpt_oss"), {"statistics": ["all"], "n_ctx": 18})
    tokens = np.random.default_rng(0).integers(64, size=(2, 18)).astype(np.int32)
    measured = replica.measure(tokens)
    first, second = (
        {name for name, values in measured.heads.items() if np.isfinite(values[:, layer]).any()}
        for layer in (0, 1)
    )
    lost = second - first
    # The tokens that these are about lie too far back for 18.
    assert {*behind} - lost == {"distant_mass_4_64", "distant_mass_last_4_64"}
    assert lost <= {*behind}
    # What is the same in every window has a uniform baseline.
    assert measured.sequences["uniform_entropy_normalised"] == pytest.approx([1, 1], rel=1e-5)
    assert np.isnan(measured.sequences["uniform_sink_mass"]).all()


def test_layers_that_do_not_attend_and_a_missing_bridge_are_named(
    families: Families,
) -> None:
    report = report_of(families("bailing_hybrid"))
    assert report["engine"][0].startswith("fused alone: TransformerLens has no bridge for Bailing")
    assert report["attention"] == ["layer 0: none, so no rows", "layer 1: scale 0.2887"]
    assert "sink_gate: the layer has no learned sink" in report["NULL"]


def test_the_command_prints_the_report() -> None:
    answer = ended("doctor", "--model", "bundled:attn-only-2l-mini")
    assert answer.code == 0, answer.output
    words = [line.split()[0] for line in answer.output.splitlines()]
    assert words[:3] == ["model", "BOS", "engine"]


@pytest.mark.parametrize(("family", "change", "message"), [
    ("dbrx", {"engine": "dense"},
     "interventions: 'none' needs the dense engine (engine is 'dense'), and dbrx has none: "
     "TransformerLens has no bridge for DbrxForCausalLM"),
    ("dbrx", {"weight_processing": "folded"},
     "dbrx: TransformerLens has no bridge for DbrxForCausalLM, which folds weights"),
    ("dbrx", {"interventions": ["zero_query_bias"]},
     "dbrx: layer 0 has no b_Q for zero_query_bias to change; such a model takes "
     "zero_first_value, zero_first_mlp_out, zero_massive_activations"),
    ("gpt_oss", {"precision": "float64"}, "…transformers cannot run it in float64 (…"),
])  # fmt: skip
def test_what_a_model_cannot_do_is_refused_with_that_word(
    families: Families, family: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(HeadcountError) as caught:
        replica_of(families(family), change)
    pattern = re.escape(message).replace("…", ".*")
    assert re.fullmatch(pattern, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize(("family", "engine"), [
    ("openai-gpt", "fused alone: statistics: sink_mass reads pattern, and this engine does"),
    ("jetmoe", "fused alone: jetmoe: TransformerLens does not show q, k and pattern"),
    ("qwen3_next", "fused, and dense"),
])  # fmt: skip
def test_the_dense_engine_is_named_where_it_measures(
    families: Families, family: str, engine: str
) -> None:
    report = report_of(families(family))
    assert report["engine"][0].startswith(engine)
    is_gated = any("z is changed before W_O" in text for text in report["NULL"])
    assert is_gated == (family == "qwen3_next")


@pytest.mark.parametrize(("family", "is_known"), [
    ("dbrx", False),  # Its modules have names of their own.
    ("qwen3_next", False),  # It multiplies z by a gate, so z W_O is not what a head writes.
    ("deepseek_v3", True),  # Its keys come from a latent space, and its heads write as others do.
])  # fmt: skip
def test_statistics_of_unknown_weights_are_null(
    families: Families, family: str, is_known: bool
) -> None:
    columns = ["head_result_norm", "score_shift", "head_output_norm"]
    replica = replica_of(families(family), {"statistics": columns})
    tokens = np.random.default_rng(0).integers(64, size=(2, 16)).astype(np.int32)
    heads = replica.measure(tokens).heads
    assert np.isfinite(heads["head_result_norm"]).all() == is_known
    assert np.isnan(heads["head_result_norm"]).all() != is_known
    assert np.isfinite(heads["head_output_norm"]).all()
    assert np.isnan(heads["score_shift"]).all()
