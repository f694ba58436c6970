"""What a shard is measured with besides our code: the device and the libraries."""

import contextlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from headcount.schemas.files.commit import Version

MEASURING_LIBRARIES = (
    "torch", "triton", "transformers", "transformer_lens", "tokenizers", "numpy", "pyarrow",
)  # fmt: skip
"""Libraries that can change a number or its place in a file; those that are not installed are left
out.
"""


@cache
def measuring_versions() -> tuple[Version, ...]:
    """The versions of the libraries that measure, as they are installed here."""
    versions: list[Version] = []
    for library in MEASURING_LIBRARIES:
        try:
            versions.append(Version(library=library, version=version(library)))
        except PackageNotFoundError:
            continue
    return tuple(versions)


@cache
def device_name(device: str) -> str:
    """A device by its kind and its name, for example `cpu AMD EPYC 9B14` or `cuda NVIDIA H100`."""
    return f"{device} {torch.cuda.get_device_name() if device == 'cuda' else _processor()}".strip()


def _processor() -> str:
    """The name of the processor; its architecture if the system does not tell the name."""
    with contextlib.suppress(OSError):  # Only Linux has this file.
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
