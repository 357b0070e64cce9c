# SPDX-License-Identifier: Apache-2.0
"""GPUs to plan for: usable memory, bandwidth, peak of dense bfloat16 products, and links; and the memory of nodes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU. Memory is what CUDA reports as total, below the size in the name; rates are those of the data sheet."""

    name: str
    memory_gib: float
    bandwidth: float
    """Bytes a second of its memory."""
    peak: float
    """Operations a second of dense bfloat16 products."""
    link: float
    """Bytes a second to another GPU of the node, one way."""
    network: float
    """Bytes a second to another node, one way: a network card of 400 Gbit/s for each GPU, of 200 Gbit/s with
    an A100.
    """

    @property
    def memory(self) -> float:
        return self.memory_gib * GIB


# Peaks are those of NVIDIA's data sheets without sparsity. Those of a GeForce stand in NVIDIA's whitepapers
# "Ada GPU Architecture" (RTX 4090) and "RTX Blackwell GPU Architecture" (RTX 5090): products that add in float32. Its
# links are assumed: half of PCIe x16, as copies go by way of the host, and a network card of 25 Gbit/s.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("rtx4090-24g", 23.6, 1.008e12, 165.2e12, 16e9, 3e9),
        Gpu("a100-40g", 39.4, 1.555e12, 312e12, 300e9, 25e9),
        Gpu("a100-80g", 79.2, 2.039e12, 312e12, 300e9, 25e9),
        Gpu("h100-80g", 79.1, 3.35e12, 989.5e12, 450e9, 50e9),
        Gpu("h200-141g", 139.8, 4.8e12, 989.5e12, 450e9, 50e9),
        Gpu("b200-192g", 178.3, 8.0e12, 2250e12, 900e9, 50e9),
        Gpu("gb200", 184.0, 8.0e12, 2450e12, 900e9, 50e9),
        Gpu("rtx5090-32g", 31.3, 1.792e12, 209.5e12, 32e9, 3e9),
    )
}


def full_name(given: str) -> str:
    """The name of the one GPU that begins so, as h1 or h100; `given` itself where none or several do."""
    found = [name for name in GPUS if name.startswith(given.lower())]
    return found[0] if len(found) == 1 else given


@dataclass(frozen=True)
class NodeKind:
    """One kind of node that a cloud rents out."""

    gpu: str
    num_gpus: int
    memory_gib: int
    """Host memory."""


# AWS's instance types with EFA.
NODES = {
    "p4d.24xlarge": NodeKind("a100-40g", 8, 1152),
    "p4de.24xlarge": NodeKind("a100-80g", 8, 1152),
    "p5.48xlarge": NodeKind("h100-80g", 8, 2048),
    "p5en.48xlarge": NodeKind("h200-141g", 8, 2048),
    "p6-b200.48xlarge": NodeKind("b200-192g", 8, 2048),
}


def local_memory() -> float:
    """Host memory that processes here may take: this host's, or the limit of the container."""
    limit = Path("/sys/fs/cgroup/memory.max")
    given = limit.read_text().strip() if limit.is_file() else "max"
    return min(
        float("inf" if given == "max" else given), float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    )


def local_gpu() -> Gpu | None:
    """The GPU of this host, with the memory that NVML reports; None where there is none, or the driver does not say.

    Rates are those of the known GPU that is nearest by name and then by memory.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        total, name = int(pynvml.nvmlDeviceGetMemoryInfo(device).total), pynvml.nvmlDeviceGetName(device)
    except pynvml.NVMLError:
        return None
    return replace(nearest(name, total), memory_gib=total / GIB)


def nearest(name: str, memory: int) -> Gpu:
    """The GPU whose model is in NVML's name of a device, or any where none is, that is nearest in memory (bytes)."""
    words = re.findall(r"[a-z]+ ?[0-9]+", name.lower())
    model = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in {word.replace(" ", "") for word in words}]
    return min(model or GPUS.values(), key=lambda gpu: abs(gpu.memory - memory))
