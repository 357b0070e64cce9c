"""Copies of many boxes, prepared once and repeated at every refit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from mrl.refit.runs import as_runs, contiguous_from
from mrl.refit.transforms import apply

if TYPE_CHECKING:
    from mrl.refit.triton_kernels import BoxCopies


class Copy(NamedTuple):
    """A box to write and what it is made of, of one shape. Both stay where they are in memory."""

    target: Tensor
    source: Tensor
    transform: str | None = None

    @property
    def is_plain(self) -> bool:
        """The target gets the source's bytes, on the device where they lie."""
        return self.transform is None and self.source.dtype == self.target.dtype and self.source.device == self.target.device


class Copies:
    """Copies that run together: of a GPU by one kernel, of the host with no more than one call of native code for each."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        copies = [copy._replace(target=copy.target.detach(), source=copy.source.detach()) for copy in copies]
        plain = [copy for copy in copies if copy.is_plain]
        self._changing = [copy for copy in copies if not copy.is_plain]
        self._on_host = _host_copies([copy for copy in plain if copy.target.device.type == "cpu"])
        self._on_device = _box_copies([copy for copy in plain if copy.target.device.type != "cpu"])

    @torch.no_grad()
    def run(self) -> None:
        """Writes all targets; on a GPU, queues that."""
        for target, source in self._on_host:
            np.copyto(target, source)
        if self._on_device:
            self._on_device.run()
        for target, source, transform in self._changing:
            target.copy_(apply(source, transform, target.dtype))


def _host_copies(copies: Sequence[Copy]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Targets and sources. Copies of one form at equal distances, such as those of all experts of a layer, are one."""
    alike: dict[object, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for copy in copies:
        target, source = _runs(copy)
        # Distances are only known inside one memory.
        memories = copy.target.untyped_storage().data_ptr(), copy.source.untyped_storage().data_ptr()
        alike[memories, target.shape, target.dtype, target.strides, source.strides].append((target, source))
    return [joined for pairs in alike.values() for joined in _join(sorted(pairs, key=lambda pair: pair[0].ctypes.data))]


def _join(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Runs of pairs with equal distances between targets and between sources, each as one pair with one more dimension."""
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
                as_strided(array, shape, (distance, *array.strides)) for array, distance in zip(pairs[start], distances, strict=True)
            )
            yield target, source
        start = stop


def _distances(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> tuple[int, int]:
    return second[0].ctypes.data - first[0].ctypes.data, second[1].ctypes.data - first[1].ctypes.data


def _runs(copy: Copy) -> tuple[np.ndarray, np.ndarray]:
    target, source = copy.target.squeeze(), copy.source.squeeze()
    dim = contiguous_from(target, source)
    return as_runs(target, dim), as_runs(source, dim)


def _box_copies(copies: Sequence[Copy]) -> BoxCopies | None:
    """What copies bytes inside one GPU; None if there is nothing to copy."""
    if not copies:
        return None
    # Triton comes with torch for GPUs; hosts without one need not have it.
    from mrl.refit.triton_kernels import BoxCopies

    return BoxCopies([copy.target for copy in copies], [copy.source for copy in copies])
