"""Whether the rules of what is trained, adapters and frozen tensors, fit the model and each other."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

from conversion.adapters import adapted_layers
from conversion.families.registry import family
from mrl.config.rules.ranges import spell
from mrl.config.schema.policy import PolicyConfig


def find_training_problems(policy: PolicyConfig) -> list[str]:
    """A problem for every rule of `peft` and `freeze_config` that cannot be followed; the model folder is readable."""
    hf_config = json.loads((Path(policy.model_name) / "config.json").read_text(encoding="utf-8"))
    return _peft(policy, hf_config) + _frozen(policy, hf_config)


def _problem(key: str, value: object, rule: str, way_out: str) -> str:
    return f"policy.megatron_cfg.{key}={spell(value)}: {rule}; {way_out}"


def _peft(policy: PolicyConfig, hf_config: dict[str, object]) -> list[str]:
    peft, problems = policy.megatron_cfg.peft, []
    if not peft.enabled:
        return []
    if peft.target_modules and peft.exclude_modules:
        rule = "layers are excluded only from all, and peft.target_modules names some"
        problems.append(_problem("peft.exclude_modules", peft.exclude_modules, rule, "empty one of the two"))
    for key, patterns in {"target_modules": peft.target_modules, "exclude_modules": peft.exclude_modules}.items():
        try:
            layers = adapted_layers(family(hf_config), hf_config, **{key: patterns})
        except ValueError as error:
            problems.append(f"policy.megatron_cfg.peft.{key}={spell(patterns)}: {error}")
        else:
            if not layers:
                problems.append(_problem(f"peft.{key}", patterns, "no layer is left to adapt", "exclude fewer layers"))
    zeros = [peft.lora_A_init_method, peft.lora_B_init_method].count("zero")
    if zeros != 1:
        rule = (
            "with peft.lora_A_init_method=zero too, no gradient would ever reach the adapters"
            if zeros
            else f"with peft.lora_A_init_method={peft.lora_A_init_method}, training would not start from the model's own weights"
        )
        problems.append(_problem("peft.lora_B_init_method", peft.lora_B_init_method, rule, "set one of the two to zero"))
    if peft.lora_dtype == "bfloat16" and policy.precision == "float32":
        rule = "adapters cannot be coarser than policy.precision=float32"
        problems.append(_problem("peft.lora_dtype", peft.lora_dtype, rule, "leave it out, and it follows"))
    return problems


def _frozen(policy: PolicyConfig, hf_config: dict[str, object]) -> list[str]:
    patterns = policy.megatron_cfg.freeze_config.modules
    names = list(family(hf_config).canonical(hf_config))
    problems = [
        _problem("freeze_config.modules", patterns, f"{pattern!r} matches no tensor of the model", f"use for example {names[0]}")
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if not policy.megatron_cfg.peft.enabled and all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
        problems.append(_problem("freeze_config.modules", patterns, "nothing is left to train", "freeze fewer tensors, or enable peft"))
    return problems
