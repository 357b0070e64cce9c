# SPDX-License-Identifier: Apache-2.0
"""An engine with a cache too small for its rollouts: how many tokens it computes again, and that none differs."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import models
from tests.rollouts import MAX_MODEL_LEN, StartEngine, differences, request, run

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine
    from mrl.types import Rollout, RolloutRequest

NUM_STEPS, NUM_SETTLED = 8, 6
"""Steps of all rollouts, and the last of these, of which the share is taken."""


def long_tailed(step: int) -> list[RolloutRequest]:
    """Rollouts of which 97% are below half of the longest."""
    rng = random.Random(step)
    lengths = [min(1.0, 0.5 * math.exp(rng.gauss(0, 1) - 1.88)) * (MAX_MODEL_LEN - 24) for _ in range(96)]
    return [
        request([rng.randrange(256) for _ in range(20)], prompt_id=f"{step}/{i}", max_new_tokens=max(1, round(length)))
        for i, length in enumerate(lengths)
    ]


def steps(engine: Engine) -> tuple[dict[str, Rollout], float, int]:
    """All rollouts, the share of tokens that the last steps computed again, and the passes of all."""
    engine.set_weight_version(0)
    rollouts: dict[str, Rollout] = {}
    counts: list[tuple[int, int]] = []
    for step in range(NUM_STEPS):
        rollouts |= run(engine, long_tailed(step))
        counts.append((engine.num_drawn, engine.num_recomputed))
    assert engine.num_drawn == sum(len(rollout.token_ids) for rollout in rollouts.values())
    (drawn, recomputed), (all_drawn, all_recomputed) = counts[-NUM_SETTLED - 1], counts[-1]
    return rollouts, (all_recomputed - recomputed) / (all_drawn - drawn), engine.num_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of attention alone, whose cache may have small blocks."""
    return models.save_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def test_an_engine_with_a_small_cache_computes_few_tokens_again_and_draws_the_same(
    start_engine: StartEngine, folder: Path
) -> None:
    small = (60, 32)
    free, free_share, free_passes = steps(start_engine(folder, max_num_seqs=96, cache_blocks=small))
    engine = start_engine(folder, max_num_seqs=96, cache_blocks=small, adaptive_concurrency=True)
    bounded, share, passes = steps(engine)
    print(free_share, free_passes, share, passes)
    assert free_share > 0.2 and share < 0.01
    assert passes < 1.15 * free_passes
    assert differences(free, bounded) == []


def test_an_engine_with_room_for_all_is_not_bounded(start_engine: StartEngine, folder: Path) -> None:
    engine = start_engine(folder, max_num_seqs=96, adaptive_concurrency=True)
    rollouts, share, passes = steps(engine)
    assert share == 0 and engine.concurrency[0].kept_room == 0
    free, _, free_passes = steps(start_engine(folder, max_num_seqs=96))
    assert passes == free_passes and differences(free, rollouts) == []
