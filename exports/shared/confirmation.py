"""What confirms a list: heads that are opened in rounds, and the check of a cut cache.

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
    from headcount.workers.head_check import HeadTrial
    from headcount.workers.head_gates import Asked

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


def checked(
    trial: HeadTrial,
    cut: CacheCut,
    begin: Callable[[str], None],
    save: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """What the model loses with a cache that is cut so: recall of needles, loss after repeats.

    If the number of heads is open, it is the smallest one with which nothing is lost. `save` takes
    what is known so far, now and then and at an interrupt.
    """
    from rich.console import Console

    from headcount.jobs.bars import waiting
    from headcount.jobs.plan.passes import seconds_of, words_of_passes
    from headcount.workers.head_check import JUDGED_SEED, SEARCHED_SEED, verdict

    passes = trial.passes(len(cut.heads) if cut.is_ranking else 0)
    console = Console(stderr=True, highlight=False)
    with waiting(console, "loading the model"):
        trial.run(1)
    with waiting(console, "timing the first passes"):
        seconds = seconds_of(trial.run, trial.batch)
    words = words_of_passes(passes, trial.n_ctx, seconds)
    tell_user(f"check: at most {words}; --check-sequences takes fewer than {trial.sequences}")
    facts = facts_of_trial(trial)
    with shown_and_kept(
        "check", "check: ", passes, lambda: save(facts_of_trial(trial))
    ) as trial.passed:
        begin("what the model can do with its whole cache")
        facts |= {"judged_by": list(trial.tasks), "left_out": trial.task_lines}
        if not trial.tasks:
            facts["verdict"] = ["the check says nothing of this model: it can do none of its tasks"]
            return facts | {"answers": trial.known}
        heads = cut.heads
        if cut.is_ranking:
            begin("how many heads lose nothing")
            # A number that was found on some sequences is judged on others.
            facts["heads_that_lose_nothing"] = kept = trial.fewest(heads, seed=SEARCHED_SEED)
            heads = heads[:kept]
        begin("the chosen heads against random ones, on other sequences")
        # A layer that does not attend has scores, but no cache.
        table = trial.table([head for head in heads if head in trial.kv_heads], seed=JUDGED_SEED)
    facts |= {"table": table.to_pylist(), "verdict": verdict(table, trial.tasks)}
    return facts | {"answers": trial.known}


LEAST_RECALL = 0.5  # of the whole cache, below which nothing can be learnt of the heads

OPENED_SEQUENCES = 16  # first sequences of a run that heads are opened on


def opened(
    trial: HeadTrial,
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
        gates = HeadGates(trial.replica.model, trial.sink, trial.recent)
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


STEPS_OF_A_CHECK = 2  # and one more if the number of heads is open


def facts_of_trial(trial: HeadTrial) -> dict[str, Any]:
    """What a check rests on. Only answers to the same questions can be used again."""
    from headcount.workers.provenance.code_fingerprint import code_fingerprint

    return {
        "sequences": trial.sequences,
        "n_ctx": trial.n_ctx,
        "code": code_fingerprint(),
        "answers": trial.known,
    }


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
