"""Sequences of a plan in actors of Ray, each with a model of its own.

The actors share the sequences like cards, so that the first few are of as many actors. Each knows
them all and keeps prompts and predictions of its own ones, which it makes again if it is started
again. Answers come back by sequence, so what is known is the same wherever it was measured.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import ray
import ray.exceptions
from ray import cloudpickle

from headcount.jobs.cluster.ray_cluster import (
    connect,
    lack_of_room,
    last_line,
    ray_in_words,
    room_of_replica,
)
from headcount.jobs.console import tell
from headcount.jobs.resources import Resources
from headcount.jobs.run.dispatch import LOOK_SECONDS, NO_REPLICA, STARTING_NOTICE
from headcount.jobs.run.ray_replicas import RESTART_PAUSE
from headcount.schemas.errors import RunError
from headcount.workers.cache_trial import CacheTrial, Half
from headcount.workers.head_gates import KVHead, Round
from headcount.workers.model.info.description import check_same_model
from headcount.workers.process import prepare_process
from headcount.workers.provenance.code_fingerprint import Code, check_code, read_code
from headcount.workers.replica import is_device_failure

DEATHS = 3  # how often an actor may die at one question: the question may be what kills it

T = TypeVar("T")

Question = Callable[[CacheTrial], T]


@ray.remote
class TrialActor:
    """A trial in an actor. It is made at the first question, so that an error is an answer."""

    def __init__(
        self, driver_code: Code, work_reference: bytes, resources: Resources, part: slice
    ) -> None:
        self.driver_code, self.work_reference = driver_code, work_reference
        self.resources, self.part = resources, part
        self.trial: CacheTrial | None = None

    def _begun(self) -> CacheTrial:
        """The trial of the driver's sequences, which measures a part of them."""
        # The model may be named relative to the driver's directory, if it is on this machine.
        if self.resources.directory is not None:
            os.chdir(self.resources.directory)
        check_code(self.driver_code)
        model, options, info, pieces = ray.get(cloudpickle.loads(self.work_reference))
        prepare_process(self.resources.cores if self.resources.device == "cpu" else None)
        trial = CacheTrial(model, [], **options)
        check_same_model(model, trial.info, info)
        trial.pieces, trial.part = pieces, self.part
        return trial

    def ready(self) -> None:
        """Ray calls no method of an actor that has no process."""

    def answer(self, question: Question[T]) -> tuple[T, int]:
        """What the trial says, and how many sequences went through the model for that."""
        passed: list[int] = []
        try:
            self.trial = self.trial or self._begun()
            self.trial.passed = passed.append
            return question(self.trial), sum(passed)
        except Exception as error:
            # The device is lost to this process. If it dies, Ray asks a new one.
            if is_device_failure(error):
                os._exit(1)
            raise


class TrialOnRay(CacheTrial):
    """A trial whose sequences actors measure, as long as it is `loaded`."""

    def __init__(
        self,
        resources: Resources,
        model: str,
        texts: Sequence[str],
        **options: Any,  # noqa: ANN401 (whatever a trial takes)
    ) -> None:
        """`options` are those of a trial."""
        super().__init__(model, texts, **options)
        self.resources, self.options = resources, options
        self.actors: list[Any] = []
        self._prompt = 0

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within it, there are actors that have loaded the model."""
        self.resources = connect(self.resources)
        with ray_in_words(f"cache-plan {self.model}"):
            work = (self.model, self.options | {"device": self.resources.device}, self.info)
            # This process keeps it, for actors that are started again.
            reference = ray.put((*work, self.pieces))
            reference_bytes = cloudpickle.dumps(  # pyright: ignore[reportPrivateImportUsage]
                reference
            )
            start_actor = TrialActor.options(
                **room_of_replica(self.resources),
                max_restarts=-1,
                max_task_retries=0,  # Of a machine that is gone Ray would use them up at once.
                scheduling_strategy="SPREAD",
            ).remote
            # More actors than sequences would have nothing to do.
            self.models = min(self.resources.replicas, len(self.pieces["chooses"].tokens))
            parts = [slice(number, None, self.models) for number in range(self.models)]
            common = (read_code(), reference_bytes, self.resources)
            self.actors = [start_actor(*common, part) for part in parts]
            try:
                for actor in self.actors:
                    self._wait_for(actor)
                # Models are loaded for that.
                self._prompt = self._answers_of_all(lambda trial: trial.prompt)[0]
                yield
            finally:
                # After Ray's end `ray.kill` would join another cluster of this machine.
                if ray.is_initialized():
                    for actor in self.actors:
                        ray.kill(actor)

    def own_windows(self) -> dict[int, int]:
        """The window that each layer has of itself, if it has one."""
        return self._answers_of({0: CacheTrial.own_windows})[0]

    @property
    def prompt(self) -> int:
        """How many tokens are read with the whole cache, before it is cut."""
        return self._prompt

    def answers(self, half: Half, intervention: str, rows: range) -> list[list[float | None]]:
        """The fields of `Measured` for some sequences."""

        def question(part: range) -> Question[list[list[float | None]]]:
            return lambda trial: trial.answers(half, intervention, part)

        parts = {number: self._part(rows, number) for number in range(self.models)}
        found = self._answers_of({number: question(part) for number, part in parts.items() if part})
        places = (divmod(row, self.models) for row in rows)
        return [found[number][place - parts[number].start] for place, number in places]

    def _part(self, rows: range, number: int) -> range:
        """Which of an actor's own sequences some sequences are."""
        start, stop = (-(-(row - number) // self.models) for row in (rows.start, rows.stop))
        return range(start, stop)

    def round_of_opening(
        self, sink: int, recent: int, needle_weight: float, opened: tuple[KVHead, ...]
    ) -> Round:
        """The round of `rounds` in which these heads are open."""
        found = self._answers_of_all(
            lambda trial: trial.round_of_opening(sink, recent, needle_weight, opened)
        )
        asked = self._asked("chooses").sum(1)  # [sequence]
        gains = np.zeros((len(asked), *found[0].gains.shape[1:]))
        known = 0.0
        for number, of_part in found.items():
            gains[number :: self.models] = of_part.gains
            known += of_part.recall * asked[number :: self.models].sum()
        loss = sum(of_part.loss for of_part in found.values())
        return Round(opened, known / int(asked.sum()), loss, gains)

    def _answers_of_all(self, question: Question[T]) -> dict[int, T]:
        return self._answers_of(dict.fromkeys(range(self.models), question))

    def _answers_of(self, questions: Mapping[int, Question[T]]) -> dict[int, T]:
        """What actors answer to their questions, by their numbers. Measuring changes nothing, so
        the successor of one that dies is asked the same.
        """
        answers, deaths = dict[int, T](), Counter[int]()
        numbers: dict[ray.ObjectRef[tuple[T, int]], int] = {}

        def ask(number: int) -> None:
            numbers[self.actors[number].answer.remote(questions[number])] = number

        for number in questions:
            ask(number)
        while numbers:
            (arrived,), _ = ray.wait([*numbers], num_returns=1)
            number = numbers.pop(arrived)
            try:
                answers[number], passes = ray.get(arrived)
                self.passed(passes)
            except ray.exceptions.RayTaskError as error:
                raise RunError(f"a replica cannot measure: {last_line(str(error))}") from None
            except ray.exceptions.RayActorError as error:
                deaths[number] += 1
                if deaths[number] == DEATHS:
                    raise RunError(
                        f"a replica died {DEATHS} times at the same sequences "
                        f"({last_line(str(error))}); is there enough memory for it?"
                    ) from None
                self._wait_for(self.actors[number])
                ask(number)
        return answers

    def _wait_for(self, actor: Any) -> None:  # noqa: ANN401 (Ray's handle)
        """Wait until Ray has started an actor, for the first time or again."""
        ready, told = actor.ready.remote(), time.monotonic()
        while True:
            try:
                return ray.get(ready, timeout=LOOK_SECONDS)
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.ActorUnavailableError:
                # Ray is starting it again, and says so at once.
                time.sleep(RESTART_PAUSE)
                ready = actor.ready.remote()
            if time.monotonic() > told + STARTING_NOTICE:
                tell(lack_of_room(self.resources) or NO_REPLICA)
                told = time.monotonic()
