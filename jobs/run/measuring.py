"""Who measures the shards of a run: replicas on Ray, or one replica in this process."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from rich.console import Console

from headcount.jobs import phases
from headcount.jobs.console import say
from headcount.jobs.endings import is_finishing, work_begins
from headcount.jobs.plan.begun_with import begun_precisions
from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.jobs.run.loop import Begin, Measured, Outcomes, bring_to_end
from headcount.jobs.run.progress import WholeProgress
from headcount.jobs.run.shards import Attempts, GatheredElsewhere, order_of_driver
from headcount.schemas.errors import RunError, SilentStoreError
from headcount.schemas.files.commit import Failure
from headcount.schemas.scans.scan import Scan
from headcount.workers.interventions.settlement import check_begun
from headcount.workers.known_models import KnownModels
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.process import prepare_process
from headcount.workers.replica import Replica, is_device_failure, resolve_device
from headcount.workers.shard import committed_shard, failure_of, note_failure, run_shard


def run_to_end(
    plan: Plan,
    resources: Resources,
    console: Console,
    replica_class: type[Replica] = Replica,
    *,
    verify: bool = False,
    stop_at_failure: bool = False,
    allow_other_code: bool = False,
    models: KnownModels | None = None,
    all_runs: WholeProgress | None = None,
) -> list[Failure]:
    """Measure every shard of a run that is not done; returns the failures.

    `verify` reads every data file and measures damaged ones again. `stop_at_failure` raises at the
    first failure instead of measuring the other shards. `allow_other_code` continues a run that
    other measuring code began. `models` shares loaded models between runs in this process.
    `all_runs` is told what is measured of several runs.
    """

    def measure(shards: np.ndarray, begin: Begin, measured: Measured) -> Outcomes:
        if resources.replicas:
            tell = partial(say, console)
            return _measure_on_ray(plan, shards, resources, tell, replica_class, begin, measured)
        make = partial(replica_class, load=models.load) if models else replica_class
        return measure_in_process(plan, shards, resources, make, begin, measured)

    return bring_to_end(
        plan,
        measure,
        console,
        "waiting for replicas" if resources.replicas else "loading the model",
        verify=verify,
        stop_at_failure=stop_at_failure,
        allow_other_code=allow_other_code,
        all_runs=all_runs,
    )


def _measure_on_ray(
    plan: Plan,
    shards: np.ndarray,
    resources: Resources,
    tell: Callable[[str], None],
    replica_class: type[Replica],
    begin: Begin,
    measured: Measured,
) -> Outcomes:
    """Measure `shards` on Ray, which takes a second to import."""
    from headcount.jobs.cluster.ray_cluster import connect
    from headcount.jobs.run.ray_replicas import measure_on_ray

    return measure_on_ray(plan, shards, connect(resources), tell, replica_class, begin, measured)


def measure_in_process(
    plan: Plan,
    shards: np.ndarray,
    resources: Resources,
    make_replica: Callable[[ModelInfo, Scan, str], Replica] = Replica,
    begin: Begin = lambda: None,
    measured: Measured = lambda shard, tokens: None,
) -> Outcomes:
    """Measure `shards` in turn; yields each commit and failure. SIGTERM ends it after a shard.

    `begin` is called once the replica is there, and before the first shard; `measured` with how
    many tokens of a shard are measured, after each batch and within a long one.
    """
    device = resolve_device(resources.device)
    prepare_process(threads=resources.cores or None)
    phases.note("loading the model")
    replica = make_replica(plan.info, plan.scan, device)
    check_begun(begun_precisions(plan.run), replica.precision, plan.run.run_id, device)
    begin()
    attempts = Attempts(plan.run)
    elsewhere = GatheredElsewhere(plan.run)
    remaining = deque(order_of_driver(plan.run, shards).tolist())
    while remaining and not is_finishing():
        shard = remaining.popleft()
        if shard in elsewhere:
            continue
        attempt = attempts.failed(shard) + 1
        replica.on_tokens = partial(measured, shard)
        measured(shard, 0)
        try:
            outcome = committed_shard(plan.run, shard, int(plan.manifest.stops(shard)))
            if outcome is None:
                outcome = run_shard(replica, plan.run, plan.sequences.shard(shard), attempt)
        except SilentStoreError:
            raise  # It was asked for minutes, and would be again for a note or another shard.
        except Exception as error:
            outcome = note_failure(plan.run, failure_of(shard, error), attempt)
            # After such an error every call on the device fails, so the other shards would too.
            if is_device_failure(error):
                raise RunError(
                    f"shard {shard}: {outcome.error}; the same command continues in a new process"
                ) from None
            if attempts.may_try_again(shard):
                # At once: then a cause that is in every shard is known after a few of them.
                remaining.appendleft(shard)
                outcome = replace(outcome, is_last=False)
        # Before the first outcome the model was loaded, which is not worth waiting for.
        work_begins()
        yield outcome
