# SPDX-License-Identifier: Apache-2.0
"""Steps of training without rollouts, in several layouts, against transformers and torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.config.schema.run import RunConfig
from mrl.data.supervised import Example, TokenSequence
from tests import models
from tests.stack.policy import policy_ranks, supervised_ranks
from tests.stack.policy.objective_reference import plain_steps
from tests.stack.ranks import RankPool

NUM_STEPS = 3
SEED = 42
Loss = Callable[[torch.nn.Module, list[Example]], torch.Tensor]


def logprobs_of(model: torch.nn.Module, sequence: TokenSequence) -> torch.Tensor:
    """Logprobs of the learned tokens, in order."""
    tokens = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
    logprobs = torch.log_softmax(model(tokens).logits[0, :-1], dim=-1).gather(1, tokens[0, 1:, None])[:, 0]
    return torch.cat([logprobs[start - 1 : stop - 1] for start, stop in sequence.targets])


def mean_nll(model: torch.nn.Module, examples: list[Example]) -> torch.Tensor:
    return -torch.cat([logprobs_of(model, sequence) for example in examples for sequence in example.sequences]).mean()


def dpo(model: torch.nn.Module, examples: list[Example]) -> torch.Tensor:
    reference, losses = models.nemotron_h(), []
    for example in examples:
        sums = [logprobs_of(model, sequence).sum() for sequence in example.sequences]
        with torch.no_grad():
            before = [logprobs_of(reference, sequence).sum() for sequence in example.sequences]
        margin = (sums[0] - before[0]) - (sums[1] - before[1])
        losses.append(
            torch.log1p(torch.exp(-0.3 * margin)) - 0.1 * sums[0] / len(logprobs_of(reference, example.sequences[0]))
        )
    return torch.stack(losses).mean()


def bradley_terry(model: torch.nn.Module, examples: list[Example]) -> torch.Tensor:
    backbone, score, losses = model.get_submodule("model"), model.get_submodule("score"), []
    for example in examples:
        tokens = [torch.from_numpy(sequence.token_ids.astype(np.int64))[None] for sequence in example.sequences]
        chosen, rejected = (score(backbone(mine).last_hidden_state[0, -1]) for mine in tokens)
        losses.append(torch.log1p(torch.exp(rejected - chosen)))
    return torch.cat(losses).mean()


def transformers_steps(loss_of: Loss, examples: list[Example]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a plain implementation, sequence by sequence."""
    model = models.nemotron_h()
    if loss_of is bradley_terry:
        model.score = torch.nn.Linear(64, 1, bias=False)
        with torch.no_grad():
            model.score.weight.copy_(0.02 * torch.randn(1, 64, generator=torch.Generator().manual_seed(SEED)))
    return plain_steps(model, lambda: loss_of(model, examples), NUM_STEPS)


def check(
    ranks: RankPool,
    config: RunConfig,
    layout: str,
    examples: list[Example],
    losses: list[float],
    grad_norms: list[float],
) -> None:
    """Steps in a layout have these losses and gradient norms, and the evaluation before them the first loss."""
    size = policy_ranks.world_size(layout)
    results = ranks.run(supervised_ranks.evaluation_and_steps, config, examples, NUM_STEPS, world_size=size)
    assert all(result == results[0] for result in results)
    before, steps = results[0]
    assert before["loss"] == pytest.approx(losses[0], rel=1e-5)
    np.testing.assert_allclose([step["train/loss"] for step in steps], losses, rtol=1e-5)
    np.testing.assert_allclose([step["train/grad_norm"] for step in steps], grad_norms, rtol=1e-4)


def sft_case(ranks: RankPool, folder: Path, layout: str) -> None:
    examples = supervised_ranks.examples(1)
    check(
        ranks,
        supervised_ranks.run_config(folder, "sft", layout),
        layout,
        examples,
        *transformers_steps(mean_nll, examples),
    )


def dpo_case(ranks: RankPool, folder: Path, layout: str) -> None:
    examples = supervised_ranks.examples(2)
    settings = ["reference_policy_kl_penalty=0.3", "sft_loss_weight=0.1", "sft_average_log_probs=true"]
    config = supervised_ranks.run_config(folder, "dpo", layout, *(f"dpo.{setting}" for setting in settings))
    check(ranks, config, layout, examples, *transformers_steps(dpo, examples))


def rm_case(ranks: RankPool, folder: Path, layout: str) -> None:
    examples = supervised_ranks.examples(2)
    config = supervised_ranks.run_config(folder, "rm", layout, f"rm.seed={SEED}")
    check(ranks, config, layout, examples, *transformers_steps(bradley_terry, examples))


CASES = {"sft": sft_case, "dpo": dpo_case, "rm": rm_case}


# Between them, every way of cutting a batch, a row and a model.
@pytest.mark.parametrize(
    ("algorithm", "layout"), [("sft", "tp2 sp dp2 ep2"), ("dpo", "cp2 ep2"), ("rm", "pp2 dp2 ep2")]
)
def test_three_steps_equal_transformers(ranks: RankPool, folder: Path, algorithm: str, layout: str):
    CASES[algorithm](ranks, folder, layout)
