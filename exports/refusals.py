"""What is refused before anything is measured: all that options, a model's files, the scan and the
destination say already.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headcount.exports.shared.registry import BUNDLED_TEXT, ExportFormat, Needs, Options, Setting
from headcount.exports.shared.source import column_of
from headcount.schemas.errors import ModelError, QueryError, counted
from headcount.schemas.places import Place, absolute
from headcount.schemas.scans.overrides import override_fields
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import parse_scan

if TYPE_CHECKING:
    from headcount.workers.model.model_info import ModelInfo


def check_libraries(export: ExportFormat) -> None:
    """It is an error if a library is not installed that the format alone needs."""
    for library in export.libraries:
        try:
            import_module(library)
        except ImportError:
            raise QueryError(
                f"export {export.name} needs {library}, which is not installed: pip install -e "
                "'.[export]'"
            ) from None


def check_setting(export: ExportFormat, options: Options, setting: Setting) -> None:
    """It is an error if the format cannot be made of such a run with these options."""
    problem = None
    if (sink := options.get("sink", 0)) >= setting.n_ctx:
        problem = (
            f"--sink {sink}: expected fewer than the {setting.n_ctx:,} tokens of a sequence of "
            "these runs"
        )
    elif setting.sequences is not None and setting.sequences < export.least_documents:
        problem = (
            f"{counted(setting.sequences, 'sequence')}: expected {export.least_documents} or more, "
            "to say how sure a list is"
        )
    problem = problem or export.refusal(setting, options)
    if problem is not None:
        raise QueryError(f"export {export.name}: {problem}")


MODEL_FIELDS = ("model", "revision", "adapter", "tokenizer")
"""Fields of a scan that say what its model is."""


def scan_for(
    needs: Needs, fields: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], Scan, "ModelInfo"]:
    """The scan that measures what is needed of a model: its fields, the scan, and the model.

    All that a scan can be refused for is refused now, without a pass of the model.
    """
    from headcount.workers.model.info.description import describe, find_model, find_tokenizer

    keys = {override.partition("=")[0].strip() for override in overrides}
    # A model that is named twice is the last one.
    of_model = [text for text in overrides if _key(text) in MODEL_FIELDS]
    model = override_fields({**fields}, of_model)
    directory = find_model(model["model"], model.get("revision"))
    tokenizer = find_tokenizer(model.get("tokenizer"))
    info = describe(directory, None, model.get("adapter", "refuse"), tokenizer)
    # Which input was not asked for, if another one is.
    chooses_input = bool(keys & {"input", "input.family"})
    chooses_text = chooses_input or "input.files" in keys
    written = needs.scan_fields(fields["model"], info.n_ctx)
    if needs.about_text and chooses_text:
        plain = needs.scan_fields(fields["model"], info.n_ctx, reads_text=False)
        written = plain | {"input": BUNDLED_TEXT if not chooses_input else plain["input"]}
    if chooses_input:
        # Options of a family are no options of another one.
        written["input"] = {"family": written["input"]["family"]}
    try:
        return _resolved(written | dict(fields), overrides, needs, info)
    except ModelError:
        if not needs.about_text or chooses_text:
            raise
        # Without a tokenizer it reads no text.
        plain = needs.scan_fields(fields["model"], info.n_ctx, reads_text=False)
        return _resolved(plain | dict(fields), overrides, needs, info)


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _resolved(
    fields: dict[str, Any], overrides: Sequence[str], needs: Needs, info: "ModelInfo"
) -> tuple[dict[str, Any], Scan, "ModelInfo"]:
    from headcount.jobs.plan.resolved_scan import resolve

    changed = override_fields(fields, overrides)
    resolved = resolve(parse_scan(changed), info)
    if resolved.sequences.corpus is None:
        resolved.sequences.shard(0)  # Impossible options show when the first sequences are drawn.
    if (problem := problem_of_scan(resolved.scan, needs)) is not None:
        raise QueryError(f"--set: the scan {problem}; leave that out")
    return changed, resolved.scan, info


def problem_of_scan(scan: Scan, needs: Needs) -> str | None:
    """Why a run of a scan would lack what is needed. None if it would not."""
    names = {formula.name for kind in scan.kinds() for formula in scan.formulas(kind)}
    missing = [column for column in map(column_of, needs.statistics) if column not in names]
    missing += [f"the profile {name}" for name in needs.profiles if name not in names]
    missing += [] if "none" in map(str, scan.interventions) else ["the intervention none"]
    if missing:
        return f"does not measure {', '.join(missing)}, which the format needs"
    if needs.every_head and (scan.layers != "all" or scan.heads != "all"):
        return "does not measure every head, which the format needs"
    if needs.families and scan.input.family not in needs.families:
        return f"is over {scan.input.family}, expected {' or '.join(needs.families)}"
    return None


def setting_of_scan(scan: Scan, info: "ModelInfo", destination: Place) -> Setting:
    """What is known of the run of a scan before it begins."""
    return Setting(
        model=scan.model,
        revision=scan.revision,
        tokenizer=scan.tokenizer,
        adapter=scan.adapter,
        n_ctx=scan.n_ctx,
        bos=info.begins_with_bos(scan.bos),
        input_options=scan.input.options,
        sequences=None if scan.sequences == "all" else scan.sequences,
        n_layers=info.n_layers,
        n_heads=info.n_heads,
        n_kv_heads=info.n_kv_heads or info.n_heads,
        attention_layers=info.attention_layers_or_all,
        directory=None,
        runs=absolute(scan.out),
        destination=destination,
    )
