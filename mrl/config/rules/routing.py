"""Whether the routing of tokens to experts is one that the model has, and that the libraries of this host can do."""

from __future__ import annotations

from mrl.config.model import ModelSizes
from mrl.config.rules.ranges import spell
from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.run import RunConfig


def find_routing_problems(config: RunConfig, model: ModelSizes) -> list[str]:
    """A problem for every key of routing that would do nothing, or something else than the engines; all numbers are in range."""
    megatron = config.policy.megatron_cfg
    return _biases(megatron, model) + _auxiliary_loss(megatron, model) + _dispatch(config, model)


def _problem(key: str, value: object, rule: str, way_out: str) -> str:
    return f"policy.megatron_cfg.{key}={spell(value)}: {rule}; {way_out}"


def _biases(megatron: MegatronConfig, model: ModelSizes) -> list[str]:
    problems = []
    wanted, rate = megatron.moe_router_enable_expert_bias, megatron.moe_router_bias_update_rate
    if wanted not in (None, model.has_expert_bias):
        rule = f"the model's routers have {'a' if model.has_expert_bias else 'no'} bias per expert, and the engines route as the model says"
        problems.append(_problem("moe_router_enable_expert_bias", wanted, rule, "leave it out"))
    if rate > 0 and not model.has_expert_bias:
        rule = "the model's routers have no bias per expert to update"
        problems.append(_problem("moe_router_bias_update_rate", rate, rule, "set it to 0"))
    return problems


def _auxiliary_loss(megatron: MegatronConfig, model: ModelSizes) -> list[str]:
    kind, coefficient = megatron.moe_router_load_balancing_type, megatron.moe_aux_loss_coeff
    if kind == "none" and coefficient > 0:
        rule = "it weights no loss, because policy.megatron_cfg.moe_router_load_balancing_type=none"
        return [_problem("moe_aux_loss_coeff", coefficient, rule, "set it to 0, or choose a type of loss")]
    if kind != "none" and model.num_experts == 0:
        return [_problem("moe_router_load_balancing_type", kind, "the model has no experts", "set it to none")]
    if kind != "none" and coefficient == 0:
        rule = "a loss of policy.megatron_cfg.moe_aux_loss_coeff=0 changes nothing"
        return [_problem("moe_router_load_balancing_type", kind, rule, "set it to none, or the coefficient above 0, for example to 1e-3")]
    return []


def _dispatch(config: RunConfig, model: ModelSizes) -> list[str]:
    megatron, problems = config.policy.megatron_cfg, []
    dispatcher = megatron.moe_token_dispatcher_type
    if megatron.moe_enable_deepep != (dispatcher == "flex"):
        rule = f"must agree with policy.megatron_cfg.moe_token_dispatcher_type={dispatcher}: flex and nothing else is DeepEP"
        way_out = f"set it to {spell(dispatcher == 'flex')}, or choose the dispatcher"
        problems.append(_problem("moe_enable_deepep", megatron.moe_enable_deepep, rule, way_out))
    elif dispatcher == "flex":
        problems += _deepep(config)
    if megatron.moe_shared_expert_overlap and dispatcher != "alltoall":
        rule = f"needs policy.megatron_cfg.moe_token_dispatcher_type=alltoall, not {dispatcher}"
        problems.append(_problem("moe_shared_expert_overlap", True, rule, "set it to false, or choose that dispatcher"))
    if megatron.moe_shared_expert_overlap and megatron.activation_checkpointing and "shared_experts" in (megatron.recompute_modules or ()):
        rule = "policy.megatron_cfg.recompute_modules names shared_experts, which Megatron recomputes only where they do not overlap"
        problems.append(_problem("moe_shared_expert_overlap", True, rule, "set it to false"))
    if megatron.moe_shared_expert_overlap and model.latent_expert_size:
        rule = "Megatron has no overlap for the model's latent experts"
        problems.append(_problem("moe_shared_expert_overlap", True, rule, "set it to false"))
    return problems


def _deepep(config: RunConfig) -> list[str]:
    megatron = config.policy.megatron_cfg
    key, way_out = "moe_token_dispatcher_type", "use alltoall, and set moe_enable_deepep to false"
    if config.cluster.gpus_per_node == 0:
        return [_problem(key, "flex", "DeepEP needs GPUs, and cluster.gpus_per_node=0", way_out)]
    if megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size == 1:
        rule = "DeepEP needs policy.megatron_cfg.expert_model_parallel_size or expert_tensor_parallel_size above 1"
        return [_problem(key, "flex", rule, way_out)]
    if megatron.moe_router_dtype == "fp64":
        rule = "policy.megatron_cfg.moe_token_dispatcher_type=flex is DeepEP, which takes weights of experts in float32"
        return [_problem("moe_router_dtype", "fp64", rule, "set it to fp32")]
    return []
