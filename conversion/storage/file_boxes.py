"""Boxes of tensors that lie in files: read straight into tensors, without mapping files, so that memory holds only what was asked for."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from isal import isal_zlib
from torch import Tensor

from conversion.boxes import Box, SlotLayout, full, intersect, lengths, volume
from conversion.tensors import box_view, transformed

BLOCK_BYTES = 4 << 20
"""What is read, hashed and written as one: small enough for the caches of a core, large enough to hide the cost of a call."""


class BoxSource(Protocol):
    """Tensors by name, of which boxes can be read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """dtype of a tensor as it is stored."""
        ...

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box into a tensor of the box's lengths, cast to its dtype."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A row-major tensor at a place in a file."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which it shares."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def blocks(shape: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Boxes that follow each other in row-major order, tile the shape, and have at most `max_elements` (at least 1) each."""
    if math.prod(shape) <= max_elements:
        yield full(shape)
        return
    num_rows, *rest = shape
    row = math.prod(rest)
    if row > max_elements:
        for index in range(num_rows):
            yield from (((index, index + 1), *box) for box in blocks(rest, max_elements))
        return
    step = max_elements // row
    for start in range(0, num_rows, step):
        yield ((start, min(start + step, num_rows)), *full(rest))


def read_stored(file: int, stored: StoredTensor, box: Box, target: Tensor) -> None:
    """Copies a box of a stored tensor into `target`, which has the box's lengths; casts to its dtype.

    `file` is a descriptor of `stored.path`.

    Raises:
        ValueError: the file ends before the tensor does.
    """
    if target.dtype != stored.dtype or target.device.type != "cpu" or (_is_contiguous(stored.shape, box) and not target.is_contiguous()):
        for part in blocks(lengths(box), max(1, BLOCK_BYTES // stored.dtype.itemsize)):
            block = torch.empty(lengths(part), dtype=stored.dtype)
            where = tuple((low + start, low + stop) for (start, stop), (low, _) in zip(part, box, strict=True))
            read_stored(file, stored, where, block)
            target[tuple(slice(start, stop) for start, stop in part)].copy_(block)
    elif _is_contiguous(stored.shape, box):
        offset = 0
        for (start, _), stride in zip(box, _strides(stored.shape), strict=True):
            offset += start * stride
        read_exactly(file, stored.path, stored.offset + offset * stored.dtype.itemsize, byte_view(target))
    else:
        _read_columns(file, stored, box, target)


def _read_columns(file: int, stored: StoredTensor, box: Box, target: Tensor) -> None:
    """Reads whole rows, some at a time, and keeps the box's part of each."""
    (start, stop), inner = box[0], stored.shape[1:]
    row_bytes = math.prod(inner) * stored.dtype.itemsize
    if row_bytes > BLOCK_BYTES:
        for index in range(start, stop):
            row = StoredTensor(stored.path, stored.offset + index * row_bytes, stored.dtype, inner)
            read_stored(file, row, box[1:], target[index - start])
        return
    step = BLOCK_BYTES // row_bytes
    buffer = torch.empty((min(step, stop - start), *inner), dtype=stored.dtype)
    for first in range(start, stop, step):
        rows = buffer[: min(step, stop - first)]
        read_exactly(file, stored.path, stored.offset + first * row_bytes, byte_view(rows))
        part = rows[(slice(None), *(slice(low, high) for low, high in box[1:]))]
        target[first - start : first - start + len(rows)].copy_(part)


def _is_contiguous(shape: Sequence[int], box: Box) -> bool:
    is_inside = True
    for size, (start, stop) in zip(reversed(shape), reversed(box), strict=True):
        if not is_inside and stop - start > 1:
            return False
        is_inside = is_inside and (start, stop) == (0, size)
    return True


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def read_exactly(file: int, path: Path, offset: int, target: memoryview) -> None:
    """Fills `target` from byte `offset` of a file.

    Raises:
        ValueError: the file ends before.
    """
    done = 0
    while done < len(target):
        num_bytes = os.preadv(file, [target[done:]], offset + done)
        if not num_bytes:
            raise ValueError(f"{path} ends at byte {offset + done}, before the tensor that it should hold; the file is damaged")
        done += num_bytes


@torch.no_grad()
def fill_from(tensor: Tensor, content: SlotLayout, source: BoxSource) -> None:
    """Writes every piece of a slot straight from its source into the slot's tensor, cast to its dtype; padding becomes zero."""
    for box in content.padding:
        box_view(tensor, box).zero_()
    for piece in content.pieces:
        extra = len(piece.local) - len(piece.box)
        target = box_view(tensor[tuple(start for start, _ in piece.local[:extra])], piece.local[extra:])
        if piece.transform is None:
            source.read_into(piece.name, piece.box, target)
        else:
            values = torch.empty(lengths(piece.box), dtype=source.dtype(piece.name))
            source.read_into(piece.name, piece.box, values)
            target.copy_(transformed(values, piece.transform))


def content_checksums(source: BoxSource, name: str, dtype: torch.dtype) -> tuple[str, int]:
    """sha256 and CRC-32 of a tensor's content in a dtype, row by row, little-endian. Reads one block after the other."""
    digest, crc32, shape = hashlib.sha256(), 0, source.shape(name)
    max_elements = BLOCK_BYTES // dtype.itemsize
    buffer = torch.empty(min(math.prod(shape), max_elements), dtype=dtype)
    for box in blocks(shape, max_elements):
        block = buffer[: volume(box)].view(lengths(box))
        source.read_into(name, box, block)
        digest.update(byte_view(block))
        crc32 = isal_zlib.crc32(byte_view(block), crc32)
    return digest.hexdigest(), crc32


def overlap(stored: Box, wanted: Box) -> tuple[Box, Box, Box] | None:
    """The common part of two boxes as (box, the same counted from `stored`, from `wanted`), or None where they have none."""
    common = intersect(stored, wanted)
    if common is None:
        return None
    counted = [tuple((a - low, b - low) for (a, b), (low, _) in zip(common, origin, strict=True)) for origin in (stored, wanted)]
    return common, counted[0], counted[1]
