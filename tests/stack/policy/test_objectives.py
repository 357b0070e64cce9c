# SPDX-License-Identifier: Apache-2.0
"""GRPO family objectives give the steps of a plain implementation, on one rank and many, however rows are packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.stack.policy import objective_ranks, objective_reference, policy_ranks
from tests.stack.ranks import RankPool

NUM_STEPS = 2
COMPARED = (
    "loss",
    "grad_norm",
    "clip_fraction",
    "sampling_importance_ratio",
    "num_valid_tokens",
    "advantages/mean",
    "advantages/max",
)


def test_steps_equal_transformers_and_those_of_many_ranks(ranks: RankPool, tmp_path: Path):
    """Sequences are cut over context-parallel ranks, which sums and means over sequences must not notice."""
    folder, layout = models.save_nemotron_h(tmp_path / "model"), "cp2 dp2 ep2"
    one = objective_ranks.run_configs(folder, "one")
    # Every sequence in a row of its own.
    (expected,) = ranks.run(objective_ranks.steps_of_objectives, one, NUM_STEPS, "", world_size=1)
    for name, steps in expected.items():
        losses, grad_norms = objective_reference.steps(objective_reference.LOSSES[name], NUM_STEPS)
        assert [step["train/loss"] for step in steps] == pytest.approx(losses, rel=1e-5, abs=1e-6), name
        assert [step["train/grad_norm"] for step in steps] == pytest.approx(grad_norms, rel=1e-4), name
    many = objective_ranks.run_configs(folder, layout)
    results = ranks.run(
        objective_ranks.steps_of_objectives, many, NUM_STEPS, "balanced", world_size=policy_ranks.world_size(layout)
    )
    assert all(result == results[0] for result in results)
    for name, steps in expected.items():
        for step, (found, wanted) in enumerate(zip(results[0][name], steps, strict=True)):
            for metric in COMPARED:
                key = f"train/{metric}"
                assert found[key] == pytest.approx(wanted[key], rel=1e-5, abs=1e-7), (name, step, metric)
    assert len({round(steps[1]["train/loss"], 6) for steps in expected.values()}) == len(expected)
    dapo = expected["dapo"][0]
    assert 0 < dapo["train/num_masked_seqs_by_logprob_error"] < policy_ranks.NUM_SEQUENCES
    assert dapo["train/max_seq_mult_prob_error_after_mask"] <= 1.28 < dapo["train/max_seq_mult_prob_error"]
    assert dapo["train/advantages/min"] == -0.5
    assert dapo["train/num_valid_tokens"] < expected["cispo"][0]["train/num_valid_tokens"]
    assert expected["gspo"][0]["train/clip_fraction"] > 0 and expected["cispo"][0]["train/kl_penalty"] == 0.0
    # No pass over the batch before the step, and nothing that needs one.
    on_policy = expected["on policy"]
    assert all(step["train/probs_ratio_min"] == step["train/probs_ratio_max"] == 1.0 for step in on_policy)
    assert "train/max_seq_mult_prob_error" not in on_policy[0]
    # Normalised over the tokens of the batch.
    assert expected["reinforce++"][0]["train/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
