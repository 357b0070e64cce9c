"""What one host is at: processors, memory, and its GPUs; and the loop that asks again and again. Needs no Ray."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import psutil

try:
    import pynvml
except ModuleNotFoundError:  # hosts without GPUs do without it
    pynvml = None

GIB = 2**30
SHARED_MEMORY = "/dev/shm"


class HostLog(Protocol):
    """Where samples go."""

    @property
    def is_empty(self) -> bool:
        """Whether nobody wants any."""
        ...

    def log_host(self, metrics: Mapping[str, float], sampled_at: float) -> None:
        """Records the sample of a moment, in seconds since 1970."""
        ...


class HostSampler:
    """Samples the host that it runs on. Names are NeMo RL's where it has one, all without the node's `node.I.`."""

    def __init__(self, *, is_actor: bool) -> None:
        """The run's processes are this one and its descendants; those of an actor's parent, its node's raylet, if `is_actor`."""
        self._root = psutil.Process(os.getppid() if is_actor else os.getpid())
        self._num_gpus = count_gpus()
        # The first answer is since boot, the next one since the last.
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Percent of all processors since the last sample, GiB of memory; per GPU percent of the time at work, and GiB."""
        memory = psutil.virtual_memory()
        values = {
            "cpu_util": psutil.cpu_percent(),
            "mem_gb": (memory.total - memory.available) / GIB,
            "mem_total_gb": memory.total / GIB,
            "shm_gb": psutil.disk_usage(SHARED_MEMORY).used / GIB,
            "rss_gb": resident_bytes(self._root) / GIB,
        }
        for index in range(self._num_gpus):
            values |= {f"gpu.{index}.{name}": value for name, value in sample_gpu(index).items()}
        return values


def resident_bytes(root: psutil.Process) -> int:
    """Resident memory of a process and its descendants; pages that several of them share count once for each."""
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:  # it has ended since it was listed
            continue
    return total


def count_gpus() -> int:
    """GPUs that NVIDIA's driver sees on this host, whichever of them a process may use; 0 without a driver."""
    if pynvml is None:
        return 0
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return 0


def sample_gpu(index: int) -> dict[str, float]:
    """`util` in percent and `mem_gb`; empty for a GPU that does not answer."""
    assert pynvml is not None, "count_gpus comes first"
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        return {"util": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu), "mem_gb": used / GIB}
    except pynvml.NVMLError:
        return {}


def sample_until(
    has_ended: threading.Event,
    sample: Callable[[float], Mapping[str, float]],
    log: HostLog,
    collection_interval_s: float,
    flush_interval_s: float,
) -> None:
    """Samples until `has_ended`, and hands the samples on every `flush_interval_s` and at the end. `sample` gets its limit in seconds."""
    waiting: list[tuple[Mapping[str, float], float]] = []
    last_flush = time.monotonic()
    while not has_ended.wait(collection_interval_s):
        waiting.append((sample(collection_interval_s), time.time()))
        if time.monotonic() - last_flush >= flush_interval_s:
            flush(waiting, log)
            last_flush = time.monotonic()
    flush(waiting, log)


def flush(waiting: list[tuple[Mapping[str, float], float]], log: HostLog) -> None:
    """Hands all samples on and forgets them."""
    for metrics, sampled_at in waiting:
        if metrics:
            log.log_host(metrics, sampled_at)
    waiting.clear()
