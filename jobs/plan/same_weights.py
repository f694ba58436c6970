"""Checkpoints of a series that have the same weights under different names.

Such series are published by mistake: of 154 steps of Pythia 2.8B, 86 have weights of the end of its
training (github.com/EleutherAI/pythia, issue 205). Files are compared: the same weights in other
files, for example in more of them, are not found.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headcount.jobs.console import tell
from headcount.jobs.plan.scan_files import ScanOfCheckpoint, by_numbers
from headcount.schemas.errors import ModelError, counted
from headcount.workers.model.info.description import find_model, hub_digests, local_directory
from headcount.workers.model.info.model_files import (
    CONFIG,
    adapter_files,
    adapter_names,
    file_digests,
    is_gguf,
    layout_of,
    listed_weights,
    read_object,
    weight_files,
)

AT_A_TIME = 8  # checkpoints that are read at a time, or that the Hub is asked about

SAMPLES, SAMPLE_BYTES = 16, 4096  # places that are compared first, and bytes at each

NAMED = 3  # checkpoints of a group that are named; the others are counted
Files = Mapping[str, str]  # what tells each file of a checkpoint from others, by name


def without_duplicates(scans: list[ScanOfCheckpoint], skip: bool) -> list[ScanOfCheckpoint]:
    """Say which checkpoints of a series have the same weights; with `skip` one of each is left.

    No model is downloaded or loaded for it. Of a group the latest step is left. Its name is right
    if a training stood still, and nearly so if its final weights were uploaded as earlier steps.
    """
    if len(scans) < 2:
        return scans
    checkpoints = dict(zip(_names(scans), scans, strict=True))
    problems: dict[str, str] = {}
    samples = _files_of_each(checkpoints, False, problems)
    # To read whole files takes minutes: only of checkpoints whose samples are the same.
    alike = {name: checkpoints[name] for group in _groups(samples) for name in group}
    files = _files_of_each(alike, True, problems)
    duplicates: set[str] = set()
    for group in _groups(files):
        *others, kept = sorted(group, key=_is_step_and_numbers)
        words = others
        if len(others) > NAMED:
            words = [*others[: NAMED - 1], f"{len(others) - NAMED + 1} more"]
        listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
        tell(f"{listed} {'have' if others[1:] else 'has'} the weights of {kept}")
        # With another configuration it is another model.
        config = files[kept].get("config.json")
        duplicates |= {name for name in others if files[name].get("config.json") == config}
    if problems:
        first = next(name for name in checkpoints if name in problems)
        count = counted(len(problems), "checkpoint")
        tell(f"{count} not compared with the others, the first is {first}: {problems[first]}")
    if duplicates:
        count = counted(len(duplicates), "duplicate")
        tell(f"{count} skipped" if skip else f"--skip-duplicates leaves out {count}")
    return [each for name, each in checkpoints.items() if not skip or name not in duplicates]


def _names(scans: list[ScanOfCheckpoint]) -> list[str]:
    """The shortest names that tell the checkpoints apart."""
    revisions = [each.scan.revision or "" for each in scans]
    models = [each.scan.model for each in scans]
    candidates = (revisions, [Path(model).name for model in models], models)
    return next(names for names in candidates if len({*names}) == len(scans))


def _is_step_and_numbers(name: str) -> tuple[bool, list[int], str]:
    """A key that sorts step200 before step1000, and main before both."""
    has_no_number, numbers, text = by_numbers(name)
    return not has_no_number, numbers, text


def _files_of_each(
    checkpoints: Mapping[str, ScanOfCheckpoint], whole: bool, problems: dict[str, str]
) -> dict[str, Files]:
    def files(name: str) -> Files:
        try:
            return _files(checkpoints[name], whole)
        except (ModelError, OSError) as error:
            problems[name] = str(error)
            return {}

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return dict(zip(checkpoints, pool.map(files, checkpoints), strict=True))


def _files(checkpoint: ScanOfCheckpoint, whole: bool) -> Files:
    """The configuration and the weights of a checkpoint, and its adapter if that is applied."""
    scan = checkpoint.scan
    model, revision = scan.model, scan.revision
    directory = local_directory(model, revision)
    if directory is None:
        try:
            digests = hub_digests(model, revision)
            names = {CONFIG, *listed_weights(digests)}
            if scan.adapter == "apply":
                names |= {*adapter_names(digests)}
            return {name: digest for name, digest in digests.items() if name in names}
        except ModelError as error:
            try:
                directory = find_model(model, revision, download=False)
            except ModelError:
                raise error from None
    layout = "gguf" if is_gguf(directory) else layout_of(read_object(directory / CONFIG))
    if whole:
        digests = file_digests(directory, layout, scan.adapter)
        return {name: digest.hex() for name, digest in digests.items()}
    files = weight_files(directory, layout)
    if scan.adapter == "apply":
        files += adapter_files(directory)
    return {file.name: _sample(file) for file in files}


def _sample(file: Path) -> str:
    """The size of a file and a digest of some of its bytes."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for part in range(SAMPLES):
            stream.seek(part * size // SAMPLES)
            digest.update(stream.read(SAMPLE_BYTES))
    return f"{size} {digest.hexdigest()}"


def _groups(files: Mapping[str, Files]) -> Iterator[list[str]]:
    """The checkpoints whose weights are the same, more than one each time."""
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, each in files.items():
        if weights := tuple(each[file] for file in sorted(each) if file != CONFIG):
            groups[weights].append(name)
    return (group for group in groups.values() if len(group) > 1)
