# SPDX-License-Identifier: Apache-2.0
"""Functions on ranks of the parity table: steps of a whole `PolicyRank` on packed rollouts, and what it computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from conversion.adapters import adapted_layers, adapter_family
from conversion.families.registry import family
from mrl.config.schema.run import RunConfig
from mrl.data.batch import plan_batch
from mrl.data.packing import PackedRow
from mrl.data.planning import SequenceCost
from mrl.types import Rollout, RolloutRequest, SamplingParams
from tests.rollouts import pulled
from tests.stack.policy.layout_ranks import canonical_values
from tests.stack.policy.policy_ranks import open_policy, optimizers, pack_rows
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank

NUM_ROLLOUTS = 20
LONGEST_PROMPT, LONGEST_ROLLOUT = 40, 32


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank."""

    losses: list[float]
    """Losses of every step."""
    logprobs: dict[int, np.ndarray]
    """Logprobs before the measured step, of the generated tokens of this rank's rollouts. Empty on all but the last
    pipeline stage.
    """
    gradients: dict[str, np.ndarray]
    """Gradients of the measured step, as the optimizer took them, by canonical name; NaN where this rank's optimizer
    has none.
    """


def rollouts() -> list[Rollout]:
    """Random rollouts of many lengths; the generator's logprobs are arbitrary."""
    rng = np.random.default_rng(0)
    result = []
    for index in range(NUM_ROLLOUTS):
        prompt = tuple(int(token) for token in rng.integers(0, 256, int(rng.integers(1, LONGEST_PROMPT))))
        length = int(rng.integers(1, LONGEST_ROLLOUT))
        request = RolloutRequest(f"p{index}", 0, 0, 1, prompt, SamplingParams(1.0, 1.0, None, LONGEST_ROLLOUT, (258,)))
        logprobs = rng.normal(-5.0, 0.3, length).astype(np.float32)
        result.append(Rollout(request, 1, rng.integers(0, 256, length).astype(np.int32), logprobs, "stop"))
    return result


def measure(rank: Rank, config: RunConfig, rollouts: Sequence[Rollout], num_steps: int, measured_step: int) -> Measured:
    """Trains on-policy on the same rollouts, packed as the config says, and looks at one of the steps."""
    losses, logprobs, gradients = [], {}, {}
    with open_policy(rank, config) as policy:
        rows, logprob_rows = _rows(config, rollouts, policy.dp_rank)
        for step in range(num_steps):
            policy.enter("logprob")
            policy.set_batch(rows, logprob_rows)
            policy.compute_old_logprobs()
            if step == measured_step:
                logprobs = _of_rollouts(logprob_rows, policy.logprobs_of_rows(logprob_rows))
            policy.enter("train")
            losses.append(policy.train_step()["train/loss"])
            if step == measured_step:
                gradients = _gradients(policy)
    return Measured(losses, logprobs, gradients)


def _rows(config: RunConfig, rollouts: Sequence[Rollout], dp_rank: int) -> tuple[list[PackedRow], list[PackedRow]]:
    """Rows of this rank in training and in logprob passes: the same list if equal. One in seven rollouts is invalid."""
    policy, advantages = config.policy, np.random.default_rng(1).normal(size=len(rollouts))
    made = {index: pulled(rollout, float(advantages[index]), index % 7 != 3) for index, rollout in enumerate(rollouts)}
    lengths = [len(rollout.request.token_ids) + len(rollout.token_ids) for rollout in rollouts]
    plans = plan_batch(lengths, policy, dp_size=config.data_parallel_size, cost=SequenceCost(1.0, 0.01))
    rows, logprob_rows = (pack_rows(policy, plan[dp_rank], made) for plan in plans)
    return rows, rows if plans[0] == plans[1] else logprob_rows


def _of_rollouts(rows: list[PackedRow], logprobs: list[np.ndarray]) -> dict[int, np.ndarray]:
    found = {}
    for row, logprobs_T in zip(rows, logprobs, strict=bool(logprobs)):
        bounds = row.cu_seqlens.tolist()
        for index, start, stop in zip(row.sequence_indices, bounds, bounds[1:], strict=False):
            found[index] = logprobs_T[start:stop][row.generated_mask_T[start:stop].bool().numpy()]
    return found


def _gradients(policy: PolicyRank) -> dict[str, np.ndarray]:
    """Gradients of the last step on this rank: whole ones, or the distributed optimizer's shards of them."""
    is_distributed = policy._section.megatron_cfg.optimizer.use_distributed_optimizer
    gradients = {}
    ranges = _shards(policy) if is_distributed else {}
    for slot, tensor in policy._tensors.items():
        if not tensor.requires_grad or (is_distributed and id(tensor) not in ranges):
            continue
        # Megatron's DDP gives parameters this attribute.
        whole = vars(tensor)["main_grad"].float().view(-1)
        mine = ranges.get(id(tensor), slice(0, len(whole)))
        shard = torch.full_like(whole, torch.nan)
        shard[mine] = whole[mine]
        gradients[slot] = shard.view(tensor.shape)
    return canonical_values(gradients, policy._live_layout, _shapes(policy))


def _shards(policy: PolicyRank) -> dict[int, slice]:
    """Elements of each parameter that this rank's optimizer updates, by id of the parameter."""
    found = {}
    for optimizer in optimizers(policy):
        for group in (*optimizer.model_float16_groups, *optimizer.model_fp32_groups):
            for parameter in group:
                shard = optimizer._get_model_param_range_map(parameter)["param"]
                found[id(parameter)] = slice(shard.start, shard.end)
    return found


def _shapes(policy: PolicyRank) -> dict[str, tuple[int, ...]]:
    base, peft = family(policy._hf_config), policy._section.megatron_cfg.peft
    shapes = base.canonical(policy._hf_config)
    if peft.enabled:
        shapes = shapes | adapter_family(base, adapted_layers(base, policy._hf_config), peft.dim).canonical(
            policy._hf_config
        )
    return shapes
