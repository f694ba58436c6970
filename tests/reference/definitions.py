"""Every statistic, profile and prediction once more, as its formula stands in the documentation.

One head of one sequence at a time. What is not defined is NaN, and so is a mean of which one term
is not.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.forward import ActivationChange, Run, forward, log_probabilities, token_losses
from tests.reference.reference_changes import run_changed
from tests.reference.weights import Array, Weights, read_weights

Columns = dict[str, Array]
Matrix = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Head:
    """What one head did on one sequence, in the symbols of the formulas."""

    t: list[int]
    """Tokens."""
    labels: list[str]
    """The label of every position, "" if it has none."""
    A: Matrix
    """A[q][k], the attention pattern as changed."""
    pattern: Array
    """The same as an array, for sums over many of its entries."""
    S: Matrix
    """S[q][k], the score as changed; NaN where a change hides the key."""
    q: Array
    """Before any rotation, like k: `[pos d_head]`."""
    k: Array
    q_rotated: Array
    """After any rotation, like k_rotated."""
    k_rotated: Array
    v: Array
    z: Array
    resid_pre: Array
    resid_post: Array
    b_Q: Array
    b_K: Array
    W_K: Array
    W_O: Array
    s: float
    """What q·k is multiplied by."""
    rotary: bool
    EPE: Array | None
    """Effective positions `[pos d_model]` of the weights as they are now, if the model has them."""
    window: int
    """How many keys a query sees at most."""
    has_sink: bool
    """Whether there is a learned sink."""
    run: Run
    layer: int

    @cached_property
    def T(self) -> int:
        return len(self.t)

    @cached_property
    def N(self) -> int:
        return self.T // 2

    @cached_property
    def late(self) -> range:
        """The second half of the queries."""
        return range(self.N, self.T)

    @cached_property
    def delta(self) -> list[float]:
        """Δ[k] = b_Q·(k[k] - b_K)."""
        return [float(self.b_Q @ (key - self.b_K)) for key in self.k]

    @cached_property
    def H(self) -> list[float]:
        """Entropy of each row."""
        return [-sum(a * math.log(a) for a in row if a > 0) for row in self.A]

    def labelled(self, label: str) -> list[int]:
        """The positions with a label."""
        return [position for position in range(self.T) if self.labels[position] == label]

    @cached_property
    def copies(self) -> list[list[int]]:
        """Earlier positions with the token of each query."""
        return [[j for j in range(q) if self.t[j] == self.t[q]] for q in range(self.T)]

    @cached_property
    def tail(self) -> range:
        """The last 64 queries."""
        return range(max(0, self.T - 64), self.T)

    def sees(self, q: int, k: int) -> bool:
        """Whether a query sees a key."""
        return k <= q < k + self.window

    def queries_of(self, k: int) -> range:
        """The queries that see a key."""
        return range(k, min(self.T, k + self.window))

    @cached_property
    def mean_received(self) -> list[float]:
        """What each key receives of the queries that see it, on average."""
        return [float(self.pattern[k : k + self.window, k].mean()) for k in range(self.T)]

    @cached_property
    def late_0(self) -> list[int]:
        """The queries of the second half that see key 0."""
        return [q for q in self.late if self.sees(q, 0)]

    @cached_property
    def repeats(self) -> bool:
        """Whether the last ⌊T/2⌋ tokens repeat those before them, and are at least two."""
        N = self.N
        return N >= 2 and self.t[self.T - N :] == self.t[self.T - 2 * N : self.T - N]


def mean(values: Iterable[float]) -> float:
    """NaN where there are none, or one of them is."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def first_largest(values: Sequence[float]) -> int:
    """The place of the largest value; of values that tie up to a share of 1e-5, the first."""
    least = max(values) * (1 - 1e-5)
    return next(i for i, value in enumerate(values) if value >= least)


def length(x: Array) -> float:
    return math.sqrt(float(x @ x))


def lengths(rows: Array) -> list[float]:
    return np.sqrt((rows * rows).sum(-1)).tolist()


def cosine(x: Array, y: Array) -> float:
    """NaN where one of them is zero."""
    product = length(x) * length(y)
    return float(x @ y) / product if product > 0 else math.nan


def cosines(x: Array, others: Array) -> list[float]:
    """The cosines of a vector and of each of the others, at once."""
    sizes = length(x) * np.sqrt((others * others).sum(-1))
    products = others @ x
    return np.where(sizes > 0, products / np.where(sizes > 0, sizes, 1), np.nan).tolist()


def first_share(scores: Sequence[float]) -> float:
    """The first part of a softmax."""
    largest = max(scores)
    exponentials = [math.exp(score - largest) for score in scores]
    return exponentials[0] / sum(exponentials)


Statistic = Callable[[Head], float]
STATISTIC_DEFINITIONS: dict[str, Statistic] = {}
VARIANT_DEFINITIONS: dict[str, Statistic] = {}
"""Statistics with other options than their defaults, by column."""


def statistic(function: Statistic) -> Statistic:
    STATISTIC_DEFINITIONS[function.__name__] = function
    return function


# Sink


def received(h: Head) -> list[float]:
    """What a key receives of a query on average, of the keys that enough queries see."""
    enough = min(16, math.ceil(h.T / 2), h.window)
    return [m for k, m in enumerate(h.mean_received) if len(h.queries_of(k)) >= enough]


STATISTIC_DEFINITIONS |= {
    "sink_mass": lambda h: mean(h.A[q][0] for q in h.queries_of(0) if q >= 1),
    "sink_alpha": lambda h: mean(h.A[q][0] for q in h.queries_of(0)),
    "sink_mass_late": lambda h: mean(h.A[q][0] for q in h.late_0),
    "sink_mass_first4": lambda h: mean(sum(h.A[q][:4]) for q in h.late_0),
    "sink_mass_first8": lambda h: mean(sum(h.A[q][:8]) for q in h.late_0),
    "next4_mass_late": lambda h: mean(sum(h.A[q][1:5]) for q in h.late if h.sees(q, 1)),
    "second_key_mass_late": lambda h: mean(h.A[q][1] for q in h.late if h.sees(q, 1)),
    "sink_gate": lambda h: mean(1 - sum(row) for row in h.A) if h.has_sink else math.nan,
    "sink_position": lambda h: float(first_largest(received(h))),
    "sink_position_mass": lambda h: max(received(h)),
}


def strongest_of(keys: int) -> Statistic:
    return lambda h: mean(float(first_largest(h.A[q]) < keys) for q in h.late_0)


STATISTIC_DEFINITIONS["sink_rank_late"] = lambda h: mean(
    1 + sum(a * (1 - 1e-5) > h.A[q][0] for a in h.A[q]) for q in h.late_0
)
STATISTIC_DEFINITIONS["sink_strongest_late_1"] = strongest_of(1)
VARIANT_DEFINITIONS["sink_strongest_late_3"] = strongest_of(3)


# Reach


def distant_masses(h: Head, queries: Iterable[int], sink: int, recent: int) -> list[float]:
    """The mass on distant keys, of the queries that see such keys."""
    masses: list[float] = []
    for q in queries:
        first_key_seen = max(0, q - h.window + 1)
        keys = range(max(sink, first_key_seen), q - recent + 1)
        if keys:
            masses.append(sum(h.A[q][keys.start : keys.stop]))
    return masses


def distant_mass_of(sink: int, recent: int) -> Statistic:
    return lambda h: mean(distant_masses(h, range(h.T), sink, recent))


def distant_mass_last_of(sink: int, recent: int) -> Statistic:
    # Where one query sees a distant key, the last query does.
    return lambda h: mean(distant_masses(h, [h.T - 1], sink, recent))


STATISTIC_DEFINITIONS["distant_mass_4_64"] = distant_mass_of(4, 64)
STATISTIC_DEFINITIONS["distant_mass_last_4_64"] = distant_mass_last_of(4, 64)
for _sink, _recent in ((0, 1), (1, 3), (2, 7)):
    _name = f"{_sink}_{_recent}"
    VARIANT_DEFINITIONS[f"distant_mass_{_name}"] = distant_mass_of(_sink, _recent)
    VARIANT_DEFINITIONS[f"distant_mass_last_{_name}"] = distant_mass_last_of(_sink, _recent)


# Decomposition
FIXED_POSITIONS: dict[str, Statistic] = {
    "score_shift": lambda h: mean(h.delta),
    "sink_score_shift": lambda h: h.delta[0],
    "sink_score_shift_lead": lambda h: h.delta[0] - min(h.delta),
    "sink_shift_advantage": lambda h: mean(h.delta[0] - mean(h.delta[: q + 1]) for q in h.late_0),
    "sink_score_advantage": lambda h: mean(
        float(h.q[q] @ (h.k[0] - h.k[: q + 1].mean(0))) for q in h.late_0
    ),
    # The next two are over all k ≤ q: neither masks nor changes of scores enter.
    "sink_mass_shift_only": lambda h: mean(
        first_share([h.s * d for d in h.delta[: q + 1]]) for q in h.late_0 if h.T >= 2
    ),
    "sink_mass_content_only": lambda h: mean(
        first_share((h.s * (h.k[: q + 1] @ (h.q[q] - h.b_Q))).tolist())
        for q in h.late_0
        if h.T >= 2
    ),
    "sink_key_cosine": lambda h: mean(cosine(h.q[q], h.k[0]) for q in h.queries_of(0)),
    "earlier_key_cosine": lambda h: mean(
        mean(cosines(h.q[q], h.k[1:q])) for q in h.queries_of(0) if q >= 2
    ),
}
"""Statistics that are undefined in a model that rotates queries and keys."""


def unless_rotated(define: Statistic) -> Statistic:
    return lambda h: math.nan if h.rotary else define(h)


STATISTIC_DEFINITIONS |= {name: unless_rotated(FIXED_POSITIONS[name]) for name in FIXED_POSITIONS}


@statistic
def sink_position_cosine(h: Head) -> float:
    if h.EPE is None:
        return math.nan
    towards = h.EPE[0] @ h.W_K
    return mean(cosine(h.q[q] - h.b_Q, towards) for q in h.late)


@statistic
def other_position_cosine(h: Head) -> float:
    if h.EPE is None:
        return math.nan
    towards = h.EPE[1 : h.T] @ h.W_K
    return mean(c for q in h.late for c in cosines(h.q[q] - h.b_Q, towards))


# Diagonals, head results
STATISTIC_DEFINITIONS |= {
    "induction_diagonal": lambda h: mean(
        h.A[q][q - h.N + 1] for q in range(h.N - 1, h.T) if h.repeats and h.window >= h.N
    ),
    "induction_diagonal_strict": lambda h: mean(
        h.A[q][q - h.N + 1] for q in range(h.T - h.N, h.T) if h.repeats and h.window >= h.N
    ),
    "duplicate_diagonal": lambda h: mean(
        h.A[q][q - h.N] for q in range(h.T - h.N, h.T) if h.repeats and h.window > h.N
    ),
    "head_output_norm_last": lambda h: length(h.z[-1]),
    "head_result_norm": lambda h: mean(lengths(h.z @ h.W_O)),
    "head_result_norm_last": lambda h: length(h.z[-1] @ h.W_O),
    "value_result_norm": lambda h: mean(lengths(h.v @ h.W_O)),
    "sink_value_result_norm": lambda h: length(h.v[0] @ h.W_O),
}


# Labels


def labelled_key_mass_of(keys: str, queries: str) -> Statistic:
    def define(h: Head) -> float:
        masses: list[float] = []
        for q in h.labelled(queries):
            labelled_keys = [k for k in h.labelled(keys) if h.sees(q, k)]
            if labelled_keys:
                masses.append(sum(h.A[q][k] for k in labelled_keys))
        return mean(masses)

    return define


STATISTIC_DEFINITIONS["labelled_key_mass_gold_query"] = labelled_key_mass_of("gold", "query")
VARIANT_DEFINITIONS["labelled_key_mass_other_answer"] = labelled_key_mass_of("other", "answer")


@statistic
def retrieval_score(h: Head) -> float:
    copied: list[float] = []
    for p in h.labelled("answer"):
        if p >= 1 and h.labelled("gold"):
            strongest = first_largest(h.A[p - 1][:p])
            copied.append(h.labels[strongest] == "gold" and h.t[strongest] == h.t[p])
    return mean(copied)


def queries_by_label(h: Head) -> tuple[list[int], list[int]]:
    """The triggers and the others from query 1 on; none where one kind is missing."""
    triggers = [q for q in range(1, h.T) if h.labels[q] == "trigger"]
    others = [q for q in range(1, h.T) if h.labels[q] != "trigger"]
    return (triggers, others) if triggers and others else ([], [])


STATISTIC_DEFINITIONS |= {
    "sink_mass_triggers": lambda h: mean(h.A[q][0] for q in queries_by_label(h)[0] if h.sees(q, 0)),
    "sink_mass_others": lambda h: mean(h.A[q][0] for q in queries_by_label(h)[1] if h.sees(q, 0)),
    "previous_token_triggers": lambda h: mean(
        h.A[q][q - 1] for q in queries_by_label(h)[0] if h.window > 1
    ),
}


# Matching


def matched_mass(h: Head, shift: int) -> float:
    """The mass on earlier copies of the token, or on the keys that follow them."""
    seen = {q: [j + shift for j in h.copies[q] if h.sees(q, j + shift)] for q in range(h.T)}
    return mean(sum(h.A[q][k] for k in keys) for q, keys in seen.items() if keys)


STATISTIC_DEFINITIONS |= {
    "previous_token_score": lambda h: mean(h.A[q][q - 1] for q in range(1, h.T) if h.window > 1),
    "lookback_two_score": lambda h: mean(h.A[q][q - 2] for q in range(2, h.T) if h.window > 2),
    "self_attention": lambda h: mean(h.A[q][q] for q in range(h.T)),
    "induction_score": lambda h: matched_mass(h, 1),
    "duplicate_score": lambda h: matched_mass(h, 0),
    "match_coverage": lambda h: mean(float(bool(h.copies[q])) for q in range(h.T)),
    "match_count": lambda h: mean(len(h.copies[q]) for q in range(h.T)),
}


# Norms, residual stream
STATISTIC_DEFINITIONS |= {
    "value_norm": lambda h: mean(lengths(h.v)),
    "sink_value_norm": lambda h: length(h.v[0]),
    "key_norm": lambda h: mean(lengths(h.k)),
    "sink_key_norm": lambda h: length(h.k[0]),
    "query_norm": lambda h: mean(lengths(h.q)),
    "head_output_norm": lambda h: mean(lengths(h.z)),
    "resid_pre_norm": lambda h: mean(lengths(h.resid_pre)),
    "sink_resid_pre_norm": lambda h: length(h.resid_pre[0]),
    "resid_post_norm": lambda h: mean(lengths(h.resid_post)),
    "sink_resid_post_norm": lambda h: length(h.resid_post[0]),
    "query_absmax": lambda h: float(np.abs(h.q_rotated).max()),
    "key_absmax": lambda h: float(np.abs(h.k_rotated).max()),
    "value_absmax": lambda h: float(np.abs(h.v).max()),
    "resid_post_spread": lambda h: math.sqrt(spread(h.resid_post) / h.T),
    "value_spread": lambda h: math.sqrt(spread(h.v) / h.T),
}


def spread(rows: Array) -> float:
    """Σ_k ‖row[k] - mean‖²."""
    return float(((rows - rows.mean(0)) ** 2).sum())


@statistic
def resid_post_spread_share(h: Head) -> float:
    others = h.resid_post[1:]
    size = sum(float(row @ row) for row in others)
    return spread(others) / size if len(others) >= 2 and size > 0 else math.nan


@statistic
def sink_resid_post_massive(h: Head) -> float:
    m = float(np.median(np.abs(h.resid_post[::16])))
    return float(sum(x > 100 and x > 1000 * m for x in np.abs(h.resid_post[0]).tolist()))


@statistic
def sink_resid_post_top3(h: Head) -> float:
    squares = sorted((x * x for x in h.resid_post[0].tolist()), reverse=True)
    return sum(squares[:3]) / sum(squares) if sum(squares) > 0 else math.nan


# Scores, shape


@statistic
def score_max(h: Head) -> float:
    scores = [h.S[q][k] for q in range(h.T) for k in range(q + 1) if h.sees(q, k)]
    # The score of a hidden key is NaN.
    return max(score for score in scores if not math.isnan(score))


@statistic
def sink_logit_spread(h: Head) -> float:
    scores = [h.S[q][0] for q in h.queries_of(0) if q >= 1]
    m = mean(scores)
    return math.sqrt(mean((score - m) ** 2 for score in scores)) if scores else math.nan


STATISTIC_DEFINITIONS |= {
    "sink_logit_margin": lambda h: mean(
        h.S[q][0] - mean(h.S[q][1:q]) for q in h.queries_of(0) if q >= 2
    ),
    "entropy": lambda h: mean(h.H),
    "entropy_normalised": lambda h: mean(
        h.H[q] / math.log(min(q + 1, h.window)) for q in range(1, h.T)
    ),
    "entropy_normalised_late": lambda h: mean(
        h.H[q] / math.log(min(q + 1, h.window)) for q in h.late if h.T >= 2
    ),
    "mean_distance": lambda h: mean(float(h.pattern[q] @ (q - np.arange(h.T))) for q in range(h.T)),
}


# Profiles
BY_PAIR = ("attention_by_pair", "score_by_pair")
"""Profiles whose entries are the pairs (0,0), (1,0), (1,1), (2,0), …"""


def later(queries: Array) -> Array:
    """The queries after the first 4; all of them if there are no more."""
    return queries[4:] if len(queries) > 4 else queries


def second_moment(queries: Array) -> list[float]:
    n, d = queries.shape
    components = queries.T
    return [float(components[i] @ components[j]) / n for i in range(d) for j in range(i, d)]


PROFILE_DEFINITIONS: dict[str, Callable[[Head], list[float]]] = {
    "attention_by_lag": lambda h: [
        float(h.pattern.diagonal(-d).mean()) if d < h.window else math.nan for d in range(h.T)
    ],
    "attention_received_by_key": lambda h: h.mean_received,
    "sink_attention_by_query": lambda h: [
        h.A[q][0] if h.sees(q, 0) else math.nan for q in range(h.T)
    ],
    "last_attention_by_key": lambda h: [
        a if h.sees(h.T - 1, k) else math.nan for k, a in enumerate(h.A[-1])
    ],
    "attention_by_pair": lambda h: [
        h.A[q][k] if h.sees(q, k) else math.nan for q in range(h.T) for k in range(q + 1)
    ],
    "value_norm_by_key": lambda h: lengths(h.v),
    "value_result_norm_by_key": lambda h: lengths(h.v @ h.W_O),
    "key_norm_by_key": lambda h: lengths(h.k),
    "query_norm_by_query": lambda h: lengths(h.q),
    "head_output_norm_by_query": lambda h: lengths(h.z),
    "resid_pre_norm_by_key": lambda h: lengths(h.resid_pre),
    "resid_post_norm_by_key": lambda h: lengths(h.resid_post),
    "score_shift_by_key": lambda h: h.delta,
    "score_shift_lead_by_key": lambda h: [d - min(h.delta) for d in h.delta],
    "last_score_by_key": lambda h: h.S[-1],
    "score_by_pair": lambda h: [h.S[q][k] for q in range(h.T) for k in range(q + 1)],
    "tail_attention_by_key": lambda h: h.pattern[-64:].mean(0).tolist(),
    "tail_attention_by_lag": lambda h: [
        float(h.pattern.diagonal(-d)[-64:].sum()) / len(h.tail) for d in range(h.T)
    ],
    "column_diagonal_attention_by_candidate": lambda h: [
        share_of_lines(h, *counts) for counts in ((30, 2048), (100, 1800), (500, 1500), (3000, 200))
    ],
    "query_mean": lambda h: later(h.q).mean(0).tolist(),
    "query_second_moment": lambda h: second_moment(later(h.q)),
    "rotated_query_mean": lambda h: h.q_rotated.mean(0).tolist(),
    "rotated_query_second_moment": lambda h: second_moment(h.q_rotated),
    "sink_resid_post_by_dimension": lambda h: h.resid_post[0].tolist(),
}
PROFILES_OF_FIXED_POSITIONS = ("score_shift_by_key", "score_shift_lead_by_key")
"""Those that a model that rotates queries and keys does not have."""


def share_of_lines(h: Head, n_columns: int, n_diagonals: int) -> float:
    """The share of the last queries' attention in the heaviest columns and diagonals."""
    pairs = [(q, k) for q in h.tail for k in range(q + 1)]
    columns, diagonals = [0.0] * h.T, [0.0] * h.T
    for q, k in pairs:
        columns[k] += h.A[q][k]
        diagonals[q - k] += h.A[q][k]

    def heaviest(masses: list[float], count: int, always: int) -> set[int]:
        size, first = (min(h.T, max(1, round(x * h.T / 30_000))) for x in (count, always))
        if size <= first:
            return {*range(first)}
        # Those that weigh the same as the last one that is chosen are chosen, too.
        least = sorted(masses[first:], reverse=True)[size - first - 1] * (1 - 1e-5)
        return {*range(first), *(k for k in range(first, h.T) if masses[k] >= least)}

    C, D = heaviest(columns, n_columns, 30), heaviest(diagonals, n_diagonals, 100)
    return sum(h.A[q][k] for q, k in pairs if k in C or q - k in D) / len(h.tail)


# Predictions


def half(run: Run) -> int:
    return (len(run.tokens) - 1) // 2


def position_cosine_mlp(run: Run) -> list[float]:
    weights, mlp = run.weights, run.weights.layers[0].mlp
    effective = run.effective_positions
    if weights.W_pos is None or effective is None or mlp is None:
        return [math.nan] * len(run.tokens)
    e = weights.W_E[run.tokens]
    x = e + weights.W_pos[: len(e)]
    changes = (x + mlp(x)) - (e + mlp(e))
    return [cosine(effective[i], changes[i]) for i in range(len(e))]


def position_cosine_layer(run: Run) -> list[float]:
    weights = run.weights
    effective = run.effective_positions
    if effective is None or weights.layers[0].mlp is None:
        return [math.nan] * len(run.tokens)
    without = ActivationChange("pos_embed", lambda value, place: value * 0)
    after = [
        forward(weights, run.tokens, changes, layers=1).layers[0].resid_post
        for changes in ([], [without])
    ]
    return [cosine(effective[i], after[0][i] - after[1][i]) for i in range(len(run.tokens))]


def first_mlp_out(run: Run) -> Array | None:
    """What the first MLP adds at position 0, if it and the effective positions are known."""
    if run.effective_positions is None or run.weights.layers[0].mlp is None:
        return None
    outputs: list[Array] = []

    def keep(value: Array, place: object) -> Array:
        outputs.append(value[0].copy())
        return value

    forward(run.weights, run.tokens, [ActivationChange("mlp_out", keep)], layers=1)
    return outputs[0]


def first_mlp_norm(run: Run) -> float:
    m = first_mlp_out(run)
    return math.nan if m is None else length(m)


def first_mlp_position_part(run: Run) -> float:
    m, EPE = first_mlp_out(run), run.effective_positions
    if m is None or EPE is None or length(EPE[0]) == 0:
        return math.nan
    return float(m @ EPE[0]) / length(EPE[0])


def final_divergence(run: Run) -> float:
    log_p = log_probabilities(run.untouched_logits)
    log_q = log_probabilities(run.logits[-1])
    return sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))


def agreement(run: Run, count: int) -> float:
    """The share of the most probable tokens that the intervention leaves among them."""
    chosen: list[set[int]] = []
    for logits in (run.untouched_logits, run.logits[-1]):
        p = np.exp(log_probabilities(logits)).tolist()
        chosen.append(set())
        for _ in range(count):
            token = first_largest(p)
            chosen[-1].add(token)
            p[token] = 0
    return len(chosen[0] & chosen[1]) / count


PREDICTION_DEFINITIONS: dict[str, Callable[[Run], float | list[float]]] = {
    "loss": lambda run: mean(token_losses(run)[1:]),
    "loss_early": lambda run: mean(token_losses(run)[1 : half(run) + 1]),
    "loss_late": lambda run: mean(token_losses(run)[half(run) + 1 :]),
    "losses": token_losses,
    "final_probabilities": lambda run: [
        math.exp(log_probabilities(run.logits[-1])[token]) for token in run.tokens
    ],
    "final_logits": lambda run: [float(run.logits[-1][token]) for token in run.tokens],
    "final_divergence": final_divergence,
    "final_top1_agreement": lambda run: agreement(run, 1),
    "final_top5_agreement": lambda run: agreement(run, 5),
    "position_cosine_mlp": position_cosine_mlp,
    "position_cosine_layer": position_cosine_layer,
    "first_mlp_norm": first_mlp_norm,
    "first_mlp_position_part": first_mlp_position_part,
}


# All of it


def heads_of(run: Run, labels: Sequence[str]) -> list[list[Head]]:
    """The heads of a run, by layer."""
    weights = run.weights
    heads: list[list[Head]] = []
    for number, (layer, seen) in enumerate(zip(weights.layers, run.layers, strict=True)):
        b_Q = np.zeros(layer.W_Q[:, 0].shape) if layer.b_Q is None else layer.b_Q
        b_K = np.zeros(layer.W_K[:, 0].shape) if layer.b_K is None else layer.b_K
        scores = np.where(np.isneginf(seen.scores), np.nan, seen.scores)
        by_head: dict[str, Array] = {
            **{
                name: getattr(seen, name) for name in ("q", "k", "q_rotated", "k_rotated", "v", "z")
            },
            "b_Q": b_Q,
            "b_K": weights.shared(b_K),
            "W_K": weights.shared(layer.W_K),
            "W_O": layer.W_O,
        }
        of_layer: dict[str, Any] = {
            "t": run.tokens, "labels": list(labels), "EPE": run.effective_positions,
            "resid_pre": seen.resid_pre, "resid_post": seen.resid_post,
            "s": layer.scale, "rotary": weights.rotary, "has_sink": layer.sink is not None,
            "window": min(len(run.tokens), layer.window or len(run.tokens)),
            "run": run, "layer": number,
        }  # fmt: skip
        heads.append(
            [
                Head(
                    A=seen.pattern[head].tolist(),
                    pattern=seen.pattern[head],
                    S=scores[head].tolist(),
                    **{name: values[head] for name, values in by_head.items()},
                    **of_layer,
                )
                for head in range(weights.n_heads)
            ]
        )
    return heads


def uniform(head: Head) -> Head:
    """The same head, if it attended to all keys that it sees alike."""
    rows = [
        [1 / min(q + 1, head.window) if head.sees(q, k) else 0.0 for k in range(head.T)]
        for q in range(head.T)
    ]
    return replace(head, A=rows, pattern=np.array(rows))


@dataclass(frozen=True)
class Reference:
    """What a model measures on some sequences under one intervention."""

    heads: Columns
    """`[sequence layer head]` by statistic."""
    uniform_baseline: Columns
    """`[sequence]` by statistic: what uniform attention would score."""
    profiles: Columns
    """`[sequence layer head entry]` by profile."""
    predictions: Columns
    """`[sequence]` or `[sequence pos]` by prediction."""


def recompute(
    weights: Weights,
    tokens: Array,
    intervention: str = "none",
    partner: Array | None = None,
    labels: Sequence[Sequence[str]] | None = None,
    uniform_baseline: Iterable[str] = (),
    variants: Mapping[str, Statistic] | None = None,
) -> Reference:
    """Everything, on tokens `[sequence pos]`.

    `uniform_baseline` names statistics that have a uniform baseline. `variants` are statistics with
    other options than their defaults.
    """
    sequences = tokens.tolist()
    partners = sequences if partner is None else partner.tolist()
    labels_of_all = labels or [[""] * len(row) for row in sequences]
    runs = [
        run_changed(weights, row, intervention, other, labels[i] if labels else ())
        for i, (row, other) in enumerate(zip(sequences, partners, strict=True))
    ]
    heads = [heads_of(run, marks) for run, marks in zip(runs, labels_of_all, strict=True)]
    statistics = {**STATISTIC_DEFINITIONS, **(variants or {})}
    flat = [[uniform(layer[0]) for layer in by_layer] for by_layer in heads]
    return Reference(
        {name: by_head(heads, define) for name, define in statistics.items()},
        {
            name: np.array([common_level(statistics[name], by_layer) for by_layer in flat])
            for name in uniform_baseline
        },
        {
            name: by_head(heads, define)
            for name, define in PROFILE_DEFINITIONS.items()
            if not (weights.rotary and name in PROFILES_OF_FIXED_POSITIONS)
        },
        {
            name: np.array([define(run) for run in runs])
            for name, define in PREDICTION_DEFINITIONS.items()
        },
    )


def common_level(define: Statistic, uniform_heads: list[Head]) -> float:
    """What a uniform head of each layer scores. NaN if layers see other keys, and score unlike."""
    levels = [float(define(head)) for head in uniform_heads]
    return levels[0] if np.allclose(levels, levels[0], rtol=1e-5) else math.nan


def by_head(heads: list[list[list[Head]]], define: Callable[[Head], object]) -> Array:
    """A definition of every head: `[sequence layer head …]`."""
    return np.array(
        [[[define(head) for head in layer] for layer in by_layer] for by_layer in heads]
    )


def definitions(path: Path, tokens: Array) -> Columns:
    """The statistics `[sequence layer head]` of an untouched model; no position is labelled."""
    weights = read_weights(path)
    marks = [""] * tokens.shape[1]
    heads = [heads_of(forward(weights, row), marks) for row in tokens.tolist()]
    return {name: by_head(heads, define) for name, define in STATISTIC_DEFINITIONS.items()}
