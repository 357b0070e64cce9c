#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#SBATCH --job-name=prepare-data
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=04:00:00
#SBATCH --output=prepare-data-%j.out

# Downloads Nemotron 3 Nano and its RL blend, fills the blend's placeholders in, and verifies what came of it. What is there already is not downloaded
# again; after an interruption the same command goes on. Calls: sbatch --account=A --partition=P scripts/prepare_data.sh, or bash.
#   WORKSPACE          folder on storage that all nodes share; below WORKSPACE/RL-nano-v3:
#   DATA_DIR (data), MODEL_CHECKPOINT (model), DOWNLOAD_DIR (downloads)
#   PARTS              some of: model data verify            [all]
#   MODEL              on the Hugging Face Hub               [nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16]
#   VENV               with mrl and hf                       [.venv in the folder of submission]
#   CONTAINER          image with mrl, instead of VENV; MOUNTS is what it sees  [WORKSPACE:WORKSPACE]
#   HF_TOKEN           where the Hub asks for one
#   ATTEMPTS=5         of every download
#   MIN_FREE_GB=200
set -euo pipefail

fail() {
    echo "prepare_data: $*" >&2
    exit 2
}

# inside COMMAND...: runs it where mrl is installed.
inside() {
    if [[ -n ${CONTAINER:-} ]]; then
        srun --ntasks=1 --no-container-mount-home --container-image="$CONTAINER" --container-mounts="${MOUNTS:-$WORKSPACE:$WORKSPACE}" "$@"
    else
        PATH="$VENV/bin:$PATH" "$@"
    fi
}

# download KIND ID FOLDER: goes on with what an earlier attempt left.
download() {
    local attempt
    for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
        echo "Downloading $2 into $3 (attempt $attempt of $ATTEMPTS)"
        if inside hf download "$2" --repo-type "$1" --local-dir "$3"; then return; fi
        sleep $((attempt * RETRY_S))
    done
    fail "$2 could not be downloaded; see above. Set HF_TOKEN if the Hub asks for it; the same command goes on where this one was"
}

[[ -n ${WORKSPACE:-} && -d ${WORKSPACE:-} ]] || fail "WORKSPACE=${WORKSPACE:-} is no folder; name one on storage that all nodes share"
RUN_BASE=$WORKSPACE/RL-nano-v3
DATA_DIR=${DATA_DIR:-$RUN_BASE/data}
MODEL_CHECKPOINT=${MODEL_CHECKPOINT:-$RUN_BASE/model}
DOWNLOAD_DIR=${DOWNLOAD_DIR:-$RUN_BASE/downloads}
MODEL=${MODEL:-nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16}
PARTS=${PARTS:-model data verify}
ATTEMPTS=${ATTEMPTS:-5}
RETRY_S=${RETRY_S:-10}
VENV=${VENV:-${SLURM_SUBMIT_DIR:-$PWD}/.venv}
[[ -n ${CONTAINER:-} || -x $VENV/bin/python ]] || fail "neither CONTAINER nor a virtual environment: VENV=$VENV has no bin/python; set one of them"
# Downloads pass through here; the home may be small.
export HF_HOME=${HF_HOME:-$RUN_BASE/.cache/huggingface}

for part in $PARTS; do
    case $part in
        model) download model "$MODEL" "$MODEL_CHECKPOINT" ;;
        data)
            for id in nvidia/Nemotron-3-Nano-RL-Training-Blend BytedTsinghua-SIA/DAPO-Math-17k Skywork/Skywork-OR1-RL-Data; do
                download dataset "$id" "$DOWNLOAD_DIR/${id#*/}"
            done
            inside python -m mrl.prepare nano3 --source "$DOWNLOAD_DIR" --out "$DATA_DIR"
            ;;
        verify)
            inside python -m mrl.prepare verify --model "$MODEL_CHECKPOINT" --data "$DATA_DIR" --disk "$RUN_BASE" --min-free-gb "${MIN_FREE_GB:-200}"
            ;;
        *) fail "PARTS=$PARTS: $part is none of model, data, verify" ;;
    esac
done
