# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM 0.32 for CPU hosts: nemotron_h's experts, refit-writable weights, fp32 logprobs free of the batch.

`PATCHES` at the end lists every replaced name: by what, why, and until when. GPU hosts have the real thing, so nothing
is patched there.
"""

from __future__ import annotations

import builtins
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import vllm._custom_ops as ops
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mrl.rollout import cpu_experts
from mrl.rollout.cpu_delta import VECTOR_LANES, causal_conv1d, gated_delta_net
from mrl.rollout.cpu_experts import ROW_MULTIPLE, PlainExperts, linear
from mrl.rollout.cpu_groups import gather_any, gather_rows, sum_rows
from mrl.rollout.cpu_sampling import (
    CountingRequest,
    come_back,
    convolve_proposed,
    draw_ahead,
    draw_tokens,
    gumbel_seeds,
    note_accepted,
    sample_targets,
    scan_proposed,
    spread,
)
from mrl.rollout.cpu_vision import inspect_text_model, load_text_model

# Unary functions whose scalar and vector loops differ, among those that the models here use.
TAIL_SAFE_FUNCTIONS = ("sigmoid", "silu", "softplus")


def install() -> None:
    """Applies PATCHES in this process, once; call it before the model is built."""
    if not current_platform.is_cpu():
        raise RuntimeError(
            f"mrl.rollout.cpu is for CPU hosts, but vLLM's platform here is {current_platform.device_name}"
        )
    if _libraries:
        return
    for patch in PATCHES:
        path, _, name = patch.name.rpartition(".")
        owner = pkgutil.resolve_name(path)
        # A module may use a builtin function, which a name of its own hides; and a class may lack a method.
        setattr(
            owner, name, patch.replace(getattr(owner, name) if name in vars(owner) else getattr(builtins, name, None))
        )
    library = torch.library.Library("aten", "IMPL")
    for name in TAIL_SAFE_FUNCTIONS:
        library.impl(name, _tail_safe(getattr(torch.ops.aten, name).out), "CPU")
    _libraries.append(library)


# torch drops the kernels of a Library when it is collected.
_libraries: list[torch.library.Library] = []


def _rotate(original: Callable[..., object]) -> Callable[..., object]:
    def forward_cpu(self: RotaryEmbedding, positions: Tensor, query: Tensor, *key: Tensor | None) -> object:
        rotate = RotaryEmbedding.forward_native if query.ndim == 3 else original
        return rotate(self, positions, query, *key)

    return forward_cpu


def _batched(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def bmm(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
        product = original(F.pad(x, (0, 0, 0, -x.shape[1] % ROW_MULTIPLE)), weight)[:, : x.shape[1]]
        return product if out is None else out.copy_(product)

    return bmm


def _dispatch_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    setattr(layer, "cpu_linear", linear)  # noqa: B010  torch types attributes of modules as tensors


def _allow_non_gated(original: Callable[..., None]) -> Callable[..., None]:
    def post_init(self: object) -> None:
        try:
            original(self)
        except NotImplementedError as error:
            # The check is the last statement of the original: nothing is left undone.
            if "is_act_and_mul=False" not in str(error):
                raise
        # Adapters are of other layers. vLLM would choose experts that can have them, in Triton.
        setattr(self, "is_lora_enabled", False)  # noqa: B010  (a field of FusedMoEConfig)

    return post_init


def _prefer_plain_experts(original: Callable[..., list[type]]) -> Callable[..., list[type]]:
    def backend_to_kernel_cls(backend: object) -> list[type]:
        classes = original(backend)
        return [PlainExperts] if CPUUnquantizedExperts in classes else classes

    return backend_to_kernel_cls


def _tail_safe(out_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(x: Tensor, *args: float) -> Tensor:
        flat = x.reshape(-1)
        if missing := -x.numel() % VECTOR_LANES:
            flat = F.pad(flat, (0, missing))
        result = torch.empty_like(flat)
        out_function(flat, *args, out=result)
        return result[: x.numel()].view(x.shape)

    return function


def _causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    **unused: object,
) -> Tensor:
    assert conv_state_indices is not None and activation == "silu"
    if num_accepted_tokens is not None and query_start_loc is not None:
        slots = conv_state_indices.view(len(num_accepted_tokens), -1)[:, 0].long()
        return convolve_proposed(x, conv_state, weight, bias, slots, num_accepted_tokens, query_start_loc)
    slots = conv_state_indices.reshape(-1).long()
    width = weight.shape[1]
    window = torch.cat([conv_state[slots][..., : width - 1], x.unsqueeze(-1)], dim=-1).contiguous()
    out = F.conv1d(window, weight.unsqueeze(1), bias, groups=weight.shape[0])[..., 0]
    conv_state[slots, :, : width - 1] = window[..., 1:]
    return F.silu(out)


def _selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **unused: object,
) -> Tensor:
    assert state_batch_indices is not None and out is not None and dt_softplus
    dt = F.softplus(dt[..., 0].float() + dt_bias[..., 0].float()).contiguous()
    if num_accepted_tokens is not None and cu_seqlens is not None:
        heads = (A[:, 0, 0].contiguous(), B, C, D[:, 0].float().contiguous())
        scan_proposed(state, x, dt, *heads, state_batch_indices.long(), num_accepted_tokens, cu_seqlens, out)
        return out
    slots = state_batch_indices.reshape(-1).long()
    # Copies whole states, which indexing by a tensor does value by value.
    states = state.index_select(0, slots).float()
    result = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
    starts = torch.arange(x.shape[0] + 1, dtype=torch.int32)
    ops.mamba_chunk_scan_fwd_cpu(
        result, states, x, dt, A[:, 0, 0].contiguous(), B, C, D[:, 0].float().contiguous(), z, starts
    )
    if result is not out:
        out.copy_(result)
    state[slots] = states.to(state.dtype)
    return out


def _take_over(original: Callable[..., IntermediateTensors]) -> Callable[..., IntermediateTensors]:
    def sync_and_gather(runner: GPUModelRunner, *arguments: object) -> IntermediateTensors:
        if runner.intermediate_tensors is None:
            make: Callable[..., IntermediateTensors] = getattr(runner.get_model(), "make_empty_intermediate_tensors")  # noqa: B009
            runner.intermediate_tensors = make(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return original(runner, *arguments)

    return sync_and_gather


@dataclass(frozen=True)
class EnginePatch:
    """One replaced name of vLLM."""

    name: str
    what: str
    """Replacement that runs instead."""
    why: str
    until: str
    """The condition under which the patch can go."""
    replace: Callable[..., object]
    """Takes what vLLM has there and returns what replaces it."""


_PREFILL = "the prefill kernel, for decoding too"
_DECODE = (
    "the decode kernel has other bits than the prefill kernel, so a chunk of one token or a recompute changes logprobs"
)
_SAME_TOKENS = (
    "with vLLM's, a request's tokens depend on what was proposed, so that its seed no longer says what it samples"
)
_UNTIL_SAME_TOKENS = "vLLM draws the same tokens with proposals as without, seed by seed"
_ONLINE = "vllm.model_executor.layers.quantization.online"
_NEEDS_AMX = "vLLM's FP8 kernels for CPUs need AMX, or are not there"
_REGISTERED = "vllm.model_executor.models.registry._LazyRegisteredModel"
_NEEDS_TORCHVISION = "vLLM imports it with Qwen3.5's text model, for images; PyPI has no build of it for CPU hosts"
_UNTIL_NO_TORCHVISION = "Qwen3.5's text model is a file without images, or torchvision is installed"
_SAME_BITS = "vLLM's CPU decode and prefill kernels give the same bits"

PATCHES = (
    EnginePatch(
        "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
        "linear layers on weights as loaded, in rows of 16",
        (
            "vLLM packs the weights for oneDNN and empties the parameter, so a refit cannot write; and few rows get "
            "other bits than many"
        ),
        "vLLM can leave weights unpacked on CPUs, and its kernel's rows do not depend on their number",
        lambda _: _dispatch_linear,
    ),
    EnginePatch(
        "vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu",
        "the same function; in plain torch where heads have a dimension of their own",
        "vLLM's kernel then rotates the first head alone, so latent attention without YaRN computes something else",
        "the kernel for CPUs counts heads as the one for GPUs does",
        _rotate,
    ),
    EnginePatch(
        "torch.bmm",
        "the same function, in rows of 16",
        "latent attention decodes with it, and few rows get other bits than many",
        "rows do not depend on their number",
        _batched,
    ),
    EnginePatch(
        "torch.cpu._is_amx_tile_supported",
        "False, on every host",
        "with AMX, latent attention packs `kv_b_proj` and empties the parameter, so a refit cannot write",
        "vLLM can leave weights unpacked on CPUs",
        lambda _: lambda: False,
    ),
    EnginePatch(
        "vllm.model_executor.layers.fused_moe.config.FusedMoEConfig.__post_init__",
        "the same check without its refusal of non-gated experts, which never have adapters",
        "refuses non-gated experts (relu^2) on CPU, and wants Triton's where other layers have adapters",
        "vLLM's CPU experts know relu^2, and vLLM asks whether experts have adapters",
        _allow_non_gated,
    ),
    EnginePatch(
        "vllm.model_executor.layers.fused_moe.oracle.unquantized.backend_to_kernel_cls",
        "experts in plain torch, gated or not",
        "vLLM's CPU experts pack their weights, know no relu^2, and give an expert's few rows other bits than many",
        "vLLM's CPU experts read weights as loaded, know relu^2, and their rows do not depend on their number",
        _prefer_plain_experts,
    ),
    *(
        EnginePatch(f"{_ONLINE}.{name}", what, _NEEDS_AMX, "vLLM's do not", replace)
        for name, what, replace in (
            ("fp8.init_fp8_linear_kernel", "FP8 products in plain torch", lambda _: cpu_experts.PlainKernel),
            ("fp8.select_fp8_moe_backend", "FP8 experts in plain torch", lambda _: cpu_experts.choose_experts),
            ("fp8.ops.scaled_fp8_quant", "the same cast in plain torch", lambda _: cpu_experts.cast),
            ("mxfp8.init_mxfp8_linear_kernel", "MXFP8 products in plain torch", lambda _: cpu_experts.PlainKernel),
            ("mxfp8.select_mxfp8_moe_backend", "MXFP8 experts in plain torch", lambda _: cpu_experts.choose_experts),
        )
    ),
    EnginePatch(
        "vllm.model_executor.layers.mamba.mamba_mixer2.causal_conv1d_fn",
        "the same function, for all sequences of one length at once",
        "vLLM's takes one sequence after the other, a quarter of the time of a small model",
        "vLLM's takes several at once",
        lambda _: causal_conv1d,
    ),
    EnginePatch(
        "vllm.model_executor.layers.mamba.mamba_mixer2.causal_conv1d_update",
        _PREFILL,
        _DECODE,
        _SAME_BITS,
        lambda _: _causal_conv1d_update,
    ),
    EnginePatch(
        "vllm.model_executor.layers.mamba.mamba_mixer2.selective_state_update",
        _PREFILL,
        _DECODE,
        _SAME_BITS,
        lambda _: _selective_state_update,
    ),
    EnginePatch(
        "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention.cpu_gdn_attention_core",
        "gated delta nets in plain torch, token by token",
        "vLLM's kernels for CPUs take bfloat16 alone, and decode with other bits than they read a prompt with",
        "they take float32, and give the same bits",
        lambda _: gated_delta_net,
    ),
    EnginePatch(
        "vllm.v1.worker.gpu_model_runner.CachedRequestState",
        "the same class, whose generators count their draws",
        "after a partial prefill the runner rewinds the request's generator: 'CPU Generator does not use offset'",
        "vLLM's runner draws nothing for a partial prefill, or can rewind CPU generators",
        lambda _: CountingRequest,
    ),
    EnginePatch(
        "vllm.v1.worker.gpu_input_batch.InputBatch.add_request",
        "the same function; a request's prompt is all that it has when it comes, and its states come with it",
        "the last tokens of a request that is computed anew pass for proposals, and it goes on from the state of "
        "the first of them; one that a full step left out goes on from a state before its accepted tokens",
        (
            "vLLM's first model runner knows of requests that come back what the second does (`prefill_len`, "
            "`num_accepted_tokens_gpu`)"
        ),
        come_back,
    ),
    EnginePatch(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states",
        "the same function, which first notes how many tokens the requests of the last step kept",
        "the patch of InputBatch.add_request needs it",
        "the patch of InputBatch.add_request goes",
        note_accepted,
    ),
    EnginePatch(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.sync_and_gather_intermediate_tensors",
        "the same function, which first makes the buffer for what the stage before hands on",
        "vLLM makes it in a dummy run, which eager engines with a given size of the cache leave out on CPUs",
        "vLLM makes it where it is used",
        _take_over,
    ),
    *(
        EnginePatch(
            f"vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator.{name}",
            "the exchange of the groups' tokens, by gloo",
            "vLLM's communicator of CPU hosts has none",
            "it has one",
            lambda _, exchange=exchange: exchange,
        )
        for name, exchange in (("all_gatherv", gather_rows), ("reduce_scatterv", sum_rows))
    ),
    EnginePatch(
        "vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed.all_gather_into_tensor",
        "the same function, for whole numbers too",
        "where groups have several workers, each tells the others the routes of its tokens, which are whole numbers",
        "vLLM's kernel copies any type",
        gather_any,
    ),
    EnginePatch(
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu",
        "the same function, with seeds from each request's count",
        "counts can be rewound, and vLLM's draw of one seed after the other takes a tenth of a small model's step",
        "the patch of CachedRequestState goes",
        lambda _: draw_tokens,
    ),
    EnginePatch(
        "vllm.triton_utils.dispatcher.vars",
        "the builtin function, which finds nothing in objects that only seem to have attributes",
        "numba's library, which the n-gram proposer loads, has such objects; the next engine fails at them",
        "vLLM's search for kernels passes over them",
        lambda original: lambda value: found if isinstance(found := original(value), Mapping) else {},
    ),
    EnginePatch(
        "vllm.v1.sample.rejection_sampler.RejectionSampler.forward",
        "the same function, which counts a request's draws by the places of its tokens",
        _SAME_TOKENS,
        _UNTIL_SAME_TOKENS,
        draw_ahead,
    ),
    EnginePatch(
        "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens",
        "the same function in plain torch",
        "vLLM's writes temperatures and top-p as whole numbers into a copy that is dropped",
        "vLLM's expand_kernel_impl takes floats",
        lambda _: spread,
    ),
    EnginePatch(
        "vllm.v1.sample.rejection_sampler.rejection_sample",
        "each token is drawn as if nothing had been proposed; a proposal is accepted if equal to the drawn token",
        _SAME_TOKENS,
        _UNTIL_SAME_TOKENS,
        lambda _: sample_targets(gumbel_seeds),
    ),
    EnginePatch(
        f"{_REGISTERED}.load_model_cls",
        "the same function; empty modules in the place of a missing torchvision",
        _NEEDS_TORCHVISION,
        _UNTIL_NO_TORCHVISION,
        load_text_model,
    ),
    EnginePatch(
        f"{_REGISTERED}.inspect_model_cls",
        "the same function, in the process that asks",
        _NEEDS_TORCHVISION,
        _UNTIL_NO_TORCHVISION,
        inspect_text_model,
    ),
)

REPLACED: dict[str, str] = {patch.name: f"{patch.what}: {patch.why}" for patch in PATCHES} | {
    # Until torch's loops agree.
    f"torch.ops.aten.{name} (CPU kernel)": "the scalar loop over the last elements has other bits than the vector loop"
    for name in TAIL_SAFE_FUNCTIONS
}
"""Every replaced name, with the reason."""
