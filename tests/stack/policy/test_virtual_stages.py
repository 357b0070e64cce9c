# SPDX-License-Identifier: Apache-2.0
"""Virtual pipeline stages where a policy has to do something for them: rows that fill no group, and refits.

Their losses and gradients are in test_layouts.py and test_parity_table.py, checkpoints in test_checkpoint.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import models
from tests.stack.policy import policy_ranks
from tests.stack.ranks import RankPool

VIRTUAL, ONE = "pp2 vpp2", "one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Tied embeddings are held by the first and the last chunk of the model.
    return models.save_model(tmp_path_factory.mktemp("model"), "qwen3_moe", tie_word_embeddings=True)


def test_rows_that_are_no_whole_group_give_what_one_rank_gives(ranks: RankPool, folder: Path):
    ((logprobs, metrics),) = ranks.run(policy_ranks.step_on_rows, policy_ranks.run_config(folder, ONE), 3, world_size=1)
    (none, _), (parallel_logprobs, parallel_metrics) = ranks.run(
        policy_ranks.step_on_rows, policy_ranks.run_config(folder, VIRTUAL), 3, world_size=2
    )
    assert none == [] and len(parallel_logprobs) == 3
    np.testing.assert_allclose(np.concatenate(parallel_logprobs), np.concatenate(logprobs), atol=1e-5)
    assert parallel_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_a_refit_brings_the_weights_of_one_rank(ranks: RankPool, folder: Path):
    (live, _), _ = ranks.run(policy_ranks.refit_after_steps, policy_ranks.run_config(folder, VIRTUAL), world_size=2)
    ((expected, _),) = ranks.run(policy_ranks.refit_after_steps, policy_ranks.run_config(folder, ONE), world_size=1)
    assert live.keys() == expected.keys()
    for name, values in live.items():
        np.testing.assert_allclose(values, expected[name], atol=1e-6, rtol=1e-5, err_msg=name)
