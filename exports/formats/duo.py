"""The format `duo`: which KV heads need the whole cache."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from headcount.exports.shared.certainty import LARGEST_Q, MARGIN
from headcount.exports.shared.confirmation import TOLERANCE
from headcount.exports.shared.registry import (
    REPEATED,
    CacheCut,
    Exported,
    Needs,
    Options,
    Part,
    Setting,
    dropped_by,
    export_format,
    ranked,
    sparsity_of,
)
from headcount.exports.shared.source import ExportSource, column_of
from headcount.schemas.errors import QueryError
from headcount.schemas.significance import p_above, q_of
from headcount.schemas.values import Count, Index


def needs_of_duo(score: str, sink: int, recent: int) -> Needs:
    """What the score is made of."""
    if score == "effect":
        return Needs(statistics=(f"effect_window({sink},{recent})",), calibrated=True)
    if score == "recall":
        return Needs(statistics=(MASS,), families=("text_needle", "needle"))
    distant_mass = f"distant_mass({sink},{recent})"
    if score == "distant":
        return Needs(statistics=(distant_mass,))
    return Needs(
        statistics=("duplicate_score", "induction_score", distant_mass),
        families=(REPEATED,),
        baseline=Needs(statistics=(distant_mass,), families=("uniform_random",)),
    )


NOTES = {
    "effect": "--score effect is about the loss of the text that was measured: what is asked for "
    "far away may be lost; --score recall keeps more of it, and --check shows it"
}
"""What a reader of a list by a score should know."""

MASS = "labelled_key_mass(gold,answer)"
"""Attention from the answer to where it stands, by which heads are ranked before any is opened."""

TIE_BREAK = 2e-6
"""How far scores at a border lie apart. DuoAttention adds up to 1e-6 to each, so as to break ties.
"""


def refusal_of_duo(setting: Setting, options: Options) -> str | None:
    """What options alone, or options and the length of sequences, rule out."""
    sink, recent = options["sink"], options["recent"]
    if options["sparsity"] is not None and options["threshold"] is not None:
        return "--sparsity and --threshold both choose heads; leave out one"
    if options["score"] == "retrieval":
        return _problem_of_block(setting, recent)
    return problem_of_window(setting.n_ctx, sink, recent)


def problem_of_window(n_ctx: int, sink: int, recent: int, flag: str = "--recent") -> str | None:
    """Why a head that keeps these keys loses none. None if it does."""
    if sink + recent < n_ctx:
        return None
    return (
        f"{flag} {recent}: with the first {sink} keys a head keeps all of {n_ctx} tokens; expected "
        "less, or longer sequences"
    )


def _problem_of_block(setting: Setting, recent: int) -> str | None:
    block = length_of_block(setting.n_ctx, setting.bos, setting.input_options)
    if recent < block:
        return None
    run = (
        "the run"
        if setting.directory is None
        else setting.directory.name.replace("run_id=", "run ")
    )
    return (
        f"--recent {recent}: {run} repeats a block of {block} tokens, which streaming heads would "
        f"see whole; expected less than {block}, or longer sequences"
    )


@export_format(
    "KV heads that need the whole cache (retrieval heads), and those that stream",
    read_by="DuoAttention (`load_attn_pattern`), kvpress (by a subclass of `DuoAttentionPress`)",
    source="https://github.com/mit-han-lab/duo-attention",
    writes="folder",
    example="patterns/my-model",
    load="""\
import json

import numpy as np

scores = np.loadtxt("patterns/my-model/full_attention_heads.tsv", delimiter="\\t", ndmin=2)
with open("patterns/my-model/config.json") as file:
    config = json.load(file)
print(scores.shape, config["sink_size"], config["recent_size"])  # [layer kv_head]
""",
    needs=needs_of_duo,
    refusal=refusal_of_duo,
    streamed_keys=lambda options, _: (options["sink"], options["recent"]),
    is_ranking=lambda options: options["sparsity"] is None and options["threshold"] is None,
    opens=lambda options: options["score"] == "recall",
    file_patterns=("full_attention_heads.tsv", "config.json"),
    least_documents=2,
)
def duo(
    source: ExportSource,
    *,
    score: Literal["retrieval", "recall", "distant", "effect"] = "retrieval",
    sink: Index = 4,
    recent: Count = 64,
    sparsity: Part | None = None,
    threshold: Part | None = None,
    group: Literal["max", "mean"] = "max",
) -> Exported:
    """A score from 0 (streams) to 1 (retrieves) for every KV head.

    `config.json` has `sink_size` and `recent_size`; `full_attention_heads.tsv` has a line for each
    layer and a column for each KV head. DuoAttention and kvpress are told a sparsity, and let the
    lowest scores stream. With --sparsity or --threshold, `headcount` in config.json also has the
    `retrieval_kv_heads`, the `threshold` that they reach, and the `sparsity` with which both
    readers choose just these.

    The score is the share of its attention that a head moves when something repeats, as a mean
    over the queries of the second copy. Two runs are compared: over a random block that is
    repeated, and over random tokens without a repeat. Most heads that need distant keys attend to
    the earlier copy of a token and to what follows it. Others rest on the first keys until
    something repeats, and then look at all keys. So the score is the larger of two numbers: the
    attention to copies and to what follows them, and the change of all attention beyond the first
    `sink` and the last `recent` keys. Attention to distant keys as such says less: a head that
    always spreads over all keys has most of it, and retrieves nothing. If all
    heads are within 0.05 of chance, there is no file; q of a KV head is the least of its query
    heads.

    * `score`: retrieval, as said above; or distant, which is all attention beyond the first `sink`
      and the last `recent` keys, on any input, with one run; or effect, which is the rise of the
      loss if the KV head streams, estimated by `effect_window` and calibrated, on any input, as a
      share of the largest; or recall, which is the order in which heads are opened: every cache is
      cut, and in nine rounds those get their whole cache back that lower the loss of a needle's
      answer most by it, to first order (the gradient of DuoAttention's gate where it is 0), on the
      first 16 sequences of a run of needles.
    * `sink`: first keys that a streaming head keeps. DuoAttention trained with 64.
    * `recent`: last keys that a streaming head keeps. DuoAttention trained with 256.
    * `sparsity`: share of KV heads that stream: those below this quantile of the scores, as
      DuoAttention takes it.
    * `threshold`: score from which a KV head retrieves.
    * `group`: how the query heads of a KV head are joined. By default the one that looks farthest
      decides, because all of them lose what the cache drops.
    """
    # A file of scores leaves the number of heads to its reader, and `--check` looks for it.
    is_ranking = sparsity is None and threshold is None

    def chosen_of(scores: np.ndarray, q: np.ndarray) -> list[tuple[int, int]]:
        heads = ranked(scores)
        if sparsity is not None:
            # Of equal scores at the border, the one of the earlier layer is kept, so that exactly
            # this share of the heads streams.
            return heads[: scores.size - dropped_by(sparsity, scores.size)]
        if threshold is not None:
            return [head for head in heads if scores[head] >= threshold]
        return [head for head in heads if q[head] <= LARGEST_Q]

    def heads_of(part: ExportSource) -> dict[tuple[int, int], float]:
        scores, q = kv_scores(part, score, sink, recent, group, margin=0)
        # A layer that does not attend has no q.
        return {head: float(np.nan_to_num(q[head], nan=1)) for head in chosen_of(scores, q)}

    # Random weights are surely above chance too, but hardly so.
    _, q = kv_scores(source, score, sink, recent, group, margin=MARGIN)
    if not (q <= LARGEST_Q).any():
        raise nothing_to_keep(source, score, sink, recent)
    scores, _ = kv_scores(source, score, sink, recent, group, margin=0)
    opening = source.opening or {}
    notes = [NOTES[score]] if score in NOTES else []
    if "ranking" in opening:
        scores = scores_of_ranking(scores.shape, opening["ranking"])
        notes += note_of_opening(opening, scores.size)
    # Which heads are opened is no mean over documents: there are no halves to compare.
    choice = None if "ranking" in opening else source.choice(heads_of)
    heads = ranked(scores)
    config: dict[str, object] = {"sink_size": sink, "recent_size": recent}
    facts: dict[str, Any] = {}
    if not is_ranking:
        heads = chosen_of(scores, q)
        if not 0 < len(heads) < scores.size:
            highest = tuple(ranked(scores)[0])
            raise QueryError(
                f"export duo: --threshold {threshold}: {len(heads)} of {scores.size} KV heads of "
                f"run {source.run_id} reach it, which is no choice; the highest is "
                f"L{highest[0]}KV{highest[1]} with {scores[highest]:.3g}, the lowest has "
                f"{scores.min():.3g}"
            )
        scores = parted(scores, heads)
        facts = facts_of_chosen(scores, heads)
        notes.append(
            f"{len(heads)} of {scores.size} KV heads retrieve: those with "
            f"{facts['threshold']:.6g} or more; tell DuoAttention or kvpress a sparsity of "
            f"{facts['sparsity']:g}"
        )
    items = {} if choice is None else choice.items
    by_chance = ", ".join("{}-{}".format(*head) for head, q in items.items() if q > LARGEST_Q)
    text = io.StringIO()
    # float32 has no more than nine digits.
    np.savetxt(text, scores, fmt="%.9g", delimiter="\t")
    if by_chance:
        notes.append(f"may be kept whole by chance (layer-KV head): {by_chance}")
    return Exported(
        stability=choice and choice.stability,
        files={
            "full_attention_heads.tsv": text.getvalue().encode(),
            "config.json": source.json_file(config, indent=1, choice=choice, facts=facts),
        },
        notes=tuple(notes),
        cut=CacheCut(heads=heads, sink=sink, recent=recent, is_ranking=is_ranking),
    )


def facts_of_chosen(scores: np.ndarray, heads: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What readers are told so that they choose just these heads."""
    kept = min(scores[head] for head in heads)
    return {
        "retrieval_kv_heads": sorted(heads),
        "threshold": float(f"{kept:.9g}"),
        "sparsity": sparsity_of(scores.size - len(heads), scores.size),
    }


def scores_of_ranking(shape: tuple[int, ...], ranking: Sequence[Sequence[int]]) -> np.ndarray:
    """Scores from 1 down, by which readers find the same order; 0 for a head that is not in it.

    >>> scores_of_ranking((2, 2), [(1, 0), (0, 1)]).tolist()
    [[0.0, 0.5], [1.0, 0.0]]
    """
    scores = np.zeros(shape)
    for rank, (layer, head) in enumerate(ranking):
        scores[layer, head] = 1 - rank / len(ranking)
    return scores


def note_of_opening(opening: Mapping[str, Any], count: int) -> list[str]:
    """How many of so many heads had to be opened until the needles were recalled, in a line."""
    recall = opening["whole_cache"]["recall"]
    for one in opening["rounds"]:
        kept = len(one["opened"])
        if kept and one["recall"] >= (1 - TOLERANCE) * recall:
            return [
                f"with {kept} of {count} KV heads whole the needles of the run are recalled as "
                f"with all ({recall:.2f}); --sparsity {sparsity_of(count - kept, count):g} chooses "
                "them; other needles may need more"
            ]
    return []


def parted(scores: np.ndarray, heads: Sequence[tuple[int, int]]) -> np.ndarray:
    """The same scores, but so far apart at the border of the chosen heads that readers find it.

    >>> parted(np.array([[0.5, 0.5], [0.25, 1]]), [(0, 0), (1, 1)]).tolist()
    [[0.500002, 0.5], [0.25, 1.0]]
    """
    is_chosen = np.zeros(scores.shape, bool)
    is_chosen[tuple(np.transpose(heads))] = True
    highest_other = min(float(scores[~is_chosen].max()), 1 - TIE_BREAK)
    lifted = np.maximum(scores, highest_other + TIE_BREAK)
    return np.where(is_chosen, lifted, np.minimum(scores, highest_other))


def kv_scores(
    source: ExportSource, score: str, sink: int, recent: int, group: str, margin: float
) -> tuple[np.ndarray, np.ndarray]:
    """The score of every KV head from 0 to 1, and q of its being above a margin: `[layer kv_head]`.

    A layer that does not attend scores 0: it has no cache that could be cut.
    """
    if score == "effect":
        # To first order, the effects of query heads add up.
        effects = source.effects(f"effect_window({sink},{recent})").grouped(source.group_size)
        scores = effects.means / max(np.nanmax(effects.means), 1e-30)
        q = q_of(p_above(effects.means, effects.errors, effects.degrees_of_freedom, 0))
    else:
        by_head, q_by_head = scores_by_head(source, score, sink, recent, margin)
        # The query heads that share keys are neighbours.
        groups = by_head.reshape(*source.kv_shape, source.group_size)
        scores = groups.max(-1) if group == "max" else groups.mean(-1)
        q = q_by_head.reshape(groups.shape).min(-1)
    return np.clip(np.nan_to_num(scores), 0, 1), q


def nothing_to_keep(source: ExportSource, score: str, sink: int, recent: int) -> QueryError:
    """That every KV head may stream."""
    if score == "distant":
        return source.nothing_found(f"distant_mass({sink},{recent})")
    if score == "recall":
        return source.nothing_found(MASS)
    if score == "retrieval":
        return source.nothing_found("duplicate_score", "induction_score")
    return QueryError(
        f"export duo: run {source.run_id}: no KV head whose streaming surely raises the loss (q <= "
        f"{LARGEST_Q}); expected more documents, a text with distant references, or smaller windows"
    )


def scores_by_head(
    source: ExportSource, score: str, sink: int, recent: int, margin: float
) -> tuple[np.ndarray, np.ndarray]:
    """How much each query head needs distant keys, and its q: `[layer head]`."""
    if score == "recall":
        to_gold = source.scores(MASS, margin=margin)
        return to_gold.means, to_gold.q
    distant_mass = f"distant_mass({sink},{recent})"
    distant = source.sums(column_of(distant_mass))
    if score == "distant":
        # Where every head looks as far as uniform attention does, none is told from another.
        source.check_differs_from_uniform(distant_mass)
        p = p_above(distant.means, distant.errors, distant.degrees_of_freedom, margin)
        return distant.means, q_of(p)
    block = block_length(source)
    # The copy and its successor are two keys, so their attention adds up.
    to_copies = source.scores("duplicate_score", "induction_score", margin=margin)
    assert source.baseline is not None
    without_repeat = source.baseline.sums(column_of(distant_mass))
    # The means are over all queries that see distant keys. In the first copy both inputs are alike,
    # so all of the change is in the queries after it, and is larger as a mean over these alone.
    n_ctx, bos = source.run["n_ctx"], source.run["bos"]
    queries = n_ctx - sink - recent
    after_first_copy = queries / min(queries, n_ctx - bos - block)
    change = np.abs(distant.means - without_repeat.means) * after_first_copy
    errors = np.hypot(distant.errors, without_repeat.errors) * after_first_copy
    degrees_of_freedom = min(distant.degrees_of_freedom, without_repeat.degrees_of_freedom)
    # Of a change in either direction, p is twice as large. Either of two tests may find a head, so
    # each p counts twice (Bonferroni).
    p = 2 * p_above(change, errors, degrees_of_freedom, margin)
    p = np.minimum(1, 2 * np.minimum(p, to_copies.p))
    # Without a repeat there are hardly any copies, so both numbers are attention that would lie
    # elsewhere. It may be the same attention, so they do not add up.
    return np.maximum(to_copies.means, change), q_of(p)


def block_length(source: ExportSource) -> int:
    """Tokens in the block that a sequence repeats."""
    return length_of_block(source.run["n_ctx"], source.run["bos"], source.input_options)


def length_of_block(n_ctx: int, bos: bool, input_options: Mapping[str, Any]) -> int:
    """The same of any sequence of the family `repeated_random`, with its default."""
    return input_options.get("period") or (n_ctx - bos + 1) // 2
