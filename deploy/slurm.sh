#!/bin/bash
# A scan on one node of a Slurm cluster, which puts itself back into the queue when its time is over.
#
#     sbatch deploy/slurm.sh texts.toml --device cuda --replicas 4
#
# docs/internals/operations.md has what happens at SIGTERM.
#SBATCH --job-name=headcount
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60

headcount scan "$@" &
scan=$!

# A shell handles no signal while a command runs in front of it, so the scan runs behind it and gets the signal from here.
trap 'stopping=1; kill -TERM "$scan"' TERM
wait "$scan"
code=$?
# The signal has ended that wait, and the scan takes up to 30 s to finish what it has in hand.
if [ -n "$stopping" ]; then
    wait "$scan"
    code=$?
fi

if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
