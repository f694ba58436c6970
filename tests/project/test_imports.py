"""The house: jobs → workers → schemas ← queries ← exports, and reproduce above them.

Which file may import what, which files may import a third-party library, and how files are named.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from headcount.schemas.packages import PACKAGES
from tests import ROOT

MAY_IMPORT = {
    "schemas": set[str](),
    "workers": {"schemas"},
    "jobs": {"workers", "schemas"},
    "queries": {"schemas", "workers.run_model"},
    "exports": {"queries", "schemas", "jobs", "workers"},
    "reproduce": {"schemas", "workers", "jobs", "queries"},
    "models": {"workers"},
}
"""What each package may import of the others: a package, or one module of it."""

ROOMS = {
    "headcount.workers.model": set[str](),
    "headcount.workers.provenance": set[str](),
    "headcount.workers.engine": {"headcount.workers.model"},
    "headcount.workers.inputs": {"headcount.workers.model"},
    "headcount.workers.interventions": {"headcount.workers.model", "headcount.workers.engine"},
    "headcount.workers.measurements": {"headcount.workers.model", "headcount.workers.engine"},
}
"""What each room of `workers` may import of the others; the files outside a room stand above all
rooms.
"""

FLOORS = (
    tuple(ROOMS),
    ("headcount.workers.replica",),
    ("headcount.workers.shard",),
)
"""Rooms and files of `workers` from the ground up: none imports one of a floor above it."""

ONLY_IN = {
    "aiohttp": ("jobs/cluster/submission.py", "queries/explore/server.py"),
    "datasets": ("workers/inputs/corpus/documents.py", "reproduce/published_texts.py"),
    "duckdb": ("queries/",),
    "fsspec": ("queries/open/stores.py",),
    "huggingface_hub": ("workers/model/files/model_info.py", "reproduce/published_texts.py"),
    "jinja2": ("queries/report/html_page.py",),
    "psutil": ("jobs/cluster/ray_cluster.py", "workers/memory.py"),
    "ray": (
        "jobs/run/dispatch.py",
        "jobs/upkeep/merge_tasks.py",
        "jobs/upkeep/metrics.py",
        "jobs/run/preemption.py",
        "jobs/corpus/preparation_on_ray.py",
        "jobs/corpus/preparation_task.py",
        "jobs/cluster/ray_cluster.py",
        "jobs/run/replica_actor.py",
        "jobs/cluster/submission.py",
    ),
    "pyiceberg": ("exports/formats/iceberg.py", "exports/in_memory/held_files.py"),
    "safetensors": ("workers/model/", "models/", "exports/safetensors_file.py"),
    "tokenizers": ("workers/model/", "models/"),
    "torch": (
        "workers/",
        "models/",
        "jobs/commands/doctor.py",
        "jobs/commands/kernel_table.py",
        "jobs/commands/model_report.py",
    ),
    "transformer_lens": ("workers/model/",),
    "transformers": (
        "workers/model/",
        "workers/process.py",
        "workers/trainer_callback.py",
        "models/",
    ),
    "triton": ("workers/engine/kernel/sweep_kernel.py",),
    "typer": (
        "headcount/",
        "exports/commands.py",
        "jobs/commands/check.py",
        "jobs/commands/cluster.py",
        "jobs/commands/corpus.py",
        "jobs/commands/scan.py",
        "queries/commands/explore.py",
        "queries/commands/query.py",
        "queries/commands/text.py",
        "queries/commands/views.py",
        "reproduce/reproduce_commands.py",
    ),
}  # fmt: skip
"""The files and folders that may import a library; a library that is not named may be anywhere."""


def sources_of(package: str) -> list[Path]:
    """The Python files of a package."""
    return sorted((ROOT / package).rglob("*.py"))


def all_sources() -> list[Path]:
    """The Python files of all packages, and the front door."""
    sources = [file for package in PACKAGES for file in sources_of(package)]
    return [*sources, *(ROOT / "headcount").glob("*.py")]


def module_of(file: Path) -> str:
    """The name under which a file is imported."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("headcount") else f"headcount.{name}"


@cache
def module_names(file: Path) -> frozenset[str]:
    """Full names of everything that a file imports, at its top or inside functions.

    `from a import b` gives both `a` and `a.b`, because b may be a module.
    """
    return frozenset(_module_names(file))


def _module_names(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_libraries(file: Path) -> set[str]:
    """Top-level names that a file imports."""
    return {name.partition(".")[0] for name in module_names(file)}


def imported_modules(file: Path) -> set[str]:
    """Our modules that a file imports, without the name `headcount` before them."""
    modules = {module.removeprefix("headcount.") for module in map(module_of, all_sources())}
    return {name.removeprefix("headcount.") for name in module_names(file)} & modules


def imports() -> dict[str, frozenset[str]]:
    """The modules of ours that each of our modules imports."""
    by_module = {module_of(file): file for file in all_sources()}
    return {
        module: (module_names(file) & by_module.keys()) - {module}
        for module, file in by_module.items()
    }


def room_of(module: str) -> str:
    """The room that a module of `workers` is in: its folder, or the file itself."""
    return ".".join(module.split(".")[:3])


def test_every_package_has_its_rule() -> None:
    assert MAY_IMPORT.keys() == set(PACKAGES)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    assert sources_of(package)
    for file in sources_of(package):
        forbidden = [
            module
            for module in imported_modules(file)
            if not {module, module.partition(".")[0]} & (MAY_IMPORT[package] | {package})
        ]
        assert not forbidden, f"{file.relative_to(ROOT)} imports {forbidden}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_known_to_few_files(library: str) -> None:
    importers = [
        file.relative_to(ROOT).as_posix()
        for file in all_sources()
        if library in imported_libraries(file)
    ]
    assert importers
    assert [file for file in importers if not file.startswith(ONLY_IN[library])] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = imports()
    settled: set[str] = set()
    while True:
        # A file is settled as soon as everything that it imports is. Files in a circle never are.
        settling = {module for module in graph.keys() - settled if graph[module] <= settled}
        if not settling:
            break
        settled |= settling
    assert sorted(graph.keys() - settled) == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_the_workers_imports_only_rooms_below_it(room: str) -> None:
    forbidden = [
        f"{module} -> {name}"
        for module, names in imports().items()
        if room_of(module) == room
        for name in names
        if name.startswith("headcount.workers.") and room_of(name) not in ROOMS[room] | {room}
    ]
    assert forbidden == []


def test_no_file_of_the_workers_imports_one_of_a_floor_above() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    forbidden = [
        f"{module} -> {name}"
        for module, names in imports().items()
        for name in names
        if floor_of.get(room_of(name), 0) > floor_of.get(room_of(module), len(FLOORS))
    ]
    assert forbidden == []


def test_only_the_room_of_the_model_knows_the_bridge() -> None:
    """`bridge_of` is for tests and benchmarks."""
    for package in PACKAGES:
        for file in sources_of(package):
            if "workers/model" not in file.as_posix():
                text = file.read_text(encoding="utf-8")
                assert "bridge_of" not in text, file
                assert "._bridge" not in text, file


def test_importing_the_front_door_is_light_and_says_nothing() -> None:
    """Neither `import headcount` nor the help of all commands waits for a large library."""
    code = (
        "import headcount, headcount.commands, sys; list(headcount.commands.Commands().values()); "
        "print(sorted({'duckdb', 'numpy', 'plotly', 'pyarrow', 'ray', 'torch'} & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (process.stdout, process.stderr) == ("[]\n", "")
