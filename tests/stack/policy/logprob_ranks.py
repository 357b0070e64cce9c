# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks of the logprob tests: scores of random hidden states, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.logprobs import TokenDistribution

NUM_TOKENS = 40
NUM_COLUMNS = 512
"""Columns of the padded vocabulary."""


@dataclass(frozen=True)
class Case:
    """A distribution, and how its scores are computed; `chunk_tokens` None = from the logits of the whole row."""

    vocab_size: int = 264
    temperature: float = 0.7
    top_k: int | None = None
    top_p: float = 1.0
    chunk_tokens: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    is_shared: bool = False
    """Some tokens predict several labels, or none, and the labels are in any order."""

    def distribution(self) -> TokenDistribution:
        from mrl.policy.logprobs import TokenDistribution

        return TokenDistribution(self.vocab_size, self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Inputs:
    """Inputs whose padding has the largest logits. Half the labels are likely. Two weights a token, one per logprob."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    token_weights: torch.Tensor
    sources: torch.Tensor | None


@dataclass(frozen=True)
class Result:
    """Scores by name; this rank's logit columns and its part of the gradients of the weighted sum of the logprobs."""

    scores: dict[str, np.ndarray]
    logits: np.ndarray
    grad_hidden: np.ndarray
    grad_weight: np.ndarray


def inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.vocab_size)
    dtype = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
    hidden = torch.randn(NUM_TOKENS, 24, generator=generator) + 0.5
    weight = torch.randn(NUM_COLUMNS, 24, generator=generator) * 0.7
    weight[case.vocab_size :] = 4.0
    labels = torch.randint(0, case.vocab_size, (NUM_TOKENS,), generator=generator)
    labels[::2] = (hidden @ weight[: case.vocab_size].t()).argmax(dim=-1)[::2]
    token_weights, sources = torch.randn(2, NUM_TOKENS, generator=generator), None
    if case.is_shared:
        sources = torch.randint(0, NUM_TOKENS, (NUM_TOKENS,), generator=generator)
    return Inputs(hidden.to(dtype), weight.to(dtype), labels, token_weights, sources)


def results(rank: Rank, cases: list[Case]) -> list[Result]:
    """Results of every case, on this rank's columns."""
    with rank.gloo():
        return [_result(rank, case) for case in cases]


def _result(rank: Rank, case: Case) -> Result:
    import torch.distributed as dist

    from mrl.policy.logprobs import OutputColumns, scores_of

    group = dist.group.WORLD
    assert group is not None
    given = inputs(case)
    columns = NUM_COLUMNS // rank.world_size
    hidden = given.hidden.requires_grad_()
    weight = given.weight[rank.rank * columns :][:columns].clone().requires_grad_()
    logits = hidden @ weight.t()
    given_to = (logits, None) if case.chunk_tokens is None else (hidden, weight)
    output = OutputColumns(*given_to, case.distribution(), group, case.chunk_tokens or 7)
    scores = scores_of(output, given.labels, given.sources)
    first, second = given.token_weights
    # A log-probability of -inf times a weight is not a loss; the product's gradient still reaches the operator.
    drawable = torch.where(torch.isneginf(scores.logprobs_T), 0.0, scores.logprobs_T)
    (drawable * first + scores.untruncated_logprobs_T * second).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return Result(
        {
            "logprobs": scores.logprobs_T.detach().numpy(),
            "untruncated_logprobs": scores.untruncated_logprobs_T.detach().numpy(),
            "entropy": scores.entropy_T.numpy(),
        },
        logits.detach().float().numpy(),
        hidden.grad.float().numpy(),
        weight.grad.float().numpy(),
    )
