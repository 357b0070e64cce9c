# SPDX-License-Identifier: Apache-2.0
"""GPUs of this host: what NVIDIA's driver reports, and whether torch computes on each of them.

`python -m mrl.ops.doctor.gpus` tries torch and writes a `CudaProbe` as JSON; it is a process of its own, because a
driver may hang.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mrl
from mrl.gpus import host_gpus
from mrl.numa import gpu_nodes

PACKAGE = Path(mrl.__file__).parent
PROBE_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class HostGpu:
    """One GPU as the driver sees it; `used_bytes` counts all processes of the host."""

    name: str
    total_bytes: int
    used_bytes: int
    numa_node: int | None = None
    """The NUMA node to which it is attached; None where the host has one, or does not say."""


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, the newest CUDA version that it runs, and its GPUs."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[HostGpu, ...]


@dataclass(frozen=True)
class CudaProbe:
    error: str = ""
    """Reason why torch can use no GPU; "" if a product on every GPU is right."""
    num_gpus: int = 0
    nccl: str = ""
    unsupported: tuple[str, ...] = ()
    """Compute capabilities (`sm_70`) of GPUs that this build of torch has no code for."""
    libraries: tuple[str, ...] = ()
    """Paths of the cuDNN, cuBLAS and NCCL that the process of the products has loaded, several of one name if
    it has.
    """


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a host that has any. `driver` is None where the driver does not answer; `driver_error` says why."""

    driver: Driver | None
    driver_error: str
    probe: CudaProbe


def read_gpus() -> Gpus | None:
    """Reads the GPUs of this host, by NVML; None on a host without NVIDIA devices.

    nvidia-smi, which has a limit, goes first: calls of NVML in this process have none, and hang where it does.
    """
    try:
        host_gpus()
    except ValueError as error:
        return Gpus(None, str(error), CudaProbe("not asked, as nvidia-smi hangs"))
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    try:
        import pynvml
    except ModuleNotFoundError:
        return Gpus(None, "the driver cannot be asked: no package nvidia-ml-py", probe_cuda())
    try:
        pynvml.nvmlInit()
        newest = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(
                HostGpu(str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used), _numa_node(index))
            )
        version = str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return Gpus(None, f"the driver does not answer: {error}", probe_cuda())
    return Gpus(Driver(version, (newest // 1000, newest % 1000 // 10), tuple(gpus)), "", probe_cuda())


def _numa_node(index: int) -> int | None:
    (node,) = gpu_nodes([index], visible="")
    return None if node is None else node.number


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python in its own process that imports the same mrl; raises TimeoutExpired after `PROBE_TIMEOUT_S`."""
    paths = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
    )


def probe_cuda() -> CudaProbe:
    try:
        done = run_python("-m", "mrl.ops.doctor.gpus")
    except subprocess.TimeoutExpired:
        return CudaProbe(f"no answer within {PROBE_TIMEOUT_S:g} s")
    if done.returncode != 0:
        return CudaProbe((done.stderr.strip().splitlines() or [f"the probe ended with code {done.returncode}"])[-1])
    said = json.loads(done.stdout.splitlines()[-1])
    return CudaProbe(**said | {name: tuple(said[name]) for name in ("unsupported", "libraries")})


def try_torch() -> CudaProbe:
    """Multiplies matrices on every GPU that torch sees, in this process."""
    try:
        import torch
        from torch.cuda import nccl as torch_nccl
    except (ImportError, OSError) as error:
        return CudaProbe(f"torch cannot be imported: {' '.join(str(error).split())}")
    if not torch.cuda.is_available():
        return CudaProbe("torch.cuda.is_available() is False")
    num_gpus = torch.cuda.device_count()
    nccl = ".".join(map(str, torch_nccl.version()))
    capabilities = {torch.cuda.get_device_capability(index) for index in range(num_gpus)}
    built_for = torch.cuda.get_arch_list()
    unsupported = tuple(
        f"sm_{major}{minor}" for major, minor in sorted(capabilities) if not runs_on((major, minor), built_for)
    )
    error = ""
    try:
        for index in range(num_gpus):
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            if float((ones @ ones).sum()) != 64.0**3:
                error = f"a product on GPU {index} is wrong"
                break
        torch.backends.cudnn.version()
    except RuntimeError as failure:
        error = str(failure).splitlines()[0]
    return CudaProbe(
        error, num_gpus, nccl, unsupported, cuda_libraries(Path("/proc/self/maps").read_text(encoding="utf-8"))
    )


def cuda_libraries(maps: str) -> tuple[str, ...]:
    """Paths of cuDNN, cuBLAS and NCCL in the memory map of a process (proc_pid_maps(5))."""
    return tuple(sorted(set(re.findall(r"/\S*/lib(?:cudnn|cublas|nccl)\.so\S*", maps))))


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Tells whether a GPU runs code built for these architectures, in torch's names (`sm_90`, `sm_90a`, `compute_120`).

    Machine code runs on its own major version from its minor version on, PTX (`compute_...`) on everything later; with
    a letter behind it, both run on that version alone (CUDA C++ Programming Guide, "Application Compatibility").
    """
    for kind, digits, letter in re.findall(r"(sm|compute)_(\d+)([a-z]?)", " ".join(built_for)):
        built = int(digits[:-1]), int(digits[-1])
        is_of_family = kind == "compute" or built[0] == capability[0]
        if built == capability or (not letter and is_of_family and built <= capability):
            return True
    return False


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dataclasses.asdict(try_torch())) + "\n")
