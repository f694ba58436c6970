"""One export, from what a user asks for to the file that is written.

Torch takes seconds to import, so what needs it is imported inside the functions that do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headcount.exports.destination import facts_of, is_begun, says_unfinished, write_export
from headcount.exports.refusals import check_setting, scan_for, setting_of_scan
from headcount.exports.shared.confirmation import Steps, opened
from headcount.exports.shared.registry import (
    CacheCut,
    Exported,
    ExportFormat,
    Needs,
    Options,
    Setting,
)
from headcount.exports.shared.source import (
    CALIBRATION,
    CHECK,
    OPENING,
    ExportSource,
    choose_run,
)
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.commands.opening import tell_user, warn_of_damage
from headcount.schemas.errors import HeadcountError, QueryError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import Place, absolute
from headcount.schemas.plugins import Plugin, line_of, line_of_error
from headcount.schemas.registry import in_words

if TYPE_CHECKING:
    from headcount.workers.cache_trial import CacheTrial

Device = Literal["auto", "cpu", "cuda"]

DEFAULT_SEQUENCES = 16  # that choose in a check, and as many that report


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What a user wants to have exported."""

    export: ExportFormat
    options: Options
    destination: Place
    replace: bool
    model: str | None  # the model whose scan comes first; None: the runs are there
    check_sequences: int | None  # None: there is no check
    texts: Sequence[str]  # that a check reads; none: the licence
    device: Device
    code: str | None
    run_ids: list[str]
    plugins: tuple[Plugin, ...] = ()  # that define the format, or what it needs
    trust_plugins: bool = False  # whether those that the run keeps are run

    def made(self, runs: str | None, overrides: list[str]) -> tuple[Exported, ExportSource, int]:
        """Measure and write it: what was made, of what, and its size in bytes."""
        needs = self.export.needs(self.options)
        calibrates = needs.calibrated and self.model is not None
        opens = self.export.opens(self.options)
        total = calibrates + opens
        if self.model is not None:
            total += 1 + (needs.baseline is not None)
        if self.check_sequences is not None:
            # A file of scores leaves the number of heads open, and the check looks for it.
            total += 1 + self.export.is_ranking(self.options)
        steps = Steps(total)
        baseline = measured = None
        run_ids = self.run_ids
        if self.model is not None:
            fields: dict[str, Any] = {"model": self.model, "out": runs or "runs"}
            if self.plugins:
                fields["plugins"] = [plugin.place for plugin in self.plugins]
            runs, baseline, measured = self._measured(needs, fields, overrides, steps)
        directory = RunDirectory(absolute(str(runs)))
        # A calibration lies beside its run.
        if needs.calibrated and directory.path.name.startswith("run_id="):
            runs, run_ids = str(directory.path.parent), [directory.run_id]
        source = self._chosen(str(runs), run_ids, baseline)
        check_setting(self.export, self.options, source.setting)
        # The model where it lies now, which may have moved since the run began.
        setting = measured or source.setting
        return self._confirmed(source, setting, str(runs), steps, calibrates)

    def _chosen(self, runs: str, run_ids: list[str], baseline: RunDatabase | None) -> ExportSource:
        return choose_run(
            _opened(runs, self.code), self.export, self.options, self.destination, run_ids, baseline
        )

    def _confirmed(
        self, source: ExportSource, setting: Setting, runs: str, steps: Steps, calibrates: bool
    ) -> tuple[Exported, ExportSource, int]:
        """Write the list, then measure what confirms it, and write that into the file."""
        awaited = [CALIBRATION] * calibrates + [OPENING] * self.export.opens(self.options)
        awaited += [CHECK] * (self.check_sequences is not None)

        before = self._facts_of_before(source)
        source = dataclasses.replace(source, opening=before.get("opening"))
        first = dataclasses.replace(source, awaits=", ".join(awaited) or None)
        exported = self._made(first)
        trial = None
        if OPENING in awaited or CHECK in awaited:
            # Before anything is written: the model may not be there.
            trial = self._trial(source, setting, exported.cut)
            if CHECK in awaited and (known := _known_check(trial, before)) is not None:
                trial.known.update(known.get("answers", {}))
                source = dataclasses.replace(source, check=known)
                first = dataclasses.replace(first, check=known)
                exported = self._made(first)
        size = self._begun(exported, first.awaits)
        while awaited:
            now = awaited.pop(0)
            if now == CALIBRATION:
                source = self._calibrated(source, runs, steps)
            elif now == OPENING and trial is not None:
                steps.begin("heads are opened in rounds, those first with which most is recalled")
                source = self._opened(trial, exported.cut, source, first.awaits)
            elif trial is not None:
                source = self._checked(trial, source, exported.cut, steps)
            awaits = ", ".join(awaited) or None
            exported = self._made(dataclasses.replace(source, awaits=awaits))
            size = self._written(exported)
        return exported, source, size

    def _calibrated(self, source: ExportSource, runs: str, steps: Steps) -> ExportSource:
        """The source with the calibration of its effects."""
        self._calibrate(source, steps)
        baseline = source.baseline and source.baseline.database
        calibrated = self._chosen(runs, [source.run_id], baseline)
        return dataclasses.replace(calibrated, check=source.check)

    def _opened(
        self, trial: CacheTrial, cut: CacheCut | None, source: ExportSource, awaits: str | None
    ) -> ExportSource:
        """The source with what the model recalls while heads are opened. Each round is kept in the
        file, which still awaits the others.
        """
        assert cut is not None

        def save(opening: Mapping[str, Any]) -> None:
            unfinished = dataclasses.replace(source, opening=opening, awaits=awaits)
            self._written(self._made(unfinished))

        opening = opened(trial, cut, source, source.opening, save)
        return dataclasses.replace(source, opening=opening)

    def _checked(
        self, trial: CacheTrial, source: ExportSource, cut: CacheCut | None, steps: Steps
    ) -> ExportSource:
        """The source with a check of its list; what is measured on the way is kept in the file."""
        from headcount.exports.cache_plan.head_check import HeadCheck

        assert cut is not None

        def save(check: Mapping[str, Any]) -> None:
            self._written(self._made(dataclasses.replace(source, awaits=CHECK, check=check)))

        check = source.check
        if check is None or "verdict" not in check:
            check = HeadCheck(trial, cut.sink, cut.recent).made(cut, steps.begin, save)
        return dataclasses.replace(source, check=check)

    def _made(self, source: ExportSource) -> Exported:
        if not self.plugins:
            return self.export.function(source, **self.options)
        name = self.export.name
        try:
            exported = self.export.function(source, **self.options)
        except HeadcountError:
            raise
        except Exception as error:
            where = line_of_error(error) or line_of(self.export.function)
            raise QueryError(f"{where}: export {name}: {in_words(error)}") from error
        if not isinstance(exported, Exported):
            raise QueryError(
                f"{line_of(self.export.function)}: export {name}: expected Exported(files=…), got "
                f"{type(exported).__name__}"
            )
        return exported

    def _written(self, exported: Exported) -> int:
        return write_export(self.export, self.destination, exported.files)

    def _begun(self, exported: Exported, awaits: str | None) -> int:
        """Write a list that may still await something, if it says so; returns its size in bytes."""
        if awaits is not None and not says_unfinished(exported.files):
            # It would pass for a list that is confirmed.
            tell_user(f"{self.destination}: is written when this is there: {awaits}")
            return 0
        size = self._written(exported)
        if awaits is not None:
            tell_user(f"{self.destination}: written; it awaits: {awaits}")
        return size

    def _facts_of_before(self, source: ExportSource) -> dict[str, Any]:
        """What the file that is there says of itself, if it is this export of this run."""
        facts = facts_of(self.export, self.destination)
        of_this = facts.get("run_id") == source.run_id
        if is_begun(self.export, self.destination, self.options) and not (of_this or self.replace):
            raise QueryError(
                f"{self.destination}: is there already, of run {facts.get('run_id')}; choose "
                "another name, or say --replace"
            )
        return facts if of_this and facts.get("options") == dict(self.options) else {}

    def _trial(self, source: ExportSource, setting: Setting, cut: CacheCut | None) -> CacheTrial:
        """The model whose cache will be cut as the file says."""
        from headcount.workers.process import prepare_process

        assert cut is not None
        prepare_process()
        trial = self._trial_of(setting, cut.sink, cut.recent)
        if trial.info.sha256 != source.opened.manifest.model["sha256"]:
            raise QueryError(
                f"{trial.info.path}: its files are not those of run {source.run_id}, so a check on "
                "it would say nothing of the list; measure it with --model"
            )
        return trial

    def _measured(
        self, needs: Needs, fields: dict[str, Any], overrides: list[str], steps: Steps
    ) -> tuple[str, RunDatabase | None, Setting]:
        """Measure what is needed; returns where its run lies, the baseline's run, opened, and what
        was known of it before.
        """
        from rich.console import Console

        from headcount.jobs.bars import waiting

        name = f"export-{self.export.name}"
        # All scans are checked before the first begins.
        with waiting(Console(stderr=True, highlight=False), "planning"):
            scans = {name: scan_for(needs, fields, overrides)}
            if needs.baseline is not None:
                scans[f"{name}-baseline"] = scan_for(needs.baseline, fields, overrides)
        _, scan, info = scans[name]
        setting = setting_of_scan(scan, info, self.destination)
        check_setting(self.export, self.options, setting)
        if self.check_sequences is not None:
            # A check that cannot be made is refused before any scan.
            assert self.export.streamed_keys is not None
            self._trial_of(setting, *self.export.streamed_keys(self.options, setting.n_ctx))
        baseline = None
        if needs.baseline is not None:
            steps.begin(f"a scan of {needs.baseline.families[0]}, without what repeats")
            other, *_ = scans[f"{name}-baseline"]
            baseline = _opened(self._scan(f"{name}-baseline", other))
        written, *_ = scans[name]
        steps.begin(f"a scan of {scan.input.family}")
        return self._scan(name, written), baseline, setting

    def _trial_of(self, setting: Setting, sink: int, recent: int) -> CacheTrial:
        """The trial of a model whose heads keep so many first and last keys."""
        from headcount.exports.formats.duo import problem_of_window
        from headcount.workers.cache_trial import LONGEST, CacheTrial

        # The licence, which is read by default, has few pieces that are longer.
        n_ctx = setting.n_ctx if self.texts else min(setting.n_ctx, LONGEST)
        trial = CacheTrial(
            setting.model,
            self.texts,
            revision=setting.revision,
            tokenizer=setting.tokenizer,
            adapter=setting.adapter,
            n_ctx=n_ctx,
            sequences=self.check_sequences or DEFAULT_SEQUENCES,
            device=self.device,
        )
        if self.check_sequences is not None:
            problem = problem_of_window(n_ctx, sink, recent)
            if problem is not None:
                raise QueryError(f"export {self.export.name} --check: {problem}")
            # Texts that are too short or too few are refused now.
            _ = trial.pieces
        return trial

    def _scan(self, name: str, fields: dict[str, Any]) -> str:
        """Run or continue a scan; returns where its run lies."""
        from headcount.jobs.api import run_scan

        run = run_scan(
            fields,
            {},
            name=name,
            replicas=0,
            cores=0,
            device=self.device,
            address=None,
            new=False,
            quiet=False,
        )
        return str(run)

    def _calibrate(self, source: ExportSource, steps: Steps) -> None:
        """Measure some of the effects that the run estimates, in a run beside it."""
        from headcount.jobs.api import measure_losses_beside
        from headcount.jobs.commands.runs import DRAWN_HEADS, DRAWN_SEQUENCES
        from headcount.jobs.plan.calibration import calibration_of
        from headcount.jobs.resources import Resources

        run = source.opened.directory
        resources = Resources(replicas=0, device=self.device)
        losses = calibration_of(
            run, DRAWN_HEADS, DRAWN_SEQUENCES, 0, resources.on_cpu, self.trust_plugins
        )
        steps.begin(f"calibration: the effects of {DRAWN_HEADS} heads against interventions")
        measure_losses_beside(run, losses, resources)


def _known_check(trial: CacheTrial, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier check of the same has measured, or found out."""
    check = facts.get("check")
    return check if check and trial.identity.items() <= check.items() else None


def _opened(runs: str, code: str | None = None) -> RunDatabase:
    database = open_runs(runs, code=code, tell=tell_user)
    warn_of_damage(database)
    return database
