"""What measures the published models of a replication, and how long one GPU may take for it.

The time is an estimate. It is arithmetic alone: files to load and tables to write come on top.

    seconds = tokens x operations of a token / GPU_OPERATIONS
    tokens = sequences x n_ctx x interventions, of every scan, checkpoint and model
    operations of a token = 24 n_layers d_model² + 2 n_layers n_ctx d_model + 2 d_model d_vocab

(Kaplan et al. 2020, arXiv 2001.08361: two for each weight, with MLPs of 4 d_model). Training takes
three times as many.
"""

import re
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

from headcount.jobs.console import duration
from headcount.reproduce.published_texts import DATA_SETS, PER_DATA_SET, RECIPES
from headcount.reproduce.replication import REPLICATIONS, STAND_IN, TEXT, Replication
from headcount.workers.inputs.corpus.text_files import located
from headcount.workers.model.info.description import find_model

GPU_OPERATIONS = 1e13
"""Operations a second in float32 that are assumed of one GPU: half of what an A100 has by its data
sheet, 1.95e13. Not measured.
"""

LETTERS = 4
"""Letters of a token, about, in English."""

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)

GETTING = {recipe.file: f"headcount reproduce texts {name}" for name, recipe in RECIPES.items()} | {
    "tinyshakespeare.txt": f"curl -Lo tinyshakespeare.txt {SHAKESPEARE}"
}
"""What gets a file that a replication reads, by its name."""


def published_command(name: str, replication: Replication) -> str:
    """One line of a shell that measures every published model. FILE is the authors' own text."""
    everything = str(replication)
    steps = [line for file, line in GETTING.items() if file in everything]
    if replication.made_by:
        steps.append(replication.made_by)
    models = [*_sizes_by_model(replication)]
    text = " --text FILE" if replication.text else ""
    target = name if (REPLICATIONS / f"{name}.toml").is_file() else f"{name}.toml"
    measure = f"headcount reproduce {target} --model {{}}{text}"
    if len(models) == 1:
        return " && ".join([*steps, measure.format(models[0])])
    loop = f"for model in {' '.join(models)}; do {measure.format('$model')}; done"
    return " && ".join([*steps, loop])


def estimated_time(replication: Replication, gpu_operations: float = GPU_OPERATIONS) -> str:
    """How long one GPU may take for that, in words, at so many operations a second."""
    try:
        seconds = _all_operations(replication) / gpu_operations
    except KeyError:
        # A file of one's own may leave out a size, or read a data set of the Hub.
        return "an unknown time"
    return duration(seconds) if seconds >= 1 else "less than 1 s"


def _all_operations(replication: Replication) -> float:
    """Operations of every scan of every model, and of the training."""
    total, longest = 0, 0
    for sizes in _sizes_by_model(replication).values():
        for scan in replication.scan.values():
            if any(each.items() <= sizes.items() for each in scan.get("sizes", [sizes])):
                fields = replication.defaults | scan
                total += _tokens(replication, fields) * _operations(sizes, fields["n_ctx"])
                longest = max(longest, fields["n_ctx"])
    if replication.training_tokens:
        of_token = _operations(replication.published_sizes, longest)
        total += 3 * replication.training_tokens * of_token
    return total


def _sizes_by_model(replication: Replication) -> dict[str, dict[str, Any]]:
    """The sizes of each published model, by its name."""
    return {replication.published_model: replication.published_sizes} | replication.published_models


def _operations(sizes: Mapping[str, Any], n_ctx: int) -> int:
    """Operations of a token in the forward pass."""
    d_model, n_layers = sizes["d_model"], sizes["n_layers"]
    return d_model * (24 * n_layers * d_model + 2 * n_layers * n_ctx + 2 * sizes["d_vocab"])


def _tokens(replication: Replication, fields: Mapping[str, Any]) -> int:
    """Tokens of all passes of a scan."""
    sequences = fields["sequences"]
    if sequences == "all":
        sequences = _sequences_of_text(fields["input"], fields["n_ctx"])
    passes = len(fields.get("interventions", ["none"]))
    return sequences * fields["n_ctx"] * passes * _checkpoints(replication, fields)


def _sequences_of_text(source: Mapping[str, Any], n_ctx: int) -> int:
    """Sequences that the texts of an input make, about."""
    files = source["files"] if isinstance(source["files"], list) else [source["files"]]
    for recipe in RECIPES.values():
        if recipe.file in files:
            return 1 if recipe.draw is None else len(DATA_SETS) * PER_DATA_SET
    paths = [path for file in files for path in glob(located(STAND_IN if file == TEXT else file))]
    size = sum(Path(path).stat().st_size for path in paths)
    return max(1, size // LETTERS // source.get("chunk", n_ctx))


def _checkpoints(replication: Replication, fields: Mapping[str, Any]) -> int:
    """Checkpoints that figures name, or the miniature has; 1 if a scan has none."""
    if "checkpoints" not in fields:
        return 1
    names = [value.name for value in replication.published_values]
    steps = {match[1] for name in names if (match := re.match(r"step (\d+)", name))}
    return len(steps) or len([*find_model(replication.bundled_model).glob(fields["checkpoints"])])
