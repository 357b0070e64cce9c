# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts of engines on CPU hosts, in plain torch: they read weights as a refit writes them.

FP8 weights stay as vLLM's online methods leave them, as vLLM's FP8 kernels for CPUs need AMX. A product multiplies the
numbers that they stand for with its inputs, which are rounded to FP8 as on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16, mxfp8_e4m3_quantize

# The matrix kernels give rows other bits when there are few of them; from 4 rows on, multiples of 4 agree. 16 keeps a
# margin.
ROW_MULTIPLE = 16
Read = Callable[[Tensor], Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose rows do not depend on how many there are."""
    rows = x.reshape(-1, x.shape[-1])
    # vLLM's parameters would go through a function in Python.
    with torch._C.DisableTorchFunctionSubclass():
        out = F.linear(_pad_rows(rows), weight, bias)[: rows.shape[0]]
    return out.view(*x.shape[:-1], -1)


def _pad_rows(x: Tensor) -> Tensor:
    missing = -x.shape[0] % ROW_MULTIPLE
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _activate(activation: MoEActivation, x: Tensor) -> Tensor:
    if activation == MoEActivation.RELU2_NO_MUL:
        return F.relu(x).square_()
    if activation == MoEActivation.SWIGLUOAI:
        # Their columns alternate; vLLM has these numbers in its code, too.
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(gate * 1.702)).mul_(up + 1)
    assert activation == MoEActivation.SILU, "vLLM asks `_supports_activation` before"
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class PlainExperts(CPUUnquantizedExperts):
    """Experts in plain torch on weights as loaded: a padded row group per expert."""

    isa = "torch"
    output_alignment = 1
    reduction_alignment = 1
    ACTIVATIONS = (MoEActivation.SILU, MoEActivation.RELU2_NO_MUL, MoEActivation.SWIGLUOAI)

    @staticmethod
    def is_supported_config(cls: type, *configuration: object) -> tuple[bool, str | None]:  # type: ignore[override]  # passed through
        """True if these experts fit. Sizes do not matter, unlike for vLLM's packed kernel."""
        return modular_kernel.FusedMoEExperts.is_supported_config(cls, *configuration)  # type: ignore[arg-type]  # the same

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in PlainExperts.ACTIVATIONS

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs nothing: parameters stay as a refit writes them."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: object,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the weighted sum of each token's experts into `output`; experts of other ranks count as zero."""
        first, second, read = self._as_read(w1, w2, hidden_states.dtype)
        output.copy_(
            mixture(
                hidden_states, first, second, topk_weights, topk_ids, activation, expert_map,
                weighs_inputs=apply_router_weight_on_input, read=read, biases=(self.w1_bias, self.w2_bias),
            )
        )  # fmt: skip

    def _as_read(self, w1: Tensor, w2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Read]:
        """Both weights as the products read them, and how they read their inputs."""
        return w1, w2, lambda x: x


def mixture(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    expert_map: Tensor | None,
    *,
    weighs_inputs: bool,
    read: Read,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Weighted sum of each token's experts, float32; `read` is how the products read their inputs."""
    first_biases, second_biases = ([None] * len(w1) if bias is None else bias for bias in biases)
    expert_ids = (topk_ids if expert_map is None else expert_map[topk_ids.long()]).reshape(-1)
    # Experts that live on other ranks have id -1, so their choices are sorted to the front.
    num_elsewhere, *counts = torch.bincount(expert_ids + 1, minlength=len(w1) + 1).tolist()
    choices = expert_ids.argsort(stable=True)[num_elsewhere:]
    tokens = choices // topk_ids.shape[1]
    weights = torch.ones(len(choices), 1) if weighs_inputs else topk_weights.reshape(-1, 1)[choices].float()
    # Filled up with token 0 for each expert; what becomes of it is dropped.
    padded = [F.pad(chosen, (0, -len(chosen) % ROW_MULTIPLE)) for chosen in tokens.split(counts)]
    sizes = [len(chosen) for chosen in padded]
    # Experts at once where there is no matrix product: each call costs as much as the few rows of an expert.
    inputs = read(hidden_states)[torch.cat(padded)].split(sizes)
    inner = torch.cat([F.linear(*expert) for expert in zip(inputs, w1, first_biases, strict=True)])
    hidden = read(_activate(activation, inner)).split(sizes)
    results = [
        F.linear(rows, weight, bias)[:count]
        for rows, weight, bias, count in zip(hidden, w2, second_biases, counts, strict=True)
    ]
    scaled = torch.cat(results).float().mul_(weights)
    return torch.zeros(hidden_states.shape, dtype=torch.float32).index_add_(0, tokens, scaled)


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
