"""The scan that an export needs, and the trial of what it chose, on the model itself.

Exports (`exports`) know neither models nor how a scan is run. `headcount.py` hands these functions
to them. Imports wait until they are needed, because every command loads this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from schemas.places import Place


class CacheCutLike(Protocol):
    """Which KV heads keep their whole cache, as `exports.export_registry` has it."""

    @property
    def whole_heads(self) -> list[tuple[int, int]]:
        """Layer and KV head of those that do."""
        ...

    @property
    def sink(self) -> int:
        """First keys that the others keep."""
        ...

    @property
    def recent(self) -> int:
        """Last keys that the others keep."""
        ...


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


def check_exported_heads(
    model: str, cut: CacheCutLike, n_ctx: int, device: Literal["auto", "cpu", "cuda"]
) -> pa.Table:
    """What a model loses with a cache that is cut so: recall of needles, loss after repeats."""
    from jobs.head_check import check_heads
    from workers.process import prepare_process

    prepare_process()
    return check_heads(model, cut.whole_heads, cut.sink, cut.recent, n_ctx=n_ctx, device=device)
