"""Views and value changes."""

from __future__ import annotations

import pytest
import torch

from conversion.tensors import box_view, dtype_name, torch_dtype, transformed


def test_a_box_is_a_view():
    tensor = torch.zeros(3, 3)
    box_view(tensor, ((1, 2), (0, 2))).fill_(1)
    assert tensor.tolist() == [[0, 0, 0], [1, 1, 0], [0, 0, 0]]


def test_neg_exp_is_computed_in_float32():
    tensor = torch.tensor([0.3, 1.7], dtype=torch.bfloat16)
    assert torch.equal(transformed(tensor, "neg_exp"), -torch.exp(tensor.float()))
    assert transformed(tensor, None) is tensor


def test_dtypes_have_names():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        assert torch_dtype(dtype_name(dtype)) is dtype
    with pytest.raises(ValueError, match="float8_e4m3fn of a weight is not supported"):
        dtype_name(torch.float8_e4m3fn)
