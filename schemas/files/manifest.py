"""The manifest of a run: everything that made it, resolved."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveInt, field_validator

from headcount.schemas.tables import SAMPLE_ROWS

Records = dict[str, dict[str, dict[str, Any]]]
"""What each name means: a record by name, by the manifest's field that describes the name."""

Meanings = dict[str, dict[str, str]]  # fingerprint by name, by the field that describes it

Location = str | list[str]  # a place, or several of them, as a scan names them

LAYOUT: Final = 5  # of a run's files; a change that other code would misread has the next


class _ScanFacts(BaseModel):
    """The fields of a run's scan that readers of the run need."""

    sequences_per_shard: PositiveInt
    n_ctx: PositiveInt
    interventions: list[str]


class Manifest(BaseModel):
    """What made the run, resolved: `identity` never changes, `shards` and `sequences` may grow."""

    model_config = ConfigDict(frozen=True)
    layout: Literal[5]  # the layout of the run's files, `LAYOUT`
    run_id: str
    created: str
    identity: dict[str, Any]  # what rows mean, apart from code: scan, model and corpus
    shards: int
    sequences: int
    # The last settings of what does not change any row.
    batch_size: int | Literal["auto"] = "auto"
    bad_rows: float = 0.01
    bad_rows_in_a_row: int = 100
    corpora: str | None = None
    calibrates: str | None = None  # the run beside which it measures losses
    kinds: Records  # what each formula is, by field of the scan (`KINDS`) and name
    inputs: dict[str, dict[str, Any]] = {}
    interventions: dict[str, dict[str, Any]] = {}
    plugins: dict[str, str] = {}  # digests of the plug-ins, whose files the run keeps, by name
    queries: dict[str, str] = {}  # and of the named queries beside them
    model: dict[str, Any]
    code: str  # fingerprint of the code that began the run
    other_codes: dict[str, Meanings] = {}  # by fingerprint of code that continued the run
    versions: dict[str, str]
    begun_in: str = ""  # working directory that relative paths of the scan start from
    places: dict[str, Location] = {}  # where model and inputs lie now, by dotted field

    def stops(self, shards: int | np.ndarray) -> np.ndarray:
        """One past the last sequence of each shard; the last shard of a run may be short."""
        per_shard = self.identity["scan"]["sequences_per_shard"]
        return np.minimum((shards + 1) * per_shard, self.sequences)

    def scan_fields(self) -> dict[str, Any]:
        """The fields of its scan that have a value: TOML knows no other."""

        def with_values(fields: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in fields.items() if value is not None}

        scan = self.identity["scan"]
        return with_values(scan | {"input": with_values(scan["input"])})

    @property
    def sample_stride(self) -> int:
        """Of so many sequences, one is in `samples`.

        A power of two: what was merged before a run grew has every sequence that is wanted later.
        """
        rows = self.sequences * self.model.get("n_layers", 1) * self.model.get("n_heads", 1)
        return 1 << max(4, (rows // SAMPLE_ROWS).bit_length())

    @property
    def records(self) -> Records:
        """What every name means in the code that began the run."""
        return {**self.kinds, "inputs": self.inputs, "interventions": self.interventions}

    def meanings(self, code: str) -> Meanings | None:
        """The fingerprints of every name in some code; None if the run did not use that code."""
        # The code that began the run is described by the records, the others only by fingerprints.
        return fingerprints(self.records) if code == self.code else self.other_codes.get(code)

    @property
    def codes(self) -> list[str]:
        """The code that began the run, then all other code that continued it."""
        return [self.code, *self.other_codes]

    @field_validator("identity")
    @classmethod
    def _has_a_scan(cls, identity: dict[str, Any]) -> dict[str, Any]:
        # A manifest without these fields fails here, once, and not in whatever reads the run later.
        _ScanFacts.model_validate(identity.get("scan"))
        return identity


def fingerprints(records: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Meanings:
    """The fingerprints in some records, by field and name."""
    return {
        field: {name: record.get("fingerprint", "") for name, record in described.items()}
        for field, described in records.items()
        if described
    }
