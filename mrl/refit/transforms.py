"""What an engine makes of a trainer's values: one function for the source's checksums and the worker's writes."""

from __future__ import annotations

import torch
from torch import Tensor

from conversion.tensors import transformed


def apply(tensor: Tensor, transform: str | None, target_dtype: torch.dtype) -> Tensor:
    """`tensor` transformed and cast, same shape; `tensor` itself where nothing changes.

    Raises:
        ValueError: unknown transform.
    """
    return transformed(tensor, transform).to(target_dtype)
