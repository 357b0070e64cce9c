# SPDX-License-Identifier: Apache-2.0
"""Experts as files of gpt-oss have them: numbers of MXFP4 as transformers reads them, and a layer's in one tensor."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from conversion.boxes import Box
from conversion.tensors import BoxSource

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
"""Numbers of 4 bits (E2M1)."""
_EXPONENT_BIAS = 127
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate_up_proj|down_proj)\.(weight|bias)$")


def of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 numbers [rows, 32 * blocks] of bytes [rows, 16 * blocks] and exponents [rows, blocks].

    A byte has two numbers, the first in its lower bits. Bits are those of transformers.
    """
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    factors = torch.pow(2.0, scales.int() - _EXPONENT_BIAS)
    values = _VALUES[numbers.int()].unflatten(-1, (scales.shape[-1], -1)) * factors[..., None]
    return values.flatten(-2).to(torch.bfloat16)


class StackedExperts:
    """Canonical tensors as a file of gpt-oss names them: a layer's experts in one, inputs before outputs."""

    def __init__(self, source: BoxSource, names: Sequence[str]) -> None:
        self._source = source
        self._parts: dict[str, list[str]] = {}
        for name in names:
            found = _EXPERT.match(name)
            stacked = f"{found[1]}{found[3]}{'_bias' if found[4] == 'bias' else ''}" if found else name
            self._parts.setdefault(stacked, []).append(name)

    @property
    def parts(self) -> dict[str, list[str]]:
        """Canonical names of the tensors of which each consists, by its name in the file."""
        return self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        parts = self._parts[name]
        shape = self._source.shape(parts[0])
        return shape if parts == [name] else (len(parts), *shape[::-1])

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._parts[name][0])

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box, one expert after the other."""
        parts = self._parts[name]
        if parts == [name]:
            self._source.read_into(name, box, target)
            return
        (start, stop), *inner = box
        for index in range(start, stop):
            part = target[index - start]
            turned = torch.empty(part.t().shape, dtype=part.dtype)
            self._source.read_into(parts[index], tuple(inner[::-1]), turned)
            part.copy_(turned.t())
