"""Answers in files, which appear whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headcount.queries.ask.answers import Answer
from headcount.queries.ask.formats import Format, write
from headcount.schemas.errors import QueryError


def write_file(
    answer: Answer,
    answer_format: Format,
    path: Path,
    limit: int | None = None,
    vertical: bool = False,
) -> None:
    """Write an answer to a file. An older file stays until the answer is whole.

    The metadata of a Parquet file says what its columns mean.
    """
    with appearing(path) as partial:
        if answer_format == "parquet":
            schema = pa.schema(
                column.with_metadata(dict(answer.facts.get(column.name, {})))
                for column in answer.schema
            )
            with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
                for batch in answer.batches():
                    # The cast changes no value. It adds the metadata.
                    writer.write_batch(batch.cast(schema))
            return
        # The lines end as the format says, and not as the system does.
        with partial.open("w", encoding="utf-8", newline="") as out:
            write(answer, answer_format, out, limit, vertical)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Another file to write to, which becomes `path` at the end. A device or a pipe is itself."""
    # A link stays a link: what it points at is replaced.
    target = Path(os.path.realpath(path))
    is_special = target.exists() and not target.is_file()
    # In the same folder, so that it can be renamed: another folder may be on another disk.
    partial = target if is_special else target.with_name(f".headcount-{os.getpid()}.part")
    try:
        yield partial
        if not is_special:
            partial.replace(target)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise QueryError(f"{path}: cannot be written ({reason})") from None
    finally:
        if not is_special:
            # It may fail for the reason that writing did, which the error above says already.
            with suppress(OSError):
                partial.unlink(missing_ok=True)
