"""Where pyiceberg reads and writes files.

The registry imports every file of `formats`, and this one needs pyiceberg, so it lies here.
"""

from pathlib import Path

from pyarrow.fs import LocalFileSystem
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from headcount.schemas.places import Place, StorePath, place


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

    def new_input(self, location: str) -> PyArrowFile:
        """A file of a run, through the same file system as all that we read."""
        where = place(location)
        if isinstance(where, StorePath):
            return PyArrowFile(location, where.key, where.filesystem)
        return PyArrowFile(location, location, LocalFileSystem())
