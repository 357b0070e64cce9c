# SPDX-License-Identifier: Apache-2.0
"""What every rank of the stack tests imports, once for all: ranks are forked from a process that has done it."""

import os

# Ranks share the host's cores; torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    from mrl.policy import cpu

    cpu.install()

import mrl.policy.policy  # noqa: F401
