"""Keys and values of NeMo RL under older or other names, and the names they have here. A key moves out when its line is removed."""

from __future__ import annotations

RENAMED: dict[str, str] = {
    "data.dataset_name": "data.train.dataset_name",
    "data.train_jsonl_fpath": "data.train.data_path",
    "data.validation_jsonl_fpath": "data.validation.data_path",
    "env.nemo_gym.code_gen.resources_servers.code_gen.num_processes": "env.code.num_workers",
    "env.nemo_gym.code_gen.resources_servers.code_gen.unit_test_timeout_secs": "env.code.unit_test_timeout_s",
    "grpo.dynamic_sampling_oversample_ratio": "grpo.batch_multiplier",
    "grpo.num_val_generations_per_prompt": "grpo.val_num_generations_per_prompt",
    "mlflow_enabled": "logger.mlflow_enabled",
    "policy.megatron_cfg.use_linear_ce_fusion_loss": "policy.megatron_cfg.use_fused_linear_logprobs",
    "swanlab_enabled": "logger.swanlab_enabled",
    "tensorboard_enabled": "logger.tensorboard_enabled",
    "wandb_enabled": "logger.wandb_enabled",
}
"""Old name -> new name. Both in one file, or both on one command line, are refused unless they are equal."""

_NEVER: dict[str, dict[object, object]] = {f"{algorithm}.val_period": {-1: 0} for algorithm in ("grpo", "sft", "dpo", "rm")}

VALUES: dict[str, dict[object, object]] = {
    **_NEVER,
    # The launcher is to give it; no folder has that name.
    "policy.model_name": {None: "<model>"},
    # NeMo RL's torch optimizers clip nothing then, as Megatron does at 0.
    "policy.max_grad_norm": {None: 0.0},
    "policy.megatron_cfg.optimizer.clip_grad": {None: 0.0},
    "policy.sequence_packing.algorithm": {"modified_ffd": "modified_first_fit_decreasing"},
    "checkpointing.metric_name": {"val_reward": "val:accuracy", "val_loss": "val:val_loss"},
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template": {None: "default"},
    # vLLM has NeMo RL's parser under a name of its own.
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.reasoning_parser": {"nano_v3": "nemotron_v3"},
    "policy.generation.vllm_cfg.reasoning_parser_plugin": {
        "nemo_rl/models/generation/vllm/reasoning_parsers/nano_v3_reasoning_parser.py": None
    },
}
"""Key -> old value -> new value."""
