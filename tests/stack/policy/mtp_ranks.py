# SPDX-License-Identifier: Apache-2.0
"""Rank functions of tests/stack/policy/test_mtp.py: steps of a policy whose MTP layers learn, and their gradients."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from conversion.boxes import Slot
from conversion.families.registry import family
from mrl.algo.balance import balance_metrics
from mrl.config.schema.run import RunConfig
from tests.stack.policy import policy_ranks
from tests.stack.policy.layout_ranks import canonical_values
from tests.stack.ranks import Rank

FACTOR = 0.3


@dataclass(frozen=True)
class MtpCase:
    """Settings with which MTP layers learn."""

    num_steps: int
    """0 leaves them alone."""
    repeats: bool = False
    detaches: bool = False

    def __str__(self) -> str:
        return f"{self.num_steps} steps{' of one layer' * self.repeats}{' detached' * self.detaches}"


def run_config(folder: Path, layout: str, case: MtpCase, *overrides: str) -> RunConfig:
    """The config of supervised fine-tuning on the random rollouts."""
    megatron = "policy.megatron_cfg"
    keys = dict(
        num_layers=case.num_steps,
        loss_scaling_factor=FACTOR,
        use_repeated_layer=case.repeats,
        detach_heads=case.detaches,
    )
    given = [f"{megatron}.mtp_{key}={value}" for key, value in keys.items()]
    config = policy_ranks.run_config(folder, layout, f"{megatron}.freeze_moe_router=false", *given, *overrides)
    config.algorithm = "sft"
    return config


def gradients(rank: Rank, config: RunConfig) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics and whole gradients of a batch, by canonical name. For one rank."""
    from mrl.policy.moe import take_routing
    from mrl.policy.objectives import objective_of_policy
    from mrl.policy.optimizer import main_gradient
    from mrl.policy.step import forward_backward

    with policy_ranks.open_policy(rank, config) as policy:
        policy.enter("train")
        policy_ranks.set_batch(policy)
        batch = policy._batches[0]
        for chunk in policy._chunks:
            chunk.zero_grad_buffer()
        objective = objective_of_policy(config, policy.distribution, batch)
        rows = forward_backward(policy._chunks, batch.rows, size=batch.size, objective=objective)
        metrics = {name: sum(float(row[name]) for row in rows) for name in rows[0]}
        routing = take_routing(policy._chunks, loss_type=config.policy.megatron_cfg.moe_router_load_balancing_type)
        metrics |= balance_metrics(routing, per_layer=False)
        found: dict[Slot, torch.Tensor] = {
            slot: main_gradient(tensor)
            for slot, tensor in policy._tensors.items()
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        }
        hf_config = json.loads((Path(config.policy.model_name) / "config.json").read_text())
        return metrics, canonical_values(found, policy._live_layout, family(hf_config).canonical(hf_config))


def steps(rank: Rank, config: RunConfig, num_steps: int) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Metrics of train steps on the same batch, and checksums of the live weights behind them."""
    metrics = []
    with policy_ranks.open_policy(rank, config) as policy:
        for _ in range(num_steps):
            policy.enter("train")
            policy_ranks.set_batch(policy)
            metrics.append(policy.train_step())
        policy.settle()
        return metrics, policy_ranks.raw_checksums(policy)


def clipped(rank: Rank, config: RunConfig, damage: float = 0.0) -> tuple[float, float, float]:
    """Norms of the model's and its MTP layers' gradients and the latter once ready for a step that clips the model's.

    `damage` is added to one of the model's gradients.
    """
    from mrl.policy.mtp import mtp_parameters
    from mrl.policy.objectives import objective_of_policy
    from mrl.policy.optimizer import clip_apart, main_gradient
    from mrl.policy.step import forward_backward

    with policy_ranks.open_policy(rank, config) as policy:
        policy.enter("train")
        policy_ranks.set_batch(policy)
        batch, chunks, optimizer = policy._batches[0], policy._chunks, policy._state.optimizer
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        objective = objective_of_policy(config, policy.distribution, batch)
        forward_backward(chunks, batch.rows, size=batch.size, objective=objective)
        if damage:
            main_gradient(next(parameter for parameter in chunks[0].parameters() if parameter.requires_grad)).add_(
                damage
            )
        optimizer.prepare_grads()
        rest, parameters = float(optimizer.get_grad_norm()), mtp_parameters(chunks)
        return rest, clip_apart(parameters, optimizer, rest), clip_apart(parameters, optimizer, 0.0)
