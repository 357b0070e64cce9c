# SPDX-License-Identifier: Apache-2.0
"""Rules of distillation: there is a teacher, and loss or advantages come from it. `models` checks the teachers' sections."""

from __future__ import annotations

from mrl.config.errors import Problems
from mrl.config.schema.run import RunConfig
from mrl.config.sections import prefix_of

LOSS_KEYS = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
"""Of `loss_fn`, those of distillation; all others are GRPO's."""


def check_teacher(config: RunConfig, problems: Problems) -> None:
    """A run that distils has a teacher, and what its command line says of the loss is read."""
    _check_on_policy(config, problems)
    if config.algorithm == "distillation":
        # What a config inherits from one of GRPO may stay there.
        for key in (f"loss_fn.{name}" for name in vars(config.loss_fn) if name not in LOSS_KEYS):
            if config.origins.get(key, "").startswith("command line"):
                problems.add(key, "it belongs to GRPO's loss, and algorithm=distillation", f"use {', '.join(LOSS_KEYS)}")
        # A section that could not be read has problems of its own.
        if config.teacher is None and not any(key.startswith("teacher.") for key in config.origins):
            problems.extend(
                ["teacher: algorithm=distillation has nobody to learn from; give teacher.model_name, the folder of a model or its id"]
            )
    for model, section in config.teachers.items():
        if section.megatron_cfg.peft.enabled:
            rule = "a teacher is not trained: what adapters add to a model is merged into its folder first"
            problems.extend([f"{prefix_of(model)}megatron_cfg.peft.enabled=true: {rule}; set it to false"])


def _check_on_policy(config: RunConfig, problems: Problems) -> None:
    """Advantages come of teachers' logprobs if both sections say so, and both compare the whole vocabulary."""
    given, estimator, key = config.on_policy_distillation, config.grpo.adv_estimator.name, "on_policy_distillation"
    if given is None or not given.enabled:
        if estimator == "opd":
            problems.add(
                "grpo.adv_estimator.name", "opd compares with teachers, and there are none", f"set {key}.enabled=true, or use grpo"
            )
        return
    if config.algorithm != "grpo":
        rule = f"advantages are GRPO's, and algorithm={config.algorithm}"
        problems.add(f"{key}.enabled", rule, "set it to false; algorithm=distillation has the section teacher")
        return
    if estimator != "opd":
        rule = f"what teachers say would be computed for nothing: grpo.adv_estimator.name={estimator} does not look at it"
        problems.add(f"{key}.enabled", rule, f"use opd, with {key}.orm_advantage_weight for the reward's share, or set this to false")
    names = given.teacher_model_by_agent_name
    if not names:
        problems.add(f"{key}.teacher_model_by_agent_name", "no row has a teacher", "give a model for each agent or environment")
    elif given.default_teacher_alias is not None and given.default_teacher_alias not in names:
        rule = f"it is none of the names in {key}.teacher_model_by_agent_name ({', '.join(names)})"
        problems.add(f"{key}.default_teacher_alias", rule, "use one of them, or null")
    for name in given.non_colocated_teachers.teacher_overrides if given.non_colocated_teachers else ():
        if given.teacher_of(name) != name:
            rule = f"no teacher is held under {name!r}: names of one model share the first of them"
            way_out = f"use one of {', '.join(config.further_teachers)}"
            problems.add(f"{key}.non_colocated_teachers.teacher_overrides", rule, way_out)
    if given.use_orm_advantage != (given.orm_advantage_weight > 0):
        rule = f"{key}.use_orm_advantage={str(given.use_orm_advantage).lower()} does not go with it"
        problems.add(f"{key}.orm_advantage_weight", rule, "give the reward a weight above 0 and set that to true, or 0 and false")
    generation = config.policy.generation
    if generation.top_p < 1.0 or generation.top_k is not None:
        rule = "teachers' logprobs are of the whole vocabulary, but policy.generation.top_p or top_k truncates the policy's"
        problems.add(f"{key}.enabled", rule, "set top_p=1 and top_k=null")
