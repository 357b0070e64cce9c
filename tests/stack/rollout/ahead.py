# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduling on CPU hosts, where vLLM turns it off: its own scheduler, batch queue and worker."""

from __future__ import annotations

import pytest
import torch


class _Idle:
    """Stands for a CUDA stream or event. On CPUs nothing is awaited, as in `cpu_model_runner._torch_cuda_wrapper`."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


def schedule_ahead(patch: pytest.MonkeyPatch) -> None:
    """Lets engines that start from here on schedule a step before they take in the one before, as on GPUs."""
    from vllm.config import VllmConfig
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep_scheduling(vllm_config: VllmConfig) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep_scheduling))
    for name in ("Event", "Stream", "current_stream", "stream"):
        patch.setattr(torch.cuda, name, _Idle)
