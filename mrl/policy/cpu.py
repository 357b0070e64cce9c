# SPDX-License-Identifier: Apache-2.0
"""Replacements with which real megatron-core trains on a host without CUDA or the libraries that GPU hosts have for it.

`PATCHES` at the end lists every replaced name with its replacement, the reason, and the end of the need; all hold for
0.16.1 and for 0.19, but for the names of which a line says otherwise. `install` applies the patches that this host
needs. Layers are not replaced here: specs.py chooses them through Megatron's own specs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pkgutil
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._device import _device_constructors

from mrl.gpus import on_gpu
from mrl.kernels import are_used
from mrl.policy.megatron_import import as_it_is, import_megatron

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

REPLACED: dict[str, str] = {}
"""Every dotted name that `install` has replaced in this process, with the reason."""


@dataclass(frozen=True)
class Patch:
    """Names of torch and megatron-core that are replaced on a host without the real thing."""

    what: str
    """Replacement that runs instead."""
    why: str
    """Failure without it."""
    until: str
    """The condition under which the patch can go."""
    is_needed: Callable[[], bool]
    values: Callable[[], Mapping[str, object]]
    """The new values by dotted name."""
    warning: str | None = None
    """Logged by a rank on a GPU, where the patch costs speed and memory."""


def install() -> None:
    """Applies patches this host needs, once a process before a process group or model exists. Imports megatron.core."""
    if REPLACED:
        return
    import_megatron()
    for patch in PATCHES:
        if not patch.is_needed():
            continue
        if patch.warning and on_gpu():
            logger.warning("%s; python -m mrl.doctor says how to get the kernels", patch.warning)
        for name, value in patch.values().items():
            owner, _, attribute = name.rpartition(".")
            setattr(pkgutil.resolve_name(owner), attribute, value)
            REPLACED[name] = f"{patch.what}: {patch.why}"


def _lacks_cuda() -> bool:
    return not on_gpu()


def _lacks_transformer_engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return not are_used("transformer_engine", is_imported=HAVE_TE)


def _lacks_fused_adam() -> bool:
    from megatron.core import optimizer

    return _lacks_cuda() or optimizer.USING_PYTORCH_OPTIMIZER


def _lacks_mamba_kernels() -> bool:
    from megatron.core.ssm import mamba_mixer

    scans, convolutions = mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.causal_conv1d_fn is not None
    return not (are_used("mamba_ssm", is_imported=scans) and are_used("causal_conv1d", is_imported=convolutions))


class _Stream:
    """A stream, or an event, of a device that executes in program order."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, *_: object) -> None: ...
    def wait_event(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: object) -> _Stream:
        return self

    def query(self) -> bool:
        return True


def _cpu_for_cuda() -> dict[str, object]:
    # `with torch.device(...)` lists factories by identity on first use: it must list torch's own, not our wrappers.
    _device_constructors()
    real_type = torch.Tensor.type

    def on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps `factory`: device="cuda" means the CPU, and no memory is pinned, for which torch wants a GPU."""

        @functools.wraps(factory)
        def wrapped(*args: object, **kwargs: Any) -> Tensor:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return wrapped

    def type_on_cuda(self: Tensor, *args: Any, **kwargs: Any) -> str | Tensor:
        if args or kwargs:
            return real_type(self, *args, **kwargs)
        return real_type(self).replace("torch.", "torch.cuda.", 1)

    return {
        "torch.compile": as_it_is,
        "torch.cuda.current_device": lambda: CPU,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.synchronize": lambda *_: None,
        "torch.cuda.empty_cache": lambda: None,
        "torch.cuda.Stream": _Stream,
        "torch.cuda.Event": _Stream,
        "torch.cuda.current_stream": lambda *_: _Stream(),
        "torch.cuda.default_stream": lambda *_: _Stream(),
        "torch.cuda.stream": lambda *_: contextlib.nullcontext(),
        "torch.cuda.manual_seed": torch.manual_seed,
        "torch.cuda.get_rng_state": lambda *_: torch.get_rng_state(),
        "torch.cuda.set_rng_state": lambda state, *_: torch.set_rng_state(state),
        **{
            f"torch.{name}": on_cpu(getattr(torch, name))
            for name in ("tensor", "zeros", "ones", "empty", "empty_like", "arange")
        },
        "torch.Tensor.cuda": lambda self, *_, **__: self,
        "torch.nn.Module.cuda": lambda self, *_, **__: self,
        "torch.Tensor.type": type_on_cuda,
    }


def _random_states() -> dict[str, object]:
    from megatron.core.tensor_parallel import random as megatron_random

    from mrl.policy.versions import IS_OLD

    class CpuRNGStatesTracker(megatron_random.CudaRNGStatesTracker):
        """Named states of the CPU generator."""

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    def share_storage(held: Tensor, recomputed: Tensor) -> None:
        held.untyped_storage().resize_(recomputed.untyped_storage().size())
        held.untyped_storage().copy_(recomputed.untyped_storage())

    path = "megatron.core.tensor_parallel.random"
    return {
        # 0.19 compiles a helper in C++ that saves this copy of recomputed memory.
        **({} if IS_OLD else {f"{path}._get_share_storage": lambda: share_storage}),
        f"{path}._CUDA_RNG_STATE_TRACKER": CpuRNGStatesTracker(),
        f"{path}._CUDA_RNG_STATE_TRACKER_INITIALIZED": True,
        f"{path}._get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        f"{path}._set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }


def _exchange() -> dict[str, object]:
    from megatron.core.tensor_parallel import mappings

    real_gather, real_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def filled(part: Tensor, size: int) -> Tensor:
        return torch.nn.functional.pad(part, (0, 0) * (part.ndim - 1) + (0, size - len(part)))

    def gather(
        part: Tensor, group: ProcessGroup, sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None:
            return real_gather(part, group, None, use_global_buffer)
        parts = real_gather(filled(part, max(sizes)), group).split([max(sizes)] * len(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter(
        whole: Tensor, group: ProcessGroup, sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if sizes is None:
            return real_reduce_scatter(whole, group, None, use_global_buffer)
        parts = torch.cat([filled(part, max(sizes)) for part in whole.split(sizes)])
        return real_reduce_scatter(parts, group)[: sizes[group.rank()]]

    def split_sizes(tensor: Tensor | list[int] | None, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor if tensor is None or isinstance(tensor, list) or not as_numpy else tensor.numpy()

    return {
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim": gather,
        "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim": reduce_scatter,
        # Megatron converts only GPU tensors to the numbers that all_to_all_single takes.
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": split_sizes,
    }


def _transformer_engine() -> dict[str, object]:
    from mrl.policy import versions
    from mrl.policy.packed import local_positions
    from mrl.policy.specs import DuplicatedLinear, TorchNorm

    def partitioned_indices(cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
        return local_positions(cu_seqlens, cp_size=cp_size, cp_rank=cp_rank)

    random, moe, mamba = "megatron.core.tensor_parallel.random", "megatron.core.transformer.moe", "megatron.core.ssm"
    latent_attention = "megatron.core.transformer.multi_latent_attention"
    return {
        # Recomputation asks for its fp8 state.
        f"{random}.FP8GlobalStateManager": types.SimpleNamespace(is_fp8_enabled=lambda: False),
        f"{random}.activation_recompute_forward": lambda **_: contextlib.nullcontext(),
        f"{random}.fp8_autocast": lambda **_: contextlib.nullcontext(),
        # Latent attention and latent experts ask for its linear layer, in a mode that any linear layer has.
        f"{latent_attention}.TELinear": DuplicatedLinear,
        f"{moe}.moe_layer.HAVE_TE": True,
        f"{moe}.moe_layer.TELinear": DuplicatedLinear,
        # 0.16.1 tests this name without defining it.
        f"{moe}.moe_utils.te_general_gemm": None,
        # The hybrid stack's final norm is hard-wired.
        f"{versions.HybridStack.__module__}.TENorm": TorchNorm,
        # Context-parallel Mamba takes its token order from the library, in versions with that function.
        f"{mamba}.mamba_context_parallel.tex": types.SimpleNamespace(thd_get_partitioned_indices=partitioned_indices),
        f"{mamba}.mamba_context_parallel.is_te_min_version": lambda *_, **__: True,
    }


class CpuFusedAdam(torch.optim.Optimizer):
    """AdamW with state layout of Apex and Transformer Engine FusedAdam, `step` in parameter groups, on any device."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and not capturable, "Megatron's defaults: decoupled weight decay, no CUDA graph"
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates the parameters that have a gradient, in place."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param] = dict(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            grads = [param.grad for param in params]
            exp_avg = [self.state[param]["exp_avg"] for param in params]
            exp_avg_sq = [self.state[param]["exp_avg_sq"] for param in params]
            beta1, beta2 = group["betas"]
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_lerp_(exp_avg, grads, 1 - beta1)
            torch._foreach_mul_(exp_avg_sq, beta2)
            torch._foreach_addcmul_(exp_avg_sq, grads, grads, 1 - beta2)
            denominator = torch._foreach_sqrt(exp_avg_sq)
            torch._foreach_div_(denominator, (1 - beta2 ** group["step"]) ** 0.5)
            torch._foreach_add_(denominator, group["eps"])
            torch._foreach_addcdiv_(params, exp_avg, denominator, -group["lr"] / (1 - beta1 ** group["step"]))


def _fused_adam() -> dict[str, object]:
    path = "megatron.core.optimizer"
    return {
        f"{path}.Adam": CpuFusedAdam,
        f"{path}.USING_PYTORCH_OPTIMIZER": False,
        f"{path}.distrib_optimizer.Adam": CpuFusedAdam,
        f"{path}.distrib_optimizer.HAVE_APEX_OR_TE": True,
        f"{path}.distrib_optimizer.USING_APEX_OPTIMIZER": True,
    }


def _mamba_kernels() -> dict[str, object]:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    from mrl.policy.mamba_torch import GatedRMSNorm, mamba_split_conv1d_scan_combined

    class ExtendedRMSNorm(GatedRMSNorm):
        """Megatron's class of this name, whose base class is a mock without mamba_ssm."""

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
        ) -> ShardedStateDict:
            assert metadata is not None
            return make_sharded_tensors_for_checkpoint(
                self.state_dict(prefix="", keep_vars=True),
                prefix,
                {"weight": 0},
                sharded_offsets,
                tp_group=parallel_state.get_tensor_model_parallel_group(),
                dp_cp_group=metadata["dp_cp_group"],
            )

    path = "megatron.core.ssm.mamba_mixer"
    return {
        f"{path}.HAVE_MAMBA_SSM": True,
        f"{path}.mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        f"{path}.ExtendedRMSNorm": ExtendedRMSNorm,
        # The mixer checks versions of the GPU kernels.
        f"{path}._check_mamba_sequence_packing_support": lambda **_: (True, None),
    }


def _lacks_delta_kernels() -> bool:
    from megatron.core.ssm import gated_delta_net

    return not are_used("fla", is_imported=gated_delta_net.HAVE_FLA)


def _delta_kernels() -> dict[str, object]:
    from mrl.policy.delta_torch import chunk_gated_delta_rule
    from mrl.policy.versions import IS_OLD

    path = "megatron.core.ssm.gated_delta_net"
    rule: dict[str, object] = {f"{path}.chunk_gated_delta_rule": chunk_gated_delta_rule}
    if IS_OLD:
        return rule | {f"{path}.HAVE_FLA": True}
    # The layer of 0.19 asks for both when it is built.
    return rule | {f"{path}.common.HAVE_FLA": True, f"{path}.gdn.chunk_gated_delta_rule": chunk_gated_delta_rule}


PATCHES = (
    Patch(
        "the CPU, one program order, nothing compiled",
        (
            'Megatron asks torch.cuda for devices, streams and events, writes device="cuda" and .cuda(), and needs a '
            "C++ compiler for helpers"
        ),
        until="megatron-core takes the device from torch.accelerator or its parameters",
        is_needed=_lacks_cuda,
        values=_cpu_for_cuda,
    ),
    Patch(
        "named states of the CPU's generator",
        "setting a CUDA generator's state is queued until CUDA starts, so that forks would silently do nothing",
        until="Megatron's tracker takes a generator",
        is_needed=_lacks_cuda,
        values=_random_states,
    ),
    Patch(
        "plain torch in place of Transformer Engine",
        "Megatron asks for parts of it in recomputation, latent experts and Mamba, whichever layers the specs name",
        until="megatron-core asks for each part only where it is installed",
        is_needed=_lacks_transformer_engine,
        values=_transformer_engine,
        warning="Transformer Engine is not installed: attention is torch's, and experts run one after another",
    ),
    Patch(
        "gloo, with parts filled up to equal size",
        (
            "gloo gathers and scatters parts of equal size only; with expert tensor parallelism, ranks hold different "
            "numbers of tokens"
        ),
        until="torch's gloo takes parts of any size",
        is_needed=_lacks_cuda,
        values=_exchange,
    ),
    Patch(
        "AdamW in plain torch, with FusedAdam's state",
        (
            "torch's AdamW keeps `step` per parameter: Megatron's optimizer checkpoints would not load, nor match "
            "those of GPUs"
        ),
        until="Megatron's distributed optimizer loads torch's AdamW",
        is_needed=_lacks_fused_adam,
        values=_fused_adam,
    ),
    Patch(
        "Mamba-2 in plain torch",
        "mamba_ssm's kernels need a GPU, and may be missing there; the mixer itself stays Megatron's",
        until="mamba_ssm runs on CPUs",
        is_needed=_lacks_mamba_kernels,
        values=_mamba_kernels,
        warning="mamba_ssm or causal_conv1d is not installed: Mamba layers run in plain torch, many times slower",
    ),
    Patch(
        "the gated delta rule in plain torch",
        "flash-linear-attention's kernels need a GPU, and may be missing there; the layer itself stays Megatron's",
        until="flash-linear-attention runs on CPUs",
        is_needed=_lacks_delta_kernels,
        values=_delta_kernels,
    ),
)
