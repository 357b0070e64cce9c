# SPDX-License-Identifier: Apache-2.0
"""Sources of a run's starting weights: the cache or the Hugging Face files; damage is found before a weight is used."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import pytest
import torch

from conversion.cache import cache_items, check_entry, mcore_in_use
from mrl import env
from tests.drivers import do
from tests.stack.loop.conftest import LiveRun


def checksums(policy) -> dict[str, int]:
    return {
        str(slot): zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy())
        for slot, tensor in policy.settled_weights().items()
    }


def test_the_start_left_the_model_in_the_cache_cut_for_its_ranks(live: LiveRun):
    root = env.cache_root()
    assert root is not None
    (item,) = [item for item in cache_items(root) if item.entry and item.entry.model == live.config.policy.model_name]
    # The four ranks of TP2 x EP2 x DP2 are of two kinds: (tp 0, ep 0) and (tp 1, ep 1).
    assert len(list(item.path.rglob("*.distcp"))) == 2
    check_entry(item.path / "mcore")


def test_damage_is_repaired_before_the_load_and_both_ways_give_the_same_weights(
    live: LiveRun, caplog: pytest.LogCaptureFixture
):
    policies, parallel = live.run.supplier.session.policies, live.config.policy.megatron_cfg.parallel
    hf = Path(live.config.policy.model_name)
    policies.load(hf, None, parallel)
    expected = live.on_ranks(checksums)
    root = env.cache_root()
    assert root is not None
    with mcore_in_use(hf, root, parallel=parallel) as cached, caplog.at_level(logging.WARNING):
        data = max(cached.rglob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        policies.load(hf, cached, parallel)
        check_entry(cached)
    assert data.name in caplog.text and "converted again" in caplog.text
    assert live.on_ranks(checksums) == expected
    do(live.run.supplier.refit(live.state))
