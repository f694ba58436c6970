"""The front door: the command `headcount`, and `import headcount` for notebooks.

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

if sys.version_info < (3, 11):  # noqa: UP036 - who starts this file asks no installer
    _needed = "headcount needs Python 3.11 or newer, and this is " + sys.version.split()[0]
    if __name__ != "__main__":
        raise ImportError(_needed)
    sys.stderr.write("error: " + _needed + "\n")
    sys.exit(2)

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from headcount.queries.api import Runs
    from headcount.schemas.errors import HeadcountError as Error
    from headcount.workers.measure_api import measure
    from headcount.workers.model.files.bundled_models import BUNDLED as bundled
    from headcount.workers.trainer_callback import MeasureCallback

    app: typer.Typer
    __version__: str

__all__ = ["open", "measure", "scan", "bundled", "MeasureCallback", "Error"]

ROOT = os.path.dirname(os.path.abspath(__file__))
"""Where our rooms lie."""

PYTHON_NAMES = {
    "measure": ("headcount.workers.measure_api", "measure"),
    "bundled": ("headcount.workers.model.files.bundled_models", "BUNDLED"),
    "MeasureCallback": ("headcount.workers.trainer_callback", "MeasureCallback"),
    "Error": ("headcount.schemas.errors", "HeadcountError"),
}
"""Where each name for notebooks comes from: a module, and the name there."""


def _find_own_rooms() -> None:
    """Import our rooms from here before anywhere else.

    Their names are common: a user may have a `jobs.py` or a `models.py` of his own.
    """
    # `python -m headcount` puts the working directory first, where even a `torch.py` may lie.
    if __name__ == "__main__" and not sys.flags.safe_path:
        sys.path[0] = ROOT
    elif sys.path[:1] != [ROOT]:
        sys.path.insert(0, ROOT)


def _leave_at_once(number: int, _: FrameType | None) -> None:
    """End without unwinding: an interrupt during an import would print a stack trace."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


_find_own_rooms()


def __getattr__(name: str) -> object:
    """A name for notebooks, or the command line, imported when it is first asked for."""
    if name == "app":
        return command_line()
    if name == "__version__":
        return _release()
    if name not in PYTHON_NAMES:
        raise AttributeError(f"module 'headcount' has no attribute {name!r}")
    module, name_there = PYTHON_NAMES[name]
    try:
        value: object = getattr(import_module(module), name_there)
    except ModuleNotFoundError as error:
        raise _missing_library(name, error) from None
    globals()[name] = value
    return value


def _release() -> str:
    """The version of the installed package; pyproject.toml has it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headcount")
    except PackageNotFoundError:
        return "not installed"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _missing_library(name: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Say which extra of ours brings a library that is not installed."""
    extra = "." if name == "open" else ".[scan]"
    return ModuleNotFoundError(
        f"headcount.{name} needs {error.name}, which is not installed: pip install -e '{extra}'",
        name=error.name,
    )


def open(  # noqa: A001 - that is what it does
    path: str | Path, *, code: str | None = None, memory: str = "50%"
) -> Runs:
    """Open a run directory, or a directory of runs: a path or `s3://…`, live or finished.

    `code` reads only the shards that this code measured. `memory` is what a question may take:
    `4GB`, or a share of the machine's, `50%`. It needs neither torch nor Ray.
    """
    try:
        from headcount.queries.api import Runs
        from headcount.workers.run_model import RunModel
    except ModuleNotFoundError as error:
        raise _missing_library("open", error) from None

    # Questions know no tokenizers, so the front door hands them the class that opens one.
    return Runs(path, RunModel, code=code, memory=memory)


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
    try:
        from headcount.jobs.api import run_scan
    except ModuleNotFoundError as error:
        raise _missing_library("scan", error) from None

    path = run_scan(
        source,
        fields,
        name=name,
        replicas=replicas,
        cores=cores,
        device=device,
        address=address,
        new=new,
        quiet=quiet,
    )
    return open(str(path))


@contextmanager
def _leaving_at_interrupts() -> Iterator[None]:
    """Within it an interrupt ends the process at once: nothing is started or written yet.

    A program that handles interrupts itself is left alone.
    """
    hears_interrupts = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not hears_interrupts:
        yield
        return
    signal.signal(signal.SIGINT, _leave_at_once)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@cache
def command_line() -> typer.Typer:
    """The command `headcount` with all its subcommands."""
    import typer

    import headcount.exports.commands
    import headcount.exports.scan
    import headcount.jobs.commands.check
    import headcount.jobs.commands.cluster
    import headcount.jobs.commands.corpus
    import headcount.jobs.commands.help_page
    import headcount.jobs.commands.scan
    import headcount.queries.commands.explore
    import headcount.queries.commands.query
    import headcount.queries.commands.text
    import headcount.queries.commands.views
    import headcount.reproduce.reproduce_commands
    import headcount.workers.run_model

    app = typer.Typer(
        cls=headcount.jobs.commands.help_page.PanelledGroup,
        help="A census of attention heads: scan a model over a corpus, ask SQL about every head.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    headcount.jobs.commands.scan.mount(app)
    headcount.jobs.commands.corpus.mount(app)
    headcount.jobs.commands.check.mount(app)
    headcount.jobs.commands.cluster.mount(app)
    # Questions import no models, so the front door hands them the class that opens one.
    headcount.queries.commands.query.mount(app, headcount.workers.run_model.RunModel)
    headcount.queries.commands.explore.mount(app, headcount.workers.run_model.RunModel)
    headcount.queries.commands.text.mount(app, headcount.workers.run_model.RunModel)
    headcount.queries.commands.views.mount(app)
    # An export may first run the scan that it needs, and then try out what it chose.
    headcount.exports.commands.mount(
        app, headcount.exports.scan.run_export_scan, headcount.exports.scan.check_exported_heads
    )
    headcount.reproduce.reproduce_commands.mount(app)

    # A default, and not an annotation: the name typer is not known outside of this function.
    version = typer.Option(
        False,
        "--version",
        "-V",
        callback=_print_version,
        is_eager=True,
        help="Print the release and the fingerprint of the measuring code.",
    )

    @app.callback()
    def front_door(_: bool = version) -> None:  # pyright: ignore[reportUnusedFunction]
        """Options that come before any command."""

    return app


def _print_version(is_wanted: bool) -> None:
    """Print the release and the fingerprint of the code, and end the command."""
    if not is_wanted:
        return
    import typer

    from headcount.workers.provenance.code_fingerprint import code_fingerprint

    print(f"headcount {_release()}, code {code_fingerprint()}")
    raise typer.Exit


def main() -> None:
    """Run the command line; every error is a line and not a stack trace."""
    # OpenMP's threads wait for one another in a loop, and take cores from those they wait for.
    # Beside other programs a scan on all cores was ten times slower than on one. Torch reads the
    # variable when it is loaded; a value of the user's stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with _leaving_at_interrupts():
        from headcount.jobs.endings import ended_in_lines
        from headcount.workers.process import collect_garbage_rarely

        # Before anything large is imported.
        collect_garbage_rarely()
        app = command_line()
    with ended_in_lines():
        app(prog_name="headcount")


if __name__ == "__main__":
    main()
