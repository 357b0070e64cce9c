# SPDX-License-Identifier: Apache-2.0
"""Start of actors' processes: environment variables, from the config and mrl's own shell, their log file, and caches.

Folders of compiled code of torch, Triton and vLLM are run as they are found, so nobody else may write to them. torch's
own choice is a folder of the temporary folder whose name anybody can guess, and make first.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from mrl import env, spans
from mrl.cluster.lifetime import local_file, session_folder
from mrl.config.secrets import start_logging
from mrl.envs.scratch import Scratch, remove_abandoned
from mrl.gpus import device_variables
from mrl.phases import ModelName
from mrl.rollout.environment import engine_environment
from mrl.shortage import end_process_on_shortage
from mrl.signals import die_with_parent, shield_process

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig

logger = logging.getLogger(__name__)

SIGNS = "MRL_SIGNS"
_NUMBERED = {"rewards": "reward-actor-0", "gateway": "gateway-0"}
"""Log files that carry no number: how signs of life name the actor, as waits for it do."""
"""Environment variable of actors: the name of the folder in which those on nodes of a launcher's cluster give signs of
life.
"""


def signs_folder(name: str) -> Path:
    """The folder of that name on this node, made if it is not there; nodes on one host have folders of their own."""
    folder = Path(tempfile.gettempdir()) / f"{name}-{ray.get_runtime_context().get_node_id()[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def importing() -> Iterator[None]:
    """Span of an actor's imports, during which Python does not look for garbage.

    vLLM and Megatron bring 300,000 objects that live as long as the process. Looking through them takes a quarter of
    the imports, and a second of vLLM's own start; so later collections leave them out, too.
    """
    gc.disable()
    try:
        with spans.span("import"):
            yield
    finally:
        gc.enable()
        gc.freeze()


def start_actor_process(log_file: Path, secrets: Mapping[str, str] | None = None) -> None:
    """First call of every actor: ties its life to its parent's, sends stdout and stderr to `log_file`, spans beside it.

    On the driver's node both go through the local disk, and the actor gives signs of life. `secrets` become environment
    variables here, because Ray writes those of an actor's options to its own logs.
    """
    die_with_parent()
    shield_process(passes_on=True)
    os.environ.update(secrets or {})
    caches_warning = keep_caches_private()
    folder, spans_file = session_folder(), log_file.with_suffix(spans.SUFFIX)
    stem = _NUMBERED.get(log_file.stem, log_file.stem.replace("rewards", "reward-actor"))
    if folder is None and (name := os.environ.get(SIGNS)):
        spans.show_in(signs_folder(name), stem)
    if folder is not None:
        spans.show_in(folder, stem)
        log_file, spans_file = local_file(folder, log_file), local_file(folder, spans_file)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    start_logging("actor", sys.stderr)
    spans.record_in(spans_file, by_thread=folder is None)
    logger.info("process %d", os.getpid())
    end_process_on_shortage()
    if caches_warning:
        logger.warning("%s", caches_warning)


def policy_variables(config: RunConfig, given: Mapping[str, str], model: ModelName = "policy") -> dict[str, str]:
    """Variables that ranks of a model start with; `given` (env_vars of its megatron_cfg) wins."""
    # Megatron orders its communication behind its compute by queueing both on one hardware queue; it asks for this with
    # TP or SP on GPUs.
    has_gpu = config.cluster.gpus_per_node > 0
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **device_variables(has_gpu=has_gpu), **_within_the_node(config)}
    section = config.model(model)
    megatron = section.megatron_cfg
    if megatron.uses_hybridep:
        # The names that deep_ep's HybridEPBuffer reads, and NVSHMEM.
        if megatron.hybridep_num_ranks_per_nvlink_domain is not None:
            own["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = str(megatron.hybridep_num_ranks_per_nvlink_domain)
        if megatron.hybridep_use_mnnvl is not None:
            own["USE_MNNVL"] = str(int(megatron.hybridep_use_mnnvl))
    if has_gpu:
        # Rows of varying length would leave holes of every size between segments.
        own |= _on_gpus(section.precision, given, expandable_segments=True)
        own |= {} if megatron.tune_kernels else env.ONE_CONFIGURATION
    return {**own, **given}


def engine_variables(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that an engine starts with and workers inherit; `given` (policy.generation.vllm_cfg.env_vars) wins."""
    has_gpu = config.cluster.gpus_per_node > 0
    own = engine_environment(has_gpu=has_gpu) | _within_the_node(config)
    if has_gpu:
        # vLLM cannot put memory in such segments to sleep (https://github.com/pytorch/pytorch/issues/147851).
        vllm = config.policy.generation.vllm_cfg
        own |= _on_gpus(vllm.precision, given, expandable_segments=False)
        if vllm.is_fp8:
            # Scales as they are measured, as in NeMo RL, and not rounded to powers of two.
            own |= {"VLLM_USE_DEEP_GEMM": str(int(vllm.use_deep_gemm)), "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    return {**own, **given}


def _within_the_node(config: RunConfig) -> dict[str, str]:
    """Variables by which processes of a one-node run listen on loopback alone, and leave no temporary file behind."""
    if config.cluster.num_nodes > 1:
        return {}
    chosen = {variable.name: variable.read() or "lo" for variable in (env.GLOO_SOCKET_IFNAME, env.NCCL_SOCKET_IFNAME)}
    # vLLM leaves the file in which its workers meet (vllm_dist_...); it goes with the session folder.
    return chosen | ({} if (folder := session_folder()) is None else {"TMPDIR": str(folder)})


def own_temporary_folder() -> Scratch:
    """Makes a folder on this node that takes the temporary files of this process and its children, and goes with them.

    For engines of runs of several nodes: only the driver's has a session folder for the file in which vLLM's workers
    meet.
    """
    remove_abandoned()
    scratch = Scratch()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch.path)
    return scratch


def _on_gpus(precision: str, given: Mapping[str, str], *, expandable_segments: bool) -> dict[str, str]:
    # torch 2.13 reads some options from the one variable first and some from the other, so both get the same value.
    names = [env.PYTORCH_ALLOC_CONF.name, env.PYTORCH_CUDA_ALLOC_CONF.name]
    settings = next((given[name] for name in names if name in given), None)
    if settings is None:
        inherited = env.PYTORCH_ALLOC_CONF.read() or env.PYTORCH_CUDA_ALLOC_CONF.read() or ""
        settings = env.with_expandable_segments(inherited, expandable_segments)
        if inherited:
            _log_change("policy ranks" if expandable_segments else "engines", inherited, settings)
    # Transformer Engine names functions of a later cuBLAS, and calls them only with that one: a loader that binds at
    # once would fail.
    own = {**dict.fromkeys(names, settings), **env.KEPT_TIMINGS, "LD_BIND_NOW": "", **_cudnn_of_torch()}
    return own | (env.FULL_FLOAT32 if precision == "float32" else {})


def _cudnn_of_torch() -> dict[str, str]:
    """Variables with which a process loads no other cuDNN than the one that torch brings.

    cuDNN opens its own parts by name, and Transformer Engine looks into the system's folders first. Parts of two
    versions end the process with an undefined symbol, or compute with the older one.
    """
    found = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(next(iter(found.submodule_search_locations)))
    searched = [str(folder / "lib"), *filter(None, [env.LD_LIBRARY_PATH.read()])]
    return {"CUDNN_HOME": str(folder), env.LD_LIBRARY_PATH.name: ":".join(searched)}


@cache
def _log_change(processes: str, inherited: str, settings: str) -> None:
    logger.info(
        "torch's allocator is set to %s in this shell; %s get %s, because policy ranks need expandable segments "
        "and engines cannot use them (PYTORCH_ALLOC_CONF in env_vars of policy.megatron_cfg or "
        "policy.generation.vllm_cfg overrules this)",
        inherited,
        processes,
        settings,
    )


CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Folder of each, by the variable that names it; a variable that the shell or the config sets wins."""


def keep_caches_private() -> str:
    """Sets this process's variables, makes their folder, the first of `env.compiled_folders` nobody else may write to.

    Kept from run to run, because models of vLLM take minutes to compile. Returns a warning if it is not the preferred
    one.
    """
    faults = []
    for folder in env.compiled_folders():
        try:
            root = folder.expanduser()
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            root = root.resolve()
            if other := find_writable_by_others(root):
                raise PermissionError(f"others may write to {other}, or it is another user's")
            break
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            faults.append(f"{folder} cannot keep compiled code ({error})")
    else:
        root = Path(tempfile.mkdtemp(prefix="mrl-compiled-", dir=session_folder()))
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")).name.startswith("torchinductor_"):
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    for variable, name in CACHES.items():
        os.environ.setdefault(variable, str(root / name))
    if faults:
        return f"{'; '.join(faults)}; this process compiles into {root} ({env.MRL_COMPILED.name} names another)"
    return ""


def find_writable_by_others(folder: Path) -> Path | None:
    """Finds `folder`, or a folder above it, that another user (not root) may write to, or None."""
    for place in (folder, *folder.parents):
        found = place.lstat()
        # Of a folder with the sticky bit, others rename only what is theirs.
        is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and (
            place == folder or not found.st_mode & stat.S_ISVTX
        )
        if is_open or found.st_uid not in (0, os.getuid()) or (place == folder and found.st_uid != os.getuid()):
            return place
    return None
