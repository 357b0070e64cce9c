"""Judges the facts of a host: GPUs, shared memory, limits, disks, network, ports."""

from __future__ import annotations

from mrl.doctor.findings import Finding
from mrl.doctor.gpus import Driver, Gpus
from mrl.doctor.probe import GIB, TEMPORARY, UNLIMITED, Confinement, Disk, HostFacts, Limit, Network, Ports
from mrl.doctor.requirements import release

# Docker gives 64 MiB. Ray's object store of a run on one node takes 256 MiB of it, processes on GPUs exchange through it.
MIN_SHARED_BYTES, MIN_SHARED_GPU_BYTES = GIB, 16 * GIB
# Ray warns below the first; its guide for large clusters asks for the second.
MIN_FILES, MIN_CLUSTER_FILES = 4096, 65535
# A run on a laptop has about a thousand threads, a node of eight GPUs several thousand.
MIN_PROCESSES, MIN_GPU_PROCESSES = 4096, 16384
NAMES = {"nofile": "open files", "nproc": "processes", "memlock": "locked memory"}
OPTIONS = {"nofile": "n", "nproc": "u", "memlock": "l"}
# RDMA pins the memory that it sends from.
MIN_LOCKED_BYTES = 64 * GIB
MIN_FREE_BYTES = 2 * GIB
# Ray stops creating objects at this share.
MAX_RAY_DISK_SHARE = 0.95
# A driver and an idle display take less.
IDLE_GPU_BYTES = GIB


def judge_machine(facts: HostFacts, *, is_in_cluster: bool) -> list[Finding]:
    """Findings about the machine itself, on a node of a cluster or a host that runs alone."""
    findings = [] if facts.gpus is None else _gpus(facts.gpus, facts.torch_cuda)
    findings += [_shared_memory(facts.shared_memory, has_gpus=facts.gpus is not None)]
    findings += _limits(facts, is_large=is_in_cluster or facts.gpus is not None)
    findings += [_disk(use, disk) for use, disk in facts.disks.items()]
    findings += _network(facts.network, is_in_cluster=is_in_cluster)
    findings += [_programs(facts.confinement)]
    return findings + ([] if facts.ports is None else _ports(facts.ports))


def _gpus(gpus: Gpus, torch_cuda: str | None) -> list[Finding]:
    if gpus.driver is None:
        remedy = "run nvidia-smi; if it fails too, the driver's module and library differ: restart the host or install the driver again"
        return [Finding("driver", "problem", gpus.driver_error, remedy)]
    on_torch = [] if torch_cuda is None else [_torch_on_gpus(gpus, gpus.driver)]
    return [_driver(gpus.driver, torch_cuda), *on_torch, _gpu_memory(gpus.driver)]


def _driver(driver: Driver, torch_cuda: str | None) -> Finding:
    found = f"{driver.version}, for CUDA up to {'.'.join(map(str, driver.cuda))}"
    if torch_cuda is None or driver.cuda[0] >= release(torch_cuda)[0]:
        return Finding("driver", "ok", found)
    remedy = "install a newer driver, or a torch that is built for the driver's CUDA"
    return Finding("driver", "problem", f"{found}, but torch is built for CUDA {torch_cuda}", remedy)


def _torch_on_gpus(gpus: Gpus, driver: Driver) -> Finding:
    probe, num_gpus = gpus.probe, len(driver.gpus)
    if probe.error:
        remedy = "see the driver's line; in a container, start it with its GPUs (--gpus all); CUDA_VISIBLE_DEVICES may hide them"
        return Finding("torch on GPUs", "problem", probe.error, remedy)
    if probe.unsupported:
        remedy = "install a torch that is built for these GPUs"
        return Finding("torch on GPUs", "problem", f"this torch has no code for GPUs of {', '.join(probe.unsupported)}", remedy)
    if probe.num_gpus != num_gpus:
        remedy = "unset CUDA_VISIBLE_DEVICES, or give the job or container all GPUs"
        return Finding("torch on GPUs", "problem", f"torch sees {probe.num_gpus} of the {num_gpus} GPUs", remedy)
    return Finding("torch on GPUs", "ok", f"{num_gpus} x {driver.gpus[0].name if num_gpus else 'none'}, NCCL {probe.nccl}")


def _gpu_memory(driver: Driver) -> Finding:
    used = [
        f"GPU {index}: {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB"
        for index, gpu in enumerate(driver.gpus)
        if gpu.used_bytes > IDLE_GPU_BYTES
    ]
    if not used:
        return Finding("GPU memory", "ok", "free on all GPUs")
    remedy = "nvidia-smi shows the processes; end those of an earlier run, or wait for others"
    return Finding("GPU memory", "problem", f"in use before the run: {', '.join(used)}", remedy)


def _shared_memory(disk: Disk, *, has_gpus: bool) -> Finding:
    least = MIN_SHARED_GPU_BYTES if has_gpus else MIN_SHARED_BYTES
    found = f"/dev/shm: {disk.free_bytes / GIB:.2f} of {disk.total_bytes / GIB:.2f} GiB free"
    if disk.total_bytes < least:
        remedy = "docker run --shm-size=64g; Kubernetes: an emptyDir of medium Memory at /dev/shm; else mount -o remount,size=64G /dev/shm"
        return Finding("shared memory", "problem", f"{found}, at least {least / GIB:g} GiB are needed", remedy)
    if disk.free_bytes < least / 2:
        return Finding("shared memory", "problem", found, "remove what ended processes left in /dev/shm")
    return Finding("shared memory", "ok", found)


def _limits(facts: HostFacts, *, is_large: bool) -> list[Finding]:
    least = {
        "nofile": MIN_FILES,
        "nproc": MIN_GPU_PROCESSES if facts.gpus is not None else MIN_PROCESSES,
        "memlock": MIN_LOCKED_BYTES if facts.network.num_rdma_devices else 0,
    }
    found = {name: _most(name, facts.limits[name]) for name in least}
    low = [_limit(name, found[name], f"{needed:,} are needed", needed) for name, needed in least.items() if found[name] < needed]
    if is_large and MIN_FILES <= found["nofile"] < MIN_CLUSTER_FILES:
        low.append(_limit("nofile", found["nofile"], f"large clusters need {MIN_CLUSTER_FILES:,}", MIN_CLUSTER_FILES, is_note=True))
    return low or [Finding("limits", "ok", ", ".join(f"{NAMES[name]} {_spell(number)}" for name, number in found.items()))]


def _limit(name: str, found: float, need: str, least: int, *, is_note: bool = False) -> Finding:
    remedy = f"docker run --ulimit {name}={least}; else {name} in /etc/security/limits.conf, or in the service that starts the jobs"
    text = f"{NAMES[name]}: at most {_spell(found)} (ulimit -{OPTIONS[name]}); {need}"
    return Finding("limits", "note" if is_note else "problem", text, remedy)


def _most(name: str, limit: Limit) -> float:
    # Ray raises its soft limit of files to the hard one; the other soft limits stay.
    number = limit.hard if name == "nofile" else limit.soft
    return float("inf") if number == UNLIMITED else number


def _spell(number: float) -> str:
    return "unlimited" if number == float("inf") else f"{number:,}"


def _disk(use: str, disk: Disk) -> Finding:
    name = f"disk for {use}"
    found = f"{disk.folder}: {disk.free_bytes / 1e9:,.1f} of {disk.total_bytes / 1e9:,.1f} GB free"
    if not disk.is_writable:
        return Finding(name, "problem", f"{disk.folder} cannot be written to", "choose another folder, or change its owner")
    if disk.free_bytes < MIN_FREE_BYTES:
        return Finding(name, "problem", found, "free some, or choose another disk")
    if use == TEMPORARY and disk.free_bytes < (1 - MAX_RAY_DISK_SHARE) * disk.total_bytes:
        remedy = "free some, or let TMPDIR (RAY_TMPDIR of scripts/ray.sub) name another disk of this host"
        return Finding(name, "problem", f"{found}; Ray stops when {MAX_RAY_DISK_SHARE:.0%} are taken", remedy)
    return Finding(name, "ok", found)


def _programs(confinement: Confinement) -> Finding:
    if not confinement.lack:
        found = f"confined by Landlock (ABI {confinement.landlock_abi}) and seccomp, {confinement.machine}"
        return Finding("programs under reward", "ok", found)
    remedy = "only the environment code is concerned: use another host or container for it, or set env.code.allow_unconfined=true"
    return Finding("programs under reward", "note", confinement.lack, remedy)


def _network(network: Network, *, is_in_cluster: bool) -> list[Finding]:
    findings = []
    if is_in_cluster and not network.gloo_ifname and (not network.address or network.address.startswith("127.")):
        found = f"the host's name stands for {network.address or 'no address'}; Gloo would offer that to other nodes"
        remedy = "put the address of the cluster's interface before the host's name into /etc/hosts, or set GLOO_SOCKET_IFNAME"
        findings.append(Finding("host name", "problem", found, remedy))
    if network.socket_ifname and not _interfaces(network):
        found = f"NCCL_SOCKET_IFNAME={network.socket_ifname} leaves none of the interfaces {', '.join(network.interfaces)}"
        findings.append(Finding("interfaces", "problem", found, "unset it, or name an interface that joins the nodes"))
    if network.fabric == "efa" and network.num_rdma_devices == 0:
        remedy = "ask for them (vpc.amazonaws.com/efa in the pod's resources), or unset FI_PROVIDER"
        findings.append(Finding("fabric", "problem", "FI_PROVIDER=efa, but there is no device in /dev/infiniband", remedy))
    devices = f"{network.num_rdma_devices} RDMA devices" if network.num_rdma_devices else "no RDMA device"
    return findings or [Finding("network", "ok", f"{', '.join(network.interfaces)}; {devices}")]


def _interfaces(network: Network) -> list[str]:
    """The interfaces that NCCL may take: prefixes, `=` in front for whole names, `^` for all but these."""
    text = network.socket_ifname
    is_excluding, is_exact = text.startswith("^"), "=" in text[:2]
    # An interface may be given with a port behind a colon.
    names = [name.partition(":")[0] for name in text.lstrip("^=").split(",") if name]
    matches = [any(found == name if is_exact else found.startswith(name) for name in names) for found in network.interfaces]
    return [found for found, is_match in zip(network.interfaces, matches, strict=True) if is_match != is_excluding]


def _ports(ports: Ports) -> list[Finding]:
    findings = []
    if ports.taken:
        found = f"taken on this host: {', '.join(f'{ports.numbers[name]} ({name})' for name in ports.taken)}"
        remedy = "before a Ray head is started here, end what listens there (ray stop ends a Ray), or set the variable to another port"
        findings.append(Finding("ports", "note", found, remedy))
    low, high = ports.ephemeral
    if inside := [f"{number} ({name})" for name, number in ports.numbers.items() if low <= number <= high]:
        found = f"{', '.join(inside)} lie in the range of ports that any connection may take ({low} to {high})"
        remedy = "set the variables to smaller ports, or raise net.ipv4.ip_local_port_range"
        findings.append(Finding("ports", "note", found, remedy))
    return findings or [Finding("ports", "ok", f"free for a Ray head, and outside of {low} to {high}")]
