"""The manifest of a run: everything that made it, resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator

Meanings = dict[str, dict[str, str]]
"""Fingerprint by name, by field of the manifest that describes the name."""

DESCRIBED = (
    "statistics",
    "predictions",
    "profiles",
    "curves",
    "weight_statistics",
    "inputs",
    "interventions",
)
"""Fields of a manifest that say what names mean."""


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
    statistics: dict[str, dict[str, Any]]
    profiles: dict[str, dict[str, Any]] = {}
    curves: dict[str, dict[str, Any]] = {}
    weight_statistics: dict[str, dict[str, Any]] = {}
    predictions: dict[str, dict[str, Any]] = {}
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
        return {field: getattr(self, field) for field in DESCRIBED}

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

    @model_validator(mode="before")
    @classmethod
    def _of_older_code(cls, fields: Any) -> Any:
        """A manifest whose identity held the batch size and the number of sequences, in today's
        words.
        """
        if not isinstance(fields, dict):
            return fields
        old = cast("dict[str, Any]", fields)
        identity = old.get("identity")
        scan = identity.get("scan") if isinstance(identity, dict) else None
        if not isinstance(scan, dict) or "batch_size" not in scan:
            return old
        words = {"weights": "weight_processing", "outputs": "predictions"}
        scan = {words.get(name, name): value for name, value in scan.items()}
        sizes = {"sequences", "batch_size"}
        kept = {name: value for name, value in scan.items() if name not in sizes}
        identity = {"scan": kept} | {
            key: identity[key] for key in ("model", "corpus") if key in identity
        }
        renamed = {words.get(name, name): value for name, value in old.items()}
        return renamed | {"identity": identity, "batch_size": scan["batch_size"], "older": True}


def fingerprints(records: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Meanings:
    """The fingerprints of what is described, by field and name."""
    return {
        field: {name: record.get("fingerprint", "") for name, record in described.items()}
        for field, described in records.items()
        if described
    }
