"""The model that measured a run: it turns tokens into text, and runs one sequence again.

Imports wait until they are needed: every command loads this file, and a run is read without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headcount.schemas.errors import ModelError, QueryError

if TYPE_CHECKING:
    import numpy as np

    from headcount.schemas.places import Place
    from headcount.workers.engine.engine import Activations
    from headcount.workers.model.info.model_files import AdapterChoice
    from headcount.workers.model.info.text_tokenizer import TextTokenizer
    from headcount.workers.model.model_info import ModelInfo
    from headcount.workers.replica import Replica


@dataclass(frozen=True)
class Look:
    """The attention of one query."""

    key: int  # the key with most attention; -1 if the query sees no key
    mass: float  # attention to that key
    first: float  # attention to key 0


class RunModel:
    """The model of the run in a directory; `model` is its place if it has moved."""

    def __init__(self, run: str | Place, model: str | None = None) -> None:
        from headcount.schemas.files.run_directory import RunDirectory
        from headcount.schemas.places import absolute

        self.run = RunDirectory(absolute(run))
        self.manifest = self.run.manifest()
        self.new_place = model
        self.loaded: tuple[str, Replica] | None = None  # with its device

    @property
    def _scan_fields(self) -> dict[str, Any]:
        return {**self.manifest.identity["scan"], "sequences": self.manifest.sequences}

    @property
    def _adapter(self) -> AdapterChoice:
        return self._scan_fields.get("adapter", "refuse")

    @cached_property
    def _files(self) -> tuple[Path, dict[str, bytes]]:
        """The model's directory and the digests of its files, which must be those measured."""
        from headcount.workers.model.info.description import find_model
        from headcount.workers.model.info.model_files import file_digests, sha256_of

        name = self.new_place or self._scan_fields["model"]
        revision = None if self.new_place else self._scan_fields.get("revision")
        measured = self.manifest.model
        try:
            directory = find_model(name, revision)
            digests = file_digests(directory, measured["layout"], self._adapter)
        except OSError as error:
            raise ModelError(
                f"{error.filename}: cannot be read ({error.strerror}); --model PATH says where the "
                "model lies now"
            ) from None
        except ModelError as error:
            raise ModelError(f"{error}; --model PATH says where the model lies now") from None
        # Other weights under the same name would tell of another model.
        sha256 = sha256_of(digests)
        if sha256 != measured["sha256"]:
            raise ModelError(
                f"{name}: has weights {sha256}, and run {self.run.run_id} was measured with "
                f"{measured['sha256']}; --model PATH says where that model lies"
            )
        return directory, digests

    @cached_property
    def info(self) -> ModelInfo:
        """What the model's files say."""
        from headcount.workers.model.info.description import describe

        return describe(*self._files, self._adapter, self._tokenizer_path)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        from headcount.workers.model.info.text_tokenizer import TextTokenizer

        # What `info` says would be read by transformers, which takes seconds to import.
        directory, _ = self._files
        return TextTokenizer(self._tokenizer_path or directory, self.manifest.model["d_vocab"])

    @cached_property
    def _tokenizer_path(self) -> Path | None:
        from headcount.workers.model.info.description import find_tokenizer

        return find_tokenizer(self._scan_fields.get("tokenizer"))

    def text(self, tokens: list[int]) -> str:
        """The text of some tokens."""
        return self._tokenizer.text(tokens)

    def texts(self, tokens: list[int]) -> list[str]:
        """The text of each token."""
        return self._tokenizer.texts(tokens)

    def tokens_of(self, prompt: str) -> list[int]:
        """The tokens of a text that is none of the run's, behind BOS if its sequences have one."""
        tokens = self._tokenizer.encode(prompt)
        if not tokens:
            raise QueryError("the prompt has no tokens; expected a text")
        beyond = next((token for token in tokens if token in self._tokenizer.beyond), None)
        if beyond is not None:
            raise QueryError(
                f"the prompt has the token {self._tokenizer.beyond[beyond]!r} ({beyond}), which "
                f"the model does not have: it has {self.info.d_vocab:,}"
            )
        if self.info.begins_with_bos(self._scan_fields.get("bos", "auto")):
            assert self.info.bos_token_id is not None
            tokens = [self.info.bos_token_id, *tokens]
        if len(tokens) > self.info.n_ctx:
            raise QueryError(
                f"the prompt has {len(tokens):,} tokens; expected at most {self.info.n_ctx:,}, "
                "which the model reads"
            )
        return tokens

    def looks(
        self,
        sequence: int | None,
        tokens: list[int],
        layer: int,
        head: int,
        intervention: str,
        device: str,
    ) -> list[Look]:
        """Where each query of a head looks."""
        import numpy as np

        looks: list[Look] = []

        def read_row(_query: int, attention: np.ndarray) -> None:
            # Keys behind the window have no attention.
            key = int(np.nan_to_num(attention).argmax())
            mass = float(np.nan_to_num(attention[key]))
            # A change can leave a query no attention at all, and then the largest is any key's.
            looks.append(Look(key if mass > 0 else -1, mass, float(attention[0])))

        self.read_pattern(sequence, tokens, (layer, head), intervention, device, read_row)
        return looks

    def read_pattern(
        self,
        sequence: int | None,
        tokens: list[int],
        layer_and_head: tuple[int, int],
        intervention: str,
        device: str,
        read_row: Callable[[int, np.ndarray], None],
    ) -> None:
        """Run a sequence again, as no run stores a pattern, and read that of a head.

        `read_row` gets each query and its attention to all keys, `[key]`: 0 behind the query, NaN
        behind the window. The model stays loaded. `sequence` is None for tokens that are none of
        the run's.
        """
        import torch

        from headcount.schemas.scans.intervention import parse_intervention
        from headcount.workers.engine.changes import LABELS
        from headcount.workers.engine.engine import PassRequest
        from headcount.workers.engine.patching import with_partner
        from headcount.workers.inputs.sequences import Sequences
        from headcount.workers.interventions import bind

        change = parse_intervention(intervention)
        bound = bind(change)
        replica = self._replica(intervention, device)
        scan = replica.scan

        def as_batch(sequence: Sequence[int]) -> torch.Tensor:
            return torch.tensor(sequence)[None].to(replica.device)  # [1 pos]

        partner: np.ndarray | None = None
        labels: list[str] = []
        if bound.needs_partner or bound.needs_labels:
            if sequence is None:
                raise QueryError(
                    f"intervention {intervention} needs a sequence of the run: a prompt has no "
                    "partner and no labels"
                )
            # Partners are not stored. A sequence is drawn from its number alone: it is the same.
            sequences = Sequences(scan, self.info, partners=True)
            shard = sequences.shard(sequence // scan.sequences_per_shard)
            partner = None if shard.partner is None else shard.partner[sequence - shard.start]
            labels = [] if shard.labels is None else shard.labels[sequence - shard.start]
        layer, head = layer_and_head
        was_read = False

        def read_layer(shown_layer: int, activations: Activations) -> None:
            nonlocal was_read
            # The fused engine shows a layer twice.
            if shown_layer != layer or was_read:
                return
            was_read = True
            pattern = activations["pattern"].only([head])
            # A row at a time: the pattern of a long sequence does not fit the memory.
            for q in range(len(tokens)):
                read_row(q, pattern.row(q)[0, 0].double().cpu().numpy())

        with replica.engine_under(change, partner) as engine:
            changes = engine.changes
            if bound.needs_labels:
                names = {*labels} - {""}
                masks = {name: as_batch([one == name for one in labels]) for name in names}
                changes = changes.given({LABELS: masks})
            partner_batch = None if partner is None else as_batch(partner.tolist())
            patched_engine = with_partner(engine.changed(changes), partner_batch, depth=layer + 1)
            patched_engine.run(
                PassRequest(
                    tokens=as_batch(tokens), on_layer=read_layer, read_late=(), layers=[layer]
                )
            )

    def _replica(self, intervention: str, device: str) -> Replica:
        """The model as it measured the rows, but one sequence at a time; it is loaded once."""
        from headcount.schemas.filled_tables import FILLINGS
        from headcount.schemas.scans.scan_file import parse_scan
        from headcount.workers.process import prepare_process
        from headcount.workers.replica import Replica

        if self.loaded is None or self.loaded[0] != device:
            # The precision is read from a commit, because the scan may say `auto`.
            commit = self.run.any_commit()
            precisions = set() if commit is None else {one.precision for one in commit.methods}
            changes: dict[str, Any] = {"interventions": [intervention], "batch_size": 1}
            # Nothing is measured, and what was may be a plug-in's, which no reader runs.
            changes |= {filling.field: [] for filling in FILLINGS} | {"statistics": ["sink_mass"]}
            if len(precisions) == 1:
                changes["precision"] = precisions.pop()
            # Before torch computes anything: it sets threads and memory.
            prepare_process()
            scan = parse_scan(self._scan_fields | changes)
            self.loaded = device, Replica(self.info, scan, device)
        return self.loaded[1]


class RunModels:
    """The models of the runs at a place, by run. Each is opened once."""

    def __init__(self, place: str, model: str | None = None) -> None:
        self.place = place
        self.model = model
        self.opened_models: dict[str, RunModel] = {}

    def __getitem__(self, run_id: str) -> RunModel:
        from headcount.schemas.files.run_directory import find_runs
        from headcount.schemas.places import absolute

        if run_id not in self.opened_models:
            runs = find_runs(absolute(self.place))
            path = next((run.path for run in runs if run.run_id == run_id), None)
            if path is None:
                raise QueryError(
                    f"{self.place}: has no run {run_id!r}, of which the answer has rows"
                )
            self.opened_models[run_id] = RunModel(path, self.model)
        return self.opened_models[run_id]
