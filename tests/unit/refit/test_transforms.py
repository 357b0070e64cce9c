"""Transforms against hand-worked values, and that a box transforms as the whole does: checksums are taken by box."""

from __future__ import annotations

import math

import pytest
import torch

from conversion.tensors import dtype_name, torch_dtype
from mrl.refit.transforms import apply


def test_neg_exp_is_minus_exp_in_float32():
    logs = torch.tensor([0.0, 1.0, -2.0, 2.5], dtype=torch.bfloat16)
    values = apply(logs, "neg_exp", torch.float32)
    assert values.dtype == torch.float32
    assert values.tolist() == pytest.approx([-1.0, -math.e, -math.exp(-2.0), -math.exp(2.5)], rel=1e-6)


@pytest.mark.parametrize("length", [1, 3, 8, 17, 64])
def test_any_box_of_neg_exp_has_the_bits_of_the_whole(length):
    logs = torch.randn(200) * 3
    whole = apply(logs, "neg_exp", torch.float32)
    for start in range(0, 200 - length, 7):
        assert torch.equal(apply(logs[start : start + length], "neg_exp", torch.float32), whole[start : start + length])
    strided = torch.empty(200, 2)
    strided[:, 1] = logs
    assert torch.equal(apply(strided[:, 1], "neg_exp", torch.float32), whole)


def test_casts_and_leaves_alone():
    tensor = torch.randn(5)
    assert apply(tensor, None, torch.float32) is tensor
    assert apply(tensor, None, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(apply(tensor.bfloat16(), None, torch.float32), tensor.bfloat16().float())


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown transform 'exp'"):
        apply(torch.ones(1), "exp", torch.float32)
    with pytest.raises(ValueError, match="float33"):
        torch_dtype("float33")
    with pytest.raises(ValueError, match="nn"):
        torch_dtype("nn")


def test_dtype_names_are_inverse():
    assert all(torch_dtype(dtype_name(dtype)) == dtype for dtype in (torch.float32, torch.bfloat16, torch.int64))
