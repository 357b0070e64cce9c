# SPDX-License-Identifier: Apache-2.0
"""Functions that critic tests run on the ranks: steps of PPO with a policy and a critic, each in its own layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow
from tests.rollouts import pulled
from tests.stack.policy.policy_ranks import (
    open_models,
    optimizer_checksum,
    pack_rows,
    plan_of,
    raw_checksums,
    rollouts,
    sizes_of,
)
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank

MARGINS = ("lr=1e-3", "min_lr=1e-3", "adam_eps=1e-3", "weight_decay=0.01")
"""Settings of an optimizer whose steps do not amplify rounding."""


@dataclass
class Steps:
    """Results of PPO's steps on one rank."""

    values: list[dict[int, np.ndarray]] = field(default_factory=list)
    returns: list[dict[int, np.ndarray]] = field(default_factory=list)
    critic: list[dict[str, float]] = field(default_factory=list)
    policy: list[dict[str, float]] = field(default_factory=list)
    checksums: list[object] = field(default_factory=list)


def ppo_config(folder: Path, layout: str, critic_layout: str, *overrides: str) -> RunConfig:
    """The laptop's config on the model in `folder`, policy and critic in these layouts."""
    words = ["value.megatron_cfg.num_layers_in_first_pipeline_stage=null"]
    for section, name in (("policy", layout), ("value", critic_layout)):
        given = dict(
            tensor_model_parallel_size=1,
            expert_model_parallel_size=1,
            sequence_parallel=False,
            pipeline_model_parallel_size=1,
        )
        words += [f"{section}.megatron_cfg.{key}={value}" for key, value in (given | sizes_of(name)).items()]
        words += [f"{section}.megatron_cfg.optimizer.{item}" for item in MARGINS]
        words += [
            f"{section}.megatron_cfg.scheduler.lr_warmup_iters=0",
            f"{section}.megatron_cfg.freeze_moe_router=false",
        ]
    return load_config("ppo_tiny.yaml", [f"policy.model_name={folder}", *words, *overrides])


def reward_of(index: int) -> float:
    """Some are right."""
    return float(index % 3 == 0)


def rows_of(model: PolicyRank) -> list[PackedRow]:
    """Rows of this rank's rollouts, packed for the layout of the model."""
    from megatron.core import parallel_state

    model.make_current()
    policy, sequences = model._section, rollouts()
    plan = plan_of("balanced", parallel_state.get_data_parallel_world_size(), policy.sequence_multiple)[0][
        model.dp_rank
    ]
    return pack_rows(
        policy,
        plan,
        {index: pulled(rollout, 0.0, is_valid, reward_of(index)) for index, rollout, _, is_valid in sequences},
    )


def of_all_ranks(mine: list[dict[int, np.ndarray]]) -> list[dict[int, np.ndarray]]:
    """Merges the results of all ranks, as Ray does in a run."""
    found: list[list[dict[int, np.ndarray]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return [{index: part for rank in found for index, part in rank[batch].items()} for batch in range(len(mine))]


def step(policy: PolicyRank, critic: PolicyRank, found: Steps, *, trains_policy: bool = True) -> None:
    """One step of PPO; adds what it gave to `found`."""
    from mrl.policy import other_models

    critic.enter("value")
    critic.set_batch(rows_of(critic))
    values = of_all_ranks(other_models.compute_values(critic))
    policy.enter("logprob")
    policy.set_batch(rows_of(policy))
    policy.compute_old_logprobs()
    returns = of_all_ranks(other_models.compute_advantages(policy, values))
    critic.enter("train_value")
    other_models.set_returns(critic, returns)
    num_passes = policy._config.num_passes
    found.critic += [critic.train_step() for _ in range(num_passes)]
    if trains_policy:
        policy.enter("train")
        found.policy += [policy.train_step() for _ in range(num_passes)]
    found.values += values
    found.returns += returns
    found.checksums.append(
        [(raw_checksums(model), optimizer_checksum(model)) for model in (policy, critic)] if trains_policy else None
    )


# What follows runs on a rank.


def steps(rank: Rank, config: RunConfig, num_steps: int) -> Steps:
    """Steps from the model's weights."""
    found = Steps()
    with open_models(rank, [("critic", config), ("policy", config)]) as (critic, policy):
        for _ in range(num_steps):
            step(policy, critic, found)
    return found


def trained_bytes(rank: Rank, config: RunConfig) -> tuple[int, int, int]:
    """Bytes of weights, gradient buffers and optimizer state of the critic after a step."""
    from mrl.policy.optimizer import optimizer_tensors

    with open_models(rank, [("critic", config), ("policy", config)]) as (critic, policy):
        step(policy, critic, Steps(), trains_policy=False)
        weights = sum(tensor.nbytes for tensor in critic._tensors.values())
        buffers = [
            buffer.grad_data for chunk in critic._chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        ]
        storages = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}
        return weights, sum(storages.values()), sum(tensor.nbytes for tensor in optimizer_tensors(critic._state))


def step_after_save(rank: Rank, config: RunConfig, folder: Path, num_before: int) -> Steps:
    """The step after `num_before` in which the critic learns alone; both models are saved in between."""
    found = Steps()
    with open_models(rank, [("critic", config), ("policy", config)]) as (critic, policy):
        for _ in range(num_before):
            step(policy, critic, Steps(), trains_policy=False)
        for name, model in (("policy", policy), ("critic", critic)):
            assert model.begin_save(folder / name) == ""
            assert model.finish_save(60.0).problem == ""
        step(policy, critic, found)
    return found


def step_after_load(rank: Rank, config: RunConfig, folder: Path) -> Steps:
    """The first step of models that load what the others have saved."""
    found = Steps()
    with open_models(rank, [("critic", config), ("policy", config)]) as (critic, policy):
        for name, model in (("policy", policy), ("critic", critic)):
            model.load_checkpoint(folder / name)
        step(policy, critic, found)
    return found
