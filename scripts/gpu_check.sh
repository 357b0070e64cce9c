#!/usr/bin/env bash
# What can be shown on one GPU by a Python that has torch and pytest, and none of this project's other dependencies: memory shared through
# CUDA IPC, checksums on the device, a refit between two processes, and its speed. Results go into docs/gpu_status.md by hand.
#   PYTHON=python3 scripts/gpu_check.sh
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$ROOT" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
cd "$ROOT"

nvidia-smi --list-gpus
"$PYTHON" - <<'PYTHON'
import sys

import torch

import mrl.policy.arena, mrl.refit.exchange, mrl.refit.pull  # noqa: E401

assert torch.cuda.is_available(), "torch sees no GPU"
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
PYTHON
"$PYTHON" -m pytest -p no:cacheprovider tests/gpu tests/unit/refit
"$PYTHON" -m scripts.bench.refit --device cuda --divide 4
