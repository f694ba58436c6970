"""The subcommand `calibrate`."""

from typing import Annotated

import typer

from headcount.jobs.commands.cluster import Run, Runs
from headcount.jobs.commands.options import ClusterAddress, Cores, DeviceOption, MaybeReplicas

commands = typer.Typer(rich_markup_mode=None)

DRAWN_HEADS, DRAWN_SEQUENCES = 20, 64
"""How many heads are measured, and on how many sequences, if nobody says."""


@commands.command()
def calibrate(
    run: Run,
    runs: Runs = "runs",
    heads: Annotated[
        int, typer.Option(min=2, help="Number of heads that are drawn, equally from all layers.")
    ] = DRAWN_HEADS,
    sequences: Annotated[
        int, typer.Option(min=2, help="Number of the run's sequences that they are measured on.")
    ] = DRAWN_SEQUENCES,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    replicas: MaybeReplicas = None,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    address: ClusterAddress = None,
) -> None:
    """Measure some of the interventions whose effects a run estimates.

    The loss under each of them is measured in a run of its own, NAME-calibration, which lies beside
    the first and continues like any other. Views, reports and exports of effects then say how well
    the estimates agree.
    """
    from headcount.jobs.api import measure_losses_beside
    from headcount.jobs.commands.cluster import run_directory
    from headcount.jobs.plan.calibration import calibration_of
    from headcount.jobs.resources import Resources

    directory = run_directory(run, runs)
    resources = Resources.asked_for(replicas, cores, device, address)
    fields = calibration_of(directory, heads, sequences, seed)
    path = measure_losses_beside(directory, fields, "calibration", resources)
    print(path)
    print(f"  headcount query {path.parent} effect_calibration")
