"""The formats, a file for each."""

from collections.abc import Mapping

from headcount.exports.shared.registry import FORMATS, ExportFormat
from headcount.schemas.registry import import_files


def export_formats() -> Mapping[str, ExportFormat]:
    """Every format by name, in alphabetical order."""
    # Every file of the package is looked at, so that a format is one file and no further line.
    import_files(__name__, __path__)
    return dict(sorted(FORMATS.items()))
