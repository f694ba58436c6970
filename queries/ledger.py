"""What the runs say about themselves: which shards count, what was scanned, which statistics were measured."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.errors import QueryError
from schemas.runs import Commit, Manifest, RunDirectory, find_runs

Columns = dict[str, tuple[pa.DataType, str]]

RUNS: Columns = {
    "run_id": (pa.string(), "Run: the name of the scan and the fingerprint of what it measures."),
    "name": (pa.string(), "Name of the scan."),
    "created": (pa.string(), "When the run was started."),
    "model": (pa.string(), "Model, as the scan names it."),
    "weights": (pa.string(), "raw: as trained. folded: LayerNorm folded in and weights centred; norms differ."),
    "precision": (
        pa.string(),
        "Number formats of the model's products, as measured; where nothing is done yet, as asked for.",
    ),
    "engine": (pa.string(), "Engine that the scan asked for: fused or dense."),
    "n_ctx": (pa.int32(), "Tokens in every sequence."),
    "bos": (pa.bool_(), "Whether every sequence begins with the beginning-of-sequence token."),
    "input_family": (pa.string(), "Family of inputs."),
    "input_options": (pa.string(), "Options of the input family, as JSON."),
    "interventions": (pa.list_(pa.string()), "Edits of the model; none is the untouched model."),
    "statistics": (pa.list_(pa.string()), "Statistics that were measured."),
    "seed": (pa.int64(), "Seed of synthetic input."),
    "n_layers": (pa.int32(), "Layers of the model."),
    "n_heads": (pa.int32(), "Heads in a layer."),
    "d_model": (pa.int32(), "Width of the residual stream."),
    "d_head": (pa.int32(), "Width of a head."),
    "shards": (pa.int64(), "Shards of the scan."),
    "shards_done": (pa.int64(), "Shards with a commit and whole files."),
    "complete": (pa.bool_(), "Whether every shard is done."),
    "sequences": (pa.int64(), "Sequences of the scan."),
    "sequences_done": (pa.int64(), "Sequences of the shards that are done."),
    "rows": (pa.int64(), "Rows of the shards that are done."),
    "tokens": (pa.int64(), "Tokens that went through the model, over all interventions, in the shards that are done."),
    "seconds": (pa.float64(), "Seconds of work in the shards that are done, added up over replicas."),
    "model_fingerprint": (pa.string(), "The same for runs of the same model: names its weights."),
    "code": (pa.string(), "Fingerprint of the code that made the run."),
}

SHARDS: Columns = {
    "run_id": (pa.string(), "Run."),
    "shard": (pa.int64(), "Shard: the unit of work and of commit."),
    "start": (pa.int64(), "First sequence of the shard."),
    "stop": (pa.int64(), "One past the last sequence of the shard."),
    "status": (
        pa.string(),
        "done, missing (no commit yet) or damaged (a committed file is gone or broken; left out of all views).",
    ),
    "rows": (pa.int64(), "Rows that were committed."),
    "tokens": (pa.int64(), "Tokens that were committed."),
    "seconds": (pa.float64(), "Seconds that the shard took, from the first forward pass to the last file."),
    "compute_seconds": (pa.float64(), "Of these, forward passes and reductions."),
    "idle_seconds": (pa.float64(), "Seconds before it in which the replica waited for work."),
    "host": (pa.string(), "Machine that made it."),
    "attempt": (pa.int64(), "Attempt that succeeded."),
    "engine": (pa.string(), "Engine that measured it."),
    "precision": (pa.string(), "Number formats it was measured in."),
    "bad_rows": (pa.list_(pa.string()), "Rows of the corpus that could not be used."),
}

STATISTICS: Columns = {
    "name": (pa.string(), "Statistic: a column of heads."),
    "unit": (pa.string(), "Unit."),
    "range_low": (pa.float64(), "Smallest possible value."),
    "range_high": (pa.float64(), "Largest possible value."),
    "meaning": (pa.string(), "Meaning, in one sentence."),
    "formula": (pa.string(), "Formula, in index notation."),
    "source": (pa.string(), "Where the definition comes from."),
    "chance": (pa.bool_(), "Whether sequences.chance_<name> holds what uniform attention would score."),
    "description": (pa.string(), "Meaning, formula and when it is NULL, on one line."),
    "fingerprint": (pa.string(), "Fingerprint of the formula's code."),
    "runs": (pa.int64(), "Runs that measured it."),
}


@dataclass
class Run:
    """One run: its manifest, its commits, and which of them can be read."""

    directory: RunDirectory
    manifest: Manifest
    done: list[Commit] = field(default_factory=list)
    damaged: list[Commit] = field(default_factory=list)

    def files(self, table: str) -> list[str]:
        """Absolute paths of a table's files that count."""
        home = self.directory.path
        return [f"{home}/{file.path}" for c in self.done for file in c.files if file.table == table]

    @property
    def scan(self) -> dict[str, Any]:
        """The resolved scan."""
        return self.manifest.identity.get("scan", {})


def read_runs(path: Path) -> list[Run]:
    """Read the manifests and commits at `path`, and warn on stderr of shards whose files are damaged."""
    # A relative "." has no name, and the name of a run directory is its run_id.
    runs = [_read_run(directory) for directory in find_runs(path.resolve())]
    for run in runs:
        if run.damaged:
            names = [next(run.directory.damaged_files(commit)) for commit in run.damaged]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            print(
                f"warning: run {run.directory.run_id}: {names[0]}{more} is damaged (not as committed); its shard is "
                "left out of every view. Run the same scan again to measure it anew.",
                file=sys.stderr,
            )
    _same_formulas(runs)
    return runs


def _read_run(directory: RunDirectory) -> Run:
    run = Run(directory, directory.manifest())
    for commit in directory.commits():
        whole = next(directory.damaged_files(commit), None) is None
        (run.done if whole else run.damaged).append(commit)
    return run


def _same_formulas(runs: list[Run]) -> None:
    """Refuse runs that use one column name for two formulas."""
    first: dict[str, tuple[str, str]] = {}
    for run in runs:
        for name, statistic in run.manifest.statistics.items():
            fingerprint = statistic.get("fingerprint", "")
            other, known = first.setdefault(name, (run.directory.run_id, fingerprint))
            if known != fingerprint:
                raise QueryError(
                    f"column {name!r} has one formula in run {other} ({known}) and another in run "
                    f"{run.directory.run_id} ({fingerprint}); query one run directory at a time"
                )


def measured(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Every statistic that some run measured, as its manifest describes it."""
    return {name: entry for run in reversed(runs) for name, entry in run.manifest.statistics.items()}


def bounds(entry: dict[str, Any]) -> tuple[float, float]:
    """The range of a statistic; JSON has no infinity, so a manifest writes it as a word or as null."""
    low, high = entry.get("range") or (None, None)
    return (float("-inf") if low is None else float(low), float("inf") if high is None else float(high))


def runs_table(runs: list[Run]) -> pa.Table:
    """One row per run."""
    return _table(RUNS, [_run_row(run) for run in runs])


def shards_table(runs: list[Run]) -> pa.Table:
    """One row per shard, done or not."""
    return _table(SHARDS, [row for run in runs for row in _shard_rows(run)])


def statistics_table(runs: list[Run]) -> pa.Table:
    """One row per statistic."""
    rows = []
    for name, entry in measured(runs).items():
        low, high = bounds(entry)
        count = sum(name in run.manifest.statistics for run in runs)
        rows.append({**entry, "name": name, "range_low": low, "range_high": high, "runs": count})
    return _table(STATISTICS, rows)


def _run_row(run: Run) -> dict[str, Any]:
    manifest, scan = run.manifest, run.scan
    inputs = dict(scan.get("input", {}))
    return {
        **{key: scan.get(key) for key in ("model", "weights", "engine", "n_ctx", "bos", "seed")},
        **{key: manifest.model.get(key) for key in ("n_layers", "n_heads", "d_model", "d_head")},
        "run_id": run.directory.run_id,
        "name": manifest.run_id.rpartition("-")[0] or manifest.run_id,
        "created": manifest.created,
        "precision": ", ".join(sorted({c.precision for c in run.done})) or scan.get("precision"),
        "input_family": inputs.pop("family", None),
        "input_options": json.dumps(inputs, ensure_ascii=False),
        "interventions": list(scan.get("interventions", ["none"])),
        "statistics": list(manifest.statistics),
        "shards": manifest.shards,
        "shards_done": len(run.done),
        "complete": len(run.done) >= manifest.shards,
        "sequences": manifest.sequences,
        "sequences_done": sum(c.stop - c.start for c in run.done),
        "rows": sum(c.rows for c in run.done),
        "tokens": sum(c.tokens for c in run.done),
        "seconds": sum(c.seconds for c in run.done),
        "model_fingerprint": _model_fingerprint(manifest),
        "code": manifest.code,
    }


def _model_fingerprint(manifest: Manifest) -> str:
    identity = manifest.identity.get("model", manifest.model)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def _shard_rows(run: Run) -> Iterable[dict[str, Any]]:
    known = {c.shard: ("done", c) for c in run.done} | {c.shard: ("damaged", c) for c in run.damaged}
    size, total = run.scan.get("sequences_per_shard"), run.manifest.sequences
    for shard in sorted(known.keys() | set(range(run.manifest.shards))):
        if shard in known:
            status, commit = known[shard]
            yield {**commit.model_dump(exclude={"files"}), "status": status}
        else:
            span = {"start": shard * size, "stop": min((shard + 1) * size, total)} if size else {}
            yield {"run_id": run.directory.run_id, "shard": shard, "status": "missing", **span}


def _table(columns: Columns, rows: list[dict[str, Any]]) -> pa.Table:
    schema = pa.schema([(name, type_) for name, (type_, _) in columns.items()])
    return pa.Table.from_pylist([{name: row.get(name) for name in columns} for row in rows], schema=schema)
