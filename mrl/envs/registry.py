"""Environments by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.envs.pool import RewardPool

if TYPE_CHECKING:
    from mrl.config.schema_data import EnvConfig

MATH_VERIFIERS = {"hf_math_verify": "mrl.envs.math:score"}


def build_environments(config: EnvConfig) -> dict[str, RewardPool]:
    """Every environment of `env`, started, by name."""
    math = config.math
    return {"math": RewardPool(MATH_VERIFIERS[math.math_verify_impl], num_workers=math.num_workers, timeout_s=math.timeout_s)}
