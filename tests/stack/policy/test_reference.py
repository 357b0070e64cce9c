# SPDX-License-Identifier: Apache-2.0
"""A reference with ranks of its own, in the policy's layout and in others, against one that the policy keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrl.config.rules.checks import find_problems
from tests.stack.policy import reference_ranks
from tests.stack.policy.policy_ranks import run_config, sizes_of, world_size
from tests.stack.policy.reference_ranks import Compared
from tests.stack.ranks import RankPool

KL = "loss_fn.reference_policy_kl_penalty=0.05"
LAYOUT = "tp2 sp dp2 ep2"
APART = ("reference.num_nodes=1", "cluster.num_nodes=2")
ONE = {key: 1 for key in ("tensor_model_parallel_size", "expert_model_parallel_size")} | {"sequence_parallel": "false"}


@pytest.fixture(scope="module")
def kept(ranks: RankPool, folder: Path) -> Compared:
    found, *_ = ranks.run(reference_ranks.step, run_config(folder, LAYOUT, KL), world_size=world_size(LAYOUT))
    assert found.keeps_reference and found.metrics["train/kl_penalty"] > 0
    return found


@pytest.mark.parametrize("layout", [LAYOUT, "pp2 dp2 ep2", "cp2 dp2"])
def test_its_logprobs_are_those_of_the_one_that_the_policy_keeps(
    ranks: RankPool, folder: Path, kept: Compared, layout: str
):
    sizes = [f"reference.megatron_cfg.{key}={value}" for key, value in (ONE | sizes_of(layout)).items()]
    config = run_config(folder, LAYOUT, KL, *APART, *sizes)
    assert [problem for problem in find_problems(config) if problem.key.startswith("reference")] == []
    found, *_ = ranks.run(reference_ranks.step, config, world_size=world_size(LAYOUT))
    assert not found.keeps_reference and found.logprobs[0].keys() == kept.logprobs[0].keys() == set(range(16))
    if layout == LAYOUT:
        assert all(np.array_equal(part, kept.logprobs[0][index]) for index, part in found.logprobs[0].items())
        assert found.metrics == kept.metrics
    else:
        for index, part in found.logprobs[0].items():
            np.testing.assert_allclose(part, kept.logprobs[0][index], atol=2e-5)
        assert found.metrics["train/kl_penalty"] == pytest.approx(kept.metrics["train/kl_penalty"], rel=1e-4)
