"""What replicas and dashboards wait for: `python -m benchmarks.at_scale.waiting replica`.

* `replica` (`make scale`): one without a model takes two million tokens a second, which no GPU does
  today, and gives the rows of GPT-2. Which share of its time does it wait, on a disk and on an S3
  server of this machine? How many tokens a second does one thread write as rows?
* `queries`: a compacted run of GPT-2 small over a billion tokens is generated. How long does a
  query of its roll-ups take? How soon does the explorer show a heatmap, and a head's histograms?
* `store`: how many bytes does a token of a corpus take in the token store?
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.at_scale.scale import Idler, begin_run, commit_row
from benchmarks.measured_on import measured_now
from headcount.jobs.cluster.ray_cluster import Resources, connect
from headcount.jobs.plan.plan import Plan
from headcount.jobs.run.ray_replicas import measure_on_ray
from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import open_runs
from headcount.schemas import tables
from headcount.schemas.files.commit import COMMITS, Commit
from headcount.schemas.files.commits import write_segment
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.files.run_directory import data_path
from headcount.schemas.histogram_bins import Axis
from headcount.schemas.kinds import table_schema
from headcount.schemas.statistics import STATISTICS
from headcount.workers.inputs.corpus.documents import Reading, Source
from headcount.workers.inputs.store.extents import extents_of
from headcount.workers.inputs.store.preparation import prepare_extent
from headcount.workers.inputs.store.token_store import TokenStore, read_record
from headcount.workers.measurements.rollups import rolled_up
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from headcount.workers.replica import InterventionMeasurements
from headcount.workers.shard import commit_shard, measure_shard
from tests.pages.browser import chromium
from tests.s3.s3_server import S3Server
from tests.toys.random_model import UNTRAINED, write_random_model

RESULTS = Path(__file__).parent.parent / "results" / "fast_replica.json"

TOKENS_PER_SECOND = 2e6
N_LAYERS, N_HEADS = 12, 12  # of GPT-2 small


class FastReplica(Idler):
    """A replica that takes its tokens at a fixed speed, and gives random numbers for them."""

    drawn: Mapping[int, InterventionMeasurements] = {}
    """By number of sequences: drawing takes longer than two million tokens a second allow."""

    def measure(self, tokens: np.ndarray, *_: object, **__: object) -> InterventionMeasurements:
        """Random numbers between 0 and 1, after the time that the tokens take."""
        deadline = time.perf_counter() + tokens.size / TOKENS_PER_SECOND
        if len(tokens) not in self.drawn:
            measurements = super().measure(tokens)
            generator = np.random.default_rng(0)
            for columns in measurements.tables.values():
                for values in columns.values():
                    values[...] = generator.random(values.shape, np.float32)
                    values[generator.random(values.shape) < 0.01] = np.nan
            self.drawn = {**self.drawn, len(tokens): measurements}
        # Only the first shard, which is drawn, takes longer.
        time.sleep(max(0.0, deadline - time.perf_counter()))
        return self.drawn[len(tokens)]


def share_of_waiting(plan: Plan) -> dict[str, float]:
    """How long a replica waited for shards, as a share of its time."""
    connect(Resources(1, 1, "cpu"))
    shards = np.arange(plan.manifest.shards)
    commits: list[Commit] = []
    for outcome in measure_on_ray(plan, shards, Resources(1, 1, "cpu"), print, FastReplica):
        assert isinstance(outcome, Commit), outcome.error
        commits.append(outcome)
    # The first shard is left out: it draws the numbers, and the replica has not waited before it.
    timed = sorted(commits, key=lambda commit: commit.finished)[1:]
    idle = sum(commit.idle_seconds for commit in timed)
    return {"idle_share": idle / (idle + sum(commit.compute_seconds for commit in timed))}


def written_by_a_thread(plan: Plan) -> list[float]:
    """Millions of tokens that one thread writes in a second of its processor, by shard."""
    measured = measure_shard(FastReplica(plan.info, plan.scan), plan.sequences.shard(0))
    sequences, tokens = measured.input.tokens.shape
    times: list[float] = []
    for shard in range(plan.manifest.shards):
        # The same measurements, as if they were those of another shard.
        of_shard = replace(measured.input, shard=shard, start=shard * sequences)
        began = time.thread_time()
        commit_shard(plan.scan, plan.run, replace(measured, input=of_shard), attempt=1)
        times.append(time.thread_time() - began)
    return [sequences * tokens / 1e6 / seconds for seconds in times[1:]]


def gpt2_scan(directory: Path, n_ctx: int, sequences: int, shard: int) -> dict[str, Any]:
    """Fields of a scan of a model with GPT-2's layers, heads and tokens. It measures nothing."""
    sizes = {"n_layers": N_LAYERS, "n_heads": N_HEADS, "d_head": 1, "d_vocab": 50257}
    model = write_random_model(directory / "model", "bundled:gpt2-mini", sizes, UNTRAINED)
    return {"model": str(model), "n_ctx": n_ctx, "input": {"family": "uniform_random"},
            "sequences": sequences, "sequences_per_shard": shard}  # fmt: skip


def spread(values: Sequence[float], unit: str) -> str:
    """The median and the range, as text."""
    return f"{statistics.median(values):.3g} {unit} ({min(values):.3g} to {max(values):.3g})"


def measure_replica(rounds: int, shards: int, corpus: str | None) -> None:
    """Measure how long the replica waits, print it, keep it."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    of_corpus = {"input": {"family": "pile", "files": [corpus], "packing": "concat"}}
    with tempfile.TemporaryDirectory(prefix="headcount-fast-") as directory, S3Server() as server:
        os.environ.update(server.env())
        fields = gpt2_scan(Path(directory), 1024, 256 * shards, 256) | (of_corpus if corpus else {})
        for name, out in {"disk": directory, "store": "s3://bucket/runs"}.items():
            way = f"{name}, {'corpus' if corpus else 'random tokens'}"
            plans = [begin_run(out, f"{name}{number}", fields) for number in range(rounds)]
            results["waiting"][way] = [share_of_waiting(plan) for plan in plans]
            results["measured"][way] = measured_now()
        if not corpus:
            written = written_by_a_thread(begin_run(directory, "written", fields))
            results["written"] = [{"by_processor": speed} for speed in written]
            results["measured"]["written"] = measured_now()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for way, figures in results["waiting"].items():
        idle = spread([100 * of_round["idle_share"] for of_round in figures], "%")
        print(f"{way}: waits {idle} of its time (wanted: 5 %)")
    speeds = [figures["by_processor"] for figures in results["written"]]
    print(f"one thread writes {spread(speeds, 'million tokens a second')} (wanted: 5)")


N_CTX = 1000
CELLS = N_LAYERS * N_HEADS
SHARD = 64
SHARDS_OF_FILE = 217
"""Shards that compaction merges: two million rows of GPT-2 small."""
SEQUENCES_OF_FILE = SHARD * SHARDS_OF_FILE
LINKED = 24
"""Merged files that are one file on the disk; only the numbers of shards repeat."""

STANDARD = [statistic for statistic in STATISTICS.values() if statistic.standard]
AXES = {statistic.name: Axis(*statistic.range) for statistic in STANDARD}

QUERIES = {
    "heatmap of one statistic": "SELECT layer, head, mean, standard_error FROM head_summaries "
    "WHERE statistic = 'sink_mass' AND intervention = 'none'",
    "all statistics of one head": "FROM head_summaries WHERE layer = 5 AND head = 1",
    "the same by subset of the Pile": "FROM subset_summaries WHERE layer = 5 AND head = 1",
    "quantiles of one statistic": "FROM head_quantiles WHERE statistic = 'entropy'",
    "distribution of one head": "SELECT low, high, sum(count) FROM distributions "
    "WHERE statistic = 'entropy' AND layer = 5 AND head = 1 GROUP BY ALL",
}


def write_run(out: Path, files: int) -> Path:
    """The directory of a compacted run of so many merged files, with roll-ups and samples."""
    plan = begin_run(out, "billion", gpt2_scan(out, N_CTX, files * SEQUENCES_OF_FILE, SHARD))
    run = Path(str(plan.run.path))
    commits: list[dict[str, Any]] = []
    contents: dict[str, pa.Buffer] = {}
    first_files: dict[str, Path] = {}
    for number in range(files):
        is_new = number % LINKED == 0
        if is_new:
            contents = _merged_file(plan, number)
        paths = {name: data_path(name, "none", f"merged-{number:06}.parquet") for name in contents}
        for name, path in paths.items():
            (run / path).parent.mkdir(parents=True, exist_ok=True)
            if is_new:
                (run / path).write_bytes(contents[name])
                first_files[name] = run / path
            else:
                os.link(first_files[name], run / path)
        data_files = [
            {"table": name, "intervention": "none", "path": paths[name], "rows": 0,
             "bytes": content.size, "shards": SHARDS_OF_FILE, "digest": digest_of(content)}
            for name, content in contents.items()
        ]  # fmt: skip
        for shard in range(number * SHARDS_OF_FILE, (number + 1) * SHARDS_OF_FILE):
            of_shard = {"start": shard * SHARD, "stop": (shard + 1) * SHARD, "files": data_files,
                        "rows": SHARD * CELLS, "tokens": SHARD * N_CTX}  # fmt: skip
            commits.append(commit_row(plan, shard) | of_shard)
    (run / "commits").mkdir()
    write_segment(plan.run.commits_directory, pa.Table.from_pylist(commits, COMMITS))
    return run


def _merged_file(plan: Plan, seed: int) -> dict[str, pa.Buffer]:
    """The tables of one merged file, as files."""
    generator = np.random.default_rng(seed)
    sequence = np.arange(SEQUENCES_OF_FILE) + seed * SEQUENCES_OF_FILE
    # Most of the Pile is in few of its parts, and two sequences of five go on with the document of
    # the one before.
    shares = np.arange(1, 23) ** -1.0
    names = [f"Part {part:02}" for part in range(22)]
    parts = generator.choice(names, len(sequence), p=shares / sum(shares))
    document = np.cumsum(generator.random(len(sequence)) < 0.6)
    columns: dict[str, Any] = {
        "input_family": pa.repeat("uniform_random", len(sequence)),
        "shard": sequence // SHARD,
        "sequence": sequence,
        "document": sequence[0] + document,
        "pile_set_name": parts[document - 1],
        "n_tokens": np.full(len(sequence), N_CTX),
        "tokens": [[0]] * len(sequence),
    }
    with_baseline = [statistic.name for statistic in STANDARD if statistic.uniform_baseline]
    columns |= {tables.uniform_column(name): np.full(len(sequence), 0.01) for name in with_baseline}
    sequences = tables.table_of(
        columns, table_schema(tables.SEQUENCES, {STATISTICS.field: STANDARD})
    )
    heads = _head_rows(generator, sequence)
    is_sampled = heads["sequence"].to_numpy() % plan.manifest.sample_stride == 0
    rows_of = {
        tables.HEADS: heads,
        tables.SEQUENCES: sequences,
        tables.ROLLUPS: rolled_up(heads, sequences, AXES),
        tables.SAMPLES: heads.filter(pa.array(is_sampled)),
    }
    contents: dict[str, pa.Buffer] = {}
    for table, rows in rows_of.items():
        whole_rows = tables.with_partitions(rows, plan.run.run_id, "none")
        contents[table.name] = parquet_bytes(whole_rows, table.row_group or 65_536)
    return contents


def _head_rows(generator: np.random.Generator, sequence: np.ndarray) -> pa.Table:
    """Rows of `heads` in the order of a merged file. Sequences of a head differ by a fifth."""
    head = np.repeat(np.arange(CELLS), len(sequence))
    columns: dict[str, Any] = {
        "input_family": pa.repeat("uniform_random", len(head)),
        "shard": np.tile(sequence // SHARD, CELLS),
        "sequence": np.tile(sequence, CELLS),
        "layer": head // N_HEADS,
        "head": head % N_HEADS,
    }
    for name, axis in AXES.items():
        centre = generator.random(CELLS)[head]
        values = centre * np.exp(generator.normal(0, 0.2, len(head)))
        sign = np.where(centre < 0.5, -1, 1) if axis.low < 0 else 1
        values = values.clip(max=1) * axis.high if axis.is_linear else 10 * sign * values
        columns[name] = values.astype(np.float32)
    return tables.table_of(columns, table_schema(tables.HEADS, {STATISTICS.field: STANDARD}))


def measure_queries(out: Path, files: int, rounds: int) -> None:
    """Generate the run, and print how long queries and the explorer take."""
    run = write_run(out, files)
    for table in (tables.HEADS, tables.ROLLUPS, tables.SAMPLES):
        sizes = [file.stat().st_size for file in run.glob(f"{table.name}/*/*.parquet")]
        print(f"{table.name}: {sum(sizes) / 1e6:,.1f} MB in {len(sizes)} files")
    database = open_runs(str(run))
    for name, query in QUERIES.items():
        times: list[float] = []  # The first time, files are checked.
        for _ in range(rounds + 1):
            began = time.perf_counter()
            list(run_query(database, query).batches())
            times.append(1000 * (time.perf_counter() - began))
        print(f"{name}: {spread(times[1:], 'ms')}")
    heatmaps, clicks = zip(*(_explorer_times(run) for _ in range(rounds)), strict=True)
    print(f"explorer, heatmap: {spread(heatmaps, 'ms')}")
    print(f"explorer, click on a head: {spread([*chain(*clicks)], 'ms')}")


# The histograms are drawn when nothing has changed in them for a second and a half.
CLICK = """
const [cell, done] = arguments, began = performance.now();
let quiet = null;
new MutationObserver(() => {
  const milliseconds = performance.now() - began;
  clearTimeout(quiet);
  quiet = setTimeout(() => done(milliseconds), 1500);
}).observe(document.querySelector("[data-hist]").parentElement.parentElement,
           { subtree: true, childList: true, attributes: true });
document.querySelector(`[data-cell="${cell}"]`).dispatchEvent(new Event("click", { bubbles: true }))
"""


def _explorer_times(runs: Path) -> tuple[float, list[float]]:
    """Milliseconds until a new explorer's heatmap is there, and of clicks on heads after that."""
    command = [sys.executable, "-m", "headcount", "explore", str(runs), "--no-open"]
    with (
        tempfile.TemporaryDirectory() as profile,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
    ):
        lines = server.stdout or []
        address = next(match[0] for line in lines if (match := re.search(r"http\S+", line)))
        for driver in chromium(Path(profile)):
            driver.set_script_timeout(60)
            time.sleep(1)  # The server prepares what a page asks first.
            began = time.perf_counter()
            driver.get(address)
            while not driver.execute_script("return document.querySelector('[data-cell]')"):
                time.sleep(0.01)
            heatmap = 1000 * (time.perf_counter() - began)
            time.sleep(6)  # The page draws more by itself.
            clicks = [driver.execute_async_script(CLICK, head) for head in ("5.3", "2.7", "9.1")]
            server.terminate()
            return heatmap, clicks
    raise SystemExit("no browser")


def measure_store(file: Path, tokenizer_folder: Path) -> None:
    """Print how many bytes a token of a file takes, once it is prepared."""
    tokenizer = TextTokenizer(tokenizer_folder, 50257)
    (extent,) = extents_of([Source("jsonl", str(file), file.stat().st_size)])
    with tempfile.TemporaryDirectory() as corpora:
        store = TokenStore.of(Path(corpora), tokenizer, Reading())
        portion = next(prepare_extent(store, extent, tokenizer))
        size = len((store.folder / portion.file_name).read_bytes())
        print(f"{size / read_record(store, portion).tokens:.2f} bytes a token of {file.name}")


def main() -> None:
    """Measure, and print what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["replica", "queries", "store"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=80, help="shards of a replica's round")
    parser.add_argument("--corpus", help="a file of documents, instead of random tokens")
    parser.add_argument("--tokenizer", type=Path, help="the folder of the store's tokenizer")
    parser.add_argument("--files", type=int, default=72, help="merged files; 72 are 10^9 tokens")
    options = parser.parse_args()
    if options.what == "replica":
        measure_replica(options.rounds, options.shards, options.corpus)
    elif options.what == "queries":
        with tempfile.TemporaryDirectory() as directory:
            measure_queries(Path(directory), options.files, options.rounds)
    elif options.corpus is None or options.tokenizer is None:
        parser.error("store needs --corpus FILE and --tokenizer FOLDER")
    else:
        measure_store(Path(options.corpus), options.tokenizer)


if __name__ == "__main__":
    main()
