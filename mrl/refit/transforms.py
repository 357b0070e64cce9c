"""Value changes between a trainer's tensor and an engine's: one function for the source's checksums and the worker's writes."""

from __future__ import annotations

import torch
from torch import Tensor


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a layout calls `name` ("float32", "bfloat16", ...).

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"layout names dtype {name!r}, which torch does not have")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in layouts; inverse of `torch_dtype`."""
    return str(dtype).removeprefix("torch.")


def apply(tensor: Tensor, transform: str | None, target_dtype: torch.dtype) -> Tensor:
    """`tensor` transformed and cast, same shape; `tensor` itself where nothing changes.

    `neg_exp` gives vLLM's Mamba decay A = -exp(A_log), computed in float32 as vLLM's loader does.

    Raises:
        ValueError: unknown transform.
    """
    if transform == "neg_exp":
        tensor = -torch.exp(tensor.float())
    elif transform is not None:
        raise ValueError(f"unknown transform {transform!r}; known: neg_exp")
    return tensor.to(target_dtype)
