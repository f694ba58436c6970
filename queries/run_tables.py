"""What the runs say about themselves: which shards count, what was scanned, which statistics were
measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.commits import COMMITS
from schemas.damage import Damage
from schemas.errors import QueryError, RunError, unknown
from schemas.kinds import KINDS, WORDS, carried_columns, columns_of
from schemas.manifest import Manifest
from schemas.places import Place, absolute
from schemas.run_directory import RunDirectory, check_merged, find_runs, holds_whole_shard, pc
from schemas.scan import scan_name
from schemas.tables import Column
from schemas.values import LARGEST_INTEGER

Columns = dict[str, tuple[pa.DataType, str]]

RUNS: Columns = {
    "run_id": (pa.string(), "Run: the name of the scan and the fingerprint of what it measures."),
    "name": (pa.string(), "Name of the scan."),
    "created": (pa.string(), "When the run was started."),
    "model": (pa.string(), "Model, as the scan names it."),
    "weight_processing": (
        pa.string(),
        "raw: as trained. folded: LayerNorm folded in and weights centred; norms differ.",
    ),
    "precision": (
        pa.string(),
        "Number formats of the model's products, as measured; where nothing is done yet, as asked "
        "for.",
    ),
    "engine": (pa.string(), "Engine that the scan asked for: fused or dense."),
    "n_ctx": (pa.int32(), "Tokens in every sequence."),
    "bos": (pa.bool_(), "Whether every sequence begins with the beginning-of-sequence token."),
    "input_family": (pa.string(), "Family of inputs."),
    "input_options": (pa.string(), "Options of the input family, as JSON."),
    "documents": (
        pa.string(),
        "What became of the corpus's documents; NULL where there is no corpus, or nothing was kept.",
    ),
    "interventions": (pa.list_(pa.string()), "Edits of the model; none is the untouched model."),
    "statistics": (pa.list_(pa.string()), "Statistics that were measured."),
    "measured_heads": (
        pa.string(),
        "Heads that the scan names: all, or layers as layers 0, 3, or names as L0H1, L3H7.",
    ),
    "seed": (
        pa.int64(),
        "Seed of synthetic input; NULL where it is 2^63 or more, which older versions took.",
    ),
    "n_layers": (pa.int32(), "Layers of the model."),
    "n_heads": (pa.int32(), "Heads in a layer."),
    "d_model": (pa.int32(), "Width of the residual stream."),
    "d_head": (pa.int32(), "Width of a head."),
    "shards": (pa.int64(), "Shards of the scan."),
    "shards_done": (pa.int64(), "Shards with a commit and files as committed."),
    "complete": (pa.bool_(), "Whether every shard is done."),
    "sequences": (pa.int64(), "Sequences of the scan."),
    "sequences_done": (pa.int64(), "Sequences of the shards that are done."),
    "rows": (pa.int64(), "Rows of the shards that are done."),
    "tokens": (
        pa.int64(),
        "Tokens that went through the model, over all interventions, in the shards that are done.",
    ),
    "seconds": (
        pa.float64(),
        "Seconds of work in the shards that are done, added up over replicas.",
    ),
    "tokenizer": (
        pa.string(),
        "The same for runs with the same tokenizer; NULL where the input reads no text.",
    ),
    "model_fingerprint": (pa.string(), "The same for runs of the same model: names its weights."),
    "code": (pa.string(), "Fingerprint of the code that began the run; shards.code says more."),
}

SHARDS: Columns = {
    "run_id": (pa.string(), "Run."),
    "shard": (pa.int64(), "Shard: the unit of work and of commit."),
    "start": (pa.int64(), "First sequence of the shard."),
    "stop": (pa.int64(), "One past the last sequence of the shard."),
    "status": (
        pa.string(),
        "done, missing (no commit yet) or damaged (a file is not as committed; left out of all "
        "views). Files are held to their size, and to their content once a query has read their "
        "table; `headcount check` reads all of them.",
    ),
    "damage": (pa.string(), "What is wrong with a damaged shard; NULL for the others."),
    "rows": (pa.int64(), "Rows that were committed."),
    "tokens": (pa.int64(), "Tokens that were committed."),
    "seconds": (
        pa.float64(),
        "Seconds that the shard took, from the first forward pass to the last file.",
    ),
    "compute_seconds": (pa.float64(), "Of these, forward passes and reductions."),
    "idle_seconds": (pa.float64(), "Seconds before it in which the replica waited for work."),
    "finished": (pa.timestamp("us", "UTC"), "When it was committed, by the clock of that machine."),
    "host": (pa.string(), "Machine that made it."),
    "replica": (pa.string(), "Replica that made it."),
    "attempt": (pa.int64(), "Attempt that succeeded."),
    "code": (
        pa.string(),
        "Fingerprint of the code that measured it; NULL where the commit does not say.",
    ),
    "device": (pa.string(), "What computed it; NULL where the commit does not say."),
    "versions": (
        COMMITS.field("versions").type,
        "Versions of the libraries that measured it: library, version.",
    ),
    "methods": (
        COMMITS.field("methods").type,
        "How each intervention was measured: intervention, engine, precision, attention (tiles, "
        "kernel or matrix) and the layers whose pattern was built because an edit needs it.",
    ),
    "bad_rows": (pa.list_(pa.string()), "Rows of the corpus that could not be used."),
}

FORMULA: Columns = {
    "unit": (pa.string(), "Unit."),
    "range_low": (pa.float64(), "Smallest possible value."),
    "range_high": (pa.float64(), "Largest possible value."),
    "meaning": (pa.string(), "Meaning, in one sentence."),
    "formula": (pa.string(), "Formula, in index notation."),
    "source": (pa.string(), "Where the definition comes from."),
    "chance": (
        pa.bool_(),
        "Whether sequences.chance_<name> holds what uniform attention would score.",
    ),
    "description": (pa.string(), "Meaning, formula and when it is NULL, on one line."),
    "fingerprint": (pa.string(), "Fingerprint of the formula's code."),
    "runs": (pa.int64(), "Runs that measured it."),
}

STATISTICS: Columns = {"name": (pa.string(), "Statistic: a column of heads."), **FORMULA}

FORMULAS: Columns = {
    "field": (pa.string(), "Field of the scan that names it."),
    "kind": (pa.string(), "What it is: statistic, prediction, profile, weight statistic."),
    "table": (pa.string(), "Table that holds its values."),
    "name": (pa.string(), "Name: of a column, or of what a row is about."),
    "axis": (pa.string(), "What its values run over; NULL if it is one number, or one per token."),
    **FORMULA,
}


@dataclass(frozen=True)
class Run:
    """One run: its manifest, its ledger, and what of it can be read."""

    directory: RunDirectory
    manifest: Manifest
    ledger: pa.Table
    """One row per commit, in shard order."""
    code: str | None
    """The code whose shards are read; all of them where it is none."""
    damaged: list[Damage]
    """Committed files that are not as committed. Their shards are in no view; whoever asks decides
    whether to say so.
    """

    @cached_property
    def whole(self) -> np.ndarray:
        """For each commit, whether all of its files are as committed."""
        broken = [shard for damage in self.damaged for shard in damage.shards]
        return ~np.isin(self.ledger["shard"].to_numpy(), broken)

    @cached_property
    def done(self) -> pa.Table:
        """The commits whose files are as committed."""
        return self.ledger.filter(pa.array(self.whole))

    def files(self, table: str) -> list[str]:
        """Paths of a table's files that count."""
        files = pc.list_flatten(self.done["files"])
        paths = pc.struct_field(files, "path").filter(
            pc.equal(pc.struct_field(files, "table"), table)
        )
        return [f"{self.directory.path}/{path}" for path in pc.unique(paths).to_pylist()]

    def hidden(self, table: str) -> list[int]:
        """Damaged shards whose rows lie in files of a table that count for other shards."""
        if not self.damaged:
            return []
        files = pc.list_flatten(self.ledger["files"])
        shards = self.ledger["shard"].take(pc.list_parent_indices(self.ledger["files"]))
        of_table = pc.equal(pc.struct_field(files, "table"), table)
        paths = pc.struct_field(files, "path").filter(of_table)
        whole = pa.array(self.whole).take(pc.list_parent_indices(self.ledger["files"]))
        whole = whole.filter(of_table)
        counted = pc.is_in(paths, pc.unique(paths.filter(whole)))
        return pc.unique(shards.filter(of_table).filter(pc.and_not(counted, whole))).to_pylist()

    @property
    def codes(self) -> list[str]:
        """The code of every shard that is done, each once; before the first shard, the code that
        began the run.
        """
        codes = [code or self.manifest.code for code in pc.unique(self.done["code"]).to_pylist()]
        return list(dict.fromkeys(codes)) or [self.manifest.code]

    def shards_of(self, code: str) -> str:
        """The shards that some code measured, in words."""
        codes = self.done["code"].to_pylist()
        own = [c in (code, "" if code == self.manifest.code else code) for c in codes]
        shards = self.done["shard"].to_numpy()[own]
        if len(shards) == 1:
            return f"shard {shards[0]}"
        return f"{len(shards):,} shards from {shards.min()} to {shards.max()}"

    def named(self, code: str, within: bool) -> str:
        """The run, or `within` it the shards that some code measured."""
        if within:
            return f"{self.shards_of(code)} of run {self.directory.run_id}, by code {code}"
        return f"run {self.directory.run_id}"

    @property
    def scan(self) -> dict[str, Any]:
        """The resolved scan."""
        return self.manifest.identity.get("scan", {})


def read_runs(path: Place, code: str | None = None) -> tuple[list[Run], list[RunError]]:
    """Read the manifests and ledgers at `path`; only the shards that `code` measured, if it is
    given. Runs that cannot be read are left out, unless there is no other.
    """
    runs: list[Run] = []
    unreadable: list[RunError] = []
    for directory in find_runs(absolute(path)):
        try:
            runs.append(read_run(directory, code))
        except RunError as error:
            unreadable.append(error)
    if not runs:
        raise unreadable[0]
    _same_meanings(runs)
    return runs, unreadable


def read_run(directory: RunDirectory, code: str | None) -> Run:
    """Read a manifest and a ledger."""
    manifest, ledger = directory.manifest(), directory.ledger()
    check_merged(ledger)
    if code is not None:
        codes = [said or manifest.code for said in ledger["code"].to_pylist()]
        if code not in codes:
            raise QueryError(f"run {directory.run_id}: {unknown('code', code, set(codes))}")
        ledger = ledger.filter(pa.array([said == code for said in codes], pa.bool_()))
    return Run(directory, manifest, ledger, code, directory.damaged_files([ledger]))


def _same_meanings(runs: list[Run]) -> None:
    """Refuse runs, or shards of one run, that use one name for two things."""
    first: dict[tuple[str, str], tuple[Run, str, str]] = {}
    for run in runs:
        for code in run.codes:
            meanings = run.manifest.meanings(code)
            if meanings is None:
                raise QueryError(
                    f"run {run.directory.run_id}: {run.shards_of(code)} were measured by code "
                    f"{code}, of which its manifest says nothing; compare manifest.json with a copy"
                )
            for field, fingerprints in meanings.items():
                for name, fingerprint in fingerprints.items():
                    key = (WORDS[field], name)
                    other, other_code, known = first.setdefault(key, (run, code, fingerprint))
                    if known != fingerprint:
                        one = other.named(other_code, within=other is run)
                        two = run.named(code, within=other is run)
                        way = (
                            f"--code {code} reads the latter alone"
                            if other is run
                            else "query one run directory at a time"
                        )
                        raise QueryError(
                            f"{WORDS[field]} {name!r} has one formula in {one} ({known}) and "
                            f"another in {two} ({fingerprint}); {way}"
                        )


def formulas(runs: list[Run], field: str) -> dict[str, dict[str, Any]]:
    """Every formula of a field of the scan that some run measured, as its manifest describes it."""
    return {
        name: entry
        for run in reversed(runs)
        for name, entry in run.manifest.kinds.get(field, {}).items()
    }


def measured_columns(runs: list[Run]) -> dict[str, dict[str, Column]]:
    """The columns that some run measured or carries from its corpus, by table and name."""
    columns = columns_of({kind.field: formulas(runs, kind.field) for kind in KINDS})
    carried = [field for run in runs for field in run.scan.get("input", {}).get("columns") or []]
    for table, more in carried_columns(carried).items():
        columns[table] |= more
    return columns


def bounds(entry: dict[str, Any]) -> tuple[float, float]:
    """The range of a statistic; JSON has no infinity, so a manifest writes it as a word or as null."""
    low, high = entry.get("range") or (None, None)
    return (
        float("-inf") if low is None else float(low),
        float("inf") if high is None else float(high),
    )


def runs_table(runs: list[Run]) -> pa.Table:
    """One row per run."""
    return _table(RUNS, [_run_row(run) for run in runs])


def shards_table(runs: list[Run]) -> pa.Table:
    """One row per shard, done or not."""
    return pa.concat_tables([_schema(SHARDS).empty_table(), *map(_shards, runs)])


def statistics_table(runs: list[Run]) -> pa.Table:
    """One row per statistic."""
    return _table(STATISTICS, _formula_rows(runs, "statistics"))


def formulas_table(runs: list[Run]) -> pa.Table:
    """One row per formula of every kind."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        of_kind = {"field": kind.field, "kind": kind.word, "table": kind.table.name}
        rows += [row | of_kind for row in _formula_rows(runs, kind.field)]
    return _table(FORMULAS, rows)


def _formula_rows(runs: list[Run], field: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, entry in formulas(runs, field).items():
        low, high = bounds(entry) if "range" in entry else (None, None)
        count = sum(name in run.manifest.kinds.get(field, {}) for run in runs)
        rows.append({**entry, "name": name, "range_low": low, "range_high": high, "runs": count})
    return rows


def _run_row(run: Run) -> dict[str, Any]:
    manifest, scan, done = run.manifest, run.scan, run.done
    inputs = dict(scan.get("input", {}))
    seed = scan.get("seed")
    fates = run.directory.fates() if "sources" in manifest.identity.get("corpus", {}) else None
    return {
        **{key: scan.get(key) for key in ("model", "weight_processing", "engine", "n_ctx", "bos")},
        # Older versions took seeds that no column of integers holds.
        "seed": seed if seed is None or seed <= LARGEST_INTEGER else None,
        **{key: manifest.model.get(key) for key in ("n_layers", "n_heads", "d_model", "d_head")},
        "run_id": run.directory.run_id,
        "name": scan_name(manifest.run_id),
        "created": manifest.created,
        "precision": ", ".join(_precisions(done)) or scan.get("precision"),
        "input_family": inputs.pop("family", None),
        "input_options": json.dumps(inputs, ensure_ascii=False),
        "documents": fates.line if fates else None,
        "interventions": list(scan.get("interventions", ["none"])),
        "statistics": list(manifest.kinds.get("statistics", {})),
        "measured_heads": _measured_heads(scan),
        "shards": manifest.shards,
        "shards_done": len(done),
        "complete": int(holds_whole_shard(manifest, done).sum()) >= manifest.shards,
        "sequences": manifest.sequences,
        "sequences_done": int((done["stop"].to_numpy() - done["start"].to_numpy()).sum()),
        "rows": int(done["rows"].to_numpy().sum()),
        "tokens": int(done["tokens"].to_numpy().sum()),
        "seconds": float(done["seconds"].to_numpy().sum()),
        "tokenizer": manifest.identity.get("tokenizer"),
        "model_fingerprint": _model_fingerprint(manifest),
        "code": manifest.code,
    }


def _measured_heads(scan: Mapping[str, Any]) -> str:
    """The layers or heads that a scan names; one that names none says nothing of them."""
    if heads := scan.get("heads"):
        return ", ".join(heads)
    if layers := scan.get("layers"):
        return f"layers {', '.join(map(str, layers))}"
    return "all"


def _precisions(ledger: pa.Table) -> list[str]:
    """The precisions that some commits were measured in."""
    methods = pc.list_flatten(ledger["methods"])
    return sorted(pc.unique(pc.struct_field(methods, "precision")).to_pylist())


def _model_fingerprint(manifest: Manifest) -> str:
    identity = manifest.identity.get("model", manifest.model)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def _shards(run: Run) -> pa.Table:
    """Commits with their status, and a row for each shard that has none."""
    own = [name for name in SHARDS if name not in ("status", "damage")]
    status = pa.array(np.where(run.whole, "done", "damaged"), pa.string())
    known = run.ledger.select(own).append_column("status", status)
    whys: dict[int, str] = {}
    for damage in run.damaged:
        whys |= {s: f"{damage.path} {damage.why}" for s in damage.shards if s not in whys}
    of_shards = [whys.get(shard) for shard in known["shard"].to_pylist()] if whys else None
    whys_column = pa.nulls(len(known), pa.string()) if of_shards is None else pa.array(of_shards)
    known = known.append_column("damage", whys_column)
    for name in ("code", "device"):
        said = pc.if_else(pc.equal(known[name], ""), None, known[name])
        known = known.set_column(known.schema.get_field_index(name), name, said)
    size, total = run.scan.get("sequences_per_shard"), run.manifest.sequences
    missing = np.setdiff1d(np.arange(run.manifest.shards), known["shard"].to_numpy())
    rows: dict[str, Any] = {"run_id": [run.directory.run_id] * len(missing), "shard": missing}
    rows["status"] = ["missing"] * len(missing)
    if size:
        rows |= {"start": missing * size, "stop": np.minimum((missing + 1) * size, total)}
    schema = _schema(SHARDS)
    arrays = [
        pa.array(rows[f.name], f.type) if f.name in rows else pa.nulls(len(missing), f.type)
        for f in schema
    ]
    both = [known.select(schema.names).cast(schema), pa.Table.from_arrays(arrays, schema=schema)]
    return pa.concat_tables(both).sort_by("shard")


def _schema(columns: Columns) -> pa.Schema:
    return pa.schema([(name, type_) for name, (type_, _) in columns.items()])


def _table(columns: Columns, rows: list[dict[str, Any]]) -> pa.Table:
    content = [{name: row.get(name) for name in columns} for row in rows]
    return pa.Table.from_pylist(content, schema=_schema(columns))
