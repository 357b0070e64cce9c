# SPDX-License-Identifier: Apache-2.0
"""Sections of PPO: `ppo`, `value`, `value_loss_fn`. Section `grpo` has the keys of rollouts and rewards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from mrl.config.fields import AtLeastTwo, Count, NotNegative, Only, Positive, Precision, Share, follows
from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.policy import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig

OF_GROUPS = ("grpo", "gdpo", "reinforce_plus_plus", "opd", "raw_reward")
"""Estimators of advantages without a critic."""


@dataclass
class GaeConfig:
    """Generalised advantage estimation (arXiv:1506.02438) over the tokens of each rollout."""

    name: Annotated[str, Only("gae", "no other estimator gives returns to train a critic on", OF_GROUPS)] = "gae"
    """The one estimator that uses a critic."""
    gae_lambda: Share = 0.95
    """Horizon of an advantage past the critic's next value: 0 = one token, 1 = to the reward."""
    gae_gamma: Share = 1.0
    """Discount: worth of a reward one token later."""
    normalize_advantages: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over the valid tokens of a step."""
    gae_lambda_value: Share | None = None
    """`gae_lambda` of the returns that the critic learns, as 1.0 in VAPO (arXiv:2504.05118); null = gae_lambda."""
    gae_lambda_policy: Share | None = None
    """`gae_lambda` of the advantages that the policy learns from; null = gae_lambda."""
    length_adaptive_alpha: NotNegative = 0.0
    """Above 0, gae_lambda_policy is 1 - 1 / (this * generated tokens of the rollout); 0 = it is as above."""


@dataclass
class PpoConfig:
    """PPO's own keys; those in common with GRPO are in section `grpo`. A critic estimates each token's return."""

    ppo_epochs: Positive = 4
    """Passes over the rollouts of a step, each with all its updates. The learning rates' schedules count passes."""
    policy_training_start_step: Count = 0
    """Steps at the start in which the critic is trained alone."""
    adv_estimator: GaeConfig = field(default_factory=GaeConfig)


@dataclass
class ValueLossConfig:
    scale: NotNegative = 1.0
    """Weight of the loss of values."""
    cliprange: NotNegative | None = None
    """The loss does not reward moving values farther than this from those before the step's updates; 0 or null = no
    bound.
    """


@dataclass
class ValueConfig:
    """The critic: a model with a head that gives one number at each token. It reads the policy's tokens, on its GPUs.

    Keys as in `policy`. A default that takes a value from `policy` elsewhere in these tables takes it from `value`
    here.
    """

    model_name: str = follows("policy.model_name")
    """Folder of the critic's starting model, or its id on the Hub; it must have the policy's tokenizer."""
    train_global_batch_size: Positive = follows("policy.train_global_batch_size")
    """Sequences per optimizer step of the critic."""
    train_micro_batch_size: Positive = follows("policy.train_micro_batch_size")
    """Longest sequences that fit into a row in training; without packing and dynamic batching, the sequences
    of a row.
    """
    logprob_batch_size: Positive = follows("value.train_micro_batch_size")
    """Longest sequences that fit into a row of the pass that computes values before the updates."""
    max_total_sequence_length: AtLeastTwo = follows("policy.max_total_sequence_length")
    """Longest prompt plus rollout, in tokens: at least the policy's."""
    make_sequence_length_divisible_by: Positive = follows("value.megatron_cfg.tensor_model_parallel_size")
    """Packed rows are padded to a multiple of this, and of what parallelism needs."""
    precision: Precision = follows("policy.precision")
    """Type of weights and activations."""
    max_grad_norm: NotNegative = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = field(default_factory=DynamicBatchingConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)

    def beside(self, policy: PolicyConfig) -> PolicyConfig:
        """Gives the critic's keys in the policy's form. Tokenizer and generation, which it lacks, are the policy's."""
        return replace(
            policy,
            model_name=self.model_name,
            train_global_batch_size=self.train_global_batch_size,
            train_micro_batch_size=self.train_micro_batch_size,
            logprob_batch_size=self.logprob_batch_size,
            max_total_sequence_length=self.max_total_sequence_length,
            make_sequence_length_divisible_by=self.make_sequence_length_divisible_by,
            precision=self.precision,
            max_grad_norm=self.max_grad_norm,
            sequence_packing=self.sequence_packing,
            dynamic_batching=self.dynamic_batching,
            megatron_cfg=self.megatron_cfg,
            hf_config_overrides=policy.hf_config_overrides if self.model_name == policy.model_name else {},
            logprob_chunk_size=None,
        )
