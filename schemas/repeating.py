"""Something that is done again and again while something else lasts."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def repeated(action: Callable[[], None], seconds: float) -> Generator[None]:
    """Within it, an action is taken on a thread, so many seconds after the last time."""
    has_ended = threading.Event()

    def repeat() -> None:
        while not has_ended.wait(seconds):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
