# SPDX-License-Identifier: Apache-2.0
"""Logprobs of given sequences by transformers' forward pass: the independent source for engines and trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# DESIGN: a token counts where no router choice of its position could flip from rounding alone. A choice of an earlier
# position that did flip reaches it through attention or a state: then tokens that differ are left out too.
MIN_ROUTER_MARGIN = 1e-5
MAX_EXCLUDED = 1e-3
MAX_REACHED = 2e-2
"""A choice that flips reaches all tokens behind it, of which a witness has 24 in a sequence and 2,304 in all."""


@dataclass(frozen=True)
class Scores:
    """Scores by transformers of the generated part of one sequence."""

    logprobs: np.ndarray
    """float32 [L]: of each generated token, given all tokens before it."""
    margins: np.ndarray
    """float32 [L]: over the MoE layers, the smallest lead of the last chosen expert, at the position that predicts the
    token.
    """
    least_margins: np.ndarray
    """float32 [L]: the smallest of the margins of this position and all before it, the prompt's included."""


def hf_scores(model: PreTrainedModel, prompt: Sequence[int], generated: Sequence[int]) -> Scores:
    """Scores of `generated` after `prompt`. A nemotron_h must have been through `models.unclamp_dt`."""
    margins: list[torch.Tensor] = []

    def note_margin(router: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        hidden = arguments[0].reshape(-1, arguments[0].shape[-1]).float()
        logits = hidden @ router.get_parameter("weight").float().T
        if (own := dict(router.named_parameters()).get("bias")) is not None:
            logits = logits + own
        bias = dict(router.named_buffers()).get("e_score_correction_bias")
        # A softmax does not change the order, and its rounding does not decide: Megatron chooses by logits.
        scores = logits if bias is None else torch.sigmoid(logits) + bias
        best = scores.topk(model.config.num_experts_per_tok + 1, dim=-1).values
        # Rounding moves a sigmoid by at most a quarter of what it moves the logit.
        margins.append((best[:, -2] - best[:, -1]) * (1 if bias is None else 4))

    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".mlp.router"))]
    handles = [router.register_forward_pre_hook(note_margin) for router in routers]
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*prompt, *generated]])).logits[0].float()
    finally:
        for handle in handles:
            handle.remove()
    assert len(margins) == len(routers)
    positions = slice(len(prompt) - 1, len(prompt) + len(generated) - 1)
    targets = torch.tensor(generated).unsqueeze(-1)
    logprobs = logits[positions].log_softmax(dim=-1).gather(-1, targets).squeeze(-1)
    # Without routers, no choice can flip.
    margin = torch.stack(margins).amin(dim=0) if margins else torch.full((len(logits),), torch.inf)
    return Scores(logprobs.numpy(), margin[positions].numpy(), margin.cummin(dim=0).values[positions].numpy())


@dataclass
class Parity:
    """Collects comparisons with `hf_scores` and judges them together."""

    num_tokens: int = 0
    num_excluded: int = 0
    num_reached: int = 0
    """Tokens that differ behind an earlier choice that could flip."""
    num_wrong: int = 0
    max_difference: float = 0.0

    def add(self, logprobs: np.ndarray, scores: Scores) -> None:
        """Compares logprobs of one sequence: |d| <= 1e-5 + 1e-6 |logprob| on every token with a safe router margin."""
        assert logprobs.shape == scores.logprobs.shape
        is_safe = scores.margins >= MIN_ROUTER_MARGIN
        difference = np.abs(logprobs.astype(np.float64) - scores.logprobs)
        is_wrong = is_safe & (difference > 1e-5 + 1e-6 * np.abs(scores.logprobs))
        is_reached = is_wrong & (scores.least_margins < MIN_ROUTER_MARGIN)
        self.num_tokens += len(is_safe)
        self.num_excluded += int((~is_safe).sum())
        self.num_reached += int(is_reached.sum())
        self.num_wrong += int((is_wrong & ~is_reached).sum())
        self.max_difference = max(self.max_difference, float(difference[is_safe & ~is_reached].max(initial=0.0)))

    def check(self, *, min_tokens: int) -> None:
        """Asserts that no token was wrong, few were left out, and enough were compared."""
        assert self.num_tokens >= min_tokens, self
        assert (
            self.num_excluded <= MAX_EXCLUDED * self.num_tokens and self.num_reached <= MAX_REACHED * self.num_tokens
        ), self
        assert self.num_wrong == 0, self
