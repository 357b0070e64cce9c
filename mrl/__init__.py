# SPDX-License-Identifier: Apache-2.0
"""GRPO post-training of mixture-of-experts language models on Megatron-Core, vLLM and Ray."""

import os
import time

STARTED = time.monotonic()
"""Seconds on the clock of time.monotonic. Commands import this first; a process that was a shell before is older than its command."""

__version__ = "0.1.0"

NO_USAGE_STATISTICS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables that keep libraries from reporting to their makers; a variable that the shell sets wins."""

# Here, because the libraries look once, when they are imported, and every process of a run imports this first.
for name, value in NO_USAGE_STATISTICS.items():
    os.environ.setdefault(name, value)
