"""`srun` and `scontrol` of an allocation whose nodes are namespaces (`tests/tools/slurm.py`).

They know what `deploy/slurm.sh` uses, and refuse the rest.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def nodes() -> dict[str, int]:
    """The nodes of the allocation, and a process in the namespaces of each."""
    return json.loads(os.environ["PLAYED_NODES"])


def on_node(name: str, directory: Path, command: list[str]) -> list[str]:
    """A command line that runs another one on a node, in a directory that all nodes share."""
    words = ["nsenter", f"--target={nodes()[name]}", "--net", "--uts", "--mount"]
    return [*words, "sh", "-c", 'cd "$0" && exec "$@"', str(directory), *command]


def srun(words: list[str]) -> int:
    """Run a task on each of some nodes; a signal reaches all. Returns the largest exit code."""
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--export", choices=["ALL"])
    parser.add_argument("--cpu-bind", choices=["none"])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--nodelist", default=",".join(nodes()))
    parser.add_argument("--exclude", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    excluded = options.exclude.split(",")
    names = [name for name in options.nodelist.split(",") if name not in excluded]
    if not options.nodes == options.ntasks == len(names):
        parser.error(f"{options.ntasks} tasks on {options.nodes} nodes, and there are {names}")
    variables = {"SLURM_LAUNCH_NODE_IPADDR": os.environ["PLAYED_ADDRESS"]}
    variables["SLURM_CPUS_ON_NODE"] = "1"
    tasks = [
        subprocess.Popen(on_node(name, Path.cwd(), options.command), env=os.environ | variables)
        for name in names
    ]
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
    return max(task.wait() for task in tasks)


def scontrol(words: list[str]) -> int:
    """Name the nodes, or note that a job was put back into the queue."""
    if words[:2] == ["show", "hostnames"]:
        assert words[2:] == [os.environ["SLURM_JOB_NODELIST"]]
        print("\n".join(nodes()))
    else:
        assert words == ["requeue", os.environ["SLURM_JOB_ID"]], words
        Path(os.environ["PLAYED_QUEUE"]).write_text(words[1])
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
