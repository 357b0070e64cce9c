"""What an engine makes of a trainer's values: one function for the source's checksums and the worker's writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from conversion.tensors import transformed


def apply(tensor: Tensor, transform: str | None, target_dtype: torch.dtype) -> Tensor:
    """`tensor` transformed and cast, same shape; `tensor` itself where nothing changes.

    Raises:
        ValueError: unknown transform.
    """
    return transformed(tensor, transform).to(target_dtype)


class Value(NamedTuple):
    """A tensor as an engine keeps it."""

    tensor: Tensor
    transform: str | None
    dtype: torch.dtype

    @property
    def is_plain(self) -> bool:
        """The engine keeps the tensor's own bytes."""
        return self.transform is None and self.tensor.dtype == self.dtype

    def now(self) -> Tensor:
        """See `apply`."""
        return apply(self.tensor, self.transform, self.dtype)
