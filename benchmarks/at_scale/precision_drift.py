"""How far each precision drifts from float64, statistic by statistic: `make precision`.

It writes docs/internals/precision.md with the verdicts and benchmarks/precision_drift.csv with
every figure.
"""

import argparse
import csv
import json
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.models.granite_swa import GraniteSWAConfig

from benchmarks.measured_on import machine, measured_now
from benchmarks.page import Json, grid, hardware
from headcount.jobs.corpus.preparation import HERE
from headcount.schemas.scans.scan import ACCEPTABLE, FASTEST_ACCEPTABLE, PRECISIONS
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.statistics import STATISTICS
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.info.description import describe, find_model
from headcount.workers.process import prepare_process
from headcount.workers.replica import Replica

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "internals" / "precision.md"
FIGURES = ROOT / "benchmarks" / "precision_drift.csv"
MEASURED_ON = ROOT / "benchmarks" / "results" / "precision.json"
"""The machine, and the size of each case."""

TEXT = {
    "family": "text",
    "files": ["README.md", "docs/*/*.md", "models/*/CARD.md", "CHANGELOG.md"],
    "packing": "concat",
}
BLOCKS = {"family": "repeated_random"}
BACKCOPY = {"family": "backcopy", "text": "bundled:backcopy-3l-mini"}
NEEDLE = {"family": "needle"}
"""Its labels give values to the statistics that read labels."""

SHARP = "gpt2-small-sharp"
"""The model that `gpt2_small_sharp` makes."""
SINKS = "granite-swa-sharp"
"""The model that `granite_swa_sharp` makes. It is in no verdict, because no trained model says how
large its scores and sinks should be. It gives a drift to `sink_gate`.
"""

QUERY = f"""\
SELECT precision, format('{{:.0e}}', p99) AS p99, format('{{:.0e}}', maximum) AS maximum
FROM 'benchmarks/precision_drift.csv'
WHERE model = '{SHARP}' AND statistic = 'sink_mass'
ORDER BY precision_drift.p99, precision
"""
"""The example of the page: one statistic on one model, in every precision."""


class Drift(NamedTuple):
    """How far one statistic is from its float64 value, over all rows of a case."""

    median: float
    p99: float
    """The 99th percentile."""
    maximum: float


DriftByStatistic = Mapping[str, Drift]


@dataclass(frozen=True)
class Case:
    """A model on an input: what is measured, and once it is, how far each precision drifts."""

    model: str
    input: str
    """The input family."""
    sequences: int
    n_ctx: int
    drift: Mapping[str, DriftByStatistic]
    """By precision."""
    commit: str = ""
    """The commit at which it was measured."""

    @property
    def title(self) -> str:
        """The case as the page names it."""
        return f"{self.model} on `{self.input}`"


# The models


def gpt2_small_sharp(path: Path, largest: float = 16.0, n_layers: int = 12) -> Path:
    """GPT-2 small's shape with random weights whose pre-softmax scores have GPT-2's size,
    and gpt2-mini's tokens.

    Head h of each layer draws W_Q and W_K so that S has the standard deviation `largest^(h/11)`: 1
    to 16, with single scores beyond ±100.
    """
    token_info = describe(find_model("bundled:gpt2-mini"))
    config = GPT2Config(
        vocab_size=token_info.d_vocab,
        bos_token_id=token_info.bos_token_id,
        eos_token_id=token_info.eos_token_id,
        n_layer=n_layers,
    )
    d_model, n_heads = config.n_embd, config.n_head
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(config)
    # After a layer norm the stream has variance 1, so weights of variance σ² give
    # std S = d_model · σ².
    score_std = torch.logspace(0, np.log10(largest), n_heads)
    weight_std = (score_std / d_model).sqrt().repeat_interleave(d_model // n_heads)
    with torch.no_grad():
        for block in model.transformer.h:
            # The first two thirds of the columns are W_Q and W_K; W_V stays as it is.
            query_key = block.attn.c_attn.weight[:, : 2 * d_model]
            query_key.copy_(torch.randn_like(query_key) * weight_std.repeat(2))
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((Path(token_info.path) / name).read_bytes())
    return path


def granite_swa_sharp(path: Path, largest: float = 16.0) -> Path:
    """A small Granite with random weights: learned sinks, windows and shared keys.

    Head h draws W_Q so that S has the standard deviation `largest^(h/7)`: 1 to 16.
    """
    n_heads, d_head = 8, 16
    d_model = n_heads * d_head
    config = GraniteSWAConfig(
        vocab_size=192,
        hidden_size=d_model,
        intermediate_size=2 * d_model,
        num_hidden_layers=4,
        num_attention_heads=n_heads,
        num_key_value_heads=2,
        attention_multiplier=d_head**-0.5,
        max_position_embeddings=128,
        sliding_window=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    # After a norm the stream has variance 1, so W_K of variance 1/d_model gives keys of variance 1.
    score_std = torch.logspace(0, np.log10(largest), n_heads).repeat_interleave(d_head)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.k_proj.weight.normal_(std=d_model**-0.5)
            attention.q_proj.weight.normal_(std=d_model**-0.5).mul_(score_std[:, None])
            # About as high as the log-sum-exp of a row.
            attention.sinks.normal_(mean=4.0, std=4.0)
    model.save_pretrained(path)
    return path


def scans(sharp: Path, sinks: Path) -> Iterator[dict[str, Any]]:
    """The fields of a scan for each case.

    `sharp` and `sinks` are the directories of `gpt2_small_sharp` and `granite_swa_sharp`.
    """
    yield {"model": "bundled:gpt2-mini", "n_ctx": 192, "input": TEXT}
    yield {"model": "bundled:attn-only-2l-mini", "n_ctx": 50, "input": BLOCKS}
    yield {"model": "bundled:backcopy-3l-mini", "n_ctx": 50, "input": BLOCKS}
    yield {"model": "bundled:backcopy-3l-mini", "n_ctx": 128, "bos": True, "input": BACKCOPY}
    yield {"model": "bundled:needle-mini", "n_ctx": 128, "bos": True, "input": NEEDLE}
    yield {"model": str(sinks), "n_ctx": 128, "bos": True, "input": BLOCKS}
    yield {"model": str(sharp), "n_ctx": 128, "input": TEXT}


def model_name(fields: Mapping[str, Any]) -> str:
    """The name of a scan's model, without its place."""
    return Path(fields["model"].removeprefix("bundled:")).name


# Measuring


def measure_case(fields: dict[str, Any], sequences: int, precisions: Sequence[str]) -> Case:
    """The drift of each precision on the first sequences of a scan."""
    fields = {"bos": False} | fields | {"sequences": sequences, "statistics": "all"}
    info = describe(find_model(fields["model"]))
    source = Sequences(parse_scan(fields), info)
    with tempfile.TemporaryDirectory() as corpora:
        if source.corpus is not None:
            source.use_index(HERE.prepared(source, Path(corpora)))
        shard = source.shard(0)

    def measure(precision: str) -> dict[str, np.ndarray]:
        scan = parse_scan(fields | {"precision": precision})
        return Replica(info, scan).measure(shard.tokens, labels=shard.labels).heads

    # Columns are stored as float32, so a drift below its rounding, 6e-8 of a value, is not seen.
    in_float64 = measure("float64")
    # A statistic that has no value on this input, such as one of repeats on text, has no drift.
    exact = {name: values for name, values in in_float64.items() if np.isfinite(values).any()}
    drift: dict[str, DriftByStatistic] = {}
    for precision in precisions:
        measured = measure(precision)
        drift[precision] = {
            name: drift_of(name, measured[name], values) for name, values in exact.items()
        }
    return Case(
        model_name(fields),
        fields["input"]["family"],
        len(shard.tokens),
        fields["n_ctx"],
        drift,
        machine()["commit"],
    )


def drift_of(statistic: str, values: np.ndarray, exact: np.ndarray) -> Drift:
    """The drift of one statistic's values, where they are defined.

    A probability drifts by |x - exact|, everything else by |x - exact| / max(1, |exact|).
    """
    unit = 1.0 if is_share(statistic) else np.maximum(1, np.abs(exact))
    drift = (np.abs(values - exact) / unit)[np.isfinite(exact)]
    return Drift(float(np.median(drift)), float(np.quantile(drift, 0.99)), float(drift.max()))


# Verdicts


def is_share(statistic: str) -> bool:
    """Whether a statistic is a probability or a share: its range is 0 to 1."""
    return STATISTICS[statistic].range == (0, 1)


def is_judged(statistic: str) -> bool:
    """Whether the limit holds for a statistic: for probabilities and norms."""
    return is_share(statistic) or "norm" in STATISTICS[statistic].unit


def acceptable(drift: DriftByStatistic) -> bool:
    """Whether the 99th percentile of every standard probability and norm is within the limit."""
    return not any(STATISTICS[name].standard for name in beyond_limit(drift))


def beyond_limit(drift: DriftByStatistic) -> list[str]:
    """The probabilities and norms whose 99th percentile is beyond the limit."""
    # `not <=` instead of `>`, so that NaN counts as beyond the limit.
    return [name for name in drift if is_judged(name) and not drift[name].p99 <= ACCEPTABLE]


# Files


def write_figures(cases: Sequence[Case], path: Path) -> None:
    """Write every figure as CSV, one line for each model, input, precision and statistic."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "input", "precision", "statistic", *Drift._fields])
        for case in cases:
            for precision, drift in case.drift.items():
                for statistic, figures in drift.items():
                    # Floats are written in full, so what is read back is equal to the bit.
                    writer.writerow([case.model, case.input, precision, statistic, *figures])


def read_figures(path: Path) -> dict[tuple[str, str], dict[str, dict[str, Drift]]]:
    """The figures of each (model, input), by precision and statistic."""
    figures: dict[tuple[str, str], dict[str, dict[str, Drift]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            drift = Drift(*(float(line[field]) for field in Drift._fields))
            of_case = figures.setdefault((line["model"], line["input"]), {})
            of_case.setdefault(line["precision"], {})[line["statistic"]] = drift
    return figures


def read_cases() -> tuple[Json, list[Case]]:
    """The last measurement: the record of its machine, and its cases."""
    record = json.loads(MEASURED_ON.read_text(encoding="utf-8"))
    figures = read_figures(FIGURES)
    cases = [Case(**case, drift=figures[case["model"], case["input"]]) for case in record["cases"]]
    return record, cases


def write(cases: Sequence[Case]) -> None:
    """Write the figures, what they were measured on, and the page."""
    sizes = [
        {
            "model": case.model,
            "input": case.input,
            "sequences": case.sequences,
            "n_ctx": case.n_ctx,
            "commit": case.commit,
        }
        for case in cases
    ]
    record = measured_now() | {"cases": sizes}
    MEASURED_ON.parent.mkdir(exist_ok=True)
    MEASURED_ON.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_figures(cases, FIGURES)
    PAGE.write_text(page(record, cases), encoding="utf-8")


# The page


def page(record: Json, cases: Sequence[Case]) -> str:
    """The page: the method, the verdicts and what follows from them, in Markdown."""
    precisions = list(cases[0].drift)
    (unjudged,) = (case for case in cases if case.model == SINKS)
    cases = [case for case in cases if case.model != SINKS]
    defaults = " and ".join(
        f"`{precision}` on {device.upper()}" for device, precision in FASTEST_ACCEPTABLE.items()
    )
    header = [
        "precision",
        "products with weights",
        "q·k and A·v",
        "largest drift",
        "model",
        "acceptable",
    ]
    sizes = [_size(case, record["machine"]["commit"]) for case in cases]
    sections = [
        "# Precision",
        _paragraph(
            "How far the statistics of the table `heads` drift from float64 in each value of a "
            "scan's `precision`. Written by `make precision`."
        ),
        "## What is measured",
        _paragraph(
            "A precision names the number format of the factors of products. Sums, norms, "
            "softmax, the residual stream and the statistics are float32 in every precision "
            "(float64 in `float64`, except where transformers always computes in float32: norms "
            "of Llama, Qwen 2 and Gemma 2, and their softmax in the dense engine)."
        ),
        _paragraph(
            "A drift compares one value of one row with its float64 value: absolutely for "
            "probabilities and shares, else relative to the float64 value, or to 1 if that value "
            "is smaller."
        ),
        _paragraph(
            f"A precision is *acceptable* if 99 of 100 values are within {ACCEPTABLE:g}, for "
            "every standard probability and norm, in every case (sequences × tokens):"
        ),
        _list(sizes),
        _paragraph(
            f"`{SHARP}` is GPT-2 small's shape with random weights whose pre-softmax scores are "
            "as large as GPT-2's. The text is this project's documentation. A statistic is left "
            "out of a case whose input does not define it."
        ),
        _paragraph(
            "This CPU has neither float16 nor TF32: factors are rounded and multiplied in float32, "
            "as tensor cores do. bfloat16 is native here, and its results are rounded too."
        ),
        _paragraph(f"Measured on {hardware(record)}."),
        "## Verdicts",
        _paragraph("The largest 99th percentile of a standard probability or norm in any case:"),
        grid(header, (_verdict_row(precision, cases) for precision in precisions)),
        "## What follows",
        _list(
            [
                f'`precision = "auto"` means {defaults}. Scans that need the bridge (`engine = '
                '"dense"`, folded weights) then use `float32` '
                "([why](decisions.md#precision-is-the-format-of-factors)).",
                *(_exceptions(precision, cases) for precision in FASTEST_ACCEPTABLE.values()),
            ]
        ),
        "## Beside the verdicts",
        _paragraph(
            f"{_size(unjudged, unjudged.commit)}. It has learned sinks, windows and shared keys, "
            "so `sink_gate` has figures. Its weights are random and the size of its scores is "
            "arbitrary, so no verdict counts it. Beyond the limit:"
        ),
        _list([_beyond(precision, unjudged) for precision in FASTEST_ACCEPTABLE.values()]),
        "## Every figure",
        _paragraph(
            "[benchmarks/precision_drift.csv](../../benchmarks/precision_drift.csv) has the "
            "median, the 99th percentile (`p99`) and the maximum of each model, input, precision "
            "and statistic. DuckDB reads it from the root of the repository, as here `sink_mass` "
            f"on `{SHARP}`:"
        ),
        f"```sql\n{QUERY}```",
        grid(*answer(QUERY)),
    ]
    return "\n\n".join(sections) + "\n"


def answer(query: str) -> tuple[list[str], list[list[str]]]:
    """The columns and rows that DuckDB answers, at the root of the repository."""
    # An absolute path makes the answer independent of the directory in which this runs.
    quoted_path = str(FIGURES).replace("'", "''")
    query = query.replace("'benchmarks/precision_drift.csv'", f"'{quoted_path}'")
    with duckdb.connect() as connection:
        cursor = connection.execute(query)
        columns = [column[0] for column in cursor.description or []]
        return columns, [[str(value) for value in row] for row in cursor.fetchall()]


def _paragraph(text: str, indent: str = "") -> str:
    """A paragraph in lines of at most 120 characters, the later ones indented."""
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _list(items: Sequence[str]) -> str:
    return "\n".join(_paragraph(f"* {item}", "  ") for item in items)


def _size(case: Case, commit: str) -> str:
    """How much of a case was measured, and at which commit if it is another than the page's."""
    size = f"{case.title}: {case.sequences} × {case.n_ctx} tokens"
    return size if case.commit == commit else f"{size}, at commit {case.commit}"


def _verdict_row(precision: str, cases: Sequence[Case]) -> list[str]:
    """A precision's row: its formats, what drifts most in any case, and the verdict."""
    formats = PRECISIONS[precision]
    worst, statistic, model = max(
        (*_largest_drift(case.drift[precision]), case.model) for case in cases
    )
    is_acceptable = all(acceptable(case.drift[precision]) for case in cases)
    return [
        f"`{precision}`",
        formats.linears,
        formats.scores,
        f"{worst:.2e} `{statistic}`",
        model,
        "**yes**" if is_acceptable else "no",
    ]


def _largest_drift(drift: DriftByStatistic) -> tuple[float, str]:
    """The largest 99th percentile of a standard probability or norm, and whose it is."""
    standard = [name for name in drift if is_judged(name) and STATISTICS[name].standard]
    worst_statistic = max(standard, key=lambda name: drift[name].p99)
    return drift[worst_statistic].p99, worst_statistic


def _exceptions(precision: str, cases: Sequence[Case]) -> str:
    """What a scan may ask for that a default precision does not keep within the limit."""
    largest: dict[str, tuple[float, str]] = {}
    for case in cases:
        drift = case.drift[precision]
        for name in beyond_limit(drift):
            largest[name] = max(largest.get(name, (0.0, "")), (drift[name].p99, case.model))
    if not largest:
        return f"In `{precision}` every probability and norm is within the limit."
    exceptions = [f"`{name}` {p99:.2e} ({model})" for name, (p99, model) in largest.items()]
    return (
        f"In `{precision}` some probabilities and norms that are not standard are beyond the "
        f"limit, at most: {', '.join(exceptions)}."
    )


def _beyond(precision: str, case: Case) -> str:
    """The probabilities and norms of a case that a precision does not keep within the limit."""
    drift = case.drift[precision]
    over_limit = [f"`{name}` {drift[name].p99:.2e}" for name in beyond_limit(drift)]
    return f"`{precision}`: {', '.join(over_limit) or 'nothing'}"


def main() -> None:
    """Measure, write the figures and the page."""
    prepare_process()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=200)
    all_precisions = [name for name in PRECISIONS if name != "float64"]
    parser.add_argument(
        "--precisions", nargs="*", default=all_precisions, help="write nothing if some are left out"
    )
    parser.add_argument(
        "--only", default="", help="measure only models whose name begins so; others stay"
    )
    options = parser.parse_args()
    cases: dict[tuple[str, str], Case] = {}
    if options.only:
        cases = {(case.model, case.input): case for case in read_cases()[1]}
    with tempfile.TemporaryDirectory() as directory:
        sharp = gpt2_small_sharp(Path(directory) / SHARP)
        sinks = granite_swa_sharp(Path(directory) / SINKS)
        for fields in scans(sharp, sinks):
            if not model_name(fields).startswith(options.only):
                continue
            case = measure_case(fields, options.sequences, options.precisions)
            cases[case.model, case.input] = case
            for precision, drift in case.drift.items():
                p99, statistic = _largest_drift(drift)
                print(f"{case.title}: {precision}: {p99:.2e} {statistic}", flush=True)
    if set(options.precisions) == set(all_precisions):
        write(list(cases.values()))


if __name__ == "__main__":
    main()
