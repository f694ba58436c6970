"""The tables that describe the runs: what was scanned, which shards are done, what was measured."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.queries.open.descriptions import TEXTS
from headcount.queries.open.run import Run
from headcount.schemas.files.commit import COMMITS
from headcount.schemas.files.run_directory import holds_whole_shard, pc
from headcount.schemas.filled_tables import FILLINGS, columns_of
from headcount.schemas.scans.training_step import training_step
from headcount.schemas.tables import Column


def schema_of(table: str) -> pa.Schema:
    """The columns of a table that describes the runs."""

    def type_of(column: str, name: str) -> pa.DataType:
        if name == "commit":
            return COMMITS.field(column).type
        return pa.list_(pa.string()) if name == "list" else pa.type_for_alias(name)

    columns: dict[str, list[str]] = TEXTS["tables"][table]
    return pa.schema((column, type_of(column, name)) for column, (name, _) in columns.items())


MODEL_SIZES = ("n_layers", "n_heads", "n_kv_heads", "d_model", "d_head")
"""Columns of `runs` that a manifest has under the same names in its description of the model."""

FormulaFacts = dict[str, Any]  # what is said of a formula: unit, range, meaning, and more


def formulas(runs: list[Run], field: str) -> dict[str, FormulaFacts]:
    """Every formula of a field of the scan that some run measured, as its manifest describes it."""
    facts_by_name: dict[str, FormulaFacts] = {}
    # Backwards, so that the first run has the last word.
    for run in reversed(runs):
        facts_by_name |= run.manifest.kinds.get(field, {})
    return facts_by_name


def measured_columns(runs: list[Run]) -> dict[str, dict[str, Column]]:
    """The columns that some run measured or carries from its corpus, by table and name."""
    columns = columns_of({kind.field: formulas(runs, kind.field) for kind in FILLINGS})
    for run in runs:
        for table, carried in run.carried.items():
            columns[table] |= carried
    return columns


def bounds(ends: Sequence[float | str | None] | None) -> tuple[float, float]:
    """A manifest's `range` as two floats: JSON has no infinity, so there it is a word or null."""
    low, high = ends or (None, None)
    return (
        float("-inf") if low is None else float(low),
        float("inf") if high is None else float(high),
    )


def runs_table(runs: list[Run]) -> pa.Table:
    """One row per run."""
    return pa.Table.from_pylist([_run_row(run) for run in runs], schema=schema_of("runs"))


def shards_table(runs: list[Run]) -> pa.Table:
    """One row per shard, done or not."""
    return pa.concat_tables([schema_of("shards").empty_table(), *map(_shards_of_run, runs)])


def statistics_table(runs: list[Run]) -> pa.Table:
    """One row per statistic."""
    return pa.Table.from_pylist(_formula_rows(runs, "statistics"), schema=schema_of("statistics"))


def formulas_table(runs: list[Run]) -> pa.Table:
    """One row per formula of every kind."""
    rows: list[FormulaFacts] = []
    for kind in FILLINGS:
        kind_facts = {"field": kind.field, "kind": kind.word, "table": kind.table.name}
        rows += [row | kind_facts for row in _formula_rows(runs, kind.field)]
    return pa.Table.from_pylist(rows, schema=schema_of("formulas"))


CONTENTS: Mapping[str, Callable[[list[Run]], pa.Table]] = {
    "runs": runs_table,
    "shards": shards_table,
    "statistics": statistics_table,
    "formulas": formulas_table,
}
"""What the tables that describe the runs hold, by name."""


def _formula_rows(runs: list[Run], field: str) -> list[FormulaFacts]:
    rows: list[FormulaFacts] = []
    for name, facts in formulas(runs, field).items():
        # What is not one number has no range, not an infinite one.
        low, high = bounds(facts["range"]) if "range" in facts else (None, None)
        run_count = sum(name in run.manifest.kinds.get(field, {}) for run in runs)
        row = {"name": name, "range_low": low, "range_high": high, "runs": run_count}
        rows.append({**facts, **row})
    return rows


def _run_row(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    scan = run.scan
    done = run.done
    input_options = dict(scan.get("input", {}))
    input_family = input_options.pop("family", None)
    has_corpus = "sources" in manifest.identity.get("corpus", {})
    fates = run.directory.fates() if has_corpus else None
    # Every commit has a list of methods, one for each intervention.
    methods = pc.list_flatten(done["methods"])
    precisions = sorted(pc.unique(pc.struct_field(methods, "precision")).to_pylist())
    layers = f"layers {', '.join(map(str, scan['layers']))}" if scan.get("layers") else "all"
    model_digest = hashlib.sha256(
        json.dumps(manifest.identity.get("model"), sort_keys=True).encode()
    ).hexdigest()
    return {
        **{key: scan.get(key) for key in ("model", "weight_processing", "engine", "n_ctx", "bos")},
        "bos_evidence": manifest.model.get("bos", {}).get("evidence") or None,
        "seed": scan.get("seed"),
        **{key: manifest.model.get(key) for key in MODEL_SIZES},
        "step": training_step(scan.get("model", ""), scan.get("revision")),
        "run_id": run.directory.run_id,
        "name": scan_name(manifest.run_id),
        "created": manifest.created,
        "precision": ", ".join(precisions) or scan.get("precision"),
        "input_family": input_family,
        "input_options": json.dumps(input_options, ensure_ascii=False),
        "documents": fates.line if fates else None,
        "interventions": list(scan.get("interventions", ["none"])),
        "statistics": list(manifest.kinds.get("statistics", {})),
        # A scan that measures all names none.
        "measured_heads": ", ".join(scan.get("heads") or [layers]),
        "shards": manifest.shards,
        "shards_done": len(done),
        # After an extension the last shard may be done and still lack its new sequences.
        "complete": int(holds_whole_shard(manifest, done).sum()) >= manifest.shards,
        "sequences": manifest.sequences,
        "sequences_done": int((done["stop"].to_numpy() - done["start"].to_numpy()).sum()),
        "rows": int(done["rows"].to_numpy().sum()),
        "tokens": int(done["tokens"].to_numpy().sum()),
        "seconds": float(done["seconds"].to_numpy().sum()),
        "tokenizer": manifest.identity.get("tokenizer"),
        "model_fingerprint": model_digest[:12],
        "code": manifest.code,
        "calibrates": manifest.calibrates,
    }


def scan_name(run_id: str) -> str:
    """The scan's name in a run's id: NAME-HASH, or NAME-HASH-2 for the second run of a scan.

    >>> [scan_name(run_id) for run_id in ("my-texts-1a2b3c4d", "my-texts-1a2b3c4d-2", "toy")]
    ['my-texts', 'my-texts', 'toy']
    """
    # Eight digits are a hash without a letter, so a number of a run has at most seven.
    numbered = re.fullmatch(r"(.+-[0-9a-f]{8})-\d{1,7}", run_id)
    name_and_hash = numbered[1] if numbered else run_id
    return name_and_hash.rpartition("-")[0] or name_and_hash


def _shards_of_run(run: Run) -> pa.Table:
    schema, log = schema_of("shards"), run.commit_log
    # A commit says all of a shard, but not what has become of its files since.
    of_commit = [name for name in schema.names if name in log.schema.names]
    done = log.select(of_commit).cast(pa.schema([schema.field(name) for name in of_commit]))
    status = np.where(run.is_whole, "done", "damaged")
    done = done.append_column("status", pa.array(status, pa.string()))
    # Nearly every run has no damage, and may have a million shards.
    if run.damaged_data:
        # The first one last, so that it stays: a shard may have several damaged files.
        problems = {
            shard: f"{damage.path} {damage.why}"
            for damage in reversed(run.damaged_data)
            for shard in damage.shards
        }
        damage = [problems.get(shard) for shard in log["shard"].to_pylist()]
        done = done.append_column("damage", pa.array(damage, pa.string()))
    # Of a shard without a commit, only the place is known.
    shards = np.setdiff1d(np.arange(run.manifest.shards), log["shard"].to_numpy())
    missing: dict[str, Any] = {
        "run_id": [run.directory.run_id] * len(shards),
        "shard": shards,
        "status": ["missing"] * len(shards),
    }
    if shard_size := run.scan.get("sequences_per_shard"):
        # The last shard may be shorter than the others.
        missing["start"] = shards * shard_size
        missing["stop"] = np.minimum((shards + 1) * shard_size, run.manifest.sequences)
    tables = [pa.table(missing, schema=pa.schema([schema.field(name) for name in missing])), done]
    whole = pa.concat_tables([schema.empty_table(), *tables], promote_options="default")
    return whole.sort_by("shard")
