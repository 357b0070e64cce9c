#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One node of a Ray cluster without Slurm: Kubernetes Indexed Jobs (python -m mrl.launch k8s) and DGX Cloud Lepton batch jobs (... lepton).
# Every node runs it; the node of rank 0 is the head, waits for the others, runs COMMAND and ends with its exit code; the others follow the head.
# SIGTERM and SIGUSR1 on the head go to COMMAND, which saves a checkpoint and ends with 75; the others wait for it.
#
#   NODE_RANK        this node, from 0                   [k8s: JOB_COMPLETION_INDEX; Lepton: LEPTON_JOB_WORKER_INDEX]
#   NUM_NODES        of the cluster                      [Lepton: CLUSTER_NUM_NODES, else LEPTON_JOB_TOTAL_WORKERS]
#   GPUS_PER_NODE    of each node, 0 without             [Lepton: CLUSTER_GPU_PER_NODE, else LEPTON_RESOURCE_ACCELERATOR_NUM]
#   HEAD_HOST        name or address of rank 0's node    [Lepton: from LEPTON_JOB_SERVICE_PREFIX and LEPTON_SUBDOMAIN]
#   COMMAND          what rank 0 runs                    [Lepton: else SCRIPT_PATH with CONFIG_PATH and CHECKPOINT_DIR]
#   RAY_HEAD_PORT=6379 RAY_DASHBOARD_PORT=8265 MIN_WORKER_PORT=2000 MAX_WORKER_PORT=2999 JOIN_TIMEOUT_S=1500
#   UNITS_PER_NODE   what counts on nodes without GPUs
#   RAY_TOKEN_FILE   file with the cluster's secret, the same on all nodes (a mounted Secret), or RAY_AUTH_TOKEN, the secret itself;
#                    with neither anybody who reaches the port may run code here: only with MRL_RAY_WITHOUT_TOKEN=1
set -euo pipefail

fail() {
    echo "ERROR: $*"
    exit 1
}

# require NAME...: ends unless all of these variables are set.
require() {
    local name missing=()
    for name in "$@"; do [[ -n ${!name:-} ]] || missing+=("$name"); done
    ((${#missing[@]} == 0)) || fail "missing environment variables: ${missing[*]}; set them for the job (the head of $0 says what they are)"
}

read_lepton() {
    local prefix=${LEPTON_JOB_SERVICE_PREFIX:-$LEPTON_JOB_NAME}
    HEAD_HOST=${HEAD_HOST:-$prefix-0.${LEPTON_SUBDOMAIN:-$LEPTON_JOB_NAME-job-svc}}
    NODE_RANK=${NODE_RANK:-${LEPTON_JOB_WORKER_INDEX:-}}
    NUM_NODES=${NUM_NODES:-${CLUSTER_NUM_NODES:-${LEPTON_JOB_TOTAL_WORKERS:-}}}
    GPUS_PER_NODE=${GPUS_PER_NODE:-${CLUSTER_GPU_PER_NODE:-${LEPTON_RESOURCE_ACCELERATOR_NUM:-}}}
    export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_IGNORE_CPU_AFFINITY=${NCCL_IGNORE_CPU_AFFINITY:-1}
    # The interface names that Lepton sets are those of nodes with all eight GPUs.
    if [[ ${GPUS_PER_NODE:-} != 8 ]]; then unset NCCL_SOCKET_IFNAME; fi
    if [[ -z ${COMMAND:-} ]]; then
        require NUM_NODES GPUS_PER_NODE CONFIG_PATH CHECKPOINT_DIR
        if [[ $CHECKPOINT_DIR != /* ]]; then
            fail "CHECKPOINT_DIR=$CHECKPOINT_DIR is lost with the container, and no other node sees it; name a folder of the mounted storage"
        fi
        COMMAND="$(lepton_program) --config $CONFIG_PATH cluster.num_nodes=$NUM_NODES cluster.gpus_per_node=$GPUS_PER_NODE checkpointing.checkpoint_dir=$CHECKPOINT_DIR"
    fi
    echo "Lepton job $LEPTON_JOB_NAME: config ${CONFIG_PATH:-none}, checkpoints ${CHECKPOINT_DIR:-none}, command: $COMMAND"
}

# A script that is there, or mrl's own in place of NeMo RL's examples.
lepton_program() {
    case ${SCRIPT_PATH:-} in
        "" | examples/*run_*.py) echo "python -m mrl.train" ;;
        *)
            [[ -f $SCRIPT_PATH ]] || fail "SCRIPT_PATH=$SCRIPT_PATH is not there; unset it to run python -m mrl.train" >&2
            echo "python $SCRIPT_PATH"
            ;;
    esac
}

# Ray believes what it is told; a device that is not there would show as a hang.
check_devices() {
    local found
    found=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
    ((found >= GPUS_PER_NODE)) || fail "GPUS_PER_NODE=$GPUS_PER_NODE, but nvidia-smi lists $found on this node"
    if [[ ${FI_PROVIDER:-} == efa ]] && ! compgen -G "/dev/infiniband/uverbs*" >/dev/null; then
        fail "FI_PROVIDER=efa, but this node has no EFA device (/dev/infiniband); ask for vpc.amazonaws.com/efa, or unset FI_PROVIDER"
    fi
}

# Prints the address of HEAD_HOST as soon as it has one.
head_address() {
    local found=
    until [[ -n $found ]]; do
        ((SECONDS < JOIN_TIMEOUT_S)) || fail "the name $HEAD_HOST has had no address that other nodes reach (loopback is none) for $JOIN_TIMEOUT_S s (HEAD_HOST, JOIN_TIMEOUT_S)" >&2
        found=$(getent ahostsv4 "$HEAD_HOST" | awk '$1 !~ /^127\./ {print $1; exit}' || true)
        [[ -n $found ]] || sleep 1
    done
    echo "$found"
}

head_answers() {
    (echo >"/dev/tcp/$head/$RAY_HEAD_PORT") 2>/dev/null
}

# The name of the node of a rank, as the other launchers' users know it: NAME-0.DOMAIN is that of rank 0.
node_name() {
    if [[ $HEAD_HOST == *-0.* ]]; then echo "${HEAD_HOST%%-0.*}-$1"; else echo "node-$1"; fi
}

# run COMMAND...: runs it in a group of its own and hands its code on. Signals that come meanwhile are for the group.
run() {
    local code
    setsid "$@" &
    child=$!
    while true; do
        caught='' code=0
        wait "$child" || code=$?
        [[ -n $caught ]] || break
    done
    child=
    return "$code"
}

pass_on() {
    caught=1 stopped=1
    echo "SIG$1: the command is asked to save a checkpoint and end"
    if [[ -n $child ]]; then kill "-$1" -- "-$child" 2>/dev/null || true; fi
}

# A worker: Ray, until it ends or the head has gone.
follow_head() {
    local ray code=0 silent=0
    until head_answers; do
        ((SECONDS < JOIN_TIMEOUT_S)) || fail "the head $HEAD_HOST:$RAY_HEAD_PORT has not answered within $JOIN_TIMEOUT_S s (JOIN_TIMEOUT_S)"
        sleep 1
    done
    # While the head saves a checkpoint, this node is needed.
    trap : TERM USR1
    setsid ray start --address="$head:$RAY_HEAD_PORT" "${arguments[@]}" --block &
    ray=$!
    while kill -0 "$ray" 2>/dev/null && ((silent < SILENT_CHECKS)); do
        if head_answers; then silent=0; else silent=$((silent + 1)); fi
        sleep 2 &
        wait $! || true
    done
    if ((silent == SILENT_CHECKS)); then
        echo "The head has ended; so does this node"
        kill -TERM "$ray" 2>/dev/null || true
        wait "$ray" || true
        exit 0
    fi
    wait "$ray" || code=$?
    if head_answers; then fail "Ray on this node ended with code $code, while the head goes on"; fi
    echo "The head has ended; so has Ray on this node"
}

run_head() {
    local dashboard=true names rank code=0
    trap 'pass_on TERM' TERM
    trap 'pass_on USR1' USR1
    python -c "import ray.dashboard.optional_deps, ray._private.metrics_agent" 2>/dev/null || dashboard=false
    trap 'ray stop --force >/dev/null 2>&1' EXIT
    ray start --head --port="$RAY_HEAD_PORT" --include-dashboard="$dashboard" --dashboard-host=127.0.0.1 --dashboard-port="$RAY_DASHBOARD_PORT" \
        "${arguments[@]}" || fail "the Ray head has not started; see above"
    export RAY_ADDRESS=$address:$RAY_HEAD_PORT
    names=$(for ((rank = 0; rank < NUM_NODES; rank++)); do node_name "$rank"; done | paste -sd,)
    run python -m mrl.launch wait --nodes "$names" --units $((NUM_NODES * UNITS_PER_NODE)) --timeout "$JOIN_TIMEOUT_S" || code=$?
    if [[ -n $stopped ]]; then
        echo "Stopped before the command began"
        exit 75
    fi
    ((code == 0)) || fail "not all nodes joined; see above"
    echo "Cluster ready: $NUM_NODES nodes, $((NUM_NODES * GPUS_PER_NODE)) GPUs"
    # The shell stays while the command is signalled, and hands its code on.
    run bash -c "trap : TERM USR1; $COMMAND" || code=$?
    echo "Training exit code: $code"
    exit "$code"
}

child='' stopped=''
# At most so often, every 2 s, may the head not answer before it counts as gone.
SILENT_CHECKS=10
JOIN_TIMEOUT_S=${JOIN_TIMEOUT_S:-1500}
RAY_HEAD_PORT=${RAY_HEAD_PORT:-6379}
RAY_DASHBOARD_PORT=${RAY_DASHBOARD_PORT:-8265}
if [[ -n ${LEPTON_JOB_NAME:-} ]]; then read_lepton; fi
NODE_RANK=${NODE_RANK:-${JOB_COMPLETION_INDEX:-}}
require NODE_RANK NUM_NODES GPUS_PER_NODE HEAD_HOST COMMAND
# What begins with a variable is not known here.
relative="checkpointing\.checkpoint_dir=['\"]?([^/\$'\"[:space:]][^[:space:]]*)"
if [[ $COMMAND =~ $relative ]]; then
    fail "COMMAND: checkpointing.checkpoint_dir=${BASH_REMATCH[1]} is lost with the container, and no other node sees it; name a folder of the mounted storage"
fi
((NODE_RANK < NUM_NODES)) || fail "NODE_RANK=$NODE_RANK is not below NUM_NODES=$NUM_NODES"
UNITS_PER_NODE=${UNITS_PER_NODE:-$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))}
check_devices

# Ray would start a Python process for each core of the node, of which mrl uses none: its actors have environments of their own.
export RAY_prestart_worker_first_driver=0
# Nothing waits for the dashboard but the start of Ray, which a busy host must not fail for it.
export RAY_DASHBOARD_STARTUP_TIMEOUT_S=${RAY_DASHBOARD_STARTUP_TIMEOUT_S:-600}
export RAY_USAGE_STATS_ENABLED=0 RAY_raylet_start_wait_time_s=${RAY_raylet_start_wait_time_s:-120} RAY_AUTH_MODE=token
if [[ -n ${RAY_TOKEN_FILE:-} ]]; then
    export RAY_AUTH_TOKEN_PATH=$RAY_TOKEN_FILE
elif [[ -z ${RAY_AUTH_TOKEN:-} ]]; then
    [[ ${MRL_RAY_WITHOUT_TOKEN:-} == 1 ]] || fail "neither RAY_TOKEN_FILE nor RAY_AUTH_TOKEN is set: whoever reaches port $RAY_HEAD_PORT could run code here; set one of them, the same on all nodes (openssl rand -hex 32), or MRL_RAY_WITHOUT_TOKEN=1 if nobody else can reach the nodes"
    export RAY_AUTH_MODE=disabled
    echo "WARNING: neither RAY_TOKEN_FILE nor RAY_AUTH_TOKEN is set: whoever reaches port $RAY_HEAD_PORT may run code here"
fi

head=$(head_address)
# Of several addresses the one by which this node and the head reach each other.
address=$(python -c "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM); s.connect((sys.argv[1], 9)); print(s.getsockname()[0])" "$head")
# Gloo looks its own host name up.
getent hosts "$(hostname)" >/dev/null || echo "$address $(hostname)" >>/etc/hosts
echo "Node $NODE_RANK of $NUM_NODES: $(node_name "$NODE_RANK") on $(hostname), $address, $GPUS_PER_NODE GPUs; head: $HEAD_HOST:$RAY_HEAD_PORT"
# Ray's own choice of worker ports has those of kubelet among them, which is in the way where pods use the host's network.
arguments=(
    --node-ip-address="$address" --node-name="$(node_name "$NODE_RANK")" --num-gpus="$GPUS_PER_NODE" --disable-usage-stats
    --min-worker-port="${MIN_WORKER_PORT:-2000}" --max-worker-port="${MAX_WORKER_PORT:-2999}" --log-style=record --log-color=false
    --resources="{\"worker_units\": $UNITS_PER_NODE, \"nrl_tag_ALL\": 1}"
)
if ((NODE_RANK > 0)); then follow_head; else run_head; fi
