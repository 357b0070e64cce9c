# SPDX-License-Identifier: Apache-2.0
"""Host memory of optimizer state: one block, no larger than what lies in it, whose parts keep values through moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conversion.families.common import MegatronCoords, MegatronParallel
from conversion.families.registry import family
from mrl.policy.host_block import ALIGNMENT, HostBlock, HostStorages, block_offsets, host_copies

NANO = Path(__file__).parents[3] / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json"


class Blocks:
    """Unpinned memory, and what was asked of it."""

    def __init__(self) -> None:
        self.live: list[Tensor] = []
        self.sizes: list[int] = []

    def allocate(self, num_bytes: int) -> Tensor:
        self.sizes.append(num_bytes)
        self.live.append(torch.full((num_bytes,), 0xAB, dtype=torch.uint8))
        return self.live[-1]

    def release(self, block: Tensor) -> None:
        self.live = [other for other in self.live if other is not block]
        # Whoever still reads it gets noise.
        block.fill_(0xCD)

    def holds(self, tensor: Tensor) -> bool:
        return any(
            block.data_ptr() <= tensor.data_ptr()
            and tensor.data_ptr() + tensor.nbytes <= block.data_ptr() + block.nbytes
            for block in self.live
        )

    def block(self) -> HostBlock:
        return HostBlock(self.allocate, self.release)


def some_tensors(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5,), (1,), (3, 7), (64,), (129,), (2, 2, 2)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.uint8, torch.bfloat16, torch.float32]
    return [
        torch.randn(shape, generator=generator).mul(50).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def to_device(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.data = tensor.clone()


@pytest.mark.parametrize("ep", [1, 8])
def test_a_block_is_hardly_larger_than_the_optimizer_state_of_nano(ep: int):
    config = json.loads(NANO.read_text())
    layout = family(config).megatron_layout(config, MegatronParallel(ep=ep), MegatronCoords(), "bfloat16", "te")
    # Each parameter has a main parameter and two moments, float32; on one node, no more than an eighth of it.
    for replicas in (1, 8):
        sizes = [
            4 * max(torch.Size(content.shape).numel() // replicas, 1) for content in layout.values() for _ in range(3)
        ]
        offsets, num_bytes = block_offsets(sizes)
        assert num_bytes <= 1.02 * sum(sizes)
        assert all(offset % ALIGNMENT == 0 for offset in offsets)
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        assert all(end <= start for end, start in zip(ends, [*offsets[1:], num_bytes], strict=True))


def test_values_and_objects_stay_over_moves_and_the_block_is_made_once():
    blocks, tensors = Blocks(), some_tensors()
    block = blocks.block()
    for step in range(3):
        before, objects = [tensor.clone() for tensor in tensors], [id(tensor) for tensor in tensors]
        block.take_in(tensors)
        block.take_in(tensors)
        assert all(map(blocks.holds, tensors))
        assert [id(tensor) for tensor in tensors] == objects
        # Were two of them to overlap, the writes of one would show in the other.
        assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
        to_device(tensors)
        assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
        for tensor in tensors:
            tensor.add_(step + 1)
    assert blocks.sizes == [block_offsets([tensor.nbytes for tensor in some_tensors()])[1]] == [block.num_bytes]


def test_a_block_that_became_too_small_goes_before_the_next_one_comes():
    blocks, tensors = Blocks(), some_tensors()
    block = blocks.block()
    block.take_in(tensors)
    to_device(tensors)
    tensors += some_tensors(1)
    before = [tensor.clone() for tensor in tensors]
    block.take_in(tensors)
    assert len(blocks.sizes) == 2 and len(blocks.live) == 1
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


def test_what_lies_in_the_block_moves_with_what_joins_it():
    blocks, tensors = Blocks(), some_tensors()
    block = blocks.block()
    block.take_in(tensors)
    tensors += some_tensors(1)
    before = [tensor.clone() for tensor in tensors]
    block.take_in(tensors)
    assert len(blocks.live) == 1 and all(map(blocks.holds, tensors))
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


def test_copies_on_the_host_are_apart_from_their_tensors():
    tensors = some_tensors()
    copies = host_copies(tensors)
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    for copy, then in zip(copies, before, strict=True):
        assert copy.dtype == then.dtype and torch.equal(copy, then)


def test_a_model_without_buffers_needs_no_copies():
    assert host_copies([]) == []


def test_what_is_given_back_leaves_the_block_and_other_tensors_stay():
    blocks, tensors, other = Blocks(), some_tensors(), torch.ones(3)
    block = blocks.block()
    block.take_in(tensors)
    before, address = [tensor.clone() for tensor in tensors], other.data_ptr()
    block.give_back([*tensors, other], torch.device("cpu"))
    assert not any(map(blocks.holds, tensors)) and other.data_ptr() == address
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


def test_storages_leave_and_come_back_under_the_same_tensors():
    whole = torch.arange(12, dtype=torch.float32)
    # As Megatron's parameters lie in its buffers.
    tensors = [whole[:4].view(2, 2), whole[4:], torch.arange(3), torch.empty(0)]
    copies = [tensor.clone() for tensor in tensors]
    blocks: list[Tensor] = []

    def allocate(num_bytes: int) -> Tensor:
        blocks.append(torch.empty(num_bytes, dtype=torch.uint8))
        return blocks[-1]

    storages = HostStorages(tensors, is_constant=False, allocate=allocate)
    storages.place(is_on_device=True)
    assert not blocks
    for value in (0.0, 5.0):
        tensors[1][0] = copies[1][0] = value
        storages.place(is_on_device=False)
        assert whole.untyped_storage().nbytes() == tensors[2].untyped_storage().nbytes() == 0
        storages.place(is_on_device=True)
        assert all(torch.equal(*pair) for pair in zip(tensors, copies, strict=True))
    assert whole[4] == 5.0 and len(blocks) == 1
