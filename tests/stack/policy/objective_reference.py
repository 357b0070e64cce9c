# SPDX-License-Identifier: Apache-2.0
"""The steps of every objective once more, from the papers' formulas, with transformers and torch's AdamW.

S sequences, T generated tokens of the longest one; others are padded, with a mask of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests import models
from tests.stack.policy import policy_ranks

KL_PENALTY = 0.05


@dataclass(frozen=True)
class Tokens:
    """Inputs of a loss for the batch, float32 [S, T] but for the advantages [S]."""

    new: Tensor
    """Logprobs with the gradient."""
    old: Tensor
    generator: Tensor
    frozen: Tensor
    mask: Tensor
    advantages: Tensor
    rollouts: list[int]
    """The rollout of each sequence, by the index of its first one."""

    @property
    def drift(self) -> Tensor:
        return torch.exp(self.old - self.generator)

    def mean_over_tokens(self, loss: Tensor) -> Tensor:
        return (loss * self.mask).sum() / self.mask.sum()

    def mean_over_rollouts(self, loss: Tensor, length: int | None = None) -> Tensor:
        """Mean of the rollouts' means over the tokens of all their sequences, or of their sums by `length`."""
        means = []
        for rollout in sorted(set(self.rollouts)):
            mine = torch.tensor([other == rollout for other in self.rollouts])
            means.append((loss * self.mask)[mine].sum() / (length or self.mask[mine].sum()))
        return torch.stack(means).mean()


def surrogate(ratio: Tensor, advantages: Tensor, high: float = 0.2) -> Tensor:
    """Objective that PPO maximises."""
    return torch.minimum(ratio * advantages, ratio.clamp(0.8, 1 + high) * advantages)


def k3(new: Tensor, frozen: Tensor) -> Tensor:
    return torch.exp(frozen - new) - (frozen - new) - 1


def gspo(batch: Tokens) -> Tensor:
    lengths = batch.mask.sum(1)
    ratio = torch.exp(((batch.new - batch.old) * batch.mask).sum(1) / lengths)
    weight = torch.exp(((batch.old - batch.generator) * batch.mask).sum(1)).clamp(max=2.0)
    return -batch.mean_over_rollouts((surrogate(ratio, batch.advantages) * weight)[:, None])


def dr_grpo(batch: Tokens) -> Tensor:
    gained = surrogate(torch.exp(batch.new - batch.old), batch.advantages[:, None]) * batch.drift
    return -batch.mean_over_rollouts(gained, length=16)


def cispo(batch: Tokens) -> Tensor:
    clipped = torch.exp(batch.new - batch.old).clamp(0.8, 1.2).detach()
    gained = clipped * batch.advantages[:, None] * batch.new * batch.drift
    drawn = torch.exp(batch.new - batch.new.detach())
    return batch.mean_over_tokens(KL_PENALTY * drawn * k3(batch.new, batch.frozen) - gained)


def on_policy(batch: Tokens) -> Tensor:
    here = batch.new.detach()
    return batch.mean_over_tokens(
        -torch.exp(batch.new - here) * batch.advantages[:, None] * torch.exp(here - batch.generator)
    )


def dapo(batch: Tokens) -> Tensor:
    """DAPO's loss with masks for sequences whose logprobs are too far off, and a bound on advantages."""
    error = (torch.exp((batch.old - batch.generator).abs()) * batch.mask).sum(1) / batch.mask.sum(1)
    mask = batch.mask * (error <= 1.28)[:, None]
    gained = (
        surrogate(torch.exp(batch.new - batch.old), batch.advantages.clamp(min=-0.5)[:, None], high=0.28) * batch.drift
    )
    return -(gained * mask).sum() / mask.sum()


def reinforce_plus_plus(batch: Tokens) -> Tensor:
    advantages = batch.advantages[:, None] - KL_PENALTY * k3(batch.old, batch.frozen)
    mean = batch.mean_over_tokens(advantages)
    std = batch.mean_over_tokens((advantages - mean).square()).sqrt()
    return batch.mean_over_tokens(-surrogate(torch.exp(batch.new - batch.old), (advantages - mean) / std) * batch.drift)


LOSSES: dict[str, Callable[[Tokens], Tensor]] = {
    "gspo": gspo,
    "dr grpo": dr_grpo,
    "cispo": cispo,
    "on policy": on_policy,
    "dapo": dapo,
    "reinforce++": reinforce_plus_plus,
}
"""Losses by the names of `objective_ranks.OBJECTIVES`."""


def steps(loss_of: Callable[[Tokens], Tensor], num_steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of steps with the made-up old logprobs of `policy_ranks`."""
    model, reference = models.nemotron_h(), models.nemotron_h()
    return plain_steps(model, lambda: loss_of(tokens(model, reference)), num_steps)


def plain_steps(
    model: torch.nn.Module, loss_of: Callable[[], Tensor], num_steps: int
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of steps of torch's AdamW, with the settings of `policy_ranks.run_config`."""
    parameters = list(model.parameters())
    decayed = [parameter for parameter in parameters if parameter.ndim > 1]
    rest = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-3)
    losses, grad_norms = [], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        losses.append(float(loss.detach()))
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
    return losses, grad_norms


def tokens(model: torch.nn.Module, reference: torch.nn.Module) -> Tokens:
    found = [one for one in policy_ranks.rollouts() if one[3]]
    rollouts = [(rollout, advantage) for _, rollout, advantage, _ in found]
    whole = [torch.tensor([*rollout.request.token_ids, *rollout.token_ids.tolist()]) for rollout, _ in rollouts]
    # Causal layers see no padding that comes after.
    padded = pad_sequence(whole, batch_first=True)

    def padded_rows(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    def logprobs(of: torch.nn.Module) -> Tensor:
        all_logprobs = torch.log_softmax(of(padded).logits[:, :-1], dim=-1).gather(2, padded[:, 1:, None])[:, :, 0]
        spans = (
            (len(rollout.request.token_ids) - 1, len(tokens) - 1)
            for (rollout, _), tokens in zip(rollouts, whole, strict=True)
        )
        return padded_rows([row[start:stop] for row, (start, stop) in zip(all_logprobs, spans, strict=True)])

    with torch.no_grad():
        frozen = logprobs(reference)
    generator = [rollout.generator_logprobs for rollout, _ in rollouts]
    old = [
        policy_ranks.old_logprobs(rollout.token_ids, values)
        for (rollout, _), values in zip(rollouts, generator, strict=True)
    ]
    return Tokens(
        logprobs(model),
        padded_rows([torch.from_numpy(values) for values in old]),
        padded_rows([torch.from_numpy(values) for values in generator]),
        frozen,
        padded_rows([torch.ones(len(values)) for values in generator]),
        torch.tensor([advantage for _, advantage in rollouts]),
        [index - policy_ranks.PLACES.get(index, 0) for index, *_ in found],
    )
