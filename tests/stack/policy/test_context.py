# SPDX-License-Identifier: Apache-2.0
"""Context parallelism behind the verbs of a policy: steps, logprobs and checkpoints are those of one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import models
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


@pytest.mark.parametrize("layout", ["cp2 ep2", pytest.param("tp2 sp pp2 cp2 ep4", marks=LONG)])
def test_whole_rows_have_the_logprobs_of_one_rank(ranks: RankPool, folder: Path, layout: str):
    (expected,) = ranks.run(policy_ranks.logprobs_of_rollouts, policy_ranks.run_config(folder, "one"), world_size=1)
    config = policy_ranks.run_config(folder, layout)
    results = [
        found
        for found in ranks.run(policy_ranks.logprobs_of_rollouts, config, world_size=policy_ranks.world_size(layout))
        if found
    ]
    assert results
    for found in results:
        assert found.keys() == expected.keys() == set(range(policy_ranks.NUM_SEQUENCES))
        for index, logprobs in expected.items():
            np.testing.assert_allclose(found[index], logprobs, atol=1e-5)


def test_parts_of_a_row_have_the_positions_of_yarn(ranks: RankPool, tmp_path: Path):
    """Megatron puts parts of rows into pinned memory, which hosts without a GPU lack."""
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, rope_theta=1e6)
    folder = models.save_model(tmp_path, "qwen3", rope_parameters=yarn)
    one, two = (policy_ranks.run_config(folder, layout) for layout in ("one", "cp2"))
    (expected,) = ranks.run(policy_ranks.logprobs_of_rollouts, one, world_size=1)
    for found in filter(None, ranks.run(policy_ranks.logprobs_of_rollouts, two, world_size=2)):
        for index, logprobs in expected.items():
            np.testing.assert_allclose(found[index], logprobs, atol=1e-5)
