"""The format `card`: the README with which a run on the Hugging Face Hub can be browsed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from headcount.exports.registry import Exported, Needs, export_format
from headcount.exports.source import ExportSource
from headcount.queries.open.column_facts import Facts, column_facts
from headcount.schemas.errors import QueryError
from headcount.schemas.files.places import Place, names
from headcount.schemas.files.tables import PARTITION_NAMES
from headcount.schemas.scans.kinds import TABLES
from headcount.schemas.scans.scan import safe_name

Configurations: TypeAlias = Mapping[str, Sequence[str]]
"""Patterns of files by the name of a configuration: a table, and an intervention if it has one."""


@export_format(
    "A data set card, so that a run on the Hub is browsable there",
    read_by="Hugging Face Hub and `datasets.load_dataset`",
    source="https://huggingface.co/docs/hub/datasets-manual-configuration",
    writes="file",
    example="runs/run_id=…/README.md",
    load="""\
from datasets import load_dataset

heads = load_dataset("runs/run_id=…", "heads", split="train")
""",
    needs=Needs(every_head=False),
)
def card(source: ExportSource, *, license: str = "unknown") -> Exported:  # noqa: A002
    """README.md with a configuration for each table of a run, and what every column means.

    Write it into the run's directory and push that directory as a data set. Each intervention has
    configurations of its own, because the files do not have that column. The patterns match the
    committed files and no others.

    * `license`: license of the data set, as the Hub names it. The sequences hold the tokens of the
      corpus, so it depends on the corpus.
    """
    # Before any line, because a place that the Hub could not read the files from is refused here.
    configurations = dict(_configurations(source))
    content = "\n".join(
        [
            "---",
            *_front_matter(source, license, configurations),
            "---",
            "",
            *_introduction(source),
            *_tables(source),
        ]
    )
    return Exported(files={"README.md": f"{content}\n".encode()})


def _configurations(source: ExportSource) -> Iterator[tuple[str, list[str]]]:
    """Every table and intervention with files, and the patterns that match them."""
    run, root = _directories(source)
    for table in TABLES:
        by_folder: dict[str, list[str]] = {}
        for path in source.committed_files(table):
            folder, _, name = path.removeprefix(f"{run}/").rpartition("/")
            by_folder.setdefault(folder, []).append(name)
        for folder, committed in by_folder.items():
            # An attempt that died leaves files without a commit. A reader of the Hub must not see
            # them, so the names of the others are listed then.
            present = {file for file in names(run / folder) if file.endswith(".parquet")}
            matching = ["*.parquet"] if present == {*committed} else sorted(committed)
            intervention = folder.partition("intervention=")[2]
            # The text of an intervention may hold parentheses and commas, which are not for names.
            name = table if intervention == "none" else f"{table}-{safe_name(intervention)}"
            yield name, [f"{root}{folder}/{file}" for file in matching]


def _directories(source: ExportSource) -> tuple[Place, str]:
    """The run's directory, and its path seen from where the card lies."""
    run = source.directory
    # The Hub reads patterns from the folder of the card.
    above = source.destination.parent
    if run == above:
        return run, ""
    if not str(run).startswith(f"{above}/"):
        raise QueryError(
            f"{source.destination}: expected a name in the directory of the run or above it, for "
            f"instance {run}/README.md"
        )
    return run, f"{os.path.relpath(str(run), str(above))}/"


def _front_matter(
    source: ExportSource, license_name: str, configurations: Configurations
) -> Iterator[str]:
    """The lines that the Hub reads. JSON writes texts as YAML does."""
    yield f"license: {json.dumps(license_name)}"
    yield f"pretty_name: {json.dumps(f'Attention heads of {source.model_name}')}"
    yield 'tags: ["attention-heads", "interpretability", "headcount"]'
    yield "configs:"
    for name, patterns in configurations.items():
        yield f"- config_name: {json.dumps(name)}"
        # Without a default a reader has to name one of the configurations.
        if name == "heads":
            yield "  default: true"
        yield "  data_files:"
        yield from (f"  - {json.dumps(pattern)}" for pattern in patterns)


def _introduction(source: ExportSource) -> Iterator[str]:
    run = source.run
    yield f"# Attention heads of {source.model_name}"
    yield ""
    yield (
        f"One row for every sequence, layer and head: {run['n_layers']} layers of {run['n_heads']} "
        f"heads over {run['sequences']:,} sequences of {run['n_ctx']:,} tokens "
        f"({run['input_family']}), measured by headcount."
    )
    yield ""
    yield "| what | |"
    yield "|---|---|"
    for name in ("run_id", "precision", "weight_processing", "model_fingerprint", "code"):
        yield f"| {name} | `{run[name]}` |"
    yield f"| interventions | {', '.join(f'`{name}`' for name in run['interventions'])} |"
    yield ""


def _tables(source: ExportSource) -> Iterator[str]:
    """What each column of each table means."""
    for table in TABLES:
        if not source.committed_files(table):
            continue
        facts: Facts = column_facts(source.database.connection, f"FROM {table}")
        stored = source.table(f"SELECT * FROM internal.{table} LIMIT 0").schema
        yield f"## {table}"
        yield ""
        yield "| column | meaning |"
        yield "|---|---|"
        # The files lack the columns that a configuration stands for.
        for field in (field for field in stored if field.name not in PARTITION_NAMES):
            # A bar would begin another cell.
            meaning = facts.get(field.name, {}).get("description", "").replace("|", "\\|")
            yield f"| `{field.name}` | {meaning} |"
        yield ""
