"""The house: jobs → workers → schemas ← queries ← exports, and reproduce above them.

Which file may import what, which files may import a third-party library, and how files are named.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from headcount.schemas import kinds
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
    "headcount.workers.bridge": {"headcount.workers.model", "headcount.workers.engine"},
    "headcount.workers.gradients": {"headcount.workers.model", "headcount.workers.engine"},
    "headcount.workers.kernel": {"headcount.workers.model", "headcount.workers.engine"},
    "headcount.workers.inputs": {"headcount.workers.model"},
    "headcount.workers.interventions": {"headcount.workers.model", "headcount.workers.engine"},
    "headcount.workers.measurements": {"headcount.workers.model", "headcount.workers.engine"},
    "headcount.workers.diff": {
        "headcount.workers.model",
        "headcount.workers.engine",
        "headcount.workers.inputs",
    },
}
"""What each room of `workers` may import of the others; the files outside a room stand above all
rooms.
"""

FLOORS = (tuple(ROOMS), ("headcount.workers.replica",), ("headcount.workers.shard",))
"""Rooms and files of `workers` from the ground up: none imports one of a floor above it."""

FLOORS_OF_JOBS = (
    # What every command may need.
    (
        "headcount.jobs.bars",
        "headcount.jobs.clocks",
        "headcount.jobs.console",
        "headcount.jobs.endings",
        "headcount.jobs.job_state",
        "headcount.jobs.lock",
        "headcount.jobs.metrics",
        "headcount.jobs.phases",
        "headcount.jobs.resources",
        "headcount.jobs.run_names",
    ),
    ("headcount.jobs.cluster",),
    ("headcount.jobs.upkeep",),
    ("headcount.jobs.corpus",),
    ("headcount.jobs.plan",),
    ("headcount.jobs.run",),
    ("headcount.jobs.api",),
    ("headcount.jobs.commands",),
)
"""Folders and files of `jobs` from the ground up: none imports one of a floor above it."""

ROOMS_OF_ANSWERS = {
    "headcount.queries.open": set[str](),
    "headcount.queries.ask": {"open"},
    "headcount.queries.answers": {"open", "ask"},
    "headcount.queries.report": {"open", "ask", "answers"},
    "headcount.queries.explore": {"open", "ask", "answers"},
    "headcount.exports.shared": set[str](),
    "headcount.exports.formats": {"shared"},
}
"""What each room of `queries` and `exports` may import of the others of its package; the files
outside a room stand above all rooms.
"""

SPINE = (
    "jobs/run/loop.py",
    "jobs/run/measuring.py",
    "workers/shard.py",
    "workers/replica.py",
    "workers/measurements/batch.py",
    "workers/measurements/undefined.py",
    "workers/measurements/results.py",
    "workers/engine/engine.py",
    "workers/engine/fused_engine.py",
    "workers/engine/fused_pattern.py",
    "workers/engine/tile_sweep.py",
    "workers/model/attention_facts.py",
    "workers/model/attention_layers.py",
    "workers/engine/token_pairs.py",
    "schemas/files/commits.py",
)
"""The way of a scan, in the order of reading."""

HARD_ROOMS = (
    "headcount.workers.bridge",
    "headcount.workers.gradients",
    "headcount.workers.kernel",
    "headcount.workers.inputs",
    "headcount.workers.loading",
)
"""What nobody need read who reads how a replica measures."""

HOW_THINGS_ARE_READ = (
    "headcount.schemas.fingerprints",
    "headcount.schemas.object_stores",
    "headcount.schemas.places",
    "headcount.schemas.plugin_files",
    "headcount.schemas.scans.scan_file",
)
"""Nor this: a replica is given a scan with its plug-ins."""

CATALOGUES_AND_TWINS = (
    *(f"headcount.schemas.{catalogue}" for catalogue in kinds.CATALOGUES),
    "headcount.workers.engine.dense_pattern",
)
"""Nor the formulas, of which each is read by itself, and the pattern that the fused one is held
against.
"""

ONLY_IN = {
    "aiohttp": ("queries/explore/server.py",),
    "datasets": ("workers/inputs/corpus/documents.py", "reproduce/published_texts.py"),
    "duckdb": ("queries/",),
    "fsspec": ("queries/open/stores.py", "schemas/object_stores.py"),
    "huggingface_hub": ("workers/model/info/description.py", "reproduce/published_texts.py"),
    "jinja2": ("queries/report/html_page.py",),
    "psutil": ("jobs/cluster/ray_cluster.py", "workers/memory.py"),
    "ray": (
        "jobs/run/ray_replicas.py", "jobs/run/preemption.py", "jobs/run/replica_actor.py",
        "jobs/upkeep/merge_workers.py", "jobs/metrics.py",
        "jobs/corpus/preparation.py",
        "jobs/cluster/kubernetes_job.py", "jobs/cluster/ray_cluster.py",
        "jobs/cluster/submission.py", "jobs/run/ray_trial.py",
    ),
    "pyiceberg": ("exports/formats/iceberg.py", "exports/shared/held_files.py"),
    "safetensors": (
        "workers/model/", "workers/bridge/", "models/", "exports/shared/source.py",
        "exports/formats/fp8_kv_scales.py",
    ),
    "tokenizers": ("workers/model/", "workers/bridge/", "models/"),
    "torch": (
        "workers/", "models/", "jobs/commands/doctor.py",
        "jobs/commands/model_report.py",
        "schemas/pattern.py",  # For its types alone.
    ),
    "transformer_lens": ("workers/bridge/",),
    "transformers": (
        "workers/model/", "workers/bridge/", "workers/loading.py", "workers/process.py",
        "workers/trainer_callback.py", "models/",
    ),
    "triton": ("workers/kernel/sweep_kernel.py",),
    "typer": (
        "headcount/", "exports/commands.py", "exports/diff/commands.py",
        "reproduce/reproduce_commands.py",
        "jobs/commands/cluster.py", "jobs/commands/corpus.py", "jobs/commands/runs.py",
        "jobs/commands/options.py", "jobs/commands/scan.py", "jobs/commands/upkeep.py",
        "queries/commands/",
    ),
}  # fmt: skip
"""The files and folders that may import a library; a library that is not named may be anywhere."""


@cache
def imports() -> dict[Path, frozenset[str]]:
    """Full names of everything that each of our files imports, at its top or inside functions.

    `from a import b` gives both `a` and `a.b`, because b may be a module.
    """
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {
        file: frozenset(imports_of(file)) for file in [*files, *(ROOT / "headcount").glob("*.py")]
    }


def imports_of(file: Path, with_types: bool = True) -> Iterator[str]:
    nodes = [*ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    left_out: set[ast.stmt] = set()
    for node in nodes:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and not with_types:
            left_out |= {*node.body} if node.test.id == "TYPE_CHECKING" else set()
    for node in nodes:
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def module_of(file: Path) -> str:
    """The name under which a file is imported."""
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("headcount") else f"headcount.{name}"


@cache
def graph() -> dict[str, frozenset[str]]:
    """The modules of ours that each of our modules imports."""
    modules = frozenset(map(module_of, imports()))
    return {
        module_of(file): (names & modules) - {module_of(file)} for file, names in imports().items()
    }


def arrows(is_forbidden: Callable[[str, str], bool]) -> list[str]:
    """Imports of one of our modules by another that must not be."""
    return [
        f"{module} -> {name}"
        for module, names in graph().items()
        for name in names
        if is_forbidden(module, name)
    ]


def room_of(module: str) -> str:
    """The room of `workers` or `jobs` that a module is in: its folder, or the file itself."""
    return ".".join(module.split(".")[:3])


def test_a_package_imports_only_what_stands_below_it() -> None:
    assert MAY_IMPORT.keys() == set(PACKAGES)

    def is_forbidden(module: str, name: str) -> bool:
        package, other = (each.removeprefix("headcount.") for each in (module, name))
        package = package.partition(".")[0]
        allowed = MAY_IMPORT.get(package)
        # The front door may import everything.
        return allowed is not None and not {other, other.partition(".")[0]} & (allowed | {package})

    assert arrows(is_forbidden) == []
    assert all(any(m.startswith(f"headcount.{package}.") for m in graph()) for package in PACKAGES)


def test_a_room_of_the_workers_imports_only_rooms_and_floors_below_it() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

    def is_forbidden(module: str, name: str) -> bool:
        room, other = room_of(module), room_of(name)
        if room in ROOMS and name.startswith("headcount.workers."):
            return other not in ROOMS[room] | {room}
        return floor_of.get(other, 0) > floor_of.get(room, len(FLOORS))

    assert arrows(is_forbidden) == []


def test_a_folder_of_jobs_imports_only_floors_below_it() -> None:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS_OF_JOBS) for room in rooms}
    modules = [name for name in graph() if name.startswith("headcount.jobs.")]
    assert {room_of(module) for module in modules} == floor_of.keys()

    def is_forbidden(module: str, name: str) -> bool:
        room, other = room_of(module), room_of(name)
        return room in floor_of and floor_of.get(other, -1) > floor_of[room]

    assert arrows(is_forbidden) == []


def test_the_loop_of_a_run_knows_no_model_no_corpus_and_no_cluster() -> None:
    needed = closure_of("headcount.jobs.run.loop")
    rooms = ("headcount.jobs.cluster", "headcount.jobs.corpus", *FLOORS[1], *FLOORS[2], *HARD_ROOMS)
    assert [name for name in needed if name.startswith(rooms)] == []


def test_a_room_of_queries_and_exports_imports_only_rooms_below_it() -> None:
    def is_forbidden(module: str, name: str) -> bool:
        room, other = room_of(module), room_of(name)
        package, _, own = room.rpartition(".")
        if room not in ROOMS_OF_ANSWERS or not name.startswith(f"{package}."):
            return False
        return other.rpartition(".")[2] not in ROOMS_OF_ANSWERS[room] | {own}

    assert arrows(is_forbidden) == []
    assert ROOMS_OF_ANSWERS.keys() <= {*map(room_of, graph())}


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_known_to_few_files(library: str) -> None:
    importers = [
        file.relative_to(ROOT).as_posix()
        for file, names in imports().items()
        if library in {name.partition(".")[0] for name in names}
    ]
    assert importers
    assert [file for file in importers if not file.startswith(ONLY_IN[library])] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    settled: set[str] = set()
    while True:
        # A file is settled as soon as everything that it imports is. Files in a circle never are.
        settling = {m for m in graph().keys() - settled if graph()[m] <= settled}
        if not settling:
            break
        settled |= settling
    assert sorted(graph().keys() - settled) == []


def closure_of(module: str) -> set[str]:
    """The modules of ours that a module needs, and itself."""
    needed, waiting = {module}, [module]
    while waiting:
        new = graph()[waiting.pop()] - needed
        needed |= new
        waiting += new
    return needed


def test_a_replica_needs_no_room_for_a_hard_matter_and_reads_no_scan() -> None:
    needed = closure_of("headcount.workers.replica")
    unneeded = (*HARD_ROOMS, *HOW_THINGS_ARE_READ, *CATALOGUES_AND_TWINS)
    assert [name for name in needed if name.startswith(unneeded)] == []


def test_the_page_lists_the_spine_in_the_order_of_reading() -> None:
    page = (ROOT / "docs/internals/how-it-works.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d+\. `(\S+\.py)`: .+", page, re.MULTILINE)
    assert tuple(listed) == SPINE
    assert all((ROOT / file).is_file() for file in SPINE)


def test_the_doors_of_rooms_lead_to_what_they_name() -> None:
    from headcount.workers.engine import rooms

    doors = [*rooms.ENGINES.values(), rooms.LOAD_MODEL, rooms.PROVEN_SWEEP, rooms.WEIGHT_TABLES]
    assert [rooms.entered(door).__name__ for door in doors] == [
        door.rpartition(".")[2] for door in doors
    ]


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
