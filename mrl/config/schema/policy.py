# SPDX-License-Identifier: Apache-2.0
"""Section `policy`: the model, its batches, and the two libraries that run it. See `mrl.config.schema.run`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from mrl.config.fields import AboveZero, AtLeastTwo, NotNegative, Positive, Precision, follows, required
from mrl.config.schema.generation import GenerationConfig
from mrl.config.schema.megatron import MegatronConfig

_MTP_CHUNK_TOKENS = 1024
# Tokens of a rank that HybridEP's kernels take at a time (NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API of DeepEP).
_HYBRIDEP_CHUNK_TOKENS = 128
FP8_ROWS = {"blockwise": 128, "tensorwise": 16, "delayed": 16, "mxfp8": 32}
"""A rank's tokens are a multiple of this, by recipe: gradients of weights are products over tokens, in such blocks."""

ShareOrNot = bool | Literal["auto"]
PackingAlgorithm = Literal[
    "balanced", "modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"
]


@dataclass
class TokenizerConfig:
    name: str = follows("policy.model_name")
    """Folder of the tokenizer, or an id on the Hub."""
    chat_template: str | None = "default"
    """default = the tokenizer's own; else a template in Jinja, or the path of a .jinja file; null = messages are joined
    as they are.
    """
    chat_template_kwargs: dict[str, Any] | None = None
    """Values for variables of the chat template, such as enable_thinking; null = none."""
    template_date: str | None = None
    """Date that the chat template writes as today's, as 2026-01-31; null = the day of the run's first start, kept in
    its identity.
    """


@dataclass
class SequencePackingConfig:
    enabled: bool = True
    """Pack sequences into rows of a number of tokens. false: train_micro_batch_size and logprob_batch_size sequences a
    row.
    """
    train_mb_tokens: Positive = follows("mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}")
    """Tokens of a packed row in training. Of pairs of answers (dpo, rm) a row holds as many of each kind."""
    logprob_mb_tokens: Positive = follows("mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}")
    """Tokens of a packed row in logprob passes. Another number than train_mb_tokens gives these passes rows of their
    own.
    """
    algorithm: PackingAlgorithm = "balanced"
    """balanced: equal tokens and work for each data-parallel rank, then rows. Others: rows first (compared in
    docs/measured).
    """
    microbatch_order: Literal["packer", "largest_first"] = "packer"
    """Order of the rows of a rank: as the algorithm made them, or by their tokens, most first, so that memory is at its
    peak at once.
    """
    sequence_length_round: Positive = 64
    """Row lengths are rounded up to a multiple of this, which bounds the number of different shapes."""


@dataclass
class RouterReplayConfig:
    enabled: bool = False
    """Train with the engine's choice of experts, so that routing adds no mismatch. The reference model routes by
    itself. MoE only.
    """


@dataclass
class DynamicBatchingConfig:
    enabled: bool = False
    """Fill rows with sequences of similar length. Excludes sequence_packing.enabled, which fills them better."""
    train_mb_tokens: Positive = follows("mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}")
    """Tokens of a row in training, every sequence counted as long as the row's longest."""
    logprob_mb_tokens: Positive = follows("mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}")
    """Tokens of a row in logprob passes, every sequence counted as long as the row's longest."""
    sequence_length_round: Positive = 64
    """The longest sequence of a row, and the row itself, are rounded up to a multiple of this."""


@dataclass
class RewardModelConfig:
    enabled: bool | None = None
    """The model has a reward head in place of its output layer. Follows from `algorithm`: null, or true
    exactly for rm.
    """
    reward_model_type: Literal["bradley_terry"] = "bradley_terry"
    """Model of the probability that one answer is preferred to another, from their rewards."""


@dataclass
class PolicyConfig:
    model_name: str = required()
    """Folder of the starting model in Hugging Face format, or its id on the Hub."""
    hf_config_overrides: dict[str, Any] = field(default_factory=dict)
    """Other values of the model's config.json for trainer, engines and export, such as `rope_scaling` for YaRN. Tensors
    stay the same.
    """
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train_global_batch_size: Positive = follows("mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}")
    """Sequences per optimizer step (dpo, rm: pairs). In GRPO it divides a step's rollouts, which then make several
    updates in order.
    """
    train_micro_batch_size: Positive = 1
    """Longest sequences that fit into a row in training; without packing and dynamic batching, the sequences
    of a row.
    """
    logprob_batch_size: Positive = follows("policy.train_micro_batch_size")
    """Longest sequences that fit into a row of logprob passes; without packing and dynamic batching, its sequences."""
    logprob_chunk_size: Positive | None = None
    """Tokens whose logits are in memory at once; training then computes the output layer twice. null = all of a row,
    kept for backward.
    """
    max_total_sequence_length: AtLeastTwo = 512
    """Longest prompt plus rollout, in tokens."""
    make_sequence_length_divisible_by: Positive = follows("policy.megatron_cfg.tensor_model_parallel_size")
    """Packed rows are padded to a multiple of this, and of what parallelism needs: of TP, under sequence
    parallelism.
    """
    precision: Precision = "float32"
    """Type of weights and activations."""
    max_grad_norm: NotNegative = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    not_finite_steps: Literal["stop", "skip"] = "stop"
    """An update whose loss or gradient is NaN or Inf changes nothing, and its batch is recorded. The run stops, or
    skips the update.
    """
    max_skipped_steps: Positive = 10
    """With `not_finite_steps=skip`, the run saves and ends with exit code 1 after this many steps in a row with a
    skipped update."""
    offload_optimizer_for_logprob: bool = False
    """Keep gradients and optimizer off the GPUs outside of train steps, also where engines have their own GPUs."""
    refit_buffer_size_gb: AboveZero = 0.25
    """Exchange buffer of a GPU or policy rank during a refit, in GB (10^9 bytes), for two rounds at a time. Smaller =
    more rounds.
    """
    share_prefixes: ShareOrNot = "auto"
    """Compute a beginning that sequences of a packed row have in common once, as the prompt of a group, with the same
    result; row lengths then count it once. auto = in batches where that saves enough tokens, if the run allows it.
    """
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    reward_model_cfg: RewardModelConfig = field(default_factory=RewardModelConfig)
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    dynamic_batching: DynamicBatchingConfig = field(default_factory=DynamicBatchingConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    @property
    def output_chunk_tokens(self) -> int | None:
        """Tokens for which the output layer is computed at a time; None = a whole packed row."""
        megatron = self.megatron_cfg
        given = (
            megatron.fused_linear_logprobs_chunk_size if megatron.use_fused_linear_logprobs else self.logprob_chunk_size
        )
        # The logits of all MTP steps at once would be several times the model's.
        return given or (_MTP_CHUNK_TOKENS if megatron.trains_mtp else None)

    @property
    def sequence_multiple(self) -> int:
        """Rows pad each sequence to a multiple of this many tokens: context parallelism cuts it into 2 * CP chunks."""
        cp = self.megatron_cfg.context_parallel_size
        return 1 if cp == 1 else 2 * cp

    @property
    def longest_row(self) -> int:
        """Tokens of a row that holds one sequence as long as any may be."""
        return math.ceil(self.max_total_sequence_length / self.row_multiple) * self.row_multiple

    @property
    def row_multiple(self) -> int:
        """Rows are padded to a multiple of this many tokens."""
        megatron = self.megatron_cfg
        parts = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
        fills_rows = self.sequence_packing if self.sequence_packing.enabled else self.dynamic_batching
        length_round = fills_rows.sequence_length_round if fills_rows.enabled else 1
        of_rank = math.lcm(
            _HYBRIDEP_CHUNK_TOKENS if megatron.uses_hybridep else 1,
            FP8_ROWS[megatron.fp8_cfg.fp8_recipe] if megatron.fp8_cfg.enabled else 1,
        )
        return math.lcm(
            self.make_sequence_length_divisible_by,
            length_round,
            self.sequence_multiple * parts,
            of_rank * megatron.context_parallel_size * parts,
        )
