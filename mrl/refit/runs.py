"""CPU tensors as arrays of opaque runs of bytes: the largest units that one memory copy can move."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Numpy's items hold less than 2 GiB.
_MAX_ITEM_BYTES = 1 << 30


def contiguous_from(*tensors: Tensor) -> int:
    """The first dimension from which on every one of the tensors, all of one shape, is contiguous; their ndim where none is."""
    shape = tensors[0].shape
    dim, length = len(shape), 1
    while dim and all(tensor.stride(dim - 1) == length for tensor in tensors):
        dim -= 1
        length *= shape[dim]
    return dim


def as_runs(tensor: Tensor, dim: int) -> np.ndarray:
    """A CPU tensor as an array of its first `dim` dimensions whose items are all that follows, which must be contiguous; a view.

    Without dimensions left it is an array of bytes (uint8), as it is where items would be too long for numpy: then with one more dimension.
    """
    length = tensor.shape[dim:].numel()
    runs = tensor.as_strided((*tensor.shape[:dim], length), (*tensor.stride()[:dim], 1))
    raw = runs.view(torch.uint8).numpy()
    return raw.view(f"V{raw.shape[-1]}")[..., 0] if 0 < dim and raw.shape[-1] <= _MAX_ITEM_BYTES else raw
