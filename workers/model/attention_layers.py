"""The attention of a model's bare modules: who computes it, and from which facts.

A Hugging Face model looks its attention up by name, so ours is registered under a name while a pass
runs, and no longer: training code shares the registry, and `torch.compile` watches it. Modules that
do not look it up are taken over one by one (`attention_modules`). All of them then call the
function that `attending` has set.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.workers.model.attention_facts import Attend, AttentionFacts
from headcount.workers.model.rotations import Rotation, noted_rotations

IMPLEMENTATION = "headcount"  # the name under which models look attention and masks up

VisibleKeys = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key, from batch, head, query and key: a mask not yet written out."""


@dataclass
class AttentionPass:
    """One pass through a model whose attention is computed elsewhere."""

    attend: Attend
    windows: set[int | None] = field(default_factory=set)  # of the masks of this pass; None: all
    facts: AttentionFacts | None = None  # of the layer that asks now, with its window in any case
    checks_rotations: bool = False  # whether each rotation is held against the queries before it
    rotations: list[Rotation] = field(default_factory=list)  # the running layer's, until it asks


_running: ContextVar[AttentionPass | None] = ContextVar("running", default=None)
"""The pass that runs now. A context variable keeps threads apart."""
_ONE_PASS = threading.RLock()  # held while functions of the library transformers are ours


@contextmanager
def attending(
    model: nn.Module, attend: Attend, *, checks_rotations: bool = False
) -> Iterator[AttentionPass]:
    """Within it, bare modules compute their attention with `attend`; another thread waits."""
    attention_pass = AttentionPass(attend, checks_rotations=checks_rotations)
    with _registered(), noted_rotations(model, _note_rotation):
        token = _running.set(attention_pass)
        try:
            yield attention_pass
        finally:
            _running.reset(token)


@contextmanager
def _registered() -> Iterator[None]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    attentions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    with _ONE_PASS:
        # A pass inside another one finds them there already.
        is_outermost = IMPLEMENTATION not in attentions
        attentions[IMPLEMENTATION] = _hugging_face_attention
        masks[IMPLEMENTATION] = _hugging_face_mask
        try:
            yield
        finally:
            if is_outermost:
                del attentions[IMPLEMENTATION], masks[IMPLEMENTATION]


def take_over_attention(model: nn.Module) -> None:
    """Make a Hugging Face model use the attention that `attending` sets."""
    set_implementation: Any = model.set_attn_implementation
    with _registered():  # The library refuses a name that it does not know.
        set_implementation(IMPLEMENTATION)


def _note_rotation(rotation: Rotation) -> None:
    if (running := _running.get()) is not None:
        # What was given to the rotation would take memory that only a check needs.
        kept = {} if running.checks_rotations else {"given": None}
        running.rotations.append(replace(rotation, **kept))


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Within this context, a Hugging Face model computes its attention as its library does."""
    set_implementation: Any = model.set_attn_implementation
    set_implementation("eager")
    try:
        yield
    finally:
        take_over_attention(model)


def is_attending() -> bool:
    """Whether a pass runs whose attention is computed elsewhere."""
    return _running.get() is not None


def attend_to(query: Tensor, key: Tensor, value: Tensor, facts: AttentionFacts) -> Tensor:
    """z `[batch pos head d_v]` by what `attending` has set, of q, k, v `[batch head pos d]`."""
    running = _running.get()
    if running is None:
        raise RuntimeError("this attention runs only inside Model.run_bare")
    n_queries, n_keys = query.shape[2], key.shape[2]
    if n_queries != n_keys:
        refuse(f"{n_keys} keys for {n_queries} tokens")
    # What was noted since the last layer asked belongs to this one.
    rotations, running.rotations = running.rotations, []
    if rotations:
        # Of what it rotated, its queries; keys turn alike, so any of them do if none is checked.
        checked = [rotation.checked(query) for rotation in reversed(rotations)]
        undone = (rotation for rotation in checked if rotation.rotate is not None)
        facts = replace(facts, rotation=next(undone, checked[0]))
    running.facts = facts
    if facts.window is not None and facts.window >= n_queries:
        facts = replace(facts, window=None)
    # A mask that is none of the windows hides more than the arguments of this call say.
    if running.windows and facts.window not in running.windows:
        refuse("a mask that is neither causal nor a window of the latest keys")
    # Some models look at the result through `view`, which needs one piece.
    return running.attend(query, key, value, facts).contiguous()


def _hugging_face_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    """Refuses what changes the pattern in a way that `AttentionFacts` cannot say."""
    # Our masks are None where `AttentionFacts` says the same.
    if attention_mask is not None:
        refuse("a mask that is not a window of the latest keys")
    if arguments.get("position_bias") is not None:
        refuse("scores with a learned bias of positions")
    is_causal = arguments.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        refuse("queries that see later tokens")
    window = arguments.get("sliding_window")
    soft_cap = arguments.get("softcap")
    sink = arguments.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # OPT and its like scale the queries themselves and ask for scores with a factor of 1.
    own = number_of(module, "scaling")
    if scaling == 1 and own is not None and own not in (0, 1):
        query, scale = query / own, own
    facts = AttentionFacts(
        scale,
        soft_cap=float(soft_cap) if isinstance(soft_cap, int | float) and soft_cap > 0 else None,
        window=window if isinstance(window, int) else None,
        sink=sink.flatten() if isinstance(sink, Tensor) else None,
    )
    return attend_to(query, key, value, facts), None


def _hugging_face_mask(
    q_length: int, mask_function: VisibleKeys, **_arguments: object
) -> Tensor | None:
    """What transformers calls to write a mask out. Ours notes the window and writes nothing.

    A mask that is not a window of the latest keys is not None, so that a layer that gets it is
    refused. Models also make masks that no layer gets. A few rows are looked at, so that the cost
    is that of a row.
    """
    running = _running.get()
    if running is None:
        return None
    not_a_window = torch.zeros(1, 1, 1, 1)
    keys = torch.arange(q_length)
    zero = torch.zeros((), dtype=torch.long)
    # A window shows in the first query, one in the middle or the last two.
    counts: dict[int, int] = {}
    for query in sorted({0, q_length // 2, max(0, q_length - 2), q_length - 1}):
        visible = mask_function(zero, zero, torch.tensor(query), keys).expand(q_length)
        counts[query] = int(visible.sum())
        latest = (keys <= query) & (keys > query - counts[query])  # [key]
        if not visible.equal(latest):
            return not_a_window
    window = max(counts.values())
    # Queries with fewer keys before them than the window see them all.
    if any(count != min(query + 1, window) for query, count in counts.items()):
        return not_a_window
    running.windows.add(None if window == q_length else window)
    return None


def refuse(feature: str) -> NoReturn:
    """Raise the error that names what the fused engine cannot measure."""
    raise ModelError(f"its attention has {feature}, which the fused engine does not know")


def number_of(module: nn.Module, name: str) -> float | None:
    """A field of a module that is a plain number; None if it has no such field."""
    value = vars(module).get(name)
    return float(value) if isinstance(value, int | float) else None
