# SPDX-License-Identifier: Apache-2.0
"""Weights from the cache through Megatron's loader are those of the Hugging Face files, bit for bit, at any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversion.cache import cached_mcore
from tests import models
from tests.stack.policy import policy_ranks
from tests.stack.policy.policy_ranks import BF16
from tests.stack.ranks import RankPool


@pytest.fixture(scope="module")
def cached(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_mcore(folder, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    ("layout", "overrides"), [("one", []), ("tp2 sp dp2 ep2", []), ("pp2 dp2 ep2", []), ("dp2", BF16)]
)
def test_both_ways_of_loading_give_the_same_bits(
    ranks: RankPool, folder: Path, cached: Path, layout: str, overrides: list[str]
):
    config = policy_ranks.run_config(folder, layout, "loss_fn.reference_policy_kl_penalty=0.01", *overrides)
    results = ranks.run(policy_ranks.load_both_ways, config, cached, world_size=policy_ranks.world_size(layout))
    assert [differing for differing, _ in results] == [[]] * len(results)
    assert all(num_compared > 50 for _, num_compared in results)


def test_both_ways_of_loading_give_the_same_bits_to_virtual_stages(ranks: RankPool, tmp_path: Path):
    folder = models.save_model(tmp_path / "model", "qwen3_moe", tie_word_embeddings=True)
    config = policy_ranks.run_config(folder, "pp2 vpp2", "loss_fn.reference_policy_kl_penalty=0.01")
    cached = cached_mcore(folder, tmp_path / "cache", parallel=config.policy.megatron_cfg.parallel)
    results = ranks.run(policy_ranks.load_both_ways, config, cached, world_size=2)
    assert [differing for differing, _ in results] == [[], []]
