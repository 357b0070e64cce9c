# SPDX-License-Identifier: Apache-2.0
"""Tensors in memory, read as those of a file are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from conversion.boxes import Box
from conversion.tensors import box_view


class InMemory:
    """A BoxSource of tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        target.copy_(box_view(self._tensors[name], box))
