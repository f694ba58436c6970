"""Files that inputs read: the project's own, and the text that a synthetic family takes its
statistics from.
"""

import hashlib
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path

from headcount.schemas.errors import ScanError
from headcount.schemas.files.input_files import read_input
from headcount.schemas.packages import PACKAGE
from headcount.schemas.places import place
from headcount.schemas.reasons import reason
from headcount.workers.inputs.corpus.documents import Source, compression_of, flowing

BUNDLED_PREFIX = "bundled:"
BUNDLED_LICENSE = f"{BUNDLED_PREFIX}LICENSE"
"""The licence as running text. Its indents and line ends are a third of its tokens to GPT-2, and
nearly all of its first passage, so they are joined to single spaces.
"""
TABLES = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
"""Kind of a file of many texts by its ending, without .zst, .gz, .bz2 or .xz."""


def kind_of(path: str, kinds: dict[str, str]) -> str | None:
    """What is in a file, by its ending, which that of a compressed file may follow; None if no
    ending fits. Capital letters are the same.
    """
    is_compressed = compression_of(path) is not None
    name = (path.rpartition(".")[0] if is_compressed else path).lower()
    kind = next((kind for ending, kind in kinds.items() if name.endswith(ending)), None)
    # They compress their columns themselves, and cannot be entered inside a compressed file.
    return None if is_compressed and kind in ("parquet", "arrow") else kind


def located(path: str) -> str:
    """Where a file lies: `bundled:PATH` among the project's own files, other paths as they are."""
    if not path.startswith(BUNDLED_PREFIX):
        return path
    name = path.removeprefix(BUNDLED_PREFIX)
    if name != "LICENSE":
        return str(PACKAGE / name)
    file = PACKAGE.parent / name
    if not file.is_file():
        # A wheel puts the licence beside its metadata.
        installed = distribution("headcount").files or []
        return next(str(f.locate()) for f in installed if f.name == name)
    return str(file)


def check_bundled(key: str, path: str) -> None:
    """Refuse a bundled path that is neither LICENSE nor a file of the bundled models."""
    if not path.startswith(BUNDLED_PREFIX):
        return
    parts = Path(path.removeprefix(BUNDLED_PREFIX)).parts
    if parts == ("LICENSE",) or (parts[:1] == ("models",) and ".." not in parts):
        return
    raise ScanError(
        f"{key}: {path} is no file of headcount; expected {BUNDLED_LICENSE}, or one in "
        f"{BUNDLED_PREFIX}models/"
    )


@lru_cache(maxsize=4)
def read_text(path: str) -> str:
    """The content of a UTF-8 text file; that of `BUNDLED_LICENSE` as running text.

    A process reads it once, so that all its sequences come from the same content.
    """
    try:
        text = _content(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScanError(
            f"input.text: {path} is not UTF-8 (byte {error.start}); expected a UTF-8 text file"
        ) from None
    if not text:
        raise ScanError(f"input.text: {path} is empty; expected a UTF-8 text file")
    return flowing(text) if path == BUNDLED_LICENSE else text


def _content(path: str) -> bytes:
    try:
        return read_input(place(located(path)))
    except OSError as error:
        raise ScanError(
            f"input.text: {path} cannot be read ({reason(error)}); expected a UTF-8 text file"
        ) from None


def read_texts(path: str) -> list[str]:
    """The texts of a file: one for each document of a .jsonl, .parquet, .arrow or .csv file, which
    may be compressed; else the whole content.
    """
    kind = kind_of(path, TABLES)
    if kind is None:
        return [read_text(path)]
    documents = Source(kind, located(path), 0).documents()
    return [document.text for document in documents if document.problem is None]


def text_record(path: str) -> dict[str, str]:
    """The name and the fingerprint of a text file, without its place on this machine."""
    is_table = kind_of(path, TABLES) is not None
    content = _content(path) if is_table else read_text(path).encode()
    return {"name": Path(path).name, "sha256": hashlib.sha256(content).hexdigest()[:16]}
