"""Checksums of the bytes of tensors: crc32 of what lies in host memory, `word_sum` of what lies on a GPU, there taken by one kernel.

Both sides of a refit hold their weights on the same kind of device, so they take the same checksum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mrl.refit.device_checksum import word_sum
from mrl.refit.runs import as_runs, contiguous_from
from mrl.refit.transforms import Value

try:
    # Three times the speed of zlib on hosts with carry-less multiplication; both give the same number.
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

# Strided boxes are gathered part by part into a buffer that stays in a core's second-level cache.
_GATHER_BYTES = 1 << 18


class _Part(NamedTuple):
    """Part of a strided box, and where it is gathered."""

    source: np.ndarray
    gathered: np.ndarray
    raw: memoryview


class Checksums:
    """Checksums of tensors that stay where they are, as an engine keeps them; prepared once and taken at every refit."""

    def __init__(self, values: Sequence[Value]) -> None:
        values = [value._replace(tensor=value.tensor.detach()) for value in values]
        self._on_device = _DeviceSums(values) if values and values[0].tensor.device.type != "cpu" else None
        buffer = np.empty(_GATHER_BYTES, dtype=np.uint8)
        self._on_host = [] if self._on_device else [_prepare(value.tensor, buffer) if value.is_plain else value for value in values]

    @torch.no_grad()
    def take(self) -> Tensor:
        """The checksum of each value as it is now, int64 [number of values], on the host. Waits for the device."""
        if self._on_device:
            return self._on_device.take()
        sums = [crc32(prepared) if isinstance(prepared, memoryview) else _slow_sum(prepared) for prepared in self._on_host]
        return torch.tensor(sums, dtype=torch.int64)


class _DeviceSums:
    """Sums of values on a GPU; those that are made from the weights first are summed one by one."""

    def __init__(self, values: Sequence[Value]) -> None:
        # Triton comes with torch for GPUs; hosts without one need not have it.
        from mrl.refit.triton_kernels import BoxSums, is_summable

        self._num_values = len(values)
        in_place = [index for index, value in enumerate(values) if value.is_plain and is_summable(value.tensor)]
        self._in_place = torch.tensor(in_place, dtype=torch.int64)
        self._kernel = BoxSums([values[index].tensor for index in in_place]) if in_place else None
        kept = set(in_place)
        self._made = {index: value for index, value in enumerate(values) if index not in kept}

    def take(self) -> Tensor:
        """int64 [number of values], on the host."""
        kernel_sums = self._kernel.take() if self._kernel else None
        made_sums = [word_sum(value.now()) for value in self._made.values()]
        sums = torch.empty(self._num_values, dtype=torch.int64)
        if kernel_sums is not None:
            sums[self._in_place] = kernel_sums.cpu()
        if made_sums:
            sums[list(self._made)] = torch.stack(made_sums).cpu()
        return sums


def checksum(tensor: Tensor) -> int:
    """Checksum over the tensor's elements in C order, whatever its strides; waits for the device."""
    return int(Checksums([Value(tensor, None, tensor.dtype)]).take()[0])


def _slow_sum(prepared: list[_Part] | Value) -> int:
    if isinstance(prepared, Value):
        return checksum(prepared.now())
    value = 0
    for part in prepared:
        np.copyto(part.gathered, part.source)
        value = crc32(part.raw, value)
    return value


def _prepare(tensor: Tensor, buffer: np.ndarray) -> memoryview | list[_Part]:
    """The bytes of a CPU tensor as they lie there, or strided parts that each fit `buffer`."""
    if tensor.is_contiguous():
        return as_runs(tensor, 0).data
    parts = []
    for source in _split(as_runs(tensor, contiguous_from(tensor)), len(buffer)):
        raw = buffer[: source.nbytes]
        parts.append(_Part(source, raw.view(source.dtype).reshape(source.shape), raw.data))
    return parts


def _split(array: np.ndarray, max_bytes: int) -> Iterator[np.ndarray]:
    """Parts of an array along its first dimensions, in C order."""
    if array.nbytes <= max_bytes:
        yield array
        return
    if array.ndim == 1 and array.itemsize > max_bytes:
        array = array[:, None].view(np.uint8)
    num_rows = max(1, max_bytes * len(array) // array.nbytes)
    for start in range(0, len(array), num_rows):
        rows = array[start : start + num_rows]
        yield from _split(rows[0] if num_rows == 1 else rows, max_bytes)
