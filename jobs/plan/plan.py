"""From a scan to a run: which run it is, and how that run's manifest will read.

Everything is resolved and checked here, before anything is paid for. Planning changes nothing in a
run's directory: `prepare_run` creates a new run, `jobs.plan.extension` changes one that exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headcount.jobs.corpus.estimate import CorpusEstimate, estimate_corpus
from headcount.jobs.corpus.preparation import HERE, Preparation, corpora_of
from headcount.jobs.corpus.run_corpus import (
    RunCorpus,
    index_continued_run,
    index_new_run,
    write_corpus,
)
from headcount.jobs.plan.identity import (
    LIBRARIES,
    changed_versions,
    check_same_identity,
    installed_version,
)
from headcount.jobs.plan.model_places import PLACES, any_relative, placed_fields, places_of
from headcount.jobs.plan.resolved_scan import ResolvedScan, resolve
from headcount.jobs.plan.scan_runs import (
    UNKNOWN,
    ScanCommand,
    naming_the_alternative,
    next_run,
    removal,
    runs_of,
)
from headcount.jobs.upkeep import phases
from headcount.schemas.errors import OtherRunError, RunError, ScanError, counted
from headcount.schemas.files.manifest import LAYOUT, Manifest
from headcount.schemas.files.places import names, write_whole
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.schemas.scans.scan import CHANGES_NO_ROW, Scan, parse_scan
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.files.model_info import ModelInfo


@dataclass(frozen=True)
class Plan:
    """A scan with every default resolved, its input known, and the run that it makes."""

    scan: Scan
    """Its `sequences` are those of the run, which may have more than were asked for."""
    info: ModelInfo
    sequences: Sequences
    run: RunDirectory
    manifest: Manifest
    """As it will be when the run continues."""
    previous_manifest: Manifest | None
    """As it lies in the run's directory now; none if the run has not begun."""
    code: str
    """Fingerprint of the code here, which may differ from the code that began the run."""
    requested_sequences: int
    """How many sequences were asked for; the run may have more."""
    alternative: str = ""
    """A command that measures the scan in another run, and what it does, in words."""
    corpus: RunCorpus | None = None
    """What the run keeps of its corpus; none if it has none, or if it is only estimated."""
    has_new_index: bool = False
    """Whether the corpus grew, was mended or moved, so that the run keeps another record of it."""
    estimate: CorpusEstimate | None = None
    """What the corpus probably holds, if its tokens are not ready and only a cost is asked for.
    Then `sequences` are those of a sample.
    """

    @property
    def tokens(self) -> int:
        """Tokens that go through the model, over all interventions."""
        return self.manifest.sequences * self.scan.n_ctx * len(self.scan.interventions)

    @property
    def rows(self) -> int:
        """Rows of the `heads` table."""
        heads = self.scan.measured_heads(self.info).count
        return self.manifest.sequences * heads * len(self.scan.interventions)

    @property
    def needs_permission(self) -> bool:
        """Whether the code here has no part in the run yet, so that a user must allow it first."""
        return self.previous_manifest is not None and self.code not in self.previous_manifest.codes

    @property
    def shards_done(self) -> int:
        """How many shards are committed with all of their sequences."""
        return int(holds_whole_shard(self.manifest, self.run.commit_log(["stop"])).sum())

    @property
    def notes(self) -> list[str]:
        """What a user should know of the run before it continues."""
        if self.previous_manifest is None:
            return []
        notes = changed_versions(self.previous_manifest)
        previous, total = self.previous_manifest.sequences, self.manifest.sequences
        if total > previous:
            notes.append(f"extended from {previous:,} to {counted(total, 'sequence')}")
        if self.requested_sequences < total:
            notes.append(
                f"{counted(self.requested_sequences, 'sequence')} asked for, and the run has "
                f"{total:,}; they all stay, and nothing beyond those asked for is measured"
            )
        if self.code != self.previous_manifest.code:
            notes.append(
                f"begun with code {self.previous_manifest.code}, continues with code {self.code}"
            )
        return notes

    @property
    def bad_rows(self) -> list[str]:
        """The corpus's rows that cannot be read, with their problems."""
        findings = None if self.estimate else self.sequences.findings
        return [] if findings is None else list(findings.problems)


def make_plan(
    scan: Scan,
    name: str,
    run_id: str | None = None,
    preparation: Preparation = HERE,
    command: ScanCommand = UNKNOWN,
    new: bool = False,
) -> Plan:
    """Plan the newest run of a scan that measures the same, or a run of its own if there is none.

    With `new` it is always another run. `run_id` names an existing run, which the scan must fit.
    `preparation` makes the tokens of a corpus ready.
    """
    resolved = resolve(scan)
    if run_id is not None:
        run = RunDirectory.of(scan.out, run_id)
    else:
        first_run = RunDirectory.of(scan.out, resolved.scan.run_id(name))
        run = find_run(resolved, first_run, command, new)
    phases.about(run)
    must_exist = run_id is not None
    return plan_run(resolved, run, must_exist, preparation=preparation, command=command)


def find_run(
    resolved: ResolvedScan,
    first_run: RunDirectory,
    command: ScanCommand = UNKNOWN,
    new: bool = False,
) -> RunDirectory:
    """The newest of a scan's runs that measures the same; `first_run` if the scan has no runs.

    With `new`, a run that is not there yet. If no run fits, the error is about the newest.
    """
    if new:
        return next_run(first_run)
    # An older run may fit although the newest does not, if a mistaken change was undone.
    refusals: list[OtherRunError] = []
    for run in runs_of(first_run):
        try:
            check_same_identity(run, run.manifest(), resolved)
            return run
        except OtherRunError as error:
            refusals.append(error)
    if refusals:
        raise RunError(f"{refusals[0]}; {command.alternative(first_run)}")
    return first_run


def plan_run(
    resolved: ResolvedScan,
    run: RunDirectory,
    must_exist: bool = False,
    preparation: Preparation = HERE,
    command: ScanCommand = UNKNOWN,
) -> Plan:
    """Plan one run, which fits what lies in its directory already."""
    previous = run.manifest() if run.manifest_file.is_file() else None
    # Refused before tokens are prepared, which may take hours.
    command = _check_run(resolved, run, previous, must_exist, command)
    sequences = resolved.sequences
    corpora = corpora_of(resolved.scan)
    corpus, has_new_index = None, False
    with naming_the_alternative(run, command):
        if sequences.corpus is None:
            sequences.shard(0)  # Impossible options show when the first sequences are drawn.
        elif previous is None:
            corpus = index_new_run(sequences, corpora, preparation)
        else:
            corpus, has_new_index = index_continued_run(
                run, previous, sequences, corpora, preparation
            )

    # Of a corpus, this is known only now that it has an index.
    requested = len(sequences)
    if previous is None:
        manifest = _new_manifest(run, resolved, requested, command)
    else:
        # A run never shrinks: a scan that asks for fewer sequences measures only those.
        total = max(requested, previous.sequences)
        sequences.scan = resolved.scan.model_copy(update={"sequences": total})
        manifest = _continued_manifest(previous, resolved, total, has_new_index)
    return Plan(
        scan=resolved.scan if previous is None else sequences.scan,
        info=resolved.info,
        sequences=sequences,
        run=run,
        manifest=manifest,
        previous_manifest=previous,
        code=resolved.code,
        requested_sequences=requested,
        alternative=command.alternative(run),
        corpus=corpus,
        has_new_index=has_new_index,
    )


def estimated_plan(
    resolved: ResolvedScan, run: RunDirectory, command: ScanCommand = UNKNOWN
) -> Plan:
    """Plan one run to say what it will cost: of a corpus without tokens, only a portion is read.

    Such a plan is not for measuring. If the token store has all that the scan needs, it is exact.
    """
    sequences = resolved.sequences
    if sequences.corpus is None:
        return plan_run(resolved, run, command=command)
    previous = run.manifest() if run.manifest_file.is_file() else None
    if previous is not None:
        sequences.least_sequences = previous.sequences
    estimate = estimate_corpus(sequences, corpora_of(resolved.scan))
    if estimate is None:
        return plan_run(resolved, run, command=command)
    command = _check_run(resolved, run, previous, False, command)
    total = estimate.sequences
    if previous is None:
        manifest = _new_manifest(run, resolved, total, command)
    else:
        manifest = _continued_manifest(previous, resolved, max(total, previous.sequences), False)
    return Plan(
        scan=resolved.scan,
        info=resolved.info,
        sequences=estimate.sample,
        run=run,
        manifest=manifest,
        previous_manifest=previous,
        code=resolved.code,
        requested_sequences=total,
        alternative=command.alternative(run),
        estimate=estimate,
    )


def _check_run(
    resolved: ResolvedScan,
    run: RunDirectory,
    previous: Manifest | None,
    must_exist: bool,
    command: ScanCommand,
) -> ScanCommand:
    """Refuse a run that the scan does not fit; returns the command that errors advise."""
    if previous is not None:
        if not command.words:
            # Advice in errors then names the command that began the run.
            command = ScanCommand.of_run(previous)
        with naming_the_alternative(run, command):
            check_same_identity(run, previous, resolved)
        return command
    if must_exist:
        start = f"; {command.text()} starts one" if command.words else ""
        raise RunError(f"{run.path}: no such run to continue{start}")
    # `rm` deletes the manifest first. If it was killed then, commits are left, and a new run would
    # count their rows as its own.
    if any(True for _ in names(run.commits_directory)):
        raise RunError(
            f"{run.path}: holds commits and no manifest.json, so nothing says what they measured; "
            f"{removal(run)} deletes it, and then the same command starts anew"
        )
    return command


def _new_manifest(
    run: RunDirectory, resolved: ResolvedScan, total_sequences: int, command: ScanCommand
) -> Manifest:
    """The manifest of a run that begins here and now."""
    scan = resolved.scan
    return Manifest(
        layout=LAYOUT,
        run_id=run.run_id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        identity=resolved.identity,
        shards=-(-total_sequences // scan.sequences_per_shard),  # Rounded up.
        sequences=total_sequences,
        batch_size=scan.batch_size,
        model=resolved.info.record,
        code=resolved.code,
        versions={library: installed_version(library) for library in LIBRARIES},
        kinds=resolved.kinds,
        inputs=resolved.inputs,
        interventions=resolved.interventions,
        begun_in=os.getcwd(),
        begun_with=command.words,
        places=places_of(scan),
        bad_rows=scan.bad_rows,
        bad_rows_in_a_row=scan.bad_rows_in_a_row,
        corpora=scan.corpora,
    )


def _continued_manifest(
    previous: Manifest, resolved: ResolvedScan, total_sequences: int, has_new_index: bool
) -> Manifest:
    """The manifest of a run that continues.

    It may have more sequences, a mended corpus, another batch size, other places or other code.
    """
    scan = resolved.scan
    changes: dict[str, Any] = {
        "batch_size": scan.batch_size,
        "bad_rows": scan.bad_rows,
        "bad_rows_in_a_row": scan.bad_rows_in_a_row,
        "corpora": scan.corpora,
    }
    is_extended = total_sequences > previous.sequences
    if has_new_index or is_extended:
        # Through JSON, as a manifest that is read has it: otherwise a manifest would differ from
        # itself.
        corpus = json.loads(json.dumps(resolved.identity["corpus"]))
        changes["identity"] = previous.identity | {"corpus": corpus}
    if is_extended:
        shards = -(-total_sequences // scan.sequences_per_shard)
        changes |= {"sequences": total_sequences, "shards": shards}
    places = places_of(scan)
    # A relative name means another place in another directory, even if it reads the same.
    has_moved = previous.begun_in != os.getcwd() and any_relative(places)
    if has_moved or places != previous.places:
        changes |= {"places": places, "begun_in": os.getcwd()}
    # Whether it may is asked when something is measured (`jobs.run.loop`). From then on the run
    # knows what every name means in this code.
    if resolved.code not in previous.codes:
        changes["other_codes"] = previous.other_codes | {resolved.code: resolved.meanings}
    return previous.model_copy(update=changes)


def prepare_run(plan: Plan, scan_text: str) -> None:
    """Create the run's directory if it is not there yet; `scan_text` is kept in it.

    The manifest is written last: a directory without one is no run, and the same command begins it
    again.
    """
    if plan.run.manifest_file.is_file():
        return
    write_whole(plan.run.scan_file, scan_text.encode())
    if plan.corpus is not None:
        write_corpus(plan.run, plan.corpus, plan.sequences)
    write_manifest(plan)


def write_manifest(plan: Plan) -> None:
    """Write the run's manifest as the plan has it, all at once."""
    write_whole(plan.run.manifest_file, plan.manifest.model_dump_json(indent=1).encode())


REMEMBERED = tuple(field for field in CHANGES_NO_ROW if field != "out")
"""Fields that change no row; a manifest holds the values that were set last."""

SETTABLE = (*REMEMBERED, *PLACES)
"""Fields of a scan that may change when a run continues. More sequences extend it. A place may
change because what lies there is known by its content.
"""

SCAN_FILE = "SCAN"
"""Stands for the scan file in advice if nobody knows its name."""


def replan(
    run: RunDirectory,
    overrides: Sequence[str] = (),
    command: ScanCommand | None = None,
    preparation: Preparation = HERE,
) -> Plan:
    """Plan a run from its manifest alone; `overrides` may set what changes no row.

    Relative names are meant from the working directory: the caller moves there
    (`jobs.plan.model_places.where_begun`). `command` is the one that began the run. `preparation`
    makes the tokens of a corpus ready.
    """
    manifest = run.manifest()
    command = command or ScanCommand.of_run(manifest)
    if not command.words:
        command = ScanCommand((SCAN_FILE,))
    check_overrides(run, overrides, command)
    # Commits hold the run's id, so readers would pass over all commits of a renamed directory.
    if manifest.run_id != run.run_id:
        raise RunError(
            f"{run.path}: this is run {manifest.run_id}; call its directory "
            f"run_id={manifest.run_id} again"
        )
    if not isinstance(manifest.identity.get("scan"), dict):
        raise RunError(
            f"{run.manifest_file}: not a manifest (no scan in it); put the run's own file back, or "
            f"start anew: {removal(run)} deletes the run"
        )
    # An identity leaves these out, because they change no row.
    remembered = {field: getattr(manifest, field) for field in REMEMBERED}
    fields = placed_fields(run, manifest, remembered, overrides)
    # A manifest does not record where the run lies, because a run may be moved.
    scan = parse_scan(fields | {"out": str(run.path.parent)})
    return make_plan(scan, run.run_id, run.run_id, preparation, command)


def check_overrides(
    run: RunDirectory, overrides: Sequence[str], command: ScanCommand | None = None
) -> None:
    """Refuse to set anything that would change rows of a run; `command` began it."""
    command = command or ScanCommand((SCAN_FILE,))
    for override in overrides:
        field = override.partition("=")[0].strip()
        if field not in SETTABLE:
            raise ScanError(
                f"--set {override}: when {run.run_id} continues, only "
                f"{', '.join(SETTABLE[:-1])} or {SETTABLE[-1]} can change, because they change no "
                f"row of it; "
                f"{command.text('--set', override)} makes a run of its own"
            )
