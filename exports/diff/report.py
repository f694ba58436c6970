"""The page of `headcount diff A B --report FILE`: the report of runs of both sides, and above it
what was said of them.

A side is measured on the sequences that were compared, in a run beside the file. A side that is a
run of these sequences is not measured again.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from headcount.exports.diff.difference import Difference, stored_tokens
from headcount.jobs.api import run_scan
from headcount.jobs.bars import waiting
from headcount.jobs.plan.plan import where_begun
from headcount.queries.ask.asking import open_runs
from headcount.queries.commands.opening import tell_user
from headcount.queries.report.report import write_report
from headcount.schemas.errors import QueryError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import absolute
from headcount.workers.diff.texts import TEXTS, cut_to, default_scan, sample_texts
from headcount.workers.model.info.text_tokenizer import has_tokenizer
from headcount.workers.run_model import RunModels

WEIGHTS = ("adapter", "unused_weights")
"""Fields of a scan that say which of a model's weights are measured."""

OF_A_MODEL = ("model", "revision", "tokenizer", *WEIGHTS)
"""Fields of a scan that say which model is measured."""

CHANGES = """
    SELECT input_family AS input, label AS head, statistic, other AS a, this AS b, change,
        standard_error, q
    FROM run_changes
    WHERE other_run = '{}' AND run_id = '{}' AND intervention = 'none' AND change <> 0
    ORDER BY q NULLS LAST, abs(change / standard_error) DESC NULLS LAST, layer, head, statistic
    LIMIT 10
"""
"""The surest changes from one run to another."""


def write_difference(difference: Difference, output: Path, console: Console) -> None:
    """Measure what is missing, and write the page.

    The runs and their texts lie beside the file, in a folder of its name with `-runs`.
    """
    for run in filter(None, difference.runs):
        if not isinstance(run.path, Path):
            raise QueryError(f"{run.path}: a page needs runs on this machine; bring back a copy")
    folder = output.absolute().with_name(f"{output.stem}-runs")
    pairs = [
        (_run_of(difference, 0, name, folder), _run_of(difference, 1, name, folder))
        for name in difference.inputs
    ]
    difference.runs = pairs[0]
    with tempfile.TemporaryDirectory() as shown, waiting(console, "writing the report"):
        # Links, because the folders of runs may hold others.
        for run in {run.run_id: run for run in chain(*pairs)}.values():
            os.symlink(str(run.path), Path(shown) / run.path.name, target_is_directory=True)
        database = open_runs(shown, tell=tell_user)
        changes = [database.records(CHANGES.format(a.run_id, b.run_id)) for a, b in pairs]
        heading = {"lines": [*difference.lines()], "changes": [*chain(*changes)]}
        write_report(database, output, RunModels(shown), heading)


def _run_of(difference: Difference, side: int, name: str, folder: Path) -> RunDirectory:
    """The run of a side on an input, which is measured if it is not there."""
    own, source, tokens = difference.runs[side], difference.source, difference.inputs[name]
    if own is not None and cut_to(stored_tokens(own), tokens.shape[1]).equal(tokens):
        return own
    fields = source.manifest().scan_fields() if source else _default_scan(difference, name, folder)
    fields = {key: value for key, value in fields.items() if key not in OF_A_MODEL}
    fields |= _model_fields(difference, side)
    fields |= {"out": str(folder), "sequences": len(tokens)}
    # The files of a run's corpus are named from where it was begun.
    with nullcontext() if source is None else where_begun(source, []):
        place = run_scan(
            fields, {}, name=f"{'ab'[side]}-{name.partition(' ')[0]}", replicas=0, cores=0,
            device="auto", address=None, new=False, quiet=False,
        )  # fmt: skip
    return RunDirectory(place)


def _model_fields(difference: Difference, side: int) -> dict[str, Any]:
    """The fields of a scan for the model of a side; texts are read by the input's tokenizer."""
    name, run = difference.names[side], difference.runs[side]
    is_on_disk = run is not None or Path(name).exists()
    model = str(absolute(difference.infos[side].path)) if is_on_disk else name
    fields = {"model": model}
    if run is not None:
        own = run.manifest().scan_fields()
        fields |= {key: own[key] for key in WEIGHTS if key in own}
    if has_tokenizer(difference.reader.tokenizer):
        fields["tokenizer"] = str(absolute(difference.reader.tokenizer))
    return fields


def _default_scan(difference: Difference, name: str, folder: Path) -> dict[str, Any]:
    """The fields of a scan whose sequences are those that are compared by default."""
    reader, n_ctx = difference.reader, difference.n_ctx
    scan = default_scan(reader, n_ctx)
    if name == TEXTS:
        texts = folder / "texts"
        texts.mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(sample_texts(reader, n_ctx)):
            (texts / f"{number:02}.txt").write_text(text, encoding="utf-8")
        scan["input"] = {"family": "text", "files": str(texts / "*.txt")}
    return scan
