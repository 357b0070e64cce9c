# SPDX-License-Identifier: Apache-2.0
"""Rules of the trainer: rows, optimizer, logprobs, recomputation, routing, adapters, frozen weights and speculation."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from conversion.adapters import HOLDING_FAMILIES, RANKS, adapted_layers, held_apart
from conversion.families.registry import family
from conversion.files.hf_folder import read_config
from conversion.texts import listed
from mrl.config.errors import Problems, spell
from mrl.config.held_adapters import held_adapters
from mrl.config.model import ModelSizes, read_model
from mrl.config.schema.run import RunConfig
from mrl.config.sharing import find_obstacles, part_without_trees

_MEGATRON = "policy.megatron_cfg"

RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Layers that megatron-core 0.16.1 can recompute."""


def check_rows(config: RunConfig, problems: Problems) -> None:
    """Checks that rows are filled in one way only."""
    at = problems.at
    policy = problems.section
    if policy.sequence_packing.enabled and policy.dynamic_batching.enabled:
        rule = f"{at}sequence_packing.enabled=true fills the same rows in another way"
        problems.add(f"{at}dynamic_batching.enabled", rule, "set one of them to false")


def check_latent_attention(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that latent attention and gated delta nets get no trees of prefixes."""
    part = part_without_trees(model)
    if part and config.policy.share_prefixes is True:
        problems.add("policy.share_prefixes", f"the model has {part} no trees of prefixes", "set it to false")


def check_delta_nets(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that gated delta nets, and the gated attention beside them, are cut as Megatron can cut them."""
    if not model.has_delta_nets:
        return
    megatron, at = problems.section.megatron_cfg, f"{problems.at}megatron_cfg"
    if megatron.tensor_model_parallel_size > model.kv_heads:
        rule = f"Megatron cuts gated attention into at most as many parts as key-value heads, {model.kv_heads}"
        problems.add(f"{at}.tensor_model_parallel_size", rule, f"use at most {model.kv_heads}")
    if megatron.context_parallel_size > 1:
        rule = "the model has gated delta nets, whose state goes through all of a sequence on one rank"
        problems.add(f"{at}.context_parallel_size", rule, "set it to 1")


def check_sinks(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that layers with attention sinks, and experts with biases, are cut and trained in ways that are built."""
    if not model.window:
        return
    tp = config.policy.generation.vllm_cfg.tensor_parallel_size
    ep = config.policy.generation.vllm_cfg.expert_parallel_size
    if config.has_engines and model.experts % ep:
        rule = f"with sinks vLLM gives each worker equally many experts, and the model has {model.experts}"
        problems.add("policy.generation.vllm_cfg.expert_parallel_size", rule, "use a divisor")
    if config.has_engines and tp > model.kv_heads:
        rule = f"with sinks vLLM gives each worker key-value heads of its own, and the model has {model.kv_heads}"
        problems.add("policy.generation.vllm_cfg.tensor_parallel_size", rule, f"use at most {model.kv_heads}")
    megatron, at = problems.section.megatron_cfg, f"{problems.at}megatron_cfg"
    for key, is_wrong, rule, way_out in (
        (
            "context_parallel_size",
            megatron.context_parallel_size > 1,
            "attention with sinks and windows over several ranks is not built",
            "set it to 1",
        ),
        (
            "expert_tensor_parallel_size",
            megatron.expert_tensor_parallel_size > 1,
            "the model's experts have biases, which Megatron adds on every rank that has a part of one",
            "set it to 1",
        ),
        (
            "peft.enabled",
            megatron.peft.enabled,
            "adapters of models with attention sinks are not built",
            "set it to false",
        ),
    ):
        if is_wrong:
            problems.add(f"{at}.{key}", rule, way_out)


def check_prefixes(config: RunConfig, problems: Problems) -> None:
    """Checks that rows may be trees, which compute shared prefixes once."""
    if config.policy.share_prefixes is not True:
        return
    for other, value, right in find_obstacles(config):
        rule = f"policy.share_prefixes=true goes only with {other}={spell(right)}, not {spell(value)}"
        way_out = f"set policy.share_prefixes=auto, or {other}={spell(right)}"
        problems.add("policy.share_prefixes", rule, way_out, others=[other])


def doubt_rows(config: RunConfig, problems: Problems) -> None:
    """Warns if the longest sequence does not fit a row: as in NeMo RL, the run starts, and ends at the first such."""
    at = problems.at
    policy, packing, dynamic = problems.section, problems.section.sequence_packing, problems.section.dynamic_batching
    total, multiple, longest = policy.max_total_sequence_length, policy.row_multiple, policy.longest_row
    if packing.enabled != dynamic.enabled:  # else rows have a fixed number of sequences
        name, section = ("sequence_packing", packing) if packing.enabled else ("dynamic_batching", dynamic)
        others = [
            f"{at}max_total_sequence_length",
            f"{at}make_sequence_length_divisible_by",
            f"{at}{name}.sequence_length_round",
        ]
        others += [
            f"{at}megatron_cfg.{size}"
            for size in ("tensor_model_parallel_size", "context_parallel_size", "sequence_parallel")
        ]
        for key, tokens in (
            ("train_mb_tokens", section.train_mb_tokens),
            ("logprob_mb_tokens", section.logprob_mb_tokens),
        ):
            if tokens < longest:
                key = f"{at}{name}.{key}"
                rule = (
                    f"{at}max_total_sequence_length={total}, padded to a multiple of {multiple}, exceeds a "
                    f"row of {key}={tokens}"
                )
                problems.add(
                    key, f"{rule}: the run ends at a sequence of more", f"use at least {longest} there", others=others
                )


def check_logprobs(config: RunConfig, problems: Problems) -> None:
    """Checks that only one key sets the number of logits in memory."""
    at = problems.at
    megatron = problems.section.megatron_cfg
    if problems.section.logprob_chunk_size is not None and megatron.use_fused_linear_logprobs:
        size = f"{at}megatron_cfg.fused_linear_logprobs_chunk_size={megatron.fused_linear_logprobs_chunk_size}"
        rule = f"{at}megatron_cfg.use_fused_linear_logprobs=true takes {size} tokens at a time"
        problems.add(f"{at}logprob_chunk_size", rule, "leave out the one or the other")


def check_optimizer(config: RunConfig, problems: Problems) -> None:
    """Checks that the keys of optimizer and schedule agree with each other."""
    at = problems.at
    policy, megatron = problems.section, problems.section.megatron_cfg
    optimizer, scheduler, ddp = megatron.optimizer, megatron.scheduler, megatron.distributed_data_parallel_config
    overlap = f"{at}megatron_cfg.distributed_data_parallel_config.overlap_param_gather"
    if ddp.overlap_param_gather and not optimizer.use_distributed_optimizer:
        way_out = f"set it to false, or {at}megatron_cfg.optimizer.use_distributed_optimizer=true"
        problems.add(overlap, "only the distributed optimizer gathers parameters", way_out)
    prefix = f"{at}megatron_cfg.optimizer"
    below_peak = f"must be at most {at}megatron_cfg.optimizer.lr={optimizer.lr:g}"
    needed = ("use_distributed_optimizer", "use_precision_aware_optimizer", "bf16")
    missing = [f"{prefix}.{name}=true" for name in needed if not getattr(optimizer, name)]
    if optimizer.optimizer_cpu_offload and missing:
        rule = "Megatron cannot load checkpoints of any other optimizer on the host"
        problems.add(f"{prefix}.optimizer_cpu_offload", rule, f"set {' and '.join(missing)}, or it to false")
    for name in ("use_distributed_optimizer", "use_precision_aware_optimizer"):
        if optimizer.is_muon and getattr(optimizer, name):
            way_out = f"set it to false, or {prefix}.optimizer=adam"
            problems.add(f"{prefix}.{name}", "Megatron has it for Adam, not for Muon", way_out)
    if optimizer.bf16 != (policy.precision == "bfloat16"):
        problems.add(
            f"{prefix}.bf16",
            f"must agree with {at}precision={policy.precision}",
            f"set it to {spell(not optimizer.bf16)}",
        )
    if optimizer.clip_grad != policy.max_grad_norm:
        rule = f"must equal {at}max_grad_norm={policy.max_grad_norm:g}, which means the same"
        problems.add(f"{prefix}.clip_grad", rule, "leave it out, and it follows")
    if optimizer.min_lr > optimizer.lr:
        problems.add(f"{prefix}.min_lr", below_peak, "lower it")
    prefix, decay = f"{at}megatron_cfg.scheduler", scheduler.lr_decay_iters
    if scheduler.lr_warmup_init > optimizer.lr:
        problems.add(f"{prefix}.lr_warmup_init", below_peak, "lower it")
    if decay is not None and scheduler.lr_warmup_iters >= decay:
        rule = f"the warmup must end before the decay, at {prefix}.lr_decay_iters={decay}"
        problems.add(f"{prefix}.lr_warmup_iters", rule, f"use at most {decay - 1}")
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    if end < start or (end != start and scheduler.weight_decay_incr_style == "constant"):
        rule = (
            f"must equal {prefix}.start_weight_decay={start:g}, or exceed it with a weight_decay_incr_style "
            "that is not constant"
        )
        problems.add(f"{prefix}.end_weight_decay", rule, "leave both out, and they follow the optimizer's")


def check_recomputing(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that Megatron can recompute every part that the config names."""
    at = problems.at
    modules, key = problems.section.megatron_cfg.recompute_modules, f"{at}megatron_cfg.recompute_modules"
    if modules is None:
        return
    if problems.section.megatron_cfg.recompute_granularity == "full":
        problems.add(
            key,
            f"{at}megatron_cfg.recompute_granularity=full recomputes everything",
            "set it to null, or that to selective",
        )
        return
    if not modules:
        problems.add(
            key,
            "it names nothing",
            f"set it to null for the default, or {at}megatron_cfg.activation_checkpointing=false",
        )
    absent = {
        "mla_up_proj": "" if model.mla else "latent attention",
        "mlp": "" if model.ffn else "dense MLP layers",
        "moe": "" if model.experts else "experts",
        "moe_act": "" if model.experts else "experts",
        "shared_experts": "" if model.shared_ffn else "shared experts",
    }
    for name in modules:
        if name not in RECOMPUTED:
            problems.add(key, f"{name!r} is nothing that Megatron recomputes", f"use any of {', '.join(RECOMPUTED)}")
        elif absent.get(name):
            problems.add(key, f"the model has no {absent[name]}, which {name!r} recomputes", "leave it out")
        elif name == "moe_act" and config.cluster.gpus_per_node == 0:
            rule = "'moe_act' is a part of Transformer Engine's experts, and cluster.gpus_per_node=0"
            problems.add(key, rule, "use 'moe', which holds it")


def check_routing(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that routing keys take effect and that trainer and engines route alike. Skips models without experts."""
    at = problems.at
    megatron = problems.section.megatron_cfg
    if model.experts == 0:
        return
    if megatron.moe_router_enable_expert_bias is False and model.has_expert_bias:
        rule = "the model's routers have a bias per expert, and the engines route as the model says"
        problems.add(f"{at}megatron_cfg.moe_router_enable_expert_bias", rule, "leave it out")
    if megatron.model_overrides.get("moe_router_fusion") and problems.section.router_replay.enabled:
        rule = (
            f"Transformer Engine's router chooses by itself, and {at}router_replay.enabled=true replays the "
            "engines' choice"
        )
        problems.add(f"{at}megatron_cfg.model_overrides.moe_router_fusion", rule, "leave out the one or the other")
    kind, coefficient = megatron.moe_router_load_balancing_type, megatron.moe_aux_loss_coeff
    if kind == "none" and coefficient > 0:
        rule = f"it weights no loss, because {at}megatron_cfg.moe_router_load_balancing_type=none"
        problems.add(f"{at}megatron_cfg.moe_aux_loss_coeff", rule, "set it to 0, or choose a type of loss")
    elif kind != "none" and coefficient == 0:
        rule = f"a loss of {at}megatron_cfg.moe_aux_loss_coeff=0 changes nothing"
        problems.add(
            f"{at}megatron_cfg.moe_router_load_balancing_type",
            rule,
            "set it to none, or the coefficient above 0, for example to 1e-3",
        )


def check_dispatch(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks the dispatch of tokens to experts. Skips models without experts."""
    at = problems.at
    megatron = problems.section.megatron_cfg
    if model.experts == 0:
        return
    dispatcher = megatron.moe_token_dispatcher_type
    key = f"{at}megatron_cfg.moe_token_dispatcher_type"
    overlap = f"{at}megatron_cfg.moe_shared_expert_overlap"
    if dispatcher == "flex":
        _check_flex(config, problems)
    elif megatron.moe_enable_deepep:
        rule = f"{key}={dispatcher} does not use DeepEP"
        problems.add(f"{at}megatron_cfg.moe_enable_deepep", rule, "set it to false, or choose the dispatcher flex")
    if not megatron.moe_shared_expert_overlap:
        return
    if dispatcher != "alltoall":
        rule = f"it needs {at}megatron_cfg.moe_token_dispatcher_type=alltoall, not {dispatcher}"
        problems.add(overlap, rule, "set it to false, or choose that dispatcher")
    if megatron.activation_checkpointing and "shared_experts" in (megatron.recompute_modules or ()):
        rule = (
            f"{at}megatron_cfg.recompute_modules names shared_experts, which Megatron recomputes only where "
            "they do not overlap"
        )
        problems.add(overlap, rule, "set it to false")
    if model.latent:
        problems.add(overlap, "Megatron has no overlap for the model's latent experts", "set it to false")


def _check_flex(config: RunConfig, problems: Problems) -> None:
    """Checks the requirements of DeepEP and HybridEP (Megatron's MoEFlexTokenDispatcher, deep_ep's HybridEPBuffer)."""
    megatron, at = problems.section.megatron_cfg, f"{problems.at}megatron_cfg."
    backend, key = f"{at}moe_flex_dispatcher_backend", f"{at}moe_token_dispatcher_type"
    library = "HybridEP" if megatron.uses_hybridep else "DeepEP"
    num_ranks = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    in_domain = megatron.hybridep_num_ranks_per_nvlink_domain or 1
    without = "use alltoall, and set moe_enable_deepep to false"
    if megatron.moe_flex_dispatcher_backend == "alltoall":
        problems.add(
            backend,
            f"it has no effect with {key}=alltoall only, and with flex names no library",
            "set it to deepep or hybridep",
        )
    elif megatron.uses_hybridep and megatron.moe_enable_deepep:
        problems.add(f"{at}moe_enable_deepep", f"{backend}=hybridep is another library", "set it to false")
    elif config.cluster.gpus_per_node == 0:
        problems.add(key, f"{library} needs GPUs, and cluster.gpus_per_node=0", without)
    elif num_ranks == 1:
        rule = f"{library} needs {at}expert_model_parallel_size or expert_tensor_parallel_size above 1"
        problems.add(key, rule, without)
    elif megatron.uses_hybridep and num_ranks % in_domain:
        rule = f"it does not divide the {num_ranks} ranks that share experts"
        problems.add(f"{at}hybridep_num_ranks_per_nvlink_domain", rule, "use a divisor of them, or leave it out")
    elif (
        megatron.uses_hybridep
        and problems.model != "policy"
        and problems.model not in config.own_nodes
        and config.policy.megatron_cfg.uses_hybridep
    ):
        problems.add(backend, "HybridEP has one buffer per process, and the policy's model has it", "set it to deepep")


def check_mtp(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that a run that trains MTP layers trains all of the model's, and that nothing forbids it."""
    megatron, found = config.policy.megatron_cfg, model.num_mtp_steps
    if not megatron.trains_mtp:
        return
    key, repeats = f"{_MEGATRON}.mtp_num_layers", f"{_MEGATRON}.mtp_use_repeated_layer"
    if config.algorithm == "rm":
        problems.add(key, "a reward model predicts no tokens", "set it to 0")
    if config.algorithm == "dpo" and not megatron.mtp_detach_heads:
        rule = "MTP layers learn from rejected answers, too, and would train the model towards them"
        problems.add(key, rule, f"set it to 0, or {_MEGATRON}.mtp_detach_heads to true")
    if megatron.peft.enabled:
        problems.add(
            key, f"{_MEGATRON}.peft.enabled=true trains adapters alone", "set it to 0, or train without adapters"
        )
    if found == 0:
        problems.add(key, "the model has no MTP layers (num_nextn_predict_layers of its config.json)", "set it to 0")
    elif megatron.mtp_use_repeated_layer and found != 1:
        rule = f"the model has an MTP layer for each of {found} tokens, of which only the first would be trained"
        problems.add(repeats, rule, f"set it to false, and {key} to {found}")
    elif not megatron.mtp_use_repeated_layer and megatron.mtp_num_layers != found:
        way_out = f"set it to {found}" + (f", or {repeats} to true" if found == 1 else "")
        problems.add(
            key, f"the model has MTP layers for {found} tokens (num_nextn_predict_layers of its config.json)", way_out
        )


def check_trained(config: RunConfig, problems: Problems) -> None:
    """Checks that `peft` and `freeze_config` leave something to train. The model's folder must be readable."""
    at = problems.at
    peft, patterns = problems.section.megatron_cfg.peft, problems.section.megatron_cfg.freeze_config.modules
    hf_config = read_config(Path(problems.section.model_name) / "config.json")
    if peft.enabled:
        _check_adapters(config, hf_config, problems)
    key = f"{at}megatron_cfg.freeze_config.modules"
    left = () if config.mtp_steps_of(problems.model) else family(hf_config).mtp(hf_config)
    names = [name for name in family(hf_config).canonical(hf_config) if name not in left]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            problems.add(key, f"{pattern!r} matches no tensor of the model", f"use for example {names[0]}")
    if not peft.enabled and all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
        problems.add(key, "nothing is left to train", "freeze fewer tensors, or enable peft")


def _check_adapters(config: RunConfig, hf_config: dict[str, object], problems: Problems) -> None:
    at = problems.at
    peft, prefix = problems.section.megatron_cfg.peft, f"{at}megatron_cfg.peft"
    if peft.target_modules and peft.exclude_modules:
        rule = "it excludes layers from all linear layers, and peft.target_modules names some"
        problems.add(f"{prefix}.exclude_modules", rule, "empty one of the two")
    for key, patterns in {"target_modules": peft.target_modules, "exclude_modules": peft.exclude_modules}.items():
        try:
            if not adapted_layers(family(hf_config), hf_config, **{key: patterns}):
                problems.add(f"{prefix}.{key}", "no layer is left to adapt", "exclude fewer layers")
        except ValueError as error:
            problems.tell(f"{prefix}.{key}", spell(patterns), error)
    zeros = [peft.lora_A_init_method, peft.lora_B_init_method].count("zero")
    if zeros != 1:
        rule = (
            f"with peft.lora_A_init_method={peft.lora_A_init_method}, training would not start from the model's "
            "own weights"
        )
        if zeros:
            rule = "with peft.lora_A_init_method=zero too, no gradient would ever reach the adapters"
        problems.add(f"{prefix}.lora_B_init_method", rule, "set one of the two to zero")
    if peft.lora_dtype == "float32" and problems.section.megatron_cfg.optimizer.optimizer_cpu_offload:
        rule = (
            f"Megatron's optimizer on the host ({at}megatron_cfg.optimizer.optimizer_cpu_offload=true) loads "
            "bfloat16 weights only"
        )
        problems.add(f"{prefix}.lora_dtype", rule, "leave it out")
    has_bias = read_model(Path(problems.section.model_name)).has_expert_bias
    if has_bias and problems.section.megatron_cfg.moe_router_bias_update_rate > 0:
        rule = (
            "the router's biases belong to the model, which adapters leave as it is, and an exported adapter "
            "would lack them"
        )
        problems.add(f"{at}megatron_cfg.moe_router_bias_update_rate", rule, "set it to 0")
    if peft.lora_dtype == "bfloat16" and problems.section.precision == "float32":
        problems.add(
            f"{prefix}.lora_dtype",
            f"adapters cannot be coarser than {at}precision=float32",
            "leave it out, and it follows",
        )


def check_held_adapters(config: RunConfig, problems: Problems) -> None:
    """Checks that engines can hold the adapters beside the weights. The model's folder must be readable."""
    peft, generation = config.policy.megatron_cfg.peft, config.policy.generation
    if not peft.enabled or peft.merge or not config.has_engines:
        return
    key, way_out = f"{_MEGATRON}.peft.merge", "set it to true"
    hf_config = read_config(Path(config.policy.model_name) / "config.json")
    try:
        held = held_adapters(config.policy)
    except ValueError:  # _check_adapters tells of it
        return
    assert held is not None
    if left := held_apart(family(hf_config), hf_config, held.layers):
        rule = f"engines hold adapters of attention and dense MLPs of {listed(HOLDING_FAMILIES)}, and not of {left[0]}"
        problems.add(key, rule, f"{way_out}, or name other layers in {_MEGATRON}.peft.target_modules")
    parallel, is_on_gpus = generation.parallel, config.cluster.gpus_per_node > 0
    for is_wrong, rule in (
        (peft.dim > max(RANKS), f"vLLM's adapters have a rank of at most {max(RANKS)}, not {peft.dim}"),
        (
            generation.colocated.enabled and is_on_gpus,
            "colocated engines give the memory of their weights away while the policy trains, so that all must move",
        ),
        (generation.vllm_cfg.is_fp8, "adapters beside quantised weights are not built"),
        (parallel.has_drafter, "the drafter would propose tokens without adapters"),
        (parallel.pp > 1 or parallel.num_groups > 1, "engines of several stages or groups take merged weights only"),
    ):
        if is_wrong:
            problems.add(key, rule, way_out)


METHODS = ("mtp", "ngram")
"""Methods of speculation without other weights than a refit brings: the model's own MTP layers, and n-grams of earlier
tokens.
"""

_KWARGS = "policy.generation.vllm_kwargs"
_SECTION = f"{_KWARGS}.speculative_config"


def check_speculation(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that refits support the method of speculation, and that the model has the layers for it."""
    generation = config.policy.generation
    speculation = generation.vllm_kwargs.get("speculative_config")
    if not config.has_engines or not isinstance(speculation, dict):
        return
    method = generation.speculative_method
    if method not in METHODS:
        rule = "proposes with weights that no refit brings, or by a kernel that mrl has not proven exact"
        ways = METHODS if model.num_mtp_steps == 1 else METHODS[1:]
        problems.add(f"{_SECTION}.method" if method else _SECTION, rule, f"use method {' or '.join(ways)}, or none")
    if not speculation.get("num_speculative_tokens"):
        problems.add(
            _SECTION,
            "it does not say how many tokens are proposed at once",
            "set num_speculative_tokens, for example to 1",
        )
    if model.has_delta_nets:
        problems.add(_SECTION, "speculation with gated delta nets is not built", "leave it out")
    if method == "mtp" and model.num_mtp_steps != 1:
        rule = f"mrl converts {model.num_mtp_steps} layers of multi-token prediction here, and vLLM's drafter has 1"
        problems.add(f"{_SECTION}.method", rule, "use ngram, which needs none")
