"""Losses under interventions, which a format measures in runs of their own beside the run."""

from collections.abc import Sequence

import numpy as np

from headcount.exports.source import ExportSource
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.sql_text import text_literal
from headcount.schemas.errors import QueryError, counted
from headcount.schemas.files.places import absolute
from headcount.schemas.files.run_directory import RunDirectory

FEWEST_DOCUMENTS = 4  # half of them choose and the others report, and a standard error needs two


def documents_of(source: ExportSource, sequences: int) -> np.ndarray:
    """The document of each of the first sequences of a run, numbered from 0: `[sequence]`."""
    rows = source.database.rows(
        f"""
        SELECT dense_rank() OVER (ORDER BY document, if(document IS NULL, sequence, NULL)) - 1
        FROM internal.documents
        WHERE {source.condition} AND sequence < {sequences}
        ORDER BY sequence"""
    )
    documents = np.array(rows)[:, 0]
    if documents.max() + 1 < FEWEST_DOCUMENTS:
        raise QueryError(
            f"run {source.run_id}: expected {FEWEST_DOCUMENTS} documents or more in its first "
            f"{counted(len(rows), 'sequence')}, so that half of them choose and the others report, "
            f"got {documents.max() + 1}; raise --sequences, or measure more"
        )
    return documents


def changes_of_loss(
    source: ExportSource, interventions: Sequence[str], sequences: int
) -> tuple[np.ndarray, str]:
    """Loss under each intervention less that of the untouched model, in nats per token, on the
    first sequences of a run: `[intervention sequence]`, and the id of the run that has them.

    That run is NAME-confirmation. It is continued if it is there, and nothing is measured twice.
    """
    # What is not measured needs no torch.
    from headcount.jobs.api import measure_losses_beside
    from headcount.jobs.plan.calibration import scan_of_losses
    from headcount.jobs.resources import Resources

    # Paths would mean something else where the run was begun.
    run = RunDirectory(absolute(source.opened.directory.path))
    fields = scan_of_losses(run, interventions, sequences)
    resources = Resources(replicas=0, device=source.device)
    path = measure_losses_beside(run, fields, "confirmation", resources)
    database = open_runs(path)
    if _what_was_read(database, sequences) != _what_was_read(source.database, sequences, source):
        raise QueryError(
            f"{path}: its model or its sequences are not those of run {source.run_id}; expected "
            "both where they were, as they were"
        )
    rows = database.rows(
        f"""
        SELECT changed.intervention, changed.loss::DOUBLE - untouched.loss
        FROM sequences AS changed
        JOIN sequences AS untouched USING (sequence)
        WHERE untouched.intervention = 'none' AND sequence < {sequences}
        ORDER BY sequence"""
    )
    changes = {text: [change for name, change in rows if name == text] for text in interventions}
    return np.array([*changes.values()], float), RunDirectory(path).run_id


def _what_was_read(
    database: RunDatabase, sequences: int, source: ExportSource | None = None
) -> list[tuple[object, ...]]:
    """The model and the tokens of the first sequences of the only run, or of a source's."""
    only = "true" if source is None else f"run_id = {text_literal(source.run_id)}"
    return database.rows(
        f"""
        SELECT model_fingerprint, sequence, hash(sequences.tokens)
        FROM sequences
        JOIN runs USING (run_id)
        WHERE {only} AND intervention = 'none' AND sequence < {sequences}
        ORDER BY sequence"""
    )


def layer_types_problem(source: ExportSource) -> str | None:
    """Why transformers takes no windows of single layers for the model; None if it does."""
    from headcount.jobs.plan.plan import where_begun
    from headcount.workers.model.files import layer_types
    from headcount.workers.model.files.model_info import find_model

    manifest = source.opened.manifest
    if manifest.model["layout"] != "huggingface":
        return f"the model has a layout of its own ({manifest.model['layout']})"
    scan = manifest.identity["scan"]
    with where_begun(source.opened.directory, []):
        path = find_model(scan["model"], scan.get("revision"))
    return layer_types.layer_types_problem(path)
