# SPDX-License-Identifier: Apache-2.0
"""The exchange of tokens among the groups of an engine on CPU hosts, whose communicator in vLLM has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def gather_rows(
    group: CpuCommunicator, given: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> object:
    """All workers' rows stacked, as `all_gatherv` of vLLM's other communicators; worker `i` has `sizes[i]` of them."""
    assert dim == 0
    if isinstance(given, list):
        return [gather_rows(group, tensor, dim, sizes) for tensor in given]
    sizes = sizes or [len(given)] * group.world_size
    # gloo gathers parts of one size only.
    padded = F.pad(given, (0, 0) * (given.dim() - 1) + (0, max(sizes) - len(given))).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def sum_rows(group: CpuCommunicator, given: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """This worker's rows of the sum over all workers, as `reduce_scatterv` of vLLM's other communicators."""
    assert dim == 0
    total = given.clone()
    dist.all_reduce(total, group=group.device_group)
    return total.split(list(sizes or [len(given) // group.world_size] * group.world_size))[
        group.rank_in_group
    ].contiguous()


def gather_any(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's gathering through shared memory, for tensors of any type: it copies bits, but knows floats only."""

    def gather(shared_memory: object, output: Tensor, given: Tensor, group: dist.ProcessGroup | None = None) -> None:
        if not given.is_floating_point():
            output, given = output.view(torch.float32), given.view(torch.float32)
        original(shared_memory, output, given, group)

    return gather
