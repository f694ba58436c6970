"""The model that made a run: its tokenizer says what tokens mean, and it runs one sequence again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ModelError

if TYPE_CHECKING:
    from schemas.places import Place
    from schemas.scan import Scan
    from workers.model.model_info import ModelInfo
    from workers.model.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class Look:
    """Where a query looks."""

    key: int
    """The key with most attention; -1 where it sees none."""
    mass: float
    first: float
    """Attention to key 0."""


class RunModel:
    """The model of the run in a directory; `model` says where it lies now, if it has moved."""

    def __init__(self, run: str | Place, model: str | None = None) -> None:
        from schemas.places import absolute
        from schemas.run_directory import RunDirectory

        self.run = RunDirectory(absolute(run))
        self.manifest = self.run.manifest()
        self.moved = model

    @property
    def _fields(self) -> dict[str, Any]:
        """The fields of the scan."""
        return {**self.manifest.identity["scan"], "sequences": self.manifest.sequences}

    @cached_property
    def info(self) -> ModelInfo:
        """What the model's files say; refused where they are not those that were measured."""
        from workers.model.model_info import describe, find_model

        name = self.moved or self._fields["model"]
        revision = None if self.moved else self._fields.get("revision")
        try:
            info = describe(find_model(name, revision))
        except ModelError as error:
            raise ModelError(f"{error}; --model PATH says where the model lies now") from None
        if info.sha256 != self.manifest.model["sha256"]:
            raise ModelError(
                f"{name}: has weights {info.sha256}, and run {self.run.run_id} was measured with "
                f"{self.manifest.model['sha256']}; --model PATH says where that model lies"
            )
        return info

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        from workers.model.text_tokenizer import TextTokenizer

        return TextTokenizer(Path(self.info.path), self.info.d_vocab)

    def text(self, tokens: list[int]) -> str:
        """The text of some tokens."""
        return self._tokenizer.text(tokens)

    def texts(self, tokens: list[int]) -> list[str]:
        """The text of each token."""
        return self._tokenizer.texts(tokens)

    def looks(
        self,
        sequence: int,
        tokens: list[int],
        layer: int,
        head: int,
        intervention: str,
        device: str,
    ) -> list[Look]:
        """Run a sequence of the run again; where each query of a head looks."""
        import numpy as np

        from schemas.intervention import parse_intervention
        from schemas.scan import parse_scan
        from workers.interventions import needs_partners
        from workers.process import prepare_process
        from workers.replica import Replica
        from workers.strongest_keys import strongest_keys

        edit = parse_intervention(intervention)
        changed = {"interventions": [intervention], "batch_size": 1, "precision": self._precision}
        scan = parse_scan(self._fields | changed)
        prepare_process()
        replica = Replica(self.info, scan, device)
        partner = self._partner(scan, sequence) if needs_partners((edit,)) else None
        found = strongest_keys(
            replica, np.array(tokens, np.int32), layer, head, edit, partner=partner
        )
        return [
            Look(int(key), float(mass), float(first))
            for key, mass, first in zip(found.key, found.mass, found.first, strict=True)
        ]

    @property
    def _precision(self) -> str:
        """The precision of the run's rows, as they were measured."""
        commit = self.run.oldest_commit(["methods"])
        measured = {method["precision"] for method in commit["methods"]} if commit else set[str]()
        return measured.pop() if len(measured) == 1 else self._fields["precision"]

    def _partner(self, scan: Scan, sequence: int) -> Any:
        """The partner of a sequence, drawn again."""
        from workers.inputs.sequences import Sequences

        shard = Sequences(scan, self.info, partners=True).shard(
            sequence // scan.sequences_per_shard
        )
        return None if shard.partner is None else shard.partner[sequence - shard.start]
