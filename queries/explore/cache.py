"""Answers that are kept, and questions that several wait for: each is computed once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

MOST_ANSWERS = 256
"""Answers that are kept."""

MOST_BYTES = 64 * 2**20
"""Bytes of all answers that are kept."""

Compute = Callable[[], Coroutine[Any, Any, bytes]]
"""Computes an answer."""


@dataclass
class _Pending:
    """A question that is being answered, and how many wait for it."""

    task: asyncio.Task[bytes]
    waiting: int = 0


class AnswerCache:
    """Answers by key. What is committed never changes, so a key that names it is enough."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._pending: dict[str, _Pending] = {}
        self._bytes = 0

    async def get(self, key: str, compute: Compute) -> bytes:
        """The answer, from the cache if it is there."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        pending = self._pending.get(key)
        if pending is None:
            pending = _Pending(asyncio.create_task(compute()))
            self._pending[key] = pending
        pending.waiting += 1
        try:
            answer = await asyncio.shield(pending.task)
        finally:
            pending.waiting -= 1
            if pending.waiting == 0:
                # Nobody waits any more: an unfinished question is stopped.
                pending.task.cancel()
                self._pending.pop(key, None)
        self._keep(key, answer)
        return answer

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()
        self._bytes = 0

    def _keep(self, key: str, answer: bytes) -> None:
        if key in self._answers or len(answer) > MOST_BYTES:
            return
        self._answers[key] = answer
        self._bytes += len(answer)
        while len(self._answers) > MOST_ANSWERS or self._bytes > MOST_BYTES:
            _, oldest = self._answers.popitem(last=False)
            self._bytes -= len(oldest)
