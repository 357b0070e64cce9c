# SPDX-License-Identifier: Apache-2.0
"""Checksums of the bytes of tensors: crc32 in host memory; on a GPU `word_sum`, which kernels take there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from conversion.boxes import Slot
from conversion.files.crc32 import crc32
from conversion.texts import listed
from mrl.refit import RefitError
from mrl.refit.copies import as_runs, contiguous_from, converted
from mrl.refit.device_checksum import word_sum

# Strided boxes are gathered part by part into a buffer that stays in a core's second-level cache.
_GATHER_BYTES = 1 << 18
_MAX_NAMED = 12


class Summed(NamedTuple):
    """A tensor, with the transform and dtype of the engine's copy."""

    tensor: Tensor
    transform: str | None = None
    dtype: torch.dtype | None = None

    @property
    def is_plain(self) -> bool:
        """The engine keeps the tensor's own bytes."""
        return self.transform is None and self.dtype in (None, self.tensor.dtype)

    def now(self) -> Tensor:
        """The tensor as the engine keeps it."""
        return converted(self.tensor, self.transform, self.dtype or self.tensor.dtype)


class Checksums:
    """Checksums of tensors at fixed addresses, in the engine's form; prepared once and taken at every refit."""

    def __init__(self, values: Sequence[Summed]) -> None:
        values = [value._replace(tensor=value.tensor.detach()) for value in values]
        self._on_device = _DeviceSums(values) if values and values[0].tensor.device.type != "cpu" else None
        buffer = np.empty(_GATHER_BYTES, dtype=np.uint8)
        self._on_host = (
            [] if self._on_device else [_prepare(value.tensor, buffer) if value.is_plain else value for value in values]
        )

    @torch.no_grad()
    def take(self) -> Tensor:
        """Current checksum of each value, int64 [number of values], on the host. Waits for the device."""
        if self._on_device:
            return self._on_device.take()
        return torch.tensor([_host_sum(prepared) for prepared in self._on_host], dtype=torch.int64)


def checksum(tensor: Tensor) -> int:
    """Checksum over the tensor's elements in C order, whatever its strides; waits for the device."""
    return int(Checksums([Summed(tensor)]).take()[0])


def digest(tensors: Mapping[Slot, Tensor]) -> dict[Slot, int]:
    """Checksum of each live tensor."""
    return {slot: checksum(tensor) for slot, tensor in tensors.items()}


def check_unchanged(
    before: Mapping[Slot, int], after: Mapping[Slot, int], rounded: Collection[Slot] = ()
) -> list[Slot]:
    """Raises RefitError if refit zero (the first, of unchanged weights) changed a tensor; both arguments are digests.

    The tables of both sides could share one error; the engine's weights before the refit come from vLLM's own loader,
    which does not use them. Tensors in `rounded` may change, and are returned if they did: see `RefitInputs.rounded`.
    """
    found = [slot for slot in before.keys() | after.keys() if before.get(slot) != after.get(slot)]
    changed = sorted(str(slot) for slot in found if slot not in rounded)
    if changed:
        raise RefitError(
            f"refit zero changed {len(changed)} of {len(before)} tensors of the engine: the conversion tables "
            f"disagree with vLLM's loader on {listed(changed, _MAX_NAMED)}"
        )
    return found


class _DeviceSums:
    """Sums of values on a GPU; values that must be transformed or cast first are summed one by one."""

    def __init__(self, values: Sequence[Summed]) -> None:
        # Triton comes with torch for GPUs; hosts without one need not have it.
        from mrl.refit.triton_kernels import BoxSums, is_summable

        self._num_values = len(values)
        in_place = [index for index, value in enumerate(values) if value.is_plain and is_summable(value.tensor)]
        self._in_place = torch.tensor(in_place, dtype=torch.int64)
        self._kernel = BoxSums([values[index].tensor for index in in_place]) if in_place else None
        kept = set(in_place)
        self._computed = {index: value for index, value in enumerate(values) if index not in kept}

    def take(self) -> Tensor:
        kernel_sums = self._kernel.take() if self._kernel else None
        computed_sums = [word_sum(value.now()) for value in self._computed.values()]
        sums = torch.empty(self._num_values, dtype=torch.int64)
        if kernel_sums is not None:
            sums[self._in_place] = kernel_sums.cpu()
        if computed_sums:
            sums[list(self._computed)] = torch.stack(computed_sums).cpu()
        return sums


_Part = tuple[np.ndarray, np.ndarray, memoryview]
"""Part of a strided box, its place in the buffer, and its bytes there."""


def _host_sum(prepared: memoryview | list[_Part] | Summed) -> int:
    if isinstance(prepared, memoryview):
        return crc32(prepared)
    if isinstance(prepared, Summed):
        return checksum(prepared.now())
    value = 0
    for source, gathered, raw in prepared:
        np.copyto(gathered, source)
        value = crc32(raw, value)
    return value


def _prepare(tensor: Tensor, buffer: np.ndarray) -> memoryview | list[_Part]:
    """The bytes of a CPU tensor in place where they are contiguous, else parts that each fit `buffer`."""
    if tensor.is_contiguous():
        return as_runs(tensor, 0).data
    parts = []
    for source in _split(as_runs(tensor, contiguous_from(tensor)), len(buffer)):
        raw = buffer[: source.nbytes]
        parts.append((source, raw.view(source.dtype).reshape(source.shape), raw.data))
    return parts


def _split(array: np.ndarray, max_bytes: int) -> Iterator[np.ndarray]:
    if array.nbytes <= max_bytes:
        yield array
        return
    if array.ndim == 1 and array.itemsize > max_bytes:
        array = array[:, None].view(np.uint8)
    num_rows = max(1, max_bytes * len(array) // array.nbytes)
    for start in range(0, len(array), num_rows):
        rows = array[start : start + num_rows]
        yield from _split(rows[0] if num_rows == 1 else rows, max_bytes)
