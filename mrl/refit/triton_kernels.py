# SPDX-License-Identifier: Apache-2.0
"""Kernels of a refit on a GPU: one launch copies all boxes of a round, one takes the checksums of all of a round's boxes.

Imported on hosts with GPUs only. Written in Triton, whose interpreter (TRITON_INTERPRET=1) runs them on CPU tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from mrl.refit.device_checksum import BLOCK_WORDS, odd_weights
from mrl.refit.strided import Strided, padded, strided

# Words that one program copies: few enough registers a thread for two programs on a multiprocessor.
_COPY_WORDS = 2048
_COPY_WARPS = 16
# Words of a block that one program adds up at a time.
_STEP_WORDS = 1024
_SUM_WARPS = 8
# Columns of a table: first tile, bytes of a word, words, words of a run, two lengths; then for each memory its address and strides.
_COPY_COLUMNS = tl.constexpr(14)
_SUM_COLUMNS = tl.constexpr(10)


class _Kernel(Protocol):
    """Result of `triton.jit`: launched by `kernel[grid](...)`."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]: ...


class BoxCopies:
    """Copies of boxes inside one GPU, bytes as they are, by one kernel and a table that stays on the device."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Each source has its target's shape and item size, and shares no memory with any target. All lie on one device."""
        self._kept = (list(targets), list(sources))
        rows, num_tiles = [], 0
        for target, source in zip(targets, sources, strict=True):
            for part in strided([source, target], max_word_bytes=8).parts() if target.numel() else ():
                rows.append(_row(num_tiles, part))
                num_tiles += triton.cdiv(part.num_words, _COPY_WORDS)
        self._table, self._row_of_tile = _on_device(rows, num_tiles, targets[0].device)

    def run(self) -> None:
        """Queues one kernel that writes all targets."""
        if not len(self._row_of_tile):
            return
        with _on(self._table.device):
            cast(_Kernel, _copy_kernel)[(len(self._row_of_tile),)](self._table, self._row_of_tile, BLOCK=_COPY_WORDS, num_warps=_COPY_WARPS)


class BoxSums:
    """`word_sum` of values that stay where they are on one GPU, by one kernel and a table that stays on the device."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        """Values of which `is_summable` holds, on one device."""
        self._kept = list(values)
        device = values[0].device
        num_blocks = [triton.cdiv(value.nbytes, 4 * BLOCK_WORDS) for value in values]
        self._inner, self._outer = odd_weights(BLOCK_WORDS, device), odd_weights(max(num_blocks) + 2, device)
        rows, num_tiles = [], 0
        for value, blocks in zip(values, num_blocks, strict=True):
            if blocks:
                box = strided([value], max_word_bytes=4)
                if box.word_bytes < 4:
                    box = strided([value], max_word_bytes=1)
                rows.append(_row(num_tiles, box))
            else:
                rows.append((num_tiles, *[0] * (_SUM_COLUMNS.value - 1)))
            num_tiles += blocks
        lengths = torch.tensor([value.nbytes for value in values], device=device)
        self._initial = self._outer[torch.tensor(num_blocks, device=device).clamp(min=1)] * lengths
        self._table, self._row_of_tile = _on_device(rows, num_tiles, device)

    def take(self) -> Tensor:
        """Current sums of the values, int64 [number of values], on the device; queues one kernel."""
        sums = self._initial.clone()
        if len(self._row_of_tile):
            with _on(sums.device):
                cast(_Kernel, _sum_kernel)[(len(self._row_of_tile),)](
                    self._table,
                    self._row_of_tile,
                    self._inner,
                    self._outer,
                    sums,
                    BLOCK=BLOCK_WORDS,
                    STEP=_STEP_WORDS,
                    num_warps=_SUM_WARPS,
                )
        return sums


def is_summable(value: Tensor) -> bool:
    """Tells whether `BoxSums` takes a value: unless it has more dimensions than a row of the table."""
    return not value.numel() or strided([value], max_word_bytes=1).is_walkable


def _row(first_tile: int, box: Strided) -> tuple[int, ...]:
    memories = (value for address, strides in zip(box.addresses, box.strides, strict=True) for value in (address, *padded(strides, 0)))
    return (first_tile, box.word_bytes, box.num_words, box.run, *padded(box.sizes, 1)[1:], *memories)


def _on_device(rows: Sequence[Sequence[int]], num_tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table (int64), and for each tile its row (int32). A row's first column is its first tile."""
    table = torch.tensor(rows, dtype=torch.int64)
    counts = torch.diff(table[:, 0], append=torch.tensor([num_tiles])) if rows else table.flatten()
    return table.to(device), torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), counts).to(device)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
    else:
        with torch.cuda.device(device):
            yield


@triton.jit
def _places(start, columns, run, size1, size2):
    """Returns each word's index in the outer dimensions, and its place in the run, for the words `start + columns`."""
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
    return first // size1 + carry, middle, last, place


@triton.jit
def _offsets(memory, outer, middle, last, place):
    return outer * tl.load(memory + 1) + middle * tl.load(memory + 2) + last * tl.load(memory + 3) + place


@triton.jit
def _copy_tile(row, start, BLOCK: tl.constexpr, WORD: tl.constexpr):
    source = tl.load(row + 6).to(tl.pointer_type(WORD))
    target = tl.load(row + 10).to(tl.pointer_type(WORD))
    num_words = tl.load(row + 2)
    run = tl.load(row + 3)
    columns = tl.arange(0, BLOCK)
    inside = start + columns < num_words
    if run == num_words:
        values = tl.load(source + start + columns, mask=inside)
        tl.store(target + start + columns, values, mask=inside)
    else:
        outer, middle, last, place = _places(start, columns, run, tl.load(row + 4), tl.load(row + 5))
        values = tl.load(source + _offsets(row + 6, outer, middle, last, place), mask=inside)
        tl.store(target + _offsets(row + 10, outer, middle, last, place), values, mask=inside)


@triton.jit
def _copy_kernel(table, row_of_tile, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    row = table + tl.load(row_of_tile + tile).to(tl.int64) * _COPY_COLUMNS
    start = (tile - tl.load(row)) * BLOCK
    word_bytes = tl.load(row + 1)
    if word_bytes == 8:
        _copy_tile(row, start, BLOCK, tl.int64)
    elif word_bytes == 4:
        _copy_tile(row, start, BLOCK, tl.int32)
    elif word_bytes == 2:
        _copy_tile(row, start, BLOCK, tl.int16)
    else:
        _copy_tile(row, start, BLOCK, tl.int8)


@triton.jit
def _load_units(row, start, columns, UNIT: tl.constexpr):
    """Loads words or bytes of a value at `start + columns` in C order, zeros behind its end. Bypasses L1, which holds the weights."""
    address = tl.load(row + 6).to(tl.pointer_type(UNIT))
    num_units = tl.load(row + 2)
    run = tl.load(row + 3)
    offsets = start + columns
    inside = offsets < num_units
    if run != num_units:
        outer, middle, last, place = _places(start, columns, run, tl.load(row + 4), tl.load(row + 5))
        offsets = _offsets(row + 6, outer, middle, last, place)
    return tl.load(address + offsets, mask=inside, other=0, cache_modifier=".cg")


@triton.jit
def _sum_kernel(table, row_of_tile, inner, outer, sums, BLOCK: tl.constexpr, STEP: tl.constexpr):
    tile = tl.program_id(0)
    value = tl.load(row_of_tile + tile).to(tl.int64)
    row = table + value * _SUM_COLUMNS
    block = tile - tl.load(row)
    word_bytes = tl.load(row + 1)
    num_bytes = tl.load(row + 2) * word_bytes - block * BLOCK * 4
    total = tl.zeros([STEP], dtype=tl.int64)
    for at in range(0, tl.minimum((num_bytes + 3) // 4, BLOCK).to(tl.int32), STEP):
        columns = at + tl.arange(0, STEP)
        words = tl.zeros([STEP], dtype=tl.int32)
        if word_bytes == 4:
            words = _load_units(row, block * BLOCK, columns, tl.int32)
        else:
            for index in tl.static_range(4):
                byte = _load_units(row, block * BLOCK * 4, columns * 4 + index, tl.uint8)
                words |= byte.to(tl.int32) << (8 * index)
        total += words.to(tl.int64) * tl.load(inner + columns)
    # Integer sums wrap around and do not depend on their order.
    tl.atomic_add(sums + value, tl.sum(total) * tl.load(outer + block), sem="relaxed")
