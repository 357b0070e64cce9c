# SPDX-License-Identifier: Apache-2.0
"""Random batches for tests of the policy loss."""

from __future__ import annotations

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

    def tokens(
        self, logprobs: torch.Tensor, config: LossConfig, untruncated_logprobs_T: torch.Tensor | None = None
    ) -> Tokens:
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
        return replace(
            self, lengths=[self.lengths[i] for i in members], rewards=[self.rewards[i] for i in members], **tensors
        )

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
    mask = torch.cat(
        [torch.tensor([0.0] * min(2, n) + [float(v)] * max(0, n - 2)) for n, v in zip(lengths, is_valid, strict=True)]
    )
    rewards = torch.rand(len(lengths), generator=generator) - 0.4
    return Batch(
        lengths,
        base + spread * new,
        base,
        base + 0.3 * drift,
        base + spread * reference,
        advantages,
        mask.double(),
        rewards.tolist(),
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
