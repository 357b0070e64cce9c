#!/usr/bin/env bash
# What only a GPU can show, in two tiers. Results go to docs/data/gpu_*.json, and from there into docs/gpu_status.md.
#   a: a bare machine with one GPU, Python and torch: refits through CUDA IPC, Triton kernels, Megatron-Core and Mamba kernels where importable.
#      Libraries that are missing can be carried: pip install --no-deps --target DIR megatron-core==0.16.1 einops safetensors; PYTHONPATH=DIR
#   b: an installation with mrl[gpu]: parity of trainer and engine, sleep and wake, speed of sampling and training.
#   PYTHON=python3 scripts/gpu_check.sh a|b [--model HF_FOLDER] [--only CHECK] [--gigabytes N] [--out FOLDER]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
TIER="${1:-a}"
shift || true
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
cd "$ROOT"

nvidia-smi --list-gpus
if [[ "$TIER" == a && $# == 0 ]] && "$PYTHON" -c "import pytest"; then
    "$PYTHON" -m pytest -p no:cacheprovider tests/gpu
fi
"$PYTHON" -m scripts.gpu --tier "$TIER" "$@"
"$PYTHON" -m scripts.render_docs
