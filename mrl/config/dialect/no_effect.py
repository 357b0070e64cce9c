"""Keys of NeMo RL that mean nothing here, whatever their value: of other backends, removed, read nowhere, or only about speed."""

from __future__ import annotations

from mrl.config.dialect.entry import Foreign, no_effect

_DEAD = "NeMo RL reads it nowhere, and there is nothing for it to say here"
_DIVISORS = "removed from NeMo RL; the loss is always divided by the tokens or sequences of the global batch"
_MEGATRON_ENGINE = "Megatron's inference engine; rollouts come from vLLM"
_TRANSPORT = "weights always move by one way of refitting, over CUDA IPC or NCCL"
_BEST_AT_K = "read only with the training on best@k of an older branch"
_DRAFT = "read only with policy.draft.enabled"
_FP8 = "read only with policy.megatron_cfg.fp8_cfg.enabled"
_MTP = "read only with policy.megatron_cfg.mtp_num_layers"
_DATA_PLANE = "rollouts stay where they were made, and their readers pull them; no service lies between"
_NO_SERVER = "environments run inside mrl, without NeMo Gym's servers"

NO_EFFECT: dict[str, Foreign] = {
    "grpo.val_batch_size": Foreign("validation rollouts stream through the engines, without batches"),
    **no_effect(
        _BEST_AT_K,
        "best_at_k_k",
        "best_at_k_m",
        "combined_training_weight_mode",
        "combined_training_best_at_k_weight",
        "combined_training_pass_at_1_weight",
        prefix="grpo.",
    ),
    **no_effect(
        "NeMo RL reads it nowhere; grpo.invalid_tool_call_advantage and malformed_thinking_advantage say what such turns lose",
        "penalize_invalid_tool_call",
        "penalize_malformed_thinking",
        "invalid_tool_call_strategy",
        prefix="grpo.",
    ),
    "grpo.calculate_advantages_on_gpu": Foreign("only about speed: advantages take microseconds where they are computed"),
    "grpo.deduplicate_multimodal_data": Foreign("only about images and sound"),
    "grpo.debug_payload_metrics": Foreign("payloads do not pass through the driver"),
    "grpo.skip_reference_policy_logprobs_calculation": Foreign("follows from loss_fn.reference_policy_kl_penalty=0"),
    "env.should_log_nemo_gym_responses": Foreign("no server answers; samples of every step are in the run folder"),
    **no_effect(
        _NO_SERVER,
        "port_range_low",
        "port_range_high",
        "skip_venv_if_present",
        "uv_venv_dir",
        "code_gen.resources_servers.code_gen.debug",
        prefix="env.nemo_gym.",
    ),
    "env.nemo_gym.math_with_judge.resources_servers.math_with_judge.judge_model_server": Foreign(_NO_SERVER, is_section=True),
    "checkpointing.model_save_format": Foreign(
        "checkpoints are Megatron's, with the optimizer; `python -m mrl.convert mcore-to-hf` makes safetensors of them"
    ),
    "policy.generation_batch_size": Foreign(_DEAD),
    "generation.num_prompts_per_step": Foreign("engines get all prompts of an evaluation at once, and take them as they have room"),
    "data.file_format": Foreign("the end of a file's name tells"),
    "policy.tokenizer.use_fastokens": Foreign("only about speed: another tokenizer library, with the same tokens"),
    **no_effect(_DRAFT, "model_name", "loss_weight", "num_layers", "aux_layer_indices", prefix="policy.draft."),
    "policy.sequence_packing.fuse_loss": Foreign("only about speed: the loss is always computed over packed rows"),
    "policy.dtensor_cfg._v2": Foreign("a choice between two workers of DTensor"),
    "policy.dtensor_cfg.automodel_kwargs": Foreign("how Automodel loads the model; Megatron-Core trains it", is_section=True),
    "policy.dtensor_cfg.clear_cache_every_n_steps": Foreign("policy.megatron_cfg.empty_unused_memory_level says when memory is given back"),
    "policy.dtensor_cfg.dp_replicate_size": Foreign("FSDP's groups; Megatron shards the optimizer over all data-parallel ranks"),
    "policy.dtensor_cfg.lora_cfg.use_triton": Foreign("only about speed"),
    "policy.generation.refit_transport": Foreign(_TRANSPORT),
    "policy.generation.nccl_reshard_refit": Foreign(_TRANSPORT),
    "policy.generation.refit_cfg": Foreign(_TRANSPORT, is_section=True),
    **no_effect(
        _TRANSPORT,
        "http_refit_api_key_env_var",
        "http_refit_server_port",
        "zmq_refit_server_port",
        prefix="policy.generation.vllm_cfg.",
    ),
    "policy.generation.vllm_cfg.async_engine": Foreign(
        "engines always take requests while others are sampled; refits and aborts come between two of their steps"
    ),
    "policy.generation.vllm_cfg.skip_tokenizer_init": Foreign("engines have a tokenizer where stop_strings or an HTTP server need one"),
    "policy.generation.vllm_cfg.enable_expert_parallel": Foreign("NeMo RL reads it nowhere, and follows expert_parallel_size as mrl does"),
    **no_effect(_DEAD, "enforce_monotonicity", "enable_thinking", prefix="policy.generation.vllm_cfg."),
    "policy.generation.vllm_cfg.use_tqdm": Foreign("one bar counts the rollouts of all engines"),
    "policy.generation.vllm_cfg.cap_max_tokens_to_context": Foreign("rollouts always end where the context does"),
    "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update": Foreign("only about images and sound"),
    **no_effect(
        "engines are not polled; rollout/* has the rates and lengths of every step",
        "enable_vllm_metrics_logger",
        "vllm_metrics_logger_interval",
        prefix="policy.generation.vllm_cfg.",
    ),
    "policy.generation.real_quant_export_cpu_offload": Foreign("read only with quantised weights"),
    "policy.generation.mcore_generation_config": Foreign(_MEGATRON_ENGINE, is_section=True),
    "policy.generation.sglang_cfg": Foreign("SGLang; rollouts come from vLLM", is_section=True),
    "policy.generation.trtllm_cfg": Foreign("TensorRT-LLM; rollouts come from vLLM", is_section=True),
    "policy.generation.dynamo_cfg": Foreign("Dynamo; rollouts come from vLLM", is_section=True),
    "policy.generation.trtllm_kwargs": Foreign("TensorRT-LLM; rollouts come from vLLM", is_section=True),
    "policy.megatron_cfg.train_iters": Foreign("the steps of the algorithm's section count; NeMo RL, too, puts them in its place"),
    "policy.megatron_cfg.do_not_average_loss": Foreign(_DIVISORS),
    "policy.megatron_cfg.cp_normalize": Foreign(_DIVISORS),
    "policy.megatron_cfg.calculate_per_token_loss": Foreign(_DIVISORS),
    "policy.megatron_cfg.scale_loss_by_dp_cp_size": Foreign(_DIVISORS),
    "policy.megatron_cfg.converter_type": Foreign("removed from NeMo RL; the model's config.json says how weights are converted"),
    "policy.megatron_cfg.cuda_graph_modules": Foreign("read only with policy.megatron_cfg.cuda_graph_impl"),
    "policy.megatron_cfg.cuda_graph_warmup_steps": Foreign("read only with policy.megatron_cfg.cuda_graph_impl"),
    "policy.megatron_cfg.offload_modules": Foreign("read only with policy.megatron_cfg.fine_grained_activation_offloading"),
    "policy.megatron_cfg.clear_memory_caches_before_refit": Foreign("memory is always given back to the GPU between phases"),
    "policy.megatron_cfg.inference_moe_token_dispatcher_type": Foreign(_MEGATRON_ENGINE),
    **no_effect(_MTP, "mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads", prefix="policy.megatron_cfg."),
    "policy.megatron_cfg.checkpoint.ckpt_assume_constant_structure": Foreign("only about speed: how a save is planned"),
    **no_effect(
        "ranks always write and read parts of their own",
        "ckpt_fully_parallel_save",
        "ckpt_fully_parallel_load",
        prefix="policy.megatron_cfg.checkpoint.",
    ),
    "policy.megatron_cfg.force_reconvert_from_hf": Foreign(
        "a converted model is found by the content of its files, and converted again by itself where it is damaged"
    ),
    "policy.megatron_cfg.moe_grouped_gemm": Foreign("only about speed: experts are one grouped product wherever Transformer Engine is"),
    **no_effect("read only by HybridEP", "moe_hybridep_num_sms", "hybridep_num_sms", prefix="policy.megatron_cfg."),
    "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp": Foreign(_DEAD),
    "policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy": Foreign("read only by Megatron's FSDP"),
    "policy.megatron_cfg.distributed_data_parallel_config.average_in_collective": Foreign(
        "fixed in NeMo RL; gradients are sums over the global batch, and its tokens divide them"
    ),
    **no_effect(_FP8, "fp8", "fp8_recipe", "fp8_param", "force_clear_fp8_caches", prefix="policy.megatron_cfg.fp8_cfg."),
    "policy.megatron_cfg.optimizer.sgd_momentum": Foreign("read only by the optimizer sgd"),
    **{
        f"data.{section}.{name}": Foreign(reason)
        for section in ("default", "train", "validation")
        for name, reason in {
            "download_dir": "data sets of the Hub are kept in the Hugging Face cache (HF_HOME)",
            "use_preserving_dataset": "every row keeps its own keys",
        }.items()
    },
    **no_effect("nothing is held out of validation rows", "split_validation_size", "seed", prefix="data.validation."),
    **no_effect("read only with data.use_multiple_dataloader", "num_prompts_per_dataloader", "custom_dataloader", prefix="data."),
    "dpo.gt_reward_scale": Foreign("read only by preference losses of RPO"),
    "data.num_workers": Foreign("only about speed: rows are read once, at start"),
    **no_effect(
        _DATA_PLANE,
        "enabled",
        "impl",
        "backend",
        "storage_capacity",
        "num_storage_units",
        "claim_meta_poll_interval_s",
        "global_segment_size",
        "local_buffer_size",
        prefix="data_plane.",
    ),
    "cluster.segment_size": Foreign("only about speed: which nodes share NVLink is for the scheduler to say, as with Slurm's --segment"),
    "data_plane.observability": Foreign(_DATA_PLANE, is_section=True),
}
"""Key -> why it has no effect. Each value is accepted and reported."""
