"""The format `hybrid-heads`: KV heads that can get a sliding window."""

import math

from headcount.exports.formats.windows.swa_layers import needs_of_windows
from headcount.exports.formats.windows.window_choice import choose_windows, problem_of_windows
from headcount.exports.shared.registry import Exported, export_format
from headcount.exports.shared.source import ExportSource
from headcount.schemas.values import Count, Index


@export_format(
    "KV heads that lose least by a sliding window, and what it costs",
    read_by="conversions to full and cheaper attention side by side in a layer",
    source="https://arxiv.org/abs/2606.20097",
    writes="file",
    example="hybrid-heads.json",
    load="""\
import json

with open("hybrid-heads.json") as file:
    content = json.load(file)
print(content["sliding_window_heads"], content["window"], content["joint"]["delta_nll"])
""",
    measures=True,
    needs=needs_of_windows,
    refusal=lambda setting, options: problem_of_windows(
        setting, options, setting.n_kv_heads or setting.n_heads, "--heads"
    ),
    streamed_keys=lambda options, _: (options["sink"], options["window"]),
)
def hybrid_heads(
    source: ExportSource,
    *,
    sink: Index = 4,
    window: Count = 64,
    heads: Count | None = None,
    sequences: Count = 64,
) -> Exported:
    """KV heads whose queries can do with the first keys and the last ones, chosen by measured
    losses.

    The file is JSON. `sliding_window_heads` are the chosen `[layer, kv_head]`; the others need all
    keys. The rest is as in `swa-layers`, with KV heads for layers: the query heads that share keys
    get the window together. The paper gives no file format, so the names are ours.

    * `sink`: first keys that the chosen heads keep.
    * `window`: last keys that the chosen heads keep, a query's own among them.
    * `heads`: how many KV heads get the window; by default half of them.
    * `sequences`: first sequences of the run that are measured.
    """
    groups = source.kv_shape[1]
    choice = choose_windows(
        source, groups, heads, sink=sink, window=window, sequences=sequences, flag="--heads"
    )
    rows = choice.measured.items()
    content = {
        "sliding_window_heads": choice.chosen,
        "sink_size": sink,
        "window": window,
        "heads": [{"layer": layer, "kv_head": head, **row} for (layer, head), row in rows],
        **choice.facts,
    }
    words = f"a window in {len(choice.chosen)} of {math.prod(source.kv_shape)} KV heads"
    return Exported(
        stability=choice.stability,
        files={"hybrid-heads.json": source.json_file(content)},
        notes=(choice.note(words),),
        cut=choice.cut(source, sink, window),
    )
