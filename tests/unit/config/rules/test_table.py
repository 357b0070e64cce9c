# SPDX-License-Identifier: Apache-2.0
"""One table of what packaged configs are told with some keys changed: the key at fault, words of rule and way out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.config.problems import found_with, text_of

NAMES = {
    "ADAPTERS": "PEFT.enabled=true",
    "AHEAD": "grpo.async_grpo.enabled=true & COLOCATED.enabled=false",
    "CHAT": "ENGINE.http_server_serving_chat_kwargs",
    "CONTEXT": "MEGATRON.context_parallel_size",
    "CRITIC": "value.megatron_cfg",
    "DDP": "MEGATRON.distributed_data_parallel_config",
    "DEDICATED": "COLOCATED.enabled=false & COLOCATED.resources",
    "COLOCATED": "GENERATION.colocated",
    "DISPATCHER": "MEGATRON.moe_token_dispatcher_type",
    "EXPERT": "MEGATRON.expert_model_parallel_size",
    "FIRST_STAGE": "MEGATRON.num_layers_in_first_pipeline_stage",
    "GSPO": "loss_fn.sequence_level_importance_ratios=true & loss_fn.token_level_loss=false",
    "KL": "loss_fn.reference_policy_kl_penalty=0.1",
    "NEXT": "MEGATRON.mtp",
    "NO_METRIC": "checkpointing.metric_name=null",
    "NODES": "cluster.num_nodes",
    "OVERRIDES": "MEGATRON.model_overrides",
    "PARTS": "MEGATRON.recompute_modules",
    "PEFT": "MEGATRON.peft",
    "PIPELINE": "MEGATRON.pipeline_model_parallel_size",
    "QWEN3_MOE": (
        '"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": true, "rms_norm_eps": 1e-6, "rope_theta": 1e4'
    ),
    "REINFORCE": "grpo.adv_estimator.name=reinforce_plus_plus & loss_fn.use_kl_in_reward=true",
    "SEQUENCE": "MEGATRON.sequence_parallel",
    "SELECTIVE": "MEGATRON.activation_checkpointing=true & MEGATRON.recompute_granularity=selective",
    "SERVED": "ENGINE.expose_http_server=true",
    "ENGINE": "GENERATION.vllm_cfg",
    "SLOTS": "cluster.cpu_units_per_node",
    "SPECULATE": "KWARGS.speculative_config",
    "KWARGS": "GENERATION.vllm_kwargs",
    "GENERATION": "policy.generation",
    "TENSOR": "MEGATRON.tensor_model_parallel_size",
    "TIS": "loss_fn.truncated_importance_sampling",
    "UNCORRECTED": "loss_fn.use_importance_sampling_correction=false",
    "VARIABLES": "MEGATRON.env_vars",
    "VIRTUAL": "MEGATRON.virtual_pipeline_model_parallel_size",
    "MEGATRON": "policy.megatron_cfg",
}

# In brackets a config, and changes of the model's config.json. A row: overrides [=> start of the problem] -> words of
# it ...; without a start the problem is that of the last override. "fine": there is no problem; "...": there may be
# others.
TABLE = """
[grpo_tiny.yaml]
# sections and files
policy.model_name=nowhere -> give the folder of a Hugging Face model, or its id -> ...
policy.tokenizer.name=nowhere -> tokenizer
data.validation.data_path=no/such/file -> correct the path
data.default.system_prompt_file=no.txt -> correct the path
checkpointing.checkpoint_dir=prepared/tiny/model/config.json/x => checkpointing.checkpoint_dir=prepared -> choose a folder -> ...
logger.log_dir=prepared/tiny/data/train.jsonl/x -> choose a folder
checkpointing.metric_name=accuracy -> val:accuracy
data.validation=null => checkpointing.metric_name=val:accuracy -> train:reward
policy.model_name=there/prepared/tiny/model => policy.model_name=there/prepared -> `python -m mrl.prepare tiny` makes it -> ...
policy.model_name=prepared/tiny_dense/model => policy.model_name=prepared -> `python -m mrl.prepare tiny_dense` makes it -> ...
data.train.data_path=prepared/tiny/data/no.jsonl => data.train.data_path=prepared/tiny -> path (`python -m mrl.prepare
checkpointing.checkpoint_must_save_by=3h -> 00:03:40:00
profiler.steps=[3] & profiler.ranks=[0, 4] -> use ranks from 0 to 3
profiler.steps=[0] -> use steps from there on
profiler.steps=[3] & profiler.tool=nsys -> set it to torch
cluster.master_port_range_low=1400 -> set both
cluster.master_port_range_high=1400 & cluster.master_port_range_low=1400 -> set both
cluster.master_port_range_high=90 & cluster.master_port_range_low=80 -> at least 1024 -> ...
env.placement.num_nodes=1 -> set it to 0, or raise cluster.num_nodes
ENGINE.kv_cache_dtype=bfloat16 -> set it to auto
ENGINE.logprobs_mode=raw_logprobs -> processed_logprobs
checkpointing.ft_save_period=5 -> set it
grpo.stop_at_validation_metric=accuracy -> set both
grpo.stop_at_validation_threshold=0.5 -> set both
checkpointing.metric_name=val:rewad -> use val:reward, another of
grpo.stop_at_validation_threshold=0.5 & grpo.stop_at_validation_metric=acuracy -> use accuracy, another of
NO_METRIC & grpo.stop_at_validation_threshold=1 & data.validation=null & grpo.stop_at_validation_metric=accuracy -> give data.validation
policy.train_global_batch_size=96 -> the 512 rollouts -> leave the latter out
grpo.num_generations_per_prompt=3 & grpo.num_prompts_per_step=1 -> an update -> grpo.num_prompts_per_step
grpo.num_generations_per_prompt=1 -> at least 2
UNCORRECTED & TIS_ratio=2 -> set it to null
MEGATRON.use_fused_linear_logprobs=true & policy.logprob_chunk_size=64 -> the one or the other
GENERATION.max_new_tokens=1281 -> lower the one or raise the other
ENGINE.max_model_len=1281 -> leave it out
policy.dynamic_batching.enabled=true -> set one of them to false
CONTEXT=2 & policy.share_prefixes=true -> goes only with CONTEXT=1, not 2 -> set policy.share_prefixes=auto, or CONTEXT=1
ADAPTERS & PEFT.dropout=0.1 & policy.share_prefixes=true -> goes only with PEFT.dropout=0, not 0.1 -> PEFT.dropout=0
policy.sequence_packing.enabled=false & policy.share_prefixes=true -> policy.sequence_packing.enabled=true
policy.sequence_packing.enabled=false & policy.max_total_sequence_length=4097 => ENGINE.max_model_len=4097 -> lower policy.max_total_
ENGINE.enforce_eager=false -> set it to true
ENGINE.max_num_seqs=128 & ENGINE.max_num_batched_tokens=64 -> at least 128
ENGINE.load_format=dummy -> fine
GENERATION.stop_token_ids=[1,-2] => GENERATION.stop_token_ids=[1, -2] -> at least 0
policy.precision=bfloat16 & MEGATRON.optimizer.bf16=false -> set it to true
policy.max_grad_norm=3.0 & MEGATRON.optimizer.clip_grad=2.0 -> leave it out
MEGATRON.optimizer.min_lr=1e-2 => MEGATRON.optimizer.min_lr=0.01 -> lower it
MEGATRON.scheduler.lr_warmup_init=1 => MEGATRON.scheduler.lr_warmup_init=1.0 -> lower it
MEGATRON.scheduler.lr_decay_iters=50 & MEGATRON.scheduler.lr_warmup_iters=50 -> at most 49
MEGATRON.scheduler.end_weight_decay=0.1 -> leave both out
MEGATRON.optimizer.use_distributed_optimizer=false => DDP.overlap_param_gather=true -> set it to false
MEGATRON.optimizer.optimizer_cpu_offload=true -> set MEGATRON.optimizer.bf16=true, or it to false
MEGATRON.optimizer.optimizer_offload_fraction=1.5 -> at most 1
TENSOR=4 -> use 1 or 2
TENSOR=3 -> use 1 or 2
EXPERT=3 -> use 1, 2, 4 or 8
EXPERT=8 -> the 4 slots -> cluster.num_nodes
MEGATRON.expert_tensor_parallel_size=3 -> use 1, 2, 4
SLOTS=6 & CONTEXT=3 -> use 1, 2 or 4
CONTEXT=4 -> the 4 slots -> change one of these sizes
PIPELINE=2 -> num_layers_in_first_pipeline_stage
PIPELINE=8 -> num_layers_in_first_pipeline_stage
FIRST_STAGE=8 & PIPELINE=2 -> the first and last stage are given 8 layers, and the model has 7 -> rest divides
SLOTS=8 & FIRST_STAGE=2 & PIPELINE=4 -> the other 3 stages need equal numbers of layers, and 5 of the model's 7 are
MEGATRON.num_layers_in_last_pipeline_stage=3 -> set both to null
SEQUENCE=false -> set it to true
TENSOR=1 => SEQUENCE=true -> set it to false
SLOTS=3 -> the 3 slots -> SLOTS
ENGINE.tensor_parallel_size=4 -> use 1 or 2
SLOTS=4 & ENGINE.tensor_parallel_size=2 & ENGINE.expert_parallel_size=4 -> fine
ENGINE.tensor_parallel_size=2 & ENGINE.expert_parallel_size=3 -> must be 1 or a multiple of ENGINE.tensor_parallel_size=2 -> use 1, 2 or 4
ENGINE.pipeline_parallel_size=2 & ENGINE.expert_parallel_size=2 -> groups that step together -> or one stage -> ...
SPECULATE={method: ngram, num_speculative_tokens: 2} & ENGINE.expert_parallel_size=2 -> groups that step together -> or leave that out
ENGINE.expert_parallel_size=2 & KWARGS.all2all_backend=deepep_low_latency -> set it to allgather_reducescatter
ENGINE.expert_parallel_size=2 & KWARGS.enable_dbo=true -> groups of an engine do not have it -> leave it out
KWARGS.data_parallel_size=2 -> ENGINE.expert_parallel_size -> ...
cluster.gpus_per_node=8 & ENGINE.tensor_parallel_size=2 & ENGINE.expert_parallel_size=6 -> whole nodes -> use 1, 2, 4 or 8 -> ...
ENGINE.env_vars={VLLM_DP_SIZE: '2'} => ENGINE.env_vars.VLLM_DP_SIZE -> remove it
KWARGS.data_parallel_rank=1 => KWARGS.data_parallel_rank -> remove the key
ENGINE.pipeline_parallel_size=2 -> stage 1 of the model's 7 layers would have none with attention -> use fewer stages
cluster.gpus_per_node=8 & ENGINE.pipeline_parallel_size=3 & ENGINE.tensor_parallel_size=2 -> whole nodes -> use 1, 2, 4 or 8 workers -> ...
ENGINE.env_vars={FOO: '<redacted>'} => ENGINE.env_vars.FOO -> give it again
ENGINE.env_vars={VLLM_PP_LAYER_PARTITION: '5,2'} => ENGINE.env_vars.VLLM_PP_LAYER_PARTITION -> remove it
GENERATION.num_cpu_engines=5 -> lower it
COLOCATED.enabled=false & COLOCATED.resources.num_nodes=1 -> set it to null
cluster.gpus_per_node=8 & COLOCATED.enabled=false => COLOCATED.resources.gpus_per_node=null -> use 1 to 7
cluster.gpus_per_node=8 & DEDICATED={gpus_per_node: 8} => COLOCATED.resources.gpus_per_node=8 -> use 1 to 7 -> ...
cluster.gpus_per_node=1 & COLOCATED.enabled=false => COLOCATED.resources.gpus_per_node=null -> enabled=true
cluster.gpus_per_node=8 & DEDICATED={gpus_per_node: 4, num_nodes: 2} => COLOCATED.resources.num_nodes=2 -> set it to null
NODES=4 & cluster.gpus_per_node=8 & DEDICATED={num_nodes: 4} => COLOCATED.resources.num_nodes=4 -> use 1 to 3 -> ...
NODES=4 & cluster.gpus_per_node=8 & DEDICATED={gpus_per_node: 4, num_nodes: 1} => COLOCATED.resources.gpus_per_node=4 -> to null -> ...
cluster.gpus_per_node=8 & DEDICATED={gpus_per_node: 6} & ENGINE.tensor_parallel_size=4 -> use 1, 2, 3 or 6
DEDICATED={gpus_per_node: 1} & cluster.gpus_per_node=8 -> the 7 slots -> change one of these sizes
cluster.gpus_per_node=2 & NODES=4 & DEDICATED={num_nodes: 1} & CONTEXT=2 -> the 6 slots -> 3 or 5 nodes fit
cluster.gpus_per_node=8 & ENGINE.tensor_parallel_size=3 -> use 1, 2, 4 or 8
cluster.gpus_per_node=4 & NODES=4 & ENGINE.tensor_parallel_size=12 -> use 1, 2, 4, 8 or 16
cluster.gpus_per_node=4 & NODES=2 & ENGINE.tensor_parallel_size=6 -> 4 or 8
# layouts
TENSOR=2 & SEQUENCE=true & PIPELINE=2 & FIRST_STAGE=3 & CONTEXT=1 & EXPERT=2 & SLOTS=4 -> fine
TENSOR=1 & SEQUENCE=false & PIPELINE=1 & CONTEXT=1 & EXPERT=1 & SLOTS=1 -> fine
TENSOR=1 & SEQUENCE=false & PIPELINE=1 & CONTEXT=1 & EXPERT=2 & SLOTS=2 -> fine
TENSOR=2 & SEQUENCE=true & PIPELINE=1 & CONTEXT=1 & EXPERT=1 & SLOTS=2 -> fine
TENSOR=2 & SEQUENCE=true & PIPELINE=1 & CONTEXT=1 & EXPERT=2 & SLOTS=2 -> fine
TENSOR=1 & SEQUENCE=false & PIPELINE=1 & CONTEXT=1 & EXPERT=4 & SLOTS=4 -> fine
TENSOR=2 & SEQUENCE=true & PIPELINE=2 & FIRST_STAGE=3 & CONTEXT=2 & EXPERT=4 & SLOTS=8 -> fine
TENSOR=1 & SEQUENCE=false & PIPELINE=1 & CONTEXT=8 & EXPERT=1 & SLOTS=8 -> fine
# data sets
data.train.dataset_name=OpenMath -> no such data set is known; use one of
data.default.dataset_name=OpenMath -> no such data set is known
data.train.data_path=null => data.train.data_path is required -> has no default; set it in the config file or as data.
data.validation.data_path=null => data.validation.data_path is required -> set it in the config file or as data.validation.data_path=VALUE, or data.validation=null for a run without
data.train.data_path=no/such/file -> no such file or folder in -> correct the path: it names a .jsonl, .json, .parquet
data.default.processor=vlm_hf_data_processor -> this config trains on images
data.validation.processor=mine -> no such processor
data.validation.dataset_name=gpqa_diamond -> env_name=mcqa reads the letter
data.train.env_name=maths -> no such environment; use math, the nearest of math,
data.default.env_name=maths -> no such environment; use math, the nearest of math,
data.default.prompt_file=no.txt -> no such file in
data.validation.system_prompt_file=no.txt -> no such file in
data.train.repeat=0 -> out of range
data.train.split_validation_size=-0.1 -> out of range
data.max_bad_row_share=1.5 -> out of range
data.train=[] -> a list of data sets has one at least
data.train=[{data_path: prepared, repeat: 0}] => data.train.datasets[0].repeat=0 -> out of range
data.train=[{data_path: prepared}, {dataset_name: x}] => data.train.datasets[1].dataset_name=x -> no such data set is known
data.train=[{data_path: prepared, split_validation_size: -1}] => data.train.datasets[0].split_validation_size=-1 -> out of range
data.train.weight=0 -> out of range
data.train=[{data_path: prepared, weight: 2}, {data_path: prepared}] => data.train.datasets[1].weight=null -> to each data set, or to none
data.default.teacher_key=hint -> it is what a teacher is asked, and there is none
data.default.teacher_prompt_file=README.md -> set data.default.teacher_key, or this to null -> ...
data.train=[{data_path: prepared, env_name: x}] => data.train.datasets[0].env_name=x -> no such environment
# algorithms
policy.train_global_batch_size=256 & loss_fn.force_on_policy_ratio=true -> it is right for one update per step
loss_fn.sequence_level_importance_ratios=true -> set the latter to false
loss_fn.constant_length_normalizer=9 -> set the latter to false
loss_fn.disable_ppo_ratio=true & loss_fn.use_cispo=true -> leaves out the ratio
loss_fn.force_on_policy_ratio=true & loss_fn.use_cispo=true -> leaves out the ratio
loss_fn.ratio_clip_c=3 & loss_fn.use_cispo=true -> ratio_clip_c=3.0
loss_fn.token_level_loss=false & loss_fn.use_cispo=true -> averages over tokens
loss_fn.ratio_clip_c=3 & loss_fn.disable_ppo_ratio=true => loss_fn.ratio_clip_c=3.0 -> no ratio to clip
loss_fn.token_loss=mrl.algo.losses:cispo & loss_fn.use_cispo=true -> token_loss=mrl.algo.losses:cispo takes its place
loss_fn.token_loss=mrl.algo.losses:cispo & loss_fn.disable_ppo_ratio=true -> takes its place
loss_fn.ratio_clip_c=1 -> above 1
UNCORRECTED & TIS_type=tis -> set it to null
TIS_type=tis -> needs
TIS_ratio_min=0.5 -> needs
TIS_ratio=2 & TIS_ratio_min=3 => TIS_ratio_min=3.0 -> lower it
TIS_ratio=2 & TIS_type=icepop -> two bounds
TIS_ratio=2 & TIS_type=seq-mask-tis -> two bounds
GSPO & TIS_ratio=2 & TIS_ratio_min=0 & TIS_type=seq-mask-tis -> use tis or icepop
KL & loss_fn.use_kl_in_reward=true -> only ppo and reinforce_plus_plus
REINFORCE & loss_fn.use_kl_in_reward=true -> nothing to subtract
REINFORCE & KL & loss_fn.force_on_policy_ratio=true & loss_fn.use_kl_in_reward=true -> needs old logprobs
REINFORCE & KL & GENERATION.top_p=0.9 & loss_fn.use_kl_in_reward=true -> not truncated
grpo.advantage_clip_low=2 & grpo.advantage_clip_high=1 => grpo.advantage_clip_low=2.0 -> lower it
grpo.adv_estimator.reward_weights=[1.0] -> use gdpo
grpo.reward_scaling={enabled: true, source_min: 1.0} => grpo.reward_scaling.source_min=1.0 -> lower it
grpo.reward_shaping={enabled: true, max_response_length: 9} => grpo.reward_shaping.enabled=true -> overlong_buffer_penalty
reward_penalties.penalize_unwanted_tokens=true -> list the tokens
reward_penalties.token_ids.think_close=3 -> give both tokens
grpo.seq_logprob_error_threshold=0.5 -> at least 1
GSPO -> fine
GSPO & TIS_type=icepop & TIS_ratio=5 & TIS_ratio_min=0.5 -> fine
loss_fn.use_cispo=true & loss_fn.ratio_clip_max=5 -> fine
loss_fn.disable_ppo_ratio=true & grpo.normalize_rewards=false -> fine
loss_fn.token_level_loss=false & loss_fn.constant_length_normalizer=1024 & grpo.normalize_rewards=false -> fine
loss_fn.force_on_policy_ratio=true -> fine
loss_fn.force_on_policy_ratio=true & grpo.seq_logprob_error_threshold=2 & REINFORCE & loss_fn.use_kl_in_reward=true & KL -> fine
loss_fn.ratio_clip_c=3 & TIS_ratio=2 -> fine
TIS_type=seq-mask-tis & TIS_ratio=1.002 & TIS_ratio_min=0.999 -> fine
grpo.adv_estimator={name: gdpo, reward_weights: [1.0, 0.5]} -> fine
grpo.reward_shaping={enabled: true, overlong_buffer_length: 4, overlong_buffer_penalty: 1, max_response_length: 16} -> fine
grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0.0} & grpo.overlong_filtering=true -> fine
reward_penalties={penalize_unwanted_tokens: true, penalize_empty_final_answer: true, token_ids: {unwanted: [2]}} -> fine
grpo.advantage_clip_low=-2 & grpo.advantage_clip_high=2 & grpo.invalid_tool_call_advantage=-5.0 -> fine
grpo.async_grpo.enabled=true -> engines that share -> cannot sample while it trains
AHEAD & grpo.async_grpo.max_trajectory_age_steps=2 & UNCORRECTED -> rollouts up to -> =2 steps old -> set it to true
AHEAD & grpo.async_grpo.max_trajectory_age_steps=-1 -> out of range
AHEAD & grpo.async_grpo.max_generation_failures=-1 -> out of range
grpo.batch_multiplier=2 => grpo.batch_multiplier=2.0 -> without grpo.use_dynamic_sampling=true
grpo.use_dynamic_sampling=true & grpo.batch_multiplier=0.5 -> out of range
grpo.use_dynamic_sampling=true & grpo.dynamic_sampling_max_gen_batches=0 -> out of range
grpo.oversample=1.5 & loss_fn.use_importance_sampling_correction=true -> fine
grpo.oversample=2.5 -> out of range
grpo.oversample=1.01 -> of 32 prompts it adds none -> use 1.032 or more
grpo.oversample=1.5 & AHEAD => grpo.async_grpo.enabled=true -> it does not go with grpo.oversample=1.5 -> sample_freshest_first
grpo.oversample=1.5 & grpo.async_grpo.max_trajectory_age_steps=0 -> older than the weights -> use 1 or more
grpo.oversample=1.5 & policy.generation.colocated.enabled=false -> do not wait for the policy -> async_grpo.enabled=true
grpo.oversample=1.5 & grpo.async_grpo.max_trajectory_age_steps=2 & UNCORRECTED -> =2 steps old -> set it to true
grpo.oversample=1.5 & grpo.min_taken_length_ratio=0.8 -> fine
grpo.oversample=1.5 & grpo.min_taken_length_ratio=0 -> out of range
grpo.min_taken_length_ratio=0.8 -> without grpo.oversample above 1 -> raise the other
GENERATION.val_temperature=-1 -> out of range
grpo.stop_at_validation_threshold=0.9 & grpo.stop_at_validation_metric=pass_k -> val_num_generations_per_prompt=1 -> raise the latter
# what is trained
ADAPTERS & PEFT.target_modules=[q_proj] => PEFT.target_modules=['q_proj'] -> 'q_proj' names no linear layer
ADAPTERS & PEFT.exclude_modules=['*.linear_fc3'] -> '*.linear_fc3' names no
ADAPTERS & PEFT.exclude_modules=['*'] -> no layer is left to adapt
ADAPTERS & PEFT.target_modules=[in_proj] & PEFT.exclude_modules=[out_proj] => PEFT.exclude_modules=['out_proj'] -> it excludes layers
ADAPTERS & PEFT.lora_dtype=float32 & MEGATRON.optimizer.optimizer_cpu_offload=true => PEFT.lora_dtype -> loads bfloat16 -> ...
ADAPTERS & PEFT.lora_B_init_method=normal -> with peft.lora_A_init_method=xavier
ADAPTERS & PEFT.lora_A_init_method=zero => PEFT.lora_B_init_method=zero -> no gradient would ever reach the adapters
ADAPTERS & PEFT.lora_dtype=bfloat16 -> adapters cannot be coarser
ADAPTERS & MEGATRON.moe_router_bias_update_rate=0.001 -> an exported adapter would lack them
ADAPTERS & PEFT.dim=0 -> out of range
ADAPTERS & PEFT.dropout=1.0 -> out of range
ADAPTERS & PEFT.a2a_experimental=true -> what adapters exchange
MEGATRON.freeze_config.modules=[decoder.layers.0.mlp] => MEGATRON.freeze_config.modules=['decoder.layers.0.mlp'] -> matches no tensor
MEGATRON.freeze_config.modules=['*'] -> nothing is left to train
ADAPTERS -> fine
ADAPTERS & PEFT.target_modules=[linear_qkv,linear_proj,'*.layers.1.*.linear_fc1'] -> fine
ADAPTERS & PEFT.exclude_modules=[in_proj] & PEFT.lora_A_init_method=zero & PEFT.lora_B_init_method=kaiming -> fine
ADAPTERS & PEFT.lora_dtype=None & PEFT.dropout=0.1 & PEFT.dropout_position=pre -> fine
MEGATRON.freeze_config.modules=[backbone.embeddings.weight,'backbone.layers.0.*'] -> fine
PEFT.target_modules=[q_proj] -> fine
# routing
MEGATRON.moe_router_enable_expert_bias=false -> the model's routers have a bias -> leave it out
MEGATRON.moe_aux_loss_coeff=0.01 -> set it to 0
MEGATRON.moe_aux_loss_coeff=-1 -> at least 0
MEGATRON.moe_router_load_balancing_type=aux_loss -> above 0
MEGATRON.moe_enable_deepep=true -> set it to false
MEGATRON.moe_enable_deepep=false & DISPATCHER=flex -> DeepEP needs GPUs -> use alltoall
DISPATCHER=allgather & MEGATRON.moe_shared_expert_overlap=true -> set it to false
SELECTIVE & PARTS=[shared_experts] & MEGATRON.moe_shared_expert_overlap=true -> MEGATRON.recompute_modules -> set it to false
MEGATRON.moe_router_load_balancing_type=seq_aux_loss & MEGATRON.moe_aux_loss_coeff=1e-4 -> fine
MEGATRON.moe_router_dtype=null & DISPATCHER=allgather & MEGATRON.moe_shared_expert_overlap=false -> fine
MEGATRON.moe_shared_expert_overlap=true -> fine
MEGATRON.freeze_moe_router=true & MEGATRON.moe_router_dtype=fp32 & MEGATRON.moe_router_load_balancing_type=none -> fine
DISPATCHER=alltoall -> fine
MEGATRON.moe_router_bias_update_rate=1e-3 & MEGATRON.moe_permute_fusion=true & MEGATRON.moe_per_layer_logging=true -> fine
MEGATRON.moe_enable_deepep=false & MEGATRON.moe_aux_loss_coeff=0.0 & MEGATRON.moe_router_enable_expert_bias=true -> fine
MEGATRON.track_moe_metrics=true -> fine
checkpointing.allow_changes=[data] -> fine
GENERATION.top_p=0.9 & GENERATION.top_k=20 -> fine
# recomputing
SELECTIVE -> fine
SELECTIVE & PARTS=[core_attn, layernorm, moe, shared_experts] -> fine
SELECTIVE & PARTS=[moe_act] & cluster.gpus_per_node=8 -> fine
SELECTIVE & PARTS=[] -> it names nothing
SELECTIVE & PARTS=[moe, mamba] => PARTS=['moe', 'mamba'] -> 'mamba' is nothing that Megatron recomputes
SELECTIVE & PARTS=[mla_up_proj] => PARTS=['mla_up_proj'] -> the model has no latent attention
SELECTIVE & PARTS=[mlp] => PARTS=['mlp'] -> the model has no dense MLP layers
SELECTIVE & PARTS=[moe_act] => PARTS=['moe_act'] -> Transformer Engine's experts
MEGATRON.activation_checkpointing=true & PARTS=[moe] => PARTS=['moe'] -> recompute_granularity=full
PIPELINE=2 & FIRST_STAGE=3 & VIRTUAL=2 -> Megatron's hybrid models have no virtual stages; set it to null
# speculation, HTTP server, arguments of libraries
SPECULATE={method: eagle3, num_speculative_tokens: 2} => SPECULATE.method=eagle3 -> use method ngram, or none
SPECULATE={num_speculative_tokens: 2} => SPECULATE -> use method ngram, or none
SPECULATE={method: ngram, num_speculative_token: 1} => SPECULATE.num_speculative_token=1 -> no argument -> is num_speculative_tokens -> ...
SPECULATE={method: ngram, num_speculative_tokens: few} => SPECULATE.num_speculative_tokens=few -> not a value -> whole number
SPECULATE={method: ngram, num_speculative_tokens: 1, model: m} => SPECULATE.model=m -> a refit brings -> remove the key
SPECULATE={method: ngram, rejection_sample_method: synthetic} => SPECULATE.rejection_sample_method=synthetic -> remove the key -> ...
SPECULATE={method: ngram} => SPECULATE -> set num_speculative_tokens, for example to 1
SPECULATE={method: mtp, num_speculative_tokens: 1} => SPECULATE.method=mtp -> mrl converts 0 layers of multi-token prediction
SERVED & CHAT.tool_parser=qwen3_codr -> nearest is qwen3_coder
SERVED & CHAT.reasoning_parser=nemotron -> nearest is nemotron_v3
SERVED & CHAT.enable_auto_tools=true -> fine
SERVED & ENGINE.tool_parser_plugin=none.py -> correct the path
SERVED & GENERATION.port_range_low=4999 -> port_range_high=4999
CHAT.tool_parser=qwen3_codr -> fine
CHAT.reasoning_parser=nemotron -> fine
CHAT.enable_auto_tools=true -> fine
ENGINE.tool_parser_plugin=none.py -> fine
GENERATION.port_range_low=4999 -> fine
SERVED & CHAT={enable_auto_tools: true, tool_parser: qwen3_coder, reasoning_parser: nemotron_v3} -> fine
KWARGS.mamba_ssm_cache_dtyp=float32 -> no argument -> nearest is mamba_ssm_cache_dtype
KWARGS.mamba_ssm_cache_dtype=float8 -> not a value -> auto or bfloat16 or float16 or
KWARGS.block_size=many -> not a value -> use null or whole number
KWARGS.enable_chunked_prefill=1 -> not a value -> true or false
KWARGS.compilation_config.backends=eager -> no -> nearest is backend
KWARGS.compilation_config=3 -> not a value -> use mapping
SPECULATE=3 -> not a value -> use mapping
KWARGS.dtype=float32 -> set that
KWARGS.seed=1 -> grpo.seed
KWARGS.kv_cache_memory_bytes=1000 -> kv_cache_memory_mib
KWARGS.moe_backend=cutlas -> not a value -> cutlass
KWARGS.enable_eplb=0 -> remove the key
KWARGS.quantization=fp8 -> remove the key
KWARGS.quantization=fp8_per_channel -> set that to fp8
ENGINE.num_first_layers_in_bf16=1 -> set that to fp8
ENGINE.quantization_ignored_layer_kws=[o_proj] => ENGINE.quantization_ignored_layer_kws -> set that to fp8
ENGINE.use_deep_gemm=true -> set that to fp8
ENGINE.precision=fp8 -> fine
ENGINE.precision=fp8 & KWARGS.quantization=fp8_per_tensor & ENGINE.num_last_layers_in_bf16=1 -> fine
ENGINE.precision=fp8 & KWARGS.quantization=fp8_per_block => KWARGS.quantization=fp8_per_block -> not of whole blocks -> use fp8_per_channel
ENGINE.is_mx=true -> set that to fp8
ENGINE.precision=fp8 & ENGINE.is_mx=true => ENGINE.is_mx -> not of whole blocks -> quantization=fp8_per_channel
ENGINE.precision=fp8 & ENGINE.is_mx=true & KWARGS.quantization=fp8_per_channel => ENGINE.is_mx -> is another form
ENGINE.pow2_weight_scaling_factors=true -> powers of two is not built
KWARGS.min_p=0.1 => KWARGS.min_p -> temperature, top_p and top_k alone
checkpointing.metric_name=val:right => checkpointing.metric_name -> use val:accuracy
OVERRIDES.deterministic_mod=true -> nearest is deterministic_mode
OVERRIDES.deterministic_mode=1 -> true or false
OVERRIDES.moe_permute_fusion=false -> set MEGATRON.moe_permute_fusion
OVERRIDES.hidden_size=128 -> config.json
OVERRIDES.moe_router_fusion=true & policy.router_replay.enabled=true => OVERRIDES.moe_router_fusion -> chooses by itself
OVERRIDES.moe_router_fusion=true -> fine
VARIABLES.MASTER_PORT=1 => VARIABLES.MASTER_PORT -> remove it
VARIABLES.RAY_ADDRESS=x => VARIABLES.RAY_ADDRESS -> remove it
VARIABLES={A\\ B: x} => VARIABLES.A B -> correct it
KWARGS={mamba_ssm_cache_dtype: float32, compilation_config: {backend: eager}} -> fine
KWARGS.compilation_config={mode: 0, cudagraph_mode: NONE, cudagraph_capture_sizes: [1, 2]} -> fine
KWARGS.max_num_queued_reqs=null -> fine
KWARGS.watermark=0 -> fine
KWARGS={moe_backend: triton, expert_placement_strategy: linear, enable_eplb: false} -> fine
OVERRIDES={deterministic_mode: true, cp_comm_type: a2a, microbatch_group_size_per_vp_stage: 2} -> fine
VARIABLES={NCCL_DEBUG: INFO, N: 1} -> fine
ENGINE.env_vars={VLLM_LOGGING_LEVEL: INFO} -> fine
SPECULATE={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4} -> fine
NEXT_num_layers=5 & NEXT_loss_scaling_factor=0.0 & NEXT_use_repeated_layer=true -> fine
NEXT_num_layers=0 & NEXT_loss_scaling_factor=0.3 -> fine
NEXT_num_layers=1 -> the model has no MTP layers (num_nextn_predict_layers of its config.json); set it to 0
[grpo_tiny.yaml {"num_nextn_predict_layers": 1}]
NEXT_num_layers=1 -> fine
NEXT_num_layers=5 & NEXT_use_repeated_layer=true & NEXT_detach_heads=true -> fine
SPECULATE={method: mtp, num_speculative_tokens: 3} & policy.router_replay.enabled=true -> fine
SPECULATE={method: deepseek_mtp, num_speculative_tokens: 1} => SPECULATE.method=deepseek_mtp -> use method mtp or ngram, or none
NEXT_num_layers=5 -> set it to 1, or NEXT_use_repeated_layer to true
ADAPTERS & NEXT_num_layers=1 -> or train without adapters
NEXT_num_layers=-1 -> at least 0
[rm_tiny.yaml {"num_nextn_predict_layers": 1}]
NEXT_num_layers=1 -> a reward model predicts no tokens
[grpo_tiny.yaml {"num_nextn_predict_layers": 2}]
NEXT_num_layers=1 -> the model has MTP layers for 2 tokens
NEXT_num_layers=5 & NEXT_use_repeated_layer=true -> set it to false, and NEXT_num_layers to 2
SPECULATE={method: mtp, num_speculative_tokens: 2} => SPECULATE.method=mtp -> drafter has 1; use ngram
[grpo_tiny.yaml {"hybrid_override_pattern": "M-M*-M-"}]
EXPERT=1 & ENGINE.tensor_parallel_size=2 -> fine
EXPERT=1 & ENGINE.tensor_parallel_size=2 & ENGINE.expert_parallel_size=2 -> the model has 0 experts; set it to 1
EXPERT=1 & policy.router_replay.enabled=true -> the model has no experts, so nothing is routed; set it to false
[grpo_tiny.yaml {"hybrid_override_pattern": "M*EM*EM"}]
ENGINE.pipeline_parallel_size=2 & ENGINE.tensor_parallel_size=2 -> fine
ENGINE.pipeline_parallel_size=4 -> stage 0 of the model's 7 layers would have none with experts
policy.router_replay.enabled=true & ENGINE.pipeline_parallel_size=2 -> vLLM tells no routes of an engine with pipeline stages
SPECULATE={method: ngram, num_speculative_tokens: 2} & ENGINE.pipeline_parallel_size=2 -> proposed tokens are proven only
[grpo_tiny.yaml {"moe_latent_size": 32}]
MEGATRON.moe_shared_expert_overlap=true -> latent
[grpo_tiny.yaml {"hybrid_override_pattern": "MEM*E-E", "intermediate_size": 129}]
grpo.seed=1 => policy.megatron_cfg.tensor_model_parallel_size=2 -> 129 columns of an MLP
[grpo_tiny.yaml {"intermediate_size": 129}]
grpo.seed=1 -> fine
[grpo_tiny.yaml {QWEN3_MOE, "num_hidden_layers": 8, "mlp_only_layers": [0]}]
SELECTIVE & PARTS=[moe, mlp] -> fine
[grpo_tiny.yaml {QWEN3_MOE, "num_hidden_layers": 8}]
grpo.seed=1 -> fine
SELECTIVE & PARTS=[moe] -> fine
SELECTIVE & PARTS=[moe, shared_experts] => PARTS=['moe', 'shared_experts'] -> the model has no shared experts -> leave it out
ADAPTERS & PEFT.merge=false & PEFT.target_modules=[linear_qkv, linear_proj] -> fine
ADAPTERS & PEFT.merge=false => PEFT.merge -> not of decoder.layers.0.mlp.experts.linear_fc1 -> or name other layers
PIPELINE=2 & VIRTUAL=4 -> fine
PIPELINE=2 & VIRTUAL=2 & FIRST_STAGE=6 -> fine
VIRTUAL=1 -> fine
PIPELINE=2 & VIRTUAL=3 -> does not divide the layers of each stage [4, 4]
PIPELINE=2 & FIRST_STAGE=3 & VIRTUAL=2 -> does not divide the layers of each stage [3, 5]
PIPELINE=2 & FIRST_STAGE=2 & MEGATRON.num_layers_in_last_pipeline_stage=6 & VIRTUAL=2 -> a third stage
VIRTUAL=2 -> needs pipeline_model_parallel_size of at least 2
[sft_tiny.yaml]
ENGINE.enforce_eager=false -> fine
checkpointing.metric_name=null -> fine
checkpointing.metric_name=val:accuracy & checkpointing.enabled=false -> fine
checkpointing.allow_changes=[model] -> fine
checkpointing.allow_changes=[model,data] => checkpointing.allow_changes=['model', 'data'] -> sft takes rows by their place in the data
policy.reward_model_cfg.enabled=true -> it follows from algorithm=sft
checkpointing.metric_name=val:accuracy -> algorithm=sft has no such metric
sft.max_num_steps=0 -> the run would train nothing
policy.router_replay.enabled=true -> algorithm=sft has no engines
[dpo_tiny.yaml]
grpo.seed=1 -> fine
dpo.preference_loss_weight=0 => dpo.preference_loss_weight=0.0 -> with dpo.sft_loss_weight=0
[rm_tiny.yaml]
policy.reward_model_cfg.enabled=true -> fine
policy.reward_model_cfg.enabled=false -> it follows from algorithm=rm
ADAPTERS -> adapters freeze
DDP.overlap_param_gather=false & MEGATRON.optimizer.use_distributed_optimizer=false & PIPELINE=2 => DDP.overlap_g -> copy of tied -> ...
[ppo_tiny.yaml]
CRITIC.num_layers_in_first_pipeline_stage=4 -> fine
CRITIC.num_layers_in_first_pipeline_stage=4 & ppo.num_generations_per_prompt=1 & ppo.num_prompts_per_step=512 -> fine
CRITIC.peft.enabled=true -> adapters freeze
value.max_total_sequence_length=100 -> the critic reads sequences of policy.max_
value.train_global_batch_size=511 -> the 512 rollouts of a step
CRITIC.optimizer.min_lr=1.0 -> must be at most CRITIC.
CRITIC.pipeline_model_parallel_size=3 -> ...
grpo.adv_estimator.name=gdpo -> algorithm=ppo compares tokens with the critic's values
CRITIC.env_vars={A: b} => CRITIC.env_vars={'A': 'b'} -> policy and critic share processes
CRITIC.mtp_num_layers=2 -> a critic predicts no tokens
MEGATRON.optimizer.min_lr=1 & CRITIC.optimizer.min_lr=1.0 -> must be at most CRITIC. -> ...
loss_fn.use_kl_in_reward=true -> loss_fn.reference_policy_kl_penalty=0 leaves nothing
grpo.reward_shaping.enabled=true -> it needs grpo.reward_shaping.overlong_buffer_length
ppo.ppo_epochs=1 & policy.train_global_batch_size=128 & loss_fn.force_on_policy_ratio=true -> it is right for one update per step
loss_fn.force_on_policy_ratio=true -> it is right for one update per step
ppo.num_generations_per_prompt=1 & ppo.use_dynamic_sampling=true => grpo.num_generations_per_prompt=1 -> ...
++value.tokenizer={name: other} => value.tokenizer.name=other -> the critic reads the tokens that the policy does
++value.hf_config_overrides={rope_theta: 1} => value.hf_config_overrides.rope_theta=1 -> the critic's config.json is taken as it is
value.generation.backend=vllm -> no such key
CRITIC.fp8_cfg.enabled=true -> only Transformer Engine computes in FP8 -> set it to false
ppo.adv_estimator.name=raw_reward -> no other estimator gives returns to train a critic on
ppo.adv_estimator.gae_lambda=1.1 -> out of range
"""


def spelled(text: str) -> str:
    """A text with keys in place of their short names."""
    for name, key in NAMES.items():
        text = re.sub(rf"\b{name}(?![A-Z])", key, text)
    return text


def rows() -> Iterator[tuple[str, str, list[str], str, list[str]]]:
    """Config, model, overrides, start of the problem and further words of each row."""
    config, model = "", ""
    for line in TABLE.strip().splitlines():
        if line.startswith("["):
            config, _, model = spelled(line[1:-1]).partition(" ")
        elif not line.startswith("#"):
            left, *words = spelled(line).split(" -> ")
            changes, _, start = left.partition(" => ")
            overrides = changes.split(" & ")
            yield config, model, overrides, start or overrides[-1].lstrip("+"), words


@pytest.mark.parametrize(("name", "model", "overrides", "start", "words"), list(rows()), ids=lambda it: str(it)[:60])
def test_a_config_is_told_the_key_the_rule_and_the_way_out(
    workplace: Path, name: str, model: str, overrides: list[str], start: str, words: list[str]
):
    if model:
        path = workplace / "prepared/tiny/model/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(model)))
    problems = found_with(*overrides, name=name)
    if words == ["fine"]:
        assert problems == []
        return
    wanted = {*words} - {"..."}
    told = [
        problem
        for problem in problems
        if (text := text_of(problem)).startswith(start) and all(word in text for word in wanted)
    ]
    assert told, problems
    others = {other.kind for other in problems if other is not told[0]}
    assert words[-1] == "..." or others <= {"not checked"}, problems
