"""Which run a scan is: the newest of its runs that measures the same, or one of its own.

A run's identity is what its rows mean. Places do not belong to it: the content of a model, of a
tokenizer and of texts does, by fingerprint.
"""

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from headcount.jobs.plan.resolved_scan import ResolvedScan
from headcount.jobs.run_names import next_run, runs_of
from headcount.schemas.errors import AnotherRunError, OtherRunError, RunError
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory, differing_keys
from headcount.schemas.filled_tables import WORDS
from headcount.schemas.fingerprints import module_code
from headcount.schemas.places import names, read_as
from headcount.schemas.plugins import Plugin
from headcount.schemas.scans.training_step import training_step

PLACES_OF_MODEL = ("model", "revision", "tokenizer")
"""Fields of a scan that say where a model and its tokenizer lie."""

FILE_OPTIONS = ("files", "text")  # options of input families that name files


class FoundRun(NamedTuple):
    """The run that a scan continues or begins."""

    run: RunDirectory
    alike: tuple[RunDirectory, ...] = ()
    """Runs, the newest first, that measure the same if their corpus is the same, which is known
    only when its tokens are there. Then the first of them counts instead of a new run.
    """


def find_run(resolved: ResolvedScan, first_run: RunDirectory, new: bool) -> FoundRun:
    """The newest of a scan's runs that measures the same; `first_run` if the scan has no runs.

    The same scan may name a place in other words: `./model`, `model`, a link, a copy. Its runs
    count too: they have the same name and another hash. With `new`, a run that is not there yet. If
    no run fits, the error is about the newest.
    """
    # An older run may fit although the newest does not, if a mistaken change was undone.
    refusals: list[RunError] = []
    own_runs = runs_of(first_run)
    for run in own_runs if not new else []:
        try:
            check_same_identity(run, run.manifest(), resolved)
            return FoundRun(run)
        except OtherRunError as error:
            refusals.append(with_advice(run, error))
    alike = _runs_in_other_words(resolved, first_run) if not (new and own_runs) else ()
    is_known = resolved.sequences.corpus is None
    if alike and is_known:
        return FoundRun(alike[0] if not new else next_run(_first_run_of(alike[0])))
    if new:
        return FoundRun(next_run(first_run))
    if refusals:
        raise refusals[0]
    return FoundRun(first_run, alike)


RUN_NAME = re.compile(r"(run_id=.+-[0-9a-f]{8})(-(?:[2-9]|[1-9]\d+))?")
"""The directory of a run: that of the first run of its scan, and its number."""

READ_AT_ONCE = 16  # manifests that are read at once: in a store each is a request


def _first_run_of(run: RunDirectory) -> RunDirectory:
    match = RUN_NAME.fullmatch(run.path.name)
    return RunDirectory(run.path.parent / match[1]) if match else run


def _runs_in_other_words(
    resolved: ResolvedScan, first_run: RunDirectory
) -> tuple[RunDirectory, ...]:
    """The runs of the same name that measure the same, but for their corpus; the newest first.

    Checkpoints of different steps are a run each, also where one has the weights of another.
    """
    directory = first_run.path.parent
    beginning = first_run.path.name[:-8]  # without the hash
    step = training_step(resolved.scan.model, resolved.scan.revision)
    runs = [
        RunDirectory(directory / name)
        for name in names(directory)
        if name.startswith(beginning)
        and (match := RUN_NAME.fullmatch(name))
        and len(match[1]) == len(first_run.path.name)
        and match[1] != first_run.path.name
    ]

    def begun(run: RunDirectory) -> str | None:
        """When a run was begun; None if it measures something else, or cannot be read."""
        try:
            manifest = run.manifest()
            other = manifest.identity["scan"]
            if training_step(other["model"], other.get("revision")) != step:
                return None
            check_same_identity(run, manifest, resolved)
            return manifest.created
        except RunError:
            return None

    with ThreadPoolExecutor(READ_AT_ONCE) as pool:
        times = zip(pool.map(begun, runs), runs, strict=True)
        newest = sorted([(time, str(run.path), run) for time, run in times if time], reverse=True)
    return tuple(run for _, _, run in newest)


def with_advice(run: RunDirectory, error: OtherRunError) -> RunError:
    """The error that a run cannot continue, with what a user can do instead."""
    return AnotherRunError(run.path, str(error))


def check_same_identity(run: RunDirectory, manifest: Manifest, resolved: ResolvedScan) -> None:
    """Refuse to continue a run that measured something else; the error says what differs."""
    # A manifest holds what JSON makes of an identity: tuples became lists.
    identity = json.loads(json.dumps(resolved.identity))
    if not resolved.scan.names_shards:
        # Then a run keeps the shards that it was begun with, on whatever machine.
        identity["scan"]["sequences_per_shard"] = manifest.identity["scan"]["sequences_per_shard"]
    # The files come first: a changed configuration explains what follows.
    files, files_now = manifest.model.get("files", {}), dict(resolved.info.files)
    changes = [
        f"the model's {_kind_of_file(name)} "
        f"({name}: {files.get(name, 'not there')}, now {files_now.get(name, 'not there')})"
        for name in sorted({*files, *files_now})
        if files.get(name) != files_now.get(name)
    ]
    # Of formulas only the names are compared in any case.
    before, now = (_measured(records) for records in (manifest.records, resolved.records))
    changes += [f"{name} (no longer)" for name in sorted(before.keys() - now.keys())]
    changes += [f"{name} (not before)" for name in sorted(now.keys() - before.keys())]
    changes += differing_keys(_values(manifest.identity), _values(identity))
    # A corpus (which has `sources`) may grow or be mended: `jobs.corpus.run_corpus` checks it by
    # document. The text that a synthetic family takes its statistics from may not.
    corpus = identity["corpus"]
    if "sources" not in corpus:
        run_corpus = manifest.identity.get("corpus") or {}
        changes += differing_keys(
            *({"its text's": each.get("text", {}).get("sha256")} for each in (run_corpus, corpus))
        )
    # Other code may give a name another fingerprint for harmless reasons: whether such a run is
    # continued is asked elsewhere (`--allow-other-code`). Within one code it is another formula.
    meanings = manifest.meanings(resolved.code)
    if meanings is None:
        # No such reason holds for a plug-in.
        changes += [
            f"the plug-in {plugin.name}"
            for plugin in resolved.scan.plugins
            if not _is_same_code(plugin, run, manifest.plugins.get(plugin.name, plugin.digest))
        ]
    if not changes and meanings is not None:
        lines = differing_keys(_measured(meanings), _measured(resolved.meanings))
        changes = [f"the code of {line}" for line in lines]
    if changes:
        raise OtherRunError(f"{run.path}: this run measured something else: {', '.join(changes)}")


def _is_same_code(plugin: Plugin, run: RunDirectory, digest: str) -> bool:
    """Whether a plug-in differs at most in prose from one that a run keeps."""
    if plugin.digest == digest:
        return True
    kept = read_as(run.plugin_file(digest), bytes)
    return module_code(kept, False) == module_code(plugin.content, False)


def without_model(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity without what the model is called and where it lies; its content stays."""
    scan = {k: v for k, v in identity["scan"].items() if k not in PLACES_OF_MODEL}
    model = {k: v for k, v in identity["model"].items() if k != "name"}
    return {**identity, "scan": scan, "model": model}


def _kind_of_file(name: str) -> str:
    if name == "config.json":
        return "configuration"
    return "adapter" if name.startswith("adapter_") else "weights"


def _values(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that is compared by value, by words; places are no part of it."""
    scan = {k: v for k, v in identity["scan"].items() if k not in PLACES_OF_MODEL}
    options = {k: v for k, v in scan.get("input", {}).items() if k not in FILE_OPTIONS}
    if _is_directory(options.get("dataset")):
        del options["dataset"]
    scan["input"] = options
    model = identity.get("model", {})
    sizes = {f"the model's {k}": v for k, v in model.items() if k not in ("name", "sha256")}
    return scan | sizes | {"the tokenizer": identity.get("tokenizer")}


def _is_directory(data_set: object) -> bool:
    """Whether a data set is a place, and not a name on the Hub."""
    return isinstance(data_set, str) and os.path.isdir(os.path.expanduser(data_set))


def _measured(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What records say of each name, by words such as `statistic entropy`."""
    return {f"{WORDS[field]} {name}": of[name] for field, of in records.items() for name in of}
