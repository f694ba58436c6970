"""Profiles of every query head as arrays, over all sequences of a run."""

from pathlib import Path

import numpy as np

from headcount.exports.shared.registry import BUNDLED_TEXT
from headcount.exports.shared.source import MOST_PARTS, ExportSource
from headcount.queries.open.sql_text import text_literal
from headcount.schemas.errors import counted

BUNDLED_FILE = BUNDLED_TEXT["files"]
TEXTS_AS_THEY_ARE = ("pile", "csv_texts", "text")  # not permuted, repeated or made up


def profile_of_heads(source: ExportSource, profile: str, *places: str) -> np.ndarray:
    """The mean of a profile, `[layer head entry]`, its entries in the order of `places`.

    Layers that do not attend are 0.
    """
    entry = ", ".join(places)
    # The last shard may be shorter than the others, so means are weighted by their sequences.
    rows = source.database.table(
        f"""
        SELECT layer, head, sum(count * mean) / sum(count) AS mean
        FROM profiles
        WHERE {source.condition} AND profile = {text_literal(profile)}
        GROUP BY layer, head, {entry}
        ORDER BY layer, head, {entry}
        """
    )
    layers = np.unique(rows["layer"].to_numpy())
    n_layers, n_heads = source.shape
    # Every head and entry of these layers has a row, so the order alone says whose a number is.
    means = np.asarray(rows["mean"].to_numpy(), np.float64).reshape(len(layers), n_heads, -1)
    of_all_layers = np.zeros((n_layers, *means.shape[1:]))
    of_all_layers[layers] = means
    return of_all_layers


def profile_of_shards(
    source: ExportSource, profile: str, place: str
) -> tuple[np.ndarray, np.ndarray]:
    """How many sequences each group of shards has, `[group]`, and the sums of a profile over them,
    `[group layer head entry]`; layers that do not attend are 0.
    """
    rows = source.database.table(
        f"""
        SELECT
            dense_rank() OVER (ORDER BY shard % {MOST_PARTS}) - 1 AS part,
            layer, head, {place}, sum(count) AS number, sum(count * mean) AS total
        FROM profiles
        WHERE {source.condition} AND profile = {text_literal(profile)}
        GROUP BY layer, head, {place}, shard % {MOST_PARTS}
        """
    )
    part, layer, head, entry, number, total = (column.to_numpy() for column in rows.columns)
    numbers = np.zeros(part.max() + 1)
    numbers[part] = number
    totals = np.zeros((len(numbers), *source.shape, entry.max() + 1))
    totals[part, layer, head, entry] = total
    return numbers, totals


def moments_of_heads(source: ExportSource, queries: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean `[layer head component]` and the second moment `[layer head component component]` of
    queries: `query`, or `rotated_query`.
    """
    mean = profile_of_heads(source, f"{queries}_mean", "component")
    triangle = profile_of_heads(source, f"{queries}_second_moment", "component", "other_component")
    # The pairs i ≤ j are stored, row by row.
    rows, columns = np.triu_indices(source.run["d_head"])
    second_moment = np.empty((*mean.shape, source.run["d_head"]))
    second_moment[..., rows, columns] = triangle
    second_moment[..., columns, rows] = triangle
    return mean, second_moment


def input_name(source: ExportSource) -> str:
    """What a run was measured on, in words."""
    run, files = source.run, source.input_options.get("files")
    names = [files] if isinstance(files, str) else files or []
    # No export says where files lie.
    named = ", ".join(name if name == BUNDLED_FILE else Path(name).name for name in names)
    of_what = f"{run['input_family']} {named}".strip()
    return f"{of_what}, {counted(run['sequences_done'], 'sequence')} of {run['n_ctx']:,} tokens"


def input_notes(source: ExportSource) -> tuple[str, ...]:
    """What a user should know of the input that queries, keys or values were measured on."""
    family = source.run["input_family"]
    if source.input_options.get("files") in (BUNDLED_FILE, [BUNDLED_FILE]):
        return (
            f"measured on {input_name(source)}: it stands for text of all kinds; measure the text "
            "that the model will read, --set input.files=FILES",
        )
    if family in TEXTS_AS_THEY_ARE:
        return ()
    return (
        f"measured on {family}: other input has other queries, keys and values. For a file to work "
        "with, scan the text that the model reads (family pile or text, with its files)",
    )
