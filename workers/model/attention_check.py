"""What each layer's attention is, settled by short runs of the bare modules."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.schemas.registry import in_words
from headcount.schemas.values import shortened
from headcount.workers.model.attention_facts import (
    AttentionFacts,
    AttentionSizes,
    all_scores,
    pattern_of,
    weighted_values,
)
from headcount.workers.model.attention_layers import attending, own_attention
from headcount.workers.model.bare_modules import ATTENTION, PROJECTIONS, child_of
from headcount.workers.model.model_info import ModelInfo

CHECK_TOKENS = 16  # of the check, if no window is shorter
LARGEST_WINDOW = 256  # beyond which the check does not look; masks say larger ones

LARGEST_DIFFERENCE = 1e-4  # from the model's own attention, by stream: rounding


class SeenEnough(Exception):
    """Ends a pass of which the rest is not needed."""


@dataclass(frozen=True)
class SettledAttention:
    """What a model's own attention confirmed."""

    facts: dict[int, AttentionFacts] = field(default_factory=dict)  # by layer that attends
    sizes: dict[int, AttentionSizes] = field(default_factory=dict)
    gated: frozenset[int] = frozenset()  # layers that change z, for example by a gate
    problem: str | None = None  # why these facts do not make the model's patterns; None if they do


@dataclass
class _Pass:
    facts: dict[int, AttentionFacts] = field(default_factory=dict)
    sizes: dict[int, AttentionSizes] = field(default_factory=dict)
    streams: dict[int, Tensor] = field(default_factory=dict)  # after each layer
    z: dict[int, Tensor] = field(default_factory=dict)  # by our attention
    projected: dict[int, Tensor] = field(default_factory=dict)  # given to output projections
    layer: int = -1


def settle_attention(
    info: ModelInfo, bare: nn.Module, blocks: Sequence[nn.Module]
) -> SettledAttention:
    """The facts of each layer, and whether they make what the model's own attention makes."""
    weight = next(bare.parameters())
    try:
        with torch.inference_mode():
            tokens = drawn_tokens(info, 1, CHECK_TOKENS).to(weight.device)
            ours = _run_ours(info, bare, blocks, tokens)
            windows = [facts.window for facts in ours.facts.values() if facts.window is not None]
            # Two tokens beyond the smallest window: its last query does not see the first keys.
            beyond = min(windows, default=LARGEST_WINDOW) + 2
            if CHECK_TOKENS < beyond <= min(LARGEST_WINDOW, info.n_ctx):
                tokens = drawn_tokens(info, 1, beyond).to(weight.device)
                ours = _run_ours(info, bare, blocks, tokens)
            own = _Pass()
            with nullcontext() if info.layout == "legacy" else own_attention(bare):
                _run(info, bare, blocks, tokens, own)
    except ModelError as error:
        return SettledAttention(problem=str(error))
    except Exception as error:
        # Whatever a library raises: the model is refused in one line, or the bridge runs it.
        # Some products of transformers, as those of grouped experts, take float32 and no float64.
        in_format = " in float64" if weight.dtype == torch.float64 else ""
        why = shortened(in_words(error))
        return SettledAttention(problem=f"transformers cannot run it{in_format} ({why})")
    gated: set[int] = set()
    for layer in ours.projected.keys() & ours.z.keys():
        given = ours.projected[layer]
        z = ours.z[layer].flatten(2)  # [batch pos head·d_v], as a projection reads it.
        if given.shape != z.shape or not torch.equal(given, z.to(given.dtype)):
            gated.add(layer)
    problem = _problem_of(info, ours, own, has_active_stream=active_stream(bare) is not None)
    return SettledAttention(ours.facts, ours.sizes, frozenset(gated), problem)


def active_stream(bare: nn.Module) -> int | None:
    """Which of several streams is the one that attention reads (Gemma 3n); None if there is one."""
    config = getattr(bare, "config", None)
    if config is None:
        return None
    return getattr(config.get_text_config(decoder=True), "altup_active_idx", None)


def drawn_tokens(info: ModelInfo, sequences: int, n_ctx: int) -> Tensor:
    """Random tokens for a check, no more of them than a model reads: `[sequence pos]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(info.d_vocab, (sequences, min(info.n_ctx, n_ctx)), generator=generator)


def _run_ours(
    info: ModelInfo, bare: nn.Module, blocks: Sequence[nn.Module], tokens: Tensor
) -> _Pass:
    seen = _Pass()

    def attend(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        layer = seen.layer
        if layer in seen.facts:
            raise ModelError(
                f"layer {layer} computes several patterns for each head, which the fused engine "
                "does not know"
            )
        if q.shape[1] != info.n_heads:
            raise ModelError(
                f"layer {layer} has {q.shape[1]} heads, and config.json says {info.n_heads}: "
                "layers with different numbers of heads cannot be measured"
            )
        assert running.facts is not None
        seen.facts[layer] = running.facts
        seen.sizes[layer] = AttentionSizes(q.shape[1], k.shape[1], d_qk=q.shape[3], d_v=v.shape[3])
        # Modules may compute v in another format than q and k.
        pattern = pattern_of(all_scores(q.float(), k.float(), facts), facts).to(v.dtype)
        seen.z[layer] = weighted_values(pattern, v).transpose(1, 2)
        return seen.z[layer]

    with attending(bare, attend, checks_rotations=True) as running:
        _run(info, bare, blocks, tokens, seen)
    return seen


def _run(
    info: ModelInfo, bare: nn.Module, blocks: Sequence[nn.Module], tokens: Tensor, seen: _Pass
) -> None:
    """The stream after each layer, and what output projections are given."""

    def begin_layer(layer: int, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        seen.layer = layer

    def note_projected(layer: int, _module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.projected[layer] = args[0].detach().clone()

    def end_layer(layer: int, _module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        stream = output[0] if isinstance(output, tuple | list) else output
        assert isinstance(stream, Tensor)
        # A copy, because the next layer may write over its input.
        seen.streams[layer] = stream.detach().clone()
        seen.layer = -1
        # The unembedding is not run: its weights may be a large part of a mapped file.
        if layer == len(blocks) - 1:
            raise SeenEnough

    options = {"use_cache": False} if info.is_of_transformers else {}
    with suppress(SeenEnough), ExitStack() as hooks:
        for layer, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_pre_hook(partial(begin_layer, layer)))
            hooks.enter_context(block.register_forward_hook(partial(end_layer, layer)))
            attention = child_of(block, ATTENTION)
            projection = None if attention is None else child_of(attention, PROJECTIONS["O"])
            if projection is not None:
                note = partial(note_projected, layer)
                hooks.enter_context(projection.register_forward_pre_hook(note))
        bare(tokens, **options)


def _problem_of(info: ModelInfo, ours: _Pass, own: _Pass, *, has_active_stream: bool) -> str | None:
    """What is wrong with our pass; None if it agrees with the model's own."""

    def listed(layers: Collection[int]) -> str:
        return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, sorted(layers)))}"

    expected = set(info.attention_layers_or_all)
    if not ours.facts:
        return "its attention modules do not use the attention interface of transformers"
    if missing := expected - ours.facts.keys():
        return (
            f"no attention that can be measured in {listed(missing)}, expected by its config.json"
        )
    if added := ours.facts.keys() - expected:
        return f"attention in {listed(added)}, expected none there by its config.json"
    for layer, stream in own.streams.items():
        is_stream = stream.dim() == 3 or (stream.dim() == 4 and has_active_stream)
        if not is_stream or stream.shape[-1] != info.d_model:
            return (
                f"layer {layer} hands on {list(stream.shape)}, expected one stream "
                f"[batch, pos, {info.d_model}]"
            )
        difference = (ours.streams[layer] - stream).norm() / stream.norm()
        # Weights that are not numbers make NaN here, which passes: measuring names the layer.
        if difference.item() >= LARGEST_DIFFERENCE:
            return (
                f"the stream after layer {layer} differs by {difference.item():.2g} from the "
                f"model's own attention (allowed {LARGEST_DIFFERENCE:g}): its attention has "
                "something that the fused engine does not know"
            )
    return None


def difference_of_logits(logits: Tensor, expected: Tensor) -> str | None:
    """How far logits are from others, in words; None if by rounding alone."""
    difference = ((logits - expected).norm() / expected.norm()).item()
    # NaN passes: measuring names the layer whose weights are not numbers.
    return f"they differ by {difference:.2g}" if difference >= LARGEST_DIFFERENCE else None
