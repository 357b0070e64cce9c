# SPDX-License-Identifier: Apache-2.0
"""Section `reference`: nodes of its own for the model that the KL term compares with. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mrl.config.fields import Count, Positive, follows
from mrl.config.schema.policy import PolicyConfig


@dataclass
class ReferenceLayoutConfig:
    """Layout of the reference on its own nodes: keys of `policy.megatron_cfg`, with that section's values by default.

    The reference has all other keys from there.
    """

    tensor_model_parallel_size: Positive = follows("policy.megatron_cfg.tensor_model_parallel_size")
    """TP: ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Positive = follows("policy.megatron_cfg.pipeline_model_parallel_size")
    """PP: stages of consecutive layers."""
    context_parallel_size: Positive = follows("policy.megatron_cfg.context_parallel_size")
    """CP: ranks that share each sequence, padded to a multiple of 2 x CP tokens; rows are, under SP, to one of 2 x CP x
    TP.
    """
    expert_model_parallel_size: Positive = follows("policy.megatron_cfg.expert_model_parallel_size")
    """EP: ranks over which the experts of a layer are spread."""
    expert_tensor_parallel_size: Positive = follows("policy.megatron_cfg.expert_tensor_parallel_size")
    """ETP: ranks that share each expert's matrices."""
    sequence_parallel: bool = follows("policy.megatron_cfg.sequence_parallel")
    """Shard activations between the TP regions along the sequence. Required for mixture-of-experts models
    with TP > 1.
    """
    num_layers_in_first_pipeline_stage: Positive | None = follows(
        "policy.megatron_cfg.num_layers_in_first_pipeline_stage"
    )
    """Layers of the first stage; null = as many as the others."""
    num_layers_in_last_pipeline_stage: Positive | None = follows(
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage"
    )
    """Layers of the last stage; null = as many as the others."""
    virtual_pipeline_model_parallel_size: Positive | None = follows(
        "policy.megatron_cfg.virtual_pipeline_model_parallel_size"
    )
    """VPP: parts of each stage, interleaved over the stages to keep them busy; null = 1. Not for hybrid models."""


@dataclass
class ReferenceConfig:
    num_nodes: Count = 0
    """Nodes of `cluster.num_nodes` that the reference has to itself: it keeps its weights there, and computes beside
    the policy; 0 = policy ranks keep a copy in host memory. Of grpo and ppo with a KL term, without LoRA.
    """
    megatron_cfg: ReferenceLayoutConfig = field(default_factory=ReferenceLayoutConfig)

    def beside(self, policy: PolicyConfig) -> PolicyConfig:
        """The reference's keys in the policy's form. Its rows are the policy's, and share prefixes if both can."""
        own = self.megatron_cfg
        same_cut = own.context_parallel_size == policy.megatron_cfg.context_parallel_size
        layout = replace(
            policy.megatron_cfg,
            tensor_model_parallel_size=own.tensor_model_parallel_size,
            pipeline_model_parallel_size=own.pipeline_model_parallel_size,
            context_parallel_size=own.context_parallel_size,
            expert_model_parallel_size=own.expert_model_parallel_size,
            expert_tensor_parallel_size=own.expert_tensor_parallel_size,
            sequence_parallel=own.sequence_parallel,
            num_layers_in_first_pipeline_stage=own.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=own.num_layers_in_last_pipeline_stage,
            virtual_pipeline_model_parallel_size=own.virtual_pipeline_model_parallel_size,
        )
        return replace(policy, megatron_cfg=layout, share_prefixes=policy.share_prefixes if same_cut else False)
