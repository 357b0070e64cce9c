# SPDX-License-Identifier: Apache-2.0
"""Section `judges`: models that judge rollouts, in engines of their own. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mrl.config.fields import AtLeastTwo, Positive, Precision, ShareAboveZero, follows, required


@dataclass
class JudgeConfig:
    """A judge. Its engines have nodes to themselves, and no refit changes them."""

    model_name: str = required()
    """Folder of the judge in Hugging Face format, or its id on the Hub."""
    num_nodes: Positive = 1
    """Nodes of `cluster.num_nodes` that its engines have to themselves."""
    precision: Precision = follows("policy.precision")
    """Type of its weights."""
    tensor_parallel_size: Positive = 1
    """TP of an engine, which takes a part of a node, or whole nodes."""
    pipeline_parallel_size: Positive = 1
    """Pipeline stages of an engine."""
    expert_parallel_size: Positive = 1
    """Workers over which whole experts are spread: see `policy.generation.vllm_cfg.expert_parallel_size`."""
    max_model_len: AtLeastTwo = follows("policy.max_total_sequence_length")
    """Longest question plus answer, in tokens."""
    max_num_seqs: Positive | None = None
    """Questions that an engine answers at the same time; null = its part of the run's rollouts, as far as they fit."""
    gpu_memory_utilization: ShareAboveZero = 0.9
    """Share of a GPU that an engine takes."""
    enforce_eager: bool = follows("policy.generation.vllm_cfg.enforce_eager")
    """No CUDA graphs. Must be true on hosts without GPUs."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Values for variables of its chat template, where a question gives no others."""
    tool_parser: str | None = None
    """vLLM's name of a parser of its tool calls; null = it gets no tools."""
    reasoning_parser: str | None = None
    """vLLM's name of a parser of its thoughts; null = they stay in the text."""
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM: see `policy.generation.vllm_kwargs`."""

    @property
    def num_workers(self) -> int:
        """Workers of an engine."""
        return self.pipeline_parallel_size * max(self.tensor_parallel_size, self.expert_parallel_size)
