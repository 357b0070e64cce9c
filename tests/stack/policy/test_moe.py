# SPDX-License-Identifier: Apache-2.0
"""Experts: the order of the chosen ones changes no sum, and auxiliary losses match slow formulas in any layout."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from tests import models
from tests.stack.policy.balancing import balancing_loss
from tests.stack.policy.layouts import ROWS, Gradients, assert_close, gradients_of, transformers_gradients
from tests.stack.policy.sizes import sizes
from tests.stack.ranks import RankPool

# Sigmoid scores beside a bias, and softmax; other families route as the second.
FAMILIES = ("nemotron_h", "qwen3_moe")
AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
COEFFICIENT = 0.5

AUX_LAYOUTS = (
    "one",
    "ep2 dp2",
    "tp2 sp dp2 ep2",
    "tp2 sp cp2 ep2",
    "tp2 sp pp2 ep2, recomputed",
    "pp2 vpp2 dp2 ep2, recomputed",
)
# Cells of the short suite: every kind and every family once, on ranks whose rows differ.
SHORT = {
    ("aux_loss", "qwen3_moe", "tp2 sp cp2 ep2"),
    ("seq_aux_loss", "qwen3_moe", "tp2 sp pp2 ep2, recomputed"),
    ("global_aux_loss", "nemotron_h", "ep2 dp2"),
}
# Megatron's hybrid models have no virtual stages.
CELLS = [
    pytest.param(*cell, marks=() if cell in SHORT else pytest.mark.long("parity"), id=", ".join(cell))
    for cell in product(AUX_LOSSES, FAMILIES, AUX_LAYOUTS)
    if cell[1] != "nemotron_h" or "vpp" not in cell[2]
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by family. The hybrid one has shared experts. transformers does not train padding token embeddings."""
    hybrid, transformer = (tmp_path_factory.mktemp(name) for name in FAMILIES)
    models.save_model(hybrid, FAMILIES[0], pad_token_id=None, hybrid_override_pattern="ME*E", num_hidden_layers=4)
    models.save_model(transformer, FAMILIES[1], pad_token_id=None)
    return dict(zip(FAMILIES, (hybrid, transformer), strict=True))


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Gradients]:
    """Gradients by family, from transformers."""
    return {name: transformers_gradients(folder, tmp_path_factory.mktemp(name)) for name, folder in folders.items()}


def test_the_order_of_the_chosen_experts_changes_no_sum():
    from mrl.policy.moe import best_first

    scores_TE = torch.rand(2000, 128, generator=torch.Generator().manual_seed(0))
    expected, order_K = scores_TE.topk(6, dim=1), torch.tensor([3, 0, 5, 1, 4, 2])

    def unordered(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        return expected.values[:, order_K], expected.indices[:, order_K]

    scores_TK, ids_TK = best_first(scores_TE, 6, None, None, unordered)
    assert not torch.equal(unordered()[0].sum(dim=1), expected.values.sum(dim=1))
    assert torch.equal(scores_TK.sum(dim=1), expected.values.sum(dim=1)) and torch.equal(ids_TK, expected.indices)


@pytest.mark.parametrize(("kind", "name", "layout"), CELLS)
def test_auxiliary_losses_have_the_gradients_of_slow_formulas(
    ranks: RankPool, folders: dict, plain: dict, tmp_path: Path, name: str, kind: str, layout: str
):
    world_size, megatron = sizes(layout)
    dp = 2 if "dp2" in layout else 1
    _, expected = transformers_gradients(
        folders[name], tmp_path, lambda model: COEFFICIENT * balancing_loss(model, ROWS, kind, num_rows_at_once=dp)
    )
    settings = dict(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=COEFFICIENT, row_multiple=16)
    loss, grads = gradients_of(ranks, folders[name], world_size, megatron | settings)
    assert loss == pytest.approx(plain[name][0], rel=1e-5)
    assert_close(grads, expected, 2e-5)
