# SPDX-License-Identifier: Apache-2.0
"""Processes of the stack tests: the start of those that are ranks and workers, and where a run's listen."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext, SpawnContext

import torch


def context() -> ForkServerContext | SpawnContext:
    """Processes that begin with the imports of `preload` done; on a GPU new ones, as CUDA does not survive a fork."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    # Imports take longer than most tests.
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["tests.stack.preload"])
    return forked


def listening_sockets() -> set[tuple[str, str]]:
    """Name and address of each process of this one that listens, itself included."""
    import psutil  # a bare machine with a GPU, whose checks start processes too, lacks it

    me = psutil.Process()
    return {
        (process.name(), connection.laddr.ip)
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
