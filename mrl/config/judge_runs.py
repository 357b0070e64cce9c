# SPDX-License-Identifier: Apache-2.0
"""Judges as the engines of the run's code see them: runs whose policy is the judge."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

from mrl.config.errors import prefix_of
from mrl.config.schema.generation import ColocatedConfig, EngineResourcesConfig, GenerationConfig, ServingChatConfig
from mrl.config.schema.megatron import PeftConfig
from mrl.config.schema.policy import PolicyConfig, RouterReplayConfig, TokenizerConfig
from mrl.config.schema.run import RunConfig

SAME_NAME = (
    *("precision", "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
    *("max_model_len", "max_num_seqs", "gpu_memory_utilization", "enforce_eager"),
)
"""Keys of a judge that `policy.generation.vllm_cfg` has under the same name."""


def judge_run(config: RunConfig, name: str) -> RunConfig:
    """A run whose policy is the judge of this name, on engines of its own, and that has no other model."""
    judge, defaults, slots = config.judges[name], GenerationConfig(), config.cluster.slots_per_node
    given = {key: getattr(judge, key) for key in SAME_NAME}
    chat = ServingChatConfig(
        chat_template="default",
        enable_auto_tools=judge.tool_parser is not None,
        tool_parser=judge.tool_parser,
        reasoning_parser=judge.reasoning_parser,
    )
    vllm = dataclasses.replace(
        defaults.vllm_cfg,
        **given,
        kv_cache_memory_mib=config.policy.generation.vllm_cfg.kv_cache_memory_mib,
        expose_http_server=True,
        http_server_share=1.0,
        http_server_serving_chat_kwargs=chat,
    )
    nodes = EngineResourcesConfig(num_nodes=judge.num_nodes if config.cluster.gpus_per_node else None)
    generation = dataclasses.replace(
        defaults,
        max_new_tokens=judge.max_model_len,
        val_temperature=defaults.temperature,
        val_top_p=defaults.top_p,
        val_top_k=defaults.top_k,
        num_cpu_engines=max(1, judge.num_nodes * slots // judge.num_workers),
        colocated=ColocatedConfig(enabled=False, resources=nodes),
        vllm_cfg=vllm,
        vllm_kwargs=judge.vllm_kwargs,
    )
    policy: PolicyConfig = dataclasses.replace(
        config.policy,
        model_name=judge.model_name,
        hf_config_overrides={},
        tokenizer=TokenizerConfig(name=judge.model_name, chat_template_kwargs=judge.chat_template_kwargs),
        max_total_sequence_length=judge.max_model_len,
        precision=judge.precision,
        router_replay=RouterReplayConfig(),
        generation=generation,
        megatron_cfg=dataclasses.replace(config.policy.megatron_cfg, peft=PeftConfig()),
    )
    return dataclasses.replace(
        config, algorithm="grpo", policy=policy, judges={}, teacher=None, on_policy_distillation=None
    )


def with_judge_folders(config: RunConfig, folder_of: Callable[[str], Path | None]) -> RunConfig:
    """A copy of the config with the folders of its judges; None: the name stays. ValueError names the judge's key."""
    changed, judges = copy.copy(config), {}
    for name, judge in config.judges.items():
        try:
            folder = folder_of(judge.model_name)
        except ValueError as error:
            raise ValueError(f"judges.{name}.model_name={error}") from error
        judges[name] = dataclasses.replace(judge, model_name=str(folder or judge.model_name))
    changed.judges = judges
    return changed


def named_models(config: RunConfig) -> dict[str, str]:
    """Folder or Hub id of each model of the run, by its key as messages write it."""
    found = {f"{prefix_of(model)}model_name": section.model_name for model, section in config.sections.items()}
    return found | {f"judges.{name}.model_name": judge.model_name for name, judge in config.judges.items()}
