"""Files that a library writes and that are held in memory, to be written whole later."""

from __future__ import annotations

import io
from typing import Any

from pyiceberg.io import InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.io.pyarrow import PyArrowFileIO

HELD: dict[str, bytes] = {}
"""Content by location. It is filled by one export at a time, which takes it out again."""


class HeldFiles(PyArrowFileIO):
    """Keeps what is written in memory; everything else is read where it lies.

    Metadata of a table names its own files with their final places. So they cannot be written
    beside these and renamed later, as other exports are.
    """

    def new_output(self, location: str) -> OutputFile:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A file that will be held."""
        return HeldOutput(location)

    def new_input(self, location: str) -> InputFile:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A file that is held, or one that lies somewhere."""
        return HeldInput(location) if location in HELD else super().new_input(location)


class HeldInput(InputFile):
    """A held file that is read."""

    def __len__(self) -> int:
        return len(HELD[self.location])

    def exists(self) -> bool:
        """Whether there is such a file."""
        return self.location in HELD

    def open(self, seekable: bool = True) -> InputStream:
        """The file, open for reading."""
        # Its protocol also names the parameters of a stream, which Python's streams do not.
        stream: Any = io.BytesIO(HELD[self.location])
        return stream


class HeldOutput(OutputFile):
    """A file that is held once it is closed."""

    def __len__(self) -> int:
        return len(HELD[self.location])

    def exists(self) -> bool:
        """Whether there is such a file already."""
        return self.location in HELD

    def to_input_file(self) -> InputFile:
        """The same file for reading."""
        return HeldInput(self.location)

    def create(self, overwrite: bool = False) -> OutputStream:
        """The file, open for writing."""
        stream: Any = _HeldStream(self.location)
        return stream


class _HeldStream(io.BytesIO):
    """A stream whose content is held when it is closed."""

    def __init__(self, location: str) -> None:
        super().__init__()
        self.location = location

    def close(self) -> None:
        if not self.closed:
            HELD[self.location] = self.getvalue()
        super().close()
