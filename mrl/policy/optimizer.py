"""Megatron's optimizer and its schedule of learning rate and weight decay, from the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mrl.policy.fusions import precision_aware_arguments
from mrl.policy.model import DTYPES

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig


def build_optimizer(chunks: list[DistributedDataParallel], config: MegatronConfig) -> MegatronOptimizer:
    """AdamW over this rank's parameters, distributed over replicas where configured. Collective over all ranks."""
    settings = config.optimizer
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer=settings.optimizer,
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=settings.bf16,
            fp16=settings.fp16,
            params_dtype=DTYPES[settings.params_dtype],
            use_distributed_optimizer=settings.use_distributed_optimizer,
            overlap_param_gather=config.distributed_data_parallel_config.overlap_param_gather,
            # Without a GPU, host and device are the same memory.
            optimizer_cpu_offload=settings.optimizer_cpu_offload and torch.cuda.is_available(),
            optimizer_offload_fraction=settings.optimizer_offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=settings.overlap_cpu_optimizer_d2h_h2d,
            **precision_aware_arguments(settings),
        ),
        list(chunks),
        use_gloo_process_groups=config.use_gloo_process_groups,
    )


def build_scheduler(optimizer: MegatronOptimizer, config: MegatronConfig, *, num_train_steps: int) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay over a run; call `.step(increment=1)` after every optimizer step."""
    settings = config.scheduler
    # A run may end within its warmup; Megatron wants the decay to end later.
    num_decay_steps = max(num_train_steps, settings.lr_warmup_iters + 1) if settings.lr_decay_iters is None else settings.lr_decay_iters
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
        # A resumed run follows its own config; the checkpoint only says how many steps were taken.
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that a chain is made of (dense layers and experts, by chunk), without those that have no parameters."""
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in chained if part.optimizer is not None]


def hybrids(optimizer: MegatronOptimizer) -> list[HybridDeviceOptimizer]:
    """Those that update parameters on the host (policy.megatron_cfg.optimizer.optimizer_cpu_offload)."""
    return [part.optimizer for part in parts(optimizer) if isinstance(part.optimizer, HybridDeviceOptimizer)]
