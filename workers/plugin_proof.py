"""Plug-ins are tried on a small model before anything is measured with them.

What a definition says of itself must hold there: its examples, its range and its shape, in both
engines and in two formats, whatever the other sequences of the batch are. It must leave what it
reads as it was. The first counterexample refuses the plug-in, with file and line.
"""

import doctest
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from torch import Tensor

from headcount.schemas.errors import HeadcountError, MeasureError, ModelError, ScanError
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.formula_kinds import CURVES, PAIRED_AXES, PREDICTIONS, PROFILES, STATISTICS
from headcount.schemas.formulas import Formula
from headcount.schemas.plugins import Plugin, activate, line_of, line_of_error, module_of
from headcount.schemas.registry import REQUIRED, Entry, in_words
from headcount.schemas.scans.intervention import NONE, parse_intervention
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import parse_scan
from headcount.workers.doctest_names import NAMES
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.inputs import InputFamily
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.interventions import INTERVENTIONS, bind
from headcount.workers.interventions.intervention_registry import RegisteredIntervention
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

OF_INTERVENTIONS = ("sink_mass", "entropy", "value_norm", "head_result_norm")
"""What an intervention is looked at by."""

Values = dict[str, np.ndarray]  # by formula: `[sequence …]`

_proven: set[tuple[Plugin, str, str]] = set()  # with engine and code, in this process


def check_plugins(plugins: tuple[Plugin, ...], engine: str) -> None:
    """Refuse plug-ins with a counterexample; what was proven on this machine is not tried again."""
    if not plugins:
        return
    code = code_fingerprint()
    unproven = [each for each in plugins if not _is_proven(each, engine, code)]
    prove(plugins, unproven, engine)
    # All of them: what this process has tried before may have been for another user's record.
    for plugin in plugins:
        _proven.add((plugin, engine, code))
        # Of a machine that keeps nothing the proof is only made again.
        with suppress(OSError, RuntimeError):
            if not plugin.functions:
                _record_of(plugin).parent.mkdir(parents=True, exist_ok=True)
                _record_of(plugin).write_text(f"{engine} {code}")


def has_run_here(plugin: Plugin) -> bool:
    """Whether this user has measured with these very bytes on this machine."""
    with suppress(OSError, RuntimeError):
        return _record_of(plugin).is_file()
    return False


def _is_proven(plugin: Plugin, engine: str, code: str) -> bool:
    with suppress(OSError, RuntimeError, ValueError):
        if not plugin.functions and _record_of(plugin).read_text() == f"{engine} {code}":
            return True
    return (plugin, engine, code) in _proven


def _record_of(plugin: Plugin) -> Path:
    return platformdirs.user_cache_path("headcount") / "plugins" / plugin.digest


def prove(plugins: tuple[Plugin, ...], unproven: Sequence[Plugin], engine: str) -> None:
    """Try the definitions of some plug-ins, while all of them are active."""
    activate(plugins)
    for plugin in unproven:
        if not plugin.functions:
            _run_examples(plugin)
    entries = [each.entry for plugin in unproven for each in plugin.registrations]
    engines = ("dense",) if engine == "dense" else ("fused", "dense")
    formulas = [each for each in entries if isinstance(each, Formula)]
    # A backward pass goes through the fused engine alone.
    for needs_gradients, able in ((False, engines), (True, engines[:1])):
        group = [each for each in formulas if each.needs_gradients == needs_gradients]
        if group:
            _Trial(plugins, {formula.name: formula for formula in group}).run(able)
    for entry in entries:
        if any(option.default is REQUIRED for option in entry.options.values()):
            continue  # A scan says with which values it is tried.
        if isinstance(entry, RegisteredIntervention):
            _try_intervention(plugins, entry, engines)
        elif isinstance(entry, InputFamily) and entry.synthetic:
            _try_family(plugins, entry)


def refusal(entry: Entry, problem: str) -> ScanError:
    """The error that a definition is refused with."""
    return ScanError(f"{line_of(entry.function)}: {entry.function.__name__}: {problem}")


def _run_examples(plugin: Plugin) -> None:
    """Run the examples of docstrings, as tests run ours."""
    module = module_of(plugin)
    for test in doctest.DocTestFinder().find(module, plugin.name, module, NAMES | vars(module)):
        try:
            doctest.DebugRunner(verbose=False).run(test)
        except doctest.DocTestFailure as failure:
            example, outcome = failure.example, failure.got.strip()
        except doctest.UnexpectedException as failure:
            example, outcome = failure.example, in_words(failure.exc_info[1])
        else:
            continue
        line = (test.lineno or 0) + example.lineno + 1
        raise ScanError(
            f"{plugin.place}, line {line}: the example {example.source.strip()} expects "
            f"{example.want.strip() or 'nothing'}, got {outcome}"
        )


def _try_intervention(
    plugins: tuple[Plugin, ...], entry: RegisteredIntervention, engines: Sequence[str]
) -> None:
    """Look at the calls of an intervention, and at what statistics of ours say under it."""
    bound = bind(parse_intervention(entry.name))
    if bound.needs_partner or bound.needs_labels:
        return
    INTERVENTIONS[entry.name] = replace(entry, function=watched(entry, _change_problem))
    try:
        # The small model may lack what is changed.
        with suppress(ModelError):
            _Trial(plugins, dict.fromkeys(OF_INTERVENTIONS, entry), entry.name).run(engines)
    finally:
        INTERVENTIONS[entry.name] = entry


def _try_family(plugins: tuple[Plugin, ...], entry: InputFamily) -> None:
    """Draw sequences twice; a sequence may depend on the draw alone."""
    scan = scan_of(plugins, {"input": {"family": entry.name}}, 3)
    try:
        first, again = (Sequences(scan, described(scan)).shard(0).tokens for _ in range(2))
    except ScanError:
        return  # It may ask for another length: planning says so of the scan itself.
    if not np.array_equal(first, again):
        raise refusal(entry, "draws other tokens when it is asked again; draw them from draw.rng")


def scan_of(plugins: tuple[Plugin, ...], fields: Mapping[str, Any], sequences: int) -> Scan:
    """A scan of the small model."""
    small = {"model": MODEL, "n_ctx": N_CTX, "sequences": sequences, "batch_size": sequences}
    given = {"bos": False, "input": {"family": "given"}, "statistics": ["sink_mass"]}
    return parse_scan({**small, **given, **fields, "plugins": plugins})


class _Trial:
    """Some formulas on a few sequences, each with the definition that is to blame for its values.

    These are the formulas themselves, or an intervention under which ours are measured.
    """

    def __init__(
        self, plugins: tuple[Plugin, ...], blamed: Mapping[str, Entry], intervention: str = "none"
    ) -> None:
        self.plugins = plugins
        self.blamed = blamed
        self.intervention = parse_intervention(intervention)
        drawn = np.random.default_rng(0).integers(0, 256, (3, N_CTX))
        drawn[:2, N_CTX // 2 :] = drawn[:2, : N_CTX // 2]  # Each token comes twice.
        text = np.frombuffer(TEXT[: 2 * N_CTX], np.uint8).reshape(2, N_CTX)
        self.tokens = np.concatenate([text, drawn]).astype(np.int32)

    def run(self, engines: Sequence[str]) -> None:
        """Try every formula; raises for the first counterexample."""
        try:
            self._run(engines)
        except HeadcountError:
            raise
        except Exception as error:
            # A rule `defined`, a statistic of weights, or a shape that no table takes.
            raise _raised(list(self.blamed.values()), error) from error

    def _run(self, engines: Sequence[str]) -> None:
        exact: Values = {}
        for engine in engines:
            replica = self._replica(engine, "float64")
            values = self._measured(replica, self.tokens)
            if not exact:
                exact = values
                self._check_weights(replica)
                self._check_sequences(replica, values)
                self._check_kept(replica)
            self._check_same("the fused engine gives {}, the dense one {}", exact, values)
            rounded = self._measured(self._replica(engine, "float32"), self.tokens)
            self._check_same("float64 gives {}, float32 {}", values, rounded, ROUNDED, MOST_FAR)

    def _replica(self, engine: str, precision: str) -> Replica:
        fields: dict[str, Any] = {"engine": engine, "precision": precision}
        for name, entry in self.blamed.items():
            field = STATISTICS.field
            if isinstance(entry, Formula):
                # As a curve, each sequence of a profile can be looked at.
                is_curve = entry.kind is PROFILES and entry.axis != "pair"
                field = CURVES.field if is_curve else entry.kind.field
            fields.setdefault(field, []).append(name)
        fields["interventions"] = [str(self.intervention)]
        scan = scan_of(self.plugins, fields, len(self.tokens))
        replica = Replica(described(scan), scan, "cpu")
        if self.intervention == NONE:
            value_problem = partial(_value_problem, replica.model.info.n_heads)
            watched_formulas = {
                kind.field: [
                    replace(each, function=watched(each, value_problem))
                    for each in scan.formulas(kind)
                ]
                for kind in scan.kinds()
            }
            replica.requested = Requested(watched_formulas, replica.requested.heads)
        return replica

    def _measured(self, replica: Replica, tokens: np.ndarray) -> Values:
        try:
            measured = replica.measure(tokens, self.intervention)
        except MeasureError as error:
            where = str(error).partition(";")[0].replace(" of the shard", "")
            name = next(name for name in self.blamed if f"{name} is not finite" in where)
            advice = "; say with defined=… where it has a value" * (self.intervention == NONE)
            raise refusal(self.blamed[name], where + advice) from None
        # Means over sequences, as of a profile of pairs, have no place in a sequence.
        values = {
            name: array
            for table, columns in measured.tables.items()
            for name, array in columns.items()
            if name in self.blamed and TABLES[table].has("sequence")
        }
        for name, entry in self.blamed.items():
            if isinstance(entry, Formula) and name in values:
                _check_range(entry, values[name])
        return values

    def _check_weights(self, replica: Replica) -> None:
        """Try statistics of weights, whose values no pass gives."""
        for table in tables_of_weights(replica.model, replica.scan).values():
            for row in table.select(["weight", "value"]).to_pylist():
                if row["value"] is None or not np.isfinite(row["value"]):
                    raise refusal(self.blamed[row["weight"]], "expected a number, got none")

    def _check_sequences(self, replica: Replica, together: Values) -> None:
        """Try a sequence alone, and with another last token."""
        alone = self._measured(replica, self.tokens[-1:])
        of_last = {name: values[-1:] for name, values in together.items()}
        self._check_same("in a batch it is {}, and of the sequence alone {}", of_last, alone)
        changed = self.tokens[-1:].copy()
        changed[:, -1] = (changed[:, -1] + 1) % 256
        later = self._measured(replica, changed)
        # What is given for each query, but for the last one.
        by_query = [
            name
            for name, entry in self.blamed.items()
            if isinstance(entry, Formula) and (entry.per_token or entry.axis == "query")
        ]
        before, after = (
            {name: values[name][..., : N_CTX - 1] for name in by_query} for values in (alone, later)
        )
        self._check_same("a later token changes it from {} to {}", before, after)

    def _check_kept(self, replica: Replica) -> None:
        """Try whether tensors of a pass that is over are still there."""
        before = _tensors_alive()
        self._measured(replica, self.tokens[-1:])
        # A definition that keeps some does so in every layer.
        if _tensors_alive() - before >= replica.model.info.n_layers:
            first, *_ = self.blamed.values()
            names = " or ".join(self.blamed)
            raise ScanError(
                f"{line_of(first.function)}: {names} keeps tensors of a pass that is over, and a "
                "scan would fill the memory with them; keep nothing between calls"
            )

    def _check_same(
        self, words: str, first: Values, second: Values, tolerance: float = EXACT, most: float = 0
    ) -> None:
        for name, values in first.items():
            far = _apart(values, second[name], tolerance)
            if far.mean() > most:
                place = tuple(np.argwhere(far)[0].tolist())
                numbers = words.format(f"{values[place]:g}", f"{second[name][place]:g}")
                of = "" if self.intervention == NONE else f"{name}: "
                raise refusal(self.blamed[name], f"{of}{numbers} {_where(place)}")


def _check_range(formula: Formula, values: np.ndarray) -> None:
    low, high = formula.range
    slack = EXACT * np.maximum(1, np.abs(values))
    is_outside = (values < low - slack) | (values > high + slack)
    if is_outside.any():
        place = tuple(np.argwhere(is_outside)[0].tolist())
        expected = f"expected {low:g} to {high:g} ({formula.unit})"
        raise refusal(formula, f"{expected}, got {values[place]:g} {_where(place)}")


def _apart(first: np.ndarray, second: np.ndarray, tolerance: float) -> np.ndarray:
    """Where two arrays differ, or only one of them has a value."""
    difference = np.abs(first - second) > tolerance * np.maximum(1, np.abs(second))
    return difference | (np.isnan(first) != np.isnan(second))


def _where(place: Sequence[int]) -> str:
    """A place in an array of a kind, in words."""
    words = ("sequence", "token") if len(place) < 3 else ("sequence", "layer", "head", "entry")
    numbers = zip(words, place, strict=False)
    return f"({', '.join(f'{word} {number}' for word, number in numbers)})"


Problem = Callable[[Any, Tensor, Mapping[str, Any]], str | None]
"""What is wrong with the value of an entry, by what it has read."""


def watched(entry: Entry, problem_of: Problem) -> Callable[..., Tensor]:
    """The function of an entry, looked at while it is called."""
    function = entry.function

    @wraps(function)
    def with_checks(*read: Any, **options: Any) -> Tensor:  # noqa: ANN401 - whatever it reads
        by_name = dict(zip(entry.parameters, read, strict=True))
        before = dict(_copies(by_name))
        try:
            value = function(*read, **options)
            again = function(*read, **options)
        except (Exception, SystemExit) as error:
            raise _raised([entry], error) from error
        after = dict(_copies(by_name))
        if changed := [name for name in before if not _same(before[name], after[name])]:
            raise refusal(entry, f"changes {changed[0]}; return a new tensor")
        if not isinstance(value, Tensor):
            raise refusal(entry, f"expected a tensor, got {type(value).__name__}")
        if problem := problem_of(entry, value, by_name):
            raise refusal(entry, problem)
        if not _same(value, again):
            raise refusal(
                entry,
                "gives another value when it is asked again; it must not change answers of the "
                "pattern, nor draw random numbers",
            )
        return value

    return with_checks


def _raised(entries: Sequence[Entry], error: BaseException) -> ScanError:
    """The refusal of one of some definitions, which raised an error."""
    names = " or ".join(dict.fromkeys(entry.function.__name__ for entry in entries))
    where = f"{line_of_error(error) or line_of(entries[0].function)}: {names}"
    if isinstance(error, AttributeError) and isinstance(error.obj, FusedPattern):
        return ScanError(
            f"{where}: asks the pattern for {error.name!r}, which the fused engine does not "
            "answer; headcount.schemas.pattern has its questions, and engine = 'dense' has the "
            "whole matrix"
        )
    return ScanError(f"{where}: {type(error).__name__}: {error}")


def _copies(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Copies of the tensors in what is read."""
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value.clone()
        elif isinstance(value, Mapping):
            yield from _copies({f"{name}[{key!r}]": item for key, item in value.items()})


def _tensors_alive() -> int:
    gc.collect()
    return sum(type(each) is Tensor for each in gc.get_objects())


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def _value_problem(
    n_heads: int, formula: Formula, value: Tensor, read: Mapping[str, Any]
) -> str | None:
    """What is wrong with the shape of a formula's value."""
    shape = list(value.shape)
    if formula.kind is PREDICTIONS and len(shape) != 1 + formula.per_token:
        return f"expected {'[batch pos]' if formula.per_token else '[batch]'}, got shape {shape}"
    if formula.kind is PROFILES and len(shape) - (formula.axis in PAIRED_AXES) not in (2, 3):
        return f"expected [batch head index] or [batch index], got shape {shape}"
    if formula.kind is STATISTICS:
        # The pattern of uniform attention has one head.
        heads = read["pattern"].key(0).shape[1] if "pattern" in read else n_heads
        if not shape or shape[1:] not in ([], [heads]):
            return f"expected [batch head] with {heads} heads, or [batch], got shape {shape}"
    return None


def _change_problem(entry: Entry, value: Tensor, read: Mapping[str, Any]) -> str | None:
    """What is wrong with what an intervention makes of its target."""
    target = entry.parameters[0]
    expected, shape = list(read[target].shape), list(value.shape)
    return None if shape == expected else f"expected {target} {expected}, got shape {shape}"
