# SPDX-License-Identifier: Apache-2.0
"""Probes of fused kernels with stand-ins for what GPU hosts have, on CPU tensors: right ones and wrong ones."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.config.schema.megatron import MegatronConfig, OptimizerConfig
from tests.stack.ranks import Rank


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    before = {name: getattr(owner, name, None) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def add_product(inputs: Tensor, gradients: Tensor, total: Tensor) -> None:
    total += (gradients.float().T @ inputs.float()).to(total.dtype)


def overwrite_product(inputs: Tensor, gradients: Tensor, total: Tensor) -> None:
    total.copy_(gradients.float().T @ inputs.float())


def rotate(values: Tensor, cu_seqlens: Tensor, angles: Tensor) -> Tensor:
    parts = []
    for sequence in values.split(cu_seqlens.diff().tolist()):
        at = angles[: len(sequence), 0]
        first, second = sequence.chunk(2, dim=-1)
        parts.append(sequence * at.cos() + torch.cat([-second, first], dim=-1) * at.sin())
    return torch.cat(parts)


def rotate_as_one_sequence(values: Tensor, cu_seqlens: Tensor, angles: Tensor) -> Tensor:
    return rotate(values, torch.tensor([0, 4, 6]), torch.cat([angles, angles]).flip(0))


def faults(rank: Rank) -> dict[str, str | None]:
    """Faults that each probe reports, by case."""
    from mrl.policy import cpu, fusions, specs

    cpu.install()
    found: dict[str, str | None] = {}

    def weight_gradient(name: str, **kernels: Callable[..., None]) -> None:
        module = types.SimpleNamespace(**kernels)
        with replaced(fusions.layers, fused_weight_gradient_mlp_cuda=module, _grad_accum_fusion_available=True):
            found[name] = fusions._weight_gradient_fault()

    found["no apex"] = fusions._weight_gradient_fault()
    weight_gradient("apex", wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product)
    weight_gradient("other apex")
    weight_gradient("wrong sums", wgrad_gemm_accum_fp32=overwrite_product, wgrad_gemm_accum_fp16=add_product)
    found["no rope"] = fusions._rope_fault()
    for name, kernel in (("rope", rotate), ("wrong rope", rotate_as_one_sequence)):
        with replaced(specs, HAVE_TE=True), replaced(fusions.rope_utils, fused_apply_rotary_pos_emb_thd=kernel):
            found[name] = fusions._rope_fault()
    found["no permute"] = fusions._permute_fault()
    found["no adam"] = fusions._fused_adam_fault()
    return found


def raising(rank: Rank) -> tuple[dict[str, bool], bool, list[str], str]:
    """Kernels that raise, on a host that claims a GPU.

    What Megatron is handed of fusions and of the optimizer, the warnings, and the error of a kernel that breaks the
    CUDA context.
    """
    from mrl.policy import cpu, fusions, specs

    cpu.install()

    def fail(*arguments: object, **settings: object) -> None:
        raise torch.AcceleratorError(
            "CUDA error: no kernel image is available for execution on the device\nSearch for it\n"
        )

    def stay_broken() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    kernels = types.SimpleNamespace(wgrad_gemm_accum_fp32=fail, wgrad_gemm_accum_fp16=fail)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    fusions.logger.addHandler(handler)
    config = MegatronConfig(gradient_accumulation_fusion=True)
    from_model = dict(activation_func="silu", gated_linear_unit=True, num_moe_experts=8)
    with (
        replaced(fusions, on_gpu=lambda: True),
        replaced(specs, HAVE_TE=True),
        replaced(fusions.layers, fused_weight_gradient_mlp_cuda=kernels, _grad_accum_fusion_available=True),
        replaced(fusions.rope_utils, fused_apply_rotary_pos_emb_thd=fail),
        replaced(fusions.moe_utils, HAVE_TE=True, fused_permute_with_probs=fail),
    ):
        found = fusions.fusion_arguments(config, from_model)
        # Transformer Engine claims to be there, and cannot be imported.
        optimizer = fusions.precision_aware_arguments(OptimizerConfig(bf16=True, use_precision_aware_optimizer=True))
        fusions._works.cache_clear()
        with replaced(torch.cuda, synchronize=stay_broken):
            try:
                fusions.fusion_arguments(config, from_model)
                broken = ""
            except RuntimeError as error:
                broken = str(error)
    return found, optimizer["use_precision_aware_optimizer"], warnings, broken


class Tf32(TorchDispatchMode):
    """Rounds the factors of float32 matrix products to the 10 bits that TF32 keeps."""

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and arguments[0].dtype == torch.float32:
            arguments = [
                ((factor.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)
                for factor in arguments
            ]
        return function(*arguments, **(settings or {}))


def products(rank: Rank) -> tuple[dict[str, str], dict[str, str]]:
    """Measures how float32 is multiplied here: unchanged, and with TF32 products."""
    from mrl.policy import cpu

    cpu.install()
    from mrl.policy.fusions import float32_products

    exact = float32_products()
    with Tf32():
        return exact, float32_products()


def arguments(rank: Rank, from_model: dict[str, object]) -> tuple[dict[str, bool], dict[str, bool]]:
    """Arguments for Megatron on a host without a GPU, although a config asks for all fusions."""
    from mrl.policy import fusions

    config = MegatronConfig(gradient_accumulation_fusion=True, use_fused_weighted_squared_relu=True)
    optimizer = OptimizerConfig(bf16=True, use_precision_aware_optimizer=True)
    return fusions.fusion_arguments(config, from_model), fusions.precision_aware_arguments(optimizer)
