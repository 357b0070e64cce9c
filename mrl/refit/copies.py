# SPDX-License-Identifier: Apache-2.0
"""Copies of many boxes of tensors, prepared once and repeated at every refit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from conversion.tensors import transformed

if TYPE_CHECKING:
    from mrl.refit.triton_kernels import BoxCopies

_Arrays = tuple[np.ndarray, np.ndarray]
"""A target and its source."""

# Numpy's items hold less than 2 GiB.
_MAX_ITEM_BYTES = 1 << 30


def converted(tensor: Tensor, transform: str | None, dtype: torch.dtype) -> Tensor:
    """`tensor` as an engine keeps it: transformed and cast, of the same shape; `tensor` itself if nothing changes."""
    return transformed(tensor, transform).to(dtype)


class TensorCopy(NamedTuple):
    """A box to write and its source, of one shape. Both stay at their addresses."""

    target: Tensor
    source: Tensor
    transform: str | None = None

    @property
    def is_plain(self) -> bool:
        """The target gets the source's bytes, on the same device."""
        return (
            self.transform is None
            and self.source.dtype == self.target.dtype
            and self.source.device == self.target.device
        )


class Copies:
    """Copies that run together: on a GPU in one kernel per kind of box, on the host in at most one native call each."""

    def __init__(self, copies: Sequence[TensorCopy]) -> None:
        copies = [copy._replace(target=copy.target.detach(), source=copy.source.detach()) for copy in copies]
        plain = [copy for copy in copies if copy.is_plain]
        self._changing = [copy for copy in copies if not copy.is_plain]
        self._on_host = _host_copies([copy for copy in plain if copy.target.device.type == "cpu"])
        on_device = [copy for copy in plain if copy.target.device.type != "cpu"]
        self._on_device: BoxCopies | None = None
        if on_device:
            # Triton comes with torch for GPUs; hosts without one need not have it.
            from mrl.refit import triton_kernels

            self._on_device = triton_kernels.BoxCopies(
                [copy.target for copy in on_device], [copy.source for copy in on_device]
            )

    @property
    def num_calls(self) -> int:
        """Native calls on the host in one run."""
        return len(self._on_host) + len(self._changing)

    @torch.no_grad()
    def run(self) -> None:
        """Writes all targets; on a GPU, queues the writes."""
        for target, source in self._on_host:
            np.copyto(target, source)
        if self._on_device:
            self._on_device.run()
        for target, source, transform in self._changing:
            target.copy_(converted(source, transform, target.dtype))


def contiguous_from(*tensors: Tensor) -> int:
    """The first dimension from which on all tensors, of one shape, are contiguous; their ndim where none is."""
    shape = tensors[0].shape
    dim, length = len(shape), 1
    while dim and all(tensor.stride(dim - 1) == length for tensor in tensors):
        dim -= 1
        length *= shape[dim]
    return dim


def as_runs(tensor: Tensor, dim: int) -> np.ndarray:
    """A CPU tensor as an array over its first `dim` dimensions, items all following bytes, which must be contiguous.

    An item is the largest run of bytes that one memory copy can move. Without dimensions left, the array is of bytes
    (uint8); so it is where items would be too long for numpy, then with one more dimension.
    """
    length = tensor.shape[dim:].numel()
    runs = tensor.as_strided((*tensor.shape[:dim], length), (*tensor.stride()[:dim], 1))
    raw = runs.view(torch.uint8).numpy()
    return raw.view(f"V{raw.shape[-1]}")[..., 0] if 0 < dim and raw.shape[-1] <= _MAX_ITEM_BYTES else raw


def _host_copies(copies: Sequence[TensorCopy]) -> list[_Arrays]:
    """Arrays to copy. Copies of one form at equal distances, such as those of all experts of a layer, are one."""
    alike: dict[object, list[_Arrays]] = defaultdict(list)
    for copy in copies:
        boxes = copy.target.squeeze(), copy.source.squeeze()
        dim = contiguous_from(*boxes)
        target, source = (as_runs(box, dim) for box in boxes)
        memories = copy.target.untyped_storage().data_ptr(), copy.source.untyped_storage().data_ptr()
        alike[memories, target.shape, target.dtype, target.strides, source.strides].append((target, source))
    return [joined for pairs in alike.values() for joined in _join(sorted(pairs, key=lambda pair: pair[0].ctypes.data))]


def _join(pairs: list[_Arrays]) -> Iterator[_Arrays]:
    """Runs of pairs with equal distances between targets and sources, each as one pair with one more dimension."""
    start = 0
    while start < len(pairs):
        stop, distances = start + 1, None
        while stop < len(pairs) and distances in (None, _distances(pairs[stop - 1], pairs[stop])):
            distances = _distances(pairs[stop - 1], pairs[stop])
            stop += 1
        if distances is None:
            yield pairs[start]
        else:
            shape = (stop - start, *pairs[start][0].shape)
            target, source = (
                as_strided(array, shape, (distance, *array.strides))
                for array, distance in zip(pairs[start], distances, strict=True)
            )
            yield target, source
        start = stop


def _distances(first: _Arrays, second: _Arrays) -> tuple[int, int]:
    return second[0].ctypes.data - first[0].ctypes.data, second[1].ctypes.data - first[1].ctypes.data
