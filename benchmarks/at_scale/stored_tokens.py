"""How fast a token store is written and read: `python -m benchmarks.at_scale.stored_tokens`.

* What share of preparation is tokenising, and how near is it to the tokenizer alone?
* How many bytes does a token take?
* How long does a new process take to read one sequence from the middle of a piece?
* How fast is a piece read forward, and how much slower than a plain read of its file?

Reading is measured on a disk and on the S3 server of the tests, which is a process of this machine.
Seconds are those that this process uses a core, so other work on the machine does not count. With
the S3 server they are seconds on the clock.
"""

from __future__ import annotations

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
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from headcount.workers.inputs.store.portions import Portion, PortionReader, Position, portions_of
from headcount.workers.inputs.store.token_files import forget_open_files
from rich.console import Console

from benchmarks.measured_on import machine
from headcount.schemas.files.places import Place, place
from headcount.workers.inputs.corpus.documents import Document, Reading, Record, Source
from headcount.workers.inputs.store.preparation import PIECE_TOKENS, prepare_portion
from headcount.workers.inputs.store.token_store import (
    TOKENS,
    Piece,
    TokenStore,
    commit_piece,
    read_tokens,
)
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from tests.s3.s3_server import S3Server

SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "data"

SEQUENCE = 1024
"""Tokens of a sequence that is looked for."""

SHARD = 64 * SEQUENCE
"""Tokens that are read at once when a piece is read forward."""

ATTEMPTS = 5

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
        results["preparation"], tokens = measure_preparation(options.corpus, tokenizer, corpora)
        results["disk"] = measure_reading(corpora / "disk", tokenizer, tokens)
        with store_server():
            results["store"] = measure_reading(place("s3://bucket/corpora"), tokenizer, tokens)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    console = Console()
    for subject, figures in results.items():
        console.print(f"[bold]{subject}")
        for name, value in figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            console.print(f"  {name}: {shown}")


def measure_preparation(
    folder: Path, tokenizer: TextTokenizer, corpora: Path
) -> tuple[dict[str, float], np.ndarray]:
    """Seconds of each step of preparing the first .jsonl.zst file of a folder, and its tokens."""
    file = min(folder.glob("*.jsonl.zst"))
    [portion] = portions_of([Source("jsonl", str(file), file.stat().st_size)])
    reading = Reading()
    read_seconds, records = timed(lambda: list(PortionReader(portion, reading)))
    parse_seconds, documents = timed(lambda: parsed(portion, records, reading))
    hash_seconds, _ = timed(lambda: [document.content_hash for document in documents])
    texts = [document.text for document in documents]
    tokenizer_seconds: list[float] = []
    seconds: list[float] = []
    # In turn, so that both have the same share of quiet and busy moments.
    for attempt in range(ATTEMPTS):
        tokenizer_seconds.append(timed(lambda: in_batches(tokenizer, texts))[0])
        store = TokenStore.of(corpora / str(attempt), tokenizer, reading)
        seconds.append(timed(partial(prepare_portion, store, portion, tokenizer))[0])
    [piece] = store.pieces(portion)
    tokens = read_tokens(store, piece, 0, piece.tokens)
    figures = {
        "tokens": len(tokens),
        "tokens per second": len(tokens) / min(seconds),
        "share of the tokenizer alone": min(tokenizer_seconds) / min(seconds),
        "seconds": min(seconds),
        "seconds of the tokenizer alone": min(tokenizer_seconds),
        "seconds of reading and decompressing": read_seconds,
        "seconds of parsing": parse_seconds,
        "seconds of hashing": hash_seconds,
    }
    return figures, tokens


def parsed(portion: Portion, records: list[tuple[int, Record]], reading: Reading) -> list[Document]:
    """The documents of some records."""
    return [portion.sources[number].document_of(record, reading) for number, record in records]


def in_batches(tokenizer: TextTokenizer, texts: list[str]) -> None:
    """Tokenise texts in batches of 170, about a megabyte of this corpus, and drop the tokens."""
    for start in range(0, len(texts), 170):
        tokenizer.encode_many(texts[start : start + 170])


def measure_reading(
    corpora: Place, tokenizer: TextTokenizer, tokens: np.ndarray
) -> dict[str, float]:
    """How fast a piece of the largest size is written, found and read, at one place."""
    store = TokenStore.of(corpora, tokenizer, Reading())
    clock = time.process_time if isinstance(corpora, Path) else time.perf_counter
    portion = Portion(0, (), ())
    end = Position(1)
    piece = Piece(portion.key, Position(), end, True, 1, PIECE_TOKENS, 0)
    content = np.resize(tokens, PIECE_TOKENS).astype(store.token_type.to_pandas_dtype())
    documents = {
        "source": [0],
        "row": [0],
        "n_tokens": [PIECE_TOKENS],
        "content": [0],
        "pile_set_name": [None],
        "problem": [None],
    }

    write_seconds, _ = timed(
        lambda: commit_piece(store, portion, piece, [content], documents), clock
    )

    # The same file read by this store and as plain bytes; the difference is what the format costs.
    file = store.folder / portion.key / (piece.name + TOKENS)
    plain_seconds = min(timed(file.read_bytes, clock)[0] for _ in range(ATTEMPTS))
    forward_seconds = min(
        timed(lambda: read_forward(store, piece), clock)[0] for _ in range(ATTEMPTS)
    )
    listing_seconds = min(timed(lambda: store.pieces(portion), clock)[0] for _ in range(ATTEMPTS))

    # One sequence: in a new process, and in this one with nothing open.
    seeks = [cold_seek(store, piece, seed, clock.__name__) for seed in range(ATTEMPTS)]
    rng = np.random.default_rng(0)
    starts = rng.integers(0, PIECE_TOKENS - SEQUENCE, 100)
    forget_open_files()
    random_seconds, _ = timed(
        lambda: [read_tokens(store, piece, int(start), int(start) + SEQUENCE) for start in starts],
        clock,
    )

    return {
        "bytes per token": len(file.read_bytes()) / PIECE_TOKENS,
        "million tokens per second written": PIECE_TOKENS / write_seconds / 1e6,
        "million tokens per second read forward": PIECE_TOKENS / forward_seconds / 1e6,
        "times as long as a plain read of the file": forward_seconds / plain_seconds,
        "milliseconds for a sequence, cold process": min(seek for seek, _ in seeks) * 1e3,
        "milliseconds of imports before it": min(imports for _, imports in seeks) * 1e3,
        "milliseconds for a random sequence": random_seconds / len(starts) * 1e3,
        "milliseconds for listing the pieces": listing_seconds * 1e3,
    }


def read_forward(store: TokenStore, piece: Piece) -> None:
    """Read a piece shard by shard, nothing of it being open or decoded before."""
    forget_open_files()
    for start in range(0, piece.tokens, SHARD):
        read_tokens(store, piece, start, min(start + SHARD, piece.tokens))


COLD = """
import pickle, sys, time
clock = getattr(time, sys.argv[2])
begin = clock()
from headcount.workers.inputs.store.token_store import read_tokens
import pyarrow.fs
store, piece, start, stop = pickle.loads(bytes.fromhex(sys.argv[1]))
imported = clock()
tokens = read_tokens(store, piece, start, stop)
print(clock() - imported, imported - begin, len(tokens))
"""


def cold_seek(store: TokenStore, piece: Piece, seed: int, clock: str) -> tuple[float, float]:
    """Seconds in which a new process reads one sequence, and seconds of its imports before."""
    start = int(np.random.default_rng(seed).integers(0, piece.tokens - SEQUENCE))
    argument = pickle.dumps((store, piece, start, start + SEQUENCE)).hex()
    output = subprocess.run(
        [sys.executable, "-c", COLD, argument, clock],
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
