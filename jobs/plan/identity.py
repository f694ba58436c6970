"""Whether a run measures what a scan asks for; if not, an error says in words what differs.

A run's identity is what its rows mean. Places do not belong to it: the content of a model, of a
tokenizer and of texts does, by fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from headcount.jobs.plan.model_places import FILE_OPTIONS
from headcount.jobs.plan.resolved_scan import ResolvedScan
from headcount.schemas.errors import OtherRunError
from headcount.schemas.files.manifest import Manifest, Meanings
from headcount.schemas.files.run_directory import RunDirectory, differing_keys
from headcount.schemas.scans.kinds import WORDS

Records = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""The description of each name, by field."""

CONFIG = "config.json"

LIBRARIES = (
    "torch",
    "transformers",
    "transformer_lens",
    "ray",
    "pyarrow",
    "datasets",
    "tokenizers",
)
"""Libraries whose versions a manifest records."""


def check_same_identity(run: RunDirectory, manifest: Manifest, resolved: ResolvedScan) -> None:
    """Refuse to continue a run that measured something else."""
    # A manifest holds what JSON makes of an identity: tuples became lists.
    identity = json.loads(json.dumps(resolved.identity))
    changes = changed_identity(manifest, identity, resolved.records, resolved.info.record)
    run_meanings = manifest.meanings(resolved.code)
    # Other code may give a name another fingerprint for harmless reasons: whether such a run is
    # continued is asked elsewhere (`--allow-other-code`). Within one code it is another formula.
    if not changes and run_meanings is not None:
        changes = changed_meanings(run_meanings, resolved.meanings)
    if changes:
        raise OtherRunError(f"{run.path}: this run measured something else: {', '.join(changes)}")
    _check_same_text(run, manifest.identity.get("corpus") or {}, identity["corpus"])


def _check_same_text(
    run: RunDirectory, run_corpus: Mapping[str, Any], corpus: Mapping[str, Any]
) -> None:
    """Refuse another text than the one that a synthetic family took its statistics from.

    A corpus (which has `sources`) may grow or be mended: `jobs.corpus.run_corpus` checks it by
    document.
    """
    differences = differing_keys({"corpus": run_corpus}, {"corpus": corpus})
    if "sources" not in corpus and differences:
        raise OtherRunError(
            f"{run.path}: the text is not the one that the run was begun with: "
            f"{', '.join(differences)}"
        )


def begun_precisions(run: RunDirectory) -> frozenset[str]:
    """The precision in which shards of a run were measured; empty before there are shards.

    A replica compares its own with it (`workers.interventions.settlement.check_begun`), because
    rows of two precisions never meet in one run. Only a replica can: what `auto` means depends on
    the loaded model.
    """
    commit = run.any_commit()
    return frozenset() if commit is None else frozenset(m.precision for m in commit.methods)


def changed_identity(
    manifest: Manifest, identity: Mapping[str, Any], records: Records, model: Mapping[str, Any]
) -> list[str]:
    """What differs between an identity and a run's, apart from the corpus; one phrase each.

    `model` is the full record of the model, of which an identity holds only a part.
    """
    run_identity = _without_places(manifest.identity, manifest.records)
    here_identity = _without_places(identity, records)
    changes = [_in_words(line) for line in differing_keys(run_identity, here_identity)]
    run_sha256 = manifest.identity.get("model", {}).get("sha256")
    if run_sha256 != model["sha256"]:
        run_files = manifest.model.get("files", {})
        # The files come first: a changed configuration explains what follows.
        changes = _changed_files(run_sha256, run_files, model) + changes
    return changes


def changed_meanings(run_meanings: Meanings, meanings: Meanings) -> list[str]:
    """Names whose code changed although the code as a whole has the same fingerprint."""
    return [f"the code of {_in_words(line)}" for line in differing_keys(run_meanings, meanings)]


def changed_versions(manifest: Manifest) -> list[str]:
    """One line that names the libraries of another version than at the run's begin, or no line."""
    # A manifest of older code may name libraries that no longer take part.
    run_versions = {
        library: release for library, release in manifest.versions.items() if library in LIBRARIES
    }
    versions = {library: installed_version(library) for library in run_versions}
    differences = differing_keys(run_versions, versions)
    return [f"begun with other libraries: {', '.join(differences)}"] if differences else []


@cache
def installed_version(library: str) -> str:
    """The version of a library; to look it up reads files, and systems plan many runs."""
    return version(library)


def _without_places(identity: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """The part of an identity that is compared by value.

    Places are left out, because content counts. Of formulas only the names are compared here: their
    fingerprints depend on the code (`changed_meanings`). The model's files are compared one by one.
    """
    scan = _without_keys(identity.get("scan", {}), "model", "revision")
    scan["input"] = _without_keys(scan.get("input", {}), *FILE_OPTIONS)
    return {
        "scan": scan,
        "model": _without_keys(identity.get("model", {}), "name", "sha256"),
        "tokenizer": identity.get("tokenizer"),
        "measured": {field: dict.fromkeys(names, True) for field, names in records.items()},
    }


def _without_keys(fields: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in keys}


def _changed_files(
    run_sha256: str | None, run_files: Mapping[str, str], model: Mapping[str, Any]
) -> list[str]:
    """Which files of a model differ: its configuration, its weights, or both."""
    files: Mapping[str, str] = model["files"]
    # Runs of older code recorded one fingerprint for the model and none for its files.
    names = {*run_files, *files} if run_files else set[str]()
    changed_names = sorted(name for name in names if run_files.get(name) != files.get(name))
    if not changed_names:
        return [f"the model's files ({run_sha256}, now {model['sha256']})"]
    return [
        f"the model's {'configuration' if name == CONFIG else 'weights'} ({name}: "
        f"{run_files.get(name, 'not there')}, now {files.get(name, 'not there')})"
        for name in changed_names
    ]


def _in_words(difference: str) -> str:
    """A line of `differing_keys`, such as "scan.n_ctx (64, now 128)", as people say it."""
    key, _, values = difference.partition(" (")
    field, _, name = key.partition(".")
    match field:
        case "scan":
            return f"{name} ({values}"
        case "model":
            return f"the model's {name} ({values}"
        case "measured":
            kind, _, name = name.partition(".")
            is_gone = values.startswith("true")
            return f"{WORDS[kind]} {name} ({'no longer' if is_gone else 'not before'})"
        case "tokenizer":
            return f"the tokenizer ({values}"
        case _:
            return f"{WORDS[field]} {name} ({values}"
