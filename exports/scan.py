"""The scan that an export needs, and the trial of what it chose, on the model itself.

Imports wait until they are needed: most exports need neither a model nor what runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pyarrow as pa

    from headcount.exports.registry import CacheCut
    from headcount.schemas.files.places import Place


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
    from headcount.jobs.api import run_scan
    from headcount.schemas.scans.scan import override_fields
    from headcount.workers.model.files.model_info import describe, find_model

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
    model: str, cut: CacheCut, n_ctx: int, device: Literal["auto", "cpu", "cuda"]
) -> tuple[pa.Table, list[str]]:
    """What a model loses with a cache that is cut so: recall of needles, loss after repeats.

    If the number of heads is open, it is the smallest one with which nothing is lost. Returns the
    table, and what it says in lines.
    """
    from headcount.workers.head_check import JUDGED_SEED, SEARCHED_SEED, HeadTrial, verdict
    from headcount.workers.process import prepare_process

    prepare_process()
    trial = HeadTrial(model, cut.sink, cut.recent, n_ctx=n_ctx, device=device)
    lines: list[str] = []
    heads = cut.whole_heads
    ranked = cut.ranked_heads
    if ranked is not None:
        # A number that was found on some sequences is judged on others.
        kept = trial.fewest(ranked, seed=SEARCHED_SEED)
        heads = ranked[:kept]
        sparsity = 1 - kept / len(ranked)
        # All or none of them is no choice.
        advice = f"; --sparsity {sparsity:.4g} chooses them" if 0 < sparsity < 1 else ""
        lines.append(
            f"number of heads: with {kept} of {len(ranked)} nothing is lost on other sequences"
            f"{advice}"
        )
    # A layer that does not attend has scores, but no cache.
    heads = [head for head in heads if head in trial.kv_heads]
    table = trial.table(heads, seed=JUDGED_SEED)
    return table, [*lines, *verdict(table)]
