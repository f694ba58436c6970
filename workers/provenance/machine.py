"""What a shard is measured with besides our code: the device and the libraries."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from headcount.schemas.files.commit import Version

MEASURING_LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "transformer_lens",
    "tokenizers",
    "numpy",
    "pyarrow",
)
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
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return f"{device} {name}".strip()


def _processor() -> str:
    """The name of the processor; its architecture if the system does not tell the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # Only Linux has this file.
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if names:  # One for each core, all the same.
        return names[0]
    return platform.processor() or platform.machine()
