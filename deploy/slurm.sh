#!/bin/bash
# A scan on the nodes of one Slurm allocation, which puts itself back into the queue when its time is over.
#
#     sbatch deploy/slurm.sh texts.toml --device cuda --replicas 4
#     sbatch --nodes=4 deploy/slurm.sh texts.toml --device cuda --replicas 16
#
# docs/guide/cluster.md has what it needs, docs/internals/operations.md what happens at SIGTERM.
#SBATCH --job-name=headcount
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60

# A shell handles no signal while a command runs in front of it, so the scan runs behind it and gets the signal from here.
scan='' stopping='' steps=''
trap 'stopping=1; [ -z "$scan" ] || kill -TERM "$scan"' TERM

# What a node runs until its step gets SIGTERM. Ray keeps its files in a directory that nobody else can have made. It gives up
# if its agent, a Python process, is not there in 15 s, which file systems that all nodes read at once may take: it is tried again.
files=/tmp/headcount-$SLURM_JOB_ID
run_ray() {
    trap 'stopping=1; kill $!' TERM
    for try in 1 2 3; do
        rm -rf "$files" && mkdir -m 700 "$files" || return
        RAY_TMPDIR=$files ray start --block --num-cpus="$SLURM_CPUS_ON_NODE" --object-store-memory=1000000000 "$@" > "$files/said" &
        [ -z "$stopping" ] || kill $!
        wait
        wait
        [ -z "$stopping" ] || break
    done
    rm -rf "$files"
}

# Prints the first of each hundred ports that are free on a node.
free_hundreds='
import socket, sys

def is_free(port):
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True

for step in range(100):
    first = 20000 + (int(sys.argv[1]) + step) % 100 * 100
    if all(is_free(port) for port in range(first, first + 100)):
        print(first)
'

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    # Only this job has the token. Ray's /metrics would answer without one, so there is none.
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_enable_metrics_collection=0 DASHBOARD_METRIC_PORT=-1 RAY_USAGE_STATS_ENABLED=0

    # A step has all cores and GPUs that the job has on its nodes.
    step=(srun --export=ALL --cpu-bind=none)
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    first=${first%%$'\n'*}
    others=$((SLURM_JOB_NUM_NODES - 1))
    # This node's address on the network of the nodes is the one that another node's step is started from.
    address=$("${step[@]}" --nodes=1 --ntasks=1 --exclude="$first" printenv SLURM_LAUNCH_NODE_IPADDR) || exit 2

    # A hundred ports below those that systems hand out, and that nothing on any of the nodes holds. Jobs begin to look for them at
    # different places.
    port=$("${step[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" python3 -c "$free_hundreds" "$SLURM_JOB_ID" |
        awk -v nodes="$SLURM_JOB_NUM_NODES" '++free[$1] == nodes && !port { port = $1 } END { print port }')
    [ -n "$port" ] || { echo "error: no hundred ports between 20000 and 30000 are free on all nodes" >&2; exit 2; }
    ray=(bash -c "files=$files; $(declare -f run_ray); run_ray \"\$@\"" run_ray
        --node-manager-port=$((port + 1)) --object-manager-port=$((port + 2)) --runtime-env-agent-port=$((port + 3))
        --dashboard-agent-listen-port=$((port + 4)) --dashboard-agent-grpc-port=$((port + 5)) --metrics-export-port=$((port + 7))
        --min-worker-port=$((port + 10)) --max-worker-port=$((port + 99)))
    rm -rf "$files"
    "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$first" "${ray[@]}" --head --port=$port --node-ip-address="$address" \
        --ray-client-server-port=$((port + 6)) --include-dashboard=false --no-monitor &
    steps=$!
    until grep -qs "Ray runtime started" "$files/said"; do
        kill -0 $steps 2> /dev/null || { echo "error: $first: Ray's head did not start; what it said is above" >&2; exit 2; }
        sleep 1
    done
    "${step[@]}" --nodes=$others --ntasks=$others --exclude="$first" "${ray[@]}" --address="$address:$port" &
    steps="$steps $!"
    cluster=(--address "$address:$port")
fi

headcount scan "${cluster[@]}" "$@" &
scan=$!
[ -z "$stopping" ] || kill -TERM "$scan"
wait "$scan"
code=$?
# The signal has ended that wait, and the scan takes up to 30 s to finish what it has in hand.
if [ -n "$stopping" ]; then
    wait "$scan"
    code=$?
fi
if [ -n "$steps" ]; then
    kill -TERM $steps 2> /dev/null
    wait
fi

if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
