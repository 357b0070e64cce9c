# SPDX-License-Identifier: Apache-2.0
"""Prepared copies against Tensor.copy_."""

from __future__ import annotations

import math

import pytest
import torch

from mrl.refit.copies import Copies, TensorCopy, converted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_boxes_of_any_strides(dtype):
    wide = torch.randint(0, 100, (4, 6, 8)).to(dtype)
    boxes = [
        wide[1:3],
        wide[:, 2:5],
        wide[..., 1:4],
        wide[2:3, :, 3:],
        wide.transpose(0, 2)[1:5],
        wide[1, 2, 3],
        wide[:, :, 4:5],
    ]
    copies = []
    for box in boxes:
        for target in (
            torch.zeros_like(box, memory_format=torch.contiguous_format),
            torch.zeros(*box.shape, 2, dtype=dtype)[..., 0],
        ):
            copies.append(TensorCopy(target, box))
            copies.append(TensorCopy(torch.zeros((7, *box.shape), dtype=dtype)[3:4], box[None]))
    prepared = Copies(copies)
    for _ in range(2):
        prepared.run()
        assert all(torch.equal(copy.target, copy.source) for copy in copies)
        wide.add_(1)


def test_only_the_box_is_written():
    around = torch.zeros(5, 6)
    Copies([TensorCopy(around[1:4, 2:5], torch.ones(3, 3))]).run()
    expected = torch.zeros(5, 6)
    expected[1:4, 2:5] = 1
    assert torch.equal(around, expected)


def test_boxes_of_one_form_at_equal_distances_are_copied_together():
    # Experts of a layer as a trainer holds them, behind each other in falling order with others between, and as an
    # engine stacks them.
    arena, stacked = torch.randn(9, 2, 6, 8), torch.zeros(4, 6, 4)
    experts = [arena[7 - 2 * expert, 0] for expert in range(4)]
    halves = [TensorCopy(stacked[expert], weight[:, 4:]) for expert, weight in enumerate(experts)]
    # The last one breaks the row.
    others = torch.zeros(3, 6, 8)
    copies = [
        *halves,
        TensorCopy(others[0], arena[0, 1]),
        TensorCopy(others[1], arena[1, 1]),
        TensorCopy(others[2], arena[4, 1]),
    ]
    for order in (copies, copies[::-1]):
        prepared = Copies(order)
        assert prepared.num_calls == 3
        stacked.zero_()
        others.zero_()
        prepared.run()
        assert all(torch.equal(copy.target, copy.source) for copy in copies)
        arena.add_(1)


def test_casts_and_transforms():
    source = torch.randn(5).bfloat16()
    cast, decay = torch.zeros(5), torch.nn.Parameter(torch.zeros(5))
    Copies([TensorCopy(cast, source), TensorCopy(decay, source, "neg_exp")]).run()
    assert torch.equal(cast, source.float()) and torch.equal(decay.detach(), -torch.exp(source.float()))


def test_negative_zeros_and_nans_keep_their_bits():
    source = torch.tensor([0x8000, 0x7FC1, 0xFF81], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    target = torch.zeros(3, dtype=torch.bfloat16)
    Copies([TensorCopy(target, source)]).run()
    assert torch.equal(target.view(torch.int16), source.view(torch.int16))


@pytest.mark.parametrize("length", [1, 3, 8, 17, 64])
def test_any_box_of_neg_exp_has_the_bits_of_the_whole(length):
    logs = torch.randn(200) * 3
    whole = converted(logs, "neg_exp", torch.float32)
    for start in range(0, 200 - length, 7):
        assert torch.equal(
            converted(logs[start : start + length], "neg_exp", torch.float32), whole[start : start + length]
        )
    strided = torch.empty(200, 2)
    strided[:, 1] = logs
    assert torch.equal(converted(strided[:, 1], "neg_exp", torch.float32), whole)


def test_neg_exp_is_minus_exp_in_float32():
    logs = torch.tensor([0.0, 1.0, -2.0, 2.5], dtype=torch.bfloat16)
    values = converted(logs, "neg_exp", torch.float32)
    assert values.dtype == torch.float32
    assert values.tolist() == pytest.approx([-1.0, -math.e, -math.exp(-2.0), -math.exp(2.5)], rel=1e-6)


def test_values_are_cast_or_left_alone():
    tensor = torch.randn(5)
    assert converted(tensor, None, torch.float32) is tensor
    assert converted(tensor, None, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(converted(tensor.bfloat16(), None, torch.float32), tensor.bfloat16().float())
    with pytest.raises(ValueError, match="unknown transform 'exp'"):
        converted(torch.ones(1), "exp", torch.float32)
