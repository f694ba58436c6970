"""Checks that a machine can run scans."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from schemas.errors import HeadcountError
from schemas.scan import parse_scan
from schemas.statistics import KIND

if TYPE_CHECKING:
    from workers.replica import Replica

PACKAGES = ("schemas", "workers", "jobs", "queries", "reproduce")
READING = ("duckdb", "pyarrow", "numpy", "pydantic", "plotly")
MEASURING = ("torch", "transformer_lens", "transformers", "tokenizers", "ray", "datasets")
"""Libraries of the extra `scan`."""

INSTALL = "in headcount's folder, run: pip install -e '.[scan]'"

DRIFT = 1e-5
"""Largest difference allowed between the two engines on a probability."""

MEMORY = 4e9
"""Bytes that a scan with Ray wants."""

DISK = 1e9
"""Bytes that a small run and Ray's files want."""


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    """What to do if it is not ok."""


def examine() -> Iterator[Check]:
    """Look at the interpreter, our own code, the libraries, the machine and every bundled model."""
    yield Check("python", True, f"{platform.python_version()} on {platform.platform()}")
    yield check_code()
    missing = False
    for library in (*READING, *MEASURING):
        check = check_library(library)
        missing |= not check.ok
        yield check
    if missing:
        # The rest cannot be looked at.
        return
    yield from _check_machine()
    from workers.model.model_info import BUNDLED_MODELS

    for config in sorted(BUNDLED_MODELS.glob("*/config.json")):
        yield _check_model(config.parent.name)


def check_code() -> Check:
    """Whether the code that runs is this project's: our packages have common names, and a folder of
    the user's may be found before them.
    """
    front_door = find_spec("headcount")
    if front_door is None or front_door.origin is None:
        return Check("code", False, "headcount.py cannot be imported", INSTALL)
    home = Path(front_door.origin).resolve().parent
    for package in PACKAGES:
        spec = find_spec(package)
        places = [] if spec is None else list(spec.submodule_search_locations or ())
        if [Path(place).resolve() for place in places] != [home / package]:
            return Check(
                "code",
                False,
                f"{package} comes from {', '.join(places) or 'nowhere'}, headcount from {home}",
                f"take the folder that holds the other {package} off PYTHONPATH, rename it, or "
                "run headcount elsewhere",
            )
    return Check("code", True, f"all of it from {home}")


def check_library(library: str) -> Check:
    """Whether a library is installed."""
    try:
        return Check(library, True, version(library))
    except PackageNotFoundError:
        return Check(library, False, "not installed", INSTALL)


def _check_machine() -> Iterator[Check]:
    """The devices, the memory and the disk."""
    import torch

    from workers.memory import available_cores, total_memory

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Check("device", True, ", ".join(gpus) or f"CPU, {available_cores()} cores")
    memory = total_memory()
    yield Check(
        "memory",
        memory > MEMORY,
        f"{memory / 1e9:.1f} GB; a scan with Ray wants {MEMORY / 1e9:.0f} GB",
        "scan with --replicas 0, which does without Ray",
    )
    free = shutil.disk_usage(Path.cwd()).free
    yield Check(
        "disk",
        free > DISK,
        f"{free / 1e9:.1f} GB free in {Path.cwd()}",
        "free space, or let `out` of the scan be on another disk",
    )


def _check_model(name: str) -> Check:
    """Measure two sequences with both engines."""
    from workers.model.model_info import describe, find_model
    from workers.replica import Replica

    fields = {
        "model": f"bundled:{name}",
        "n_ctx": 32,
        "sequences": 2,
        "input": {"family": "repeated_random"},
    }
    try:
        info = describe(find_model(f"bundled:{name}"))
        tokens = np.random.default_rng(0).integers(info.d_vocab, size=(2, 32)).astype(np.int32)
        fused, dense = (
            Replica(info, parse_scan(fields | {"engine": e}), "cpu") for e in ("fused", "dense")
        )
        column, drift = _largest_drift(fused, dense, tokens)
    except HeadcountError as error:
        return Check("model", False, f"{name}: {error}", "install headcount again; a file is amiss")
    return Check(
        "model",
        drift < DRIFT,
        f"{name}: fused and dense engines differ by {drift:.1g} at most, in {column} "
        f"(allowed {DRIFT:g})",
        "do not trust numbers of this machine; compare the versions above with "
        "deploy/requirements.txt",
    )


def _largest_drift(fused: Replica, dense: Replica, tokens: np.ndarray) -> tuple[str, float]:
    """The standard probability in which two engines differ most, and by how much.

    A value that only one of them has is a difference of 1.
    """
    of_fused, of_dense = fused.measure(tokens).heads, dense.measure(tokens).heads
    drifts: dict[str, float] = {}
    for statistic in KIND.select("standard"):
        if statistic.unit == "probability":
            one, other = of_fused[statistic.name], of_dense[statistic.name]
            both = np.isnan(one) & np.isnan(other)
            difference = np.where(both, 0.0, np.nan_to_num(np.abs(one - other), nan=1.0))
            drifts[statistic.name] = float(difference.max())
    return max(drifts.items(), key=lambda drift: drift[1])
