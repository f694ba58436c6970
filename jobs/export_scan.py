"""The scan that an export needs, run to its end: one command goes from a model to the file.

Exports (`exports`) know neither models nor how a scan is run. `headcount.py` hands this function to
them. Imports wait until they are needed, because every command loads this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from schemas.places import Place


def run_export_scan(
    fields: dict[str, Any],
    overrides: list[str],
    name: str,
    device: Literal["auto", "cpu", "cuda"],
) -> Place:
    """Run a scan in this process, or continue its run; returns where the run lies.

    `fields` are those of a scan file, and `overrides` what a user sets otherwise: `key=value`.
    Sequences are no longer than the model takes.
    """
    from jobs.scan_api import run_scan
    from schemas.scan import override_fields
    from workers.model.model_info import describe, find_model

    info = describe(find_model(fields["model"], fields.get("revision")))
    fitting = fields | {"n_ctx": min(fields["n_ctx"], info.n_ctx)}
    return run_scan(
        override_fields(fitting, overrides),
        {},
        name=name,
        replicas=0,
        cores=0,
        device=device,
        address=None,
        new=False,
        quiet=False,
    )
