# SPDX-License-Identifier: Apache-2.0
"""Process groups and seeds of one policy rank's models, its current model, and the rank's coordinates in the layout."""

from __future__ import annotations

import copy
import functools
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe import fused_a2a

from conversion.families.common import MegatronCoords
from mrl.gpus import on_gpu, require_cuda
from mrl.policy import cpu
from mrl.policy.versions import EXPERT_STATISTICS
from mrl.refit.group import file_store, is_file

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_VARIABLES = {
    parallel_state: [name for name in vars(parallel_state) if name.isupper() or name == "_global_process_group_list"],
    EXPERT_STATISTICS[0]: [EXPERT_STATISTICS[1]],
    fused_a2a: ["_buffer", "_hybrid_ep_buffer"],
}
_UNUSED = {(module, name): getattr(module, name) for module, names in _VARIABLES.items() for name in names}
"""The values of these variables before Megatron knows of any model."""


class MegatronState:
    """State that Megatron keeps in its modules for one model of this process: groups, sizes, buffers, random states.

    Megatron has one place for each of these, so the models of a process take turns: each is made current before it
    computes.
    """

    _current: MegatronState | None = None

    def __init__(self) -> None:
        """Makes a model current that Megatron does not know yet."""
        self._variables = {place: copy.copy(value) for place, value in _UNUSED.items()}
        self._named_random: dict[str, object] = {}
        self._random = (random.getstate(), torch.get_rng_state(), _device_random())
        self.make_current()

    def make_current(self) -> None:
        """Puts this model's state into Megatron's modules; saves the previous model's. Does nothing if it is there."""
        before = MegatronState._current
        if before is self:
            return
        if before is not None:
            before._keep()
        for (module, name), value in self._variables.items():
            setattr(module, name, value)
        tensor_parallel.get_cuda_rng_tracker().set_states(dict(self._named_random))
        host, cpu_state, device_state = self._random
        random.setstate(host)
        torch.set_rng_state(cpu_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
        MegatronState._current = self

    def _keep(self) -> None:
        self._variables = {(module, name): getattr(module, name) for module, name in self._variables}
        self._named_random = tensor_parallel.get_cuda_rng_tracker().get_states()
        self._random = (random.getstate(), torch.get_rng_state(), _device_random())


def _device_random() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if on_gpu() else None


class HasMegatronState(Protocol):
    """An object of one model of a process that may hold several."""

    megatron: MegatronState


def in_turn(kind: type[T]) -> type[T]:
    """Class decorator: public methods of a `HasMegatronState` class make the object's model current first."""

    def wrapped(method: Callable[Concatenate[HasMegatronState, P], R]) -> Callable[Concatenate[HasMegatronState, P], R]:
        @functools.wraps(method)
        def with_model(self: HasMegatronState, /, *args: P.args, **kwargs: P.kwargs) -> R:
            self.megatron.make_current()
            return method(self, *args, **kwargs)

        return with_model

    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(kind, name, wrapped(method))
    return kind


@dataclass(frozen=True)
class Meeting:
    """Meeting point of ranks: rank 0, or a file."""

    address: str
    """Address of rank 0; or the path of a file that nobody else may open, if all ranks are processes of one node."""
    port: int
    """0 of a file."""
    listener: socket.socket | None = None
    """Socket of rank 0: bound since the port was chosen, so that nobody else has taken it by now. It is used up."""

    def place(self, world_size: int, timeout: timedelta) -> dict[str, Any]:
        """Arguments of `init_process_group`."""
        if is_file(self.address):
            store = file_store(self.address, timeout)
            return {"store": dist.PrefixStore("default_pg", store)}
        if self.listener is None:
            return {"init_method": f"tcp://{self.address}:{self.port}"}
        store = dist.TCPStore(
            self.address, self.port, world_size, True, timeout=timeout, master_listen_fd=self.listener.detach()
        )
        # The name that the other ranks' rendezvous uses.
        return {"store": dist.PrefixStore("default_pg", store)}


def initialize(
    config: MegatronConfig,
    *,
    rank: int,
    world_size: int,
    meeting: Meeting,
    timeout_s: float,
    seed: int,
    device_index: int = 0,
) -> MegatronState:
    """Patches the host and builds one model's process groups and makes it current; the first call also joins all ranks.

    Collective over all ranks, which build their models in the same order. Every later collective fails after
    `timeout_s`.
    """
    if on_gpu():
        require_cuda()
        torch.cuda.set_device(device_index)
        backend = "cpu:gloo,cuda:nccl"
        # Otherwise the first group's monitor ends this process when NCCL reports a dead peer in any group, such as the
        # refit's.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    else:
        # Ranks share the host's cores, and results must not depend on how many there are.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        backend = "gloo"
    cpu.install()
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=timeout, **meeting.place(world_size, timeout)
        )
    state = MegatronState()
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_stages(config),
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=config.use_gloo_process_groups,
    )
    random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return state


def virtual_stages(config: MegatronConfig) -> int | None:
    """Megatron's virtual_pipeline_model_parallel_size: None without virtual stages, as 1 selects interleaving."""
    return config.parallel.vpp if config.parallel.vpp > 1 else None


def coordinates() -> MegatronCoords:
    """The coordinates of this rank's part of the model."""
    return MegatronCoords(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
    )


def shutdown() -> None:
    """Leaves all groups of all models. Never waits for other ranks; a process may call `initialize` again after."""
    parallel_state.destroy_model_parallel()
    MegatronState._current = None
    if dist.is_initialized():
        dist.destroy_process_group()
