# SPDX-License-Identifier: Apache-2.0
"""Context parallelism behind the verbs of a policy: steps, logprobs and checkpoints are those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stack.policy import policy_ranks
from tests.stack.ranks import RankPool

PENALTY = "loss_fn.reference_policy_kl_penalty=0.05"
LOSSES = {"every token": [PENALTY], "every sequence": [PENALTY, "loss_fn.token_level_loss=false"]}
LONG = pytest.mark.long("parity")
CASES = [
    pytest.param("tp2 sp cp2 ep2", "every sequence"),
    pytest.param("tp2 sp cp2 ep2", "every token", marks=LONG),
    pytest.param("cp2 dp2 ep2", "every sequence", marks=LONG),
    pytest.param("cp4 ep2", "every sequence", marks=LONG),
    pytest.param("tp2 sp pp2 cp2 ep4", "every sequence", marks=LONG),
]


@pytest.mark.parametrize(("layout", "loss"), CASES)
def test_steps_have_the_metrics_of_one_rank(ranks: RankPool, folder: Path, layout: str, loss: str):
    (expected,) = ranks.run(
        policy_ranks.metrics_of_steps, policy_ranks.run_config(folder, "one", *LOSSES[loss]), 2, world_size=1
    )
    config = policy_ranks.run_config(folder, layout, *LOSSES[loss])
    results = ranks.run(policy_ranks.metrics_of_steps, config, 2, world_size=policy_ranks.world_size(layout))
    assert all(steps == results[0] for steps in results)
    for step, expected_step in zip(results[0], expected, strict=True):
        assert step.keys() == expected_step.keys()
        for name, value in expected_step.items():
            assert step[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert expected[-1]["train/kl_penalty"] > 0
