"""Whether figures and phenomena can fail: for random weights, and for edits that do nothing.

A figure that a model with random weights passes says nothing about the published model. A figure of
an edit that passes if the edit does nothing says nothing about the edit. Each must fail, or say
in one line why it cannot (`passes_random`, `passes_null`). The other way round, a model that is
right must pass: the scatter that the authors give is drawn many times (`scatter_problems`).

* Random weights: a model of the published layers and heads with narrow heads, on few sequences of
  the published scans, compared as if it were the published model.
* Edits that do nothing: the same system, with every edit measured as `none`. What does not change
  depends on no edit. What becomes 0, 1 or 100 is a change, a ratio or a percentage, and is compared
  so. Any other value becomes that of a figure that depends on no edit, the untouched model's: its
  published value is compared.

`python -m reproduce.controls [NAME …]`, or `make controls` for all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import string
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
from rich.console import Console

from jobs.plan import prepare_run
from jobs.ray_cluster import Resources
from jobs.run_loop import run_to_end
from models.random_model import LIVELY, UNTRAINED, write_random_model
from queries.asking import Row, RunDatabase
from reproduce.published_values import PublishedValue
from reproduce.system import Check, System, find_systems, systems
from reproduce.system_runs import open_system_runs, plan_system
from reproduce.verdicts import finite_number, measured_by_name, rows_of
from schemas.errors import HeadcountError, QueryError, RunError
from schemas.intervention import NONE, Intervention
from workers.inputs.text_files import located
from workers.process import prepare_process
from workers.replica import InterventionMeasurements, Replica

SEQUENCES = 6
"""Sequences of each scan. A figure of random weights needs no precision to be wrong."""

MOST_TOKENS = 1024
"""Tokens of each scan, if two sequences have no more: losses over a large vocabulary take time."""

CHARACTERS = string.ascii_letters + string.digits + " .,"
"""Characters of a text that stands for another: 65, as many as the models of characters have."""

DRAWS = 20_000
"""Pairs of a published and a measured value that are drawn for the scatter of one figure."""

LEAST_PASSING = 0.99
"""Share of right models that a figure must pass."""

SAME = 1e-6
"""Relative difference below which two measured values are one."""

NOTHING = (0.0, 1.0, 100.0)
"""What changes, ratios and percentages of an edit that does nothing are."""


@dataclass(frozen=True)
class Control:
    """What one control says of one figure or phenomenon."""

    system: str
    name: str
    control: str
    """random, null or scatter."""
    is_wrong: bool
    """Whether it passes although it must not, and no reason is given."""
    text: str
    """What was seen."""


class NullReplica(Replica):
    """A replica whose edits do nothing: each is measured as `none`, under its own name."""

    _tokens: np.ndarray | None = None
    _measured: InterventionMeasurements | None = None

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Measure the untouched model, once for all interventions of a shard."""
        if self._tokens is not tokens or self._measured is None:
            self._measured = super().measure(tokens, NONE, labels)
            self._tokens = tokens
        method = self._measured.method.model_copy(update={"intervention": str(intervention)})
        return replace(self._measured, method=method)


# Runs


@contextlib.contextmanager
def stand_in_files(system: System) -> Iterator[None]:
    """Work in an empty directory with a file for each that a scan of the system names.

    They hold lines of this project's licence, as if they were of three data sets.
    """
    words = Path(located("bundled:LICENSE")).read_text(encoding="utf-8").split()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        for name in _named_files(system):
            if name.endswith(".txt"):
                letters = "".join(letter for letter in " ".join(words) if letter in CHARACTERS)
                Path(name).write_text(letters + CHARACTERS, encoding="utf-8")
                continue
            lines = ["text,dataset"]
            for row in range(3 * SEQUENCES):
                text = " ".join(words[row * 11 : row * 11 + 400]).replace('"', "")
                lines.append(f'"{text}",{("sst2", "gsm8k", "humaneval")[row % 3]}')
            Path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        yield


def _named_files(system: System) -> set[str]:
    """The files of texts that the scans of a system read from where the command is run."""
    texts = json.dumps([system.defaults, system.scan])
    words = texts.replace('"', "\n").splitlines()
    return {word for word in words if word.endswith((".csv", ".txt")) and "/" not in word}


def short_scans(system: System, sizes: Mapping[str, int | str]) -> System:
    """The system with few sequences, and with the scans that a model of these sizes has."""
    scans: dict[str, dict[str, Any]] = {}
    for name, entry in system.scan.items():
        alternatives = entry.get("sizes")
        if alternatives and not any(
            sizes.get(field) == size for one in alternatives for field, size in one.items()
        ):
            continue
        fields = {key: value for key, value in entry.items() if key != "sizes"}
        source = fields.get("input") or system.defaults.get("input")
        # A corpus that is not here: the miniature reads something else.
        if source is None or source["family"] == "pile":
            fields |= {"input": (system.bundled | entry.get("bundled", {}))["input"]}
        n_ctx = int(fields.get("n_ctx") or system.defaults["n_ctx"])
        few = max(2, min(SEQUENCES, MOST_TOKENS // n_ctx))
        scans[name] = fields | {"sequences": few}
    return system.model_copy(update={"scan": scans, "bundled": {}})


def measured_system(
    system: System, model: str, out: Path, replica_class: type[Replica] = Replica
) -> RunDatabase:
    """The runs of a system on a model, measured now."""
    plans = plan_system(system, model, str(out))
    for plan in plans:
        prepare_run(plan, "")
        resources = Resources(replicas=0, device="cpu")
        console = Console(quiet=True)
        run_to_end(plan, resources, console, replica_class=replica_class, stop_at_failure=True)
    return open_system_runs(system, plans[0].scan.out)


def measured_values(name: str, check: Check, database: RunDatabase) -> dict[str, float | None]:
    """What a check measures, by name. Nothing if these runs lack what its SQL reads."""
    try:
        values = measured_by_name(name, check.sql, database)
    except (RunError, QueryError):
        return {}
    return {key: finite_number(value) for key, value in values.items()}


# Controls


def random_controls(name: str, system: System, directory: Path) -> list[Control]:
    """Figures and phenomena of a model with random weights."""
    controls: list[Control] = []
    for number, sizes in enumerate(_distinct_sizes(system)):
        model = write_random_model(
            directory / f"random-{number}", system.bundled_model, sizes, UNTRAINED
        )
        short = short_scans(system, sizes)
        database = measured_system(short, str(model), directory / f"runs-{number}")
        for check in system.check:
            measured = measured_values(name, check, database)
            for value in check.values:
                if system.sizes_of(check, value) == sizes:
                    controls += _random_control(name, check, value, measured.get(value.name))
        if sizes == system.published_sizes:
            controls += _random_phenomena(name, system, database)
    return controls


def _random_control(
    name: str, check: Check, value: PublishedValue, measured: float | None
) -> list[Control]:
    if not value.is_near(measured):
        return []
    why = check.why_random_passes(value.name)
    text = why or f"published {value.value:.4g}, random weights {measured:.4g}"
    return [Control(name, value.full_name, "random", not why, text)]


def _random_phenomena(name: str, system: System, database: RunDatabase) -> list[Control]:
    controls: list[Control] = []
    for phenomenon in system.phenomenon:
        for claim, value, holds in _phenomenon_rows(name, phenomenon.sql, database):
            if holds:
                why = phenomenon.why_random_passes(claim) or phenomenon.why_random_passes(
                    phenomenon.words
                )
                text = why or f"holds for random weights ({value})"
                controls.append(Control(name, claim, "random", not why, text))
    return controls


def _phenomenon_rows(
    name: str, sql: str, database: RunDatabase
) -> list[tuple[str, float | None, bool]]:
    """Claim, value and whether it holds, in the order of the rows."""
    try:
        rows = rows_of(name, sql, 3, database)
    except (RunError, QueryError):
        return []
    results: list[tuple[str, float | None, bool]] = []
    for claim, value, holds in rows:
        number = finite_number(value)
        is_undefined = value is not None and number is None
        results.append((str(claim), number, bool(holds) and not is_undefined))
    return results


def null_controls(name: str, system: System, directory: Path) -> list[Control]:
    """Figures of edits, if the edits did nothing; and phenomena on the miniature."""
    if not _has_edits(system):
        return []
    controls: list[Control] = []
    for number, sizes in enumerate(_distinct_sizes(system)):
        model = write_random_model(
            directory / f"lively-{number}", system.bundled_model, sizes, LIVELY
        )
        short = short_scans(system, sizes)
        with_edits = measured_system(short, str(model), directory / f"edits-{number}")
        without = measured_system(short, str(model), directory / f"null-{number}", NullReplica)
        controls += _null_figures(name, system, sizes, with_edits, without)
    return controls + null_phenomena(name, system, directory)


def _null_figures(
    name: str,
    system: System,
    sizes: Mapping[str, int | str],
    with_edits: RunDatabase,
    without: RunDatabase,
) -> list[Control]:
    pairs: list[tuple[Check, PublishedValue, float, float]] = []
    for check in system.check:
        edited = measured_values(name, check, with_edits)
        null = measured_values(name, check, without)
        for value in check.values:
            before, after = edited.get(value.name), null.get(value.name)
            if system.sizes_of(check, value) == sizes and before is not None and after is not None:
                pairs.append((check, value, before, after))
    untouched = [
        (check, value, after)
        for check, value, before, after in pairs
        if math.isclose(before, after, rel_tol=SAME, abs_tol=SAME)
    ]
    controls: list[Control] = []
    for check, value, before, after in pairs:
        if math.isclose(before, after, rel_tol=SAME, abs_tol=SAME):
            continue
        null_value = _null_value(check, after, untouched)
        if null_value is not None and value.is_near(null_value):
            why = check.why_null_passes(value.name)
            text = why or f"published {value.value:.4g}, an edit that does nothing {null_value:.4g}"
            controls.append(Control(name, value.full_name, "null", not why, text))
    return controls


def _null_value(
    check: Check, after: float, untouched: Sequence[tuple[Check, PublishedValue, float]]
) -> float | None:
    """The published value of a model whose edits do nothing; None if it was not published."""
    for nothing in NOTHING:
        if math.isclose(after, nothing, rel_tol=SAME, abs_tol=SAME):
            return nothing
    same = [
        (other, value)
        for other, value, measured in untouched
        if math.isclose(after, measured, rel_tol=SAME)
    ]
    # The row of the same check comes first: another may be rounded otherwise.
    same.sort(key=lambda pair: pair[0] is not check)
    return same[0][1].value if same else None


def null_phenomena(
    name: str, system: System, directory: Path, model: str | None = None
) -> list[Control]:
    """Phenomena of edits that hold on the miniature, and hold if the edits do nothing."""
    if not system.phenomenon or not _has_edits(system):
        return []
    model = model or system.bundled_model
    with_edits = measured_system(system, model, directory / "miniature")
    without = measured_system(system, model, directory / "miniature-null", NullReplica)
    controls: list[Control] = []
    for phenomenon in system.phenomenon:
        rows = _phenomenon_rows(name, phenomenon.sql, with_edits)
        null_rows = _phenomenon_rows(name, phenomenon.sql, without)
        for claim, value, holds in null_rows:
            if not holds or _depends_on_no_edit(claim, value, rows):
                continue
            why = phenomenon.why_null_passes(claim) or phenomenon.why_null_passes(phenomenon.words)
            text = why or f"holds under edits that do nothing ({value})"
            controls.append(Control(name, claim, "null", not why, text))
    return controls


def _depends_on_no_edit(
    claim: str, value: SupportsFloat | str | None, rows_with_edits: Iterable[Row]
) -> bool:
    """Whether a phenomenon has the same words and the same number with the edits."""
    null_value = finite_number(value)
    for other_claim, other_value, holds in rows_with_edits:
        if other_claim != claim or not holds:
            continue
        value_with_edits = finite_number(other_value)
        if null_value is None or value_with_edits is None:
            return null_value is value_with_edits
        # DuckDB may add up in another order, so the last bits may differ.
        return math.isclose(null_value, value_with_edits, rel_tol=SAME, abs_tol=SAME)
    return False


def _has_edits(system: System) -> bool:
    fields = [system.defaults, system.bundled, *system.scan.values()]
    named = [edit for entry in fields for edit in entry.get("interventions", [])]
    return any(edit != "none" for edit in named)


def _distinct_sizes(system: System) -> list[dict[str, int | str]]:
    """The sizes of each model that something was published for, each once."""
    sizes: list[dict[str, int | str]] = []
    for check in system.check:
        for value in check.values:
            if system.sizes_of(check, value) not in sizes:
                sizes.append(dict(system.sizes_of(check, value)))
    if system.published_sizes not in sizes:
        sizes.append(dict(system.published_sizes))
    return sizes


def passing_share(value: PublishedValue) -> float:
    """The share of right models that a figure passes, if published and measured values scatter."""
    if not value.standard_error:
        return 1.0
    generator = np.random.default_rng(0)
    draws = generator.standard_normal((2, DRAWS)) * value.standard_error + value.value
    published, measured = draws
    if value.scale == "log10":
        both = (published > 0) & (measured > 0)
        ratio = np.divide(measured, published, out=np.ones(DRAWS), where=both)
        near = both & (np.abs(np.log10(ratio, where=both, out=np.zeros(DRAWS))) <= value.tolerance)
    else:
        unit = np.abs(published) if value.scale == "relative" else 1.0
        near = np.abs(measured - published) <= value.tolerance * unit
    return float(near.mean())


def scatter_problems(name: str, system: System) -> list[Control]:
    """Figures that a right model fails in more than one of a hundred cases."""
    controls: list[Control] = []
    for check in system.check:
        for value in check.values:
            share = passing_share(value)
            # The draws themselves scatter by 0.0007.
            if share < LEAST_PASSING - 0.002:
                text = f"a right model passes in {share:.1%} of cases"
                controls.append(Control(name, value.full_name, "scatter", True, text))
    return controls


def controls_of(name: str, system: System) -> list[Control]:
    """Every control of one system."""
    controls = scatter_problems(name, system)
    with stand_in_files(system), tempfile.TemporaryDirectory() as directory:
        controls += random_controls(name, system, Path(directory))
        controls += null_controls(name, system, Path(directory))
    return controls


def main(words: Sequence[str]) -> int:
    """Print which figures and phenomena pass that must not; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m reproduce.controls", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="systems; none means all")
    parser.add_argument("--reasons", action="store_true", help="also print those with a reason")
    options = parser.parse_args(words)
    prepare_process()
    selection = find_systems(options.names) if options.names else systems()
    wrong = 0
    for name, system in selection.items():
        try:
            controls = controls_of(name, system)
        except HeadcountError as error:
            print(f"{name}: no controls: {error}")
            wrong += 1
            continue
        _print(name, controls, options.reasons)
        wrong += sum(control.is_wrong for control in controls)
    return 1 if wrong else 0


def _print(name: str, controls: Iterable[Control], with_reasons: bool) -> None:
    wrong = [control for control in controls if control.is_wrong]
    excused = [control for control in controls if not control.is_wrong]
    print(f"{name}: {len(wrong)} pass that must not, {len(excused)} with a reason", flush=True)
    for control in [*wrong, *(excused if with_reasons else [])]:
        print(f"  {control.control}: {control.name}: {control.text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
