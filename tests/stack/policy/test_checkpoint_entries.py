# SPDX-License-Identifier: Apache-2.0
"""A rank's share of a checkpoint: what a save and a load cost, and that all shares together are Megatron's format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conversion.files.torch_dist import TorchDistFolder
from conversion.tensors import read_whole
from tests import models
from tests.stack.policy import entry_ranks, policy_ranks
from tests.stack.policy.policy_ranks import BF16
from tests.stack.ranks import RankPool

# Modules that a first save imports, and the pieces in which files are read and written.
SLACK_BYTES = 24 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 million parameters, so that a checkpoint has 275 MB."""
    return models.save_model(
        tmp_path_factory.mktemp("large"), "llama", num_hidden_layers=2, hidden_size=512, intermediate_size=6144
    )


@pytest.mark.parametrize("dp", [2, 4, pytest.param(8, marks=pytest.mark.long("conversion"))])
def test_a_save_and_a_load_cost_a_rank_its_share(ranks: RankPool, large: Path, tmp_path: Path, dp: int):
    config = policy_ranks.run_config(large, "one", *BF16)
    costs = ranks.run(entry_ranks.cost_of_a_save_and_a_load, config, tmp_path, world_size=dp)
    assert all(cost.is_same for cost in costs)
    share = costs[0].checkpoint_bytes / dp
    assert max(cost.save_growth for cost in costs) < 1.3 * share + SLACK_BYTES
    # A load copies what it reads, one part of a tensor after the other, into memory that is there already.
    assert max(cost.load_growth for cost in costs) < 0.6 * share + SLACK_BYTES
    # Beside the tensors, what their archives add.
    assert 1 <= sum(cost.read_bytes for cost in costs) / costs[0].checkpoint_bytes < 1.05


@pytest.mark.parametrize("layout", ["dp2", "tp2 sp dp2 ep2"])
def test_parameters_of_all_buckets_get_their_own_state_back(ranks: RankPool, folder: Path, tmp_path: Path, layout: str):
    config = policy_ranks.run_config(folder, layout)
    arguments = config, tmp_path, 20_000
    results = ranks.run(entry_ranks.load_with_small_buckets, *arguments, world_size=policy_ranks.world_size(layout))
    assert all(num_buckets > 4 and is_same for num_buckets, is_same in results)


@pytest.mark.parametrize("layout", ["tp2 sp dp2 ep2", "pp2 dp2 ep2"])
def test_entries_are_the_tensors_that_megatron_writes_and_reads(
    ranks: RankPool, folder: Path, tmp_path: Path, layout: str
):
    ours, megatrons = tmp_path / "ours", tmp_path / "megatrons"
    config = policy_ranks.run_config(folder, layout, *BF16)
    results = ranks.run(entry_ranks.save_both_ways, config, ours, megatrons, world_size=policy_ranks.world_size(layout))
    assert results == [(True, True)] * len(results)
    first, second = (TorchDistFolder(path / "iter_0000000") for path in (ours, megatrons))
    assert first.keys == second.keys
    assert [key for key in first.keys if not torch.equal(read_whole(first, key), read_whole(second, key))] == []
