"""The record that makes a shard done, as JSON in a file of its own and as a row of a segment."""

from dataclasses import dataclass
from datetime import datetime
from typing import get_args, get_type_hints

import pyarrow as pa
from pydantic import BaseModel, ConfigDict


class DataFile(BaseModel):
    """A Parquet file with rows of a committed shard; its path is relative to the run directory."""

    model_config = ConfigDict(frozen=True)
    table: str
    intervention: str
    path: str
    rows: int  # rows of this shard
    bytes: int  # size of the file
    shards: int = 1  # number of shards with rows in it; more than one after `headcount compact`
    digest: str  # digest of the content (`schemas.files.digests`)


class Method(BaseModel):
    """How one intervention was measured."""

    model_config = ConfigDict(frozen=True)
    intervention: str
    engine: str  # fused or dense
    precision: str  # number formats of the products, one of `schemas.scans.scan.PRECISIONS`
    attention: str
    """How the engine computed attention. tiles or kernel: the fused engine, without a pattern.
    matrix: patterns were built.
    """
    built_layers: list[int]  # layers whose pattern was built because an intervention needs it


class Version(BaseModel):
    """A library that took part in measuring."""

    model_config = ConfigDict(frozen=True)
    library: str
    version: str


class Commit(BaseModel):
    """The record that makes a shard done."""

    model_config = ConfigDict(frozen=True)
    run_id: str
    shard: int
    start: int
    stop: int
    rows: int
    tokens: int
    seconds: float  # from the first forward pass to the last data file
    compute_seconds: float
    """Part of `seconds` that went into forward passes and reductions. While a replica writes one
    shard it already computes the next.
    """
    idle_seconds: float  # how long the replica waited for this shard without computing anything
    finished: datetime  # by the host's clock; only the speed in `status` reads it
    host: str
    replica: str  # identifies the replica among those of the run
    attempt: int
    code: str  # fingerprint of the code that measured the shard
    device: str  # device that computed it, for example `cuda NVIDIA H100`
    versions: list[Version]  # libraries that measured
    methods: list[Method]  # how each intervention was measured, in the order of the scan
    bad_rows: list[str]
    files: list[DataFile]


@dataclass(frozen=True)
class Failure:
    """An attempt at a shard that failed, and why."""

    shard: int
    error: str
    of_writing: bool = False  # whether it was measured, and the disk or store did not take it
    is_last: bool = True  # whether this command does not try the shard again


ARROW_TYPES = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    datetime: pa.timestamp("us", "UTC"),
}


def _arrow_type(annotation: object) -> pa.DataType:
    """The Arrow type of a field of `Commit`: a scalar, a record, or a list of either."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        hints = get_type_hints(annotation)
        return pa.struct([(name, _arrow_type(hints[name])) for name in annotation.model_fields])
    if annotation in ARROW_TYPES:
        return ARROW_TYPES[annotation]
    return pa.list_(_arrow_type(get_args(annotation)[0]))


COMMITS = pa.schema(list(_arrow_type(Commit)))  # columns of a segment
FILES = COMMITS.field("files").type.value_type  # what a segment says about each data file
