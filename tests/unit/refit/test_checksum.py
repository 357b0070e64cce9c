# SPDX-License-Identifier: Apache-2.0
"""Checksums against zlib over bytes laid out by numpy."""

from __future__ import annotations

import zlib

import pytest
import torch

from mrl.refit.checksum import Checksums, Summed, checksum


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


@pytest.mark.parametrize("shape", [(3, 700, 300), (2, 600_000), (2, 3, 300_000)], ids=["rows", "long_rows", "outer"])
def test_large_strided_boxes_are_gathered_in_order(shape):
    wide = torch.randint(0, 1000, shape).to(torch.int32)
    for box in (wide[..., : shape[-1] // 2], wide[..., 1:], wide[:, 1:], wide.transpose(0, 1)):
        assert checksum(box) == zlib.crc32(box.contiguous().numpy().tobytes())


def test_prepared_checksums_follow_the_bytes():
    tensors = [torch.randn(8, 6), torch.randn(8, 6)[:, 1:4], torch.randn(())]
    prepared = Checksums([Summed(tensor, None, tensor.dtype) for tensor in tensors])
    for _ in range(2):
        assert prepared.take().tolist() == [zlib.crc32(tensor.contiguous().numpy().tobytes()) for tensor in tensors]
        for tensor in tensors:
            tensor.add_(1.0)
    assert Checksums([]).take().tolist() == []
