"""Where a rank's gradients and optimizer state lie between phases. `mrl.capacity.phases` says where; here they are moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from mrl.capacity.phases import Residency
from mrl.policy.checkpoint import TrainState
from mrl.policy.optimizer import hybrids, parts
from mrl.policy.slab import HostMemory, Slab


class TrainingMemory:
    """Gradients and optimizer state of one rank."""

    def __init__(self, state: TrainState, device: torch.device, host: HostMemory | None) -> None:
        """`device` is where the model computes; `host` is None where that is the host, so that optimizer state stays."""
        self._state = state
        self._device = device
        self._slab = None if host is None else Slab(host)
        self._is_optimizer_on_device = True

    def place(self, residency: Residency) -> None:
        """Brings both where `residency` wants them; state keeps its values, gradients made anew are zero. Not collective."""
        if residency.gradients == "none":
            self._release_gradients()
        self._is_optimizer_on_device = residency.optimizer == "device"
        self._place_optimizer(is_on_device=self._is_optimizer_on_device)
        if residency.gradients == "device":
            for chunk in self._state.chunks:
                chunk.restore_grad_buffers()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, optimizer state may be made or replaced; afterwards it is where the last `place` wanted it. Not collective."""
        if hybrids(self._state.optimizer):
            # Megatron takes a step with it, to have state that it can fill.
            self._place_optimizer(is_on_device=True)
        yield
        self._place_optimizer(is_on_device=self._is_optimizer_on_device)

    def _place_optimizer(self, *, is_on_device: bool) -> None:
        if self._slab is None:
            return
        tensors = optimizer_tensors(self._state)
        if not is_on_device:
            self._slab.take_in(tensors)
        else:
            for tensor in filter(self._slab.memory.holds, tensors):
                home = torch.empty_like(tensor, device=self._device)
                home.copy_(tensor.detach(), non_blocking=True)
                # The same tensor object: parameter groups, state and Megatron's lists of shards all hold it.
                tensor.data = home
        torch.cuda.synchronize()
        # What has left is for the engine on this GPU, not for this process's allocator.
        torch.cuda.empty_cache()

    def _release_gradients(self) -> None:
        # Main gradients may be views into the buffers, or copies that would outlive them.
        self._state.optimizer.zero_grad()
        for hybrid in hybrids(self._state.optimizer):
            for param, copy in hybrid.param_to_fp32_param.items():
                if param not in hybrid.gpu_params_map_cpu_copy:
                    copy.grad = None
        for chunk in self._state.chunks:
            chunk.offload_grad_buffers()


@torch.no_grad()
def swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Exchanges the values of two tensors, bit for bit, pair by pair: between pairs there is memory for one more tensor only."""
    for left, right in pairs:
        kept = left.detach().clone()
        left.copy_(right)
        right.copy_(kept)


def optimizer_tensors(state: TrainState) -> list[Tensor]:
    """Main parameters and moments that the device computes with, each once.

    Left out are those that are views of the model's weights, and those that Megatron's HybridDeviceOptimizer keeps on the host anyway.
    """
    weights = {parameter.untyped_storage().data_ptr() for chunk in state.chunks for parameter in chunk.parameters()}
    tensors = {id(tensor): tensor for part in parts(state.optimizer) for tensor in _tensors_of(part)}
    # A shard without elements has no memory, so that its address says nothing.
    return [tensor for tensor in tensors.values() if tensor.numel() and tensor.untyped_storage().data_ptr() not in weights]


def _tensors_of(part: MegatronOptimizer) -> Iterator[Tensor]:
    inner = part.optimizer
    yield from itertools.chain.from_iterable(group["params"] for group in inner.param_groups)
    on_host: Mapping[Tensor, Tensor] = {}
    if isinstance(inner, HybridDeviceOptimizer):
        on_host = inner.gpu_params_map_cpu_copy
        yield from (copy for param, copy in inner.param_to_fp32_param.items() if param not in on_host)
    for param, state in inner.state.items():
        if param not in on_host:
            # A step count is a number that belongs to the host.
            yield from (value for key, value in state.items() if key != "step" and isinstance(value, Tensor))
