"""jobs → workers → schemas ← queries, and each third-party library in the few files that may know
it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {
    "schemas": set[str](),
    "workers": {"schemas"},
    "jobs": {"workers", "schemas"},
    "queries": {"schemas"},
    "reproduce": {"schemas", "workers", "jobs", "queries"},
    "models": {"workers"},
}
ONLY_IN = {
    "ray": (
        "jobs/replica_actor.py",
        "jobs/ray_cluster.py",
        "jobs/dispatch.py",
        "jobs/submission.py",
    ),
    "transformer_lens": ("workers/model/",),
    "datasets": ("workers/inputs/documents.py",),
    "torch": ("workers/", "models/", "jobs/doctor.py"),
    "triton": ("workers/engine/sweep_kernel.py",),
    "duckdb": ("queries/",),
    "plotly": ("queries/",),
}


def imported(file: Path) -> set[str]:
    """Top-level names of the packages a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", OURS)
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    assert files(package)
    for file in files(package):
        wrong = (imported(file) & set(OURS)) - OURS[package] - {package}
        assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_known_to_few_files(library: str) -> None:
    knowing = [
        f.relative_to(ROOT).as_posix()
        for package in OURS
        for f in files(package)
        if library in imported(f)
    ]
    assert knowing
    assert [f for f in knowing if not f.startswith(ONLY_IN[library])] == []


ROOMS = {
    "workers.model": set[str](),
    "workers.engine": {"workers.model"},
    "workers.interventions": {"workers.model", "workers.engine"},
    "workers.inputs": {"workers.model", "workers.engine", "workers.interventions"},
}
"""What each room of `workers` may import of the others; files outside a room stand above all."""


def our_modules(file: Path) -> set[str]:
    """Full names of the modules of `workers` that a file imports."""
    tree = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    names = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
    return {name for name in names if name.startswith("workers.")}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_the_workers_imports_only_rooms_below_it(room: str) -> None:
    for file in files(room.replace(".", "/")):
        above = [
            module
            for module in our_modules(file)
            if ".".join(module.split(".")[:2]) not in ROOMS[room] | {room}
        ]
        assert above == [], f"{file.relative_to(ROOT)} imports {above}"


def test_the_files_of_the_workers_import_each_other_in_no_circle() -> None:
    imports: dict[str, set[str]] = {}
    for file in files("workers"):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        imports[module] = our_modules(file) - {module}
    standing: set[str] = set()
    while ready := {
        m for m in imports.keys() - standing if imports[m] & imports.keys() <= standing
    }:
        standing |= ready
    assert sorted(imports.keys() - standing) == []


def test_only_the_room_of_the_model_knows_the_bridge() -> None:
    """`bridge_of` is for tests and benchmarks."""
    for package in OURS:
        for file in files(package):
            if "workers/model" not in file.as_posix():
                text = file.read_text(encoding="utf-8")
                assert "bridge_of" not in text, file
                assert "._bridge" not in text, file
