"""Whether a run measured what is to be measured, and in words what differs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from jobs.run_places import FILE_OPTIONS
from schemas.kinds import WORDS
from schemas.manifest import Manifest, Meanings
from schemas.run_directory import differing_keys

Records = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What is said of each name, by field."""

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


def changed_identity(
    before: Manifest, identity: Mapping[str, Any], records: Records, model: Mapping[str, Any]
) -> list[str]:
    """What an identity has otherwise than a run's, but for its corpus; `model` is all that is known
    of the model now.

    Names of places do not count: what lies there does, by its fingerprints.
    """
    known = _without_places(before.identity, before.records)
    now = _without_places(identity, records)
    changed = [_in_words(line) for line in differing_keys(known, now)]
    if before.identity["model"].get("sha256") != model["sha256"]:
        changed = _changed_files(before.model, model) + changed
    return changed


def changed_meanings(before: Meanings, now: Meanings) -> list[str]:
    """Names whose code is not what it was, in one and the same code of the project."""
    return [f"the code of {_in_words(line)}" for line in differing_keys(before, now)]


def changed_versions(before: Manifest) -> list[str]:
    """A line for the libraries that are not those that a run was begun with, if there are some."""
    here = {library: version(library) for library in before.versions if library in LIBRARIES}
    known = {library: before.versions[library] for library in here}
    changed = differing_keys(known, here)
    return [f"begun with other libraries: {', '.join(changed)}"] if changed else []


def _without_places(identity: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """What is compared of an identity: not where things lie, and of formulas the names."""
    scan = {key: value for key, value in identity["scan"].items() if key != "model"}
    scan["input"] = {k: v for k, v in scan["input"].items() if k not in FILE_OPTIONS}
    own = ("name", "sha256")
    model = {key: value for key, value in identity["model"].items() if key not in own}
    names = {field: dict.fromkeys(described, True) for field, described in records.items()}
    tokenizer = identity.get("tokenizer")
    return {"scan": scan, "model": model, "tokenizer": tokenizer, "measured": names}


def _changed_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which files of a model are not what they were: its configuration, or its weights."""
    known, found = dict(before.get("files") or ()), dict(now["files"])
    changed = sorted(name for name in known | found if known.get(name) != found.get(name))
    if not known or not changed:
        return [f"the model's files ({before['sha256']}, now {now['sha256']})"]
    return [
        f"the model's {'configuration' if name == CONFIG else 'weights'} ({name}: "
        f"{known.get(name, 'not there')}, now {found.get(name, 'not there')})"
        for name in changed
    ]


def _in_words(difference: str) -> str:
    """A differing key, "scan.n_ctx (64, now 128)", as people call it."""
    key, _, values = difference.partition(" (")
    field, _, name = key.partition(".")
    match field:
        case "scan":
            return f"{name} ({values}"
        case "model":
            return f"the model's {name} ({values}"
        case "measured":
            kind, _, name = name.partition(".")
            was = values.startswith("true")
            return f"{WORDS[kind]} {name} ({'no longer' if was else 'not before'})"
        case "tokenizer":
            return f"the tokenizer ({values}"
        case _:
            return f"{WORDS[field]} {name} ({values}"
