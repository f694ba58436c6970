"""What a measurement was made on."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "transformer_lens", "ray", "pyarrow")


def machine() -> dict[str, Any]:
    """Processor, accelerator, versions and commit."""
    return {
        "cpu": _cpu(),
        "cores": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
        "commit": _commit(),
    }


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=here,
    )
    return done.stdout.strip()
