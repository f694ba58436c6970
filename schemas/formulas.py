"""What statistics, profiles, predictions and weight statistics share: each is one function.

The function's name is the name of a column or of a value. Its parameters name what it reads. Its
docstring is the documentation everywhere: the first paragraph is the meaning, the second the
formula.

A scan writes options in their order, `distant_mass(4,64)`, or by name, `distant_mass(recent=64)`. A
choice of options is a formula of its own, `distant_mass_4_64`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ParamSpec, TypeAlias

from headcount.schemas.errors import ScanError, unknown
from headcount.schemas.files.fingerprints import fingerprint
from headcount.schemas.pattern import Tensor
from headcount.schemas.registry import (
    Argument,
    Entry,
    Registry,
    call_text,
    first_paragraph,
    options_of,
    parameters_of,
    parse_call,
    prose_of,
)
from headcount.schemas.scans.values import problem_of
from headcount.schemas.units import Values, values_of

Arguments: TypeAlias = tuple[tuple[str, Argument], ...]
"""The options of a formula with their values, in order: whole numbers and names."""

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Formula(Entry):
    """A registered function and everything that is derived from it."""

    registry: Formulas = field(repr=False, compare=False)
    source: str
    """Where its definition comes from."""
    axis: str = ""
    """What its values run over; "none" if it is one number in a table of such values."""
    uniform_baseline: bool = False
    """Whether the table `sequences` also stores what uniform attention would score."""
    standard: bool = True
    """Whether a scan that does not name statistics measures it."""
    per_token: bool = False
    """Whether it is a list with a value for each of `tokens`."""
    defined: Callable[..., Any] | None = None
    """Rule that says where the formula has a value; without a rule it always has one."""
    of_directions: bool = False
    """Whether it reads only directions, as a cosine does. A vector of zeros has no direction."""
    missing: str = ""
    """What a layer may lack so that it has no value there: the end of the sentence "NULL if …"."""
    arguments: Arguments = ()
    """Every option of the function, with a value."""

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

    @cached_property
    def values(self) -> Values:
        """The unit and the bounds of its values."""
        values = values_of(self.function)
        assert values is not None, f"{self.function_name} returns no type of schemas.units"
        return values

    @property
    def unit(self) -> str:
        """The unit of its values."""
        return self.values.unit

    @property
    def range(self) -> tuple[float, float]:
        """The bounds of its values."""
        return self.values.low, self.values.high

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of what the rule `defined` reads."""
        return () if self.defined is None else parameters_of(self.defined)

    @property
    def undefined_when(self) -> str:
        """When it has no value, in words; empty if it always has one."""
        rules: list[str] = []
        if self.defined is not None:
            # The rule's docstring is the end of the sentence "NULL unless …".
            stored = "NULL" if not self.axis else "no rows"
            rules.append(f"{stored} unless {first_paragraph(self.defined).rstrip('.')}")
        if self.of_directions:
            rules.append("NULL if a vector is zero")
        if self.missing:
            rules.append(f"NULL if {self.missing}")
        return "; ".join(rules)

    @property
    def description(self) -> str:
        """Meaning, formula and when it has no value, on one line, for Parquet and SQL."""
        meaning_and_formula = f"{self.meaning} {' '.join(self.formula.split())}"
        options = ", ".join(f"{name} = {value}" for name, value in self.arguments)
        texts = (meaning_and_formula, options, self.undefined_when)
        return "; ".join(text for text in texts if text)

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say about it.

        JSON does not have infinity, so an open end of the range is null.
        """
        names = ("unit", "source", "meaning", "formula", "description", *self.registry.facts)
        facts = {name: getattr(self, name) for name in names}
        if "range" in facts:
            facts["range"] = [bound if math.isfinite(bound) else None for bound in self.range]
        return facts

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps: the facts, the options and a fingerprint of the code."""
        choice = {"function": self.function_name, "options": dict(self.arguments)}
        return self.facts | (choice if self.arguments else {}) | {"fingerprint": self.fingerprint}

    @property
    def listed(self) -> bool:
        """Whether its value is a list."""
        return self.per_token or self.axis not in ("", "none")

    def exists(self, rotary: bool) -> bool:
        """Whether a model has the formula at all; `rotary`: whether positions rotate q and k."""
        return not self.axis or self.defined is None or bool(self.defined(rotary))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the formula's code; comments, layout and prose do not count."""
        return fingerprint(self.function, *([self.defined] if self.defined else []))


class Formulas(Registry[Formula]):
    """The formulas of one kind, by column. One with options stands here with its defaults."""

    def __init__(
        self,
        word: str,
        *,
        reads: Mapping[str, str],
        facts: Sequence[str],
        axes: Sequence[str] = (),
        may_have_options: bool = False,
    ) -> None:
        """Formulas that may read what `reads` names and run over `axes`.

        `facts` name what manifests keep besides the facts that every formula has.
        """
        super().__init__(word)
        self.reads = reads
        self.facts = facts
        self.axes = axes
        self.may_have_options = may_have_options

    def formula(
        self,
        source: str,
        **facts: Any,  # noqa: ANN401 - fields of `Formula`, which refuses others
    ) -> Callable[[Callable[P, Tensor]], Callable[P, Any]]:
        """Register a function with a source and other fields of `Formula`.

        A function that breaks the rules of its kind raises `ValueError`.
        """

        def register(function: Callable[P, Tensor]) -> Callable[P, Any]:
            options = tuple((o.name, o.default) for o in options_of(function).values())
            formula = Formula(
                function=function, registry=self, source=source, arguments=options, **facts
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
        if formula.function_name in {*self, *self._by_function()}:
            return "defined twice"
        for parameter in formula.parameters:
            if parameter not in self.reads:
                return unknown("parameter", parameter, self.reads)
        if formula.axis not in (self.axes or ("",)):
            return unknown("axis", formula.axis, self.axes)
        if values_of(formula.function) is None:
            return "expected a type of schemas.units, which says the unit, as what it returns"
        if "\n\n" not in prose_of(formula.function):
            return "its docstring needs a first line (meaning) and a formula paragraph"
        return None

    def _by_function(self) -> dict[str, Formula]:
        return {formula.function_name: formula for formula in self.values()}

    def find(self, text: str, field: str) -> Formula:
        """The formula that a text in a field of a scan names: `entropy`, `distant_mass(4,64)`.

        The bare name of a function with options means its defaults. A column's name is a text too,
        if the registry has this column.
        """
        by_function = self._by_function()
        if text in self or text in by_function:
            return self.get(text) or by_function[text]
        name = text.partition("(")[0].strip()
        if name not in by_function:
            raise ScanError(f"{field}: {unknown(self.word, name or text, by_function)}")
        formula = by_function[name]
        try:
            call = parse_call(text)
        except ValueError:
            raise ScanError(
                f"{field}: expected {formula.text}, with your options, got {text!r}"
            ) from None
        options = self.bind(formula, call.arguments, call.named, field=field)
        return replace(formula, arguments=tuple(options.items()))


def is_list(facts: Mapping[str, Any]) -> bool:
    """Whether a formula's value is a list: along an axis, or with a number for every token."""
    return bool(facts.get("per_token")) or facts.get("axis", "none") != "none"


# `schemas` does not know torch, but its callers pass torch tensors in and get one back.
def evaluate(
    function: Callable[..., Tensor],
    activations: Mapping[str, Any],
    arguments: Arguments = (),
) -> Any:  # noqa: ANN401
    """The value of a formula, or of its `defined` rule, on the activations that it names.

    A rule takes only some of a formula's options. Without options, the defaults hold.
    """
    values = (activations[name] for name in parameters_of(function))
    own_options = options_of(function)
    return function(*values, **{name: value for name, value in arguments if name in own_options})
