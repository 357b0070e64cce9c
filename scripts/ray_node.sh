#!/usr/bin/env bash
# One node of a Ray cluster without Slurm: Kubernetes Indexed Jobs (python -m mrl.launch k8s) and DGX Cloud Lepton batch jobs (... lepton).
# Every node runs it; the node of rank 0 is the head, waits for the others, runs COMMAND and ends with its exit code; the others follow the head.
#
#   NODE_RANK        this node, from 0                   [k8s: JOB_COMPLETION_INDEX; Lepton: LEPTON_JOB_WORKER_INDEX]
#   NUM_NODES        of the cluster                      [Lepton: CLUSTER_NUM_NODES, else LEPTON_JOB_TOTAL_WORKERS]
#   GPUS_PER_NODE    of each node, 0 without             [Lepton: CLUSTER_GPU_PER_NODE, else LEPTON_RESOURCE_ACCELERATOR_NUM]
#   HEAD_HOST        name or address of rank 0's node    [Lepton: from LEPTON_JOB_SERVICE_PREFIX and LEPTON_SUBDOMAIN]
#   COMMAND          what rank 0 runs                    [Lepton: else python -m mrl.train with CONFIG_PATH and CHECKPOINT_DIR]
#   RAY_HEAD_PORT=6379 RAY_DASHBOARD_PORT=8265 JOIN_TIMEOUT_S=1500 UNITS_PER_NODE (what counts on nodes without GPUs)
#   RAY_TOKEN_FILE   file with the cluster's secret, the same on all nodes (a mounted Secret); without it anybody who reaches the port may join
set -euo pipefail

fail() {
    echo "ERROR: $*"
    exit 1
}

if [[ -n ${LEPTON_JOB_NAME:-} ]]; then
    prefix=${LEPTON_JOB_SERVICE_PREFIX:-$LEPTON_JOB_NAME}
    HEAD_HOST=${HEAD_HOST:-$prefix-0.${LEPTON_SUBDOMAIN:-$LEPTON_JOB_NAME-job-svc}}
    NODE_RANK=${NODE_RANK:-${LEPTON_JOB_WORKER_INDEX:-}}
    NUM_NODES=${NUM_NODES:-${CLUSTER_NUM_NODES:-${LEPTON_JOB_TOTAL_WORKERS:-}}}
    GPUS_PER_NODE=${GPUS_PER_NODE:-${CLUSTER_GPU_PER_NODE:-${LEPTON_RESOURCE_ACCELERATOR_NUM:-}}}
    # The interface names that Lepton sets are those of nodes with all eight GPUs.
    if [[ ${GPUS_PER_NODE:-} != 8 ]]; then unset NCCL_SOCKET_IFNAME; fi
    if [[ -z ${COMMAND:-} ]]; then
        missing=()
        for name in CONFIG_PATH CHECKPOINT_DIR; do [[ -n ${!name:-} ]] || missing+=("$name"); done
        ((${#missing[@]} == 0)) || fail "missing environment variables: ${missing[*]}; set them for the job, or COMMAND"
        COMMAND="python -m mrl.train $CONFIG_PATH cluster.num_nodes=$NUM_NODES cluster.gpus_per_node=$GPUS_PER_NODE checkpointing.checkpoint_dir=$CHECKPOINT_DIR"
    fi
fi
NODE_RANK=${NODE_RANK:-${JOB_COMPLETION_INDEX:-}}
RAY_HEAD_PORT=${RAY_HEAD_PORT:-6379}
RAY_DASHBOARD_PORT=${RAY_DASHBOARD_PORT:-8265}
JOIN_TIMEOUT_S=${JOIN_TIMEOUT_S:-1500}

missing=()
for name in NODE_RANK NUM_NODES GPUS_PER_NODE HEAD_HOST COMMAND; do [[ -n ${!name:-} ]] || missing+=("$name"); done
((${#missing[@]} == 0)) || fail "missing environment variables: ${missing[*]}; the head of this file says what they are"
((NODE_RANK < NUM_NODES)) || fail "NODE_RANK=$NODE_RANK is not below NUM_NODES=$NUM_NODES"
UNITS_PER_NODE=${UNITS_PER_NODE:-$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))}

export RAY_USAGE_STATS_ENABLED=0
if [[ -n ${RAY_TOKEN_FILE:-} ]]; then
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$RAY_TOKEN_FILE
else
    export RAY_AUTH_MODE=disabled
    echo "WARNING: RAY_TOKEN_FILE is not set: whoever reaches port $RAY_HEAD_PORT may run code here"
fi

address=$(hostname -I | awk '{print $1}')
# Gloo looks its own host name up.
getent hosts "$(hostname)" >/dev/null || echo "$address $(hostname)" >>/etc/hosts
echo "Node $NODE_RANK of $NUM_NODES: $(hostname), $address, $GPUS_PER_NODE GPUs; head: $HEAD_HOST:$RAY_HEAD_PORT"
arguments=(
    --node-ip-address="$address" --num-gpus="$GPUS_PER_NODE" --disable-usage-stats --log-style=record --log-color=false
    --resources="{\"worker_units\": $UNITS_PER_NODE, \"nrl_tag_ALL\": 1}"
)

if ((NODE_RANK > 0)); then
    until (echo >"/dev/tcp/$HEAD_HOST/$RAY_HEAD_PORT") 2>/dev/null; do
        ((SECONDS < JOIN_TIMEOUT_S)) || fail "the head $HEAD_HOST:$RAY_HEAD_PORT has not answered within $JOIN_TIMEOUT_S s (JOIN_TIMEOUT_S)"
        sleep 2
    done
    head=$(getent ahostsv4 "$HEAD_HOST" | awk 'NR == 1 {print $1}')
    code=0
    ray start --address="$head:$RAY_HEAD_PORT" "${arguments[@]}" --block || code=$?
    # The head's node knows how the run ended.
    echo "Ray on this node ended with code $code, as it does with the head's"
    exit 0
fi

dashboard=true
python -c "import ray.dashboard.optional_deps, ray._private.metrics_agent" 2>/dev/null || dashboard=false
ray start --head --port="$RAY_HEAD_PORT" --include-dashboard="$dashboard" --dashboard-host=127.0.0.1 --dashboard-port="$RAY_DASHBOARD_PORT" "${arguments[@]}"
trap 'ray stop --force >/dev/null 2>&1' EXIT
export RAY_ADDRESS=$address:$RAY_HEAD_PORT
python -m mrl.launch wait --num-nodes "$NUM_NODES" --units $((NUM_NODES * UNITS_PER_NODE)) --timeout "$JOIN_TIMEOUT_S" || fail "not all nodes joined; see above"
echo "Cluster ready: $NUM_NODES nodes, $((NUM_NODES * GPUS_PER_NODE)) GPUs"
code=0
bash -c "$COMMAND" || code=$?
echo "Training exit code: $code"
exit "$code"
