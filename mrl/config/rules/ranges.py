"""The range of every number of a config."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from mrl.config.partial import NotKnown
from mrl.config.schema.run import RunConfig


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, the ends included unless open."""

    low: float
    high: float = math.inf
    is_low_open: bool = False
    is_high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.is_low_open else value >= self.low
        below = value < self.high if self.is_high_open else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "finite"
        low = f"{'above' if self.is_low_open else 'at least'} {self.low:g}"
        return low if self.high == math.inf else f"{low} and {'below' if self.is_high_open else 'at most'} {self.high:g}"


# A size beyond this is a slip of the keyboard; below it no product of sizes loses precision anywhere.
POSITIVE = Range(1, 2**31)
COUNT = Range(0, 2**31)
ALL_OR_COUNT = Range(-1, 2**31)
ABOVE_ZERO = Range(0, is_low_open=True)
NOT_NEGATIVE = Range(0)
PORT = Range(1024, 65535)
FRACTION = Range(0, 1, is_high_open=True)
ANY = Range(-math.inf)

RANGES: dict[str, Range] = {
    "grpo.num_prompts_per_step": POSITIVE,
    "grpo.num_generations_per_prompt": Range(2, 2**31),
    "grpo.max_num_steps": POSITIVE,
    "grpo.max_num_epochs": POSITIVE,
    "grpo.max_rollout_turns": POSITIVE,
    "grpo.val_period": COUNT,
    "grpo.val_start_at": Range(-1, 2**31),
    "grpo.max_val_samples": POSITIVE,
    "grpo.seed": COUNT,
    "grpo.advantage_clip_low": ANY,
    "grpo.advantage_clip_high": ANY,
    "grpo.invalid_tool_call_advantage": ANY,
    "grpo.malformed_thinking_advantage": ANY,
    "grpo.seq_logprob_error_threshold": Range(1),
    "grpo.reward_scaling.source_min": ANY,
    "grpo.reward_scaling.source_max": ANY,
    "grpo.reward_scaling.target_min": ANY,
    "grpo.reward_scaling.target_max": ANY,
    "grpo.reward_shaping.overlong_buffer_length": POSITIVE,
    "grpo.reward_shaping.overlong_buffer_penalty": NOT_NEGATIVE,
    "grpo.reward_shaping.max_response_length": POSITIVE,
    "grpo.reward_shaping.stop_properly_penalty_coef": Range(0, 1),
    "grpo.val_num_generations_per_prompt": POSITIVE,
    "grpo.dynamic_sampling_max_gen_batches": POSITIVE,
    "grpo.batch_multiplier": Range(1, 2**15),
    "reward_penalties.token_ids.think_open": COUNT,
    "reward_penalties.token_ids.think_close": COUNT,
    "grpo.async_grpo.max_trajectory_age_steps": COUNT,
    "grpo.async_grpo.max_generation_failures": COUNT,
    "sft.max_num_epochs": POSITIVE,
    "sft.max_num_steps": ALL_OR_COUNT,
    "sft.val_period": COUNT,
    "sft.val_batches": ALL_OR_COUNT,
    "sft.val_global_batch_size": POSITIVE,
    "sft.val_micro_batch_size": POSITIVE,
    "sft.seed": COUNT,
    "dpo.max_num_epochs": POSITIVE,
    "dpo.max_num_steps": ALL_OR_COUNT,
    "dpo.val_period": COUNT,
    "dpo.val_batches": ALL_OR_COUNT,
    "dpo.val_global_batch_size": POSITIVE,
    "dpo.val_micro_batch_size": POSITIVE,
    "dpo.seed": COUNT,
    "rm.max_num_epochs": POSITIVE,
    "rm.max_num_steps": ALL_OR_COUNT,
    "rm.val_period": COUNT,
    "rm.val_batches": ALL_OR_COUNT,
    "rm.val_global_batch_size": POSITIVE,
    "rm.val_micro_batch_size": POSITIVE,
    "rm.seed": COUNT,
    "dpo.reference_policy_kl_penalty": NOT_NEGATIVE,
    "dpo.preference_loss_weight": NOT_NEGATIVE,
    "dpo.sft_loss_weight": NOT_NEGATIVE,
    "eval.num_tests_per_prompt": POSITIVE,
    "eval.k_value": POSITIVE,
    "eval.seed": COUNT,
    "loss_fn.reference_policy_kl_penalty": NOT_NEGATIVE,
    "loss_fn.kl_input_clamp_value": ABOVE_ZERO,
    "loss_fn.kl_output_clamp_value": ABOVE_ZERO,
    "loss_fn.max_log_ratio": ABOVE_ZERO,
    "loss_fn.ratio_clip_min": NOT_NEGATIVE,
    "loss_fn.ratio_clip_max": ABOVE_ZERO,
    "loss_fn.ratio_clip_c": Range(1, is_low_open=True),
    "loss_fn.truncated_importance_sampling_ratio": ABOVE_ZERO,
    "loss_fn.truncated_importance_sampling_ratio_min": NOT_NEGATIVE,
    "loss_fn.positive_example_nll_weight": NOT_NEGATIVE,
    "loss_fn.constant_length_normalizer": POSITIVE,
    "policy.train_global_batch_size": POSITIVE,
    "policy.train_micro_batch_size": POSITIVE,
    "policy.logprob_batch_size": POSITIVE,
    "policy.max_total_sequence_length": Range(2, 2**31),
    "policy.logprob_chunk_size": POSITIVE,
    "policy.make_sequence_length_divisible_by": POSITIVE,
    "policy.max_grad_norm": NOT_NEGATIVE,
    "policy.refit_buffer_size_gb": ABOVE_ZERO,
    "policy.sequence_packing.train_mb_tokens": POSITIVE,
    "policy.sequence_packing.logprob_mb_tokens": POSITIVE,
    "policy.sequence_packing.sequence_length_round": POSITIVE,
    "policy.dynamic_batching.train_mb_tokens": POSITIVE,
    "policy.dynamic_batching.logprob_mb_tokens": POSITIVE,
    "policy.dynamic_batching.sequence_length_round": POSITIVE,
    "policy.megatron_cfg.tensor_model_parallel_size": POSITIVE,
    "policy.megatron_cfg.pipeline_model_parallel_size": POSITIVE,
    "policy.megatron_cfg.context_parallel_size": POSITIVE,
    "policy.megatron_cfg.expert_model_parallel_size": POSITIVE,
    "policy.megatron_cfg.expert_tensor_parallel_size": POSITIVE,
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage": POSITIVE,
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size": POSITIVE,
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage": POSITIVE,
    "policy.megatron_cfg.fused_linear_logprobs_chunk_size": POSITIVE,
    "policy.megatron_cfg.moe_aux_loss_coeff": NOT_NEGATIVE,
    "policy.megatron_cfg.moe_router_bias_update_rate": NOT_NEGATIVE,
    "policy.megatron_cfg.peft.dim": POSITIVE,
    "policy.megatron_cfg.peft.alpha": ABOVE_ZERO,
    "policy.megatron_cfg.peft.dropout": FRACTION,
    "policy.megatron_cfg.empty_unused_memory_level": Range(0, 2),
    "policy.megatron_cfg.optimizer.lr": ABOVE_ZERO,
    "policy.megatron_cfg.optimizer.min_lr": NOT_NEGATIVE,
    "policy.megatron_cfg.optimizer.weight_decay": NOT_NEGATIVE,
    "policy.megatron_cfg.optimizer.adam_beta1": FRACTION,
    "policy.megatron_cfg.optimizer.adam_beta2": FRACTION,
    "policy.megatron_cfg.optimizer.adam_eps": ABOVE_ZERO,
    "policy.megatron_cfg.optimizer.clip_grad": NOT_NEGATIVE,
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction": Range(0, 1),
    "policy.megatron_cfg.scheduler.lr_decay_iters": POSITIVE,
    "policy.megatron_cfg.scheduler.lr_warmup_iters": COUNT,
    "policy.megatron_cfg.scheduler.lr_warmup_init": NOT_NEGATIVE,
    "policy.megatron_cfg.scheduler.start_weight_decay": NOT_NEGATIVE,
    "policy.megatron_cfg.scheduler.end_weight_decay": NOT_NEGATIVE,
    "policy.generation.max_new_tokens": POSITIVE,
    "policy.generation.temperature": ABOVE_ZERO,
    "policy.generation.top_p": Range(0, 1, is_low_open=True),
    "policy.generation.top_k": POSITIVE,
    "policy.generation.val_temperature": NOT_NEGATIVE,
    "policy.generation.val_top_p": Range(0, 1, is_low_open=True),
    "policy.generation.val_top_k": POSITIVE,
    "policy.generation.num_cpu_engines": POSITIVE,
    "policy.generation.colocated.resources.gpus_per_node": POSITIVE,
    "policy.generation.colocated.resources.num_nodes": POSITIVE,
    "policy.generation.vllm_cfg.tensor_parallel_size": POSITIVE,
    "policy.generation.vllm_cfg.expert_parallel_size": POSITIVE,
    "policy.generation.vllm_cfg.gpu_memory_utilization": Range(0, 1, is_low_open=True),
    "policy.generation.vllm_cfg.kv_cache_memory_mib": POSITIVE,
    "policy.generation.vllm_cfg.max_model_len": Range(2, 2**31),
    "policy.generation.vllm_cfg.http_server_share": Range(0, 1, is_low_open=True),
    "policy.generation.vllm_cfg.max_num_seqs": POSITIVE,
    "policy.generation.vllm_cfg.max_num_batched_tokens": POSITIVE,
    "data.max_input_seq_length": POSITIVE,
    "data.max_bad_row_share": Range(0, 1),
    "data.default.split_validation_size": Range(0, 2**31),
    "data.default.seed": COUNT,
    "data.train.repeat": POSITIVE,
    "data.train.max_samples": POSITIVE,
    "data.train.split_validation_size": Range(0, 2**31),
    "data.train.seed": COUNT,
    "data.validation.repeat": POSITIVE,
    "env.math.num_workers": Range(1, 4096),
    "env.math.timeout_s": ABOVE_ZERO,
    "env.mcqa.num_workers": Range(1, 4096),
    "env.mcqa.timeout_s": ABOVE_ZERO,
    "env.code.num_workers": Range(1, 4096),
    "env.code.timeout_s": ABOVE_ZERO,
    "env.instruction_following.num_workers": Range(1, 4096),
    "env.instruction_following.timeout_s": ABOVE_ZERO,
    "env.structured_outputs.num_workers": Range(1, 4096),
    "env.structured_outputs.timeout_s": ABOVE_ZERO,
    "env.workplace_assistant.num_workers": Range(1, 4096),
    "env.workplace_assistant.timeout_s": ABOVE_ZERO,
    "env.own.num_workers": Range(1, 4096),
    "env.own.timeout_s": ABOVE_ZERO,
    "env.code.unit_test_timeout_s": ABOVE_ZERO,
    "checkpointing.keep_top_k": POSITIVE,
    "checkpointing.save_period": POSITIVE,
    "checkpointing.ft_save_period": POSITIVE,
    "checkpointing.ft_keep_latest_k": POSITIVE,
    "cluster.num_nodes": POSITIVE,
    "cluster.gpus_per_node": COUNT,
    "cluster.cpu_units_per_node": POSITIVE,
    "policy.generation.port_range_low": PORT,
    "policy.generation.port_range_high": Range(1025, 65536),
    "cluster.master_port_range_low": PORT,
    "cluster.master_port_range_high": Range(1025, 65536),
    "deadlines.start_s": ABOVE_ZERO,
    "deadlines.generate_s": ABOVE_ZERO,
    "deadlines.reward_s": ABOVE_ZERO,
    "deadlines.train_s": ABOVE_ZERO,
    "deadlines.refit_s": ABOVE_ZERO,
    "deadlines.checkpoint_s": ABOVE_ZERO,
    "logger.num_val_samples_to_print": COUNT,
    "logger.gpu_monitoring.collection_interval": ABOVE_ZERO,
    "logger.gpu_monitoring.flush_interval": ABOVE_ZERO,
}

ONLY: dict[str, tuple[object, str]] = {
    "policy.megatron_cfg.enabled": (True, "Megatron-Core is the only training backend"),
    "policy.megatron_cfg.peft.a2a_experimental": (False, "what adapters exchange is too small to gain by another way of communication"),
    "policy.megatron_cfg.optimizer.fp16": (False, "float16 is not supported; set policy.precision=bfloat16 or float32"),
    "policy.generation.vllm_cfg.logprobs_mode": (
        "processed_logprobs",
        "logprobs of another distribution than that of the tokens are no use",
    ),
    "policy.generation.vllm_cfg.pipeline_parallel_size": (1, "engines with pipeline stages are not supported"),
}
"""Keys of which mrl has only one value so far, and why."""

FIXED = frozenset(
    [
        *ONLY,
        "policy.megatron_cfg.moe_router_enable_expert_bias",
        "policy.generation.backend",
        "policy.reward_model_cfg.enabled",
        "policy.reward_model_cfg.reward_model_type",
    ]
)
"""Keys with one possible value, by this table, by their type, or by a rule of `find_problems`: no code has to read them."""


def value_at(config: RunConfig, key: str) -> object:
    """The value of a dotted key; None also where its section is null."""
    value: object = config
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value


def spell(value: object) -> str:
    """A value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def find_values_out_of_range(config: RunConfig) -> dict[str, str]:
    """By key, a problem for every number outside its range, and every value that is not supported; what is not known is passed by."""
    problems = {}
    for key, allowed in RANGES.items():
        with suppress(NotKnown):
            value = value_at(config, key)
            if value is not None and value not in allowed:  # type: ignore[operator]  # RANGES names numbers only
                problems[key] = f"{key}={spell(value)}: out of range; use a number that is {allowed}"
    for key, (only, reason) in ONLY.items():
        with suppress(NotKnown):
            value = value_at(config, key)
            if value != only:
                problems[key] = f"{key}={spell(value)}: {reason}; set {key}={spell(only)}"
    return problems
