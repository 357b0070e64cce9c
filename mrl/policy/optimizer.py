# SPDX-License-Identifier: Apache-2.0
"""Megatron optimizer and learning rate and weight decay schedules: built from config, moved between device and host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor, nn

from conversion.tensors import torch_dtype
from mrl.gpus import on_gpu
from mrl.phases import Residency
from mrl.policy.fusions import precision_aware_arguments
from mrl.policy.host_block import HostBlock

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig


_NO_SETTINGS = ("params", "step")
# Entries of a parameter group that no setting of a run changes.
_OF_GROUP = ("optimizer", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
CLIP_EPSILON = 1e-6
"""Constant that Megatron adds to a norm by which it divides."""


@dataclass(frozen=True)
class TrainState:
    """Everything that training changes on one rank, and that a checkpoint holds."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build_optimizer(chunks: list[DistributedDataParallel], config: MegatronConfig) -> MegatronOptimizer:
    """Optimizer of this rank's parameters, spread over replicas where configured. Collective over all ranks."""
    settings = config.optimizer
    return get_megatron_optimizer(
        OptimizerConfig(
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=settings.bf16,
            fp16=settings.fp16,
            params_dtype=torch_dtype(settings.params_dtype),
            use_distributed_optimizer=settings.use_distributed_optimizer,
            overlap_param_gather=config.distributed_data_parallel_config.overlap_param_gather,
            optimizer_cpu_offload=settings.optimizer_cpu_offload and on_gpu(),
            optimizer_offload_fraction=settings.optimizer_offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=settings.overlap_cpu_optimizer_d2h_h2d,
            **precision_aware_arguments(settings),
            **_chosen(config),
        ),
        list(chunks),
        use_gloo_process_groups=config.use_gloo_process_groups,
    )


def build_scheduler(
    optimizer: MegatronOptimizer, config: MegatronConfig, *, num_train_steps: int
) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay over a run."""
    settings = config.scheduler
    # A run may end within its warmup; Megatron requires a later end of the decay.
    num_decay_steps = (
        max(num_train_steps, settings.lr_warmup_iters + 1)
        if settings.lr_decay_iters is None
        else settings.lr_decay_iters
    )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=config.optimizer.lr,
        min_lr=config.optimizer.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=num_decay_steps,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.start_weight_decay,
        end_wd=settings.end_weight_decay,
        wd_incr_steps=num_train_steps,
        wd_incr_style=settings.weight_decay_incr_style,
    )


def _chosen(config: MegatronConfig) -> dict[str, Any]:
    """Megatron OptimizerConfig arguments that choose Adam, or Muon with its own, which 0.16.1 names otherwise."""
    settings = config.optimizer
    if not settings.is_muon:
        return {"optimizer": settings.optimizer}
    return {
        "optimizer": settings.optimizer,
        "muon_momentum": settings.muon_momentum,
        "muon_nesterov": settings.muon_nesterov,
        "muon_num_ns_steps": settings.muon_num_ns_steps,
        "muon_scale_mode": settings.muon_scale_mode,
        "muon_extra_scale_factor": settings.muon_extra_scale_factor,
        "muon_fp32_matmul_prec": settings.muon_fp32_matmul_prec,
        "muon_tp_mode": settings.muon_tp_mode,
        "muon_split_qkv": settings.muon_split_qkv,
    }


@contextmanager
def own_settings(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Restores this run's settings (rates, betas, epsilon) after a load in the `with` block brought another's."""
    own = parts(optimizer)
    kept = [
        {key: value for key, value in group.items() if key not in _NO_SETTINGS}
        for part in own
        for group in part.param_groups
    ]
    yield
    for group, settings in zip((group for part in own for group in part.param_groups), kept, strict=True):
        group.update(settings)


def recognise_groups(saved: Mapping[Any, Any], optimizer: MegatronOptimizer) -> None:
    """Gives the groups of parameters in a saved state this run's settings, where Megatron tells groups apart by them.

    0.19 does so by the highest and lowest rate, and would not find the groups of a run with others, or of 0.16.1.
    """
    groups = [group for part in parts(optimizer) for group in part.param_groups]
    own = {tuple(group.get(key) for key in _OF_GROUP): group for group in groups}
    for group in saved.get("param_groups", ()):
        if (mine := own.get(tuple(group.get(key) for key in _OF_GROUP))) is not None:
            group.update({key: mine[key] for key in param_group_identifier_keys if key in mine})
    for inner in saved.values():
        if isinstance(inner, Mapping):
            recognise_groups(inner, optimizer)


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of a chain (dense layers and experts, by chunk) that have parameters."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in chained if part.optimizer is not None]


def main_gradient(parameter: nn.Parameter) -> Tensor:
    """The tensor in which Megatron sums the parameter's gradient."""
    return getattr(parameter, "main_grad")  # noqa: B009  (Megatron's attribute of a parameter)


@torch.no_grad()
def clip_apart(parameters: Sequence[nn.Parameter], optimizer: MegatronOptimizer, rest_norm: float) -> float:
    """Clips the gradients of these parameters by a norm of their own, which it returns. Collective over all ranks.

    Call it between `prepare_grads` and `step`. The parameters are this rank's, marked `shared`, so that `rest_norm`,
    Megatron's norm, covers all others. Megatron's step then scales all gradients by the others' factor, so these are
    scaled by the ratio of both.
    """
    distributed = [part for part in parts(optimizer) if isinstance(part, DistributedOptimizer)]
    own = {id(parameter): part for part in distributed for parameter in part.model_param_gbuf_map}
    square = torch.zeros((), device=optimizer.get_loss_scale().device)
    for parameter in parameters:
        is_expert = not getattr(parameter, "allreduce", True)
        tp_group = (
            parallel_state.get_expert_tensor_parallel_group()
            if is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        if not param_is_not_tensor_parallel_duplicate(parameter, tp_group):
            continue
        gradient, replicas = main_gradient(parameter).flatten(), 1
        if distributed:
            part = own.get(id(parameter))
            shard = part._get_model_param_range_map(parameter)["param"] if part is not None else None
            gradient = gradient[shard.start : shard.end] if shard is not None else gradient[:0]
        elif is_expert:
            replicas = parallel_state.get_expert_data_parallel_world_size()
        else:
            replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        square += gradient.float().square().sum() / replicas
    dist.all_reduce(square)
    norm, limit = math.sqrt(float(square)), optimizer.config.clip_grad
    if limit > 0 and math.isfinite(norm) and math.isfinite(rest_norm):
        scale = min(1.0, limit / (norm + CLIP_EPSILON)) / min(1.0, limit / (rest_norm + CLIP_EPSILON))
        for parameter in parameters:
            main_gradient(parameter).mul_(scale)
    return norm


def hybrids(optimizer: MegatronOptimizer) -> list[HybridDeviceOptimizer]:
    """The parts that update parameters on the host (policy.megatron_cfg.optimizer.optimizer_cpu_offload)."""
    return [part.optimizer for part in parts(optimizer) if isinstance(part.optimizer, HybridDeviceOptimizer)]


class TrainingMemory:
    """Moves a rank's gradients and optimizer state to their places in each phase (`mrl.phases`). Not collective."""

    def __init__(self, state: TrainState, device: torch.device, block: HostBlock | None) -> None:
        """`device` computes the model. `block` is None if that is the host: optimizer state then stays."""
        self._state, self._device, self._block = state, device, block
        self._is_optimizer_on_device = True

    def place(self, residency: Residency) -> None:
        """Moves both to their places in `residency`; state keeps its values, new gradients are zero."""
        if residency.gradients == "none":
            self._state.optimizer.zero_grad()
            for hybrid in hybrids(self._state.optimizer):
                for param, copy in hybrid.param_to_fp32_param.items():
                    if param not in hybrid.gpu_params_map_cpu_copy:
                        copy.grad = None
            for chunk in self._state.chunks:
                chunk.offload_grad_buffers()
        self._is_optimizer_on_device = residency.optimizer == "device"
        self._place_optimizer(is_on_device=self._is_optimizer_on_device)
        if residency.gradients == "device":
            for chunk in self._state.chunks:
                chunk.restore_grad_buffers()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Lets a load in the `with` block create or replace optimizer state; then moves it to the last `place`."""
        if hybrids(self._state.optimizer):
            # Megatron takes an optimizer step to create the state that it fills.
            self._place_optimizer(is_on_device=True)
        yield
        self._place_optimizer(is_on_device=self._is_optimizer_on_device)

    def _place_optimizer(self, *, is_on_device: bool) -> None:
        if self._block is None:
            return
        tensors = optimizer_tensors(self._state)
        if is_on_device:
            self._block.give_back(tensors, self._device)
        else:
            self._block.take_in(tensors)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def optimizer_tensors(state: TrainState) -> list[Tensor]:
    """Main parameters and moments, each once, without views of the weights and HybridDeviceOptimizer's host tensors."""
    weights = {parameter.untyped_storage().data_ptr() for chunk in state.chunks for parameter in chunk.parameters()}
    tensors: list[Tensor] = []
    for inner in (part.optimizer for part in parts(state.optimizer)):
        tensors += [param for group in inner.param_groups for param in group["params"]]
        on_host = inner.gpu_params_map_cpu_copy if isinstance(inner, HybridDeviceOptimizer) else {}
        if isinstance(inner, HybridDeviceOptimizer):
            tensors += [copy for param, copy in inner.param_to_fp32_param.items() if param not in on_host]
        tensors += [
            value
            for param, values in inner.state.items()
            if param not in on_host
            for key, value in values.items()
            if key != "step" and isinstance(value, Tensor)
        ]
    # An empty shard has no memory, so no meaningful address.
    once = {id(tensor): tensor for tensor in tensors}.values()
    return [tensor for tensor in once if tensor.numel() and tensor.untyped_storage().data_ptr() not in weights]
