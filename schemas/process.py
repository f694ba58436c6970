"""What holds for a whole process, whatever it does.

The command line imports this before it knows which command it runs, so nothing large is imported.
"""
# pyarrow has no types.
# pyright: basic

import gc
import sys
from collections.abc import Callable

OBJECTS_BETWEEN_COLLECTIONS = 20_000
"""How many more objects there must be before Python looks for garbage again; 700 by default."""

UNENDING: dict[object, Callable[[], object]] = {}
"""What may still compute when the process ends, each with what tidies up after it.

Python waits at its end for a thread that is inside a library, which cannot be stopped. A command
with such a thread ends at once instead (`jobs/endings.py`).
"""


def collect_garbage_rarely() -> None:
    """Have Python look for garbage less often.

    The libraries make a million objects that stay, and the collector would look through them
    dozens of times while they are imported: a quarter of the time that this takes. Objects without
    cycles, such as tensors, are freed at once in any case.
    """
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)


class _NoPandas:
    """Finds no pandas, for an import."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("not needed")


def leave_pandas_out() -> None:
    """Spare a process of ours pandas; call it before anything is read.

    Arrow's first array imports pandas if there is one, which takes up to two seconds. It looks
    once: after that it takes a Series for any sequence, so a user's process is left alone.
    """
    import pyarrow as pa

    no_pandas = _NoPandas()
    sys.meta_path.insert(0, no_pandas)  # pyright: ignore[reportArgumentType]
    pa.array([])
    sys.meta_path.remove(no_pandas)  # pyright: ignore[reportArgumentType]


def use_arrow_sparingly() -> None:
    """Make a process that only reads a commit log quick and small; call it before anything is read.

    Of a million commits Arrow's own allocator keeps 100 MB more than the system's.
    """
    import pyarrow as pa

    leave_pandas_out()
    pa.set_memory_pool(pa.system_memory_pool())
