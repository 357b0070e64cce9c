# SPDX-License-Identifier: Apache-2.0
"""FP8 weights on CPU hosts: products in plain torch, as vLLM's FP8 kernels for CPUs need AMX.

Weights stay as vLLM's online methods leave them. A product multiplies the numbers that they stand for with its inputs,
which are rounded to FP8 as on GPUs.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16, mxfp8_e4m3_quantize

from mrl.rollout.cpu_experts import PlainExperts, Read, linear

_BLOCK = 128
_MX = 32
_FP8 = torch.float8_e4m3fn
_MAX = torch.finfo(_FP8).max
_MIN_SCALE = 1 / (_MAX * 512)


def cast(
    x: Tensor, scale: Tensor | None = None, *, use_per_token_if_dynamic: bool = False, **unused: object
) -> tuple[Tensor, Tensor]:
    """FP8 values and scales of a matrix as `scaled_fp8_quant` gives them: by one scale, or by one a row [rows, 1]."""
    found = scale
    if found is None:
        largest = x.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else x.abs().max().reshape(1)
        found = (largest.float() / _MAX).clamp(min=_MIN_SCALE)
    return (x.float() * found.reciprocal()).clamp(-_MAX, _MAX).to(_FP8), found


def meant(weight: Tensor, scale: Tensor, dtype: torch.dtype, group: int | None) -> Tensor:
    """Numbers that an FP8 matrix [rows, columns] stands for.

    `group`: 128 = a scale for each block of 128 x 128; 32 = a power of two for each 32 columns; None = one, or one a
    row.
    """
    if group == _MX:
        return dequant_mxfp8_to_bf16(weight, scale).to(dtype)
    if group == _BLOCK:
        scale = scale.repeat_interleave(_BLOCK, 0)[: weight.shape[0]].repeat_interleave(_BLOCK, 1)
        scale = scale[:, : weight.shape[1]]
    return (weight.float() * scale).to(dtype)


def rounded(x: Tensor, group: int | None) -> Tensor:
    """Inputs [..., columns] as a product in FP8 reads them: by a scale for `group` columns each, or for a row."""
    if group == _MX:
        if not x.numel():  # vLLM's function takes no empty ones, as of a worker none of whose experts is chosen
            return x
        return dequant_mxfp8_to_bf16(*mxfp8_e4m3_quantize(x.flatten(0, -2))).view_as(x).to(x.dtype)
    length = x.shape[-1]
    groups = F.pad(x, (0, -length % _BLOCK)).unflatten(-1, (-1, _BLOCK)) if group else x.unsqueeze(-2)
    values, scale = cast(groups, use_per_token_if_dynamic=True)
    return (values.float() * scale).flatten(-2)[..., :length].to(x.dtype)


class PlainKernel:
    """Product with a linear layer's FP8 weight, in the layout in which vLLM's online method leaves it."""

    def __init__(self, **unused: object) -> None:
        """Takes any sizes, as vLLM gives them to `init_fp8_linear_kernel`."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Packs nothing: parameters stay as a refit writes them."""

    def input_quant_key(self) -> None:
        """None: inputs are rounded here."""

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., columns] -> [..., rows]."""
        parameters = dict(layer.named_parameters(recurse=False))
        weight, group = parameters["weight"], None
        if (scale := parameters.get("weight_scale_inv")) is not None:
            group = _BLOCK
        elif (scale := parameters["weight_scale"]).dtype == torch.uint8:
            group = _MX
        else:
            weight = weight.t()  # [columns, rows], as CUTLASS reads it
        return linear(rounded(x, group), meant(weight, scale, x.dtype, group), bias)


class Fp8Experts(PlainExperts):
    """The experts of CPU hosts with weights in FP8, and inputs rounded to it."""

    @staticmethod
    def _supports_quant_scheme(weight_key: object, activation_key: object) -> bool:
        return True

    def _as_read(self, w1: Tensor, w2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Read]:
        """The numbers that FP8 values stand for, and inputs rounded to FP8."""
        config = self.quant_config
        group = None if config.block_shape is None else config.block_shape[1]
        assert config.w1_scale is not None and config.w2_scale is not None
        return (
            _meant_experts(w1, config.w1_scale, dtype, group),
            _meant_experts(w2, config.w2_scale, dtype, group),
            partial(rounded, group=group),
        )


def _meant_experts(weight: Tensor, scale: Tensor, dtype: torch.dtype, group: int | None) -> Tensor:
    return torch.stack([meant(one, its, dtype, group) for one, its in zip(weight, scale, strict=True)])


def choose_experts(**unused: object) -> tuple[Fp8MoeBackend, type]:
    """Chooses these experts; the backend is one that keeps them as they are loaded."""
    return Fp8MoeBackend.TRITON, Fp8Experts
