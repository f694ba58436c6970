"""How fast a token store is written and read: `python -m benchmarks.at_scale.stored_tokens`.

* How near is preparation to the tokenizer alone?
* How many bytes does a token take?
* How long does a new process take to read one sequence from the middle of a portion?
* How fast is a portion read forward, and how long does a sequence of random documents take?

Reading is measured on a disk and on the S3 server of the tests, which is a process of this machine.
Seconds are those that this process uses a core, so other work on the machine does not count. With
the S3 server they are seconds on the clock.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from benchmarks.measured_on import machine
from headcount.schemas.places import Place, place
from headcount.workers.inputs.corpus.documents import Reading, Source
from headcount.workers.inputs.store.extents import extents_of
from headcount.workers.inputs.store.preparation import prepare_extent
from headcount.workers.inputs.store.token_store import (
    Portion,
    TokenStore,
    forget_open_files,
    open_portion,
    read_record,
)
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from tests.s3.s3_server import S3Server

SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "data"

SEQUENCE = 1024
"""Tokens of a sequence that is looked for."""

SHARD = 64 * SEQUENCE
"""Tokens that are read at once when a portion is read forward."""

COPIES = 5
"""How often the text of the corpus is written into the file whose portion is read: a whole one."""

ATTEMPTS = 3

Result = TypeVar("Result")


def main() -> None:
    """Measure, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=SHARED / "pile-mini")
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "gpt2-tokenizer")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    # One core, as a task on a cluster has.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    results: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        corpora = Path(folder)
        tokenizer = TextTokenizer(options.tokenizer, 50257)
        file = min(options.corpus.glob("*.jsonl.zst"))
        results["preparation"] = measure_preparation(file, tokenizer, corpora)
        # Frames of zstd one after the other are one file.
        large = corpora / "large.jsonl.zst"
        large.write_bytes(file.read_bytes() * COPIES)
        results["disk"] = measure_reading(corpora / "disk", tokenizer, large)
        with store_server():
            results["store"] = measure_reading(place("s3://bucket/corpora"), tokenizer, large)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    console = Console()
    for subject, figures in results.items():
        console.print(f"[bold]{subject}")
        for name, value in figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            console.print(f"  {name}: {shown}")


def prepared(corpora: Place, tokenizer: TextTokenizer, file: Path) -> tuple[TokenStore, Portion]:
    """The first portion of a file, in a store that does not have it yet."""
    store = TokenStore.of(corpora, tokenizer, Reading())
    (extent,) = extents_of([Source("jsonl", str(file), file.stat().st_size)])
    return store, next(prepare_extent(store, extent, tokenizer))


def measure_preparation(file: Path, tokenizer: TextTokenizer, corpora: Path) -> dict[str, float]:
    """Seconds of preparing a file, and of the tokenizer alone."""
    source = Source("jsonl", str(file), file.stat().st_size)
    texts = [document.text for document in source.documents(Reading())]
    alone: list[float] = []
    seconds: list[float] = []
    tokens = 0
    # In turn, so that both have the same share of quiet and busy moments.
    for attempt in range(ATTEMPTS):
        alone.append(timed(lambda: in_batches(tokenizer, texts))[0])
        began = time.process_time()
        store, portion = prepared(corpora / str(attempt), tokenizer, file)
        seconds.append(time.process_time() - began)
        tokens = read_record(store, portion).tokens
    return {
        "tokens": tokens,
        "tokens per second": tokens / min(seconds),
        "share of the tokenizer alone": min(alone) / min(seconds),
    }


def in_batches(tokenizer: TextTokenizer, texts: list[str]) -> None:
    """Tokenise texts in batches of 170, about a megabyte of this corpus, and drop the tokens."""
    for start in range(0, len(texts), 170):
        tokenizer.encode_many(texts[start : start + 170])


def measure_reading(corpora: Place, tokenizer: TextTokenizer, large: Path) -> dict[str, float]:
    """How fast a portion is found and read, at one place."""
    clock = time.process_time if isinstance(corpora, Path) else time.perf_counter
    store, portion = prepared(corpora, tokenizer, large)
    record = read_record(store, portion)
    file = store.folder / portion.file_name
    forward_seconds = min(
        timed(lambda: read_forward(store, portion, record.tokens), clock)[0]
        for _ in range(ATTEMPTS)
    )
    listing_seconds = min(timed(store.portions, clock)[0] for _ in range(ATTEMPTS))
    forget_open_files()
    document_seconds = timed(lambda: open_portion(store, portion).documents(), clock)[0]
    seeks = [cold_seek(store, portion, record.tokens, seed, clock) for seed in range(ATTEMPTS)]
    starts = np.random.default_rng(0).integers(0, record.tokens - SEQUENCE, 100).tolist()

    def read_anywhere() -> None:
        for start in starts:
            # Nothing is kept decoded, as if each were in another portion.
            open_portion(store, portion)._decoded.clear()
            open_portion(store, portion).tokens(start, start + SEQUENCE)

    return {
        "tokens": record.tokens,
        "bytes per token": len(file.read_bytes()) / record.tokens,
        "million tokens per second read forward": record.tokens / forward_seconds / 1e6,
        "milliseconds for the documents of a portion": document_seconds * 1e3,
        "milliseconds for a sequence, cold process": min(seek for seek, _ in seeks) * 1e3,
        "milliseconds of imports before it": min(imports for _, imports in seeks) * 1e3,
        "milliseconds for a random sequence": timed(read_anywhere, clock)[0] * 1e3 / len(starts),
        "milliseconds for listing the portions": listing_seconds * 1e3,
    }


def read_forward(store: TokenStore, portion: Portion, tokens: int) -> None:
    """Read a portion shard by shard, nothing of it being open or decoded before."""
    forget_open_files()
    for start in range(0, tokens, SHARD):
        open_portion(store, portion).tokens(start, min(start + SHARD, tokens))


COLD = """
import pickle, sys, time
clock = getattr(time, sys.argv[2])
begin = clock()
from headcount.workers.inputs.store.token_store import open_portion
import pyarrow.fs
store, portion, start, stop = pickle.loads(bytes.fromhex(sys.argv[1]))
imported = clock()
tokens = open_portion(store, portion).tokens(start, stop)
print(clock() - imported, imported - begin, len(tokens))
"""


def cold_seek(
    store: TokenStore, portion: Portion, tokens: int, seed: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds in which a new process reads one sequence, and seconds of its imports before."""
    start = int(np.random.default_rng(seed).integers(0, tokens - SEQUENCE))
    argument = pickle.dumps((store, portion, start, start + SEQUENCE)).hex()
    output = subprocess.run(
        [sys.executable, "-c", COLD, argument, clock.__name__],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    seek, imports, count = output.split()
    assert int(count) == SEQUENCE
    return float(seek), float(imports)


def timed(
    action: Callable[[], Result], clock: Callable[[], float] = time.process_time
) -> tuple[float, Result]:
    """Seconds of an action, and what it returns."""
    begin = clock()
    result = action()
    return clock() - begin, result


@contextmanager
def store_server() -> Iterator[None]:
    """An S3 server, in the environment of this process."""
    environment = dict(os.environ)
    with S3Server() as server:
        os.environ |= server.env()
        try:
            yield
        finally:
            os.environ.clear()
            os.environ |= environment


if __name__ == "__main__":
    main()
