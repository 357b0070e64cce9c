"""Whether rollouts can be supplied as the config asks: ahead of the training."""

from __future__ import annotations

from mrl.config.ranges import spell
from mrl.config.schema import RunConfig


def find_supply_problems(config: RunConfig) -> list[str]:
    """A problem for every rule that the run cannot follow; all numbers are in range."""
    lag, problems = config.grpo.async_grpo.max_lag_steps, []
    if lag > 0 and config.policy.generation.colocated.enabled:
        rule = "engines that share their units with the policy cannot sample while it trains (policy.generation.colocated.enabled=true)"
        way_out = (
            "set the latter to false, and policy.generation.colocated.resources where there are GPUs, or grpo.async_grpo.enabled=false"
        )
        problems.append(_problem("grpo.async_grpo.enabled", True, rule, way_out))
    if lag > 0 and not config.loss_fn.use_importance_sampling_correction:
        rule = f"rollouts up to grpo.async_grpo.max_trajectory_age_steps={lag} steps old are trained with weights that did not draw them"
        problems.append(_problem("loss_fn.use_importance_sampling_correction", False, rule, "set it to true"))
    return problems


def _problem(key: str, value: object, rule: str, way_out: str) -> str:
    return f"{key}={spell(value)}: {rule}; {way_out}"
