"""Rules between config keys, the model, the files and the disk, so that a bad run ends before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from mrl.config.errors import ConfigError, Unchecked, Unprovided
from mrl.config.hub import is_hub_id
from mrl.config.model import ModelSizes, read_model
from mrl.config.overridden import find_override_problems
from mrl.config.partial import NotKnown, hide
from mrl.config.passthrough import find_passthrough_problems
from mrl.config.rules.algorithms import find_algorithm_problems
from mrl.config.rules.checkpointing import existing_parent, find_checkpointing_problems, find_missing_disk
from mrl.config.rules.data import find_data_problems
from mrl.config.rules.environments import find_environment_problems
from mrl.config.rules.evaluation import find_evaluation_problems
from mrl.config.rules.http import find_server_problems
from mrl.config.rules.layout import find_cluster_problems, find_layout_problems
from mrl.config.rules.ranges import find_values_out_of_range, spell
from mrl.config.rules.recompute import find_recompute_problems
from mrl.config.rules.routing import find_routing_problems
from mrl.config.rules.supervised import find_reward_model_problems, find_supervised_problems
from mrl.config.rules.supply import find_supply_problems
from mrl.config.rules.trained import find_training_problems
from mrl.config.schema.generation import GenerationConfig
from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import ClusterConfig, RunConfig


def check_config(config: RunConfig) -> None:
    """Returns if a run of this config can start from here.

    Raises:
        ConfigError: with every problem at once: key, value, rule, way out.
    """
    if problems := find_problems(config):
        raise ConfigError(problems)


def find_problems(config: RunConfig, *, to_evaluate: bool = False) -> list[str]:
    """Every problem of a config, one text each. Rules that need a value which is not known, or out of its range, are named, not applied."""
    out_of_range = find_values_out_of_range(config)
    problems, skipped = list(out_of_range.values()), dict[str, list[str]]()
    config = hide(config, {key: key for key in out_of_range})
    rules = RULES | (ROLLOUT_RULES if config.has_engines else SUPERVISED_RULES) | (EVALUATION_RULES if to_evaluate else {})
    try:
        folder, overrides = Path(config.policy.model_name), config.policy.hf_config_overrides
        model = read_model(folder)
        if overrides:
            wrong = find_override_problems(folder, overrides)
            problems += wrong
            model = model if wrong else read_model(folder, overrides)
        rules |= {name: _of_model(find, model) for name, find in MODEL_RULES.items()}
    except NotKnown as error:
        skipped[error.key] = list(MODEL_RULES)
    except ValueError as error:
        problems.append(_unreadable(config.policy.model_name, error))
    for name, find in rules.items():
        try:
            problems += find(config)
        except NotKnown as error:
            skipped.setdefault(error.key, []).append(name)
    problems += [Unchecked(f"{key}: without its value not checked: {', '.join(names)}") for key, names in skipped.items()]
    return list(dict.fromkeys(problems))  # those of the cluster are among those of the model, too


def _of_model(find: Callable[[RunConfig, ModelSizes], list[str]], model: ModelSizes) -> Callable[[RunConfig], list[str]]:
    return lambda config: find(config, model)


def _unreadable(model: str, error: ValueError) -> str:
    if os.path.exists(os.path.join(model, "config.json")):
        return f"policy.model_name={model}: {error}"
    reason = _not_cached() if is_hub_id(model) else error
    return Unchecked(f"policy.model_name={model}: {reason}; cannot be checked without its config.json: {', '.join(MODEL_RULES)}")


def _problem(key: str, value: object, rule: str, way_out: str) -> str:
    return f"{key}={spell(value)}: {rule}; {way_out}"


def _batch(config: RunConfig) -> list[str]:
    problems = []
    grpo, batch = config.grpo, config.policy.train_global_batch_size
    rollouts = grpo.num_rollouts_per_step
    if rollouts % batch:
        rule = f"must divide grpo.num_prompts_per_step x grpo.num_generations_per_prompt = {rollouts}, the rollouts of a step"
        problems.append(_problem("policy.train_global_batch_size", batch, rule, "leave it out, and there is one update a step"))
    dp = config.data_parallel_size
    if dp and batch % dp:
        rule = f"must be a multiple of the {dp} data-parallel ranks"
        problems.append(_problem("policy.train_global_batch_size", batch, rule, "change grpo.num_prompts_per_step or the layout"))
    return problems


def _early_stop(config: RunConfig) -> list[str]:
    metric, threshold = config.grpo.stop_at_validation_metric, config.grpo.stop_at_validation_threshold
    if (metric is None) != (threshold is None):
        rule = f"it needs grpo.stop_at_validation_{'metric' if metric is None else 'threshold'}, which is null"
        key, value = ("metric", metric) if threshold is None else ("threshold", threshold)
        return [_problem(f"grpo.stop_at_validation_{key}", value, rule, "set both, or none of them")]
    if metric is not None and not config.data.has_validation:
        rule = "there is no validation, because data.validation=null and no training rows are held out"
        return [_problem("grpo.stop_at_validation_metric", metric, rule, "set it and the threshold to null, or give data.validation")]
    return []


def _ports(cluster: ClusterConfig) -> list[str]:
    low, high = cluster.master_port_range_low, cluster.master_port_range_high
    if low is None and high is None:
        return []
    if low is None or high is None or low >= high:
        rule = f"must be below cluster.master_port_range_high={spell(high)}"
        return [_problem("cluster.master_port_range_low", low, rule, "set both, for example to 1400 and 1999, or none of them")]
    return []


def _lengths(policy: PolicyConfig) -> list[str]:
    problems = []
    total, generation = policy.max_total_sequence_length, policy.generation
    if generation.max_new_tokens > total:
        rule = f"must be at most policy.max_total_sequence_length={total}, which holds prompt and rollout"
        problems.append(_problem("policy.generation.max_new_tokens", generation.max_new_tokens, rule, "lower the one or raise the other"))
    max_model_len = generation.vllm_cfg.max_model_len
    if max_model_len > total:
        rule = f"must be at most policy.max_total_sequence_length={total}"
        problems.append(
            _problem("policy.generation.vllm_cfg.max_model_len", max_model_len, rule, "leave it out, and it follows the latter")
        )
    return problems


def _rows(policy: PolicyConfig) -> list[str]:
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    total, multiple = policy.max_total_sequence_length, policy.row_multiple
    if packing.enabled and dynamic.enabled:
        rule = "policy.sequence_packing.enabled=true fills the same rows in another way"
        return [_problem("policy.dynamic_batching.enabled", True, rule, "set one of them to false")]
    name, section = ("sequence_packing", packing) if packing.enabled else ("dynamic_batching", dynamic)
    if not section.enabled:
        return []  # rows of a fixed number of sequences
    longest = math.ceil(total / multiple) * multiple
    rule = f"a row must hold policy.max_total_sequence_length={total}, padded to a multiple of {multiple}"
    return [
        _problem(f"policy.{name}.{key}", tokens, rule, f"use at least {longest}")
        for key, tokens in (("train_mb_tokens", section.train_mb_tokens), ("logprob_mb_tokens", section.logprob_mb_tokens))
        if tokens < longest
    ]


def _logprobs(policy: PolicyConfig) -> list[str]:
    problems = []
    chunk, megatron = policy.logprob_chunk_size, policy.megatron_cfg
    if chunk is not None and megatron.use_fused_linear_logprobs:
        rule = (
            "policy.megatron_cfg.use_fused_linear_logprobs=true takes "
            f"policy.megatron_cfg.fused_linear_logprobs_chunk_size={megatron.fused_linear_logprobs_chunk_size} tokens at a time"
        )
        problems.append(_problem("policy.logprob_chunk_size", chunk, rule, "leave out the one or the other"))
    return problems


def _engine(generation: GenerationConfig, *, is_cpu: bool) -> list[str]:
    problems = []
    vllm = generation.vllm_cfg
    if is_cpu and not vllm.enforce_eager:
        rule = "CUDA graphs need GPUs, and cluster.gpus_per_node=0"
        problems.append(_problem("policy.generation.vllm_cfg.enforce_eager", False, rule, "set it to true"))
    if is_cpu and vllm.kv_cache_dtype != "auto":
        rule = "engines on hosts without GPUs keep keys and values in the model's type, and cluster.gpus_per_node=0"
        problems.append(_problem("policy.generation.vllm_cfg.kv_cache_dtype", vllm.kv_cache_dtype, rule, "set it to auto"))
    if vllm.max_num_batched_tokens < vllm.max_num_seqs:
        rule = f"every one of policy.generation.vllm_cfg.max_num_seqs={vllm.max_num_seqs} rollouts needs a token of a step"
        key = "policy.generation.vllm_cfg.max_num_batched_tokens"
        problems.append(_problem(key, vllm.max_num_batched_tokens, rule, f"use at least {vllm.max_num_seqs}"))
    if vllm.load_format == "dummy":
        rule = "the first refit proves the conversion tables on the model's weights, as vLLM's own loader read them"
        problems.append(_problem("policy.generation.vllm_cfg.load_format", vllm.load_format, rule, "leave it out"))
    if "" in (generation.stop_strings or ()):
        problems.append(_problem("policy.generation.stop_strings", generation.stop_strings, "every text ends with nothing", "leave it out"))
    if any(token_id < 0 for token_id in generation.stop_token_ids or ()):
        problems.append(_problem("policy.generation.stop_token_ids", generation.stop_token_ids, "an id is below 0", "use 0 or more"))
    return problems


def _optimizer(config: RunConfig) -> list[str]:
    policy, megatron = config.policy, config.policy.megatron_cfg
    optimizer, scheduler = megatron.optimizer, megatron.scheduler
    prefix, problems = "policy.megatron_cfg", [*_overlap(megatron), *_host_optimizer(megatron)]
    if optimizer.bf16 != (policy.precision == "bfloat16"):
        rule = f"must agree with policy.precision={policy.precision}"
        problems.append(_problem(f"{prefix}.optimizer.bf16", optimizer.bf16, rule, f"set it to {spell(not optimizer.bf16)}"))
    if optimizer.clip_grad != policy.max_grad_norm:
        rule = f"must equal policy.max_grad_norm={policy.max_grad_norm:g}, which means the same"
        problems.append(_problem(f"{prefix}.optimizer.clip_grad", optimizer.clip_grad, rule, "leave it out, and it follows"))
    if optimizer.min_lr > optimizer.lr:
        rule = f"must be at most {prefix}.optimizer.lr={optimizer.lr:g}"
        problems.append(_problem(f"{prefix}.optimizer.min_lr", optimizer.min_lr, rule, "lower it"))
    if scheduler.lr_warmup_init > optimizer.lr:
        rule = f"must be at most {prefix}.optimizer.lr={optimizer.lr:g}"
        problems.append(_problem(f"{prefix}.scheduler.lr_warmup_init", scheduler.lr_warmup_init, rule, "lower it"))
    decay = scheduler.lr_decay_iters
    if decay is not None and scheduler.lr_warmup_iters >= decay:
        rule = f"the warmup must end before the decay, at {prefix}.scheduler.lr_decay_iters={decay}"
        problems.append(_problem(f"{prefix}.scheduler.lr_warmup_iters", scheduler.lr_warmup_iters, rule, f"use at most {decay - 1}"))
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    if end < start or (end != start and scheduler.weight_decay_incr_style == "constant"):
        rule = (
            f"must equal {prefix}.scheduler.start_weight_decay={start:g}, or exceed it with a weight_decay_incr_style that is not constant"
        )
        problems.append(_problem(f"{prefix}.scheduler.end_weight_decay", end, rule, "leave both out, and they follow the optimizer's"))
    return problems


def _host_optimizer(megatron: MegatronConfig) -> list[str]:
    optimizer = megatron.optimizer
    needed = {
        "use_distributed_optimizer": optimizer.use_distributed_optimizer,
        "use_precision_aware_optimizer": optimizer.use_precision_aware_optimizer,
        "bf16": optimizer.bf16,
    }
    missing = [f"policy.megatron_cfg.optimizer.{name}=true" for name, is_on in needed.items() if not is_on]
    if not optimizer.optimizer_cpu_offload or not missing:
        return []
    rule = "Megatron cannot load checkpoints of any other optimizer on the host"
    return [_problem("policy.megatron_cfg.optimizer.optimizer_cpu_offload", True, rule, f"set {' and '.join(missing)}, or it to false")]


def _overlap(megatron: MegatronConfig) -> list[str]:
    ddp = megatron.distributed_data_parallel_config
    key = "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather"
    if ddp.overlap_param_gather and not megatron.optimizer.use_distributed_optimizer:
        rule = "parameters are gathered only by the distributed optimizer"
        return [_problem(key, True, rule, "set it to false, or policy.megatron_cfg.optimizer.use_distributed_optimizer=true")]
    if ddp.overlap_param_gather and not ddp.overlap_grad_reduce:
        return [
            _problem(key, True, "Megatron overlaps both or only the reduction", "set it to false, or overlap_grad_reduce=true beside it")
        ]
    return []


def _folders(config: RunConfig) -> list[str]:
    problems = []
    tokenizer = config.policy.tokenizer.name
    if not os.path.isdir(tokenizer):
        reason = f"no such folder in {Path.cwd()}; give the folder of the model's tokenizer"
        problems.append(Unprovided(f"policy.tokenizer.name={tokenizer}: {_not_cached() if is_hub_id(tokenizer) else reason}"))
    for key, folder in {
        "checkpointing.checkpoint_dir": config.checkpointing.checkpoint_dir,
        "logger.log_dir": config.logger.log_dir,
    }.items():
        if reason := _cannot_be_written(folder):
            problems.append(Unprovided(_problem(key, folder, reason, "choose a folder that you may write")))
    return problems


def _not_cached() -> str:
    return "not in the local Hugging Face cache; it is downloaded at the start of the run, or give a folder"


def _cannot_be_written(folder: str) -> str | None:
    existing = existing_parent(folder)
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} may not be written"


Rules = dict[str, Callable[[RunConfig], list[str]]]
"""What a group of rules is about, and what finds their problems."""

RULES: Rules = {
    "folders": _folders,
    "data": find_data_problems,
    "checkpoints": find_checkpointing_problems,
    "early stop": _early_stop,
    "arguments of libraries": find_passthrough_problems,
    "rows": lambda config: _rows(config.policy),
    "optimizer": _optimizer,
    "log-probabilities": lambda config: _logprobs(config.policy),
    "ports": lambda config: _ports(config.cluster),
    "reward model": find_reward_model_problems,
    "parallel layout": find_cluster_problems,
}
ROLLOUT_RULES: Rules = {
    "environments": lambda config: find_environment_problems(config.env, config.data.default.env_name),
    "batches": _batch,
    "lengths": lambda config: _lengths(config.policy),
    "engines": lambda config: _engine(config.policy.generation, is_cpu=config.cluster.gpus_per_node == 0),
    "supply of rollouts": find_supply_problems,
    "loss and advantages": find_algorithm_problems,
    "HTTP server": lambda config: find_server_problems(config.policy.generation),
}
SUPERVISED_RULES: Rules = {"supervised training": find_supervised_problems}
MODEL_RULES: dict[str, Callable[[RunConfig, ModelSizes], list[str]]] = {
    "layout of the model": find_layout_problems,
    "what is trained": lambda config, model: find_training_problems(config.policy),
    "recomputing": find_recompute_problems,
    "routing": find_routing_problems,
    "room for checkpoints": lambda config, model: find_missing_disk(config, model.num_parameters),
}
"""Those that need the model's config.json."""
EVALUATION_RULES: Rules = {"evaluation": find_evaluation_problems}
