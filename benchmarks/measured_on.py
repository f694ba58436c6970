"""What a measurement was made on, and when."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "transformer_lens", "ray", "pyarrow")


def measured_now() -> dict[str, Any]:
    """What a figure is kept with: the time, how busy the machine was, and the machine."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 1),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Processor, accelerator, versions and commit."""
    return {
        "cpu": _processor_name(),
        "cores": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
        "commit": _commit(),
    }


def _processor_name() -> str:
    """The processor's name as Linux says it, because `platform` does not know it there."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model_names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return model_names[0] if model_names else platform.processor()


def _commit() -> str:
    """The commit that is checked out, marked `-dirty` if files differ from it."""
    describe = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        # A copy of the code without git has no commit; the output is empty then.
        check=False,
        cwd=Path(__file__).parent,
    )
    return describe.stdout.strip()
