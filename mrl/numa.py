# SPDX-License-Identifier: Apache-2.0
"""NUMA nodes of GPUs, from NVML and sysfs, and the binding of a process to the CPUs and the memory next to its GPUs.

Copies between a GPU and memory of another node share the link between the sockets with all other ranks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl import env

logger = logging.getLogger(__name__)

SYSFS = Path("/sys")
# set_mempolicy(2): the system call's number, and the policy that takes memory elsewhere only when the node has none
# left.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node and its CPUs."""

    number: int
    cpus: frozenset[int]


def parse_cpus(text: str) -> frozenset[int]:
    """The CPUs of a list of sysfs, such as `0-3,8`."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, *last in ends for cpu in range(int(first), int((last or [first])[0]) + 1))


def node_of_device(bus_id: str, sysfs: Path = SYSFS) -> NumaNode | None:
    """NUMA node of a PCI device, by NVML's bus id (00000000:3B:00.0); None if the host has one node or does not say."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        number = int((sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
        if number < 0 or len(list((sysfs / "devices/system/node").glob("node[0-9]*"))) < 2:
            return None
        return NumaNode(number, parse_cpus((sysfs / f"devices/system/node/node{number}/cpulist").read_text()))
    except OSError:
        return None


def gpu_nodes(indices: Sequence[int], sysfs: Path = SYSFS, *, visible: str | None = None) -> list[NumaNode | None]:
    """The NUMA node of each of these GPUs, as CUDA counts those that are `visible`; None where it is not known.

    `visible` is as in CUDA_VISIBLE_DEVICES, and None stands for that; "" for all of the host.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        listed = env.variable("CUDA_VISIBLE_DEVICES") if visible is None else visible
        names = [name.strip() for name in listed.split(",") if name.strip()]
        found = []
        for index in indices:
            name = names[index] if names else str(index)
            by_name = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
            bus_id = pynvml.nvmlDeviceGetPciInfo(by_name(int(name) if name.isdigit() else name)).busId
            found.append(node_of_device(bus_id.decode() if isinstance(bus_id, bytes) else bus_id, sysfs))
        return found
    except (ModuleNotFoundError, IndexError):
        return [None for _ in indices]
    except pynvml.NVMLError as error:
        logger.info("NVML does not say on which NUMA nodes the GPUs are: %s", error)
        return [None for _ in indices]


def bind(nodes: Sequence[NumaNode | None]) -> str:
    """Binds this process's threads to these nodes' CPUs, and its memory to the node if any; says what it did.

    CPUs that the process may not use stay out. Where none is left, or a node is not known, nothing is bound.
    """
    known = {node.number: node for node in nodes if node is not None}
    if not known or None in nodes:
        return "not bound to a NUMA node: the host has one, or does not say"
    allowed = os.sched_getaffinity(0)
    cpus = allowed & frozenset().union(*(node.cpus for node in known.values()))
    numbers = " and ".join(map(str, sorted(known)))
    if not cpus:
        return f"not bound to NUMA node {numbers}: this process may use none of its CPUs"
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cpus)
        except ProcessLookupError:  # it has ended
            continue
    said = f"bound to NUMA node {numbers}: {len(cpus)} CPUs"
    return f"{said}, {_prefer(next(iter(known)))}" if len(known) == 1 else said


def _prefer(number: int) -> str:
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        return "memory as the kernel places it"
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (number // bits + 1))()
    mask[number // bits] = 1 << (number % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    if libc.syscall(call, _PREFERRED, mask, len(mask) * bits + 1):
        return f"memory as the kernel places it ({os.strerror(ctypes.get_errno())}; containers need CAP_SYS_NICE)"
    return "and its memory"
