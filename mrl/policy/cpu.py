"""What lets real megatron-core train on a host without CUDA, or without the libraries that GPU hosts have for it.

Only repairs that stock 0.16.1 fails without, each with its reason.

Layers are not replaced here: specs.py chooses them through Megatron's own specs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._device import _device_constructors

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

REPLACED: dict[str, str] = {}
"""Every dotted name that `install` replaces, with the reason."""


def install() -> None:
    """Gives the CUDA names that megatron-core uses a meaning on the CPU, once per process; later calls do nothing.

    Call before a process group or a model is made. Imports megatron.core.

    Raises:
        RuntimeError: the host has CUDA.
    """
    if torch.cuda.is_available():
        raise RuntimeError("mrl.policy.cpu.install() is for hosts without CUDA; this host has it")
    if REPLACED:
        return
    _replace_torch_names()
    _repair_megatron()
    _replace_adam()
    _replace_mamba_kernels()


def install_missing() -> None:
    """On a host with CUDA: plain torch in place of what Transformer Engine and mamba_ssm would bring, where they are missing.

    Once per process, before a model is made; later calls do nothing. A warning says what runs slowly and takes more memory because of it.
    """
    if REPLACED:
        return
    from megatron.core import optimizer
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.ssm import mamba_mixer

    if not HAVE_TE:
        logger.warning("Transformer Engine is not installed: attention is torch's, and experts run one after another; install mrl[gpu]")
        _replace_transformer_engine()
    if optimizer.USING_PYTORCH_OPTIMIZER:
        _replace_adam()
    if not mamba_mixer.HAVE_MAMBA_SSM or mamba_mixer.causal_conv1d_fn is None:
        logger.warning("mamba_ssm or causal_conv1d is not installed: Mamba layers run in plain torch, many times slower; install mrl[gpu]")
        _replace_mamba_kernels()


def _replace(name: str, value: object, reason: str) -> None:
    owner_path, attribute = name.rsplit(".", 1)
    owner = _owner(owner_path)
    setattr(owner, attribute, value)
    REPLACED[name] = reason


def _owner(path: str) -> object:
    """The module or class at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, attribute = path.rsplit(".", 1)
        return getattr(importlib.import_module(module), attribute)


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


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`factory` with device="cuda" read as the CPU, for which no memory needs pinning."""

    @functools.wraps(factory)
    def wrapped(*args: object, **kwargs: object) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":  # type: ignore[arg-type]  # whatever torch takes
            kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _replace_torch_names() -> None:
    current = "Megatron asks torch.cuda for the current device and its streams"
    for name, value in {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }.items():
        _replace(f"torch.cuda.{name}", value, current)
    # `with torch.device(...)` knows factories by identity and lists them on first use: it must list torch's own, not our wrappers.
    _device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "empty_like", "arange"):
        _replace(f"torch.{name}", _on_cpu(getattr(torch, name)), 'schedules, optimizer and gradient clipping write device="cuda"')
    _replace("torch.Tensor.cuda", lambda self, *_, **__: self, "Megatron moves tensors to the current device")
    _replace("torch.nn.Module.cuda", lambda self, *_, **__: self, "Megatron moves modules to the current device")

    real_type = torch.Tensor.type

    def type_on_cuda(self: Tensor, *args: object, **kwargs: object) -> str | Tensor:
        if args or kwargs:
            return real_type(self, *args, **kwargs)  # type: ignore[call-overload]  # passed through
        return real_type(self).replace("torch.", "torch.cuda.", 1)

    _replace("torch.Tensor.type", type_on_cuda, "the optimizers compare parameter types with 'torch.cuda.FloatTensor' and the like")


def _repair_megatron() -> None:
    _replace("torch._dynamo.config.disable", True, "megatron.core compiles small helpers: seconds at start, and it needs a C++ compiler")

    from megatron.core.tensor_parallel import random as megatron_random

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

    random_state = "setting a CUDA generator's state is queued until CUDA starts, so that forks would silently do nothing"
    path = "megatron.core.tensor_parallel.random"
    _replace(f"{path}._CUDA_RNG_STATE_TRACKER", CpuRNGStatesTracker(), random_state)
    _replace(f"{path}._CUDA_RNG_STATE_TRACKER_INITIALIZED", True, random_state)
    _replace(f"{path}._get_cuda_rng_state", lambda *_, **__: torch.get_rng_state(), random_state)
    _replace(f"{path}._set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state), random_state)

    _replace_transformer_engine()

    def split_sizes(tensor: Tensor | list[int] | None, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor if tensor is None or isinstance(tensor, list) or not as_numpy else tensor.numpy()

    _replace(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        split_sizes,
        "only tensors on a GPU became the numbers that all_to_all_single takes",
    )
    _fill_up_parts()


def _fill_up_parts() -> None:
    from megatron.core.tensor_parallel import mappings

    real_gather, real_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def filled(part: Tensor, size: int) -> Tensor:
        return torch.nn.functional.pad(part, (0, 0) * (part.ndim - 1) + (0, size - len(part)))

    def gather(part: Tensor, group: ProcessGroup, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None:
            return real_gather(part, group, None, use_global_buffer)
        parts = real_gather(filled(part, max(sizes)), group).split([max(sizes)] * len(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter(whole: Tensor, group: ProcessGroup, sizes: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        if sizes is None:
            return real_reduce_scatter(whole, group, None, use_global_buffer)
        parts = torch.cat([filled(part, max(sizes)) for part in whole.split(sizes)])
        return real_reduce_scatter(parts, group)[: sizes[group.rank()]]

    unequal = "gloo gathers and scatters parts of equal size only; with expert tensor parallelism, ranks hold different numbers of tokens"
    _replace("megatron.core.tensor_parallel.mappings._gather_along_first_dim", gather, unequal)
    _replace("megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim", reduce_scatter, unequal)


def _replace_transformer_engine() -> None:
    from mrl.policy.context import local_positions
    from mrl.policy.specs import DuplicatedLinear, TorchNorm

    path = "megatron.core.tensor_parallel.random"
    without_te = "recomputation asks Transformer Engine for its fp8 state even without it"
    _replace(f"{path}.FP8GlobalStateManager", types.SimpleNamespace(is_fp8_enabled=lambda: False), without_te)
    _replace(f"{path}.activation_recompute_forward", lambda **_: contextlib.nullcontext(), without_te)
    _replace(f"{path}.fp8_autocast", lambda **_: contextlib.nullcontext(), without_te)
    latent = "latent experts ask for Transformer Engine's linear layer, in a mode that any linear layer has"
    _replace("megatron.core.transformer.moe.moe_layer.HAVE_TE", True, latent)
    _replace("megatron.core.transformer.moe.moe_layer.TELinear", DuplicatedLinear, latent)
    _replace(
        "megatron.core.transformer.moe.moe_utils.te_general_gemm",
        None,
        "0.16.1 tests it without defining it where there is no Transformer Engine",
    )
    _replace("megatron.core.ssm.mamba_block.TENorm", TorchNorm, "the stack's final norm is hard-wired to Transformer Engine")

    def partitioned_indices(cu_seqlens: Tensor, total_tokens: int, cp_size: int, cp_rank: int) -> Tensor:
        return local_positions(cu_seqlens, cp_size=cp_size, cp_rank=cp_rank)

    path, indices = "megatron.core.ssm.mamba_context_parallel", types.SimpleNamespace(thd_get_partitioned_indices=partitioned_indices)
    _replace(f"{path}.tex", indices, "context-parallel Mamba takes its order of tokens from Transformer Engine's library")
    _replace(f"{path}.is_te_min_version", lambda *_, **__: True, "it asks for the version that has this function")


class CpuFusedAdam(torch.optim.Optimizer):
    """AdamW with the state layout of apex's and Transformer Engine's FusedAdam: `step` stands in the parameter group. On any device."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode, "Megatron's default, decoupled weight decay"
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


def _replace_adam() -> None:
    reason = "torch's AdamW keeps `step` per parameter: Megatron's optimizer checkpoints would not load, nor match those of GPUs"
    _replace("megatron.core.optimizer.Adam", CpuFusedAdam, reason)
    _replace("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False, reason)
    _replace("megatron.core.optimizer.distrib_optimizer.Adam", CpuFusedAdam, reason)
    _replace("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE", True, reason)
    _replace("megatron.core.optimizer.distrib_optimizer.USING_APEX_OPTIMIZER", True, reason)


def _replace_mamba_kernels() -> None:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    from mrl.policy.mamba_torch import GatedRMSNorm, mamba_split_conv1d_scan_combined

    class ExtendedRMSNorm(GatedRMSNorm):
        """Megatron's class of this name, whose base class is a mock without mamba_ssm."""

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> ShardedStateDict:
            assert metadata is not None
            return make_sharded_tensors_for_checkpoint(
                self.state_dict(prefix="", keep_vars=True),
                prefix,
                {"weight": 0},
                sharded_offsets,
                tp_group=parallel_state.get_tensor_model_parallel_group(),
                dp_cp_group=metadata["dp_cp_group"],
            )

    reason = "mamba_ssm's kernels need a GPU, and may be missing there; the mixer itself stays Megatron's"
    path = "megatron.core.ssm.mamba_mixer"
    _replace(f"{path}.HAVE_MAMBA_SSM", True, reason)
    _replace(f"{path}.mamba_split_conv1d_scan_combined", mamba_split_conv1d_scan_combined, reason)
    _replace(f"{path}.ExtendedRMSNorm", ExtendedRMSNorm, reason)
    _replace(f"{path}._check_mamba_sequence_packing_support", lambda **_: (True, None), "it asks for versions of the GPU kernels")
