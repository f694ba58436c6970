"""The rules of a watched training. Each is a function that makes a number of what was measured.

A rule reads the steps so far and gives its readings `[step layer head]`; an axis of one stands for
the whole layer or model. It rings where a reading passes the rule's threshold, which
`benchmarks/trainings` calibrated on trainings in which nothing was wrong.
"""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from headcount.schemas.watch.history import History, layer_of

THRESHOLDS = Path(__file__).parent / "thresholds.csv"

LEAST_BATCHES, LEAST_SPREAD = 5, 0.02  # before data are said to have changed

SAME_FACTOR = 1e-6  # how far factors of decay differ by rounding

Readings = Callable[[History], np.ndarray]


@dataclass(frozen=True)
class Rule:
    """One thing that may go wrong in a training."""

    name: str
    reads: tuple[str, ...]  # statistics; none: facts of the weights or of a batch
    rings: Literal["above", "below"]
    margin: float  # how many times further than any sound training the threshold lies
    least: float  # what an extreme is taken for that is smaller
    advice: str  # what people did about it
    source: str
    is_notice: bool  # whether it happens in sound pretraining too: it is told, and stops nothing
    readings: Readings

    @property
    def meaning(self) -> str:
        """What goes wrong, in one sentence."""
        return inspect.getdoc(self.readings).partition("\n")[0]  # pyright: ignore

    @property
    def threshold(self) -> float:
        """Where it rings."""
        return calibrations()[self.name].threshold

    def passes(self, readings: np.ndarray) -> np.ndarray:
        """Which readings ring. What is undefined does not."""
        sign = 1 if self.rings == "above" else -1
        return np.nan_to_num(sign * readings, nan=-np.inf) > sign * self.threshold


@dataclass(frozen=True)
class Calibration:
    """What is known of a rule in trainings in which nothing was wrong."""

    extreme: float  # the reading nearest to the threshold, or beyond it
    trainings: int
    threshold: float


@cache
def calibrations() -> dict[str, Calibration]:
    """The calibration of each rule, as `python -m benchmarks.trainings` wrote it."""
    with THRESHOLDS.open(encoding="utf-8", newline="") as file:
        return {
            row["rule"]: Calibration(
                float(row["extreme"]), int(row["trainings"]), float(row["threshold"])
            )
            for row in csv.DictReader(file)
        }


RULES: dict[str, Rule] = {}


def rule(
    *reads: str,
    rings: Literal["above", "below"] = "above",
    margin: float = 1.5,
    least: float = 0.0,
    advice: str,
    source: str,
    is_notice: bool = False,
) -> Callable[[Readings], Readings]:
    """Register a rule: its name is the function's, its meaning the docstring's first line."""

    def register(readings: Readings) -> Readings:
        name = readings.__name__
        RULES[name] = Rule(name, reads, rings, margin, least, advice, source, is_notice, readings)
        return readings

    return register


@rule(
    "score_max",
    margin=2.5,  # models with LayerNorm and rotary positions reach 104 in sound trainings
    advice="normalise queries and keys, or scale both down once a score reaches 100 (QK-clip); "
    "lower the learning rate",
    source="Dehghani et al. 2023, arXiv 2302.05442; Wortsman et al. 2023, arXiv 2309.14322; Kimi "
    "K2, arXiv 2507.20534",
)
def score_growth(history: History) -> np.ndarray:
    """Scores of a head have grown too large for its softmax.

    max over the sequences of score_max.
    """
    return history.of("score_max")


@rule(
    "entropy_normalised",
    rings="below",
    advice="normalise queries and keys, or the spectra of the weights; lower the learning rate",
    source="Zhai et al. 2023, arXiv 2303.06296",
)
def entropy_collapse(history: History) -> np.ndarray:
    """The heads of a layer look at single tokens.

    mean over the layer's heads of entropy_normalised.
    """
    return history.by_layer("entropy_normalised")


@rule(
    "head_result_norm",
    rings="below",
    margin=10,
    advice="look for a mask, a pruning or a broken shard of a checkpoint that holds the head at 0; "
    "go back to before it",
    source="Voita et al. 2019, arXiv 1905.09418: pruned heads",
)
def head_death(history: History) -> np.ndarray:
    """A head adds nothing to the residual stream.

    head_result_norm / median over the layer's heads of it.
    """
    norms = history.of("head_result_norm")
    return norms / np.nanmedian(norms, axis=2, keepdims=True)


@rule(
    "sink_mass",
    least=0.2,  # by hand: calibrating models have no sinks, their layers' masses are below 0.2
    advice="nothing early in pretraining, where it comes once; later look at the data, as heads "
    "rest where nothing can be found",
    source="Xiao et al. 2023, arXiv 2309.17453; Gu et al. 2024, arXiv 2410.10781",
    is_notice=True,
)
def sink_onset(history: History) -> np.ndarray:
    """The heads of a layer come to rest on the first token.

    mean over the layer's heads of sink_mass, above its smallest so far.
    """
    masses = history.by_layer("sink_mass")
    return masses - np.minimum.accumulate(masses)


@rule(
    "sink_mass",
    least=0.2,  # by hand, likewise
    advice="look whether sequences still begin as before: with the same first token, and uncut",
    source="Xiao et al. 2023, arXiv 2309.17453",
)
def sink_loss(history: History) -> np.ndarray:
    """The heads of a layer no longer rest on the first token.

    mean over the layer's heads of sink_mass, below its largest so far.
    """
    masses = history.by_layer("sink_mass")
    return np.maximum.accumulate(masses) - masses


@rule(
    "sink_resid_post_norm",
    "resid_post_norm",
    advice="give heads a bias or a gate to rest on, if later the model is to be quantised",
    source="Sun et al. 2024, arXiv 2402.17762",
    is_notice=True,
)
def massive_growth(history: History) -> np.ndarray:
    """The residual stream at the first token outgrows the others.

    sink_resid_post_norm / resid_post_norm of the layer, over its smallest ratio so far.
    """
    # A norm of the stream is the same for all heads of a layer.
    ratios = history.by_layer("sink_resid_post_norm") / history.by_layer("resid_post_norm")
    return ratios / np.minimum.accumulate(ratios)


@rule(
    "induction_score",
    advice="look at the data since then, and go back to before them",
    source="Olsson et al. 2022, arXiv 2209.11895",
)
def induction_loss(history: History) -> np.ndarray:
    """Heads that copied copy no longer, and no other head does in their place.

    How far induction_score has fallen below the head's largest so far, but no further than the
    largest of all heads has fallen.
    """
    scores = np.nan_to_num(history.of("induction_score"), nan=0.0)
    best = scores.max(axis=(1, 2), keepdims=True)
    fallen = np.maximum.accumulate(scores) - scores
    return np.minimum(fallen, np.maximum.accumulate(best) - best)


@rule(
    least=4,  # by hand: 30 trainings saw ten orders of data, and without it 6 of 24 others rang
    advice="look at the data that were read at this step, and skip them",
    source="Chowdhery et al. 2022, arXiv 2204.02311: batches were skipped at loss spikes",
)
def data_change(history: History) -> np.ndarray:
    """Training reads data of another kind than before.

    |r - m| / max(s, 0.02), r = share of a batch's tokens that were in their sequence before, m and
    s its mean and standard deviation at earlier steps, of which there must be at least 5.
    """
    repeated = history.fact("repeated").ravel()
    readings = np.full((len(repeated), 1, 1), np.nan)
    for place, share in enumerate(repeated):
        earlier = repeated[:place][~np.isnan(repeated[:place])]
        if len(earlier) >= LEAST_BATCHES:
            spread = max(float(earlier.std()), LEAST_SPREAD)
            readings[place] = abs(share - earlier.mean()) / spread
    return readings


@rule(
    least=1,  # so that it takes three: two may meet by chance where data are few
    advice="look whether the loader goes on; nothing is wrong if all data are one batch",
    source="definition: the tokens are those of the measured steps before",
)
def repeated_batch(history: History) -> np.ndarray:
    """Training reads the same batch again and again.

    How many measured steps right before read its very tokens.
    """
    batches = [each.facts.batch for each in history.measured]
    readings = np.full((len(batches), 1, 1), np.nan)
    times = 0
    for place, batch in enumerate(batches):
        is_same = place > 0 and batch == batches[place - 1]
        times = times + 1 if is_same else 0
        if batch is not None:
            readings[place] = times
    return readings


@rule(
    least=0.3,  # a share of 0.45 rings; the labels of transformers are never the next token
    advice="pass the tokens themselves as labels: models of transformers shift them",
    source="transformers, loss_utils.py: labels are shifted inside of the loss",
)
def shifted_labels(history: History) -> np.ndarray:
    """Labels are shifted twice, so that the token after the next is learned.

    Share of a batch's labels that are the next token, and not their own.
    """
    return history.fact("shifted")


@rule(
    margin=10,
    least=1e-4,  # rounding
    advice="look what makes the mask: a mask of one's own replaces the causal one, and so does "
    "is_causal=False",
    source="definition: a causal model predicts from what came before",
)
def future_leak(history: History) -> np.ndarray:
    """Predictions follow later tokens.

    ‖logits - logits'‖ / ‖logits‖ in the first half of a sequence, where the second one changed.
    """
    return history.fact("ahead")


@rule(
    least=0.5,
    advice="look what has set its scale, its window or another number; nothing is wrong if that "
    "was meant",
    source="definition: the numbers that its modules are set to are not those of the first step",
)
def changed_attention(history: History) -> np.ndarray:
    """The attention of a layer computes something else than at the first step.

    1 if numbers that its modules are set to have changed, such as a scale, else 0.
    """
    layers = np.full((len(history.measured), history.n_layers, 1), np.nan)
    first = history.measured[0].facts.attention
    for readings, each in zip(layers, history.measured, strict=True):
        for layer, digest in each.facts.attention.items():
            if layer in first:
                readings[int(layer)] = digest != first[layer]
    return layers


@rule(
    margin=10,
    least=1e-4,  # rounding
    advice="pass no attention_mask of ones and no cache beside position_ids: transformers makes "
    "the mask of documents only without them",
    source="transformers, masking_utils.py",
)
def document_leak(history: History) -> np.ndarray:
    """Documents that share a sequence see each other in training.

    ‖logits - logits'‖ / ‖logits‖ in the second document, where the first one's tokens changed.
    """
    return history.fact("leak")


@rule(
    least=1e-4,  # rounding
    advice="tie the weights again (model.tie_weights()), also after loading and resizing",
    source="Press and Wolf 2017, arXiv 1608.05859",
)
def tied_head(history: History) -> np.ndarray:
    """The unembedding is no longer the embedding, although the config ties them.

    ‖W_E - W_U‖ / ‖W_E‖.
    """
    return history.fact("untied")


@rule(
    least=0.5,
    advice="give the layer's weights to the optimizer, and let them have gradients; nothing is "
    "wrong if it is frozen on purpose",
    source="definition: its weights are as they were or have only decayed, and others have not",
)
def frozen_layer(history: History) -> np.ndarray:
    """A layer has stopped learning, and others go on.

    1 if each of the layer's weights is as at the step before, or those that are not have all
    shrunk by one factor, as weight decay does it; 0 if that is so in all layers.
    """
    _, norms = history.norms()
    factors = norms[1:] / norms[:-1]
    is_frozen = np.full((len(norms), history.n_layers, 1), np.nan)
    for layer, places in _weights_of_layers(history).items():
        # Of a weight that is 0 and stays so, no factor is known.
        has_changed = (norms[1:] != norms[:-1])[:, places]
        changed = np.where(has_changed, factors[:, places], np.nan)
        least, most = np.nanmin(changed, axis=1), np.nanmax(changed, axis=1)
        # A single weight always has one factor.
        is_some = has_changed.sum(axis=1) > 1
        has_decayed = is_some & (most < 1) & (most - least < SAME_FACTOR)
        is_frozen[1:, layer, 0] = has_decayed | ~has_changed.any(axis=1)
    stands_still = np.nanmin(is_frozen, axis=1, keepdims=True) == 1
    return np.where(stands_still, 0, is_frozen)


@rule(
    advice="keep weights and optimizer state in float32, or round stochastically",
    source="Zamirai et al. 2020, arXiv 2010.06192",
)
def lost_updates(history: History) -> np.ndarray:
    """Weights of a layer stay the same because their format is too narrow for the updates.

    Share of the layer's weights, of those trained in half precision, that are as at the step
    before, if not all are.
    """
    _, norms = history.norms()
    is_same = norms[1:] == norms[:-1]
    shares = np.full((len(norms), history.n_layers, 1), np.nan)
    for layer, places in _weights_of_layers(history, narrow=True).items():
        shares[1:, layer, 0] = is_same[:, places].mean(axis=1)
    return np.where(shares == 1, np.nan, shares)


@rule(
    least=0.5,
    advice="look which checkpoint was loaded, and whether the optimizer makes steps",
    source="EleutherAI/pythia, issue 205",
)
def earlier_weights(history: History) -> np.ndarray:
    """The weights are those of an earlier step.

    1 if all of them are, else 0.
    """
    _, norms = history.norms()
    is_repeated = [
        bool(norms.shape[1]) and bool((norms[:place] == norms[place]).all(axis=1).any())
        for place in range(len(norms))
    ]
    return np.array(is_repeated, float)[:, None, None]


WATCHED = sorted({statistic for each in RULES.values() for statistic in each.reads})
"""The statistics that the rules read."""


def _weights_of_layers(history: History, narrow: bool = False) -> dict[int, list[int]]:
    """The places of each layer's weights among `History.norms`, of layers that have some.

    With `narrow`, of those that are trained in half precision.
    """
    names, _ = history.norms()
    counted = {*(history.measured[-1].facts.narrow if narrow else names)}
    places: dict[int, list[int]] = {}
    for place, name in enumerate(names):
        layer = layer_of(name)
        if layer is not None and name in counted:
            places.setdefault(layer, []).append(place)
    return places
