"""Object stores on this machine, and runs in them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headcount.schemas import object_stores, places, reasons
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import StorePath, place, write_whole
from tests.s3.s3_server import S3Server
from tests.toys.toy_runs import local


@contextmanager
def object_store(patch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A store that `s3://` means in this process."""
    with S3Server() as server:
        for name, value in server.env().items():
            patch.setenv(name, value)
        object_stores._filesystem.cache_clear()
        yield server
    object_stores._filesystem.cache_clear()


def hurry(patch: pytest.MonkeyPatch, **waits: float) -> None:
    """Let this process wait less for a store than `schemas.object_stores` says, or repeat less."""
    for name, value in waits.items():
        for module in (object_stores, places, reasons):
            if hasattr(module, name):
                patch.setattr(module, name, value)


def copied_to_store(run: RunDirectory, out: str) -> StorePath:
    """The copy of a run in a directory of the store."""
    copy = place(out) / local(run.path).name
    assert isinstance(copy, StorePath)
    for file in local(run.path).rglob("*.*"):
        if file.is_file():
            write_whole(copy / file.relative_to(local(run.path)).as_posix(), file.read_bytes())
    return copy
