# SPDX-License-Identifier: Apache-2.0
"""Noise by canonical position: every holder of an element changes it alike, and every element changes."""

import pytest
import torch

from conversion.boxes import Layout, Piece, Slot, SlotLayout, full
from mrl.policy.weights import OFFSET, SCALE, canonical_noise, perturb

SHAPE = (6, 8)


def layout(box: tuple[tuple[int, int], ...], dtype: str = "float32") -> tuple[Layout, dict[Slot, torch.Tensor]]:
    """One slot of the canonical tensor `w`, whose element (i, j) is 10 i + j, with a row of padding behind the box."""
    rows, columns = (stop - start for start, stop in box)
    whole = 10.0 * torch.arange(SHAPE[0])[:, None] + torch.arange(SHAPE[1])
    tensor = torch.zeros(rows + 1, columns, dtype=getattr(torch, dtype))
    tensor[:rows] = whole[tuple(slice(*span) for span in box)]
    piece = Piece("w", box, full((rows, columns)))
    return {
        Slot("slot"): SlotLayout((rows + 1, columns), dtype, (piece,), padding=(((rows, rows + 1), (0, columns)),))
    }, {Slot("slot"): tensor}


def perturbed(box: tuple[tuple[int, int], ...], dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    table, tensors = layout(box, dtype)
    perturb(tensors, table, seed=seed)
    return tensors[Slot("slot")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_cut_gives_the_same_elements(dtype: str):
    whole = perturbed(full(SHAPE), dtype)[:6]
    for box in (((0, 3), (0, 8)), ((3, 6), (0, 8)), ((0, 6), (4, 8)), ((2, 5), (1, 7))):
        part = perturbed(box, dtype)
        assert torch.equal(part[:-1], whole[tuple(slice(*span) for span in box)])
        assert not part[-1].any()


def test_every_element_changes_a_little():
    before = layout(full(SHAPE))[1][Slot("slot")]
    change = (perturbed(full(SHAPE)) - before)[:6]
    assert change.all()
    assert (change.abs() <= before[:6] * SCALE + OFFSET + 1e-6).all()


def test_seed_and_name_count():
    box = full(SHAPE)
    noise = canonical_noise("w", box, seed=0)
    assert not torch.equal(noise, canonical_noise("w", box, seed=1))
    assert not torch.equal(noise, canonical_noise("v", box, seed=0))


def test_noise_is_spread_evenly():
    noise = canonical_noise("w", ((0, 300), (0, 400)), seed=0)
    assert noise.unique().numel() > 0.99 * noise.numel()
    counts = torch.histc(noise, bins=20, min=-1, max=1)
    assert (counts - noise.numel() / 20).abs().max() < 0.05 * noise.numel() / 20
    # Neighbours say nothing of each other.
    for first, second in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        assert torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].abs() < 0.02
