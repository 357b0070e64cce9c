"""Environment variables that policy ranks and engines on GPUs start with, from the config and from the shell that mrl was started in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from mrl import env
from mrl.refit.memory import with_expandable_segments
from mrl.rollout.environment import engine_environment

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig

logger = logging.getLogger(__name__)

FULL_FLOAT32 = {
    # cuBLAS, cuDNN: Transformer Engine asks cuBLAS for TF32 in every float32 product, and only this overrules a caller.
    "NVIDIA_TF32_OVERRIDE": "0",
    # NVIDIA's containers set it to 1, which makes torch ask for TF32 too.
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
    # tl.dot of float32 is TF32 unless the kernel or this says otherwise; the kernels of mamba_ssm and of vLLM's experts and scans do not.
    # Three products of TF32 give 21 bits: logprobs of the tests' tiny models move by 2e-6 at most (factors split so on a CPU). `ieee` gives
    # 23, but not on tensor cores: each of the 23 variants of vLLM's scan takes up to four times as long to compile.
    "TRITON_F32_DEFAULT": "tf32x3",
}
"""With these, a process whose precision is float32 multiplies float32 numbers, and not TF32, which keeps 10 of their 23 bits."""


def policy_variables(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """What a policy rank starts with; `given` (policy.megatron_cfg.env_vars) wins."""
    # Megatron orders its communication behind its compute by queueing both on one hardware queue; it asks for this with TP or SP on GPUs.
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if config.cluster.gpus_per_node:
        # Rows of varying length would leave holes of every size between segments.
        own |= _precision(config.policy.precision) | _allocator(given, expandable_segments=True)
    return {**own, **given}


def engine_variables(config: RunConfig, given: Mapping[str, str]) -> dict[str, str]:
    """What an engine starts with, and its workers inherit; `given` (policy.generation.vllm_cfg.env_vars) wins."""
    has_gpu = config.cluster.gpus_per_node > 0
    own = engine_environment(has_gpu=has_gpu)
    if has_gpu:
        # Memory that vLLM puts to sleep cannot lie in such segments (https://github.com/pytorch/pytorch/issues/147851).
        own |= _precision(config.policy.generation.vllm_cfg.precision) | _allocator(given, expandable_segments=False)
    return {**own, **given}


def _precision(precision: str) -> dict[str, str]:
    return FULL_FLOAT32 if precision == "float32" else {}


def _allocator(given: Mapping[str, str], *, expandable_segments: bool) -> dict[str, str]:
    """Settings of torch's allocator: those of the config, or those of this shell with one option replaced.

    torch 2.13 reads some options from the one variable first and some from the other, so both say the same.
    """
    names = [env.PYTORCH_ALLOC_CONF.name, env.PYTORCH_CUDA_ALLOC_CONF.name]
    chosen = [given[name] for name in names if name in given]
    if chosen:
        return dict.fromkeys(names, chosen[0])
    inherited = env.PYTORCH_ALLOC_CONF.read() or env.PYTORCH_CUDA_ALLOC_CONF.read() or ""
    settings = with_expandable_segments(inherited, expandable_segments)
    if inherited:
        _log_change("policy ranks" if expandable_segments else "engines", inherited, settings)
    return dict.fromkeys(names, settings)


@cache
def _log_change(processes: str, inherited: str, settings: str) -> None:
    # Cached, so that it is said once and not by engine.
    logger.info(
        "torch's allocator is set to %s in this shell; %s get %s, because policy ranks need expandable segments and engines cannot "
        "use them (PYTORCH_ALLOC_CONF in env_vars of policy.megatron_cfg or policy.generation.vllm_cfg overrules this)",
        inherited,
        processes,
        settings,
    )
