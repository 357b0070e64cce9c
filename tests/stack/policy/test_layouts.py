# SPDX-License-Identifier: Apache-2.0
"""Every parallel layout gives one rank's loss, gradients and logprobs; one rank gives transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests import models
from tests.stack.policy import layout_ranks
from tests.stack.policy.layouts import (
    Gradients,
    assert_close,
    gradients_of,
    sequences,
    transformers_gradients,
    transformers_logprobs,
    transformers_model,
)
from tests.stack.policy.sizes import sizes
from tests.stack.ranks import RankPool

LAYOUTS = [
    "tp2 sp ep1",
    "tp2 sp ep2",
    "tp2 sp etp2",
    "pp2",
    "pp2 uneven",
    "dp2",
    "ep2 dp2",
    "tp2 sp pp2 ep2",
    "tp2 sp dp2 ep2",
]
LAYOUTS += ["tp2 sp ep1, recomputed", "cp2", "tp2 sp cp2 ep2"]
LONG_LAYOUTS = ["cp4", "cp2 dp2", "cp2 pp2", "cp2 ep2, recomputed", "tp2 sp cp4 ep2", "tp2 sp pp2 cp2 ep4"]
LONG = pytest.mark.long("parity")


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with all kinds of layers, in a number that two stages share evenly."""
    return models.save_nemotron_h(
        tmp_path_factory.mktemp("moe"), hybrid_override_pattern="MEM*EME-", num_hidden_layers=8
    )


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_nemotron_h(tmp_path_factory.mktemp("dense"), hybrid_override_pattern="M*M-", num_hidden_layers=4)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, moe_folder: Path) -> Gradients:
    return gradients_of(ranks, moe_folder, 1, {})


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=LONG) for name in LONG_LAYOUTS)])
def test_a_layout_gives_the_loss_and_gradients_of_one_rank(
    ranks: RankPool, moe_folder: Path, one_rank: Gradients, layout: str
):
    loss, grads = gradients_of(ranks, moe_folder, *sizes(layout))
    assert loss == pytest.approx(one_rank[0], rel=1e-6)
    assert_close(grads, one_rank[1], 1e-5)


def test_tensor_parallelism_without_sequence_parallelism_gives_the_gradients_of_one_rank(
    ranks: RankPool, dense_folder: Path
):
    # Megatron trains mixture-of-experts models only with both.
    loss, grads = gradients_of(ranks, dense_folder, 1, {})
    parallel_loss, parallel_grads = gradients_of(ranks, dense_folder, *sizes("tp2"))
    assert parallel_loss == pytest.approx(loss, rel=1e-6)
    assert_close(parallel_grads, grads, 1e-5)


def test_one_rank_gives_the_gradients_of_transformers(moe_folder: Path, one_rank: Gradients, tmp_path: Path):
    loss, grads = transformers_gradients(moe_folder, tmp_path)
    assert one_rank[0] == pytest.approx(loss, rel=1e-5)
    assert_close(one_rank[1], grads, 2e-5)


@pytest.mark.parametrize("layout", ["tp2 sp ep2", "tp2 sp pp2 ep2"])
def test_latent_experts_give_the_loss_and_gradients_of_transformers(ranks: RankPool, tmp_path: Path, layout: str):
    folder = models.save_nemotron_h(
        tmp_path / "model", hybrid_override_pattern="ME-*", num_hidden_layers=4, moe_latent_size=32
    )
    expected_loss, expected = transformers_gradients(folder, tmp_path / "gradients")
    loss, grads = gradients_of(ranks, folder, *sizes(layout))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(grads, expected, 2e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logprobs_equal_those_of_transformers(ranks: RankPool, tmp_path: Path, seed: int):
    folder = models.save_nemotron_h(tmp_path, seed, hybrid_override_pattern="MEM*EME-", num_hidden_layers=8)
    rows = [sequences(700, 1, 33, 260, 6), sequences(*range(20, 60)), sequences(*[16] * 20)]
    model = transformers_model(folder)
    with torch.no_grad():
        expected = np.concatenate([transformers_logprobs(model, row).numpy() for row in rows])
    is_token = np.concatenate([layout_ranks.packed_row(row).loss_mask_T.bool().numpy() for row in rows])
    assert is_token.sum() > 2000
    for world_size, megatron in map(sizes, ("one", "tp2 sp ep2", "tp2 sp pp2 ep2", "cp2") if seed == 0 else ("one",)):
        results = ranks.run(
            layout_ranks.logprobs, layout_ranks.policy_config(**megatron), folder, rows, world_size=world_size
        )
        # The last rank is in the last stage.
        difference = np.abs(np.concatenate(results[-1]) - expected)[is_token]
        assert (difference <= 1e-5 + 1e-6 * np.abs(expected[is_token])).all(), (megatron, difference.max())
