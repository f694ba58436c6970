"""A census of attention heads: `import headcount` for notebooks and programs.

```python
import headcount

runs = headcount.open("runs")
runs.sql("FROM sink_heads LIMIT 5").df()
runs.head("L5H1").show()
rows = headcount.measure(model, tokens)
run = headcount.scan("texts.toml", sequences=500)
```

Importing it takes a hundredth of a second: each name is imported when it is first used. So `open`
needs neither torch nor Ray, and nobody waits for the command line.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - who imports a clone asks no installer
    _needed = "headcount needs Python 3.11 or newer, and this is " + sys.version.split()[0]
    # `python -m headcount` is a command, which ends in one line.
    if sys.argv[:1] == ["-m"]:
        sys.stderr.write("error: " + _needed + "\n")
        sys.exit(2)
    raise ImportError(_needed)

# Type checkers take it for true. `typing` is not imported: until the command's first lines run,
# an interrupt prints a stack trace, and that import is most of the time until then.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any, Literal

    import typer

    from headcount.queries.api import Runs
    from headcount.schemas.errors import HeadcountError as Error
    from headcount.workers.measure_api import measure
    from headcount.workers.model.info.bundled_models import BUNDLED as bundled
    from headcount.workers.tensor_statistics import attention_statistics
    from headcount.workers.trainer_callback import MeasureCallback
    from headcount.workers.watching import watch

    app: typer.Typer
    __version__: str

__all__ = [
    "open", "measure", "watch", "attention_statistics", "scan", "bundled", "MeasureCallback",
    "Error",
]  # fmt: skip

NAMES = {
    "open": ("queries.api", "Runs"),
    "scan": ("jobs.api", "run_scan"),
    "measure": ("workers.measure_api", "measure"),
    "watch": ("workers.watching", "watch"),
    "attention_statistics": ("workers.tensor_statistics", "attention_statistics"),
    "bundled": ("workers.model.info.bundled_models", "BUNDLED"),
    "MeasureCallback": ("workers.trainer_callback", "MeasureCallback"),
    "Error": ("schemas.errors", "HeadcountError"),
}
"""Where each name for notebooks comes from, or what it calls: a module, and the name there."""


def __getattr__(name: str) -> object:
    """A name for notebooks, imported when it is first asked for."""
    if name == "app":
        from importlib import import_module

        return import_module("headcount.commands").command_line()
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        # A clone that is imported from its folder is not installed.
        try:
            return version("headcount")
        except PackageNotFoundError:
            return "not installed"
    if name not in NAMES:
        raise AttributeError(f"module 'headcount' has no attribute {name!r}")
    globals()[name] = value = _imported(name)
    return value


def _imported(name: str) -> Any:  # noqa: ANN401 - each is of another type
    """What a name stands for; an error says which extra of ours brings a missing library."""
    from importlib import import_module

    module, name_there = NAMES[name]
    try:
        return getattr(import_module(f"headcount.{module}"), name_there)
    except ModuleNotFoundError as error:
        extra = "." if name == "open" else ".[scan]"
        raise ModuleNotFoundError(
            f"headcount.{name} needs {error.name}, which is not installed: pip install -e "
            f"'{extra}'",
            name=error.name,
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def open(  # noqa: A001 - that is what it does
    path: str | Path, *, code: str | None = None, memory: str = "50%"
) -> Runs:
    """Open a run directory, or a directory of runs: a path or `s3://…`, live or finished.

    `code` reads only the shards that this code measured. `memory` is what a query may take:
    `4GB`, or a share of the machine's, `50%`. It needs neither torch nor Ray.
    """
    return _imported("open")(path, code=code, memory=memory)


def scan(
    source: str | Path | Mapping[str, object],
    *,
    name: str = "notebook",
    replicas: int = 0,
    cores: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    address: str | None = None,
    new: bool = False,
    quiet: bool = False,
    **fields: object,
) -> Runs:
    """Run a scan to its end, and open its run. A run that was stopped is continued.

    `source` is a scan file or a dict with the same fields. `fields` override some of them:
    `scan("texts.toml", sequences=500)`. `name` names the run of a dict. By default the model runs
    in this process; `replicas` starts as many on Ray. `new` starts another run of the same scan.
    """
    where = {"replicas": replicas, "cores": cores, "device": device, "address": address}
    path = _imported("scan")(source, fields, name=name, **where, new=new, quiet=quiet)
    return open(str(path))
