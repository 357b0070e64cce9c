#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What only a GPU can show, in two tiers. Results go to docs/data/gpu_*.json, and from there into docs/gpu_status.md.
#   a: a bare machine with one GPU, Python and torch: refits through CUDA IPC, Triton kernels, Megatron-Core and Mamba kernels where importable.
#      Libraries that are missing can be carried: pip install --no-deps --target DIR megatron-core==0.19.2 einops safetensors; PYTHONPATH=DIR.
#      A check is left out, by name, where this Python lacks a library that it needs.
#   b: an installation with mrl[gpu]: parity of trainer and engine, sleep and wake, speed of sampling and training.
#   first: both tiers on one GPU, what fails soonest and costs least first; later checks run whatever the earlier ones say.
#   PYTHON=python3 scripts/gpu_check.sh first|a|b [--model HF_FOLDER] [--only CHECK] [--gigabytes N] [--out FOLDER]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
TIER="${1:-a}"
shift || true
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
cd "$ROOT"

nvidia-smi --list-gpus
status=0
if [[ "$TIER" == first ]]; then
    # A process each: none leaves memory or settings behind. Transformer Engine says which attention it takes.
    for check in ipc kernels moving refit policy walk mamba train prefix doctor sleep; do
        NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1 "$PYTHON" -m scripts.gpu --only "$check" "$@" || status=1
    done
else
    "$PYTHON" -m scripts.gpu --tier "$TIER" "$@" || status=1
fi
# Bare machines lack what writes the pages; the results are there without it.
"$PYTHON" -m scripts.render_docs || echo "docs/gpu_status.md was not rendered here"
exit "$status"
