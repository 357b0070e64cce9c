"""Whether the parallel layouts of trainer and engines divide the model, the batch and the cluster."""

from __future__ import annotations

import math

from mrl.config.model import ModelSizes
from mrl.config.rules.ranges import spell
from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.run import RunConfig

MAX_SUGGESTED_SIZE = 1024


def find_layout_problems(config: RunConfig, model: ModelSizes) -> list[str]:
    """A problem for every size that a parallel size does not divide; all numbers are in range."""
    if problems := _dedicated(config):
        return problems  # how many units trainer and engines have is not known
    return (
        _world(config)
        + _experts(config, model)
        + _trainer(config.policy.megatron_cfg, model)
        + _context(config.policy.megatron_cfg, model)
        + _stages(config.policy.megatron_cfg, model)
        + (_engines(config, model) if config.has_engines else [])
    )


def find_cluster_problems(config: RunConfig) -> list[str]:
    """The part of `find_layout_problems` that needs no model: what the cluster lacks for the layout."""
    return _dedicated(config) or _world(config) + (_engine_units(config) if config.has_engines else [])


def divides(size: int, total: int) -> bool:
    """Whether `total` can be cut into `size` equal parts; a total of 0 does not exist in the model."""
    return total % size == 0


def _problem(key: str, value: object, rule: str, way_out: str) -> str:
    return f"policy.{key}={spell(value)}: {rule}; {way_out}"


def _divisors(*totals: int) -> str:
    """The sizes that divide all totals, as text; one total at least is not 0."""
    largest = math.gcd(*totals)
    return _use([size for size in range(1, min(largest, MAX_SUGGESTED_SIZE) + 1) if divides(size, largest)])


def _use(sizes: list[int]) -> str:
    return "use 1" if len(sizes) == 1 else f"use {', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"


def _world(config: RunConfig) -> list[str]:
    megatron, cluster = config.policy.megatron_cfg, config.cluster
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    units, dense = config.num_policy_ranks, megatron.model_parallel_size
    unit_key = "cluster.gpus_per_node" if cluster.gpus_per_node else "cluster.cpu_units_per_node"
    product = f"cluster.num_nodes x {unit_key}" + (" less those of dedicated engines" if units < cluster.num_units else "")
    experts = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size * pp
    if units < max(dense, experts):
        return [_too_small(config, unit_key, dense, experts)]
    problems = []
    if not divides(dense, units):
        rule = f"tensor x pipeline x context parallel size = {dense} does not divide the {units} worker units ({product})"
        problems.append(
            _problem("megatron_cfg.tensor_model_parallel_size", tp, rule, f"lower one of the sizes, or set {unit_key} to a multiple")
        )
    if not divides(experts, units):
        rule = f"expert x expert tensor x pipeline parallel size = {experts} does not divide the {units} worker units"
        way_out = f"lower one of the sizes, or set {unit_key} to a multiple"
        problems.append(_problem("megatron_cfg.expert_model_parallel_size", megatron.expert_model_parallel_size, rule, way_out))
    return problems


def _too_small(config: RunConfig, unit_key: str, dense: int, experts: int) -> str:
    megatron, cluster, units = config.policy.megatron_cfg, config.cluster, config.num_policy_ranks
    tp, pp, cp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size, megatron.context_parallel_size
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    what = "GPUs" if cluster.gpus_per_node else "policy ranks"
    less = f" less {config.num_dedicated_units} of dedicated engines" if units < cluster.num_units else ""
    product = f"tensor {tp} x pipeline {pp} x context {cp} = {dense}, expert {ep} x expert tensor {etp} x pipeline {pp} = {experts}"
    return (
        f"cluster.num_nodes={cluster.num_nodes} x {unit_key}={cluster.units_per_node}{less}: {units} {what}, and the layout needs "
        f"a multiple of {math.lcm(dense, experts)}: {product}; "
        f"raise cluster.num_nodes or {unit_key}, or lower the parallel sizes of policy.megatron_cfg"
    )


def _experts(config: RunConfig, model: ModelSizes) -> list[str]:
    if config.policy.router_replay.enabled and model.num_experts == 0:
        return [_problem("router_replay.enabled", True, "the model has no experts, so nothing is routed", "set it to false")]
    return []


def _dedicated(config: RunConfig) -> list[str]:
    """Which units engines take from the policy: nothing where they are colocated or no unit is a GPU; GPUs of one node; or whole nodes."""
    colocated, cluster = config.policy.generation.colocated, config.cluster
    given = {"gpus_per_node": colocated.resources.gpus_per_node, "num_nodes": colocated.resources.num_nodes}
    prefix = "generation.colocated.resources"
    if not config.has_engines:
        return []
    if colocated.enabled or cluster.gpus_per_node == 0:
        rule = "policy.generation.colocated.enabled=true, so that engines have no units of their own"
        if not colocated.enabled:
            rule = "cluster.gpus_per_node=0, where dedicated engines add policy.generation.num_cpu_engines x tensor_parallel_size units"
        return [_problem(f"{prefix}.{name}", value, rule, "set it to null") for name, value in given.items() if value is not None]
    name = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    available, value = (cluster.gpus_per_node, given[name]) if cluster.num_nodes == 1 else (cluster.num_nodes, given[name])
    problems = []
    if value is None or value >= available:
        rule = f"dedicated engines need some of cluster.{name}={available}, and the policy the rest"
        way_out = f"use 1 to {available - 1}" if available > 1 else "set policy.generation.colocated.enabled=true"
        problems.append(_problem(f"{prefix}.{name}", value, rule, way_out))
    other, whole = ("num_nodes", 1) if name == "gpus_per_node" else ("gpus_per_node", cluster.gpus_per_node)
    if given[other] not in (None, whole):
        rule = f"with cluster.num_nodes={cluster.num_nodes} it can only be {whole}"
        problems.append(_problem(f"{prefix}.{other}", given[other], rule, "set it to null"))
    return problems


def _trainer(megatron: MegatronConfig, model: ModelSizes) -> list[str]:
    tp, ep, etp = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    problems = _tensor_parallel("megatron_cfg.tensor_model_parallel_size", tp, model, has_replicated_groups=False)
    if model.num_experts == 0 and ep * etp > 1:
        problems.append(
            _problem(
                "megatron_cfg.expert_model_parallel_size", ep, "the model has no experts", "set it and expert_tensor_parallel_size to 1"
            )
        )
        return problems
    if not divides(ep, model.num_experts):
        rule = f"does not divide the model's {model.num_experts} experts"
        problems.append(_problem("megatron_cfg.expert_model_parallel_size", ep, rule, _divisors(model.num_experts)))
    if not divides(etp, model.moe_ffn_size):
        rule = f"does not divide the experts' width {model.moe_ffn_size}"
        problems.append(_problem("megatron_cfg.expert_tensor_parallel_size", etp, rule, _divisors(model.moe_ffn_size)))
    if tp == 1 and megatron.sequence_parallel:
        rule = "sequence parallelism needs policy.megatron_cfg.tensor_model_parallel_size above 1"
        problems.append(_problem("megatron_cfg.sequence_parallel", True, rule, "set it to false"))
    if tp > 1 and model.num_experts and not megatron.sequence_parallel:
        rule = f"Megatron trains experts with tensor_model_parallel_size={tp} only with sequence parallelism"
        problems.append(_problem("megatron_cfg.sequence_parallel", False, rule, "set it to true"))
    return problems


def _tensor_parallel(key: str, tp: int, model: ModelSizes, *, has_replicated_groups: bool) -> list[str]:
    groups = 0 if has_replicated_groups and model.num_mamba_groups == 1 else model.num_mamba_groups
    totals = {
        "attention heads": model.num_attention_heads,
        "Mamba heads": model.num_mamba_heads,
        "Mamba groups": groups,
        "columns of an MLP": model.ffn_size,
        "columns of the shared expert": model.shared_expert_ffn_size,
    }
    undivided = [f"{total} {name}" for name, total in totals.items() if not divides(tp, total)]
    kv = model.num_query_groups
    if kv and not divides(tp, kv) and not divides(kv, tp):
        undivided.append(f"{kv} key-value heads (nor is it a multiple)")
    rule = f"does not divide the model's {', '.join(undivided)}"
    return [_problem(key, tp, rule, _divisors(*totals.values()))] if undivided else []


def _context(megatron: MegatronConfig, model: ModelSizes) -> list[str]:
    """Megatron's MambaContextParallel gives each rank of a context-parallel group some heads of every Mamba layer."""
    tp, cp = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    if not divides(tp, model.num_mamba_heads) or not divides(tp, model.num_mamba_groups):
        return []  # said of tp already
    heads, groups = model.num_mamba_heads // tp, model.num_mamba_groups // tp

    def fits(size: int) -> bool:
        return divides(size, heads) and (divides(size, groups) or divides(groups, size))

    if heads == 0 or fits(cp):
        return []
    rule = (
        f"does not divide the {heads} Mamba heads of a tensor-parallel rank, or neither divides its {groups} Mamba groups nor is a multiple"
    )
    sizes = [size for size in range(1, heads + 1) if fits(size)]
    return [_problem("megatron_cfg.context_parallel_size", cp, rule, _use(sizes))]


def _stages(megatron: MegatronConfig, model: ModelSizes) -> list[str]:
    pp = megatron.pipeline_model_parallel_size
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    given = [layers for layers in (first, last) if layers is not None]
    key = "megatron_cfg.pipeline_model_parallel_size"
    if pp == 1 and given:
        rule = "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need several stages"
        return [_problem(key, pp, rule, "set both to null")]
    others, rest = pp - len(given), model.num_layers - sum(given)
    if rest < others or (rest % others if others else rest):
        rule = f"the {rest} layers outside given stages do not spread evenly over {others} others (the model has {model.num_layers} layers)"
        if not given:
            rule = f"does not divide the model's {model.num_layers} layers"
        way_out = "set policy.megatron_cfg.num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage so that the rest divides"
        return [_problem(key, pp, rule, way_out)]
    if megatron.parallel.vpp > 1 and model.model_class == "mamba":
        rule = "Megatron's hybrid models have no virtual stages"
        return [_problem("megatron_cfg.virtual_pipeline_model_parallel_size", megatron.parallel.vpp, rule, "set it to null")]
    try:
        megatron.parallel.layers_of(0, model.num_layers)
    except ValueError as error:
        return [f"policy.megatron_cfg.{error}"]
    return []


def _engine_units_per_node(config: RunConfig) -> int:
    """Worker units that serve engines on each node that has any."""
    if config.num_dedicated_units and (config.cluster.gpus_per_node == 0 or config.cluster.num_nodes == 1):
        return config.num_dedicated_units
    return config.cluster.units_per_node


def _engines(config: RunConfig, model: ModelSizes) -> list[str]:
    vllm, prefix = config.policy.generation.vllm_cfg, "generation.vllm_cfg"
    tp, ep = vllm.tensor_parallel_size, vllm.expert_parallel_size
    problems = _tensor_parallel(f"{prefix}.tensor_parallel_size", tp, model, has_replicated_groups=True) + _engine_units(config)
    if ep > max(1, model.num_experts):
        problems.append(_problem(f"{prefix}.expert_parallel_size", ep, f"the model has {model.num_experts} experts", "set it to 1"))
    if ep == 1 and not divides(tp, model.moe_ffn_size):
        rule = f"does not divide the experts' width {model.moe_ffn_size}"
        problems.append(_problem(f"{prefix}.tensor_parallel_size", tp, rule, f"use a divisor, or set expert_parallel_size={tp}"))
    if vllm.max_model_len > model.max_sequence_length:
        rule = f"the model's max_position_embeddings is {model.max_sequence_length}"
        problems.append(_problem(f"{prefix}.max_model_len", vllm.max_model_len, rule, "lower policy.max_total_sequence_length"))
    return problems


def _engine_units(config: RunConfig) -> list[str]:
    """What an engine needs of its node and of the cluster."""
    generation = config.policy.generation
    vllm, prefix = generation.vllm_cfg, "generation.vllm_cfg"
    tp, ep, problems = vllm.tensor_parallel_size, vllm.expert_parallel_size, []
    if ep not in (1, tp):
        rule = f"must be 1 or policy.generation.vllm_cfg.tensor_parallel_size={tp}"
        problems.append(_problem(f"{prefix}.expert_parallel_size", ep, rule, "use one of them"))
    per_node = _engine_units_per_node(config)
    if not divides(tp, per_node):
        rule = f"does not divide the {per_node} worker units of a node, and an engine fits into one"
        problems.append(_problem(f"{prefix}.tensor_parallel_size", tp, rule, _divisors(per_node)))
    elif config.num_engines * tp > config.num_units:
        rule = f"engines of {tp} workers need {config.num_engines * tp} of the {config.num_units} worker units"
        way_out = "lower it, or raise cluster.cpu_units_per_node"
        problems.append(_problem("generation.num_cpu_engines", generation.num_cpu_engines, rule, way_out))
    return problems
