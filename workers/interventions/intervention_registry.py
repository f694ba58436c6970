"""Interventions by name: a function whose first parameter names what it edits.

That parameter is a weight of the attention layers (`W_Q [head d_model d_head]`, `b_Q [head
d_head]`, …), `W_pos [pos d_model]`, or an activation (`workers.engine.edits.EDITABLE_ACTIVATIONS`).
The function returns the edited tensor and leaves its arguments alone. Further parameters name what
it reads: `circuit` is what the untouched weights say of positions, `layer` the number of the layer;
the edit of an activation may read `tokens`, what the layer has known before
(`workers.engine.edits.readable`), and `partner`, which is its own target in the run on the partner
sequences. Keyword-only parameters are options, numbers or one of some names, written in a scan as
`name(1,0.5)` in their order; one named `layer` says where the edit is made, otherwise it is made in
every layer. `a+b` is a, then b.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from torch import Tensor

from schemas.errors import ModelError, ScanError, unknown
from schemas.fingerprints import fingerprint
from schemas.formulas import first_paragraph
from workers.engine.edits import EDITABLE_ACTIVATIONS, PARTNER, Edit, Edits, readable
from workers.model.loading import LoadedModel
from workers.model.model_info import ModelInfo

EDITABLE_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
EDITABLE_EMBEDDINGS = ("W_pos",)
"""Weights that are not a layer's."""

CALL = re.compile(r"(\w+)(?:\(([^()]*)\))?")


@dataclass(frozen=True)
class Registered:
    """An intervention as it is written; `target` is empty where nothing is edited."""

    name: str
    function: Callable[..., Any]
    target: str
    reads: tuple[str, ...]
    options: dict[str, inspect.Parameter]
    meaning: str

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The options that are one of some names, and these names."""
        return {key: names for key, p in self.options.items() if (names := get_args(p.annotation))}

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it."""
        return {"meaning": self.meaning, "fingerprint": fingerprint(self.function)}


@dataclass(frozen=True)
class Part:
    """An intervention with its options."""

    registered: Registered
    options: dict[str, Any]

    @property
    def target(self) -> str:
        """What is edited."""
        return self.registered.target

    @property
    def layer(self) -> int | None:
        """The layer in which it is edited; none means every one."""
        layer = self.options.get("layer")
        return None if layer is None else int(layer)

    def bind(self, model: LoadedModel) -> Callable[[Tensor, Mapping[str, Any]], Tensor]:
        """The edit for a model: a function of what is edited and of what may be read."""
        function, reads = partial(self.registered.function, **self.options), self.registered.reads
        fixed = {"circuit": model.circuit} if "circuit" in reads else {}
        return lambda value, known: function(value, *({**known, **fixed}[name] for name in reads))


@dataclass(frozen=True)
class Intervention:
    """What a scan names: one intervention, or several in order."""

    name: str
    parts: tuple[Part, ...]

    def check(self, info: ModelInfo, n_ctx: int) -> None:
        """Refuse layers and heads that a model does not have, and positions that a sequence does
        not have.
        """
        has = {
            "layer": (info.n_layers, info.name),
            "head": (info.n_heads, info.name),
            "position": (n_ctx, "a sequence"),
        }
        for part in self.parts:
            for key, (count, whose) in has.items():
                if not 0 <= (number := part.options.get(key, 0)) < count:
                    raise ScanError(
                        f"interventions: {self.name!r}: {key} {number} of {whose}, which has {count}"
                    )

    def weights(self) -> tuple[Part, ...]:
        """The parts that edit weights."""
        return tuple(p for p in self.parts if p.target in EDITABLE_WEIGHTS + EDITABLE_EMBEDDINGS)

    def edits(self, model: LoadedModel) -> Edits:
        """The parts that edit activations; what the model does not have is refused."""
        found = [p for p in self.parts if p.target in EDITABLE_ACTIVATIONS]
        for part in found:
            if not model.has(part.target):
                raise ModelError(
                    f"{model.info.name}: no {part.target} for {part.registered.name} to edit"
                )
        return Edits(
            Edit(p.target, p.bind(model), p.layer, frozenset(p.registered.reads)) for p in found
        )

    @property
    def needs_partner(self) -> bool:
        """Whether it takes something from a run on partner sequences."""
        return any(PARTNER in part.registered.reads for part in self.parts)


INTERVENTIONS: dict[str, Registered] = {}


def intervention(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as an intervention."""
    parameters = inspect.signature(function, eval_str=True).parameters
    options = {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    target, *reads = [name for name in parameters if name not in options] or [""]
    if target not in (
        known := ("", *EDITABLE_WEIGHTS, *EDITABLE_EMBEDDINGS, *EDITABLE_ACTIVATIONS)
    ):
        raise ValueError(f"intervention {function.__name__!r}: {unknown('target', target, known)}")
    known = (
        "circuit",
        *(
            readable(target)
            if target in EDITABLE_ACTIVATIONS
            else ("layer",)
            if target in EDITABLE_WEIGHTS
            else ()
        ),
    )
    for name in reads:
        if name not in known:
            raise ValueError(
                f"intervention {function.__name__!r}: {unknown(f'thing that an edit of {target} reads', name, known)}"
            )
    if function.__name__ in INTERVENTIONS:
        raise ValueError(f"intervention {function.__name__!r} is defined twice")
    meaning = first_paragraph(function)
    INTERVENTIONS[function.__name__] = Registered(
        function.__name__, function, target, tuple(reads), options, meaning
    )
    return function


def find_intervention(text: str) -> Intervention:
    """The intervention that a scan names.

    >>> [(part.registered.name, part.options) for part in find_intervention("zero_query_bias+scale_query_bias(0.5)").parts]
    [('zero_query_bias', {}), ('scale_query_bias', {'alpha': 0.5})]
    """
    return Intervention(text, tuple(_part(text, piece) for piece in text.split("+")))


def _part(text: str, piece: str) -> Part:
    match = CALL.fullmatch(piece)
    if match is None:
        raise ScanError(f"interventions: expected NAME, NAME(1,0.5) or A+B, got {text!r}")
    name, values = match[1], [v for v in (match[2] or "").split(",") if v]
    if name not in INTERVENTIONS:
        raise ScanError(f"interventions: {unknown('intervention', name, INTERVENTIONS)}")
    found = INTERVENTIONS[name]
    if len(values) > len(found.options):
        raise ScanError(
            f"interventions: {piece!r} has {len(values)} options; expected {_signature(found)}"
        )
    options = {
        key: _option(f"interventions: {piece!r}: {key}", parameter.annotation, value)
        for (key, parameter), value in zip(found.options.items(), values, strict=False)
    }
    for key, parameter in found.options.items():
        if key not in options and parameter.default is parameter.empty:
            raise ScanError(f"interventions: {piece!r} needs {key}; expected {_signature(found)}")
    defaults = {key: p.default for key, p in found.options.items() if key not in options}
    return Part(found, options | defaults)


def _option(what: str, annotation: Any, value: str) -> Any:
    """A number, or one of the names that a `Literal` lists."""
    if names := get_args(annotation):
        if value not in names:
            raise ScanError(f"{what}: {unknown('name', value, names)}")
        return value
    try:
        return annotation(value)
    except ValueError:
        wanted = "a whole number" if annotation is int else "a number"
        raise ScanError(f"{what} is {value!r}, expected {wanted}") from None


def _signature(found: Registered) -> str:
    return f"{found.name}({','.join(found.options)})" if found.options else found.name
