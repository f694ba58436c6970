"""Published weights and texts, for the tests that need them; where they are not to be had these
tests skip and say why.
"""

import os
from pathlib import Path

import pytest

from headcount.reproduce.replication import Replication
from headcount.schemas.errors import ModelError
from headcount.workers.model.info.description import find_model
from tests import ROOT

DATA = [ROOT.parent / "shared" / "data", ROOT.parent / "shared" / "data" / "published"]

PARAGRAPH = "attention_sink_profiler/paragraph.txt"
"""The text of attention-sink-profiler, that of `first_keys` and `masked_keys`."""


def weights(model: str) -> str:
    """A model as a scan names it: a directory in HEADCOUNT_MODELS that has the last part of its
    name, or a Hub id.
    """
    local = Path(os.environ.get("HEADCOUNT_MODELS", "")) / Path(model).name
    if "HEADCOUNT_MODELS" in os.environ and local.is_dir():
        return str(local)
    try:
        find_model(model)
    except ModelError:
        pytest.skip(
            f"the weights of {model} are neither in a directory of HEADCOUNT_MODELS nor to be had "
            "from the Hub"
        )
    return model


def data_file(name: str) -> Path:
    """A published file that lies beside the project; without it the test is skipped."""
    for directory in DATA:
        if (directory / name).exists():
            return directory / name
    pytest.skip(f"{name} is not beside the project")


def options_of_text(replication: Replication) -> list[str]:
    """Options that give a replication its authors' text, if that lies beside the project."""
    files = [folder / PARAGRAPH for folder in DATA if (folder / PARAGRAPH).exists()]
    is_of_profiler = replication.text is not None and "paragraph" in replication.text.what
    return ["--text", str(files[0])] if files and is_of_profiler else []


def work_beside_the_texts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a working directory with the project's files and the published texts, those that are
    there.
    """
    for folder in (folder for folder in (ROOT, *DATA) if folder.is_dir()):
        for path in folder.iterdir():
            if not (directory / path.name).exists():
                (directory / path.name).symlink_to(path)
    monkeypatch.chdir(directory)
