"""The manifest of a run: everything that made it, resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveInt, field_validator, model_validator

from schemas.kinds import KINDS
from schemas.scan import CHANGES_NO_ROW, RENAMED

Meanings = dict[str, dict[str, str]]
"""Fingerprint by name, by field of the manifest that describes the name."""


class _ScanFacts(BaseModel):
    """What whoever reads a run asks of its scan."""

    sequences_per_shard: PositiveInt
    n_ctx: PositiveInt
    interventions: list[str]


class Manifest(BaseModel):
    """Everything that made the run: `identity` never changes; a run grows in `shards` and
    `sequences`; the rest is for the record.
    """

    model_config = ConfigDict(frozen=True)
    run_id: str
    created: str
    identity: dict[str, Any]
    """What the rows mean, but for the code: the scan, the model and the corpus."""
    shards: int
    sequences: int
    batch_size: int | Literal["auto"] = "auto"
    """As it was last set; it changes no row."""
    kinds: dict[str, dict[str, dict[str, Any]]]
    """What each formula is, by field of the scan (`schemas.kinds.KINDS`) and name."""
    inputs: dict[str, dict[str, Any]] = {}
    interventions: dict[str, dict[str, Any]] = {}
    model: dict[str, Any]
    code: str
    """Fingerprint of the code that began the run."""
    other_codes: dict[str, Meanings] = {}
    """Other code that the run was gone on with, and what it says of every name."""
    versions: dict[str, str]
    older: bool = False
    """Whether it was written before identities left out the batch size and the number of sequences."""

    def stops(self, shards: Any) -> Any:
        """One past the last sequence of each of some shards, an array: the last one may be short."""
        size = self.identity["scan"]["sequences_per_shard"]
        return np.minimum((shards + 1) * size, self.sequences)

    @property
    def records(self) -> dict[str, dict[str, dict[str, Any]]]:
        """What every name means, by field, as the code that began the run says."""
        return {**self.kinds, "inputs": self.inputs, "interventions": self.interventions}

    def meanings(self, code: str) -> Meanings | None:
        """The fingerprints of every name in some code; none if that code has no part in the run.

        Commits of older code do not name their code: it counts as the one that began the run.
        """
        if code in ("", self.code):
            return fingerprints(self.records)
        return self.other_codes.get(code)

    @property
    def codes(self) -> list[str]:
        """The code that began the run, then all other code that it was gone on with."""
        return [self.code, *self.other_codes]

    @field_validator("identity")
    @classmethod
    def _has_a_scan(cls, identity: dict[str, Any]) -> dict[str, Any]:
        _ScanFacts.model_validate(identity.get("scan"))
        return identity

    @model_validator(mode="before")
    @classmethod
    def _in_words_of_today(cls, fields: Any) -> Any:
        return _translated(cast("dict[str, Any]", fields)) if isinstance(fields, dict) else fields


def _translated(fields: dict[str, Any]) -> dict[str, Any]:
    """A manifest of older code, whose identity held sizes and fingerprints, in today's words; any
    other as it is.
    """
    old = cast("dict[str, Any]", fields.get("identity") or {})
    if "batch_size" not in old.get("scan", {}):
        return fields
    scan = {RENAMED.get(name, name): value for name, value in old["scan"].items()}
    known = {key: old[key] for key in ("model", "corpus") if key in old}
    known["scan"] = {name: value for name, value in scan.items() if name not in CHANGES_NO_ROW}
    renamed = {RENAMED.get(name, name): value for name, value in fields.items()}
    kinds = {kind.field: renamed.get(kind.field, {}) for kind in KINDS}
    changed = {"identity": known, "kinds": kinds, "batch_size": scan["batch_size"]}
    return renamed | changed | {"older": True}


def fingerprints(records: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Meanings:
    """The fingerprints of what is described, by field and name."""
    return {
        field: {name: record.get("fingerprint", "") for name, record in described.items()}
        for field, described in records.items()
        if described
    }
