"""Whether the parallel layouts of trainer and engines divide the model, the batch and the cluster."""

from __future__ import annotations

import math

from mrl.config.errors import Problems, spell
from mrl.config.model import ModelSizes
from mrl.config.schema.run import RunConfig

MAX_SUGGESTED_SIZE = 1024

_MEGATRON, _ENGINE, _RESOURCES = "policy.megatron_cfg", "policy.generation.vllm_cfg", "policy.generation.colocated.resources"


def check_cluster(config: RunConfig, problems: Problems) -> None:
    """Adds a problem for everything that the cluster lacks for the layout. Needs no model."""
    if not _misses_dedicated(config, problems):
        _check_world(config, problems)
        if config.has_engines:
            _check_engine_units(config, problems)


def check_layout(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Adds a problem for every size of the model that a parallel size does not divide."""
    if _misses_dedicated(config, problems):
        return  # how many units trainer and engines have is not known
    if config.policy.router_replay.enabled and model.num_experts == 0:
        problems.add("policy.router_replay.enabled", "the model has no experts, so nothing is routed", "set it to false")
    _check_trainer(config, model, problems)
    _check_context(config, model, problems)
    _check_stages(config, model, problems)
    if config.has_engines:
        _check_engines(config, model, problems)


def check_ports(config: RunConfig, problems: Problems) -> None:
    """Adds a problem if one end of the ports of policy ranks is missing, or they are in the wrong order."""
    low, high = config.cluster.master_port_range_low, config.cluster.master_port_range_high
    if (low, high) != (None, None) and (low is None or high is None or low >= high):
        rule = f"must be below cluster.master_port_range_high={spell(high)}"
        problems.add("cluster.master_port_range_low", rule, "set both, for example to 1400 and 1999, or none of them")


def divides(size: int, total: int) -> bool:
    """Whether `total` can be cut into `size` equal parts; a total of 0 does not exist in the model."""
    return total % size == 0


def _divisors(*totals: int) -> str:
    """The sizes that divide all totals, as text; one total at least is not 0."""
    largest = math.gcd(*totals)
    return _use([size for size in range(1, min(largest, MAX_SUGGESTED_SIZE) + 1) if divides(size, largest)])


def _use(sizes: list[int]) -> str:
    return "use 1" if len(sizes) == 1 else f"use {', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"


def _check_world(config: RunConfig, problems: Problems) -> None:
    """The policy ranks hold a whole number of replicas, of dense layers and of experts."""
    megatron, cluster, units = config.policy.megatron_cfg, config.cluster, config.num_policy_ranks
    tp, pp, cp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size, megatron.context_parallel_size
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    dense, experts = megatron.model_parallel_size, ep * etp * pp
    unit_key = "cluster.gpus_per_node" if cluster.gpus_per_node else "cluster.cpu_units_per_node"
    if units < max(dense, experts):
        what = "GPUs" if cluster.gpus_per_node else "policy ranks"
        less = f" less {config.num_dedicated_units} of dedicated engines" if units < cluster.num_units else ""
        product = f"tensor {tp} x pipeline {pp} x context {cp} = {dense}, expert {ep} x expert tensor {etp} x pipeline {pp} = {experts}"
        text = (
            f"cluster.num_nodes={cluster.num_nodes} x {unit_key}={cluster.units_per_node}{less}: {units} {what}, and the layout needs "
            f"a multiple of {math.lcm(dense, experts)}: {product}; "
            f"raise cluster.num_nodes or {unit_key}, or lower the parallel sizes of policy.megatron_cfg"
        )
        problems.extend([text])
        return
    way_out = f"lower one of the sizes, or set {unit_key} to a multiple"
    if not divides(dense, units):
        product = f"cluster.num_nodes x {unit_key}" + (" less those of dedicated engines" if units < cluster.num_units else "")
        rule = f"tensor x pipeline x context parallel size = {dense} does not divide the {units} slots ({product})"
        problems.add(f"{_MEGATRON}.tensor_model_parallel_size", rule, way_out)
    if not divides(experts, units):
        rule = f"expert x expert tensor x pipeline parallel size = {experts} does not divide the {units} slots"
        problems.add(f"{_MEGATRON}.expert_model_parallel_size", rule, way_out)


def _misses_dedicated(config: RunConfig, problems: Problems) -> bool:
    """Whether it is wrong which GPUs engines take from the policy: none where they are colocated or there are none; GPUs of one node; or
    whole nodes. Adds the problems."""
    colocated, cluster = config.policy.generation.colocated, config.cluster
    given = {"gpus_per_node": colocated.resources.gpus_per_node, "num_nodes": colocated.resources.num_nodes}
    if not config.has_engines:
        return False
    if colocated.enabled or cluster.gpus_per_node == 0:
        rule = "policy.generation.colocated.enabled=true, so that engines have no GPUs of their own"
        if not colocated.enabled:
            rule = "cluster.gpus_per_node=0, where dedicated engines add policy.generation.num_cpu_engines x tensor_parallel_size processes"
        wrong = [name for name, value in given.items() if value is not None]
        for name in wrong:
            problems.add(f"{_RESOURCES}.{name}", rule, "set it to null")
        return bool(wrong)
    name, available, other, whole = "num_nodes", cluster.num_nodes, "gpus_per_node", cluster.gpus_per_node
    if cluster.num_nodes == 1:
        name, available, other, whole = other, whole, name, 1
    value = given[name]
    is_missing, is_wrong = value is None or value >= available, given[other] not in (None, whole)
    if is_missing:
        way_out = f"use 1 to {available - 1}" if available > 1 else "set policy.generation.colocated.enabled=true"
        problems.add(f"{_RESOURCES}.{name}", f"dedicated engines need some of cluster.{name}={available}, and the policy the rest", way_out)
    if is_wrong:
        problems.add(f"{_RESOURCES}.{other}", f"with cluster.num_nodes={cluster.num_nodes} it can only be {whole}", "set it to null")
    return is_missing or is_wrong


def _check_trainer(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    megatron = config.policy.megatron_cfg
    tp, ep, etp = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    _check_tensor_parallel(f"{_MEGATRON}.tensor_model_parallel_size", tp, model, problems, has_replicated_groups=False)
    if model.num_experts == 0 and ep * etp > 1:
        way_out = "set it and expert_tensor_parallel_size to 1"
        problems.add(f"{_MEGATRON}.expert_model_parallel_size", "the model has no experts", way_out)
        return
    if not divides(ep, model.num_experts):
        rule = f"does not divide the model's {model.num_experts} experts"
        problems.add(f"{_MEGATRON}.expert_model_parallel_size", rule, _divisors(model.num_experts))
    if not divides(etp, model.moe_ffn_size):
        rule = f"does not divide the experts' width {model.moe_ffn_size}"
        problems.add(f"{_MEGATRON}.expert_tensor_parallel_size", rule, _divisors(model.moe_ffn_size))
    if tp == 1 and megatron.sequence_parallel:
        rule = "sequence parallelism needs policy.megatron_cfg.tensor_model_parallel_size above 1"
        problems.add(f"{_MEGATRON}.sequence_parallel", rule, "set it to false")
    if tp > 1 and model.num_experts and not megatron.sequence_parallel:
        rule = f"Megatron trains experts with tensor_model_parallel_size={tp} only with sequence parallelism"
        problems.add(f"{_MEGATRON}.sequence_parallel", rule, "set it to true")


def _check_tensor_parallel(key: str, tp: int, model: ModelSizes, problems: Problems, *, has_replicated_groups: bool) -> None:
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
    if undivided:
        problems.add(key, f"does not divide the model's {', '.join(undivided)}", _divisors(*totals.values()))


def _check_context(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Megatron's MambaContextParallel gives each rank of a context-parallel group some heads of every Mamba layer."""
    tp, cp = config.policy.megatron_cfg.tensor_model_parallel_size, config.policy.megatron_cfg.context_parallel_size
    if not divides(tp, model.num_mamba_heads) or not divides(tp, model.num_mamba_groups):
        return  # there is a problem with tp already
    heads, groups = model.num_mamba_heads // tp, model.num_mamba_groups // tp

    def fits(size: int) -> bool:
        return divides(size, heads) and (divides(size, groups) or divides(groups, size))

    if heads and not fits(cp):
        rule = f"does not divide the {heads} Mamba heads of a tensor-parallel rank, or neither divides its {groups} Mamba groups nor is a"
        sizes = [size for size in range(1, heads + 1) if fits(size)]
        problems.add(f"{_MEGATRON}.context_parallel_size", f"{rule} multiple", _use(sizes))


def _check_stages(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    megatron, key = config.policy.megatron_cfg, f"{_MEGATRON}.pipeline_model_parallel_size"
    pp = megatron.pipeline_model_parallel_size
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    given = [layers for layers in (first, last) if layers is not None]
    if pp == 1 and given:
        rule = "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage need several stages"
        problems.add(key, rule, "set both to null")
        return
    others, rest = pp - len(given), model.num_layers - sum(given)
    if rest < others or (rest % others if others else rest):
        rule = f"the {rest} layers outside given stages do not spread evenly over {others} others (the model has {model.num_layers} layers)"
        if not given:
            rule = f"does not divide the model's {model.num_layers} layers"
        way_out = "set policy.megatron_cfg.num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage so that the rest divides"
        problems.add(key, rule, way_out)
    elif megatron.parallel.vpp > 1 and model.model_class == "mamba":
        rule = "Megatron's hybrid models have no virtual stages"
        problems.add(f"{_MEGATRON}.virtual_pipeline_model_parallel_size", rule, "set it to null")
    else:
        try:
            megatron.parallel.layers_of(0, model.num_layers)
        except ValueError as error:
            problems.extend([f"{_MEGATRON}.{error}"])


def _check_engines(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    vllm = config.policy.generation.vllm_cfg
    tp, ep = vllm.tensor_parallel_size, vllm.expert_parallel_size
    _check_tensor_parallel(f"{_ENGINE}.tensor_parallel_size", tp, model, problems, has_replicated_groups=True)
    if ep > max(1, model.num_experts):
        problems.add(f"{_ENGINE}.expert_parallel_size", f"the model has {model.num_experts} experts", "set it to 1")
    if ep == 1 and not divides(tp, model.moe_ffn_size):
        rule = f"does not divide the experts' width {model.moe_ffn_size}"
        problems.add(f"{_ENGINE}.tensor_parallel_size", rule, f"use a divisor, or set expert_parallel_size={tp}")
    if vllm.max_model_len > model.max_sequence_length:
        rule = f"the model's max_position_embeddings is {model.max_sequence_length}"
        problems.add(f"{_ENGINE}.max_model_len", rule, "lower policy.max_total_sequence_length")


def _check_engine_units(config: RunConfig, problems: Problems) -> None:
    """An engine fits into one node, and all engines into the cluster."""
    vllm, dedicated = config.policy.generation.vllm_cfg, config.num_dedicated_units
    tp, ep = vllm.tensor_parallel_size, vllm.expert_parallel_size
    if ep not in (1, tp):
        rule = f"must be 1 or policy.generation.vllm_cfg.tensor_parallel_size={tp}"
        problems.add(f"{_ENGINE}.expert_parallel_size", rule, "use one of them")
    is_one_node = config.cluster.gpus_per_node == 0 or config.cluster.num_nodes == 1
    per_node = dedicated if dedicated and is_one_node else config.cluster.units_per_node
    if not divides(tp, per_node):
        rule = f"does not divide the {per_node} slots of a node, and an engine fits into one"
        problems.add(f"{_ENGINE}.tensor_parallel_size", rule, _divisors(per_node))
    elif config.num_engines * tp > config.num_units:
        rule = f"engines of {tp} workers need {config.num_engines * tp} of the {config.num_units} slots"
        problems.add("policy.generation.num_cpu_engines", rule, "lower it, or raise cluster.cpu_units_per_node")
