"""What `headcount doctor --model NAME` says: how a model would be measured."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from headcount.schemas.errors import HeadcountError, counted
from headcount.schemas.formulas import Formula
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.known_models import KnownModels
from headcount.workers.measurements.undefined import defined_or_nan, where_defined
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.info.model_files import AdapterChoice
from headcount.workers.model.layer_weights import READABLE_WEIGHTS, attention_weights
from headcount.workers.model.model import Model
from headcount.workers.replica import Replica

TRIAL_TOKENS = 16  # tokens of the sequences that are measured as a trial


def report_model(name: str, adapter: AdapterChoice = "refuse") -> Iterator[tuple[str, str]]:
    """Load a model, measure two short sequences, and say what was found: a word and its text.

    A model that cannot be measured raises `ModelError`, which says in one line why.
    """
    models = KnownModels()
    info = models.describe(name, adapter=adapter)
    heads = f"{counted(info.n_layers, 'layer')} of {counted(info.n_heads, 'head')}"
    yield "model", f"{info.name}: {heads}, d_head {info.d_head}, up to {info.n_ctx:,} tokens"
    yield "BOS", info.bos_line(info.begins_with_bos("auto"))
    for note in info.notes:
        yield "note", note

    model = models.load(info, "raw", "cpu")
    fields = {
        "model": name,
        "n_ctx": min(TRIAL_TOKENS, info.n_ctx),
        "sequences": 2,
        "input": {"family": "uniform_random"},
    }
    tokens = np.random.default_rng(0).integers(info.d_vocab, size=(2, fields["n_ctx"]))

    def try_engine(engine: str) -> None:
        # Only measuring tells: the bridge may show patterns that are not finite.
        replica = Replica(info, parse_scan(fields | {"engine": engine}), "cpu", models.load)
        replica.measure(tokens.astype(np.int32))

    try_engine("fused" if model.attention_problem is None else "dense")
    engines = "fused, and dense"
    if model.attention_problem is not None:
        engines = f"dense alone: {model.attention_problem}"
    elif (problem := model.bridge().problem) is not None:
        engines = (
            f"fused alone: {problem}; so no engine = 'dense', no folded weights, "
            "and no intervention that needs them"
        )
    else:
        try:
            try_engine("dense")
        except HeadcountError as error:
            engines = f"fused alone: {error}"
    yield "engine", engines

    by_facts: dict[str, list[int]] = {}
    for layer in range(info.n_layers):
        by_facts.setdefault(_facts_in_words(model, layer), []).append(layer)
    for facts, layers in by_facts.items():
        yield "attention", f"{listed_layers(layers)}: {facts}"
    for reason, formulas in _undefined(model).items():
        names = ", ".join(formula.name for formula in formulas)
        yield "NULL", f"{names}: {reason}"
    yield from _undefined_by_windows(model)


def _facts_in_words(model: Model, layer: int) -> str:
    if layer not in model.info.attention_layers_or_all:
        return "none, so no rows"
    if (facts := model.facts(layer)) is None:
        return "not known to the fused engine"
    words = [f"scale {facts.scale:.4g}"]
    if facts.window is not None:
        words.append(f"window of {counted(facts.window, 'token')}")
    if facts.soft_cap is not None:
        words.append(f"scores capped at {facts.soft_cap:g}")
    if facts.slopes is not None:
        words.append("ALiBi")
    if facts.sink is not None:
        words.append("learned sinks")
    return ", ".join(words)


def listed_layers(layers: Sequence[int]) -> str:
    """For example `layers 0, 2-5`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(spans)}"


def _undefined(model: Model) -> dict[str, list[Formula]]:
    """The statistics that have no value in this model, by the reason."""
    layers = model.info.attention_layers_or_all
    facts = [model.facts(layer) for layer in layers]
    has_sinks = any(fact is not None and fact.sink is not None for fact in facts)
    has_positions = model.effective_positions() is not None
    # A weight that one layer has gives the statistic a value there.
    known_weights: set[str] = set()
    for layer in layers:
        known_weights |= attention_weights(model, layer, READABLE_WEIGHTS).keys()
    unknown_weights = {*READABLE_WEIGHTS} - known_weights

    by_reason: dict[str, list[Formula]] = {}
    for statistic in STATISTICS.select("all"):
        unknown = sorted({*statistic.parameters} & unknown_weights)
        reason = None
        if model.rotary and "rotary" in statistic.conditions:
            reason = "positions rotate queries and keys"
        elif "effective" in statistic.parameters and not has_positions:
            reason = "no embeddings of positions are known"
        elif unknown == ["W_O"] and any(model.changes_z(layer) for layer in layers):
            reason = "z is changed before W_O, for example by a gate"
        elif unknown:
            reason = f"{' and '.join(unknown)} not known in this model"
        elif statistic.missing and not has_sinks:
            reason = statistic.missing
        if reason is not None:
            by_reason.setdefault(reason, []).append(statistic)
    return by_reason


def _undefined_by_windows(model: Model) -> Iterator[tuple[str, str]]:
    """What has no value in sequences that are longer than a window, one line for each window."""
    layers_by_window: dict[int | None, list[int]] = {}
    for layer in model.info.attention_layers_or_all:
        facts = model.facts(layer)
        window = None if facts is None else facts.window
        layers_by_window.setdefault(window, []).append(layer)
    for window, layers in layers_by_window.items():
        names = ", ".join(undefined_behind(window)) if window is not None else ""
        if window is not None and names:
            where = f"{listed_layers(layers)}, from n_ctx = {2 * window + 2:,} on"
            cause = f"no query sees what they are about in its window of {counted(window, 'token')}"
            yield "NULL", f"{names}: {where}; {cause}"
    windows = [window for window in layers_by_window if window is not None]
    if len(layers_by_window) > 1 and windows:
        cause = "the layers differ in their window, so measure layers of one window for them"
        yield "NULL", f"uniform baselines: from n_ctx = {min(windows) + 1:,} on; {cause}"


LARGEST_TRIAL_WINDOW = 128  # a longer one leaves no other statistics without a value


def undefined_behind(window: int) -> list[str]:
    """The statistics of attention that lose their value to a window, on random queries and keys."""
    window = min(window, LARGEST_TRIAL_WINDOW)
    # So long that queries at the end see nothing of the beginning.
    n_ctx = 4 * LARGEST_TRIAL_WINDOW
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, n_ctx, 4, generator=generator)
    without_window, with_window = (
        {
            "pattern": DensePattern.of(q, k, AttentionFacts(1.0, window=size)),
            "q": q.transpose(1, 2),
            "k": k.transpose(1, 2),
        }
        for size in (None, window)
    )

    def has_value(statistic: Formula, activations: dict[str, Any]) -> bool:
        value = defined_or_nan(statistic, activations)
        is_defined = where_defined(statistic, activations, value)
        return bool((value.isfinite() & is_defined).all())

    return [
        statistic.name
        for statistic in STATISTICS.select("all")
        if {*statistic.parameters, *statistic.conditions} <= with_window.keys()
        and has_value(statistic, without_window)
        and not has_value(statistic, with_window)
    ]
