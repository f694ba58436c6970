"""Files that a scan names as its input, which may come from somebody whom this machine does not
trust: what a scan reads ends up in its run.

An input is a regular file. It does not lie where the system shows what processes hold, and lies in
one of the directories of `HEADCOUNT_INPUT_ROOTS`, if that is set. Links are followed first.
"""

import os
import stat
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any

from headcount.schemas.errors import ScanError, printable
from headcount.schemas.packages import PACKAGE
from headcount.schemas.places import Place, open_whole

ROOTS = "HEADCOUNT_INPUT_ROOTS"
"""Variable with the only directories, separated by `:`, in which local inputs may lie."""

SYSTEM = ("/proc", "/sys", "/dev")
"""Where files show the memory, the environment and the devices of a machine."""

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
"""What is not a regular file, in words."""


def open_input(where: Place) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """An input that is open for reading. What was opened is checked, so no link can be swapped."""
    if not isinstance(where, Path):
        return open_whole(where)
    file = open_regular(where)
    try:
        _check_roots(str(where), _real_path(file, where))
    except BaseException:
        file.close()
        raise
    return file


def open_regular(where: Path) -> BufferedReader:
    """A file that is open for reading and does not show the system's state, wherever it lies."""
    # Without waiting for somebody who writes into a pipe.
    file = os.fdopen(os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        status = os.fstat(file.fileno())
        check_regular(str(where), status.st_mode)
        _check_system(str(where), _real_path(file, where))
        if status.st_dev in _system_devices():
            raise _refused(str(where), "a file system that shows the system's own state")
    except BaseException:
        file.close()
        raise
    return file


def _real_path(file: BufferedReader, where: Path) -> str:
    """Where an open file lies."""
    link = f"/proc/self/fd/{file.fileno()}"
    return os.readlink(link) if os.path.islink(link) else os.path.realpath(where)


def read_input(where: Place) -> bytes:
    """The whole content of an input."""
    with open_input(where) as file:
        return file.read()


def check_regular(path: str, mode: int) -> None:
    """Refuse what is no regular file."""
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise ScanError(f"{printable(path)}: is {kind}; expected a file")


def check_input_directory(directory: Path) -> None:
    """Refuse a directory of inputs, such as a model's, by where all that is in it really lies."""
    check_real_path(str(directory), os.path.realpath(directory))
    # What is no link lies where its directory does. Directories behind links may be whole disks, so
    # nothing is looked for there.
    for folder, folders, files in os.walk(directory):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            if os.path.islink(path):
                check_real_path(path, os.path.realpath(path))


def check_real_path(path: str, real_path: str) -> None:
    """Refuse an input by where it really lies."""
    _check_system(path, real_path)
    _check_roots(path, real_path)


def _check_system(path: str, real_path: str) -> None:
    """Refuse what shows the system's own state."""
    for system in SYSTEM:
        if _is_in(real_path, system):
            raise _refused(path, system)


def _check_roots(path: str, real_path: str) -> None:
    """Refuse what lies outside of the directories of `ROOTS`."""
    roots = [root for root in os.environ.get(ROOTS, "").split(os.pathsep) if root]
    if not roots or any(_is_in(real_path, os.path.realpath(root)) for root in roots):
        return
    if not any(_is_in(real_path, own) for own in _own_files()):
        raise ScanError(
            f"{printable(path)}: lies outside of the directories that {ROOTS} names "
            f"({os.pathsep.join(roots)}); move it there, or add its directory"
        )


def _refused(path: str, where: str) -> ScanError:
    return ScanError(
        f"{printable(path)}: lies in {where}, and what lies there is no input of a scan; expected "
        f"a file outside of {', '.join(SYSTEM)}"
    )


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory.rstrip('/')}/")


@cache
def _own_files() -> list[str]:
    """Our own inputs; a wheel puts the licence beside its metadata."""
    beside = PACKAGE.parent
    own = (PACKAGE / "models", PACKAGE / "reproduce", beside / "LICENSE")
    return [os.path.realpath(path) for path in (*own, *beside.glob("headcount-*.dist-info"))]


@cache
def _system_devices() -> frozenset[int]:
    """The file systems at /proc and /sys, which may be mounted elsewhere, too."""
    devices = {os.stat(path).st_dev for path in SYSTEM[:2] if os.path.ismount(path)}
    return frozenset(devices)
