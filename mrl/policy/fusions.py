# SPDX-License-Identifier: Apache-2.0
"""Probes of this host's libraries: which fused kernels work, and how exactly float32 is multiplied.

An importable module proves nothing, so a probe calls the kernel. A missing kernel costs speed and memory: a warning, no
error.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils

from mrl.gpus import on_gpu
from mrl.policy import specs

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig, OptimizerConfig

logger = logging.getLogger(__name__)

_TOLERANCE = 0.1


def fusion_arguments(config: MegatronConfig, from_model: Mapping[str, object]) -> dict[str, bool]:
    """Megatron fusion arguments by name: true where the config asks for a fusion that serves this model and works here.

    `from_model` are the family's transformer arguments. All are false on hosts without a GPU.
    """
    activation, is_gated = from_model["activation_func"], bool(from_model.get("gated_linear_unit"))
    wanted = {
        "moe_permute_fusion": config.moe_permute_fusion and from_model.get("num_moe_experts") is not None,
        # Latent attention has kernels of its own, for YaRN alone.
        "apply_rope_fusion": config.apply_rope_fusion and not from_model.get("multi_latent_attention"),
        # Megatron fuses bias and activation of gated SiLU, and has a kernel of its own for the experts of Nemotron
        # models.
        "bias_activation_fusion": config.bias_activation_fusion and activation == "silu" and is_gated,
        "use_fused_weighted_squared_relu": config.use_fused_weighted_squared_relu
        and activation == "squared_relu"
        and not is_gated,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
    }
    if not on_gpu():
        return dict.fromkeys(wanted, False)
    probes = {
        "moe_permute_fusion": _permute_fault,
        "apply_rope_fusion": _rope_fault,
        "gradient_accumulation_fusion": _weight_gradient_fault,
    }
    defaults = type(config).__dataclass_fields__
    return {
        key: is_wanted and (key not in probes or _works(key, probes[key], is_default=bool(defaults[key].default)))
        for key, is_wanted in wanted.items()
    }


def precision_aware_arguments(config: OptimizerConfig) -> dict[str, bool]:
    """Megatron OptimizerConfig arguments to keep float32 main parameters in Transformer Engine's FusedAdam if possible.

    Megatron's optimizer on the host can hold them, too, and needs no library. Both hold whole main parameters rather
    than the 16 bits missing in bfloat16 weights: checkpoints hold float32 that any layout and host can load.
    """
    wanted = config.use_precision_aware_optimizer and config.use_distributed_optimizer and config.bf16
    is_here = on_gpu()
    key = "optimizer.use_precision_aware_optimizer"
    is_on = wanted and is_here and (config.optimizer_cpu_offload or _works(key, _fused_adam_fault, is_default=True))
    return {"use_precision_aware_optimizer": is_on, "store_param_remainders": False}


@cache
def _works(key: str, fault_of: Callable[[], str | None], *, is_default: bool) -> bool:
    """True if a probe finds no fault. Logs a fault, and a probe that raises, once per process."""
    setting = f"policy.megatron_cfg.{key}"
    try:
        fault = fault_of()
    except Exception as error:
        fault = f"its probe raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        try:
            # CUDA returns an error that broke the context from every later call, and any other only once.
            torch.cuda.synchronize()
        except RuntimeError as broken:
            raise RuntimeError(
                f"{setting}=true: {fault}. This broke the process's CUDA context, and without a new process no GPU "
                f"call can work; set {setting}=false, or repair the library that the kernel comes from"
            ) from broken
    if fault is not None:
        origin = "which is the default" if is_default else "which this config asks for"
        logger.warning("%s=true, %s, has no effect on this host: %s", setting, origin, fault)
    return fault is None


@torch.no_grad()
def float32_products() -> dict[str, str]:
    """Measures on this rank's device how each library multiplies float32: as "float32" or as "TF32". Not collective.

    TF32 keeps 10 of 23 mantissa bits, and a library may use it unasked.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
    # 15 bits: more than TF32 keeps, fewer than float32 does.
    values, identity = torch.full((256, 256), 1 + 2.0**-15, device=device), torch.eye(256, device=device)
    products = {"torch": values @ identity}
    if specs.HAVE_TE:
        from transformer_engine.pytorch import Linear

        layer = Linear(256, 256, bias=False, params_dtype=torch.float32, device=device)
        layer.weight.copy_(identity)
        products["Transformer Engine"] = layer(values)
    return {library: "float32" if torch.equal(product, values) else "TF32" for library, product in products.items()}


def _weight_gradient_fault() -> str | None:
    if not layers._grad_accum_fusion_available:
        return "NVIDIA Apex is not installed with --cuda_ext (the package `apex` on PyPI is unrelated)"
    kernels = layers.fused_weight_gradient_mlp_cuda
    device = torch.cuda.current_device()
    inputs, gradients = (torch.randn(64, width, dtype=torch.bfloat16, device=device) for width in (32, 16))
    expected = 1 + gradients.float().T @ inputs.float()
    for name, dtype in (("wgrad_gemm_accum_fp32", torch.float32), ("wgrad_gemm_accum_fp16", torch.bfloat16)):
        if not hasattr(kernels, name):
            return f"fused_weight_gradient_mlp_cuda has no {name}, so it is not NVIDIA Apex's"
        total = torch.ones(16, 32, dtype=dtype, device=device)
        getattr(kernels, name)(inputs, gradients, total)
        if not torch.allclose(total.float(), expected, atol=_TOLERANCE, rtol=_TOLERANCE):
            return f"{name} of fused_weight_gradient_mlp_cuda gives wrong sums"
    return None


def _rope_fault() -> str | None:
    fused = rope_utils.fused_apply_rotary_pos_emb_thd
    if not specs.HAVE_TE or fused is None:
        return "Transformer Engine is not installed"
    device = torch.cuda.current_device()
    values = torch.randn(6, 2, 8, device=device)
    angles = torch.outer(torch.arange(4.0, device=device), torch.tensor([1.0, 0.1, 0.01, 0.001], device=device)).repeat(
        1, 2
    )
    places = torch.tensor([0, 1, 2, 3, 0, 1], device=device)
    cos, sin = (function(angles[places])[:, None] for function in (torch.cos, torch.sin))
    first, second = values.chunk(2, dim=-1)
    expected = values * cos + torch.cat([-second, first], dim=-1) * sin
    lengths = torch.tensor([0, 4, 6], dtype=torch.int32, device=device)
    if not torch.allclose(fused(values, lengths, angles[:, None, None]), expected, atol=1e-4):
        return "Transformer Engine's rotary kernel gives wrong values for packed rows"
    return None


def _permute_fault() -> str | None:
    if not specs.HAVE_TE or moe_utils.fused_permute_with_probs is None:
        return "Transformer Engine from 2.1 on is not installed"
    device = torch.cuda.current_device()
    tokens, probs = torch.randn(8, 16, device=device), torch.rand(8, 4, device=device)
    routing_map = torch.zeros(8, 4, dtype=torch.bool, device=device).scatter_(1, probs.topk(2).indices, True)
    probs = probs * routing_map
    plain, fused = (
        moe_utils.permute(tokens, routing_map, probs=probs, num_out_tokens=16, fused=is_fused)
        for is_fused in (False, True)
    )
    back = moe_utils.unpermute(fused[0], fused[2], tokens.shape, routing_map=routing_map, fused=True)
    if not (torch.equal(plain[0], fused[0]) and torch.allclose(back, 2 * tokens, atol=1e-4)):
        return "Transformer Engine's permutation gives wrong tokens"
    return None


def _fused_adam_fault() -> str | None:
    if not specs.HAVE_TE:
        return "Transformer Engine is not installed"
    from transformer_engine.pytorch.optimizers import FusedAdam

    needed = {"master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "use_decoupled_grad"}
    missing = needed - inspect.signature(FusedAdam).parameters.keys()
    return f"Transformer Engine's FusedAdam has no {', '.join(sorted(missing))}" if missing else None
