"""Keys of NeMo RL whose behaviour mrl does not have: accepted where they are off, refused with a way out where they are not."""

from __future__ import annotations

from mrl.config.dialect.entry import Foreign

_OFF = (False, None)

REFUSED: dict[str, Foreign] = {
    "data.add_system_prompt": Foreign(
        "NeMo RL declares it and reads it nowhere", _OFF, "set it to false; data.default.system_prompt_file gives prompts a system message"
    ),
    "dpo.preference_loss": Foreign("DPO's is the only preference loss", ("dpo",), "set it to dpo"),
    "data.use_multiple_dataloader": Foreign(
        "every step draws from all data sets, in proportion to their sizes", _OFF, "set it to false; `repeat` weights a data set"
    ),
    "grpo.async_grpo": Foreign("null is off", (None,), "set its keys, or null"),
    "grpo.use_best_at_k": Foreign("training on best@k, of an older branch, is not supported", _OFF, "set it to false"),
    "grpo.use_combined_training": Foreign("training on best@k, of an older branch, is not supported", _OFF, "set it to false"),
    "checkpointing.save_consolidated": Foreign(
        "a checkpoint holds what a run needs to resume", _OFF, "set it to false, and export with `python -m mrl.convert mcore-to-hf`"
    ),
    **{
        key: Foreign(
            "a run starts from a Hugging Face folder",
            (None,),
            "give policy.model_name; `python -m mrl.convert mcore-to-hf` makes a folder of a Megatron checkpoint",
            is_section=True,
        )
        for key in ("checkpointing.pretrained_checkpoint", "policy.pretrained_checkpoint")
    },
    "logger.wandb.log_nemo_gym_full_result_tables": Foreign(
        "no Gym server answers; every rollout of a step is in its `train_data_stepN.jsonl`", _OFF, "set it to false"
    ),
    "policy.hf_config_overrides.router_aux_loss_coef": Foreign(
        "Megatron's auxiliary loss has keys of its own", (0, None), "set policy.megatron_cfg.moe_aux_loss_coeff instead"
    ),
    "policy.generation.bad_words": Foreign("engines see tokens, not words", (None, []), "leave it out"),
    **{
        f"policy.generation.vllm_cfg.{key}": Foreign("engines have the weights of the checkpoint, none in 8 bits", same, way_out)
        for key, same, way_out in (
            ("use_deep_gemm", _OFF, "set it to false"),
            ("is_mx", _OFF, "set it to false"),
            ("num_first_layers_in_bf16", (0, None), "set it to 0"),
            ("num_last_layers_in_bf16", (0, None), "set it to 0"),
        )
    },
    "policy.megatron_cfg.moe_flex_dispatcher_backend": Foreign("the flex dispatcher is DeepEP", ("deepep", None), "set it to deepep"),
    "policy.activation_checkpointing_enabled": Foreign(
        "NeMo RL reads it nowhere", _OFF, "set policy.megatron_cfg.activation_checkpointing=true instead"
    ),
    "policy.draft.enabled": Foreign("draft models are not trained", _OFF, "set it to false"),
    "policy.dtensor_cfg.cpu_offload": Foreign(
        "a feature of FSDP", _OFF, "set policy.megatron_cfg.optimizer.optimizer_cpu_offload=true instead"
    ),
    "policy.dtensor_cfg.custom_parallel_plan": Foreign(
        "layers are cut by their family's tables in conversion/families", (None,), "leave it out"
    ),
    "policy.is_vlm": Foreign("only language models are trained", _OFF, "set it to false"),
    "policy.quant_cfg": Foreign("quantised weights are not trained", (None,), "leave it out"),
    "policy.quant_calib_data": Foreign("quantised weights are not trained", (None,), "leave it out"),
    "policy.quant_calib_size": Foreign("quantised weights are not trained", (None,), "leave it out"),
    "policy.quant_batch_size": Foreign("quantised weights are not trained", (None,), "leave it out"),
    "policy.quant_sequence_length": Foreign("quantised weights are not trained", (None,), "leave it out"),
    "policy.generation.quant_cfg": Foreign("quantised weights are not sampled from", (None,), "leave it out"),
    "policy.megatron_cfg.cuda_graph_impl": Foreign("training runs without CUDA graphs", ("none", None), "set it to none"),
    "policy.megatron_cfg.fine_grained_activation_offloading": Foreign(
        "activations stay on the GPU", _OFF, "set it to false; policy.megatron_cfg.activation_checkpointing=true saves their memory, too"
    ),
    "policy.megatron_cfg.fp8_cfg.enabled": Foreign("training in FP8 is not supported", _OFF, "set it to false"),
    "policy.megatron_cfg.mtp_num_layers": Foreign("multi-token prediction is not trained", (0, None), "set it to 0"),
    "policy.megatron_cfg.scheduler.override_opt_param_scheduler": Foreign(
        "a resumed run follows the schedule of its config, and the checkpoint says how many steps were taken",
        (True, None),
        "set it to true",
    ),
    "policy.megatron_cfg.pipeline_dtype": Foreign(
        "stages hand on activations as they are", ("${policy.precision}", None), "leave it out, or set policy.precision"
    ),
    "env.nemo_gym.math_with_judge.resources_servers.math_with_judge.should_use_judge": Foreign(
        "answers are compared by math-verify, not by a model", _OFF, "set it to false"
    ),
    "env.nemo_gym.is_trajectory_collection": Foreign("a run trains", _OFF, "set it to false, or sample with `python -m mrl.evaluate`"),
    "env.nemo_gym.policy_model.responses_api_models.vllm_model.uses_reasoning_parser": Foreign(
        "thoughts stay in the text of a rollout, where environments find them", _OFF, "set it to false"
    ),
    "on_policy_distillation": Foreign("distillation is not supported", (None,), "set it to null", is_section=True),
}
"""Key -> the values that are accepted, why others are not, and the way out."""
