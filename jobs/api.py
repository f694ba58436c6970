"""A scan asked for in Python: the same runs as `headcount scan`, from a file or from a dict.

`headcount.scan` calls this, and opens the run.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from headcount.jobs import phases
from headcount.jobs.bars import waiting
from headcount.jobs.corpus.preparation import Preparation
from headcount.jobs.endings import is_a_command
from headcount.jobs.plan.calibration import announce
from headcount.jobs.plan.plan import make_plan, where_begun
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.plan.scan_files import ScanOfCheckpoint, refuse_checkpoints
from headcount.jobs.resources import Resources
from headcount.jobs.run.measuring import run_to_end
from headcount.schemas.arguments import Location, Name, checked
from headcount.schemas.errors import AnotherRunError, RunError, ScanError, counted, printable
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import Place
from headcount.schemas.scans.overrides import override_fields
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import load_scan, parse_scan, read_fields
from headcount.schemas.values import Index, in_toml, shortened
from headcount.workers.process import prepare_process


@checked(ScanError)
def run_scan(
    source: Location | Mapping[str, object],
    fields: Mapping[str, object],
    *,
    name: Name,
    replicas: Index,
    cores: Index,
    device: Literal["auto", "cpu", "cuda"],
    address: Name | None,
    new: bool,
    quiet: bool,
) -> Place:
    """Run a scan to its end, or continue its run; returns where the run lies.

    `headcount.scan` has the defaults.

    `fields` override those of the scan; a dotted name reaches into a table: `input.files`. `name`
    names the run of a dict. The others mean what they mean for `headcount scan`.
    """
    requested = _read(source, fields, name)
    return _run(requested, Resources(replicas, cores, device, address), new, quiet)


class _Requested(NamedTuple):
    """A scan that is asked for."""

    scan: Scan
    name: str
    text: str  # what the run's directory keeps of it


def _run(
    requested: _Requested,
    resources: Resources,
    new: bool = False,
    quiet: bool = False,
    calibrates: str | None = None,
) -> Place:
    """Run a scan; `calibrates` is the run beside which it measures losses, for its manifest. Its
    passes are announced: heads times sequences are many.
    """
    scan, name, text = requested
    prepare_process()
    console = Console(stderr=True, highlight=False, quiet=quiet)
    # Rich draws its bar in Jupyter through ipywidgets, and only if it is told of a terminal.
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None:
        console = Console(stderr=True, highlight=False, quiet=quiet, force_terminal=True)
    resources.check_here()
    with phases.taken(), _advised_here():
        preparation = Preparation(resources, console)
        with waiting(console, "planning"):
            plan = make_plan(scan, name, None, preparation, new, allow_other_code=False)
        if calibrates is not None:
            manifest = plan.manifest.model_copy(update={"calibrates": calibrates})
            plan = replace(plan, manifest=manifest)
        models = None if calibrates is None else announce(plan, resources, console)
        prepare_run(plan, text)
        failures = run_to_end(plan, resources, console, models=models)
    if failures:
        raise RunError(
            f"{plan.run.run_id}: {counted(len(failures), 'shard')} failed, the first with: "
            f"{failures[0].error}; mend the cause, then the same call continues it"
        )
    return plan.run.path


@contextmanager
def _advised_here() -> Iterator[None]:
    """Say how another run is begun here: `headcount scan --new` is of a scan file."""
    try:
        yield
    except AnotherRunError as error:
        # Commands that scan on the way, such as `calibrate`, measure where no run is.
        way = "new=True starts another run"
        if is_a_command():
            way = f"headcount rm {error.run}, and the same command measures it anew"
        raise RunError(f"{error.problem}; {way}") from None


def measure_losses_beside(
    run: RunDirectory, fields: Mapping[str, object], resources: Resources
) -> Place:
    """Measure losses beside a run by a scan, as NAME-calibration, or continue; returns where it
    lies.
    """
    with where_begun(run, []):
        # The name of a run is its id without the hash at the end.
        requested = _read(fields, {}, f"{run.run_id.rpartition('-')[0]}-calibration")
        return _run(requested, resources, calibrates=run.run_id)


def _read(
    source: str | Path | Mapping[str, object], fields: Mapping[str, object], name: str
) -> _Requested:
    overrides = [f"{key}={_toml(value)}" for key, value in fields.items()]
    if isinstance(source, Mapping):
        changed = override_fields(dict(source), overrides)
        # There is no file that the run could keep, so what the dict says is written as one.
        text = "".join(f"{key} = {_toml(value)}\n" for key, value in changed.items())
        refuse_checkpoints(changed)
        return _Requested(parse_scan(changed), name, text)
    file = Path(source)
    refuse_checkpoints(read_fields(file, overrides))
    requested = ScanOfCheckpoint(file, tuple(overrides), load_scan(file, overrides))
    return _Requested(requested.scan, file.stem, requested.text)


def _toml(value: object) -> str:
    """A value as TOML. Texts are quoted as in JSON, whose escapes TOML has too."""
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, Mapping):
        items = [f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if not isinstance(value, bool | int | float):
        raise ScanError(
            f"a field of a scan: expected a text, a number, a list or a dict, got "
            f"{type(value).__name__} {shortened(printable(repr(value)))}"
        )
    return in_toml(value)
