# SPDX-License-Identifier: Apache-2.0
"""Process groups and seeds of one policy rank, and where the rank stands in the layout."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from conversion.families.common import MegatronCoords
from mrl.policy import cpu

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig


def initialize(
    config: MegatronConfig,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    timeout_s: float,
    seed: int,
    device_index: int = 0,
) -> None:
    """Patches the host and builds all process groups. Collective over all ranks. Every collective made later fails after `timeout_s`."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device_index)
        backend = "cpu:gloo,cuda:nccl"
        # Otherwise the first group's monitor ends this process when NCCL reports a dead peer in any group, such as the refit's.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    else:
        # Ranks share the host's cores, and results must not depend on how many there are.
        torch.set_num_threads(1)
        backend = "gloo"
    cpu.install()
    dist.init_process_group(
        backend,
        init_method=f"tcp://{master_address}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages(config),
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        # Passed on to timedelta(minutes=...), which takes fractions.
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=config.use_gloo_process_groups,
    )
    random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def virtual_stages(config: MegatronConfig) -> int | None:
    """Megatron's virtual_pipeline_model_parallel_size: None without virtual stages, where it would take the schedule for several."""
    return config.parallel.vpp if config.parallel.vpp > 1 else None


def coordinates() -> MegatronCoords:
    """Which part of the model this rank holds."""
    return MegatronCoords(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
    )


def shutdown() -> None:
    """Leaves all groups. Never waits for other ranks; a process may call `initialize` again afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
