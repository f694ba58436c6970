"""From a scan to a run: which run it is, and how that run's manifest will read.

Everything is resolved and checked here, before anything is paid for. Planning changes nothing in a
run's directory (`jobs.plan.run_plan` has what does).
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headcount.jobs import phases
from headcount.jobs.corpus.estimate import CorpusEstimate, estimate_corpus
from headcount.jobs.corpus.preparation import HERE, Preparation, corpora_of
from headcount.jobs.corpus.run_corpus import RunCorpus, index_run, write_corpus
from headcount.jobs.plan.begun_with import (
    LIBRARIES,
    check_code_of_run,
    installed_version,
)
from headcount.jobs.plan.identity import FILE_OPTIONS, check_same_identity, find_run, with_advice
from headcount.jobs.plan.resolved_scan import ResolvedScan, resolve
from headcount.jobs.plan.run_plan import RunPlan
from headcount.jobs.resources import Resources
from headcount.schemas.errors import OtherRunError, RunError, ScanError, printable
from headcount.schemas.files.manifest import LAYOUT, Location, Manifest
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.schemas.places import check_directory, names, place, read_as, unread
from headcount.schemas.plugin_files import queries_of
from headcount.schemas.plugins import Plugin
from headcount.schemas.scans.overrides import field_of, override_fields
from headcount.schemas.scans.scan import CHANGES_NO_ROW, Scan
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.inputs.corpus.text_files import BUNDLED_PREFIX
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.model_info import ModelInfo

REMEMBERED = tuple(field for field in CHANGES_NO_ROW if field != "out")
"""Fields that change no row; a manifest holds the values that were set last."""

PLACES = ("model", "tokenizer", *(f"input.{option}" for option in FILE_OPTIONS))
"""Fields of a scan that say where something lies. What lies there is known by its content."""

SHARD_OPERATIONS = 3e12
"""What a shard takes at most on a CPU, if the scan does not say: a minute at 50 GFLOP/s."""

LEAST_TOKENS = 512  # of a pass of such a shard

SETTABLE = (*REMEMBERED, *PLACES)  # what may change when a run continues


@dataclass(frozen=True, kw_only=True)
class Plan(RunPlan):
    """The same with its input known."""

    sequences: Sequences
    corpus: RunCorpus | None = None  # what the run keeps of it; none if only estimated
    estimate: CorpusEstimate | None = None
    """What the corpus probably holds, if its tokens are not ready and only a cost is asked for.
    Then `sequences` are those of a sample.
    """

    @property
    def is_estimate(self) -> bool:
        """Whether the corpus is only estimated."""
        return self.estimate is not None

    def write_corpus(self) -> None:
        """Keep with the run what it reads of its corpus, if it has one."""
        if self.corpus is not None:
            write_corpus(self.run, self.corpus, self.sequences)


def make_plan(
    scan: Scan,
    name: str,
    run_id: str | None = None,
    preparation: Preparation = HERE,
    new: bool = False,
    allow_other_code: bool = True,
) -> Plan:
    """Plan the newest run of a scan that measures the same, or with `new` one of its own.

    `allow_other_code` as in `plan_run`.
    """
    check_directories(scan)
    resolved = resolve(scan)
    run = RunDirectory.of(scan.out, resolved.run_id(name) if run_id is None else run_id)
    alike: tuple[RunDirectory, ...] = ()
    if run_id is None:
        run, alike = find_run(resolved, run, new)
    phases.about(run)
    if run_id is not None and not run.manifest_file.is_file():
        raise RunError(f"{run.path}: no such run to continue; without --run the scan starts one")
    return plan_run(resolved, run, preparation, alike=alike, allow_other_code=allow_other_code)


def check_directories(scan: Scan) -> None:
    """Refuse directories of runs and corpora that cannot be written to."""
    check_directory("out", scan.out)
    if scan.corpora is not None:
        check_directory("corpora", scan.corpora)


def plan_run(
    resolved: ResolvedScan,
    run: RunDirectory,
    preparation: Preparation = HERE,
    is_estimate: bool = False,
    alike: Sequence[RunDirectory] = (),
    allow_other_code: bool = True,
) -> Plan:
    """Plan one run, which fits what lies in its directory already, or one of those that are `alike`
    if it has the same corpus.

    Without `allow_other_code`, code that has no part in the run yet is refused as soon as it is
    known that something is to be measured: the loop would refuse it only after the tokens were
    prepared.

    An estimate is not for measuring: of a corpus whose tokens are not there, only a portion is
    read. If the token store has all that the scan needs, it is exact.
    """
    previous = run.manifest() if run.manifest_file.is_file() else None
    resolved = with_shards(resolved, previous, preparation.resources or Resources())
    scan, sequences, corpora = resolved.scan, resolved.sequences, corpora_of(resolved.scan)
    corpus, has_new_index, estimate = None, False, None
    # `rm` deletes the manifest first. If it was killed then, commits are left, and a new run would
    # count their rows as its own.
    if previous is None and any(True for _ in names(run.commits_directory)):
        raise RunError(
            f"{run.path}: holds commits and no manifest.json, so nothing says what they measured; "
            "bring back a copy, or headcount scan --new starts another run"
        )
    try:
        # Refused before tokens are prepared, which may take hours.
        if not is_estimate:
            run.refuse_links()
        if previous is not None:
            check_same_identity(run, previous, resolved)
            # The commit log may be long. It is read only for code that has no part in the run yet.
            is_refused_code = not allow_other_code and resolved.code not in previous.codes
            if is_refused_code and _lacks_shards(run, previous, scan):
                check_code_of_run(run, previous, resolved.code)
            # The index reaches as far as the run does, even if fewer sequences are asked for.
            sequences.least_sequences = previous.sequences
        if sequences.corpus is None:
            sequences.shard(0)  # Impossible options show when the first sequences are drawn.
        elif is_estimate and (estimate := estimate_corpus(sequences, corpora)) is not None:
            sequences = estimate.sample
        else:
            corpus, has_new_index = index_run(run, previous, sequences, corpora, preparation)
            same = next((other for other in alike if corpus.is_the_one_of(other)), None)
            if previous is None and same is not None:
                return plan_run(resolved, same, preparation, allow_other_code=allow_other_code)
    except OtherRunError as error:
        raise with_advice(run, error) from None

    # Of a corpus, this is known only now that it has an index.
    requested = len(sequences) if estimate is None else estimate.sequences
    # A run never shrinks: a scan that asks for fewer sequences measures only those.
    total = requested if previous is None else max(requested, previous.sequences)
    if previous is not None and estimate is None:
        sequences.scan = scan = scan.model_copy(update={"sequences": total})
    return Plan(
        scan=scan,
        info=resolved.info,
        sequences=sequences,
        run=run,
        manifest=_manifest(run, resolved, previous, total, has_new_index),
        previous_manifest=previous,
        code=resolved.code,
        requested_sequences=requested,
        corpus=corpus,
        has_new_index=has_new_index,
        estimate=estimate,
    )


def with_shards(
    resolved: ResolvedScan, previous: Manifest | None, resources: Resources
) -> ResolvedScan:
    """A scan with its `sequences_per_shard`: if it names none, those of its run, or, as that
    begins, what a CPU measures in about a minute.
    """
    scan, info, per_shard = resolved.scan, resolved.info, resolved.scan.sequences_per_shard
    if scan.names_shards:
        return resolved
    if previous is not None:
        per_shard = int(previous.identity["scan"]["sequences_per_shard"])
    elif resources.on_cpu:
        per_shard = min(per_shard, sequences_in_a_shard(scan, info, SHARD_OPERATIONS))
    shards = {"sequences_per_shard": per_shard}
    scan = resolved.sequences.scan = scan.model_copy(update=shards)
    identity = resolved.identity | {"scan": resolved.identity["scan"] | shards}
    return replace(resolved, scan=scan, identity=identity)


def sequences_in_a_shard(scan: Scan, info: ModelInfo, most_operations: float) -> int:
    """Sequences of a shard that takes no more than that, over all interventions; never so few that
    a pass has only a few tokens, each of which would take longer.
    """
    operations = operations_of_token(scan, info) * scan.n_ctx * len(scan.interventions)
    return max(1, LEAST_TOKENS // scan.n_ctx, int(most_operations / operations))


def operations_of_token(scan: Scan, info: ModelInfo) -> float:
    """What a token costs under one intervention, by the sizes of the model and of a sequence.

    It is measured nowhere: a run on another machine must have the same shards.
    """
    # Two for each weight, and a layer has about 12 d_model² weights. A query sees half of the keys.
    layer = 2 * 12 * info.d_model**2 + 2 * info.n_heads * info.d_head * scan.n_ctx
    operations = scan.depth(info) * layer
    if scan.kinds("after the pass") or scan.gradients:
        operations += 2 * info.d_model * info.d_vocab
    # The way back costs as much as two passes.
    return operations * (3 if scan.gradients else 1)


def _lacks_shards(run: RunDirectory, manifest: Manifest, scan: Scan) -> bool:
    """Whether a run lacks shards that a scan asks for, as far as that shows without its corpus."""
    sequences = manifest.sequences if scan.sequences == "all" else scan.sequences
    if sequences > manifest.sequences:
        return True
    commit_log = run.commit_log(["stop"])
    done_shards = commit_log["shard"].to_numpy()[holds_whole_shard(manifest, commit_log)]
    requested_shards = -(-sequences // scan.sequences_per_shard)  # Rounded up.
    return int((done_shards < requested_shards).sum()) < requested_shards


def _manifest(
    run: RunDirectory,
    resolved: ResolvedScan,
    previous: Manifest | None,
    total: int,
    has_new_index: bool,
) -> Manifest:
    """The manifest of a run that begins, or continues, here and now with `total` sequences."""
    scan = resolved.scan
    changes: dict[str, Any] = {field: getattr(scan, field) for field in REMEMBERED}
    changes |= {"sequences": total, "shards": -(-total // scan.sequences_per_shard)}  # Rounded up.
    places: dict[str, Any] = {"places": places_of(scan), "begun_in": os.getcwd()}
    queries = {name: query.digest for name, query in queries_of(scan.plugins).items()}
    if previous is None:
        return Manifest(
            layout=LAYOUT,
            run_id=run.run_id,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            identity=resolved.identity,
            model=resolved.info.record,
            code=resolved.code,
            versions={library: installed_version(library) for library in LIBRARIES},
            kinds=resolved.kinds,
            inputs=resolved.inputs,
            interventions=resolved.interventions,
            plugins={plugin.name: plugin.digest for plugin in scan.plugins},
            queries=queries,
            **changes,
            **places,
        )
    if has_new_index or total > previous.sequences:
        # Through JSON, as a manifest that is read has it: otherwise a manifest would differ from
        # itself.
        corpus = json.loads(json.dumps(resolved.identity["corpus"]))
        changes["identity"] = previous.identity | {"corpus": corpus}
    # A relative name means another place in another directory, even if it reads the same.
    paths = [_on_disk(name) for where in places_of(scan).values() for name in _names_in(where)]
    is_relative = any(path is not None and not path.is_absolute() for path in paths)
    if places["places"] != previous.places or (is_relative and os.getcwd() != previous.begun_in):
        changes |= places
    # Those that are new or say something else now. Whoever resumes the run brings none.
    if not queries.items() <= previous.queries.items():
        changes["queries"] = previous.queries | queries
    # Whether it may is asked when something is measured (`jobs.run.loop`). From then on the run
    # knows what every name means in this code.
    if resolved.code not in previous.codes:
        changes["other_codes"] = previous.other_codes | {resolved.code: resolved.meanings}
    return previous.model_copy(update=changes)


# A run continues from its directory alone. The names of its model and its files are meant from the
# directory where it was begun, so that `sequences.file` says them as it did.


def places_of(scan: Scan) -> dict[str, Location]:
    """The places that a scan names, by field: a model's directory, and files."""
    places: dict[str, Location] = {}
    for field, name in (("model", scan.model), ("tokenizer", scan.tokenizer)):
        # Another name may be one of the Hub.
        if name is not None and (path := _on_disk(name)) is not None and path.exists():
            places[field] = name
    options = scan.input.options
    return places | {f"input.{o}": options[o] for o in FILE_OPTIONS if options.get(o) is not None}


def _names_in(location: Location) -> Sequence[str]:
    """The names in a place: `input.files` may be one pattern or a list of them."""
    return [location] if isinstance(location, str) else location


def _on_disk(name: str) -> Path | None:
    """The path of a name that can only mean something on this machine's disk."""
    where = None if name.startswith(BUNDLED_PREFIX) else place(name)
    return where if isinstance(where, Path) else None


@contextmanager
def where_begun(run: RunDirectory, overrides: Sequence[str]) -> Iterator[list[str]]:
    """Work where a run's names are meant from, if it is there; yields overrides made absolute."""
    absolute_overrides = list(map(_absolute_override, overrides))
    begun_in = run.manifest().begun_in
    with chdir(begun_in if os.path.isdir(begun_in) else os.getcwd()):
        yield absolute_overrides


def _absolute_override(override: str) -> str:
    """An override with absolute names, so that it means the same in another directory."""
    field = field_of(override)
    if field not in PLACES:
        return override
    # The value is parsed as in a scan file, then followed along the dots of the field.
    value: Any = override_fields({}, [override])
    for key in field.split("."):
        value = value[key]
    places: list[Any] = []
    for name in value if isinstance(value, list) else [value]:
        path = _on_disk(name) if isinstance(name, str) else None
        # A model that is not here may be one of the Hub.
        is_place = path is not None and (field not in ("model", "tokenizer") or path.exists())
        places.append(os.path.abspath(path) if path is not None and is_place else name)
    return f"{field}={json.dumps(places if isinstance(value, list) else places[0])}"


def replan(
    run: RunDirectory,
    overrides: Sequence[str] = (),
    preparation: Preparation = HERE,
    allow_other_code: bool = True,
    trust_plugins: bool = False,
) -> Plan:
    """Plan a run from its manifest, in `where_begun`; `overrides` may set what changes no row.

    `allow_other_code` as in `plan_run`, `trust_plugins` as in `plugins_of`.
    """
    manifest = run.manifest()
    check_overrides(run, overrides)
    # Commits hold the run's id, so readers would pass over all commits of a renamed directory.
    if manifest.run_id != run.run_id:
        raise RunError(
            f"{run.path}: this is run {manifest.run_id}; call its directory "
            f"run_id={manifest.run_id} again"
        )
    _check_places(run, manifest, overrides)
    scan_begun = manifest.identity["scan"]
    places = [f"{field}={json.dumps(value)}" for field, value in manifest.places.items()]
    # An identity leaves these out, because they change no row.
    remembered = {field: getattr(manifest, field) for field in REMEMBERED}
    fields = override_fields(override_fields(scan_begun, places) | remembered, overrides)
    if fields["model"] != scan_begun["model"]:
        # A revision belongs to a model of the Hub. Fingerprints say whether this is the same model.
        fields["revision"] = None
    # A manifest does not record where the run lies, because a run may be moved.
    plugins = plugins_of(run, manifest, trust_plugins)
    scan = parse_scan(fields | {"out": str(run.path.parent), "plugins": plugins})
    check_directories(scan)
    return plan_run(resolve(scan), run, preparation, allow_other_code=allow_other_code)


def plugins_of(run: RunDirectory, manifest: Manifest, trust_plugins: bool) -> list[Plugin]:
    """The plug-ins that a run keeps. They are code, and run as the user: so they must have run here
    before, or be trusted.
    """
    if not manifest.plugins:
        return []
    from headcount.workers.plugin_proof import has_run_here

    plugins: list[Plugin] = []
    for name, digest in manifest.plugins.items():
        file = run.plugin_file(digest)
        try:
            plugin = Plugin(str(file), name, read_as(file, bytes))
        except OSError as error:
            raise unread(file, error) from None
        if plugin.digest != digest:
            raise RunError(
                f"{file}: is not the plug-in {printable(name)} that the run was begun with; bring "
                "back a copy"
            )
        if not trust_plugins and not has_run_here(plugin):
            raise RunError(
                f"{run.path}: its plug-in {printable(name)} has never run on this machine, and a "
                f"plug-in can do whatever you can; read {file}, then --trust-plugins runs it"
            )
        plugins.append(plugin)
    return plugins


def plugins_have_run_here(run: RunDirectory) -> bool:
    """Whether a run keeps plug-ins and all have run here; not if it is not seen from here."""
    with suppress(RunError):
        return bool(plugins_of(run, run.manifest(), trust_plugins=False))
    return False


def _check_places(run: RunDirectory, manifest: Manifest, overrides: Sequence[str]) -> None:
    """Refuse places at which nothing lies any more; the error names all of them."""
    overridden = {field_of(override) for override in overrides}
    gone: dict[str, str] = {}
    for field in manifest.places.keys() - overridden:
        for name in _names_in(manifest.places[field]):
            # A store or a bundled text does not move. A directory may have brackets in its name, so
            # the name itself is looked for first.
            path = _on_disk(name)
            if path and not path.exists() and not glob.glob(str(path), recursive=True):
                gone.setdefault(field, name)
    if gone:
        named = ", ".join(f"{field} = {name!r}" for field, name in sorted(gone.items()))
        words = " ".join(f"--set {field}=PATH" for field in sorted(gone))
        raise RunError(
            f"{run.path}: not there, seen from {os.getcwd()}: {named}; say where that lies: "
            f"headcount resume {run.path} {words}"
        )


def check_overrides(run: RunDirectory, overrides: Sequence[str]) -> None:
    """Refuse to set anything that would change rows of a run."""
    for override in overrides:
        if field_of(override) not in SETTABLE:
            raise ScanError(
                f"--set {override}: when {run.run_id} continues, only "
                f"{', '.join(SETTABLE[:-1])} or {SETTABLE[-1]} can change, because they change no "
                "row of it; a scan with another value makes a run of its own"
            )
