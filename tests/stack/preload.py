# SPDX-License-Identifier: Apache-2.0
"""Imports of every rank of the stack tests, once for all: ranks are forked from a process that has done it."""

import gc
import importlib
import os
from pathlib import Path

# Ranks share the host's cores; torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    from mrl.policy import cpu

    cpu.install()

import mrl.policy.policy  # noqa: F401

# With what they import themselves, transformers among it: 1.7 CPU seconds of each rank.
for path in sorted([*Path(__file__).parent.rglob("*_ranks.py"), *Path(__file__).parent.glob("refit/[!_]*.py")]):
    importlib.import_module(".".join(path.relative_to(Path(__file__).parents[2]).with_suffix("").parts))

gc.freeze()
