"""With which code, libraries and precision a run was begun, and what differs here."""

from functools import cache
from importlib.metadata import version

from headcount.schemas.errors import AnotherRunError
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory, differing_keys

LIBRARIES = (
    "torch", "transformers", "transformer_lens", "ray", "pyarrow", "datasets", "tokenizers",
)  # fmt: skip
"""Libraries whose versions a manifest records."""


def check_code_of_run(run: RunDirectory, manifest: Manifest | None, code: str) -> None:
    """Refuse code that has no part in a run yet; `manifest` is none if the run is new."""
    if manifest is not None and code not in manifest.codes:
        raise AnotherRunError(
            run.path,
            f"{run.run_id}: begun with code {manifest.code}, and the code here is {code}, which "
            f"may measure something else; headcount resume {run.path} --allow-other-code continues "
            "it, and every shard says which code measured it",
        )


def begun_precisions(run: RunDirectory) -> frozenset[str]:
    """The precision of a run's shards, for replicas to compare with their own; or empty."""
    commit = run.any_commit()
    return frozenset() if commit is None else frozenset(m.precision for m in commit.methods)


def changed_versions(manifest: Manifest) -> list[str]:
    """One line that names the libraries of another version than at the run's begin, or no line."""
    known = {name: release for name, release in manifest.versions.items() if name in LIBRARIES}
    differences = differing_keys(known, {name: installed_version(name) for name in known})
    return [f"begun with other libraries: {', '.join(differences)}"] if differences else []


@cache
def installed_version(library: str) -> str:
    """The version of a library; to look it up reads files, and systems plan many runs."""
    return version(library)
