"""The format `card`: the README with which a run on the Hugging Face Hub can be browsed."""

import json
import os
from dataclasses import replace

from headcount.exports.formats import export_formats
from headcount.exports.shared.registry import Exported, Needs, Setting, export_format
from headcount.exports.shared.source import ExportSource, problem_of
from headcount.queries.ask.text_tables import value_text
from headcount.schemas.errors import QueryError
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.places import names
from headcount.schemas.scans.scan import safe_name
from headcount.schemas.tables import PARTITION_NAMES


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
    refusal=lambda setting, _: problem_of_place(setting),
)
def card(source: ExportSource, *, license: str = "unknown") -> Exported:  # noqa: A002
    """README.md with a configuration for each table of a run, and what every column means.

    Write it into the run's directory and push that directory as a data set. Each intervention has
    configurations of its own, because the files do not have that column. The patterns match the
    committed files and no others.

    * `license`: license of the data set, as the Hub names it. The sequences hold the tokens of the
      corpus, so it depends on the corpus.
    """
    run = source.run
    configurations = _configurations(source)
    # JSON writes texts as YAML does.
    lines = [
        "---",
        f"license: {json.dumps(license)}",
        f"pretty_name: {json.dumps(f'Attention heads of {source.model_name}')}",
        'tags: ["attention-heads", "interpretability", "headcount"]',
        "configs:",
    ]
    for name, patterns in configurations.items():
        lines.append(f"- config_name: {json.dumps(name)}")
        # Without a default a reader has to name one of the configurations.
        lines += ["  default: true"] if name == "heads" else []
        lines += ["  data_files:", *(f"  - {json.dumps(pattern)}" for pattern in patterns)]
    lines += [
        "---",
        "",
        f"# Attention heads of {source.model_name}",
        "",
        f"One row for every sequence, layer and head: {run['n_layers']} layers of {run['n_heads']} "
        f"heads over {run['sequences']:,} sequences of {run['n_ctx']:,} tokens "
        f"({run['input_family']}), measured by headcount.",
        "",
        "| what | |",
        "|---|---|",
    ]
    for name in ("run_id", "precision", "weight_processing", "model_fingerprint", "code"):
        lines.append(f"| {name} | `{run[name]}` |")
    lines += [f"| interventions | {', '.join(f'`{name}`' for name in run['interventions'])} |", ""]
    lines += _calibration(source)
    lines += _lists(source)
    for table in TABLES:
        if source.opened.files(table):
            lines += [f"## {table}", "", "| column | meaning |", "|---|---|"]
            for column in source.stored_schema(table):
                # A bar would begin another cell.
                meaning = column.metadata[b"doc"].decode().replace("|", "\\|")
                # The files lack the columns that a configuration stands for.
                if column.name not in PARTITION_NAMES:
                    lines.append(f"| `{column.name}` | {meaning} |")
            lines.append("")
    return Exported(files={"README.md": "".join(f"{line}\n" for line in lines).encode()})


def problem_of_place(setting: Setting) -> str | None:
    """Why the Hub could not read the files of a run from a card there. None if it could."""
    # The Hub reads patterns from the folder of the card.
    above = setting.destination.parent
    if setting.directory is not None:
        run = setting.directory
    else:
        # As long as it has no name, it may be the directory of any run.
        is_of_a_run = str(above.parent) == str(setting.runs) and above.name.startswith("run_id=")
        run = above if is_of_a_run else setting.runs / "run_id=…"
    if str(run) == str(above) or str(run).startswith(f"{above}/"):
        return None
    return (
        f"{setting.destination}: expected a name in the directory of the run or above it, for "
        f"instance {run}/README.md"
    )


def _configurations(source: ExportSource) -> dict[str, list[str]]:
    """The patterns of files of every configuration: a table, and an intervention if it has one."""
    run = source.opened.directory.path
    above = source.destination.parent
    root = "" if run == above else f"{os.path.relpath(str(run), str(above))}/"
    configurations: dict[str, list[str]] = {}
    for table in TABLES:
        by_folder: dict[str, list[str]] = {}
        for path in source.opened.files(table):
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
            configurations[name] = [f"{root}{folder}/{file}" for file in matching]
    return configurations


def _calibration(source: ExportSource) -> list[str]:
    """How far the effects of a run can be trusted, as lines of Markdown."""
    calibration = source.calibration(source.run["statistics"])
    if not calibration:
        return []
    lines = [
        "## Effects on the loss, against measured interventions",
        "",
        "| effect | layer | heads | sequences | Spearman | slope |",
        "|---|---|---|---|---|---|",
    ]
    for name, compared in calibration.items():
        if isinstance(compared, str):
            lines.append(f"| `{name}` | {compared} | | | | |")
            continue
        for row in compared:
            layer = "all" if row["layer"] is None else row["layer"]
            numbers = [row[key] for key in ("heads", "sequences", "spearman", "slope")]
            lines.append(f"| `{name}` | {layer} | {' | '.join(map(value_text, numbers))} |")
    return [*lines, ""]


def _lists(source: ExportSource) -> list[str]:
    """What other formats choose of the run with their defaults, and how sure that is, as lines of
    Markdown.
    """
    rows: list[str] = []
    for name, export in export_formats().items():
        options = export.parsed_options({})
        needs = export.needs(options)
        other = replace(source, format=export, options=options)
        # Some also need another run, or measure one.
        if needs.baseline or needs.calibrated:
            continue
        if (needs.statistics or needs.profiles) and problem_of(other, needs) is None:
            try:
                stability = export.function(other, **options).stability
            except QueryError as error:
                rows.append(f"| `{name}` | {error} |")
            else:
                rows += [] if stability is None else [f"| `{name}` | {stability} |"]
    return ["## Lists of heads", "", "| format | |", "|---|---|", *rows, ""] if rows else []
