"""The format `swa-layers`: layers that can get a sliding window."""

from headcount.exports.formats.windows.window_choice import choose_windows, problem_of_windows
from headcount.exports.shared.confirmation import layer_types_problem
from headcount.exports.shared.registry import Exported, Needs, export_format
from headcount.exports.shared.source import ExportSource
from headcount.schemas.values import Count, Index


def needs_of_windows(sink: int, window: int) -> Needs:
    """What layers and heads are ranked by."""
    return Needs(statistics=(f"effect_window({sink},{window})",))


@export_format(
    "Layers that lose least by a sliding window, and what it costs",
    read_by="transformers (`layer_types` and `sliding_window` of a config)",
    source="https://arxiv.org/abs/2606.27791",
    writes="file",
    example="swa-layers.json",
    load="""\
import json

with open("swa-layers.json") as file:
    content = json.load(file)
print(content["sliding_window_layers"], content["window"], content["joint"]["delta_nll"])
""",
    measures=True,
    needs=needs_of_windows,
    refusal=lambda setting, options: problem_of_windows(setting, options, 1, "--layers"),
    streamed_keys=lambda options, _: (options["sink"], options["window"]),
)
def swa_layers(
    source: ExportSource,
    *,
    sink: Index = 0,
    window: Count = 64,
    layers: Count | None = None,
    sequences: Count = 64,
) -> Exported:
    """Layers whose queries can do with the last keys alone, chosen by measured losses.

    The file is JSON. `sliding_window_layers` are the chosen layers. `layers` are the candidates:
    all layers, or of more than 64 those with the smallest sum of `effect_window` over their heads,
    64 or twice as many as are chosen. Each is measured alone, in runs NAME-confirmation beside the
    first: `delta_nll` is the rise of the loss in nats per token, beside its first-order `estimate`.
    If few layers are chosen, all are measured on a quarter of the sequences first, and the better
    half on all; `documents` says on how many. Then half of the layers are those that cost least
    alone, and the others are added in rounds, each by half of what is missing: those that cost
    least together with what is chosen. Until all this is done, the file is there with the layers of
    the smallest estimates, and says that it is `unfinished`. `joint` is the rise if all chosen
    layers have the window, and the sum of their single rises. Half of the documents choose; all
    these numbers are of the others. `stability` says how far halves agree on the layers that cost
    least alone.

    A query sees its own key and the `window` - 1 before it, as in transformers, and the first
    `sink` keys. Windows of transformers have no first keys, so only with `sink` 0 the file has
    fields for the config.json of the model: `transformers`. A layer with a window of its own that
    is no longer loses nothing more, and comes first.

    * `sink`: first keys that the chosen layers keep.
    * `window`: last keys that the chosen layers keep, a query's own among them.
    * `layers`: how many layers get the window; by default half of them.
    * `sequences`: first sequences of the run that are measured.
    """
    choice = choose_windows(
        source, 1, layers, sink=sink, window=window, sequences=sequences, flag="--layers"
    )
    chosen = [layer for layer, _ in choice.chosen]
    content: dict[str, object] = {
        "sliding_window_layers": chosen,
        "sink_size": sink,
        "window": window,
        "layers": [{"layer": layer, **row} for (layer, _), row in choice.measured.items()],
        **choice.facts,
    }
    notes = (choice.note(f"a window in layers {', '.join(map(str, chosen))}"),)
    if choice.joint is None:
        return Exported(
            files={"swa-layers.json": source.json_file(content)},
            notes=notes,
            cut=choice.cut(source, sink, window),
        )
    # A config can only say what transformers can do: no first keys, all heads of a layer alike.
    problem = "a window there keeps no first keys, expected --sink 0" if sink else None
    problem = problem or layer_types_problem(source)
    if problem is None:
        types = ("full_attention", "sliding_attention")
        content["transformers"] = {
            "layer_types": [types[layer in chosen] for layer in range(source.run["n_layers"])],
            "sliding_window": window,
            "use_sliding_window": True,
        }
    else:
        notes = (*notes, f"no fields for a config of transformers: {problem}")
    return Exported(
        stability=choice.stability,
        files={"swa-layers.json": source.json_file(content)},
        notes=notes,
        cut=choice.cut(source, sink, window),
    )
