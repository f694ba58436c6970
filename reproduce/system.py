"""The systems of the literature: each a file `NAME.toml` of scans, checks, phenomena and figures.

Its checks compare numbers with published ones, where the model is the published one; its phenomena
(signs, orders, thresholds) must hold in any model it names.
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
    """Numbers that were published: `sql` gives rows (name, value), and `published` a value for each
    name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    sql: str
    published: dict[str, float]
    tolerance: float
    relative: bool = False
    """Whether the tolerance is a part of the published value."""
    sizes: dict[str, int] = {}
    """Sizes of the model that these were published for, if it is not the system's."""


class Phenomenon(BaseModel):
    """Something that must hold: `sql` gives rows (name, value, whether it holds)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sql: str
    models: tuple[str, ...] = ()
    """Models that it is claimed of. Default: all."""

    @property
    def words(self) -> str:
        """What it claims: the first text in its SQL; the whole SQL if it has none."""
        text = re.search(r"'(.+?)'", self.sql)
        return text[1] if text else self.sql


class Figure(BaseModel):
    """A picture: `sql` gives rows (series, x, y), or (x, y, value) for a heat map."""

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
    """Fields of that model's description, which a model must have for its numbers to be compared."""
    bundled_model: str
    """The miniature that shows the phenomena offline."""
    scan: dict[str, dict[str, Any]]
    """Scans by name; what they share is in `defaults`, and what differs for the miniature in a
    table `bundled`.

    One with `checkpoints = "step-*"` is made of every such directory in the model's own, as
    NAME-DIRECTORY. One with `sizes`, a list of tables, is made only of models that have the sizes
    of one of them.
    """
    defaults: dict[str, Any] = {}
    bundled: dict[str, Any] = {}
    """Fields of every scan that differ for the miniature."""
    view: dict[str, str] = {}
    """Views that checks and figures may ask, by name."""
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
        problem = error.errors()[0]
        raise ScanError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def find_systems(names: Iterable[str]) -> dict[str, System]:
    """Some systems, each by its name or as a file of one's own, `FILE.toml`."""
    shipped = systems()
    selection: dict[str, System] = {}
    for name in names:
        if name.endswith(".toml"):
            selection[Path(name).stem] = read_system(Path(name))
        elif name in shipped:
            selection[name] = shipped[name]
        else:
            raise ScanError(unknown("system", name, shipped))
    return selection
