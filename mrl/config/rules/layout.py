# SPDX-License-Identifier: Apache-2.0
"""Rules of parallel layouts, which divide the model, the batch and the cluster, and of the engines' start."""

from __future__ import annotations

import difflib
import math
import os

from conversion.families.common import VllmParallel
from mrl.config.errors import Problems, spell, told
from mrl.config.model import ModelSizes
from mrl.config.passthrough import Library, arguments_of
from mrl.config.schema.run import RunConfig

MAX_SUGGESTED_SIZE = 1024
DENSE_SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
}
EXPERT_SIZES = {
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert tensor",
    "pipeline_model_parallel_size": "pipeline",
}
"""Keys of policy.megatron_cfg whose product is the number of ranks with all experts once; and their names."""
PARSERS_OF_MODELS = {"nemotron_json": "NVIDIA-Nemotron-Nano-9B-v2 and -12B-v2"}
"""Parsers that plugins in the repositories of models register, and these models."""

_MEGATRON, _GENERATION, _ENGINE = "policy.megatron_cfg", "policy.generation", "policy.generation.vllm_cfg"
# vLLM's own choice, with which experts lie as in the checkpoint.
_ALL_TO_ALL = "allgather_reducescatter"
_RESOURCES = f"{_GENERATION}.colocated.resources"


def check_cluster(config: RunConfig, problems: Problems) -> None:
    """Checks that the cluster has enough slots for whole replicas of the policy and whole engines. Needs no model."""
    at = problems.at
    has_own = bool(config.own_nodes or config.judges)
    if _misses_dedicated(config, problems) or (has_own and _misses_nodes(config, problems)):
        return
    cluster, ranks, own = config.cluster, config.num_ranks_of(problems.model), config.own_nodes.get(problems.model)
    slot_key = "cluster.gpus_per_node" if cluster.gpus_per_node else "cluster.cpu_units_per_node"
    slots = f"cluster.num_nodes={cluster.num_nodes} x {slot_key}={cluster.slots_per_node}"
    if own is not None:
        slots = f"{own} of its own nodes x {slot_key}={cluster.slots_per_node}"
    elif ranks < cluster.num_slots:
        of_others = {what: nodes * cluster.slots_per_node for what, nodes in config.nodes_of_others.items()}
        taken = {"dedicated engines": config.num_dedicated_slots if cluster.gpus_per_node else 0, **of_others}
        slots += "".join(f" less {number} of {what}" for what, number in taken.items() if number)
    wrong: dict[str, int] = {}
    products = []
    for names in (DENSE_SIZES, EXPERT_SIZES):
        sizes = {name: getattr(problems.section.megatron_cfg, name) for name in names}
        needed = math.prod(sizes.values())
        if ranks % needed:
            wrong |= sizes
            products.append(" x ".join(f"{names[name]} {size:,}" for name, size in sizes.items()) + f" = {needed:,}")
    if wrong:
        these = f"the {ranks:,} slots ({slots}) are" if ranks != 1 else f"the only slot ({slots}) is"
        rule = f"{these} no multiple of {', nor of '.join(products)}"
        first, *others = (f"{at}megatron_cfg.{name}" for name in sorted(wrong, key=lambda name: -wrong[name]))
        way_out = f"change one of these sizes, cluster.num_nodes or {slot_key}{_nodes_that_fit(config, problems)}"
        problems.add(first, rule, way_out, others=[*others, "cluster.num_nodes", *_slot_keys(config)])
    if config.has_engines:
        check_engine_slots(config, problems)


def _nodes_that_fit(config: RunConfig, problems: Problems) -> str:
    """Names the nearest numbers of nodes that leave the policy whole replicas, if its slots follow from that number."""
    cluster, others = config.cluster, config.cluster.num_slots - config.num_policy_ranks
    if problems.model in config.own_nodes or not cluster.gpus_per_node or (cluster.num_nodes == 1 and others):
        return ""
    megatron = problems.section.megatron_cfg
    replica = math.lcm(*(math.prod(getattr(megatron, name) for name in names) for names in (DENSE_SIZES, EXPERT_SIZES)))
    period = replica // math.gcd(replica, cluster.slots_per_node)
    ranks_of = {nodes: nodes * cluster.slots_per_node - others for nodes in range(1, cluster.num_nodes + period + 1)}
    fitting = [nodes for nodes, ranks in ranks_of.items() if ranks > 0 and ranks % replica == 0]
    nearest = [
        *[nodes for nodes in fitting if nodes < cluster.num_nodes][-1:],
        *[nodes for nodes in fitting if nodes > cluster.num_nodes][:1],
    ]
    return f"; {' or '.join(map(str, nearest))} nodes fit" if nearest else ""


def _misses_nodes(config: RunConfig, problems: Problems) -> bool:
    """Checks the nodes that models and judges have to themselves: whole ones, which leave some to the policy."""
    cluster, taken = config.cluster, config.nodes_of_others
    teaching, key = config.teaching, "distillation.teacher_nodes"
    if teaching is not None:
        key = "on_policy_distillation.non_colocated_teachers.enabled"
        allowed = {"gpus_per_node": cluster.gpus_per_node} if cluster.gpus_per_node else {}
        for name in teaching.teachers:
            place = teaching.place_of(name)
            nodes = place.get("num_nodes", 1)
            wrong = {} if type(nodes) is int and nodes > 0 else {"num_nodes": "a whole number from 1 on"}
            wrong |= {other: str(number) for other, number in allowed.items() if place.get(other, number) != number}
            for other, right in wrong.items():
                rule = f"teacher {name} has whole nodes to itself, but {other}={spell(place.get(other))}"
                problems.add(key, rule, f"set its {other} to {right}, or this to false")
            if wrong:
                return True
    of_engines = config.num_dedicated_slots // cluster.slots_per_node if cluster.gpus_per_node else 0
    if not taken["teachers"]:
        key = "cluster.num_nodes" if taken["the reference"] else f"judges.{next(iter(config.judges))}.num_nodes"
    taken["dedicated engines"] = of_engines
    if sum(taken.values()) >= cluster.num_nodes:
        told = " and ".join(f"{number} of {what}" for what, number in taken.items() if number).replace(
            " ", " nodes ", 1
        )
        rule = f"{told} leave the policy none of cluster.num_nodes={cluster.num_nodes}"
        fewer = ", or set reference.num_nodes=0" if taken["the reference"] else ""
        fewer = ", or let teachers share the policy's nodes" if taken["teachers"] else fewer
        problems.add(key, rule, f"raise cluster.num_nodes above {sum(taken.values())}{fewer}")
        return True
    if not cluster.gpus_per_node and config.num_dedicated_slots:
        rule = "on hosts without GPUs dedicated engines add slots to nodes, which these would have to share"
        problems.add(key, rule, "set policy.generation.colocated.enabled=true")
        return True
    return False


def _slot_keys(config: RunConfig) -> list[str]:
    """Keys that say how many slots a node has. The number of GPUs comes first: it decides which other key counts."""
    resources = [f"{_RESOURCES}.gpus_per_node", f"{_RESOURCES}.num_nodes"] if config.num_dedicated_slots else []
    return ["cluster.gpus_per_node", "cluster.cpu_units_per_node", *resources]


def check_engine_slots(config: RunConfig, problems: Problems) -> None:
    """Checks that nodes hold whole engines, or engines whole nodes, and that the engines' groups can be."""
    cluster = config.cluster
    vllm = config.policy.generation.vllm_cfg
    tp, ep, pp = vllm.tensor_parallel_size, vllm.expert_parallel_size, vllm.pipeline_parallel_size
    if ep > 1 and ep % tp:
        rule = f"must be 1 or a multiple of policy.generation.vllm_cfg.tensor_parallel_size={tp}"
        problems.add(f"{_ENGINE}.expert_parallel_size", rule, f"use 1, {tp} or {max(2, ep // tp + 1) * tp}")
    elif ep > tp:
        _check_engine_groups(config, problems)
    dedicated, is_one_node = config.num_dedicated_slots, cluster.gpus_per_node == 0 or cluster.num_nodes == 1
    per_node = dedicated if dedicated and is_one_node else cluster.slots_per_node
    serving = dedicated or config.num_policy_ranks
    num_workers = config.policy.generation.num_workers
    if per_node % num_workers and (num_workers % per_node or serving % num_workers):
        stages = f" x {_ENGINE}.pipeline_parallel_size={pp}" if pp > 1 else ""
        key, size = (f"{_ENGINE}.expert_parallel_size", ep) if ep > tp else (f"{_ENGINE}.tensor_parallel_size", tp)
        rule = f"nodes hold whole engines or engines whole nodes, and {key}={size}{stages} divides neither"
        slots = f"the {per_node} slots of one nor, as a multiple, the {serving} that serve"
        whole = [
            size
            for size in range(1, serving + 1)
            if per_node % size == 0 or (size % per_node == 0 and serving % size == 0)
        ]
        whole = [size for size in whole if ep <= tp or size == 1 or size % tp == 0]
        others = [*([f"{_ENGINE}.pipeline_parallel_size"] if pp > 1 else []), *_slot_keys(config)]
        way_out = f"{_use(whole)}{' workers' if pp > 1 else ''}"
        problems.add(key, f"{rule} {slots}", way_out, others=others)
    elif config.num_engines * num_workers > config.num_slots:
        rule = (
            f"engines of {num_workers} workers need {config.num_engines * num_workers} of the {config.num_slots} slots"
        )
        problems.add(f"{_GENERATION}.num_cpu_engines", rule, "lower it, or raise cluster.cpu_units_per_node")


def _check_engine_groups(config: RunConfig, problems: Problems) -> None:
    generation, key = config.policy.generation, f"{_ENGINE}.expert_parallel_size"
    tp, way_out = generation.vllm_cfg.tensor_parallel_size, "at most policy.generation.vllm_cfg.tensor_parallel_size"
    groups = f"above policy.generation.vllm_cfg.tensor_parallel_size={tp} it makes groups that step together"
    if generation.vllm_cfg.pipeline_parallel_size > 1:
        problems.add(key, f"{groups}, and mrl makes them of one pipeline stage each", f"use {way_out}, or one stage")
    if generation.speculative_method is not None:
        rule = (
            f"{groups}, and proposed tokens are proven in engines of one, but policy.generation.vllm_kwargs has "
            "speculative_config"
        )
        problems.add(key, rule, f"use {way_out}, or leave that out")
    if generation.vllm_kwargs.get("all2all_backend", _ALL_TO_ALL) != _ALL_TO_ALL:
        rule = (
            "groups exchange tokens as vLLM does by itself; for others it loads kernels that keep experts in an "
            "order of their own"
        )
        problems.add("policy.generation.vllm_kwargs.all2all_backend", rule, f"set it to {_ALL_TO_ALL}")
    for name in ("kv_events_config", "kv_transfer_config", "ec_transfer_config", "enable_dbo"):
        if generation.vllm_kwargs.get(name):
            problems.add(
                f"policy.generation.vllm_kwargs.{name}",
                "groups of an engine do not have it",
                f"leave it out, or use {way_out} as {key}",
            )


def check_profiler(config: RunConfig, problems: Problems) -> None:
    """Checks section `profiler`."""
    if any(step < 1 for step in config.profiler.steps):
        problems.add("profiler.steps", "the first step is 1", "use steps from there on")
    absent = [rank for rank in config.profiler.ranks if not 0 <= rank < config.num_policy_ranks]
    if absent and config.num_policy_ranks > 0:  # else another rule says where the policy's nodes went
        problems.add(
            "profiler.ranks",
            f"there is no policy rank {absent[0]}",
            f"use ranks from 0 to {config.num_policy_ranks - 1}",
        )
    if config.profiler.steps and config.profiler.tool == "nsys" and not config.cluster.gpus_per_node:
        problems.add("profiler.tool", "there are no GPUs to watch", "set it to torch")


def check_layout(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that every parallel size divides the sizes of the model that it cuts."""
    if _misses_dedicated(config, problems):
        return  # the slots of trainer and engines are unknown
    if config.policy.router_replay.enabled and model.experts == 0:
        problems.add(
            "policy.router_replay.enabled", "the model has no experts, so nothing is routed", "set it to false"
        )
    check_trainer(config, model, problems)
    if not config.has_engines:
        return
    vllm = config.policy.generation.vllm_cfg
    tp, ep = vllm.tensor_parallel_size, vllm.expert_parallel_size
    groups = 0 if model.mamba_groups == 1 else model.mamba_groups
    _check_tensor_parallel(f"{_ENGINE}.tensor_parallel_size", tp, model, problems, groups)
    if ep > max(1, model.experts):
        problems.add(
            f"{_ENGINE}.expert_parallel_size",
            f"the model has {model.experts} experts",
            f"use at most {model.experts}" if model.experts else "set it to 1",
        )
    if ep == 1 and model.expert_ffn % tp:
        rule = f"does not divide the experts' width {model.expert_ffn}"
        problems.add(f"{_ENGINE}.tensor_parallel_size", rule, f"use a divisor, or set expert_parallel_size={tp}")
    _check_engine_stages(config, model, problems)
    if vllm.max_model_len > model.max_sequence_length:
        rule = f"the model's max_position_embeddings is {model.max_sequence_length}"
        problems.add(f"{_ENGINE}.max_model_len", rule, "lower policy.max_total_sequence_length")
    sizes = list(arguments_of("CPUAttentionBackend"))
    # On GPUs vLLM chooses a backend by the head size, at last FlexAttention, which takes any.
    if config.cluster.gpus_per_node == 0 and model.head_dim and str(model.head_dim) not in sizes:
        rule = (
            f"the model's head_dim is {model.head_dim}, and vLLM's attention on hosts without GPUs has kernels "
            f"for {', '.join(sizes)}"
        )
        problems.add("policy.model_name", rule, "take a model of such a size, or GPUs (cluster.gpus_per_node)")


def _check_engine_stages(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    key = f"{_ENGINE}.pipeline_parallel_size"
    pp = config.policy.generation.vllm_cfg.pipeline_parallel_size
    num_layers = len(model.layers)
    if pp == 1:
        return
    stages = [
        set("".join(model.layers[index] for index in VllmParallel(pp=pp).layers_of(stage, num_layers)))
        for stage in range(pp)
    ]
    # A Mamba-only stage supports other layouts of the cache than one with attention, and vLLM wants one for all.
    kinds = {"*": "attention", "M": "a Mamba mixer", "G": "a gated delta net", "E": "experts"}
    needed = ("E" if "E" in set().union(*stages) else "") + ("*" if "*" in set().union(*stages) else "M")
    lacking = [
        (stage, kinds[letter]) for letter in needed for stage, letters in enumerate(stages) if letter not in letters
    ]
    if lacking:
        rule = (
            f"stage {lacking[0][0]} of the model's {num_layers} layers would have none with {lacking[0][1]}, "
            "which vLLM needs on each"
        )
        problems.add(key, rule, "use fewer stages, or 1")
    if config.policy.router_replay.enabled:
        rule = "vLLM tells no routes of an engine with pipeline stages, and policy.router_replay.enabled=true"
        problems.add(key, rule, "set it to 1, and tensor_parallel_size higher")
    if config.policy.generation.speculative_method is not None:
        rule = (
            "proposed tokens are proven only in engines without pipeline stages, and "
            "policy.generation.vllm_kwargs has speculative_config"
        )
        problems.add(key, rule, "set it to 1, or leave that out")


def check_trainer(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that every parallel size of the trainer divides the sizes of the model that it cuts."""
    _check_trainer(config, model, problems)
    _check_stages(config, model, problems)


def _divisors(*totals: int) -> str:
    largest = math.gcd(*totals)
    return _use([size for size in range(1, min(largest, MAX_SUGGESTED_SIZE) + 1) if largest % size == 0])


def _use(sizes: list[int]) -> str:
    return "use 1" if len(sizes) == 1 else f"use {', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"


def _misses_dedicated(config: RunConfig, problems: Problems) -> bool:
    """Checks the GPUs that dedicated engines take from the policy: none, GPUs of one node, or whole nodes."""
    colocated, cluster = config.policy.generation.colocated, config.cluster
    given = {"gpus_per_node": colocated.resources.gpus_per_node, "num_nodes": colocated.resources.num_nodes}
    if not config.has_engines:
        return False
    if colocated.enabled:
        return False
    if cluster.gpus_per_node == 0:
        rule = (
            "cluster.gpus_per_node=0, where dedicated engines add processes: policy.generation.num_cpu_engines "
            "times the workers of one"
        )
        wrong = [name for name, value in given.items() if value is not None]
        for name in wrong:
            problems.add(f"{_RESOURCES}.{name}", rule, "set it to null")
        return bool(wrong)
    name, available, other, whole = "num_nodes", cluster.num_nodes, "gpus_per_node", cluster.gpus_per_node
    if cluster.num_nodes == 1:
        name, available, other, whole = other, whole, name, 1
    value = given[name]
    of_own = "policy.generation.colocated.enabled=false, and dedicated engines need some of"
    is_missing, is_wrong = value is None or value >= available, given[other] not in (None, whole)
    if is_missing:
        way_out = f"use 1 to {available - 1}" if available > 1 else "set policy.generation.colocated.enabled=true"
        problems.add(f"{_RESOURCES}.{name}", f"{of_own} cluster.{name}={available}, the policy the rest", way_out)
    if is_wrong:
        problems.add(
            f"{_RESOURCES}.{other}",
            f"with cluster.num_nodes={cluster.num_nodes} it can only be {whole}",
            "set it to null",
        )
    return is_missing or is_wrong


def _check_tensor_parallel(key: str, tp: int, model: ModelSizes, problems: Problems, mamba_groups: int) -> None:
    heads, groups = (
        ("linear value heads", "linear key heads") if model.has_delta_nets else ("Mamba heads", "Mamba groups")
    )
    totals = {
        "attention heads": model.heads,
        heads: model.mamba_heads,
        groups: mamba_groups,
        "columns of an MLP": model.ffn,
        "columns of the shared expert": model.shared_ffn,
    }
    undivided = [f"{total} {name}" for name, total in totals.items() if total % tp]
    kv = model.kv_heads
    if kv and kv % tp and tp % kv:
        undivided.append(f"{kv} key-value heads (nor is it a multiple)")
    if undivided:
        problems.add(key, f"does not divide the model's {', '.join(undivided)}", _divisors(*totals.values()))


def _check_trainer(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    at = problems.at
    megatron = problems.section.megatron_cfg
    tp = megatron.tensor_model_parallel_size
    ep = megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size
    _check_tensor_parallel(f"{at}megatron_cfg.tensor_model_parallel_size", tp, model, problems, model.mamba_groups)
    if model.experts == 0 and ep * etp > 1:
        problems.add(
            f"{at}megatron_cfg.expert_model_parallel_size",
            "the model has no experts",
            "set it and expert_tensor_parallel_size to 1",
        )
    else:
        if model.experts % ep:
            rule = f"does not divide the model's {model.experts} experts"
            problems.add(f"{at}megatron_cfg.expert_model_parallel_size", rule, _divisors(model.experts))
        if model.expert_ffn % etp:
            rule = f"does not divide the experts' width {model.expert_ffn}"
            problems.add(f"{at}megatron_cfg.expert_tensor_parallel_size", rule, _divisors(model.expert_ffn))
        if tp == 1 and megatron.sequence_parallel:
            rule = f"sequence parallelism needs {at}megatron_cfg.tensor_model_parallel_size above 1"
            problems.add(f"{at}megatron_cfg.sequence_parallel", rule, "set it to false")
        if tp > 1 and model.experts and not megatron.sequence_parallel:
            rule = f"Megatron trains experts with tensor_model_parallel_size={tp} only with sequence parallelism"
            problems.add(f"{at}megatron_cfg.sequence_parallel", rule, "set it to true")
    if model.mamba_heads % tp or model.mamba_groups % tp:
        return  # there is a problem with tp already
    # Megatron's MambaContextParallel gives each rank of a context-parallel group some heads of every Mamba layer.
    heads, groups = model.mamba_heads // tp, model.mamba_groups // tp
    sizes = [size for size in range(1, heads + 1) if heads % size == 0 and (groups % size == 0 or size % groups == 0)]
    if heads and megatron.context_parallel_size not in sizes:
        rule = (
            f"does not divide the {heads} Mamba heads of a tensor-parallel rank, or neither divides its "
            f"{groups} Mamba groups nor is a"
        )
        problems.add(f"{at}megatron_cfg.context_parallel_size", f"{rule} multiple", _use(sizes))


def _check_stages(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    at = problems.at
    megatron, key = problems.section.megatron_cfg, f"{at}megatron_cfg.pipeline_model_parallel_size"
    pp = megatron.pipeline_model_parallel_size
    ends = (megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage)
    given = [layers for layers in ends if layers is not None]
    num_layers = len(model.layers)
    others, rest = pp - len(given), num_layers - sum(given)
    if pp == 1 and given:
        names = [f"{at}megatron_cfg.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
        rule = f"a first or last stage has layers of its own only among several, and {key}=1"
        problems.add(key, rule, "set both to null, or this above 1", others=names)
    elif rest < others or (rest % others if others else rest):
        rule = (
            f"the other {others} stages need equal numbers of layers, and {rest} of the model's {num_layers} "
            "are left for them"
        )
        if not given:
            rule = f"does not divide the model's {num_layers} layers"
        elif rest < 0 or not others:
            rule = f"the first and last stage are given {sum(given)} layers, and the model has {num_layers}"
        way_out = (
            f"set {at}megatron_cfg.num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage "
            "so that the rest divides"
        )
        problems.add(key, rule, way_out)
    elif megatron.parallel.vpp > 1 and model.model_class == "mamba":
        rule = "Megatron's hybrid models have no virtual stages"
        problems.add(f"{at}megatron_cfg.virtual_pipeline_model_parallel_size", rule, "set it to null")
    else:
        try:
            megatron.parallel.layers_of(0, len(model.layers))
        except ValueError as error:
            problems.extend([told(f"{at}megatron_cfg.{error}", "layout-of-the-model/pipeline")])


def check_graders(config: RunConfig, problems: Problems) -> None:
    """Checks that nodes of rewards alone can exist: they join the Ray cluster that a launcher starts for several."""
    if config.env.placement.num_nodes and config.cluster.num_nodes == 1:
        rule = "a run on one node has a Ray of its own, which no other node can join"
        way_out = "set it to 0, or raise cluster.num_nodes"
        problems.add("env.placement.num_nodes", rule, way_out, others=["cluster.num_nodes"])


def check_ports(config: RunConfig, problems: Problems) -> None:
    """Checks that the range of ports of the policy ranks has both ends, in their order."""
    low, high = config.cluster.master_port_range_low, config.cluster.master_port_range_high
    if (low, high) != (None, None) and (low is None or high is None or low >= high):
        rule = f"must be below cluster.master_port_range_high={spell(high)}"
        problems.add("cluster.master_port_range_low", rule, "set both, for example to 1400 and 1999, or none of them")


def check_lengths(config: RunConfig, problems: Problems) -> None:
    """Checks that rollouts fit into the sequences that are trained."""
    total, generation = config.policy.max_total_sequence_length, config.policy.generation
    if generation.max_new_tokens > total:
        rule = f"must be at most policy.max_total_sequence_length={total}, which holds prompt and rollout"
        problems.add(f"{_GENERATION}.max_new_tokens", rule, "lower the one or raise the other")
    if generation.vllm_cfg.max_model_len > total:
        rule = f"must be at most policy.max_total_sequence_length={total}"
        problems.add(f"{_ENGINE}.max_model_len", rule, "leave it out, and it follows the latter")


def check_engines(config: RunConfig, problems: Problems) -> None:
    """Checks that engines support their keys on these hosts."""
    generation, vllm = config.policy.generation, config.policy.generation.vllm_cfg
    if config.cluster.gpus_per_node == 0 and not vllm.enforce_eager:
        problems.add(f"{_ENGINE}.enforce_eager", "CUDA graphs need GPUs, and cluster.gpus_per_node=0", "set it to true")
    if config.cluster.gpus_per_node == 0 and vllm.kv_cache_dtype != "auto":
        rule = "engines on hosts without GPUs keep keys and values in the model's type, and cluster.gpus_per_node=0"
        problems.add(f"{_ENGINE}.kv_cache_dtype", rule, "set it to auto")
    if (vllm.max_num_batched_tokens or math.inf) < (vllm.max_num_seqs or 1):
        rule = (
            "an engine step needs a token for each of "
            f"policy.generation.vllm_cfg.max_num_seqs={vllm.max_num_seqs} rollouts"
        )
        problems.add(f"{_ENGINE}.max_num_batched_tokens", rule, f"use at least {vllm.max_num_seqs}")
    if "" in (generation.stop_strings or ()):
        problems.add(f"{_GENERATION}.stop_strings", "every text ends with an empty one", "leave that out")


def check_servers(config: RunConfig, problems: Problems) -> None:
    """Checks that the gateway, if any, finds its parsers and ports."""
    generation, vllm = config.policy.generation, config.policy.generation.vllm_cfg
    if not (vllm.expose_http_server or config.judges):
        return
    chat, prefix = vllm.http_server_serving_chat_kwargs, f"{_ENGINE}.http_server_serving_chat_kwargs"
    parsers: tuple[tuple[Library, str | None, str | None], ...] = (
        ("tool_parser", chat.tool_parser, vllm.tool_parser_plugin),
        ("reasoning_parser", chat.reasoning_parser, vllm.reasoning_parser_plugin),
    )
    for kind, name, plugin in parsers:
        known = arguments_of(kind)
        if plugin is not None and plugin.endswith(".py") and not os.path.isfile(plugin):
            problems.add(f"{_ENGINE}.{kind}_plugin", f"no such file in {os.getcwd()}", "correct the path")
        elif name is None or name in known or plugin is not None:
            continue
        elif name in PARSERS_OF_MODELS:
            way_out = f"name the file in {_ENGINE}.{kind}_plugin"
            problems.add(
                f"{prefix}.{kind}", f"its file comes with {PARSERS_OF_MODELS[name]}", way_out, "to be provided"
            )
        else:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            rule = f"vLLM has no parser of that name, the nearest is {nearest}"
            problems.add(f"{prefix}.{kind}", rule, f"correct it, or name its file in {kind}_plugin")
    if generation.port_range_low >= generation.port_range_high:
        rule = f"must be below policy.generation.port_range_high={generation.port_range_high}"
        problems.add(f"{_GENERATION}.port_range_low", rule, "change one of them")
