# SPDX-License-Identifier: Apache-2.0
"""Samples one host's CPU, memory and GPUs, once or in a loop. Needs no Ray."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

try:
    import pynvml
except ModuleNotFoundError:  # not needed on hosts without GPUs
    pynvml = None

GIB = 2**30
SHARED_MEMORY = "/dev/shm"

HostLog = Callable[[Mapping[str, float], float], None]


class HostSampler:
    """Samples the host on which it runs. Names are NeMo RL's where it has one, without the node's prefix `node.I.`."""

    def __init__(self, is_actor: bool) -> None:
        """Counts the memory of this process and its descendants; if `is_actor`, of its parent's: the node's raylet."""
        self._root = psutil.Process(os.getppid() if is_actor else os.getpid())
        self._num_gpus = 0
        if pynvml is not None:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._num_gpus = pynvml.nvmlDeviceGetCount()
        # psutil answers for the time since its last answer; the first is for the time since boot.
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Percent of all processors since the last sample, GiB of memory; per GPU percent of time at work, and GiB."""
        memory = psutil.virtual_memory()
        resident_bytes = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                resident_bytes += process.memory_info().rss
        values = {
            "cpu_util": psutil.cpu_percent(),
            "mem_gb": (memory.total - memory.available) / GIB,
            "mem_total_gb": memory.total / GIB,
            "shm_gb": psutil.disk_usage(SHARED_MEMORY).used / GIB,
            "rss_gb": resident_bytes / GIB,
        }
        for index in range(self._num_gpus):
            assert pynvml is not None
            with suppress(pynvml.NVMLError):  # a GPU that does not answer
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                used_gib = pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
                values[f"gpu.{index}.util"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                values[f"gpu.{index}.mem_gb"] = used_gib
        return values


def sample_until(
    has_ended: threading.Event,
    sample: Callable[[float], Mapping[str, float]],
    log: HostLog,
    collection_interval_s: float,
    flush_interval_s: float,
) -> None:
    """Samples until `has_ended`; logs every `flush_interval_s` and at the end. `sample` gets its limit in seconds."""
    waiting: list[tuple[Mapping[str, float], float]] = []
    last_flush = time.monotonic()
    is_last = False
    while not is_last:
        is_last = has_ended.wait(collection_interval_s)
        if not is_last:
            waiting.append((sample(collection_interval_s), time.time()))
        if is_last or time.monotonic() - last_flush >= flush_interval_s:
            for metrics, sampled_at in waiting:
                if metrics:
                    log(metrics, sampled_at)
            waiting.clear()
            last_flush = time.monotonic()
