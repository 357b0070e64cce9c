# SPDX-License-Identifier: Apache-2.0
"""Views, value changes, and boxes of stored tensors."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch

from conversion import tensors
from conversion.boxes import lengths
from conversion.tensors import (
    StoredTensor,
    blocks,
    box_view,
    byte_view,
    dtype_name,
    read_ahead,
    read_stored,
    torch_dtype,
    transformed,
)
from tests.waiting import HANG_S


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


@pytest.mark.parametrize("name", ["float33", "nn", "__class__", "complex64"])
def test_a_name_of_no_weight_dtype_is_refused(name: str):
    with pytest.raises(ValueError, match=name):
        torch_dtype(name)
    with pytest.raises(ValueError, match="float8_e4m3fn of a weight is not supported"):
        dtype_name(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block_bytes", [16, 100, 1 << 20])
def test_every_box_of_a_stored_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block_bytes: int
):
    """Rows larger and smaller than a block, parts of rows, contiguous targets and others, with and without a cast."""
    monkeypatch.setattr(tensors, "BLOCK_BYTES", block_bytes)
    tensor = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
    path = tmp_path / "data"
    path.write_bytes(b"start" + bytes(byte_view(tensor)))
    stored = StoredTensor(path, 5, torch.float32, (2, 3, 4))
    ranges = [[(start, stop) for stop in range(size + 1) for start in range(stop)] for size in tensor.shape]
    with path.open("rb") as file:
        for box in itertools.product(*ranges):
            whole = torch.full((*lengths(box)[:2], 9), -1, dtype=dtype)
            for target in (torch.empty(lengths(box), dtype=dtype), whole[..., 2 : 2 + lengths(box)[2]]):
                read_stored(file.fileno(), stored, box, target)
                assert torch.equal(target, box_view(tensor, box).to(dtype)), box
        number = torch.empty((), dtype=dtype)
        read_stored(file.fileno(), StoredTensor(path, 5 + 4 * 7, torch.float32, ()), (), number)
        assert number.item() == 7
        with pytest.raises(ValueError, match="ends at byte 101, before the tensor"):
            read_stored(file.fileno(), StoredTensor(path, 5, torch.float32, (30,)), ((0, 30),), torch.empty(30))


@pytest.mark.parametrize("shape", [(), (5,), (7, 3), (2, 3, 4), (0, 3), (3, 0)])
def test_blocks_tile_a_tensor_in_order(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]):
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 24)
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = [box_view(tensor, box).reshape(-1) for box in blocks(shape, 8)]
    assert torch.equal(torch.cat(parts) if parts else tensor.reshape(-1), tensor.reshape(-1))


def test_a_tensor_stays_while_the_next_one_is_read():
    is_filled = [threading.Event() for _ in range(4)]

    def fill(index: int, tensor: torch.Tensor) -> None:
        tensor.fill_(index)
        is_filled[index].set()

    for index, tensor in enumerate(read_ahead(range(4), lambda index: ((4 - index, 2), torch.float32), fill)):
        assert index == 3 or is_filled[index + 1].wait(HANG_S)
        assert tensor.tolist() == [[index, index]] * (4 - index)
        # torch.save writes whole storages.
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
