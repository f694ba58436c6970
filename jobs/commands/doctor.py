"""What `headcount doctor` checks: this machine, a model, or the kernel of a GPU."""

from __future__ import annotations

import platform
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headcount.schemas.errors import HeadcountError
from headcount.schemas.packages import PACKAGE
from headcount.schemas.places import place
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.statistics import STATISTICS

if TYPE_CHECKING:
    from headcount.workers.engine.tile_sweep import Sweep
    from headcount.workers.kernel.kernel_check import FactNames, Shape
    from headcount.workers.replica import Replica

READING = ("duckdb", "pyarrow", "numpy", "pydantic")  # libraries that are always installed

MEASURING = ("torch", "transformer_lens", "transformers", "tokenizers", "ray", "datasets")
"""Libraries of the extra `scan`."""

INSTALL = "in headcount's folder, run: pip install -e '.[scan]'"

DRIFT = 1e-5  # largest difference that is allowed between the two engines on a probability
MEMORY = 4e9  # bytes of memory that a scan with Ray needs
DISK = 1e9  # bytes of disk that a small run and Ray's files need


@dataclass(frozen=True)
class Check:
    """The result of checking one thing."""

    name: str
    ok: bool
    result: str  # what was found, in words
    advice: str = ""  # what to do if it is not ok


def check_kernel() -> Iterator[Check]:
    """Compare the GPU's kernel with the tiles, the reference, with every shape, fact and format."""
    import torch

    from headcount.workers.kernel import sweep_kernel
    from headcount.workers.kernel.kernel_check import every_layer

    if not torch.cuda.is_available():
        yield Check("kernel", False, "no CUDA device is here, so there is no kernel to compare")
    # A GPU alone is not enough.
    elif not sweep_kernel.available(torch.device("cuda")):
        needs = "the kernel needs triton and compute capability 8.0; tiles measure instead"
        yield Check("kernel", False, f"{torch.cuda.get_device_name()}: {needs}")
    else:
        yield from compared_layers(sweep_kernel.sweep, every_layer(), "cuda")


def compared_layers(
    sweep: Sweep, layers: Iterable[tuple[Shape, FactNames]], device: str
) -> Iterator[Check]:
    """Compare a kernel with the tiles in some layers, in every format."""
    import torch

    from headcount.workers.kernel.kernel_check import ALLOWED, compare, in_words

    for shape, facts in layers:
        for factors in ALLOWED:
            # A kernel that does not compile has no difference to show.
            found = compare(sweep, shape, factors, torch.device(device), facts)
            result = found.error or f"differs by {found.difference:.1e}"
            layer = in_words(found.shape, found.facts)
            text = f"{layer}: {result} (allowed {found.allowed:.1e})"
            yield Check(found.factors, found.agrees, text)


def examine(out: str | None = None) -> Iterator[Check]:
    """Check interpreter, code, libraries, machine, bundled models, and `out`, the place of runs."""
    yield Check("python", True, f"{platform.python_version()} on {platform.platform()}")
    yield Check("code", True, f"from {PACKAGE}")
    libraries = [check_library(library) for library in (*READING, *MEASURING)]
    yield from libraries
    if not all(check.ok for check in libraries):
        # The other checks import the libraries.
        return
    import torch

    from headcount.workers.memory import available_cores, total_memory
    from headcount.workers.model.info.bundled_models import BUNDLED
    from headcount.workers.process import prepare_process

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
    if out is not None:
        yield check_out(out)
    prepare_process()
    yield from map(_check_bundled_model, BUNDLED)


def check_library(library: str) -> Check:
    """Whether a library is installed."""
    try:
        return Check(library, True, version(library))
    except PackageNotFoundError:
        return Check(library, False, "not installed", INSTALL)


def check_out(out: str) -> Check:
    """Whether runs can be written to a place, and whether it refuses a second commit of a shard.

    A store that does not refuse it does no harm: the files of two attempts have other names.
    """
    from headcount.workers.first_write import write_new

    file = place(out) / f"doctor-{secrets.token_hex(4)}"
    try:
        is_refused = [write_new(file, b""), write_new(file, b"")] == [True, False]
        file.unlink()
    except (HeadcountError, OSError) as error:
        return Check("out", False, str(error), "mend the access, or choose another place")
    result = "writes over a file that is there: of two attempts at a shard the last one counts, "
    result += "which does no harm"
    if is_refused:
        result = "writes a file only if there is none: of two attempts at a shard, the second one "
        result += "sees the first"
    return Check("out", True, f"{out} {result}")


def _check_bundled_model(name: str) -> Check:
    """Measure two sequences with both engines: they differ if a library or processor is broken."""
    from headcount.workers.model.info.description import describe, find_model
    from headcount.workers.replica import Replica

    fields = {"model": f"bundled:{name}", "n_ctx": 32, "sequences": 2}
    fields |= {"input": {"family": "repeated_random"}}
    try:
        info = describe(find_model(f"bundled:{name}"))
        rng = np.random.default_rng(0)
        tokens = rng.integers(info.d_vocab, size=(2, 32)).astype(np.int32)
        fused = Replica(info, parse_scan(fields | {"engine": "fused"}), "cpu")
        dense = Replica(info, parse_scan(fields | {"engine": "dense"}), "cpu")
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
    """The standard probability in which engines differ most, and by how much; 1 if one has none."""
    fused_columns = fused.measure(tokens).heads
    dense_columns = dense.measure(tokens).heads
    drifts: dict[str, float] = {}
    for statistic in STATISTICS.select("standard"):
        if statistic.unit != "probability":
            # Other units have no common scale on which a drift is small.
            continue
        fused_values = fused_columns[statistic.name]
        dense_values = dense_columns[statistic.name]
        is_undefined = np.isnan(fused_values) & np.isnan(dense_values)
        # If one of them is NaN, so is the difference.
        difference = np.nan_to_num(np.abs(fused_values - dense_values), nan=1.0)
        drifts[statistic.name] = float(np.where(is_undefined, 0.0, difference).max())
    return max(drifts.items(), key=lambda column_and_drift: column_and_drift[1])
