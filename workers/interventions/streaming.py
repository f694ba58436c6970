"""Heads that stream: their queries see the first keys and the last ones, as with a short KV cache.

The changes differ in which heads they name: those that stream, or those that do not, or whole
groups of them, so that all of a large model fit into one text.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from headcount.schemas.errors import ScanError
from headcount.schemas.measured_heads import Head
from headcount.schemas.scans.head_groups import groups_of, groups_text
from headcount.schemas.values import Count, Index
from headcount.workers.engine.changes import Streaming, hide
from headcount.workers.interventions.intervention_registry import intervention
from headcount.workers.model.model_info import ModelInfo

GroupCount = Annotated[int, Field(ge=1, le=1024)]

Groups = Annotated[str, Field(pattern="^x[0-9a-f]+$")]  # as `groups_text` writes them


def _refused(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why the options as a whole mean nothing, or are not in their one form; None if they do."""
    heads: tuple[Head, ...] = options["heads"]
    # One change has one text, because the text is the name of its rows.
    in_order = tuple(sorted(set(heads)))
    if heads != in_order:
        return f"heads: expected in order and each once, {','.join(map(str, in_order))}"
    return _hides_nothing(options, n_ctx)


def _hides_nothing(options: Mapping[str, Any], n_ctx: int) -> str | None:
    visible_keys = options["sink"] + options["recent"]
    if visible_keys >= n_ctx:
        return f"hides nothing; expected sink + recent below n_ctx = {n_ctx}, got {visible_keys}"
    return None


def _refused_groups(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """The same for groups of heads."""
    return problem_of_groups(options) or _hides_nothing(options, n_ctx)


def problem_of_groups(options: Mapping[str, Any]) -> str | None:
    """Why a text names no groups, or not in its one form; None if it does."""
    groups, chosen = options["groups"], options["chosen"]
    named = groups_of(groups, chosen)
    if not named or chosen != groups_text(groups, named):
        return (
            f"chosen: expected x, then {-(-groups // 4)} hexadecimal digits below 2^{groups} for "
            f"each layer up to the last chosen one, got {chosen}"
        )
    return None


def _streaming(options: Mapping[str, Any], info: ModelInfo, chosen: bool) -> Streaming:
    """What is hidden from the heads that are chosen, or from the others in all layers."""
    heads = {
        layer: tuple(
            head
            for head in range(info.n_heads)
            if (Head(layer, head) in options["heads"]) == chosen
        )
        for layer in info.attention_layers_or_all
    }
    of_layers = {layer: of_layer for layer, of_layer in heads.items() if of_layer}
    return Streaming(options["sink"], options["recent"], of_layers)


def _streaming_groups(options: Mapping[str, Any], info: ModelInfo) -> Streaming:
    """What is hidden from the heads of the chosen groups. Groups that a model lacks are refused."""
    groups = options["groups"]
    size, rest = divmod(info.n_heads, groups)
    if rest:
        raise ScanError(
            f"interventions: stream_groups: groups: expected a divisor of the {info.n_heads} heads "
            f"in a layer of {info.name}, got {groups}"
        )
    heads: dict[int, tuple[int, ...]] = {}
    for layer, group in groups_of(groups, options["chosen"]):
        if layer not in info.attention_layers_or_all:
            raise ScanError(
                f"interventions: stream_groups: chosen: layer {layer} of {info.name}, expected "
                f"layers of its {info.n_layers} that attend"
            )
        members = range(group * size, (group + 1) * size)
        heads[layer] = (*heads.get(layer, ()), *members)
    return Streaming(options["sink"], options["recent"], heads)


@intervention(refuse=_refused, streaming=partial(_streaming, chosen=True))
def stream_heads(
    attn_scores: Tensor, layer: int, *, sink: Index, recent: Count, heads: tuple[Head, ...]
) -> Tensor:
    """The queries of the chosen heads see only the first `sink` keys and the last `recent` keys,
    their own among them. Other heads see all keys (after Xiao et al. 2024, DuoAttention).
    """
    streams = [Head(layer, head) in heads for head in range(attn_scores.shape[1])]
    return _streamed(attn_scores, sink, recent, streams)


@intervention(refuse=_refused, streaming=partial(_streaming, chosen=False))
def stream_other_heads(
    attn_scores: Tensor, layer: int, *, sink: Index, recent: Count, heads: tuple[Head, ...] = ()
) -> Tensor:
    """All heads but the chosen ones see only the first `sink` keys and the last `recent` keys, as
    if only the chosen heads kept a whole KV cache.
    """
    streams = [Head(layer, head) not in heads for head in range(attn_scores.shape[1])]
    return _streamed(attn_scores, sink, recent, streams)


@intervention(refuse=_refused_groups, streaming=_streaming_groups)
def stream_groups(
    attn_scores: Tensor,
    layer: int,
    *,
    sink: Index,
    recent: Count,
    groups: GroupCount,
    chosen: Groups,
) -> Tensor:
    """What stream_heads does to whole groups of neighbouring heads, of which a layer has `groups`:
    1 for layers, or as many as KV heads. `chosen` is x and a hexadecimal number for each layer up
    to the last chosen one, as many digits as the groups need, in which group g is 2^g.
    """
    chosen_groups, n_heads = groups_of(groups, chosen), attn_scores.shape[1]
    streams = [(layer, head * groups // n_heads) in chosen_groups for head in range(n_heads)]
    return _streamed(attn_scores, sink, recent, streams)


def _streamed(scores: Tensor, sink: int, recent: int, streams: list[bool]) -> Tensor:
    """Hide the keys between the first and the last ones from the heads that stream."""
    positions = torch.arange(scores.shape[-2], device=scores.device)
    is_between = (positions[:, None] - positions >= recent) & (positions >= sink)  # [query key]
    return hide(scores, is_between & torch.tensor(streams, device=scores.device)[:, None, None])
