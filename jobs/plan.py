"""From a scan to a run: everything resolved and checked before anything is paid for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from jobs.corpus_index import index_corpus
from jobs.run_identity import LIBRARIES, changed_identity, changed_meanings, changed_versions
from jobs.run_places import any_relative, places_of
from jobs.scan_runs import (
    UNKNOWN,
    ScanCommand,
    next_run,
    removal,
    runs_of,
    saying_the_way,
)
from schemas.errors import OtherRunError, RunError, ScanError, counted
from schemas.manifest import Manifest, Meanings, fingerprints
from schemas.places import Place, names, write_whole
from schemas.run_directory import RunDirectory, covered, differing_keys
from schemas.scan import Scan
from workers.inputs import INPUTS, find_input
from workers.inputs.corpus import Corpus
from workers.inputs.document_index import (
    FileState,
    Index,
    Watch,
    named_problems,
    same_files,
    unwatched,
)
from workers.inputs.documents import Source
from workers.inputs.sequence_reader import moved_sequence
from workers.inputs.sequences import Sequences
from workers.interventions import BoundIntervention, bind, needs_partners
from workers.model.model_info import ModelInfo, describe, find_model
from workers.provenance.code_fingerprint import code_fingerprint
from workers.provenance.providers import column_record

Records = dict[str, dict[str, Any]]
"""What is said of each name."""


@dataclass(frozen=True)
class Plan:
    """A scan whose every default is resolved and whose input is known."""

    scan: Scan
    """With as many sequences as the run has, or will have."""
    info: ModelInfo
    sequences: Sequences
    run: RunDirectory
    manifest: Manifest
    """As it will be when the run goes on."""
    before: Manifest | None
    """As it lies in the run's directory; none before the run was begun."""
    code: str
    """Fingerprint of the code here, which may not be the code that began the run."""
    requested: int
    """How many sequences were asked for; the run may have more."""
    way: str = ""
    """The command that starts another run of the same scan."""
    indexed_anew: bool = False
    """Whether the run's corpus has grown or was mended, so that it has another index."""

    @property
    def tokens(self) -> int:
        """Tokens that go through the model, over all interventions."""
        return len(self.sequences) * self.scan.n_ctx * len(self.scan.interventions)

    @property
    def rows(self) -> int:
        """Rows of the `heads` table."""
        heads = self.scan.measured_heads(self.info).count
        return len(self.sequences) * heads * len(self.scan.interventions)

    @property
    def other_code(self) -> bool:
        """Whether no shard of the run may be measured by the code here before somebody allows it."""
        return self.before is not None and self.code not in self.before.codes

    @property
    def done(self) -> int:
        """How many shards are committed with all of their sequences."""
        return int(covered(self.manifest, self.run.ledger(["stop"])).sum())

    @property
    def notes(self) -> list[str]:
        """What a user should know of the run before it goes on."""
        if self.before is None:
            return []
        notes = changed_versions(self.before)
        had, has = self.before.sequences, self.manifest.sequences
        if has > had:
            notes.append(f"extended from {had:,} to {counted(has, 'sequence')}")
        if self.requested < has:
            notes.append(
                f"{counted(self.requested, 'sequence')} asked for, and the run has {has:,}; "
                "they all stay, and nothing beyond those asked for is measured"
            )
        if self.code != self.before.code:
            notes.append(f"begun with code {self.before.code}, goes on with code {self.code}")
        return notes

    @property
    def bad_rows(self) -> list[str]:
        """The corpus's rows that cannot be read, with their problems."""
        index, corpus = self.sequences.index, self.sequences.corpus
        return [] if index is None or corpus is None else named_problems(index, corpus)


def check_scan(scan: Scan) -> list[BoundIntervention]:
    """The interventions of a scan; refuse what is wrong with it whatever its model and its corpus
    are.
    """
    interventions = [bind(intervention) for intervention in scan.interventions]
    family = find_input(scan.input.family)
    family.check(scan.input.options)
    for bound in interventions:
        if bound.needs_partner and family.partner is None:
            have = ", ".join(sorted(f.name for f in INPUTS.values() if f.partner))
            raise ScanError(
                f"interventions: '{bound.intervention}' takes something from the run on partner "
                f"sequences, and the family {family.name} has none; families with partners: {have}"
            )
    return interventions


def make_plan(
    scan: Scan,
    name: str,
    run_id: str | None = None,
    watch: Watch = unwatched,
    command: ScanCommand = UNKNOWN,
    new: bool = False,
) -> Plan:
    """Resolve a scan, and go on with the newest of its runs that measures the same; with `new`, or
    where there is none, with a run of its own. `run_id` names an existing run that it must fit.
    `watch` is told how far the tokenising of a corpus is.
    """
    resolved = resolve(scan)
    if run_id is not None:
        run = RunDirectory.of(scan.out, run_id)
    else:
        first = RunDirectory.of(scan.out, resolved.scan.run_id(name))
        run = find_run(resolved, first, command, new)
    return plan_run(resolved, run, old=run_id is not None, watch=watch, command=command)


def find_run(
    resolved: Resolved, first: RunDirectory, command: ScanCommand = UNKNOWN, new: bool = False
) -> RunDirectory:
    """The newest of a scan's runs that measured what is to be measured, and `first` where there is
    none; with `new`, one that is not there yet.
    """
    if new:
        return next_run(first)
    refusals: list[OtherRunError] = []
    for run in runs_of(first):
        try:
            check_same(run, run.manifest(), resolved)
            return run
        except OtherRunError as error:
            refusals.append(error)
    if refusals:
        raise RunError(f"{refusals[0]}; {command.way(first)}")
    return first


@dataclass(frozen=True)
class Resolved:
    """What a scan measures, wherever its run lies."""

    scan: Scan
    info: ModelInfo
    sequences: Sequences
    kinds: dict[str, Records]
    """What the formulas are, by field of the scan."""
    inputs: Records
    interventions: Records
    identity: dict[str, Any]
    """What the rows mean, but for the code."""

    @property
    def records(self) -> dict[str, Records]:
        """What every name means, by field, as the code here says."""
        return {**self.kinds, "inputs": self.inputs, "interventions": self.interventions}

    @property
    def meanings(self) -> Meanings:
        """The fingerprints of everything that the code here measures."""
        return fingerprints(self.records)


def resolve(scan: Scan) -> Resolved:
    """Find what a scan names; what is wrong is an error now."""
    interventions = check_scan(scan)
    info = describe(find_model(scan.model, scan.revision))
    scan = scan.for_model(info)
    for intervention in interventions:
        intervention.check(info, scan.n_ctx)
        intervention.check_measured(scan.depth(info))
    sequences = Sequences(scan, info, partners=needs_partners(scan.interventions))
    identity = {
        "scan": scan.record | {"input": {"family": scan.input.family, **sequences.options}},
        "model": info.identity,
        "corpus": sequences.record,
    }
    if sequences.reads_text:
        identity["tokenizer"] = sequences.tokenizer.fingerprint
    parts = [part.registered for intervention in interventions for part in intervention.parts]
    kinds = {
        kind.field: {formula.name: column_record(formula) for formula in scan.formulas(kind)}
        for kind in scan.kinds()
    }
    inputs = {sequences.family.name: sequences.family.record}
    edits = {registered.name: registered.record for registered in parts}
    return Resolved(scan, info, sequences, kinds, inputs, edits, identity)


def plan_run(
    resolved: Resolved,
    run: RunDirectory,
    old: bool = False,
    watch: Watch = unwatched,
    command: ScanCommand = UNKNOWN,
) -> Plan:
    """The plan of a run, which fits what lies in its directory; an `old` one has to lie there."""
    before = run.manifest() if run.manifest_file.is_file() else None
    if before is None:
        _check_absent(run, old, command)
    elif not command.words:
        command = ScanCommand.of_run(before)
    sequences = resolved.sequences
    indexed_anew = False
    with saying_the_way(run, command):
        if before is not None:
            check_same(run, before, resolved)
        if sequences.corpus is not None:
            indexed_anew = _find_documents(run, before, sequences, watch)
        elif before is None:
            sequences.shard(0)  # Impossible options show when the first sequences are drawn.
    requested = len(sequences)
    total = requested if before is None else max(requested, before.sequences)
    scan = resolved.scan
    if before is not None:
        scan = scan.model_copy(update={"sequences": total})
        sequences.scan = scan
    code = code_fingerprint()
    if before is None:
        manifest = Manifest(
            run_id=run.run_id,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            identity=resolved.identity,
            shards=sequences.shards,
            sequences=total,
            batch_size=scan.batch_size,
            model=resolved.info.record,
            code=code,
            versions={library: version(library) for library in LIBRARIES},
            kinds=resolved.kinds,
            inputs=resolved.inputs,
            interventions=resolved.interventions,
            begun_in=os.getcwd(),
            begun_with=command.words,
            places=places_of(scan),
            bad_rows=scan.bad_rows,
            bad_rows_in_a_row=scan.bad_rows_in_a_row,
        )
    else:
        manifest = _continued(before, resolved, sequences, code, indexed_anew)
    way = command.way(run)
    return Plan(
        scan, resolved.info, sequences, run, manifest, before, code, requested, way, indexed_anew
    )


def _check_absent(run: RunDirectory, old: bool, command: ScanCommand) -> None:
    """Refuse a run that should be there and is not, and to begin one among what is left of another."""
    if old:
        start = f"; {command.text()} starts one" if command.words else ""
        raise RunError(f"{run.path}: no such run to go on with{start}")
    if any(True for _ in names(run.commits_directory)):
        raise RunError(
            f"{run.path}: holds commits and no manifest.json, so nothing says what they measured; "
            f"{removal(run)} deletes it, and then the same command starts anew"
        )


def _continued(
    before: Manifest, resolved: Resolved, sequences: Sequences, code: str, indexed_anew: bool
) -> Manifest:
    """The manifest of a run that goes on: with more sequences, a mended corpus, another batch size or
    other code.
    """
    scan = sequences.scan
    changes: dict[str, Any] = {
        "batch_size": scan.batch_size,
        "bad_rows": scan.bad_rows,
        "bad_rows_in_a_row": scan.bad_rows_in_a_row,
    }
    if indexed_anew or len(sequences) > before.sequences:
        corpus = resolved.identity["corpus"]
        changes["identity"] = before.identity | {"corpus": json.loads(json.dumps(corpus))}
    if len(sequences) > before.sequences:
        changes |= {"sequences": len(sequences), "shards": sequences.shards}
    places = places_of(sequences.scan)
    moved = before.begun_in != os.getcwd() and any_relative(places)
    if moved or places != before.places:
        changes |= {"places": places, "begun_in": os.getcwd()}
    if code not in before.codes:
        changes["other_codes"] = before.other_codes | {code: resolved.meanings}
    return before.model_copy(update=changes)


def check_same(run: RunDirectory, before: Manifest, resolved: Resolved) -> None:
    """Refuse to go on with a run that measured something else, or that other code began in words
    that only it knows.
    """
    check_not_older(run, before)
    identity = json.loads(json.dumps(resolved.identity))
    changed = changed_identity(before, identity, resolved.records, resolved.info.record)
    meanings = before.meanings(code_fingerprint())
    if not changed and meanings is not None:
        changed = changed_meanings(meanings, resolved.meanings)
    if changed:
        raise OtherRunError(f"{run.path}: this run measured something else: {', '.join(changed)}")
    _check_text(run, before.identity.get("corpus") or {}, identity["corpus"])


def check_not_older(run: RunDirectory, manifest: Manifest) -> None:
    """Refuse to go on with a run whose identity meant something else when it was begun."""
    if manifest.older:
        raise OtherRunError(
            f"{run.path}: begun by an older headcount (code {manifest.code}), so it can be read "
            "and not gone on with"
        )


def _check_text(run: RunDirectory, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse another text than the one that a synthetic family took its statistics from."""
    differing = differing_keys({"corpus": before}, {"corpus": now})
    if "sources" not in now and differing:
        raise OtherRunError(
            f"{run.path}: the text is not the one that the run was begun with: "
            f"{', '.join(differing)}"
        )


def _find_documents(
    run: RunDirectory, before: Manifest | None, sequences: Sequences, watch: Watch
) -> bool:
    """Give the sequences of a corpus an index that reaches as far as they do: the run's, or a new
    one by which all that is committed is the same. Says whether a run has a new one.
    """
    if before is None:
        index_corpus(sequences, run.path.parent, watch)
        sequences.check_index()
        return False
    known = Index.read(_index_file(run))
    files = known.files or _files_of(before)
    sequences.use_index(known)
    corpus = sequences.corpus
    assert corpus is not None
    if known.content is None and corpus.packing == "concat" and (known.n_tokens == 0).any():
        raise OtherRunError(
            f"{run.path}: begun by an older headcount, which put an end of text behind documents "
            "without a token"
        )
    if same_files(files, corpus.sources) and sequences.indexed_enough(before.sequences):
        return False
    sequences.use_index(None)
    sequences.least_sequences = before.sequences
    index_corpus(sequences, run.path.parent, watch, known)
    sequences.check_index()
    was = sequences.reader_of(known, replace(corpus, sources=_sources_of(files, corpus)))
    moved = moved_sequence(was, sequences.reader, _committed(run, before))
    if moved is None and len(sequences.reader) < before.sequences:
        moved = f"it held {before.sequences:,} sequences and holds {len(sequences.reader):,}"
    if moved is not None:
        raise OtherRunError(f"{run.path}: the corpus has changed since the run was begun: {moved}")
    return True


def _files_of(before: Manifest) -> tuple[FileState, ...]:
    """The files that a run was begun with, where its index is too old to say."""
    sources = [Source(**source) for source in before.identity["corpus"]["sources"]]
    return tuple(FileState(source.file_name, source.bytes, 0) for source in sources)


def _sources_of(files: tuple[FileState, ...], corpus: Corpus) -> tuple[Source, ...]:
    """The sources that a run was begun with, those that are gone included."""
    sources = list(corpus.sources)
    found: list[Source] = []
    for file in files:
        same = next((source for source in sources if source.file_name == file.name), None)
        if same is not None:
            sources.remove(same)
        found.append(same or Source("jsonl", file.name, file.bytes))
    return tuple(found)


def _committed(run: RunDirectory, before: Manifest) -> Iterator[int]:
    """The sequences of a run that are measured."""
    ledger = run.ledger(["start", "stop"])
    ledger = ledger.filter(pa.array(covered(before, ledger)))
    for start, stop in zip(ledger["start"].to_pylist(), ledger["stop"].to_pylist(), strict=True):
        yield from range(start, stop)


def prepare_run(plan: Plan, scan_text: str) -> None:
    """Create the run's directory, if it is not there yet."""
    if plan.run.manifest_file.is_file():
        return
    write_whole(plan.run.scan_file, scan_text.encode())
    write_index(plan)
    write_manifest(plan)


def write_index(plan: Plan) -> None:
    """Keep with the run what its corpus's documents are, and what becomes of them."""
    if plan.sequences.index is not None and plan.sequences.fates is not None:
        write_whole(_index_file(plan.run), plan.sequences.index.to_parquet())
        fates = json.dumps(plan.sequences.fates.record, indent=1, ensure_ascii=False)
        write_whole(plan.run.fates_file, fates.encode())


def write_manifest(plan: Plan) -> None:
    """Write what made the run, all at once."""
    write_whole(plan.run.manifest_file, plan.manifest.model_dump_json(indent=1).encode())


def begun_precisions(run: RunDirectory) -> frozenset[str]:
    """The precision in which shards of a run were measured; none before there are shards.

    A replica checks its own against it (`workers.interventions.settlement.check_begun`). What
    `auto` means depends on the model, which only replicas load.
    """
    commit = run.oldest_commit(["methods"])
    return frozenset() if commit is None else frozenset(m["precision"] for m in commit["methods"])


def _index_file(run: RunDirectory) -> Place:
    return run.index / "documents.parquet"
