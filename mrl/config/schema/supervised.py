"""Sections of training without rollouts: `sft`, `dpo`, `rm`. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.fields import follows


@dataclass
class SftConfig:
    max_num_epochs: int = 1
    """The run ends after this many passes over the training rows."""
    max_num_steps: int = 60
    """The run ends after this many steps in all, those before a resume included; -1 = with the last epoch."""
    val_period: int = 10
    """Validate every this many steps; 0 = never."""
    val_batches: int = 8
    """Validate on the first this many batches of the file; 0 or -1 = on all."""
    val_global_batch_size: int = 32
    """Rows of a validation batch."""
    val_micro_batch_size: int = 1
    """In validation, what `policy.train_micro_batch_size` is in training: without packing, the sequences of a row."""
    val_at_start: bool = True
    """Validate before the first update (step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: int = 42
    """Seed of the run: data order. Config and seed fix the run bit for bit on CPU."""
    only_unmask_final: bool = False
    """Learn the last assistant message of a conversation alone; false = all of them."""


@dataclass
class DpoConfig:
    max_num_epochs: int = 1
    """The run ends after this many passes over the training pairs."""
    max_num_steps: int = 150
    """The run ends after this many steps in all, those before a resume included; -1 = with the last epoch."""
    val_period: int = 25
    """Validate every this many steps; 0 = never."""
    val_batches: int = 8
    """Validate on the first this many batches of the file; 0 or -1 = on all."""
    val_global_batch_size: int = 8
    """Pairs of a validation batch."""
    val_micro_batch_size: int = 1
    """In validation, what `policy.train_micro_batch_size` is in training: without packing, the pairs of a row."""
    val_at_start: bool = True
    """Validate before the first update (step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: int = 42
    """Seed of the run: data order. Config and seed fix the run bit for bit on CPU."""
    reference_policy_kl_penalty: float = 0.05
    """Beta of the preference loss (arXiv:2305.18290): how strongly the policy is held to the starting model."""
    preference_average_log_probs: bool = False
    """Compare means over tokens, not sums, of log-probabilities in the preference loss."""
    sft_average_log_probs: bool = follows("dpo.preference_average_log_probs")
    """The same in the SFT loss."""
    preference_loss_weight: float = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: float = 0.0
    """Weight of the negative log-likelihood of the chosen answers, added to the preference loss."""


@dataclass
class RmConfig:
    max_num_epochs: int = 1
    """The run ends after this many passes over the training pairs."""
    max_num_steps: int = -1
    """The run ends after this many steps in all, those before a resume included; -1 = with the last epoch."""
    val_period: int = 16
    """Validate every this many steps; 0 = never."""
    val_batches: int = -1
    """Validate on the first this many batches of the file; 0 or -1 = on all."""
    val_global_batch_size: int = 32
    """Pairs of a validation batch."""
    val_micro_batch_size: int = 1
    """In validation, what `policy.train_micro_batch_size` is in training: without packing, the pairs of a row."""
    val_at_start: bool = False
    """Validate before the first update (step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: int = 42
    """Seed of the run: data order, and the reward head's first weights. Config and seed fix the run bit for bit on CPU."""
