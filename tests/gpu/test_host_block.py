# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory of optimizer state. Needs a GPU; torch is the only library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mrl.policy.host_block import HostBlock, host_copies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# 19.96 MB: alone, torch's pinned allocator makes 33.5 of it.
NUM_ELEMENTS = 4_990_000


def resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_state_lies_pinned_in_a_block_of_its_size_and_comes_back():
    tensors = [torch.randn(NUM_ELEMENTS, device="cuda") for _ in range(10)]
    values = [tensor.cpu() for tensor in tensors]
    block = HostBlock()
    before = resident_bytes()
    block.take_in(tensors)
    torch.cuda.synchronize()
    assert resident_bytes() - before < 1.1 * sum(tensor.nbytes for tensor in tensors)
    assert all(tensor.is_pinned() and torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    block.give_back(tensors, torch.device("cuda"))
    # More than the block holds, so that it is given back and made anew.
    tensors += [value.cuda() for value in values]
    block.take_in(tensors)
    torch.cuda.synchronize()
    assert all(
        tensor.is_pinned() and torch.equal(tensor, value) for tensor, value in zip(tensors, values * 2, strict=True)
    )


def test_copies_of_weights_are_pinned():
    tensor = torch.randn(NUM_ELEMENTS, device="cuda")
    (copy,) = host_copies([tensor])
    assert copy.is_pinned() and torch.equal(copy, tensor.cpu())
