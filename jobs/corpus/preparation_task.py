"""What a Ray task does for a corpus: prepare a portion, or compare it with its texts.

A node that only tokenises needs neither the model nor torch: the driver sends the tokenizer, and
this module imports little.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import ray

from headcount.schemas.errors import HeadcountError, RunError
from headcount.schemas.files.places import reason
from headcount.workers.inputs.store.portions import Portion
from headcount.workers.inputs.store.preparation import (
    PreparationProgress,
    prepare_portion,
    use_one_core,
)
from headcount.workers.inputs.store.token_store import Piece, TokenStore
from headcount.workers.inputs.store.verification import verify_portion
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from headcount.workers.provenance.code_fingerprint import Code, code_fingerprint, learn_fingerprint

SECONDS_BETWEEN_NEWS = 1.0
"""Least time between two messages of a task to the driver."""


@dataclass(frozen=True)
class Node:
    """What the driver tells a node about itself."""

    code: Code
    """The driver's code."""
    directory: str | None
    """The driver's directory, from which names of files are meant, if it is on this machine."""

    def enter(self) -> None:
        """Work in the driver's directory; refuse other code, which may tokenise otherwise."""
        if self.directory is not None:
            os.chdir(self.directory)
        learn_fingerprint(self.code)
        local_code = code_fingerprint()
        if local_code != self.code.fingerprint:
            raise RunError(
                f"this node runs code {local_code}, the driver {self.code.fingerprint}; remove "
                "the copy of headcount that is installed there"
            )


@dataclass(frozen=True)
class PortionNews:
    """How far a portion is, or how its preparation ended."""

    progress: PreparationProgress | None = None
    pieces: tuple[Piece, ...] | None = None
    """All pieces of the portion. This is the last message of a task that succeeds."""
    error: HeadcountError | None = None
    """Why it cannot be prepared, on this node or any other. This is a last message, too."""


@ray.remote
def prepare_on_node(
    node: Node,
    store: TokenStore,
    portion: Portion,
    tokenizer: TextTokenizer,
    most_tokens: int | None,
) -> Iterator[PortionNews]:
    """Prepare a portion; yields how far it is about once a second, and then the end."""
    news: queue.SimpleQueue[PortionNews] = queue.SimpleQueue()
    last_news = 0.0

    def watch(progress: PreparationProgress) -> None:
        nonlocal last_news
        if time.monotonic() - last_news > SECONDS_BETWEEN_NEWS:
            last_news = time.monotonic()
            news.put(PortionNews(progress=progress))

    def prepare() -> None:
        try:
            node.enter()
            # The task asked Ray for one core, and other tasks have the others.
            use_one_core()
            # One store holds the tokens of one version.
            if tokenizer.library != store.library:
                raise RunError(
                    f"this node has {tokenizer.library}, and the driver {store.library}; install "
                    "the same version"
                )
            pieces = prepare_portion(store, portion, tokenizer, most_tokens, watch)
            news.put(PortionNews(pieces=tuple(pieces)))
        except HeadcountError as error:
            news.put(PortionNews(error=error))
        except Exception as error:
            # Without a last message the driver would wait for ever.
            line = f"{portion.sources[0].name}: cannot be prepared ({reason(error)})"
            news.put(PortionNews(error=RunError(line)))

    # A daemon: a task that is cancelled does not wait for its thread.
    threading.Thread(target=prepare, daemon=True).start()
    while True:
        latest = news.get()
        yield latest
        if latest.progress is None:
            return


@ray.remote
def verify_on_node(node: Node, store: TokenStore, portion: Portion) -> list[str]:
    """What differs between the pieces of a portion and its texts."""
    node.enter()
    return verify_portion(store, portion)
