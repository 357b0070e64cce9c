# SPDX-License-Identifier: Apache-2.0
"""Distillation loss: divergence of a student's distribution from its teacher's per token. NeMo RL's DistillationLossFn.

T tokens, K tokens that the teacher holds likeliest at each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo.losses import LOSS
from mrl.config.schema.algo import LossConfig
from mrl.types import RolloutGroup, TrainSequence

LOG_NOTHING = -100.0
"""The teacher's log-probability of tokens outside its top k, with `loss_fn.zero_outside_topk`."""


@dataclass(frozen=True)
class StudentScores:
    """Student's scores of its teacher's top-k tokens, float32, with gradient."""

    logits_TK: Tensor
    """Logits minus the largest of the vocabulary, if that counts: a logarithm keeps more digits of small numbers."""
    log_sum_T: Tensor | None = None
    """Log of the sum of exp(logit - the largest) over the vocabulary; None where only the top k count, like
    `negentropy_T`.
    """
    negentropy_T: Tensor | None = None
    """Sum of p * log p over the vocabulary, in nats."""


def sequences_to_teach(groups: Sequence[RolloutGroup]) -> list[TrainSequence]:
    """All sequences of a step's rollouts, in group order, whatever their reward: the teacher judges them."""
    pairs = [pair for group in groups for pair in zip(group.rollouts, group.rewards, strict=True)]
    # An agent that sampled nothing leaves a token that nobody has drawn.
    return [
        TrainSequence(sequence, advantage=0.0, is_valid=rollout.finish_reason != "abort", reward=reward)
        for rollout, reward in pairs
        for sequence in rollout.sequences
    ]


def needs_vocabulary(config: LossConfig) -> bool:
    """True if the loss needs the student's probabilities over the whole vocabulary."""
    return config.zero_outside_topk


def distillation_loss(
    student: StudentScores, teacher_logits_TK: Tensor, weights_T: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum of the divergences of the tokens (a scalar with gradient), and its metrics (detached).

    `weights_T` is the weight of each token: for a mean, 1 / (learned tokens of the global batch). Values at tokens of
    weight 0 are ignored. The losses of all rows of all ranks add up to the batch's loss.
    """
    is_learned_T = weights_T > 0
    teacher_TK = torch.log_softmax(teacher_logits_TK.float(), dim=-1)
    # Replaced before any computation, so that ignored values have no gradient, not even NaN.
    logits_TK = torch.where(is_learned_T[:, None], student.logits_TK, 0.0)
    if student.log_sum_T is None:
        student_TK = torch.log_softmax(logits_TK, dim=-1)
    else:
        student_TK = logits_TK - torch.where(is_learned_T, student.log_sum_T, 0.0)[:, None]
    forward_T = (teacher_TK.exp() * (teacher_TK - student_TK)).sum(dim=-1)
    reverse_T = (student_TK.exp() * (student_TK - teacher_TK)).sum(dim=-1)
    if student.negentropy_T is not None:
        # Tokens without teacher probability contribute p * (log p - LOG_NOTHING).
        rest_T = student.negentropy_T - (student_TK.exp() * student_TK).sum(dim=-1)
        reverse_T = reverse_T + rest_T - LOG_NOTHING * (1 - student_TK.exp().sum(dim=-1))
    share = {"forward": 1.0, "reverse": 0.0, "mixed": config.mixed_kl_weight}[config.kl_type]

    def mean(value_T: Tensor) -> Tensor:
        return (weights_T * torch.where(is_learned_T, value_T, 0.0)).sum()

    terms = [weight * mean(value_T) for weight, value_T in ((share, forward_T), (1 - share, reverse_T)) if weight > 0]
    loss = torch.stack(terms).sum()
    metrics = {LOSS: loss, "kl_forward": mean(forward_T), "kl_reverse": mean(reverse_T)}
    return loss, {name: value.detach() for name, value in metrics.items()}
