#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Submits GRPO of Nemotron 3 Nano 30B-A3B to Slurm, on 32 nodes of 8 GPUs; may be called from any folder. Checks everything first that can be checked
# on a login node. Words behind it are overrides of the config: WORKSPACE=/shared/me ACCOUNT=a bash launch_nanov3.sh grpo.max_num_steps=10
#
#   WORKSPACE             folder on storage that all nodes share
#   ACCOUNT, PARTITION    of Slurm                             [the user's only ones, or the site's defaults]
#   CONTAINER             image with mrl: .sqsh file or docker://...; without it the nodes use
#   VENV                  a virtual environment with mrl       [.venv beside scripts/]
#   MOUNTS                what the container sees              [HOST_BASE:HOST_BASE]
#   NUM_NODES=32 GPUS_PER_NODE=8 TIME=8:00:00 JOB_NAME=nemotron-nano-30b
#   GPU_REQUEST           how the site is asked for GPUs       [--gres=gpu:GPUS_PER_NODE]
#   CONFIG_PATH           the config                           [grpo_nanov3.yaml]
#   TRAINING_CMD          the whole command, in place of python -m mrl.train CONFIG_PATH ...
#   PYTHON                of this host, 3.11 or later, for the checks
#   HOST_BASE=WORKSPACE, and below HOST_BASE/RL-nano-v3: DATA_DIR (data), MODEL_CHECKPOINT (model), LOG_DIR (logs), CKPT_DIR (checkpoints),
#   CACHE_DIR (.cache), HF_HOME (.cache/huggingface), MRL_COMPILED (.cache/mrl-compiled, of kernels); BASE_LOG_DIR (HOST_BASE/nemoRL/nemo-rl) is for the logs of Ray
#   MIN_FREE_GB=200       on the disk of the checkpoints
# Other variables of ray.sub and of sbatch (SBATCH_QOS, ...) are handed on.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    echo "launch_nanov3: $*" >&2
    exit 2
}

HOST_BASE=${HOST_BASE:-${WORKSPACE:-}}
[[ -n $HOST_BASE ]] || fail "WORKSPACE is not set; export WORKSPACE=FOLDER, on storage that all nodes share"
[[ -d $HOST_BASE ]] || fail "HOST_BASE=$HOST_BASE (or WORKSPACE) is no folder; name one on storage that all nodes share"
HOST_BASE=$(cd "$HOST_BASE" && pwd)
RUN_BASE=$HOST_BASE/RL-nano-v3
NUM_NODES=${NUM_NODES:-32}
TIME=${TIME:-8:00:00}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
DATA_DIR=${DATA_DIR:-$RUN_BASE/data}
MODEL_CHECKPOINT=${MODEL_CHECKPOINT:-$RUN_BASE/model}
CONFIG_PATH=${CONFIG_PATH:-grpo_nanov3.yaml}
LOG_DIR=${LOG_DIR:-$RUN_BASE/logs}
CKPT_DIR=${CKPT_DIR:-$RUN_BASE/checkpoints}
CACHE_DIR=${CACHE_DIR:-$RUN_BASE/.cache}
BASE_LOG_DIR=${BASE_LOG_DIR:-$HOST_BASE/nemoRL/nemo-rl}
ACCOUNT=${ACCOUNT:-${SBATCH_ACCOUNT:-}}
PARTITION=${PARTITION:-${SBATCH_PARTITION:-}}
CONTAINER=${CONTAINER:-}
for name in DATA_DIR MODEL_CHECKPOINT LOG_DIR CKPT_DIR CACHE_DIR BASE_LOG_DIR; do
    [[ ${!name} == /* ]] || fail "$name=${!name} is relative; give the path by which all nodes see it"
done
[[ $CONFIG_PATH != */* || $CONFIG_PATH == /* ]] || fail "CONFIG_PATH=$CONFIG_PATH is relative; give a whole path, or the name of a packaged config"
[[ $NUM_NODES =~ ^[1-9][0-9]*$ && $GPUS_PER_NODE =~ ^[0-9]+$ ]] || fail "NUM_NODES=$NUM_NODES and GPUS_PER_NODE=$GPUS_PER_NODE must be numbers"

check_environment() {
    local name
    if [[ -n $CONTAINER && -z ${MOUNTS:-} ]]; then
        for name in DATA_DIR MODEL_CHECKPOINT LOG_DIR CKPT_DIR CACHE_DIR; do
            [[ ${!name} == "$HOST_BASE"/* ]] || fail "$name=${!name} is not below HOST_BASE=$HOST_BASE, which alone the container sees; set MOUNTS"
        done
    fi
    case $CONTAINER in
        *nvidia/nemo-rl*) fail "CONTAINER=$CONTAINER is NeMo RL's own image, which has no mrl; docs/containers.md says how to build one" ;;
        "")
            VENV=${VENV:-$ROOT/.venv}
            [[ -x $VENV/bin/python ]] || fail "neither CONTAINER nor a virtual environment: VENV=$VENV has no bin/python; set one of them"
            (cd / && "$VENV/bin/python" -c "import mrl") || fail "VENV=$VENV has no mrl; install it there (README.md), or set CONTAINER"
            ;;
        /* | *.sqsh)
            [[ $CONTAINER == /* && -r $CONTAINER ]] || fail "CONTAINER=$CONTAINER is not there; give a whole path (scripts/pull_container.sh makes the file)"
            ;;
        # Without a # behind the registry enroot would ask Docker Hub.
        *) CONTAINER=docker://$(sed -E 's,^([^/#]*[.:][^/#]*)/,\1#,' <<<"${CONTAINER#docker://}") ;;
    esac
}

check_site() {
    local accounts partitions
    command -v sbatch >/dev/null || fail "sbatch is not on this host's PATH; run this where jobs are submitted"
    partitions=$(sinfo --noheader --format=%R 2>/dev/null | sort -u || true)
    if [[ -n $PARTITION && -n $partitions ]] && ! grep -qxF "$PARTITION" <<<"$partitions"; then
        fail "PARTITION=$PARTITION is none of this site's: ${partitions//$'\n'/, }"
    fi
    # Sites without accounting name no accounts.
    accounts=$(sacctmgr --noheader --parsable2 show associations "user=$(id -un)" format=account 2>/dev/null | sort -u | sed '/^$/d' || true)
    if [[ -n $ACCOUNT && -n $accounts ]] && ! grep -qxF "$ACCOUNT" <<<"$accounts"; then
        fail "ACCOUNT=$ACCOUNT is none of yours: ${accounts//$'\n'/, }"
    fi
    if [[ -z $ACCOUNT && $accounts == *$'\n'* ]]; then fail "ACCOUNT is not set; yours are ${accounts//$'\n'/, }"; fi
}

# Prints a Python that is new enough for the checks, which need no packages.
find_python() {
    local candidate
    for candidate in "${PYTHON:-}" "${VENV:-}/bin/python" python3.12 python3.11 python3; do
        if "$candidate" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later on this host, to check model and data with; set PYTHON"
}

check_inputs() {
    local python
    python=$(find_python)
    cd "$ROOT"
    "$python" -m mrl.prepare verify --model "$MODEL_CHECKPOINT" --data "$DATA_DIR" --disk "$CKPT_DIR" \
        --min-free-gb "${MIN_FREE_GB:-200}" ||
        fail "model, data or disk are not ready; see above (scripts/prepare_data.sh downloads and makes them)"
    # What of the config is wrong shows here, where the packages are.
    if [[ -z ${TRAINING_CMD:-} ]] && "$python" -c "import omegaconf" 2>/dev/null; then
        "$python" -m mrl.train "${training[@]}" --check || fail "the config is refused; see above"
        "$python" -c "import sys; from mrl.ops.launch import warnings_of_limits as of; print(end=of(sys.argv[1], sys.argv[2], sys.argv[3:]))" \
            "$TIME" "${training[@]:1}"
    fi
}

training=(
    --config "$CONFIG_PATH" "policy.model_name=$MODEL_CHECKPOINT"
    "data.train.data_path=$DATA_DIR/train-split.jsonl" "data.validation.data_path=$DATA_DIR/val-split.jsonl"
    checkpointing.enabled=true "checkpointing.checkpoint_dir=$CKPT_DIR"
    "cluster.num_nodes=$NUM_NODES" "cluster.gpus_per_node=$GPUS_PER_NODE" "$@"
)
check_environment
check_site
mkdir -p "$LOG_DIR" "$CKPT_DIR" "$CACHE_DIR" "$BASE_LOG_DIR"
check_inputs

export BASE_LOG_DIR CONTAINER GPUS_PER_NODE HF_HOME=${HF_HOME:-$CACHE_DIR/huggingface} MRL_COMPILED=${MRL_COMPILED:-$CACHE_DIR/mrl-compiled}
export COMMAND=${TRAINING_CMD:-python -m mrl.train$(printf ' %q' "${training[@]}")}
if [[ -n $CONTAINER ]]; then export MOUNTS=${MOUNTS:-$HOST_BASE:$HOST_BASE}; else export VENV; fi
options=(
    --nodes="$NUM_NODES" --job-name="${JOB_NAME:-nemotron-nano-30b}" --time="$TIME" --chdir=/tmp
    --output="$LOG_DIR/slurm-%j.out" --error="$LOG_DIR/slurm-%j.err"
)
if [[ -n $ACCOUNT ]]; then options+=(--account="$ACCOUNT"); fi
if [[ -n $PARTITION ]]; then options+=(--partition="$PARTITION"); fi
if ((GPUS_PER_NODE > 0)); then options+=("${GPU_REQUEST:---gres=gpu:$GPUS_PER_NODE}"); fi
echo "Submitting ${NUM_NODES}-node training job..."
echo "Using BASE_LOG_DIR: $BASE_LOG_DIR"
# The job's working folder, which a container must have too.
cd /tmp
exec sbatch "${options[@]}" "$ROOT/scripts/ray.sub"
