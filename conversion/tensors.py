"""Boxes of torch tensors: views and value changes."""

from __future__ import annotations

import torch
from torch import Tensor

from conversion.boxes import DTYPE_BYTES, Box


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a layout calls `name`.

    Raises:
        ValueError: layouts have no such dtype.
    """
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name} of a weight is not supported; use one of {sorted(DTYPE_BYTES)}")
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    """What a layout calls a dtype.

    Raises:
        ValueError: layouts have no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name} of a weight is not supported; use one of {sorted(DTYPE_BYTES)}")
    return name


def box_view(tensor: Tensor, box: Box) -> Tensor:
    """The elements of `box`, as a view without gradient."""
    return tensor.detach()[tuple(slice(start, stop) for start, stop in box)]


def merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """base + scale * B A of an adapter's factors, computed in float32, in the dtype of the base; the base's bits where the product is 0."""
    change = (b.float() @ a.float()).mul_(scale)
    # -0.0 + 0.0 would lose its sign.
    return torch.where(change == 0, base, (base.float() + change).to(base.dtype))


def transformed(tensor: Tensor, transform: str | None) -> Tensor:
    """Canonical values as the holder keeps them, up to its dtype; `tensor` itself without a transform. See `Piece.transform`.

    `neg_exp` gives vLLM's Mamba decay A = -exp(A_log), computed in float32 as vLLM's loader does.

    Raises:
        ValueError: unknown transform.
    """
    if transform is None:
        return tensor
    if transform != "neg_exp":
        raise ValueError(f"unknown transform {transform!r}; known: neg_exp")
    return -torch.exp(tensor.float())
