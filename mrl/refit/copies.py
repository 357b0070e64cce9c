"""Copies of many boxes, prepared once and repeated at every refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mrl.refit.runs import as_runs, contiguous_from
from mrl.refit.transforms import apply


class Copy(NamedTuple):
    """A box to write and what it is made of, of one shape. Both stay where they are in memory."""

    target: Tensor
    source: Tensor
    transform: str | None = None

    @property
    def is_plain(self) -> bool:
        """The target gets the source's bytes."""
        return self.transform is None and self.source.dtype == self.target.dtype


class Copies:
    """Copies that run together, with no more than one call of native code for each."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        copies = [copy._replace(target=copy.target.detach(), source=copy.source.detach()) for copy in copies]
        plain = [copy for copy in copies if copy.is_plain]
        self._changing = [copy for copy in copies if not copy.is_plain]
        self._on_host = [_runs(copy) for copy in plain if _is_on_host(copy)]
        self._on_device = _batches([copy for copy in plain if not _is_on_host(copy)])

    @torch.no_grad()
    def run(self) -> None:
        """Writes all targets; on a GPU, queues that."""
        for target, source in self._on_host:
            np.copyto(target, source)
        for targets, sources in self._on_device:
            torch._foreach_copy_(targets, sources)
        for target, source, transform in self._changing:
            target.copy_(apply(source, transform, target.dtype))


def _is_on_host(copy: Copy) -> bool:
    return copy.target.device.type == copy.source.device.type == "cpu"


def _runs(copy: Copy) -> tuple[np.ndarray, np.ndarray]:
    target, source = copy.target.squeeze(), copy.source.squeeze()
    dim = contiguous_from(target, source)
    return as_runs(target, dim), as_runs(source, dim)


def _batches(copies: Sequence[Copy]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Targets and sources that one batched kernel takes: contiguous ones of one dtype. The rest becomes one kernel each."""
    groups: dict[tuple[torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source, _ in copies:
        targets, sources = groups.setdefault((target.dtype, target.is_contiguous() and source.is_contiguous()), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())
