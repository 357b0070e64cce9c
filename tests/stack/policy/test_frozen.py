# SPDX-License-Identifier: Apache-2.0
"""Tensors the config freezes: no gradient, no optimizer state, and the gradients of the others as without the rule."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mrl.config.schema.megatron import FreezeConfig
from tests.stack.policy import policy_ranks, save_ranks
from tests.stack.policy.layouts import assert_close, gradients_of
from tests.stack.policy.sizes import sizes
from tests.stack.ranks import RankPool

# The embedding, and the first layers whole, so that what comes out of the first stage needs no gradient of its own.
PATTERNS = ["backbone.embeddings.*", "backbone.layers.[0-3].*", "*.shared_experts.up_proj.weight"]


@pytest.mark.parametrize("layout", ["one, recomputed", pytest.param("tp2 sp ep2", marks=pytest.mark.long("parity"))])
def test_the_others_have_the_gradients_of_all(ranks: RankPool, folder: Path, layout: str):
    world_size, megatron = sizes(layout)
    loss, grads = gradients_of(ranks, folder, world_size, megatron | dict(freeze_config=FreezeConfig(PATTERNS)))
    expected_loss, expected = gradients_of(ranks, folder, 1, {})
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    kept = {
        name: grad for name, grad in expected.items() if not any(fnmatchcase(name, pattern) for pattern in PATTERNS)
    }
    assert 0 < len(kept) < len(expected)
    assert_close(grads, kept, 1e-5)


@pytest.mark.long("parity")
def test_a_checkpoint_goes_on_and_frozen_tensors_stay(ranks: RankPool, folder: Path, tmp_path: Path):
    config = policy_ranks.run_config(
        folder, "pp2 dp2 ep2", f"policy.megatron_cfg.freeze_config.modules={PATTERNS}".replace(" ", "")
    )
    saved = ranks.run(save_ranks.save_after_steps, config, tmp_path / "1", 1, world_size=4)
    resumed = ranks.run(save_ranks.load_and_step, config, tmp_path / "1", world_size=4)
    assert resumed == [(metrics, checksums) for metrics, checksums, _ in saved]
    longer = ranks.run(save_ranks.save_after_steps, config, tmp_path / "2", 2, world_size=4)
    # The first of two stages holds the embedding and the layers 0 to 3, and nothing else.
    assert longer[0][1] == saved[0][1]
    assert longer[3][1] != saved[3][1]


def test_a_part_of_a_fused_tensor_cannot_be_frozen(ranks: RankPool, folder: Path):
    with pytest.raises(
        RuntimeError, match=r"names backbone.layers.3.mixer.q_proj.weight, which Megatron holds in one tensor with"
    ):
        gradients_of(ranks, folder, 1, dict(freeze_config=FreezeConfig(["*.q_proj.weight"])))
