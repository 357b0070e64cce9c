"""Prepared copies against Tensor.copy_."""

from __future__ import annotations

import pytest
import torch

from mrl.refit.copies import Copies, Copy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_boxes_of_any_strides(dtype):
    wide = torch.randint(0, 100, (4, 6, 8)).to(dtype)
    boxes = [wide[1:3], wide[:, 2:5], wide[..., 1:4], wide[2:3, :, 3:], wide.transpose(0, 2)[1:5], wide[1, 2, 3], wide[:, :, 4:5]]
    copies = []
    for box in boxes:
        for target in (torch.zeros_like(box, memory_format=torch.contiguous_format), torch.zeros(*box.shape, 2, dtype=dtype)[..., 0]):
            copies.append(Copy(target, box))
            copies.append(Copy(torch.zeros((7, *box.shape), dtype=dtype)[3:4], box[None]))
    prepared = Copies(copies)
    for _ in range(2):
        prepared.run()
        assert all(torch.equal(copy.target, copy.source) for copy in copies)
        wide.add_(1)


def test_only_the_box_is_written():
    around = torch.zeros(5, 6)
    Copies([Copy(around[1:4, 2:5], torch.ones(3, 3))]).run()
    expected = torch.zeros(5, 6)
    expected[1:4, 2:5] = 1
    assert torch.equal(around, expected)


def test_boxes_of_one_form_at_equal_distances_are_copied_together():
    # Experts of a layer as a trainer holds them, behind each other in falling order with others between, and as an engine stacks them.
    arena, stacked = torch.randn(9, 2, 6, 8), torch.zeros(4, 6, 4)
    experts = [arena[7 - 2 * expert, 0] for expert in range(4)]
    halves = [Copy(stacked[expert], weight[:, 4:]) for expert, weight in enumerate(experts)]
    # The last one breaks the row.
    others = torch.zeros(3, 6, 8)
    copies = [*halves, Copy(others[0], arena[0, 1]), Copy(others[1], arena[1, 1]), Copy(others[2], arena[4, 1])]
    for order in (copies, copies[::-1]):
        prepared = Copies(order)
        assert len(prepared._on_host) == 3
        stacked.zero_()
        others.zero_()
        prepared.run()
        assert all(torch.equal(copy.target, copy.source) for copy in copies)
        arena.add_(1)


def test_casts_and_transforms():
    source = torch.randn(5).bfloat16()
    cast, decay = torch.zeros(5), torch.nn.Parameter(torch.zeros(5))
    Copies([Copy(cast, source), Copy(decay, source, "neg_exp")]).run()
    assert torch.equal(cast, source.float()) and torch.equal(decay.detach(), -torch.exp(source.float()))


def test_negative_zeros_and_nans_keep_their_bits():
    source = torch.tensor([0x8000, 0x7FC1, 0xFF81], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    target = torch.zeros(3, dtype=torch.bfloat16)
    Copies([Copy(target, source)]).run()
    assert torch.equal(target.view(torch.int16), source.view(torch.int16))
