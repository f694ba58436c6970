"""Scans of losses under interventions beside a run, such as those that its effects estimate."""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headcount.jobs.bars import bar, waiting
from headcount.jobs.console import say
from headcount.jobs.plan.passes import seconds_of, words_of_passes
from headcount.jobs.plan.plan import SHARD_OPERATIONS, Plan, plugins_of, sequences_in_a_shard
from headcount.jobs.resources import Resources
from headcount.schemas.errors import RunError, ScanError, counted
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.formulas import CALIBRATED
from headcount.schemas.measured_heads import Head, MeasuredHeads
from headcount.schemas.scans.intervention import parse_intervention
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.interventions import bind
from headcount.workers.model.model_info import NO_IDENTITY, ModelInfo

if TYPE_CHECKING:
    from headcount.workers.known_models import KnownModels


MOST_OPERATIONS = {True: SHARD_OPERATIONS, False: 10 * SHARD_OPERATIONS}
"""What a shard takes at most on a CPU, and elsewhere: what a stopped command has not committed is
measured again.
"""


def calibration_of(
    run: RunDirectory,
    heads: int,
    sequences: int,
    draw: int,
    on_cpu: bool,
    trust_plugins: bool = False,
) -> dict[str, Any]:
    """The fields of a scan of the first sequences of a run, under the interventions whose effects
    the run estimates, each on the same drawn heads. `trust_plugins` as in `plugins_of`.

    The view `effect_calibration` finds the losses beside the estimates.
    """
    manifest = run.manifest()
    templates = [
        record[CALIBRATED]
        for record in manifest.kinds.get("statistics", {}).values()
        if record.get(CALIBRATED)
    ]
    info, n_ctx = _info(manifest), manifest.identity["scan"]["n_ctx"]
    drawn = drawn_heads(_measured_heads(manifest, info).by_layer, heads, draw)
    texts = (t.format(layer=head.layer, head=head.head) for t in templates for head in drawn)
    # A window as long as the sequences has no effect, and none to measure.
    interventions = [text for text in texts if _does_something(text, info, n_ctx)]
    if not interventions:
        raise RunError(
            f"{run.run_id}: expected a run with effects that an intervention can measure on "
            f"sequences of {n_ctx} tokens (shorter windows), and it has none; add "
            '"effects" to statistics in its scan, and scan again'
        )
    precision = manifest.identity["scan"].get("precision")
    fields = manifest.scan_fields() | {
        "interventions": ["none", *interventions],
        "statistics": ["sink_mass"],
        "predictions": ["loss"],
        "profiles": [],
        "curves": [],
        "weight_statistics": [],
        # Of one layer, so that the others need no pattern; losses need a whole pass anyway.
        "layers": [_measured_heads(manifest, _info(manifest)).layers[0]],
        "heads": "all",
        # Its input may be a plug-in's.
        "plugins": [plugin.place for plugin in plugins_of(run, manifest, trust_plugins)],
        "sequences": min(sequences, manifest.sequences),
        # What has a backward pass.
        "precision": "float64" if precision == "float64" else "float32",
        "out": str(run.path.parent),
        "batch_size": manifest.batch_size,
    }
    if manifest.corpora is not None:
        fields["corpora"] = manifest.corpora
    scan = parse_scan(fields)
    in_a_shard = sequences_in_a_shard(scan, _info(manifest), MOST_OPERATIONS[on_cpu])
    fields["sequences_per_shard"] = min(in_a_shard, fields["sequences_per_shard"])
    return fields


TIMED_TOKENS = 4096  # of the passes by whose time that of all others is told


def announce(plan: Plan, resources: Resources, console: Console) -> "KnownModels | None":
    """Say how many passes a scan of losses will take and about how long, by the time of a few.

    Returns the model that was loaded for it; none if all is measured, or other processes measure.
    """
    shards_left = plan.manifest.shards - plan.shards_done
    if not shards_left:
        return None
    sequences = min(shards_left * plan.scan.sequences_per_shard, plan.manifest.sequences)
    count = sequences * len(plan.scan.interventions)
    models = seconds = None
    if not resources.replicas:
        # Imported here: who only draws heads needs no torch.
        from headcount.workers.known_models import KnownModels
        from headcount.workers.replica import Replica, resolve_device

        with waiting(console, "loading the model"):
            models = KnownModels()
            device = resolve_device(resources.device)
            replica = Replica(plan.info, plan.scan, device, models.load)
            tokens = plan.sequences.shard(0).tokens
            in_batch = max(1, min(len(tokens), TIMED_TOKENS // plan.scan.n_ctx))
        with bar(console, "") as show:
            words = "timing the first passes"
            show(words, None)
            replica.on_tokens = lambda done: show(f"{words}: {counted(done, 'token')}", None)
            seconds = seconds_of(lambda size: replica.measure(tokens[:size]), in_batch)
    say(console, words_of_passes(count, plan.scan.n_ctx, seconds))
    return models


def drawn_heads(by_layer: Mapping[int, Sequence[int]], count: int, draw: int) -> list[Head]:
    """Heads of a run, drawn at random in layers that are spread evenly over the whole depth.

    Every layer gives as many as the others, but for one. If there are fewer heads than layers, the
    first and the last layer are among those that give one.
    """
    generator = random.Random(draw)
    shuffled = {
        layer: generator.sample([Head(layer, head) for head in of_layer], len(of_layer))
        for layer, of_layer in sorted(by_layer.items())
    }
    drawn: list[Head] = []
    while len(drawn) < count and (layers := [layer for layer in shuffled if shuffled[layer]]):
        chosen_layers = spread_evenly(layers, count - len(drawn))
        drawn += [shuffled[layer].pop() for layer in chosen_layers]
    return sorted(drawn)


def spread_evenly(items: Sequence[int], count: int) -> list[int]:
    """At most `count` of the items, from the first to the last at equal distances.

    >>> spread_evenly(range(30), 6), spread_evenly(range(5), 1), spread_evenly([3, 5], 9)
    ([0, 6, 12, 17, 23, 29], [2], [3, 5])
    """
    if count >= len(items):
        return list(items)
    if count == 1:
        return [items[len(items) // 2]]
    # Distances are at least 1, so no item comes twice.
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _measured_heads(manifest: Manifest, info: ModelInfo) -> MeasuredHeads:
    # What else the scan names may be a plug-in's.
    names = ("model", "n_ctx", "layers", "heads")
    of_scan = {name: value for name, value in manifest.identity["scan"].items() if name in names}
    drawn = {"sequences": 1, "input": {"family": "uniform_random"}}
    return parse_scan(of_scan | drawn).measured_heads(info)


def _info(manifest: Manifest) -> ModelInfo:
    fields: dict[str, Any] = dict(manifest.model)
    layers = fields.pop("attention_layers", None)
    for name in NO_IDENTITY:
        fields.pop(name, None)
    return ModelInfo("", attention_layers=layers and tuple(layers), **fields)


def _does_something(text: str, info: ModelInfo, n_ctx: int) -> bool:
    try:
        bind(parse_intervention(text)).check(info, n_ctx)
    except ScanError:
        return False
    return True
