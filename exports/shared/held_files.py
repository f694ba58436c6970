"""Where pyiceberg reads and writes files.

The registry imports every file of `formats`, and this one needs pyiceberg, so it lies here.
"""

from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem
from pyiceberg.io import InputFile
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from headcount.schemas.places import Place, open_whole, place


class HeldFiles(PyArrowFileIO):
    """Holds what is written in a folder, under the names that it will have in the destination.

    Metadata of a table names files with their final places, which are written when all are there.
    """

    def __init__(self, folder: Path, destination: Place) -> None:
        super().__init__()
        self.folder, self.destination = folder, destination

    def new_output(self, location: str) -> PyArrowFile:
        """A file that will be held."""
        path = self.folder / location.removeprefix(f"{self.destination}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        return PyArrowFile(location, str(path), LocalFileSystem())

    def new_input(self, location: str) -> "FileOfRun":
        """A file of a run, opened as all that we read."""
        return FileOfRun(location)


class FileOfRun(InputFile):
    """A file of a run. pyarrow would take an answer of a store that is cut for all of it."""

    def open(self, seekable: bool = True) -> Any:  # noqa: ANN401 (a file of Python's or ours)
        """The file, for reading at any place."""
        return open_whole(place(self.location))

    def exists(self) -> bool:
        """Whether there is such a file."""
        return place(self.location).is_file()

    def __len__(self) -> int:
        """Its bytes."""
        with self.open() as content:
            return content.seek(0, 2)
