# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps: the distributed optimizer with overlaps takes one rank's steps, routers move only as they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrl.config.schema.policy import PolicyConfig
from tests import models
from tests.stack.policy import layout_ranks
from tests.stack.ranks import RankPool

MOE = ("mixtral", "qwen3_moe", "glm4_moe", "qwen2_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "gpt_oss")
NUM_STEPS = 3
# Rows of even length for sequence parallelism, an even number of them for data parallelism.
ROWS = [[list(range(first, first + length)) for length in (40, 7, 13)] for first in (0, 60, 120, 180)]

FOUR_RANKS: dict[str, object] = dict(tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, folder: Path) -> list[tuple[float, float]]:
    ((steps, _, _),) = ranks.run(
        layout_ranks.train, layout_ranks.policy_config(), folder, ROWS, NUM_STEPS, world_size=1
    )
    return steps


@pytest.mark.parametrize("overlaps_gradients", [True, False])
def test_four_ranks_with_overlaps_take_the_steps_of_one_rank(
    ranks: RankPool, folder: Path, one_rank: list[tuple[float, float]], overlaps_gradients: bool
):
    config = with_overlaps(layout_ranks.policy_config(**FOUR_RANKS))
    config.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce = overlaps_gradients
    np.testing.assert_allclose(four_rank_steps(ranks, config, folder), one_rank, rtol=2e-5)


def test_bfloat16_stays_near_float32(ranks: RankPool, folder: Path, one_rank: list[tuple[float, float]]):
    config = with_overlaps(layout_ranks.policy_config("bfloat16", **FOUR_RANKS))
    np.testing.assert_allclose(four_rank_steps(ranks, config, folder), one_rank, rtol=0.03)


def test_a_frozen_router_and_a_bias_without_update_rate_stay(ranks: RankPool, folder: Path):
    config = layout_ranks.policy_config(freeze_moe_router=True)
    ((_, before, after),) = ranks.run(layout_ranks.train, config, folder, ROWS, NUM_STEPS, world_size=1)
    assert len(before) == 6
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_router_trains_and_its_bias_follows_the_update_rate(ranks: RankPool, folder: Path):
    config = layout_ranks.policy_config(moe_router_bias_update_rate=1e-3)
    ((_, before, after),) = ranks.run(layout_ranks.train, config, folder, ROWS, 1, world_size=1)
    for name in before:
        change = np.abs(after[name] - before[name])
        # Each step moves a bias by the rate, or not at all at perfect balance.
        assert change.max() <= 1.001e-3 and change.any() if name.endswith("expert_bias") else change.any()


@pytest.mark.parametrize(
    "model_type",
    ["llama", "qwen2", "qwen3", "qwen3_5_text", *MOE],
)
def test_transformers_take_the_steps_of_one_rank_and_learn(ranks: RankPool, tmp_path: Path, model_type: str):
    folder = models.save_model(tmp_path, model_type)
    # Of tied embeddings, both stages' copies are cut over replicas.
    megatron = FOUR_RANKS if model_type in MOE else dict(pipeline_model_parallel_size=2)
    ((expected, _, _),) = ranks.run(
        layout_ranks.train, layout_ranks.policy_config(), folder, ROWS, NUM_STEPS, world_size=1
    )
    results = ranks.run(
        layout_ranks.train, with_overlaps(layout_ranks.policy_config(**megatron)), folder, ROWS, NUM_STEPS, world_size=4
    )
    replicas = int(str(megatron.get("tensor_model_parallel_size", 1)))
    steps = [
        (sum(loss for loss, _ in step) / replicas, step[0][1])
        for step in zip(*(steps for steps, _, _ in results), strict=True)
    ]
    np.testing.assert_allclose(steps, expected, rtol=2e-5)
    losses = [loss for loss, _ in steps]
    assert losses == sorted(losses, reverse=True)


def with_overlaps(config: PolicyConfig) -> PolicyConfig:
    config.megatron_cfg.optimizer.use_distributed_optimizer = True
    config.megatron_cfg.distributed_data_parallel_config.overlap_param_gather = True
    return config


def four_rank_steps(ranks: RankPool, config: PolicyConfig, folder: Path) -> list[tuple[float, float]]:
    results = [steps for steps, _, _ in ranks.run(layout_ranks.train, config, folder, ROWS, NUM_STEPS, world_size=4)]
    # Ranks 0 and 2 are the data-parallel replicas of one tp rank; each has the loss of its rows.
    return [(a[0] + b[0], a[1]) for a, b in zip(results[0], results[2], strict=True)]
