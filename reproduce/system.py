"""The systems of the literature: each a file `NAME.toml` of scans, checks, phenomena and figures.

A check compares numbers with published ones, if the model is of the published sizes. A phenomenon
(a sign, an order, a threshold) must hold in every model that it is claimed of.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ScanError, unknown
from schemas.places import reason

SYSTEMS = Path(__file__).parent / "systems"


class Check(BaseModel):
    """Numbers that were published, by name. `sql` gives rows (name, measured value)."""

    # A misspelt key in a file is an error.
    model_config = ConfigDict(extra="forbid", frozen=True)
    sql: str
    published: dict[str, float]
    tolerance: float
    """How far a measured value may lie from the published one."""
    relative: bool = False
    """Whether the tolerance is a share of the published value."""
    sizes: dict[str, int] = {}
    """Sizes of the model that these were published for, if it is not the system's model."""


class Phenomenon(BaseModel):
    """Something that must hold. `sql` gives rows (name, value, whether it holds)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sql: str
    models: tuple[str, ...] = ()
    """Models that it is claimed of. Default: all."""

    @property
    def words(self) -> str:
        """What it claims: the first text in its SQL, or the whole SQL if it has none."""
        # The first column of the SQL is the claim, usually the template of a format().
        text = re.search(r"'(.+?)'", self.sql)
        return text[1] if text else self.sql


class Figure(BaseModel):
    """A picture. `sql` gives rows (series, x, y), or (x, y, value) for a heat map."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: str
    sql: str
    kind: Literal["line", "bar", "heat"] = "line"
    x: str = ""
    y: str = ""


class System(BaseModel):
    """One system of the literature."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    title: str
    source: str
    measured: str
    """What is measured, in a sentence."""
    published_model: str
    """The model whose figures were published, as a scan names it."""
    published_sizes: dict[str, int]
    """Sizes that a model must have for its numbers to be compared, by field of its description."""
    bundled_model: str
    """The miniature that shows the phenomena offline."""
    scan: dict[str, dict[str, Any]]
    """Fields of each scan, by name of the scan. A table `bundled` has those of the miniature.

    With `checkpoints = "step-*"` a scan runs on every such directory inside the model's, and the
    runs are called NAME-DIRECTORY. With `sizes`, a list of tables, a scan runs only on models
    that have the sizes of one of them.
    """
    defaults: dict[str, Any] = {}
    """Fields that all scans share."""
    bundled: dict[str, Any] = {}
    """Fields that differ for the miniature in all scans."""
    view: dict[str, str] = {}
    """Views that checks, phenomena and figures may ask, SQL by name."""
    check: tuple[Check, ...] = ()
    phenomenon: tuple[Phenomenon, ...] = ()
    figure: tuple[Figure, ...] = ()


def systems() -> dict[str, System]:
    """Every system we ship, by name."""
    return {file.stem: read_system(file) for file in sorted(SYSTEMS.glob("*.toml"))}


def read_system(file: Path) -> System:
    """Read one system's file."""
    try:
        return System.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScanError(f"{file}: cannot be read ({reason(error)})") from None
    except ValidationError as error:
        # One mistake is enough for one line.
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ScanError(f"{file}: {place}: {problem['msg']}") from None


def find_systems(names: Iterable[str]) -> dict[str, System]:
    """The systems of these names. A name `FILE.toml` reads a user's own file."""
    shipped_systems = systems()
    selection: dict[str, System] = {}
    for name in names:
        if name.endswith(".toml"):
            selection[Path(name).stem] = read_system(Path(name))
        elif name in shipped_systems:
            selection[name] = shipped_systems[name]
        else:
            raise ScanError(unknown("system", name, shipped_systems))
    return selection
