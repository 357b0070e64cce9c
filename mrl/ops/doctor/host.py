# SPDX-License-Identifier: Apache-2.0
"""Judges the facts of a host: GPUs, shared memory, limits, disks, network, ports."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mrl.cluster.lifetime import Capacity
from mrl.config.rules.sockets import ENGINE_SOCKET, MAX_PATH_BYTES, longest_folder
from mrl.config.texts import spell_bytes
from mrl.ops.doctor.findings import Finding
from mrl.ops.doctor.gpus import Gpus
from mrl.ops.doctor.probe import GIB, TEMPORARY, UNLIMITED, Disk, HostFacts, Network, Ports
from mrl.ops.doctor.software import release

# The quickstart's minimum in README.md.
MIN_CORES, MIN_MEMORY_BYTES = 2, 8e9
MAX_LOAD = 2.0
# Docker gives 64 MiB. Ray's object store takes 256 MiB of it on one node, and GPU processes exchange data through it.
MIN_SHARED_BYTES, MIN_SHARED_GPU_BYTES = GIB, 16 * GIB
# Ray warns below the first; its guide for large clusters asks for the second, which says something where the number of
# processes is not known.
MIN_FILES, MIN_CLUSTER_FILES = 4096, 65535
# Measured with Ray 2.60 on one host, of 4, 8 and 12 actors: gcs_server 64, 72, 80; raylet 64, 76, 88; driver 39, 43,
# 47; an actor 42. So the head's gcs_server has 56, and 2 for each process of the cluster; a raylet has 52, and 3 for
# each of its node. Doubled, as retried connections overlap.
FILES, FILES_PER_PROCESS = 128, 6
# A run on a laptop has about a thousand threads, a node of eight GPUs several thousand.
MIN_PROCESSES, MIN_GPU_PROCESSES = 4096, 16384
LIMITS = {"nofile": ("open files", "n"), "nproc": ("processes", "u"), "memlock": ("locked memory", "l")}
# RDMA pins the memory that it sends from.
MIN_LOCKED_BYTES = 64 * GIB
MIN_FREE_BYTES = 2 * GIB
# Ray stops creating objects at this share.
MAX_RAY_DISK_SHARE = 0.95
# A driver and an idle display take less.
IDLE_GPU_BYTES = GIB


def judge_machine(facts: HostFacts, *, is_in_cluster: bool, num_processes: int | None = None) -> list[Finding]:
    """Findings about the machine itself, on a node of a cluster or a host that runs alone.

    `num_processes` are Ray's in the whole run; None: not known.
    """
    findings = [] if facts.gpus is None else _gpus(facts.gpus, facts.torch_cuda)
    findings += [Finding("start of Ray", "problem", f"{at.found}: {at.reason}", at.way_out) for at in facts.obstacles]
    findings.append(_capacity(facts.capacity))
    shared = facts.shared_memory
    least = MIN_SHARED_BYTES if facts.gpus is None else MIN_SHARED_GPU_BYTES
    found, remedy = f"/dev/shm: {shared.free_bytes / GIB:.2f} of {shared.total_bytes / GIB:.2f} GiB free", ""
    if shared.total_bytes < least:
        found += f", at least {least / GIB:g} GiB are needed"
        remedy = (
            "docker run --shm-size=64g; Kubernetes: an emptyDir of medium Memory at /dev/shm; else mount -o "
            "remount,size=64G /dev/shm"
        )
    elif shared.free_bytes < least / 2:
        remedy = "remove what ended processes left in /dev/shm"
    findings.append(Finding("shared memory", "problem" if remedy else "ok", found, remedy))
    findings += _limits(facts, num_processes, is_large=is_in_cluster or facts.gpus is not None)
    findings += [_disk(use, disk) for use, disk in facts.disks.items()]
    findings += _network(facts.network, is_in_cluster=is_in_cluster)
    confined = facts.confinement
    if confined.lack:
        remedy = (
            "only the environment code is concerned: use another host or container for it, or set "
            "env.code.allow_unconfined=true"
        )
        findings.append(Finding("programs under reward", "note", confined.lack, remedy))
    else:
        found = f"confined by Landlock (ABI {confined.landlock_abi}) and seccomp, {confined.machine}"
        findings.append(Finding("programs under reward", "ok", found))
    return findings + ([] if facts.ports is None else _ports(facts.ports))


def _gpus(gpus: Gpus, torch_cuda: str | None) -> list[Finding]:
    driver, probe = gpus.driver, gpus.probe
    if driver is None:
        remedy = (
            "run nvidia-smi; if it fails too, the driver's module and library differ: restart the host or "
            "install the driver again"
        )
        return [Finding("driver", "problem", gpus.driver_error, remedy)]
    found = f"{driver.version}, for CUDA up to {'.'.join(map(str, driver.cuda))}"
    findings = [Finding("driver", "ok", found)]
    if torch_cuda is not None:
        if driver.cuda[0] < release(torch_cuda)[0]:
            remedy = "install a newer driver, or a torch that is built for the driver's CUDA"
            findings = [Finding("driver", "problem", f"{found}, but torch is built for CUDA {torch_cuda}", remedy)]
        num_gpus, wrong, remedy = len(driver.gpus), "", ""
        if probe.error:
            wrong = probe.error
            remedy = (
                "see the driver's line; in a container, start it with its GPUs (--gpus all); "
                "CUDA_VISIBLE_DEVICES may hide them"
            )
        elif probe.unsupported:
            wrong = f"this torch has no code for GPUs of {', '.join(probe.unsupported)}"
            remedy = "install a torch that is built for these GPUs"
        elif probe.num_gpus != num_gpus:
            wrong = f"torch sees {probe.num_gpus} of the {num_gpus} GPUs"
            remedy = "unset CUDA_VISIBLE_DEVICES, or give the job or container all GPUs"
        right = f"{num_gpus} x {driver.gpus[0].name if num_gpus else 'none'}, NCCL {probe.nccl}"
        findings.append(Finding("torch on GPUs", "problem" if wrong else "ok", wrong or right, remedy))
        findings += [_libraries(probe.libraries)] if probe.libraries else []
    findings += _numa([gpu.numa_node for gpu in driver.gpus])
    busy = [(index, gpu) for index, gpu in enumerate(driver.gpus) if gpu.used_bytes > IDLE_GPU_BYTES]
    used = [f"GPU {index}: {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB" for index, gpu in busy]
    if used:
        remedy = "nvidia-smi shows the processes; end those of an earlier run, or wait for others"
        return [*findings, Finding("GPU memory", "problem", f"in use before the run: {', '.join(used)}", remedy)]
    return [*findings, Finding("GPU memory", "ok", "free on all GPUs")]


def _numa(nodes: Sequence[int | None]) -> list[Finding]:
    """Finding about the places to which ranks and engine workers are bound; none on a host with one NUMA node."""
    known = sorted({node for node in nodes if node is not None})
    if not known:
        return []
    of_node = [
        f"node {node}: GPU {', '.join(str(gpu) for gpu, of in enumerate(nodes) if of == node)}" for node in known
    ]
    lost = [str(gpu) for gpu, node in enumerate(nodes) if node is None]
    found = "; ".join([*of_node, *([f"not known: GPU {', '.join(lost)}"] if lost else [])])
    return [
        Finding("NUMA nodes", "ok", f"{found}; ranks and engine workers are bound to theirs (cluster.bind_to_numa)")
    ]


def _libraries(paths: Sequence[str]) -> Finding:
    twice = sorted(
        name for name, count in Counter(Path(path).name.partition(".")[0] for path in paths).items() if count > 1
    )
    remedy = (
        f"take the folders of the other {' and '.join(twice)} out of LD_LIBRARY_PATH and LD_PRELOAD" if twice else ""
    )
    return Finding("CUDA libraries", "problem" if twice else "ok", ", ".join(paths), remedy)


def _capacity(capacity: Capacity) -> Finding:
    if capacity.num_cores < MIN_CORES:
        remedy = (
            "give the job or container more of them; Ray's processes and the ranks wait for each other until "
            "they miss their deadlines"
        )
        return Finding("capacity", "problem", f"{capacity}; {MIN_CORES} cores are needed", remedy)
    if capacity.free_bytes < MIN_MEMORY_BYTES:
        found = f"{capacity}; the smallest run needs {MIN_MEMORY_BYTES / 1e9:g} GB of memory"
        return Finding(
            "capacity", "problem", found, "end what else runs here, or raise the memory of the job or container"
        )
    if capacity.load > MAX_LOAD * capacity.num_cores:
        remedy = (
            "end the other programs here, or wait for them; they slow a run down, and Ray may need several "
            "tries to start"
        )
        return Finding("capacity", "note", f"{capacity}: the cores are busy", remedy)
    return Finding("capacity", "ok", str(capacity))


def _limits(facts: HostFacts, num_processes: int | None, *, is_large: bool) -> list[Finding]:
    num_files = FILES + FILES_PER_PROCESS * (num_processes or 0)
    least = {
        "nofile": max(MIN_FILES, num_files),
        "nproc": MIN_PROCESSES if facts.gpus is None else MIN_GPU_PROCESSES,
        "memlock": MIN_LOCKED_BYTES if facts.network.num_rdma_devices else 0,
    }
    found: dict[str, float] = {}
    for name in least:
        # Ray raises its soft limit of files to the hard one; the other soft limits stay.
        number = facts.limits[name].hard if name == "nofile" else facts.limits[name].soft
        found[name] = float("inf") if number == UNLIMITED else number
    spelt = {name: "unlimited" if number == float("inf") else f"{number:,}" for name, number in found.items()}

    def low(name: str, needed: int, need: str, *, is_note: bool = False) -> Finding:
        remedy = (
            f"docker run --ulimit {name}={needed}; else {name} in /etc/security/limits.conf, or in the "
            "service that starts the jobs"
        )
        title, option = LIMITS[name]
        return Finding(
            "limits",
            "note" if is_note else "problem",
            f"{title}: at most {spelt[name]} (ulimit -{option}); {need}",
            remedy,
        )

    of_run = f", by {num_processes:,} processes of the run" if num_processes and num_files > MIN_FILES else ""
    findings = [
        low(name, needed, f"{needed:,} are needed{of_run if name == 'nofile' else ''}")
        for name, needed in least.items()
        if found[name] < needed
    ]
    if num_processes is None and is_large and MIN_FILES <= found["nofile"] < MIN_CLUSTER_FILES:
        findings.append(low("nofile", MIN_CLUSTER_FILES, f"large clusters need {MIN_CLUSTER_FILES:,}", is_note=True))
    return findings or [Finding("limits", "ok", ", ".join(f"{LIMITS[name][0]} {text}" for name, text in spelt.items()))]


def _disk(use: str, disk: Disk) -> Finding:
    name = f"disk for {use}"
    found = f"{disk.folder}: {spell_bytes(disk.free_bytes)} of {spell_bytes(disk.total_bytes)} are free"
    if not disk.is_writable:
        remedy = "make it, make room there, or set TMPDIR" if use == TEMPORARY else "choose another folder"
        return Finding(name, "problem", f"{disk.folder} cannot be written to", f"{remedy}, or change its owner")
    if disk.free_bytes < MIN_FREE_BYTES:
        return Finding(name, "problem", found, "free some, or choose another disk")
    if use == TEMPORARY and (most := longest_folder(ENGINE_SOCKET)) < len(os.fsencode(disk.folder)):
        found = (
            f"{disk.folder} leaves no room for the names of sockets, whose paths have {MAX_PATH_BYTES} bytes: "
            f"it may have {most}"
        )
        return Finding(
            name,
            "problem",
            found,
            "let TMPDIR (RAY_TMPDIR of scripts/ray.sub) name a shorter folder of this host, such as /tmp",
        )
    if use == TEMPORARY and disk.free_bytes < (1 - MAX_RAY_DISK_SHARE) * disk.total_bytes:
        remedy = "free some, or let TMPDIR (RAY_TMPDIR of scripts/ray.sub) name another disk of this host"
        return Finding(name, "problem", f"{found}; Ray stops when {MAX_RAY_DISK_SHARE:.0%} are taken", remedy)
    return Finding(name, "ok", found)


def _network(network: Network, *, is_in_cluster: bool) -> list[Finding]:
    findings = []
    if is_in_cluster and not network.gloo_ifname and (not network.address or network.address.startswith("127.")):
        found = f"the host's name stands for {network.address or 'no address'}; Gloo would offer that to other nodes"
        remedy = (
            "put the address of the cluster's interface before the host's name into /etc/hosts, or set "
            "GLOO_SOCKET_IFNAME"
        )
        findings.append(Finding("host name", "problem", found, remedy))
    if network.socket_ifname:
        # NCCL reads prefixes, `=` in front for whole names, `^` for all but these; a port may stand behind a colon.
        text = network.socket_ifname
        is_excluding, is_exact = text.startswith("^"), "=" in text[:2]
        names = [name.partition(":")[0] for name in text.lstrip("^=").split(",") if name]
        matches = [
            any(found == name if is_exact else found.startswith(name) for name in names) for found in network.interfaces
        ]
        if all(is_match == is_excluding for is_match in matches):
            found = f"NCCL_SOCKET_IFNAME={text} leaves none of the interfaces {', '.join(network.interfaces)}"
            findings.append(
                Finding("interfaces", "problem", found, "unset it, or name an interface that joins the nodes")
            )
    if network.fabric == "efa" and network.num_rdma_devices == 0:
        remedy = "ask for them (vpc.amazonaws.com/efa in the pod's resources), or unset FI_PROVIDER"
        findings.append(
            Finding("fabric", "problem", "FI_PROVIDER=efa, but there is no device in /dev/infiniband", remedy)
        )
    devices = f"{network.num_rdma_devices} RDMA devices" if network.num_rdma_devices else "no RDMA device"
    return findings or [Finding("network", "ok", f"{', '.join(network.interfaces)}; {devices}")]


def _ports(ports: Ports) -> list[Finding]:
    findings = []
    if ports.taken:
        found = f"taken on this host: {', '.join(f'{ports.numbers[name]} ({name})' for name in ports.taken)}"
        remedy = (
            "before a Ray head is started here, end what listens there (ray stop ends a Ray), or set the "
            "variable to another port"
        )
        findings.append(Finding("ports", "note", found, remedy))
    low, high = ports.ephemeral
    if inside := [f"{number} ({name})" for name, number in ports.numbers.items() if low <= number <= high]:
        found = f"{', '.join(inside)} lie in the range of ports that any connection may take ({low} to {high})"
        remedy = "set the variables to smaller ports, or raise net.ipv4.ip_local_port_range"
        findings.append(Finding("ports", "note", found, remedy))
    return findings or [Finding("ports", "ok", f"free for a Ray head, and outside of {low} to {high}")]
