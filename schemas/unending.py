"""What a process must not wait for when it ends: a library that computes on, and cannot be stopped.

Python waits at its end for a thread that is inside a library. A command with such a thread ends at
once instead (`jobs/endings.py`).
"""

from collections.abc import Callable

UNENDING: dict[object, Callable[[], object]] = {}
"""What may still compute, each with what tidies up after it when the process ends."""
