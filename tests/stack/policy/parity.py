# SPDX-License-Identifier: Apache-2.0
"""Runs of grpo_tiny.yaml with features turned on, put together from all ranks, and how far two of them are apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrl.config.load import load_config
from mrl.config.rules.checks import find_problems
from mrl.config.schema.run import RunConfig
from mrl.types import Rollout
from tests import models, routes
from tests.stack.policy import parity_ranks
from tests.stack.policy.layouts import put_together, transformers_model, worst_error
from tests.stack.policy.parity_cells import Settings
from tests.stack.policy.replay_ranks import tokens_of, with_routes
from tests.stack.ranks import RankPool

# For rollouts of at most 71 tokens, in about seven rows. With a larger epsilon Adam does not amplify rounding where
# gradients are almost 0.
COMMON: Settings = {
    "max_total_sequence_length": 80,
    "sequence_packing.train_mb_tokens": 144,
    "sequence_packing.logprob_mb_tokens": 144,
    "dynamic_batching.train_mb_tokens": 192,
    "dynamic_batching.logprob_mb_tokens": 192,
    "dynamic_batching.sequence_length_round": 16,
    "megatron_cfg.optimizer.lr": 1e-3,
    "megatron_cfg.optimizer.min_lr": 1e-3,
    "megatron_cfg.optimizer.adam_eps": 1e-3,
    "megatron_cfg.scheduler.lr_warmup_iters": 0,
}


@dataclass(frozen=True)
class Result:
    """Joint measurements of all ranks."""

    losses: list[float]
    logprobs: dict[int, list[np.ndarray]]
    """Logprobs by rollout, from every rank that has them."""
    gradients: dict[str, np.ndarray]


@dataclass(frozen=True)
class Errors:
    """Distance of a run from another one; relative but for logprobs, where it is the largest difference."""

    loss: float
    """Error of the measured step."""
    gradient: float
    """L2 error of the worst tensor."""
    worst_tensor: str
    logprob: float


def save_example(folder: Path, model_type: str) -> Path:
    """A tiny model of a family with all its kinds of layers, in a number that two stages share evenly."""
    if model_type == "nemotron_h":
        return models.save_nemotron_h(folder, hybrid_override_pattern="MEM*EME-", num_hidden_layers=8)
    return models.save_model(folder, model_type)


def run_config(folder: Path, settings: Settings, num_ranks: int) -> RunConfig:
    """grpo_tiny.yaml on the model in `folder` and on so many ranks, with these settings below `policy`."""
    values = {"model_name": folder, **COMMON, **settings}
    overrides = [f"policy.{key}={_spell(value)}" for key, value in values.items()]
    config = load_config("grpo_tiny.yaml", [*overrides, f"cluster.cpu_units_per_node={num_ranks}"])
    # What is proven here must be what a run may turn on.
    assert [problem for problem in find_problems(config) if problem.key.startswith("policy.")] == []
    return config


def rollouts_with_routes(folder: Path) -> list[Rollout]:
    """The rollouts as from an engine that chose the experts as transformers does with the model's weights."""
    model = transformers_model(folder)
    return [
        with_routes(rollout, routes.own_routes(model, tokens_of(rollout))[0][:-1].astype(np.uint8))
        for rollout in parity_ranks.rollouts()
    ]


def measure(ranks: RankPool, config: RunConfig, *, num_steps: int, measured_step: int) -> Result:
    """Measures on-policy steps of a run."""
    has_routes = config.policy.router_replay.enabled
    rollouts = rollouts_with_routes(Path(config.policy.model_name)) if has_routes else parity_ranks.rollouts()
    arguments = (config, rollouts, num_steps, measured_step)
    parts = ranks.run(parity_ranks.measure, *arguments, world_size=config.num_policy_ranks)
    assert all(part.losses == parts[0].losses for part in parts)
    logprobs: dict[int, list[np.ndarray]] = {}
    for part in parts:
        for index, values in part.logprobs.items():
            logprobs.setdefault(index, []).append(values)
    return Result(parts[0].losses, logprobs, put_together([part.gradients for part in parts]))


def distance(result: Result, plain: Result, measured_step: int) -> Errors:
    """Distance of a run from a plain one."""
    assert result.logprobs.keys() == plain.logprobs.keys() == set(range(parity_ranks.NUM_ROLLOUTS))
    losses = loss_errors(result.losses, plain.losses)
    worst_tensor, gradient = worst_error(result.gradients, plain.gradients)
    logprob = max(
        float(np.abs(values - plain.logprobs[index][0]).max())
        for index, all_of in result.logprobs.items()
        for values in all_of
    )
    return Errors(losses[measured_step], gradient, worst_tensor, logprob)


def loss_errors(losses: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Relative error of each."""
    return [abs(loss - other) / abs(other) for loss, other in zip(losses, expected, strict=True)]


def _spell(value: object) -> str:
    return str(value) if isinstance(value, str | Path) else json.dumps(value)
