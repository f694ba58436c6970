"""A run as it will be when a command continues it, and how it is begun or grows."""

from dataclasses import dataclass

from headcount.jobs.plan.begun_with import changed_versions
from headcount.schemas.errors import RunError, counted
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.schemas.places import write_whole
from headcount.schemas.plugin_files import queries_of
from headcount.schemas.scans.scan import Scan
from headcount.workers.model.model_info import ModelInfo


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A scan with every default resolved, and the run that it makes."""

    scan: Scan  # its `sequences` are those of the run, which may have more than were asked for
    info: ModelInfo
    run: RunDirectory
    manifest: Manifest  # as it will be when the run continues
    previous_manifest: Manifest | None  # as it lies there now; none if not begun
    code: str  # fingerprint of the code here, which may differ from the code that began the run
    requested_sequences: int  # how many sequences were asked for; the run may have more
    has_new_index: bool = False  # whether the corpus grew, was mended or moved: a new record of it

    @property
    def is_estimate(self) -> bool:
        """Whether nobody knows yet how many sequences there are."""
        return False

    @property
    def tokens(self) -> int:
        """Tokens that go through the model, over all interventions."""
        return self.manifest.sequences * self.scan.n_ctx * len(self.scan.interventions)

    @property
    def shards_done(self) -> int:
        """How many shards are committed with all of their sequences."""
        return int(holds_whole_shard(self.manifest, self.run.commit_log(["stop"])).sum())

    @property
    def share_left(self) -> float:
        """How much of the run is not committed, by shards."""
        return 1 - self.shards_done / self.manifest.shards

    @property
    def notes(self) -> list[str]:
        """What a user should know of the run before it continues."""
        notes = list(self.info.notes)
        has_bos = self.info.begins_with_bos(self.scan.bos)
        if self.info.bos.is_strong and has_bos != self.info.begins_with_bos("auto"):
            notes.append(self.info.bos_line(has_bos))
        if self.previous_manifest is None:
            return notes
        notes += changed_versions(self.previous_manifest)
        previous, total = self.previous_manifest.sequences, self.manifest.sequences
        if total > previous:
            about = "about " if self.is_estimate else ""
            notes.append(f"grows from {previous:,} to {about}{counted(total, 'sequence')}")
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

    def write_corpus(self) -> None:
        """Keep with the run what it reads of its corpus, if it has one."""


def prepare_run(plan: RunPlan, scan_text: str) -> None:
    """Create the run's directory with `scan_text`; the manifest comes last: it makes it a run."""
    if plan.run.manifest_file.is_file():
        return
    write_whole(plan.run.scan_file, scan_text.encode())
    for plugin in plan.scan.plugins:
        write_whole(plan.run.plugin_file(plugin.digest), plugin.content)
    _write(plan)


def check_unextended(plan: RunPlan) -> None:
    """Refuse a plan of a run that another process has extended since it was planned."""
    run = plan.run
    if run.manifest().sequences != (plan.previous_manifest or plan.manifest).sequences:
        raise RunError(
            f"{run.path}: another process has extended this run meanwhile; run the same command "
            "again"
        )


def extend(plan: RunPlan) -> None:
    """Write a run's manifest as the plan has it, if that is another one than before."""
    previous = plan.previous_manifest
    if previous is not None and (plan.manifest != previous or plan.has_new_index):
        _write(plan)


def _write(plan: RunPlan) -> None:
    """Write what a run keeps of its corpus if that is new, and last of all its manifest."""
    before = plan.previous_manifest
    is_new = before is None or plan.has_new_index or plan.manifest.sequences > before.sequences
    if is_new:
        plan.write_corpus()
    for query in queries_of(plan.scan.plugins).values():
        write_whole(plan.run.query_file(query.digest), query.content)
    write_whole(plan.run.manifest_file, plan.manifest.model_dump_json(indent=1).encode())
