# SPDX-License-Identifier: Apache-2.0
"""vLLM's arguments for an engine, from the configuration and mrl's own choices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from vllm import EngineArgs
from vllm.platforms import current_platform

from conversion.adapters import HeldAdapters
from conversion.families.registry import family
from conversion.families.settings import known_keys
from conversion.files.hf_folder import read_config
from mrl.config.fp8 import MX, form_of, kept_layers
from mrl.config.model import sizes_of
from mrl.config.passthrough import LAYOUT_ARGUMENTS
from mrl.config.schema.generation import GenerationConfig, VllmConfig
from mrl.rollout.environment import EngineNodes

logger = logging.getLogger(__name__)

FLASHINFER = "enable_flashinfer_autotune"


def engine_arguments(
    model_dir: str,
    config: GenerationConfig,
    *,
    seed: int,
    device_ids: Sequence[int] = (),
    keeps_routes: bool = False,
    tokenizer: str | None = None,
    nodes: EngineNodes | None = None,
    adapters: HeldAdapters | None = None,
) -> EngineArgs:
    """An engine's vLLM arguments; the config's `vllm_kwargs` add to them (`mrl.config.passthrough` says what they may).

    Worker `i` runs on the visible GPU `device_ids[i]`; vLLM counts from 0 if there are none. With `adapters` the
    engine has room for these beside the weights.
    """
    vllm_cfg, is_cpu = config.vllm_cfg, current_platform.is_cpu()
    arguments: dict[str, object] = {
        "model": model_dir,
        "skip_tokenizer_init": tokenizer is None,
        "tokenizer": tokenizer,
        "generation_config": "vllm",
        "seed": seed,
        "dtype": vllm_cfg.loaded_precision,
        "load_format": vllm_cfg.load_format,
        "kv_cache_dtype": vllm_cfg.kv_cache_dtype,
        "tensor_parallel_size": vllm_cfg.tensor_parallel_size,
        "pipeline_parallel_size": vllm_cfg.pipeline_parallel_size,
        "data_parallel_size": vllm_cfg.num_groups,
        "enable_expert_parallel": vllm_cfg.expert_parallel_size > 1,
        "device_ids": list(device_ids) or None,
        "distributed_executor_backend": "mp" if config.num_workers > 1 else "uni",
        "worker_extension_cls": "mrl.rollout.worker.RefitWorker",
        "max_model_len": vllm_cfg.max_model_len,
        "max_num_seqs": vllm_cfg.max_num_seqs,
        "max_num_batched_tokens": vllm_cfg.max_num_batched_tokens,
        "enforce_eager": vllm_cfg.enforce_eager,
        # Logprobs of the distribution that tokens are drawn from, after temperature.
        "logprobs_mode": "processed_logprobs",
        # As vLLM decides: on GPUs it schedules a step during the one before (see `settle`), unless a drafter forbids
        # that.
        "async_scheduling": None,
        "disable_log_stats": True,
        "per_request_spec_decode_metrics": "summary" if config.speculative_method else "none",
        "enable_prefix_caching": _prefix_caching(vllm_cfg.enable_prefix_caching, keeps_routes=keeps_routes),
        "enable_return_routed_experts": keeps_routes and not is_cpu,
    }
    if is_cpu:
        _install_for_cpu()
        arguments["kv_cache_memory_bytes"] = vllm_cfg.kv_cache_memory_mib << 20
    else:
        arguments |= {
            "gpu_memory_utilization": vllm_cfg.gpu_memory_utilization,
            "enable_sleep_mode": config.colocated.enabled,
        }
        kernels = config.vllm_kwargs.get("kernel_config")
        if not (isinstance(kernels, dict) and FLASHINFER in kernels):
            # vLLM would import and time FlashInfer at each start, though neither its sampler nor its experts serve
            # here.
            arguments[FLASHINFER] = False
    arguments |= _class_of(Path(model_dir) / "config.json")
    if vllm_cfg.is_fp8:
        sizes = sizes_of(read_config(Path(model_dir) / "config.json"))
        arguments |= {
            "quantization": form_of(config, sizes),
            "quantization_config": {"ignore": kept_layers(config, sizes)},
        }
    arguments |= _adapters(model_dir, vllm_cfg, adapters) | _nodes(nodes)
    # The user's repetitions of LAYOUT_ARGUMENTS are for GPUs.
    arguments |= {**config.vllm_kwargs, **LAYOUT_ARGUMENTS}
    if is_cpu or arguments.get("quantization") == MX:
        # The experts of CPU hosts are those of mrl.rollout.cpu, which keep the checkpoint's order. NVIDIA GPUs have no
        # Triton kernel for MXFP8; vLLM makes such experts of staged weights, in any order.
        arguments["moe_backend"] = "auto"
    return EngineArgs(**arguments)  # type: ignore[arg-type]  # vLLM checks


def _adapters(model_dir: str, vllm_cfg: VllmConfig, adapters: HeldAdapters | None) -> dict[str, object]:
    if adapters is None:
        return {}
    # It brings the model runner of vLLM, which gateways do without: they ask for arguments without adapters.
    from mrl.rollout.held_adapters import check_experts, experts_are_shuffled_here

    hf_config = read_config(Path(model_dir) / "config.json")
    if experts_are_shuffled_here():
        check_experts(hf_config, vllm_cfg)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": adapters.rank,
        "lora_target_modules": adapters.modules(family(hf_config), hf_config),
    }


def _nodes(nodes: EngineNodes | None) -> dict[str, object]:
    if nodes is None:
        return {}
    return {
        "nnodes": nodes.count,
        "node_rank": nodes.rank,
        "master_addr": nodes.address,
        "master_port": nodes.port,
    }


def _install_for_cpu() -> None:
    from mrl.rollout import cpu

    cpu.install()


def _prefix_caching(setting: bool | None, *, keeps_routes: bool) -> bool | None:
    """The argument for the cache of prefixes; None leaves it to vLLM."""
    is_cpu = current_platform.is_cpu()
    if not keeps_routes:
        # vLLM's CPU scan keeps final states only: a cached prefix of a Mamba model ends in an IndexError.
        return False if setting is None and is_cpu else setting
    # vLLM keeps the routes of cached blocks, and insists on a cache; RouteRecorder only knows tokens that are computed.
    needed = not is_cpu
    if setting not in (None, needed):
        logger.warning(
            "enable_prefix_caching=%s is not followed: policy.router_replay needs %s here, to know all routes",
            setting,
            needed,
        )
    return needed


def _class_of(path: Path) -> dict[str, object]:
    """The argument naming a model's class if config.json does not: vLLM takes any, transformers goes by model_type."""
    hf_config = read_config(path) if path.exists() else {}
    known = known_keys().get(str(hf_config.get("model_type")), {}).get("class")
    return {"hf_overrides": {"architectures": [known]}} if known and not hf_config.get("architectures") else {}
