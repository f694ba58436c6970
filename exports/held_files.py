"""Files that pyiceberg writes and that are held in memory, to be written whole later.

The registry imports every file of `formats`, and this one needs pyiceberg, so it lies here.
"""

import io
from typing import Any

from pyiceberg.io import InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO

HELD: dict[str, bytes] = {}  # content by location, filled and emptied by one export at a time


class HeldFiles(PyArrowFileIO):
    """Keeps what is written in memory: metadata of a table names files with their final places."""

    def new_output(self, location: str) -> OutputFile:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A file that will be held."""
        return HeldFile(location)

    def new_input(self, location: str) -> InputFile:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A file that is held, or one that lies somewhere."""
        return HeldFile(location) if location in HELD else super().new_input(location)


class HeldFile(InputFile, OutputFile):
    """A file that is held once it is closed."""

    def __len__(self) -> int:
        return len(HELD[self.location])

    def exists(self) -> bool:
        """Whether there is such a file."""
        return self.location in HELD

    # The protocol of streams names parameters that Python's do not.

    def open(self, seekable: bool = True) -> Any:  # noqa: ANN401
        """The file, open for reading."""
        return io.BytesIO(HELD[self.location])

    def to_input_file(self) -> InputFile:
        """The same file for reading."""
        return self

    def create(self, overwrite: bool = False) -> Any:  # noqa: ANN401
        """The file, open for writing."""
        location = self.location

        class Stream(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    HELD[location] = self.getvalue()
                super().close()

        return Stream()
