"""The options that several commands share, and what a mistaken one is answered."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.core import TyperCommand

from headcount.schemas.errors import ScanError

URL = "http://HOST:8265"
Address = Annotated[str, typer.Option(metavar=URL, help="Address of the cluster's dashboard.")]
MaybeAddress = Annotated[
    str | None,
    typer.Option(
        metavar=URL, help="Address of a cluster's dashboard. By default no cluster is asked."
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME",
        help="Pass this environment variable to the job. Everybody who may read the cluster's "
        "jobs can read its value.",
    ),
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's name or id, its directory, or its address in a store."
    ),
]
Runs = Annotated[
    str,
    typer.Option(
        metavar="DIRECTORY",
        help="Directory in which to look for a run by its name; a path, or an address in a store.",
    ),
]
RunOrJob = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, directory or address.")]
ScanFile = Annotated[Path, typer.Argument(metavar="SCAN", help="A scan file (TOML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the scan."),
]
_REPLICAS = "Number of replicas. Each is one model in a process of its own."
_OR_HERE = f"{_REPLICAS} 0 measures in this process, without Ray."
_BY_GPUS = f"{_OR_HERE} By default one for each GPU here, 0 without a GPU, and 1 on a cluster."
Replicas = Annotated[int, typer.Option(min=1, help=_REPLICAS)]
LocalReplicas = Annotated[int, typer.Option(min=0, help=_OR_HERE)]
MaybeReplicas = Annotated[int | None, typer.Option(min=0, help=_BY_GPUS)]
Cores = Annotated[
    int,
    typer.Option(
        min=0,
        help="CPU cores of each replica. 0 divides the cores of this machine; on a cluster it "
        "means 1.",
    ),
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Device of the replicas. auto uses GPUs if there are enough."),
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Ray cluster that this machine belongs to. By default Ray is started here.",
    ),
]
New = Annotated[
    bool,
    typer.Option(
        "--new",
        help="Start another run of the scan, NAME-HASH-2, -3 …, beside the existing runs.",
    ),
]
SkipDuplicates = Annotated[
    bool,
    typer.Option(
        "--skip-duplicates",
        help="Of checkpoints with the same weights measure only the latest step.",
    ),
]
AllowOtherCode = Annotated[
    bool,
    typer.Option(
        "--allow-other-code",
        help="Continue a run that other measuring code began. Every shard records which code "
        "measured it.",
    ),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="Also take definitions from this Python file, as from those that the scan names.",
    ),
]
TrustPlugins = Annotated[
    bool,
    typer.Option(
        "--trust-plugins",
        help="Run the plug-ins that the run keeps, also if they have never run on this machine. "
        "They can do whatever you can.",
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Read every file of the shards that are done, and measure damaged shards again.",
    ),
]
VerifyCorpus = Annotated[
    bool,
    typer.Option(
        "--verify-corpus",
        help="Read the texts of the corpus again and compare them with their tokens; prepare again "
        "what differs.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]


class CommandOfAScan(TyperCommand):
    """A command that says how a field of a scan is set, if somebody writes it as an option."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        names = [name for each in self.params for name in (*each.opts, *each.secondary_opts)]
        for word, following in zip(args, [*args[1:], "VALUE"], strict=False):
            flag, _, value = word.partition("=")
            if not flag.startswith("--") or flag in (*names, *ctx.help_option_names):
                continue
            # Only a mistake waits for this import.
            from headcount.schemas.scans.scan import Scan

            key = flag.removeprefix("--").replace("-", "_")
            if key.partition(".")[0] in Scan.model_fields:
                advice = shlex.join(["--set", f"{key}={value or following}"])
                raise ScanError(f"{flag}: a field of a scan, and no option; write {advice}")
        return super().parse_args(ctx, args)
