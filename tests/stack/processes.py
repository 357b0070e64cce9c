# SPDX-License-Identifier: Apache-2.0
"""Start of the processes that are ranks and workers of the stack tests."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext, SpawnContext

import torch


def context() -> ForkServerContext | SpawnContext:
    """Processes that begin with the imports of `preload` done; with a GPU, new ones, because CUDA does not survive a fork."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    # Imports take longer than most tests.
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["tests.stack.preload"])
    return forked
