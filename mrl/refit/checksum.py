"""Checksum of the bytes of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    # Three times the speed of zlib on hosts with carry-less multiplication; both give the same number.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32


def checksum(tensor: Tensor) -> int:
    """crc32 over the tensor's elements in C order, whatever its strides. CPU tensors only."""
    return crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
