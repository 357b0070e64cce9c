"""Whether rollouts can be supplied as the config asks: ahead of the training, with a signal, and for validation."""

from __future__ import annotations

from mrl.config.rules.ranges import spell
from mrl.config.schema.run import RunConfig


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
    grpo = config.grpo
    if grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling:
        rule = "without grpo.use_dynamic_sampling=true a step asks for as many prompts as it trains on"
        problems.append(_problem("grpo.batch_multiplier", grpo.batch_multiplier, rule, "set it to 1, or the other to true"))
    if grpo.stop_at_validation_metric == "pass_k" and grpo.val_num_generations_per_prompt < 2:
        rule = "grpo.val_num_generations_per_prompt=1, of which nothing but the accuracy is known"
        problems.append(_problem("grpo.stop_at_validation_metric", "pass_k", rule, "raise the latter to 2 or more, or use accuracy"))
    return problems


def _problem(key: str, value: object, rule: str, way_out: str) -> str:
    return f"{key}={spell(value)}: {rule}; {way_out}"
