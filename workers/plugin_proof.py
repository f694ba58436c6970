"""Plug-ins are tried on a small model before anything is measured with them.

What a definition says of itself must hold there: its examples, its range and its shape, in both
engines and in two formats, whatever the other sequences of the batch are. It must leave what it
reads as it was. The first counterexample refuses the plug-in, with file and line.
"""

import doctest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from torch import Tensor

from headcount.schemas.errors import HeadcountError, MeasureError, ScanError
from headcount.schemas.formula_kinds import CURVES, PREDICTIONS, PROFILES, STATISTICS
from headcount.schemas.formulas import Formula
from headcount.schemas.plugins import Plugin, activate, module_of
from headcount.schemas.registry import in_words
from headcount.schemas.scans.scan import parse_scan
from headcount.workers.doctest_names import NAMES
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.measurements.batch import Requested
from headcount.workers.measurements.weight_tables import tables_of_weights
from headcount.workers.model.info.description import described
from headcount.workers.provenance.code_fingerprint import code_fingerprint
from headcount.workers.replica import Replica

MODEL = "bundled:gpt2-mini"
TEXT = b"A cat sat. It slept, then: it sat. Two of us saw it, and it saw two."
N_CTX = 32

EXACT = 1e-4
"""How far two float64 passes may be apart, of 1 or of the value: results are kept in float32."""

ROUNDED, MOST_FAR = 1e-3, 0.01
"""How far float32 may be from float64, and the share of values that may be farther."""

Values = dict[str, np.ndarray]  # by formula: `[sequence …]`
Located = tuple[Plugin, Formula]

_proven: set[tuple[Plugin, str, str]] = set()  # with engine and code, in this process


def check_plugins(plugins: tuple[Plugin, ...], engine: str) -> None:
    """Refuse plug-ins with a counterexample; what was proven on this machine is not tried again."""
    code = code_fingerprint()
    unproven = [each for each in plugins if not _is_proven(each, engine, code)]
    if not unproven:
        return
    prove(plugins, unproven, engine)
    _proven.update((each, engine, code) for each in unproven)
    for plugin in unproven:
        if not plugin.functions:
            # Of a machine that keeps nothing the proof is only made again.
            with suppress(OSError, RuntimeError):
                record = _record_of(plugin)
                record.parent.mkdir(parents=True, exist_ok=True)
                record.write_text(f"{engine} {code}")


def has_run_here(plugin: Plugin) -> bool:
    """Whether this user has measured with these very bytes on this machine."""
    with suppress(OSError, RuntimeError):
        return _record_of(plugin).is_file()
    return False


def _is_proven(plugin: Plugin, engine: str, code: str) -> bool:
    if (plugin, engine, code) in _proven:
        return True
    with suppress(OSError, RuntimeError, ValueError):
        return not plugin.functions and _record_of(plugin).read_text() == f"{engine} {code}"
    return False


def _record_of(plugin: Plugin) -> Path:
    return platformdirs.user_cache_path("headcount") / "plugins" / plugin.digest


def prove(plugins: tuple[Plugin, ...], unproven: Sequence[Plugin], engine: str) -> None:
    """Try the definitions of some plug-ins, while all of them are active."""
    activate(plugins)
    located: list[Located] = []
    for plugin in unproven:
        _run_examples(plugin)
        formulas = [each.entry for each in plugin.registrations]
        located += [(plugin, each) for each in formulas if isinstance(each, Formula)]
    for needs_gradients in (False, True):
        # A backward pass goes through the fused engine alone.
        engines = ("dense",) if engine == "dense" else ("fused", "dense")[: 2 - needs_gradients]
        group = [each for each in located if each[1].needs_gradients == needs_gradients]
        if group:
            _Trial(plugins, group).run(engines)


def _run_examples(plugin: Plugin) -> None:
    """Run the examples of docstrings, as ours are run by tests."""
    if plugin.functions:
        return
    module = module_of(plugin)
    finder = doctest.DocTestFinder(exclude_empty=True)
    for test in finder.find(module, plugin.name, module, NAMES | vars(module)):
        try:
            doctest.DebugRunner(verbose=False).run(test)
        except doctest.DocTestFailure as failure:
            example, problem = failure.example, f"got {failure.got.strip()}"
        except doctest.UnexpectedException as failure:
            example, problem = failure.example, f"got {in_words(failure.exc_info[1])}"
        else:
            continue
        line = (test.lineno or 0) + example.lineno + 1
        raise ScanError(
            f"{plugin.place}, line {line}: the example {example.source.strip()} expects "
            f"{example.want.strip() or 'nothing'}, {problem}"
        )


def refusal(plugin: Plugin, formula: Formula, problem: str) -> ScanError:
    """The error that a formula is refused with."""
    line = plugin.line_of(formula.function)
    return ScanError(f"{line}: {formula.kind.word} {formula.function_name}: {problem}")


class _Trial:
    """Some formulas on a few sequences."""

    def __init__(self, plugins: tuple[Plugin, ...], located: Sequence[Located]) -> None:
        self.plugins = plugins
        self.located = {formula.name: (plugin, formula) for plugin, formula in located}
        generator = np.random.default_rng(0)
        drawn = generator.integers(0, 256, (3, N_CTX))
        drawn[:2, N_CTX // 2 :] = drawn[:2, : N_CTX // 2]  # Each token comes twice.
        text = np.frombuffer(TEXT[: 2 * N_CTX], np.uint8).reshape(2, N_CTX)
        self.tokens = np.concatenate([text, drawn]).astype(np.int32)

    def run(self, engines: Sequence[str]) -> None:
        """Try every formula; raises for the first counterexample."""
        by_engine: dict[str, Values] = {}
        for engine in engines:
            for precision in ("float64", "float32"):
                replica = self._replica(engine, precision)
                values = self._measured(replica, self.tokens)
                if precision == "float32":
                    self._check_rounding(by_engine[engine], values)
                    continue
                if not by_engine:
                    self._check_weights(replica)
                    self._check_sequences(replica, values)
                by_engine[engine] = values
        if len(by_engine) == 2:
            words = "the fused engine gives {}, the dense one {}"
            self._check_same(words, by_engine["fused"], by_engine["dense"])

    def _replica(self, engine: str, precision: str) -> Replica:
        fields: dict[str, Any] = {}
        for name, (_, formula) in self.located.items():
            field = CURVES.field if self._is_curve(formula) else formula.kind.field
            fields.setdefault(field, []).append(formula.text if formula.arguments else name)
        scan = parse_scan(
            {"statistics": ["sink_mass"]}  # A scan without any is refused.
            | fields
            | {"model": MODEL, "n_ctx": N_CTX, "sequences": len(self.tokens), "bos": False}
            | {"batch_size": len(self.tokens)}
            | {"input": {"family": "given"}, "engine": engine, "precision": precision}
            | {"plugins": self.plugins}
        )
        replica = Replica(described(scan), scan, "cpu")
        watched = {
            kind.field: [self._watched(each) for each in scan.formulas(kind)]
            for kind in scan.kinds()
        }
        replica.requested = Requested(watched, replica.requested.heads)
        return replica

    @staticmethod
    def _is_curve(formula: Formula) -> bool:
        """Whether it is measured as a curve: each sequence can then be looked at."""
        return formula.kind is PROFILES and formula.axis != "pair"

    def _watched(self, formula: Formula) -> Formula:
        if formula.name not in self.located:
            return formula
        plugin, _ = self.located[formula.name]
        return replace(formula, function=watched(plugin, formula))

    def _measured(self, replica: Replica, tokens: np.ndarray) -> Values:
        try:
            measured = replica.measure(tokens)
        except MeasureError as error:
            for name, (plugin, formula) in self.located.items():
                if f"{name} is not finite" in str(error):
                    where = str(error).partition(";")[0].replace(" of the shard", "")
                    raise refusal(
                        plugin, formula, f"{where}; say with defined=… where it has a value"
                    ) from None
            raise
        values = {
            name: columns[name]
            for columns in measured.tables.values()
            for name in self.located
            if name in columns
        }
        for name, array in values.items():
            self._check_range(name, array)
        return values

    def _check_range(self, name: str, values: np.ndarray) -> None:
        plugin, formula = self.located[name]
        low, high = formula.range
        with np.errstate(invalid="ignore"):
            slack = EXACT * np.maximum(1, np.abs(values))
            is_outside = (values < low - slack) | (values > high + slack)
        if is_outside.any():
            place = tuple(np.argwhere(is_outside)[0].tolist())
            raise refusal(
                plugin,
                formula,
                f"expected {low:g} to {high:g} ({formula.unit}), got {values[place]:g} "
                f"{_where(place)}",
            )

    def _check_weights(self, replica: Replica) -> None:
        """Try statistics of weights, whose values no pass gives."""
        for table in tables_of_weights(replica.model, replica.scan).values():
            for name, (plugin, formula) in self.located.items():
                rows = table.filter([each == name for each in table["weight"].to_pylist()])
                values = rows["value"].to_numpy()
                if not np.isfinite(values).all():
                    raise refusal(plugin, formula, "expected numbers, got NaN or infinity")

    def _check_sequences(self, replica: Replica, together: Values) -> None:
        """Try a sequence alone, and with another last token."""
        alone = self._measured(replica, self.tokens[-1:])
        of_last = {name: values[-1:] for name, values in together.items()}
        words = "in a batch it is {}, and of the same sequence alone {}"
        self._check_same(words, of_last, alone)
        changed = self.tokens[-1:].copy()
        changed[:, -1] = (changed[:, -1] + 1) % 256
        later = self._measured(replica, changed)
        # What is given for each query, but for the last one.
        by_query = [
            name
            for name, (_, formula) in self.located.items()
            if formula.per_token or (formula.axis == "query" and name in alone)
        ]
        words = "a later token changes it from {} to {}"
        before, after = (
            {name: values[name][..., : N_CTX - 1] for name in by_query} for values in (alone, later)
        )
        self._check_same(words, before, after)

    def _check_rounding(self, exact: Values, rounded: Values) -> None:
        for name, values in rounded.items():
            far = _apart(values, exact[name], ROUNDED)
            if far.mean() > MOST_FAR:
                place = tuple(np.argwhere(far)[0].tolist())
                both = f"{values[place]:g} and {exact[name][place]:g}"
                raise refusal(
                    *self.located[name], f"float32 and float64 give {both} {_where(place)}"
                )

    def _check_same(self, words: str, first: Values, second: Values) -> None:
        for name in first.keys() & second.keys():
            far = _apart(first[name], second[name], EXACT)
            if far.any():
                place = tuple(np.argwhere(far)[0].tolist())
                numbers = words.format(f"{first[name][place]:g}", f"{second[name][place]:g}")
                raise refusal(*self.located[name], f"{numbers} {_where(place)}")


def _apart(first: np.ndarray, second: np.ndarray, tolerance: float) -> np.ndarray:
    """Where two arrays differ, or only one of them has a value."""
    difference = np.abs(first - second) > tolerance * np.maximum(1, np.abs(second))
    return difference | (np.isnan(first) != np.isnan(second))


def _where(place: Sequence[int]) -> str:
    """A place in an array of a kind, in words."""
    words = ("sequence", "token") if len(place) < 3 else ("sequence", "layer", "head", "entry")
    numbers = zip(words, place, strict=False)
    return f"({', '.join(f'{word} {number}' for word, number in numbers)})"


def watched(plugin: Plugin, formula: Formula) -> Callable[..., Tensor]:
    """The function of a formula, looked at while it is called."""
    function = formula.function

    @wraps(function)
    def with_checks(*read: Any, **options: Any) -> Tensor:  # noqa: ANN401 - whatever it reads
        by_name = dict(zip(formula.parameters, read, strict=True))
        before = dict(_copies(by_name))
        try:
            value = function(*read, **options)
            again = function(*read, **options)
        except Exception as error:
            raise _raised(plugin, formula, error) from error
        after = dict(_copies(by_name))
        if changed := [name for name in before if not _same(before[name], after[name])]:
            raise refusal(plugin, formula, f"changes {changed[0]}; return a new tensor")
        if problem := _shape_problem(formula, value, by_name):
            raise refusal(plugin, formula, problem)
        if not _same(value, again):
            raise refusal(
                plugin,
                formula,
                "gives another value when it is asked again; it must not change answers of the "
                "pattern, nor draw random numbers",
            )
        return value

    return with_checks


def _raised(plugin: Plugin, formula: Formula, error: Exception) -> HeadcountError:
    """The refusal of a formula that raised an error."""
    line = plugin.line_of_error(error)
    name = formula.function_name
    if isinstance(error, AttributeError) and isinstance(error.obj, FusedPattern):
        return ScanError(
            f"{line}: {name}: asks the pattern for {error.name!r}, which the fused engine does "
            "not answer; headcount.schemas.pattern has its questions, and engine = 'dense' has "
            "the whole matrix"
        )
    return ScanError(f"{line}: {name}: {type(error).__name__}: {error}")


def _copies(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Copies of the tensors in what a formula reads."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value.clone()
        elif isinstance(value, Mapping):
            yield from _copies({f"{name}[{key!r}]": item for key, item in value.items()})


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def _shape_problem(formula: Formula, value: object, read: Mapping[str, Any]) -> str | None:
    """What is wrong with the shape of a value, if anything is."""
    if not isinstance(value, Tensor):
        return f"expected a tensor, got {type(value).__name__}"
    shape = list(value.shape)
    if formula.kind is PREDICTIONS and len(shape) != 1 + formula.per_token:
        return f"expected {'[batch pos]' if formula.per_token else '[batch]'}, got shape {shape}"
    if formula.kind is STATISTICS:
        sizes = read["pattern"].key(0).shape[:2] if "pattern" in read else shape[:2]
        if shape not in ([*sizes], [*sizes[:1]]) or not shape:
            return f"expected [batch head] {[*sizes]} or [batch], got shape {shape}"
    return None
