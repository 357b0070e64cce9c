"""Checksums against zlib over bytes laid out by numpy."""

from __future__ import annotations

import zlib

import pytest
import torch

from mrl.refit.checksum import checksum


def test_equals_zlib_over_c_order_bytes():
    tensor = torch.randn(6, 5, 4)
    assert checksum(tensor) == zlib.crc32(tensor.numpy().tobytes())
    assert checksum(tensor[1:4, :, 1:3]) == zlib.crc32(tensor.numpy()[1:4, :, 1:3].tobytes())
    assert checksum(tensor.transpose(0, 2)) == zlib.crc32(tensor.numpy().transpose(2, 1, 0).tobytes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_every_dtype_and_shape(dtype):
    tensor = torch.arange(24).to(dtype)
    raw = zlib.crc32(tensor.view(torch.uint8).numpy().tobytes())
    assert checksum(tensor) == checksum(tensor.view(2, 1, 12)) == raw
    assert checksum(tensor[3]) == zlib.crc32(tensor[3:4].view(torch.uint8).numpy().tobytes())


def test_sees_what_float_equality_does_not():
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_parameters_with_gradient():
    assert checksum(torch.nn.Parameter(torch.ones(3))) == checksum(torch.ones(3))
