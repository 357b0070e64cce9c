# SPDX-License-Identifier: Apache-2.0
"""vLLM keeps weights in checkpoint order on GPUs too: the arguments exist in the installed vLLM, arrive and work."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mrl.config.passthrough import LAYOUT_ARGUMENTS
from mrl.config.schema.generation import GenerationConfig, VllmConfig
from tests.waiting import HANG_S


def config(**vllm_kwargs: object) -> GenerationConfig:
    vllm_cfg = VllmConfig(
        precision="float32", enforce_eager=True, tensor_parallel_size=2, expert_parallel_size=2, max_model_len=256
    )
    return GenerationConfig(max_new_tokens=16, vllm_cfg=vllm_cfg, vllm_kwargs=vllm_kwargs)


def test_the_arguments_reach_vllms_configuration(checkpoint: Callable[[int], Path]) -> None:
    from vllm import EngineArgs

    from mrl.rollout.engine_arguments import engine_arguments

    assert LAYOUT_ARGUMENTS.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    arguments = engine_arguments(str(checkpoint(0)), config(), seed=0, device_ids=(2, 3))
    assert arguments.moe_backend == "auto", "on CPU hosts the experts are our own"
    # What a GPU host gets; the configuration is made alike everywhere.
    arguments.moe_backend = LAYOUT_ARGUMENTS["moe_backend"]  # type: ignore[assignment]  # vLLM checks
    made = arguments.create_engine_config()
    assert made.kernel_config.moe_backend == "triton"
    assert made.parallel_config.expert_placement_strategy == "linear"
    assert made.parallel_config.assigned_physical_gpu_ids == [2, 3]
    assert (made.parallel_config.enable_expert_parallel, made.parallel_config.enable_eplb) == (True, False)


def test_vllm_finds_the_class_of_a_model_that_names_none(checkpoint: Callable[[int], Path], tmp_path: Path) -> None:
    from mrl.rollout.engine_arguments import engine_arguments

    folder = Path(shutil.copytree(checkpoint(0), tmp_path / "model"))
    content = json.loads((folder / "config.json").read_text())
    (class_name,) = content.pop("architectures")
    (folder / "config.json").write_text(json.dumps(content))
    made = engine_arguments(str(folder), config(), seed=0).create_engine_config()
    assert made.model_config.architecture == class_name


def test_gateways_do_without_vllms_model_runner():
    code = "import sys, mrl.rollout.serving; print('vllm.v1.worker.gpu_model_runner' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout.splitlines()[-1] == "False"


def test_flashinfer_is_not_timed_at_a_start_unless_it_is_asked_for(
    checkpoint: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
):
    """Covers the arguments of a GPU host, with vLLM's own configuration, which is made alike everywhere."""
    from vllm.platforms import current_platform

    from mrl.rollout.engine_arguments import FLASHINFER, engine_arguments

    def timed(**vllm_kwargs: object) -> bool | None:
        with monkeypatch.context() as patch:
            patch.setattr(type(current_platform), "is_cpu", lambda _: False)
            arguments = engine_arguments(str(checkpoint(0)), config(**vllm_kwargs), seed=0)
        arguments.moe_backend, arguments.enable_sleep_mode = "auto", False
        return arguments.create_engine_config().kernel_config.enable_flashinfer_autotune

    assert timed() is False and timed(kernel_config={"enable_cutedsl_warmup": False}) is False
    assert timed(kernel_config={FLASHINFER: True}) is True and timed(**{FLASHINFER: True}) is True


def test_triton_experts_keep_the_order_and_others_do_not() -> None:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    def converted(name: object) -> tuple[torch.Tensor, torch.Tensor]:
        backend = unquantized.map_unquantized_backend(name)  # type: ignore[arg-type]  # a name of vLLM's
        moe_config = SimpleNamespace(is_act_and_mul=True)
        return unquantized.convert_to_unquantized_kernel_format(backend, moe_config, w13, w2)  # type: ignore[arg-type]  # all that is read

    w13, w2 = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    assert all(map(torch.equal, converted(LAYOUT_ARGUMENTS["moe_backend"]), (w13, w2)))
    assert not torch.equal(converted("flashinfer_cutlass")[0], w13)


def test_a_config_may_repeat_the_layout_of_gpus(checkpoint: Callable[[int], Path]) -> None:
    """Our own experts stay where there are no GPUs."""
    from mrl.rollout.engine_arguments import engine_arguments

    assert engine_arguments(str(checkpoint(0)), config(**LAYOUT_ARGUMENTS), seed=0).moe_backend == "auto"


def test_the_prefix_cache_is_as_configured(checkpoint: Callable[[int], Path], caplog: pytest.LogCaptureFixture) -> None:
    from mrl.rollout.engine_arguments import engine_arguments

    def cached(wanted: bool | None, **kept: bool) -> bool | None:
        asked = config()
        asked.vllm_cfg.enable_prefix_caching = wanted
        return engine_arguments(str(checkpoint(0)), asked, seed=0, **kept).enable_prefix_caching  # type: ignore[arg-type]  # one flag

    assert [cached(wanted) for wanted in (None, False, True)] == [False, False, True]
    assert caplog.text == ""
    assert cached(True, keeps_routes=True) is False, "a cached prefix would have no route here"
    assert "enable_prefix_caching=True is not followed" in caplog.text


def test_further_arguments_reach_vllms_configuration(checkpoint: Callable[[int], Path]) -> None:
    from mrl.rollout.engine_arguments import engine_arguments

    wanted = {
        "mamba_ssm_cache_dtype": "float32",
        "compilation_config": {"backend": "eager"},
        "scheduling_policy": "priority",
    }
    made = engine_arguments(str(checkpoint(0)), config(**wanted), seed=0).create_engine_config()
    assert made.cache_config.mamba_ssm_cache_dtype == "float32"
    assert made.compilation_config.backend == "eager"
    assert made.scheduler_config.policy == "priority"
    assert (
        engine_arguments(str(checkpoint(0)), config(), seed=0).create_engine_config().scheduler_config.policy == "fcfs"
    )


def test_the_type_of_the_cache_reaches_vllm() -> None:
    from mrl.rollout.engine_arguments import engine_arguments

    wanted = dataclasses.replace(
        config(), vllm_cfg=VllmConfig(precision="float32", kv_cache_dtype="bfloat16", max_model_len=256)
    )
    assert engine_arguments("model", wanted, seed=0).kv_cache_dtype == "bfloat16"
