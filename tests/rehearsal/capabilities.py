# SPDX-License-Identifier: Apache-2.0
"""vLLM's own model classes as hosts with CUDA build them, on the meta device, through the preparation of a refit.

A process of its own, which takes an empty folder and prints rows of JSON: what vLLM calls its platform holds for the
whole process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import torch
from torch import nn

from conversion.families.common import MegatronCoords, MegatronParallel, VllmParallel
from conversion.schedule import Schedule
from mrl.cluster.engines import EngineGroup
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.refit import build_schedule, refit_inputs
from mrl.cluster.runtime import Placement
from mrl.cluster.scheduling import EngineSlots
from mrl.config.load import load_config
from mrl.config.schema.generation import ColocatedConfig, GenerationConfig, VllmConfig
from mrl.config.schema.run import RunConfig
from mrl.refit import RefitError
from mrl.refit.pull import check_coverage
from mrl.rollout.environment import engine_environment
from tests import models
from tests.stack.rollout.set_ranks import CASES, layouts, set_ranks

CAPABILITIES = ("8.0", "9.0", "10.0")
PUBLISHED = {
    "nemotron3_nano_30b_a3b": ("nemotron_h", {}),
    # Its layers are all alike.
    "qwen3_30b_a3b": ("qwen3_moe", {"num_hidden_layers": 2}),
}
"""Models of scripts/bench/models, by name: model type, and what is changed."""


TINY = (
    "nemotron_h, latent experts",
    "qwen2",
    "qwen3, tied",
    "qwen3_moe, a dense layer",
    "llama",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)


@dataclass(frozen=True)
class Row:
    """One model on GPUs of one capability, in one layout of the engine."""

    case: str
    capability: str
    tp: int
    ep: int
    fault: str
    """Fault that the preparation of a refit finds; empty where it goes through."""
    casts: list[str]
    """Log lines of a run about dtypes that differ from the trainer's, which are bfloat16."""
    expert_backends: list[str]


def become_cuda() -> Callable[[str], None]:
    """From here on vLLM takes this host for one with GPUs. Returns what sets their compute capability.

    Imported as on this host: modules of vLLM ask for compiled kernels when they are imported on CUDA. Replaced besides
    the platform: the kernels and streams that constructors look up, none of which runs here, and a line of the log that
    reads values.
    """
    os.environ.update(engine_environment(has_gpu=True))
    import vllm.v1.worker.gpu_model_runner  # noqa: F401
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.experts import flashinfer_cutlass_moe, trtllm_bf16_moe
    from vllm.model_executor.layers.fused_moe.runner import shared_experts
    from vllm.model_executor.models.registry import _LazyRegisteredModel
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    from mrl.rollout.cpu_vision import inspect_text_model, load_text_model

    # GPU hosts have torchvision.
    for name, wrap in (("load_model_cls", load_text_model), ("inspect_model_cls", inspect_text_model)):
        setattr(_LazyRegisteredModel, name, wrap(getattr(_LazyRegisteredModel, name)))
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms.cuda import CudaPlatformBase

    class Pretended(CudaPlatformBase):
        capability = DeviceCapability(9, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return cls.capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"a GPU of capability {cls.capability.as_version_str()}"

        @classmethod
        def current_device(cls) -> torch.device:
            """Device of a delta net's norm, which the device of the others does not reach."""
            return torch.device("meta")

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def get_mla_prefill_backend_cls(cls, mla_selector_config: object) -> type[MLAPrefillBackend]:
            return MLAPrefillBackendEnum.CPU.get_class()

    def set_capability(capability: str) -> None:
        Pretended.capability = DeviceCapability(*map(int, capability.split(".")))

    current_platform.__class__ = Pretended
    setattr(torch.ops._C, "relu_squared", None)  # noqa: B010  torch types attributes of namespaces as namespaces
    shared_experts.aux_stream = lambda: None
    # vLLM for CUDA brings FlashInfer, whose experts reorder weights.
    flashinfer_cutlass_moe.has_flashinfer_cutlass_fused_moe = lambda: True
    trtllm_bf16_moe.has_flashinfer_trtllm_fused_moe = lambda: True
    setattr(ExpertMapManager, "get_compressed_map_string", lambda self: "")  # noqa: B010  a method is no plain attribute for pyright
    return set_capability


def worker_models(folder: Path, parallel: VllmParallel, workers: Sequence[int]) -> list[nn.Module]:
    """Models that vLLM builds for these workers of an engine, with mrl's arguments."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mrl.rollout.engine_arguments import engine_arguments

    # Colocated engines sleep, by an allocator that CPU hosts lack.
    generation = GenerationConfig(
        max_new_tokens=16, vllm_cfg=vllm_config(parallel), colocated=ColocatedConfig(enabled=False)
    )
    config = engine_arguments(str(folder), generation, seed=0).create_engine_config()
    built = []
    for worker in workers:
        # It remembers the layers of one model.
        config.compilation_config.static_forward_context.clear()
        config.parallel_config.data_parallel_rank = worker // parallel.tp
        with (
            set_ranks(parallel, worker),
            set_current_vllm_config(config),
            set_default_torch_dtype(torch.bfloat16),
            torch.device("meta"),
        ):
            built.append(initialize_model(vllm_config=config))
    return built


def prepared(folder: Path, parallel: VllmParallel, built: Mapping[int, nn.Module]) -> tuple[Schedule, str]:
    """The schedule of a refit from one trainer rank, and the first built model that it does not fit, and why."""
    from mrl.rollout.worker import RefitWorker, engine_tensors, quantisers

    refit_workers = []
    for index in range(parallel.num_workers):
        refit_workers.append(RefitWorker())
        refit_workers[-1].get_model = lambda index=index: built.get(index, next(iter(built.values())))
        refit_workers[-1].get_draft_model = lambda: None
    engines = SimpleNamespace(
        serving=[0],
        num_engines=1,
        call=lambda verb, *given, **_: {0: [getattr(worker, verb.__name__)(*given) for worker in refit_workers]},
    )
    place = (MegatronParallel(), MegatronCoords(), "bfloat16", "te")
    policies = SimpleNamespace(call=lambda verb, deadline_s: {0: place})
    engine = EngineSlots(0, tuple(range(parallel.num_workers)))
    placement = SimpleNamespace(engines=(engine,), node_of=dict.fromkeys(engine.slots, 0))
    config = run_config(folder, parallel)
    inputs = refit_inputs(config, cast(Placement, placement), cast(PolicyGroup, policies), cast(EngineGroup, engines))
    schedule, fault = build_schedule(config, inputs), ""
    for index, model in built.items():
        tensors = engine_tensors(model)
        for quantiser in quantisers([model]):
            tensors = {slot: tensor for slot, tensor in tensors.items() if slot not in quantiser.made}
            tensors |= quantiser.loaded
        pulls = [pull for pulls in schedule.pulls(index) for pull in pulls]
        try:
            check_coverage(tensors, pulls, schedule.class_of(index).padding)
        except RefitError as error:
            fault = f"worker {index}: {error}"
    return schedule, fault


def row(case: str, capability: str, folder: Path, parallel: VllmParallel, workers: Sequence[int]) -> Row:
    """Prepares a refit of one engine from one trainer rank, as far as memory plays no part."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    built = dict(zip(workers, worker_models(folder, parallel, workers), strict=True))
    schedule, fault = prepared(folder, parallel, built)
    methods = [getattr(module, "quant_method", None) for module in built[0].modules()]
    backends = {method.unquantized_backend.name for method in methods if isinstance(method, UnquantizedFusedMoEMethod)}
    return Row(case, capability, parallel.tp, parallel.ep, fault, schedule.casts(), sorted(backends))


@cache
def tiny_run() -> RunConfig:
    """Any run's configuration."""
    return load_config("grpo_tiny.yaml", ["policy.model_name=of/each/case"])


def run_config(folder: Path, parallel: VllmParallel) -> RunConfig:
    """Inputs that `build_schedule` reads."""
    run = tiny_run()
    generation = replace(run.policy.generation, vllm_cfg=vllm_config(parallel))
    return replace(run, policy=replace(run.policy, model_name=str(folder), generation=generation))


def vllm_config(parallel: VllmParallel) -> VllmConfig:
    """Config of a bfloat16 engine."""
    return VllmConfig(
        precision="bfloat16",
        max_model_len=256,
        enforce_eager=True,
        tensor_parallel_size=parallel.tp,
        expert_parallel_size=parallel.ep,
    )


def published(folder: Path, name: str, changed: dict[str, object]) -> Path:
    """A folder with a published config.json."""
    folder.mkdir()
    config = json.loads((Path(__file__).parents[2] / "scripts/bench/models" / f"{name}.config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def rows(folder: Path) -> Iterator[Row]:
    """All cases, of each layout the first and the last worker: what those between hold is shaped alike."""
    set_capability = become_cuda()
    cases = {
        name: (published(folder / name, name, changed), model_type) for name, (model_type, changed) in PUBLISHED.items()
    }
    for index, name in enumerate(TINY):
        model_type, sizes = CASES[name]
        cases[name] = models.save_model(folder / str(index), model_type, 0, **sizes), model_type
    for capability in CAPABILITIES:
        set_capability(capability)
        for name, (model_folder, model_type) in cases.items():
            for parallel in layouts(model_type):
                yield row(name, capability, model_folder, parallel, sorted({0, parallel.num_workers - 1}))


if __name__ == "__main__":
    for found in rows(Path(sys.argv[1])):
        print(json.dumps(asdict(found)), flush=True)
