# SPDX-License-Identifier: Apache-2.0
"""Kernels of a refit on a GPU: a launch per kind of box copies all boxes of a round, or takes checksums of its values.

Imported on hosts with GPUs only. Written in Triton, whose interpreter (TRITON_INTERPRET=1) runs them on CPU tensors
too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrl.refit.device_checksum import BLOCK_WORDS, odd_weights
from mrl.refit.strided import Strided, padded, strided

# A thread loads at most 16 bytes at once. Of longer words, fewer places are computed.
_WORD_BYTES = (128, 16, 8, 4, 2, 1)
# Elements that one program copies, and blocks and elements of each that one program adds up at a time.
_COPY_ELEMENTS, _COPY_WARPS = 2048, 8
_SUM_BLOCKS, _SUM_ELEMENTS, _SUM_WARPS = 4, 1024, 4
# Columns of a table: first tile, number, words, words of a run, two lengths; then for each memory its address and
# strides.
_COPY_COLUMNS = tl.constexpr(14)
_SUM_COLUMNS = tl.constexpr(10)


class _Kernel(Protocol):
    """Result of `triton.jit`: launched by `kernel[grid](...)`."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]: ...


class _Kind(NamedTuple):
    """Boxes that one compiled kernel takes."""

    word_bytes: int
    is_run: bool
    """The box is one run of words."""


class _Table(NamedTuple):
    """Boxes of one kind on the device."""

    kind: _Kind
    rows: Tensor
    """int64 [boxes, columns]."""
    row_of_tile: Tensor
    """int32 [tiles]: the row of each program."""


class BoxCopies:
    """Copies of boxes inside one GPU, bytes as they are, by a kernel for each kind of box and tables on the device."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Each source has its target's shape and item size, and shares memory with no target. All lie on one device."""
        self._kept = (list(targets), list(sources))
        boxes = [
            part
            for target, source in zip(targets, sources, strict=True)
            if target.numel()
            for part in _box([source, target]).parts()
        ]
        self._device = targets[0].device
        self._tables = _tables(
            ((box, 0) for box in boxes), lambda box: _COPY_ELEMENTS * min(8, box.word_bytes), self._device
        )

    def run(self) -> None:
        """Queues the kernels that write all targets."""
        with _on(self._device):
            for kind, rows, row_of_tile in self._tables:
                cast(_Kernel, _copy_kernel)[(len(row_of_tile),)](
                    rows,
                    row_of_tile,
                    ELEMENTS=_COPY_ELEMENTS,
                    WORD_BYTES=kind.word_bytes,
                    IS_RUN=kind.is_run,
                    num_warps=_COPY_WARPS,
                )


class BoxSums:
    """`word_sum` of values that stay on one GPU, by a kernel per kind of box and tables that stay on the device."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        """Values that are `is_summable`, on one device."""
        self._kept = list(values)
        self._device = values[0].device
        num_blocks = [triton.cdiv(value.nbytes, 4 * BLOCK_WORDS) for value in values]
        self._inner = odd_weights(BLOCK_WORDS, self._device)
        self._outer = odd_weights(max(num_blocks) + 2, self._device)
        lengths = torch.tensor([value.nbytes for value in values], device=self._device)
        self._initial = self._outer[torch.tensor(num_blocks, device=self._device).clamp(min=1)] * lengths
        boxes = ((_sum_box(value), index) for index, value in enumerate(values) if value.nbytes)
        self._tables = _tables(boxes, lambda _: 4 * _SUM_BLOCKS * BLOCK_WORDS, self._device)

    def take(self) -> Tensor:
        """Current sums of the values, int64 [number of values], on the device; queues kernels."""
        sums = self._initial.clone()
        with _on(self._device):
            for kind, rows, row_of_tile in self._tables:
                cast(_Kernel, _sum_kernel)[(len(row_of_tile),)](
                    rows,
                    row_of_tile,
                    self._inner,
                    self._outer,
                    sums,
                    BLOCK=BLOCK_WORDS,
                    BLOCKS=_SUM_BLOCKS,
                    ELEMENTS=_SUM_ELEMENTS,
                    WORD_BYTES=kind.word_bytes,
                    IS_RUN=kind.is_run,
                    num_warps=_SUM_WARPS,
                )
        return sums


def is_summable(value: Tensor) -> bool:
    """True if `BoxSums` takes a value: unless it has more dimensions than a row of the table."""
    return not value.numel() or strided([value], max_word_bytes=1).is_walkable


def _box(tensors: Sequence[Tensor]) -> Strided:
    word_bytes = strided(tensors, max_word_bytes=_WORD_BYTES[0]).word_bytes
    return strided(tensors, max_word_bytes=next(known for known in _WORD_BYTES if known <= word_bytes))


def _sum_box(value: Tensor) -> Strided:
    """A box of words of four bytes or of a multiple of them; else of single bytes."""
    box = _box([value])
    if box.word_bytes >= 16:
        return box
    return strided([value], max_word_bytes=4 if box.word_bytes >= 4 else 1)


def _tables(
    boxes: Iterable[tuple[Strided, int]], tile_bytes: Callable[[Strided], int], device: torch.device
) -> list[_Table]:
    """A table for each kind of box, each with the number beside it; a program takes `tile_bytes` of a box."""
    by_kind: dict[_Kind, list[tuple[Strided, int]]] = defaultdict(list)
    for box, number in boxes:
        by_kind[_Kind(box.word_bytes, not box.sizes)].append((box, number))
    tables = []
    for kind, found in by_kind.items():
        rows, counts, num_tiles = [], [], 0
        for box, number in found:
            memories = (
                value
                for address, strides in zip(box.addresses, box.strides, strict=True)
                for value in (address, *padded(strides, 0))
            )
            rows.append((num_tiles, number, box.num_words, box.run, *padded(box.sizes, 1)[1:], *memories))
            counts.append(triton.cdiv(box.num_words * box.word_bytes, tile_bytes(box)))
            num_tiles += counts[-1]
        row_of_tile = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(counts))
        tables.append(_Table(kind, torch.tensor(rows, dtype=torch.int64).to(device), row_of_tile.to(device)))
    return tables


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
    else:
        with torch.cuda.device(device):
            yield


@triton.jit
def _offsets(row, memory, start, columns, IS_RUN: tl.constexpr):
    """Offset in a memory, in words, of each of the words `start + columns`."""
    if IS_RUN:
        return start + columns
    run = tl.load(row + 3)
    size1 = tl.load(row + 4)
    size2 = tl.load(row + 5)
    first = start // run
    place = (start - first * run).to(tl.int32) + columns
    rows = place // run.to(tl.int32)
    place -= rows * run.to(tl.int32)
    last = (first % size2).to(tl.int32) + rows
    carry = last // size2.to(tl.int32)
    last -= carry * size2.to(tl.int32)
    first = first // size2
    middle = (first % size1).to(tl.int32) + carry
    carry = middle // size1.to(tl.int32)
    middle -= carry * size1.to(tl.int32)
    outer = first // size1 + carry
    return outer * tl.load(memory + 1) + middle * tl.load(memory + 2) + last * tl.load(memory + 3) + place


@triton.jit
def _elements(memory, offsets, ELEMENT: tl.constexpr, COUNT: tl.constexpr):
    """Pointers to the elements of words, one more dimension: `COUNT` in each."""
    address = tl.load(memory).to(tl.pointer_type(ELEMENT))
    if COUNT > 1:
        address = tl.multiple_of(address, 16)
    return address + tl.expand_dims(offsets * COUNT, -1) + tl.arange(0, COUNT)


@triton.jit
def _copy_kernel(table, row_of_tile, ELEMENTS: tl.constexpr, WORD_BYTES: tl.constexpr, IS_RUN: tl.constexpr):
    COUNT: tl.constexpr = WORD_BYTES // 8 if WORD_BYTES > 8 else 1
    WORDS: tl.constexpr = ELEMENTS // COUNT
    ELEMENT: tl.constexpr = (
        tl.int64 if WORD_BYTES >= 8 else (tl.int32 if WORD_BYTES == 4 else (tl.int16 if WORD_BYTES == 2 else tl.int8))
    )
    tile = tl.program_id(0)
    row = table + tl.load(row_of_tile + tile).to(tl.int64) * _COPY_COLUMNS
    start = (tile - tl.load(row)) * WORDS
    columns = tl.arange(0, WORDS)
    inside = (start + columns < tl.load(row + 2))[:, None]
    source = _elements(row + 6, _offsets(row, row + 6, start, columns, IS_RUN), ELEMENT, COUNT)
    target = _elements(row + 10, _offsets(row, row + 10, start, columns, IS_RUN), ELEMENT, COUNT)
    tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def _sum_kernel(
    table,
    row_of_tile,
    inner,
    outer,
    sums,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    IS_RUN: tl.constexpr,
):
    """Adds up some blocks of a value: all their columns first, so that a column weight is read and multiplied once."""
    COUNT: tl.constexpr = WORD_BYTES // 4 if WORD_BYTES > 4 else 1
    WORDS: tl.constexpr = ELEMENTS // COUNT
    BYTES: tl.constexpr = 4 if WORD_BYTES == 1 else 1
    tile = tl.program_id(0)
    row = table + tl.load(row_of_tile + tile).to(tl.int64) * _SUM_COLUMNS
    num_words = tl.load(row + 2)
    block = (tile - tl.load(row)) * BLOCKS
    blocks = tl.arange(0, BLOCKS)
    weights = tl.load(
        outer + block + blocks, mask=(block + blocks) * BLOCK < (num_words * COUNT + BYTES - 1) // BYTES, other=0
    )
    total = tl.zeros([WORDS, COUNT], dtype=tl.int64)
    for at in range(0, BLOCK, ELEMENTS):
        columns = blocks[:, None] * (BLOCK // COUNT) + at // COUNT + tl.arange(0, WORDS)[None, :]
        if BYTES == 1:
            start = block * (BLOCK // COUNT)
            inside = (start + columns < num_words)[:, :, None]
            elements = _elements(row + 6, _offsets(row, row + 6, start, columns, IS_RUN), tl.int32, COUNT)
            values = tl.load(elements, mask=inside, other=0, cache_modifier=".cg")
        else:
            start = block * (BLOCK * 4)
            values = tl.zeros([BLOCKS, WORDS, COUNT], dtype=tl.int32)
            for index in tl.static_range(4):
                inside = (start + columns * 4 + index < num_words)[:, :, None]
                elements = _elements(
                    row + 6, _offsets(row, row + 6, start, columns * 4 + index, IS_RUN), tl.uint8, COUNT
                )
                values |= tl.load(elements, mask=inside, other=0, cache_modifier=".cg").to(tl.int32) << (8 * index)
        added = tl.sum(values.to(tl.int64) * weights[:, None, None], axis=0)
        places = at + (tl.arange(0, WORDS) * COUNT)[:, None] + tl.arange(0, COUNT)
        total += added * tl.load(inner + places)
    # Integer sums wrap around and do not depend on their order.
    tl.atomic_add(sums + tl.load(row + 1), tl.sum(total), sem="relaxed")
