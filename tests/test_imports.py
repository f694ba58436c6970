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
    "transformer_lens": ("workers/model/loading.py", "workers/engine/fused_engine.py"),
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
