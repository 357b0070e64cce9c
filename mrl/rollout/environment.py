# SPDX-License-Identifier: Apache-2.0
"""Environment of a vLLM engine's process. Importable without vLLM: the cluster layer sets it before it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mrl.gpus import device_variables

# Names that vLLM's queues and locks get from Python's multiprocessing, and its workers on CPU hosts from vLLM.
SHARED_MEMORY = re.compile(r" (/dev/shm/(?:psm_|sem\.mp-|vllm_dist_)\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class EngineNodes:
    """The nodes over which an engine's workers are spread evenly, as one of them sees it.

    They are vLLM's own (`nnodes` of its multiprocessing executor): every node's workers are children of an actor of the
    run, which sets their devices, so that worker and policy rank of a slot share a GPU, and each answers collective
    calls - sleep, refits, digests - as within a node. vLLM's Ray executor would place and name its workers itself, on
    devices of Ray's choice, and drives them by a compiled graph that no call of ours can join.
    """

    count: int
    rank: int
    """Number of this node; the first has the scheduler."""
    address: str
    """Address of the first node, where all workers meet."""
    port: int


_inherited: dict[str, str] = {}
"""Environment of this process before `set_variables`."""


def set_variables(variables: Mapping[str, str]) -> None:
    """Sets an engine's variables in a process that has no engine, before it imports vLLM; its children get none."""
    _inherited.update(os.environ)
    os.environ.update(variables)


def variables_of_children() -> dict[str, str]:
    """The environment that this process would have without `set_variables`."""
    return dict(_inherited or os.environ)


def engine_environment(*, has_gpu: bool) -> dict[str, str]:
    """Variables that vLLM and torch must find when an engine process starts, by name."""
    common = {
        **device_variables(has_gpu=has_gpu),
        # The engine core lives in the actor, so that refits and aborts happen between two of its steps.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # A grammar for `strict` tools, as NeMo Gym's rows have them, or for `parallel_tool_calls: false`, would choose
        # among tokens, and what was forced cannot be trained on. NeMo RL's vLLM has none for `tool_choice: auto`,
        # either.
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
        # Models are local folders; without this a missing optional file is asked for over the network.
        "HF_HUB_OFFLINE": "1",
    }
    if has_gpu:
        # Samplers in FlashInfer are compiled by nvcc at their first use, and none of them serves requests that ask for
        # logprobs.
        return common | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return common | {
        # The sampler is torch.compile'd: 8-11 s on the first step for nothing at these sizes.
        "TORCHDYNAMO_DISABLE": "1",
        # With more than one thread the split of the KV loop follows the batch, and logprobs with it.
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
        # Binding workers to NUMA nodes refuses more workers than nodes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # The n-gram proposer's pool is OpenMP's, too: with a thread a core, each of torch's operations waits for them
        # all.
        "NUMBA_NUM_THREADS": "1",
    }


def drop_names_of_shared_memory(pids: Iterable[int]) -> None:
    """Removes the names of shared memory that an engine's started processes have mapped: it ends with the last of them.

    vLLM removes it when its objects are collected, which killed processes never do.
    """
    for pid in pids:
        with suppress(OSError):  # a worker has ended, which its engine notices
            for name in SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text()):
                Path(name).unlink(missing_ok=True)
