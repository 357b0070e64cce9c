"""Whether the parts that selective recomputation names are parts of the model."""

from __future__ import annotations

from mrl.config.model import ModelSizes
from mrl.config.rules.ranges import spell
from mrl.config.schema.run import RunConfig

KEY = "policy.megatron_cfg.recompute_modules"
MODULES = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
"""What megatron-core 0.16.1 can recompute, less mla_up_proj: no model that we train has latent attention."""


def find_recompute_problems(config: RunConfig, model: ModelSizes) -> list[str]:
    """A problem for every name that Megatron would ignore or refuse."""
    megatron = config.policy.megatron_cfg
    modules = megatron.recompute_modules
    if modules is None:
        return []
    if megatron.recompute_granularity == "full":
        return [
            _problem(
                modules, "policy.megatron_cfg.recompute_granularity=full recomputes everything", "set it to null, or that to selective"
            )
        ]
    if not modules:
        return [
            _problem(modules, "it names nothing", "set it to null for the default, or policy.megatron_cfg.activation_checkpointing=false")
        ]
    absent = {
        "mlp": "" if model.has_dense_mlp else "dense MLP layers",
        "moe": "" if model.num_experts else "experts",
        "moe_act": "" if model.num_experts else "experts",
        "shared_experts": "" if model.shared_expert_ffn_size else "shared experts",
    }
    problems = []
    for name in modules:
        if name not in MODULES:
            problems.append(_problem(modules, f"{name!r} is nothing that Megatron recomputes", f"use any of {', '.join(MODULES)}"))
        elif absent.get(name):
            problems.append(_problem(modules, f"the model has no {absent[name]}, which {name!r} recomputes", "leave it out"))
        elif name == "moe_act" and config.cluster.gpus_per_node == 0:
            rule = "'moe_act' is a part of Transformer Engine's experts, and cluster.gpus_per_node=0"
            problems.append(_problem(modules, rule, "use 'moe', which holds it"))
    return problems


def _problem(modules: list[str], rule: str, way_out: str) -> str:
    return f"{KEY}={spell(modules)}: {rule}; {way_out}"
