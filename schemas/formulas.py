"""What statistics, profiles, predictions and weight statistics share: each is one function.

The function's name is the name of a column or of a value. Its parameters name what it reads. Its
docstring is the documentation everywhere: the first paragraph is the meaning, the second the
formula.

A scan writes options in their order, `distant_mass(4,64)`, or by name, `distant_mass(recent=64)`. A
choice of options is a formula of its own, `distant_mass_4_64`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, ParamSpec, TypeAlias

from headcount.schemas.errors import ScanError, unknown
from headcount.schemas.pattern import Tensor
from headcount.schemas.registry import (
    HAS_DOCSTRINGS,
    Argument,
    Entry,
    Registry,
    call_text,
    first_paragraph,
    is_of_plugin,
    options_of,
    parameters_of,
    parse_call,
    prose_of,
)
from headcount.schemas.tables import Table
from headcount.schemas.units import values_of
from headcount.schemas.values import problem_of

Arguments: TypeAlias = tuple[tuple[str, Argument], ...]
"""The options of a formula with their values, in order: whole numbers and names."""

Computed = Literal["in every layer", "after the pass", "from the weights"]
"""When a formula is computed.

in every layer: in every forward pass, from the activations of the layer.
after the pass: in every forward pass, from what the model predicts.
from the weights: once in a run, from the untouched weights.
"""

CALIBRATED = "measured_by"  # the fact that names the intervention whose effect is estimated

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Formula(Entry):
    """A registered function and everything that is derived from it."""

    kind: "Kind" = dataclasses.field(repr=False, compare=False)
    source: str  # where its definition comes from
    axis: str = ""  # what its values run over; "none" if it is one number in a table of such values
    uniform_baseline: bool = False  # whether `sequences` stores that of uniform attention
    standard: bool = False  # whether a scan that does not name statistics measures it
    per_token: bool = False  # whether it is a list with a value for each of `tokens`
    defined: Callable[..., Any] | None = None  # rule where it has a value; None: everywhere
    of_directions: bool = False  # whether it reads only directions, which zeros have not
    missing: str = ""  # what a layer may lack so that it has no value: the end of "NULL if …"
    marks: Literal["", "first key", "successors", "copies"] = ""  # tokens of a text it is about
    measured_by: str = ""  # the intervention whose change of loss it estimates
    shown: int = 0  # its place among those that a page shows first; 0: behind them
    example: int = 0  # its place among those whose sequences a page shows; 0: none of them
    arguments: Arguments = ()  # every option of the function, with a value

    @property
    def function_name(self) -> str:
        """Name of the function, as a scan writes it: the name without the options behind it."""
        return self.function.__name__

    @cached_property
    def name(self) -> str:
        """The column or the value: the function's name, and the values of all options behind it."""
        return "_".join([self.function_name, *(str(value) for _, value in self.arguments)])

    @property
    def text(self) -> str:
        """How a scan names it, in canonical form: the same formula always has the same text."""
        return call_text(self.function_name, (value for _, value in self.arguments))

    @property
    def formula(self) -> str:
        """The second paragraph of the docstring."""
        return prose_of(self.function).split("\n\n")[1]

    @property
    def unit(self) -> str:
        """The unit of its values."""
        return values_of(self.function).unit

    @property
    def range(self) -> tuple[float, float]:
        """The bounds of its values."""
        values = values_of(self.function)
        return values.low, values.high

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of what the rule `defined` reads."""
        return () if self.defined is None else parameters_of(self.defined)

    @property
    def undefined_when(self) -> str:
        """When it has no value, in words; empty if it always has one."""
        rules = ["NULL if a vector is zero"] if self.of_directions else []
        if self.defined is not None:
            # The rule's docstring is the end of the sentence "NULL unless …".
            stored = "NULL" if not self.axis else "no rows"
            rules.insert(0, f"{stored} unless {first_paragraph(self.defined).rstrip('.')}")
        if self.missing:
            rules.append(f"NULL if {self.missing}")
        return "; ".join(rules)

    @property
    def description(self) -> str:
        """Meaning, formula and when it has no value, on one line, for Parquet and SQL."""
        options = ", ".join(f"{name} = {value}" for name, value in self.arguments)
        texts = (f"{self.meaning} {' '.join(self.formula.split())}", options, self.undefined_when)
        return "; ".join(filter(None, texts))

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say about it."""
        names = ("unit", "source", "meaning", "formula", "description", *self.kind.facts)
        facts = {name: getattr(self, name) for name in names}
        if self.measured_by:
            places = {"layer": "{layer}", "head": "{head}"}
            facts[CALIBRATED] = self.measured_by.format(**places, **dict(self.arguments))
        if "range" in facts:
            # JSON does not have infinity.
            facts["range"] = [bound if math.isfinite(bound) else None for bound in self.range]
        return facts

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it: the facts, and the options."""
        choice = {"function": self.function_name, "options": dict(self.arguments)}
        return self.facts | (choice if self.arguments else {})

    @property
    def gradients(self) -> frozenset[str]:
        """What it reads that only a backward pass knows."""
        return frozenset(self.parameters).intersection(self.kind.gradients)

    @property
    def needs_gradients(self) -> bool:
        """Whether it needs a backward pass."""
        return bool(self.gradients)

    @property
    def listed(self) -> bool:
        """Whether its value is a list."""
        return self.per_token or self.axis not in ("", "none")

    def exists(self, rotary: bool) -> bool:
        """Whether a model has the formula at all; `rotary`: whether positions rotate q and k."""
        return not self.axis or self.defined is None or bool(self.defined(rotary))

    @property
    def code(self) -> tuple[Callable[..., Any], ...]:
        """The functions that decide its values."""
        return (self.function, *([self.defined] if self.defined else []))


@dataclass(kw_only=True, eq=False, repr=False)
class Kind(Registry[Formula]):
    """A kind of measurement: its formulas by column, and where their values go. A formula with
    options stands here with its defaults. `schemas.kinds.KINDS` lists all kinds.
    """

    field: str  # field of a scan, and of a manifest, that names formulas of this kind
    meaning: str  # meaning of the field, as `headcount plan` prints it
    table: Table  # the table that the formulas fill
    computed: Computed
    reads: Mapping[str, str]  # what the formulas may read, with its meaning
    gradients: Sequence[str] = ()  # what of this only a backward pass knows
    facts: Sequence[str]  # what manifests keep besides the facts that every formula has
    axes: Sequence[str] = ("",)  # what the formulas may run over
    may_have_options: bool = False
    averaged: bool = False  # whether mean and spread over a shard are stored, not values
    named_by: str | None = None  # column with names of formulas; None: each is a column
    sets: tuple[str, ...] = ()
    """Words that a scan may write in place of a list of names, or in the list: standard, all (that
    a forward pass gives) and effects (all that need a backward pass).
    """
    default: str | tuple[str, ...] = ()
    """What a scan without the field measures. If it is empty, the scan's list may be empty too."""
    page: str  # file in docs/reference about the formulas

    def __repr__(self) -> str:
        return f"Kind({self.field!r})"

    def formula(
        self,
        source: str,
        **facts: Any,  # noqa: ANN401 - fields of `Formula`, which refuses others
    ) -> Callable[[Callable[P, Tensor]], Callable[P, Any]]:
        """Register a function; one that breaks the rules of its kind raises `ValueError`."""

        def register(function: Callable[P, Tensor]) -> Callable[P, Any]:
            options = tuple((o.name, o.default) for o in options_of(function).values())
            formula = Formula(
                function=function, kind=self, source=source, arguments=options, **facts
            )
            if problem := self._problem(formula):
                raise ValueError(f"{self.word} {function.__name__!r}: {problem}")
            self.add(formula)
            return function

        return register

    def _problem(self, formula: Formula) -> str | None:
        """Which rule of its kind a function breaks."""
        for option in formula.options.values():
            if problem_of(option.annotation, option.default) is not None:
                return f"option {option.name!r} needs a default of its type, got {option.default!r}"
        if formula.options and not self.may_have_options:
            return f"a {self.word} has no options, got {', '.join(formula.options)}"
        # With options, the column has another name than the function, and neither may be taken.
        # Of a plug-in this is asked later: cells of a notebook run again.
        taken = set[str]() if is_of_plugin(formula.function) else {*self, *self._by_function()}
        if formula.function_name in taken:
            return "defined twice"
        for parameter in formula.parameters:
            if parameter not in self.reads:
                return unknown("parameter", parameter, self.reads)
        if formula.axis not in self.axes:
            return unknown("axis", formula.axis, self.axes)
        if HAS_DOCSTRINGS and "\n\n" not in prose_of(formula.function):
            return "its docstring needs a first line (meaning) and a formula paragraph"
        values_of(formula.function)
        return None

    def _by_function(self) -> dict[str, Formula]:
        return {formula.function_name: formula for formula in self.values()}

    def find(self, text: str) -> Formula:
        """The formula that a text of a scan names: `entropy`, `distant_mass(4,64)`.

        The bare name of a function with options means its defaults. A column's name is a text too,
        if the kind has this column. A name that does not exist and wrong options raise `ScanError`.
        """
        if text in self:
            return self[text]
        by_function = self._by_function()
        if text in by_function:
            return by_function[text]
        name = text.partition("(")[0].strip()
        if name not in by_function:
            raise ScanError(f"{self.field}: {unknown(self.word, name or text, by_function)}")
        formula = by_function[name]
        try:
            call = parse_call(text)
        except ValueError:
            raise ScanError(
                f"{self.field}: expected {formula.text}, with your options, got {text!r}"
            ) from None
        options = self.bind(formula, call.arguments, call.named, field=self.field)
        return replace(formula, arguments=tuple(options.items()))

    def _in_set(self, word: str) -> list[Formula]:
        return [
            formula
            for formula in self.values()
            if word == ("effects" if formula.needs_gradients else "all")
            or (formula.standard and word == "standard")
        ]

    def select(self, names: str | Iterable[str]) -> tuple[Formula, ...]:
        """The formulas of a word of `sets`, or of a list with such words, in registry order."""
        selected: dict[str, Formula] = {}
        for name in [names] if isinstance(names, str) else names:
            for formula in self._in_set(name) if name in self.sets else [self.find(name)]:
                # An option may hold an underscore, so two choices of options can make one name.
                other = selected.setdefault(formula.name, formula)
                if other.arguments != formula.arguments:
                    raise ScanError(
                        f"{self.field}: {other.text} and {formula.text} would have one column, "
                        f"{formula.name}; leave one of them out"
                    )
        order = {name: place for place, name in enumerate(self._by_function())}
        return tuple(
            sorted(selected.values(), key=lambda one: (order[one.function_name], one.name))
        )

    def canonical(self, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """The same choice in one way of writing, because a scan's text decides which run it is.

        Options are written out, and what a word in the list stands for is not named again. Names
        that do not exist stay, to be refused where the whole scan is known.
        """
        if isinstance(names, str):
            return names
        words = [name for name in names if name in self.sets]
        in_words = {formula.text for word in words for formula in self._in_set(word)}
        texts: list[str] = []
        for name in names:
            try:
                text = name if name in words else self.find(name).text
            except ScanError:
                text = name
            if text not in in_words:
                texts.append(text)
        # ["standard"] is "standard".
        return words[0] if texts == words[:1] and words else tuple(texts)

    def check(self, names: str | tuple[str, ...]) -> None:
        """Refuse names that do not exist, or of which one stands twice."""
        self.select(names)
        # A word such as "all" cannot be empty or name a formula twice.
        if isinstance(names, tuple):
            check_names(self.field, names, required=bool(self.default))


def check_names(field: str, names: tuple[str, ...], required: bool) -> None:
    """Refuse a list of names with a name twice, and an empty list if a name is required."""
    if len(set(names)) == len(names) and (names or not required):
        return
    expected = "at least one name, each once" if required else "each name once"
    raise ScanError(f"{field}: expected {expected}, got {list(names)!r}")


# `schemas` does not know torch, but its callers pass torch tensors in and get one back.
def evaluate(
    function: Callable[..., Tensor], activations: Mapping[str, Any], arguments: Arguments = ()
) -> Any:  # noqa: ANN401
    """The value of a formula, or of its `defined` rule, which takes only some of its options."""
    values = (activations[name] for name in parameters_of(function))
    own_options = options_of(function)
    return function(*values, **{name: value for name, value in arguments if name in own_options})
