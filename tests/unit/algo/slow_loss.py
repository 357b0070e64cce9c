# SPDX-License-Identifier: Apache-2.0
"""The policy loss once more, token by token with Python's floats, and random batches to compare on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from mrl.algo.losses import BatchSize, Tokens, policy_loss
from mrl.config.schema.algo import LossConfig


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens, flat, float64."""

    lengths: list[int]
    logprobs: torch.Tensor
    old: torch.Tensor
    generator: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    rewards: list[float]
    """Rewards of the sequences."""

    @property
    def bounds(self) -> list[int]:
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    @property
    def positive(self) -> torch.Tensor:
        return self.mask * (torch.tensor(self.rewards) > 0).repeat_interleave(torch.tensor(self.lengths))

    @property
    def counts(self) -> BatchSize:
        spans = zip(self.bounds, self.bounds[1:], strict=False)
        num_sequences = sum(bool(self.mask[start:stop].any()) for start, stop in spans)
        return BatchSize(float(self.mask.sum()), float(num_sequences), float(self.positive.sum()))

    def tokens(self, logprobs: torch.Tensor, config: LossConfig, untruncated_logprobs_T: torch.Tensor | None = None) -> Tokens:
        """The inputs of the loss; old logprobs are left out where it does without them."""
        return Tokens.of(
            logprobs,
            untruncated_logprobs_T=untruncated_logprobs_T,
            old_logprobs_T=None if config.force_on_policy_ratio else self.old,
            generator_logprobs_T=self.generator,
            reference_logprobs_T=self.reference,
            advantages_T=self.advantages,
            loss_mask_T=self.mask,
            positive_mask_T=self.positive,
            cu_seqlens=torch.tensor(self.bounds, dtype=torch.int32),
        )

    def part(self, members: list[int]) -> Batch:
        """Only these sequences, in this order."""
        index = self.index(members)
        tensors = {name: value[index] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, lengths=[self.lengths[i] for i in members], rewards=[self.rewards[i] for i in members], **tensors)

    def index(self, members: list[int]) -> torch.Tensor:
        """Places of the tokens of these sequences."""
        return torch.cat([torch.arange(self.bounds[i], self.bounds[i + 1]) for i in members])


def random_batch(seed: int, lengths: list[int] | None = None, spread: float = 0.4) -> Batch:
    """Sequences of which about one in four does not count; the first two tokens of each are prompt."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 7, 4, 3] if lengths is None else lengths
    total = sum(lengths)
    base = -torch.rand(total, generator=generator, dtype=torch.float64) * 3 - 0.1
    new, reference, drift, advantages = torch.randn(4, total, generator=generator, dtype=torch.float64)
    is_valid = torch.rand(len(lengths), generator=generator) > 0.25
    mask = torch.cat([torch.tensor([0.0] * min(2, n) + [float(v)] * max(0, n - 2)) for n, v in zip(lengths, is_valid, strict=True)])
    rewards = torch.rand(len(lengths), generator=generator) - 0.4
    return Batch(
        lengths, base + spread * new, base, base + 0.3 * drift, base + spread * reference, advantages, mask.double(), rewards.tolist()
    )


def fast_loss(
    batch: Batch,
    config: LossConfig,
    counts: BatchSize | None = None,
    *,
    untruncated_logprobs_T: torch.Tensor | None = None,
    entropy_T: torch.Tensor | None = None,
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient by the logprobs, and metrics, of a row of all sequences."""
    logprobs = batch.logprobs.clone().requires_grad_()
    tokens = batch.tokens(logprobs, config, untruncated_logprobs_T)
    loss, metrics = policy_loss(tokens, config, batch.counts if counts is None else counts, entropy_T=entropy_T)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad, {name: float(value) for name, value in metrics.items()}


def slow_loss(batch: Batch, config: LossConfig, logprobs: list[float] | None = None) -> float:
    """Loss of the batch. Where no gradient flows, `batch.logprobs` are used, elsewhere `logprobs`."""
    here = batch.logprobs.tolist()
    new = here if logprobs is None else logprobs
    old = here if config.force_on_policy_ratio else batch.old.tolist()
    generator, reference, advantages = batch.generator.tolist(), batch.reference.tolist(), batch.advantages.tolist()
    total = nll = 0.0
    for sequence, (start, stop) in enumerate(zip(batch.bounds, batch.bounds[1:], strict=False)):
        valid = [t for t in range(start, stop) if batch.mask[t] > 0]
        if not valid:
            continue
        sequence_ratio = math.exp(sum(new[t] - old[t] for t in valid) / len(valid))
        sequence_ratio_here = math.exp(sum(here[t] - old[t] for t in valid) / len(valid))
        product = math.exp(sum(old[t] - generator[t] for t in valid))
        geometric = product ** (1 / len(valid))
        for t in valid:
            if config.sequence_level_importance_ratios:
                ratio, ratio_here, weight = sequence_ratio, sequence_ratio_here, product
            else:
                ratio, ratio_here, weight = math.exp(new[t] - old[t]), math.exp(here[t] - old[t]), math.exp(old[t] - generator[t])
            if config.force_on_policy_ratio:
                ratio, ratio_here = math.exp(new[t] - here[t]), 1.0
            loss = token_loss(advantages[t], ratio, ratio_here, new[t], config)
            if config.use_importance_sampling_correction:
                loss *= truncated(weight, geometric, config)
            if config.reference_policy_kl_penalty and not config.use_kl_in_reward:
                loss += config.reference_policy_kl_penalty * slow_kl(new[t], here[t], generator[t], reference[t], config)
            if config.token_level_loss:
                total += loss / batch.counts.num_valid_tokens
            else:
                total += loss / (config.constant_length_normalizer or len(valid)) / batch.counts.num_valid_sequences
            if batch.rewards[sequence] > 0:
                nll -= new[t] / batch.counts.num_positive_tokens
    return total + config.positive_example_nll_weight * nll


def token_loss(advantage: float, ratio: float, ratio_here: float, logprob: float, config: LossConfig) -> float:
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    if config.use_cispo:
        return -advantage * min(max(ratio_here, low), high) * logprob
    if config.disable_ppo_ratio and not config.force_on_policy_ratio:
        return -advantage * logprob
    loss = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if config.ratio_clip_c is not None and advantage < 0:
        loss = min(loss, -advantage * config.ratio_clip_c)
    return loss


def truncated(weight: float, geometric: float, config: LossConfig) -> float:
    high, low = config.truncated_importance_sampling_ratio, config.truncated_importance_sampling_ratio_min or 0.0
    if high is None:
        return weight
    match config.truncated_importance_sampling_type:
        case "icepop":
            return weight if low <= weight <= high else 0.0
        case "seq-mask-tis":
            return weight if low <= geometric <= high else 0.0
        case _:
            return min(max(weight, low), high)


def slow_kl(new: float, here: float, generator: float, reference: float, config: LossConfig) -> float:
    drawn_from = generator if config.use_on_policy_kl_approximation else here
    x, weight = reference - new, math.exp(new - drawn_from)
    if config.kl_input_clamp_value is not None and abs(x) > config.kl_input_clamp_value:
        x, weight = math.copysign(config.kl_input_clamp_value, x), math.exp(here - drawn_from)
    kl = weight * {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[config.reference_policy_kl_type]
    limit = math.inf if config.kl_output_clamp_value is None else config.kl_output_clamp_value
    return min(max(kl, -limit), limit)
