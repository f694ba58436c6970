"""The command line in this process, in a folder with models and runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.processes import kept_endings
from tests.toys import toy_models as toy
from tests.toys.commands import ended
from tests.toys.toy_runs import Cell, write_run

Command = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and runs, none of which needs a scan.

    `bytes` has 259 tokens, 64 positions, one layer and two heads; `deep` three layers of four.
    """
    shelf = tmp_path_factory.mktemp("shelf")
    (shelf / "my-model").symlink_to(toy.save_byte_model(shelf / "bytes"))
    toy.save_model(shelf / "deep", toy.gpt2())
    toy.save_legacy(shelf / "legacy", "pth")
    toy.save_model(shelf / "llama", toy.family("LlamaConfig"))

    def half(_: object) -> float:
        return 0.5

    for name in ("a-1", "a-2", "b-2"):
        n_ctx = 6 if name == "b-2" else 5
        write_run(shelf / "RUNS", name, {"sink_mass": half}, n_ctx=n_ctx)
    copies: dict[str, Cell] = {"duplicate_score": half, "induction_score": half}
    distant: dict[str, Cell] = {"distant_mass(1,2)": half}
    repeated = {"family": "repeated_random"}
    write_run(shelf / "SCORES", "a-1", copies, **repeated)
    write_run(shelf / "OTHER", "a-1", copies)
    for name, named in (("a-1", "toy"), ("b-1", "other")):
        write_run(shelf / "MIXED", name, copies, model=named)
    write_run(shelf / "HALF", "a-1", copies, **repeated, commit=[0])
    write_run(shelf / "DUO", "a-1", copies | distant, **repeated)
    write_run(shelf / "DUO", "b-1", distant)
    return shelf


@pytest.fixture(scope="session")
def model(shelf: Path) -> Path:
    """A model that reads bytes."""
    return shelf / "bytes"


@pytest.fixture(scope="session")
def loaded_model(model: Path) -> Any:
    """The same, as somebody has loaded it in Python."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """What is called in Python leaves this process as it was."""
    with kept_endings():
        yield


@pytest.fixture
def command() -> Command:
    """Runs `headcount …` in this process: exit code and lines of stderr."""

    def run(*arguments: str | Path) -> tuple[int, list[str]]:
        end = ended(*arguments)
        return end.code, end.stderr.splitlines()

    return run
