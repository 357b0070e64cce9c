# SPDX-License-Identifier: Apache-2.0
"""Boxes in the form of a GPU kernel: runs of words, and the strides between the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from torch import Tensor

# Outer dimensions in a row of a kernel's table; a box with more is split.
MAX_OUTER = 3
# Kernels count within a run with 32 bits.
_MAX_STRIDED_RUN = 1 << 30


class Strided(NamedTuple):
    """A box of one shape in some memories: `sizes` runs of `run` words. Lengths and strides are in words, C order."""

    addresses: tuple[int, ...]
    word_bytes: int
    run: int
    """Words that stand next to each other in every memory."""
    sizes: tuple[int, ...]
    """Sizes of the dimensions outside the runs, each longer than 1; none where the box is a single run."""
    strides: tuple[tuple[int, ...], ...]
    """Strides of those dimensions, for each memory."""

    @property
    def num_words(self) -> int:
        return self.run * math.prod(self.sizes)

    @property
    def is_walkable(self) -> bool:
        """True if a kernel takes the box whole."""
        return len(self.sizes) <= MAX_OUTER and (not self.sizes or self.run < _MAX_STRIDED_RUN)

    def parts(self) -> Iterator[Strided]:
        """Walkable boxes that together are this one, in C order."""
        if self.is_walkable:
            yield self
            return
        num_split = len(self.sizes) if self.run >= _MAX_STRIDED_RUN else len(self.sizes) - MAX_OUTER
        for index in product(*map(range, self.sizes[:num_split])):
            addresses = tuple(
                address + self.word_bytes * sum(map(int.__mul__, index, strides))
                for address, strides in zip(self.addresses, self.strides, strict=True)
            )
            yield self._replace(
                addresses=addresses, sizes=self.sizes[num_split:], strides=tuple(s[num_split:] for s in self.strides)
            )


def strided(tensors: Sequence[Tensor], *, max_word_bytes: int) -> Strided:
    """Tensors of one shape and item size as one box in several memories.

    Words are as long as addresses, runs and strides allow, at most `max_word_bytes` (a power of two). No strides may be
    negative (torch has none), and no length zero.
    """
    item_bytes = tensors[0].element_size()
    dims = [
        (length, tuple(tensor.stride(dim) * item_bytes for tensor in tensors))
        for dim, length in enumerate(tensors[0].shape)
        if length != 1
    ]
    merged = [(item_bytes, (1,) * len(tensors))]
    for length, strides in reversed(dims):
        inner_length, inner_strides = merged[-1]
        if all(stride == inner_length * inner for stride, inner in zip(strides, inner_strides, strict=True)):
            merged[-1] = (length * inner_length, inner_strides)
        else:
            merged.append((length, strides))
    (run_bytes, _), *outer = merged
    outer.reverse()
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    word = math.gcd(max_word_bytes, run_bytes, *addresses, *(stride for _, strides in outer for stride in strides))
    sizes = tuple(length for length, _ in outer)
    by_memory = tuple(tuple(strides[index] // word for _, strides in outer) for index in range(len(tensors)))
    return Strided(addresses, word, run_bytes // word, sizes, by_memory)


def padded(values: Sequence[int], fill: int) -> tuple[int, ...]:
    """`values` with as many `fill` behind them as make it `MAX_OUTER`."""
    return (*values, *(fill,) * (MAX_OUTER - len(values)))
