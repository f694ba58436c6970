"""What confirms a list: heads that are opened in rounds, and how a check and a plan are measured.

The list is written before, and says what it still awaits. Each step says how many passes it takes.
What is measured stays, so after an interrupt the same command goes on where it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from headcount.exports.shared.registry import CacheCut
from headcount.exports.shared.source import ExportSource
from headcount.queries.commands.opening import tell_user
from headcount.schemas.errors import QueryError

if TYPE_CHECKING:
    from headcount.workers.cache_trial import CacheTrial
    from headcount.workers.head_gates import Asked

TOLERANCE = 0.02
"""Share that a cut may cost of what whole heads are worth."""

SAVED_SECONDS = 10.0  # after so long, what a check has measured is written into the file


class Steps:
    """Says which of the steps of a command begins."""

    def __init__(self, total: int) -> None:
        self.total, self.begun = total, 0

    def begin(self, words: str) -> None:
        """Say what begins now, unless it is all that there is."""
        self.begun += 1
        if self.total > 1:
            tell_user(f"step {self.begun} of {self.total}: {words}")


def tell_passes(trial: CacheTrial, passes: int, words: str = "") -> None:
    """Load the model, and say how many passes there will be at most and how long they take."""
    from rich.console import Console

    from headcount.jobs.bars import waiting
    from headcount.jobs.plan.passes import seconds_of, words_of_passes

    with waiting(Console(stderr=True, highlight=False), "timing the first passes"):
        of_each = min(2, len(trial.pieces["chooses"].tokens) // trial.models)
        seconds = seconds_of(trial.run, of_each) / trial.models
    if not trial.reads_texts:
        tell_user(
            f"{trial.info.name}: has no tokenizer, so it reads random tokens: needles in blocks "
            "that are repeated"
        )
    tell_user(f"{words}at most {words_of_passes(passes, trial.n_ctx, seconds)}")


LEAST_RECALL = 0.5  # of the whole cache, below which nothing can be learnt of the heads

OPENED_SEQUENCES = 16  # first sequences of a run that heads are opened on


def opened(
    trial: CacheTrial,
    cut: CacheCut,
    source: ExportSource,
    known: Mapping[str, Any] | None,
    save: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """What the model recalls of a run's needles while KV heads are opened in rounds, those first
    that help most.

    What is `known` of the same is not measured again, and `save` takes what is known so far.
    """
    from rich.console import Console

    from headcount.jobs.bars import waiting
    from headcount.workers.head_gates import ROUNDS, HeadGates, Round
    from headcount.workers.provenance.code_fingerprint import code_fingerprint

    needles = needles_of(source)
    console = Console(stderr=True, highlight=False)
    with waiting(console, "loading the model"):
        gates = HeadGates(trial.replica.model, cut.sink, cut.recent)
    facts: dict[str, Any] = {"code": code_fingerprint(), "sequences": len(needles.tokens)}
    is_same = known is not None and all(known.get(name) == facts[name] for name in facts)
    facts = dict(known) if known is not None and is_same else facts
    before = [Round.read(one) for one in facts.get("rounds", [])]
    count, rounds = len(needles.tokens), list[Round]()
    # The whole cache, then none of it, then each round.
    passes = (2 + ROUNDS) * count
    with shown_and_kept("opening", "heads are opened: ", passes, lambda: save(facts)) as told:
        if "whole_cache" in facts:
            told(count)
        else:
            recall, loss = gates.whole(needles, told)
            facts["whole_cache"] = {"recall": recall, "loss": loss}
        recall = facts["whole_cache"]["recall"]
        if recall < LEAST_RECALL:
            raise QueryError(
                f"export {source.format.name}: with its whole cache the model recalls {recall:.2f} "
                f"of the needles of run {source.run_id}, expected {LEAST_RECALL} or more, so they "
                "say nothing of its heads; choose other needles (--set input.fact, "
                "input.question, input.values, or input.family=needle), or --score retrieval"
            )
        told(len(before) * count)
        for one in gates.rounds(needles, before, told):
            rounds.append(one.pooled)
            if len(rounds) > len(before):
                facts["rounds"] = [each.facts for each in rounds]
                save(facts)
    return facts | {"ranking": gates.ranking(rounds[-1])}


def needles_of(source: ExportSource) -> Asked:
    """The first sequences of a run of needles, and the tokens of their answers."""
    from headcount.workers.head_gates import Asked

    rows = source.database.rows(
        f"""
        SELECT tokens, labels
        FROM sequences
        WHERE {source.condition} AND sequence < {OPENED_SEQUENCES}
        ORDER BY sequence"""
    )
    tokens, labels = (np.array(column) for column in zip(*rows, strict=True))
    return Asked.of_answers(tokens, labels == "answer")


@contextlib.contextmanager
def shown_and_kept(
    name: str, words: str, passes: int, save: Callable[[], None]
) -> Iterator[Callable[[int], None]]:
    """Show how many of so many passes are done, and save what is known, now and then and whatever
    ends it. What it gives is told how many sequences have gone through the model.
    """
    from rich.console import Console

    from headcount.jobs.bars import bar

    done, saved = 0, time.monotonic()
    with bar(Console(stderr=True, highlight=False), name, words) as show:

        def passed(sequences: int) -> None:
            nonlocal done, saved
            done += sequences
            show(f"{done:,} of at most {passes:,} passes", min(1.0, done / passes))
            if time.monotonic() > saved + SAVED_SECONDS:
                save()
                saved = time.monotonic()

        try:
            yield passed
        except BaseException:
            save()
            raise
