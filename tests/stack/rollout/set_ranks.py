# SPDX-License-Identifier: Apache-2.0
"""vLLM's own model and loader for one worker of an engine that does not exist: only rank and group sizes are set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conversion.boxes import Slot
from conversion.families.common import VllmParallel
from mrl.config.fields import EnginePrecision
from mrl.config.schema.generation import GenerationConfig, VllmConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig as VllmEngineConfig

# Groups that have one member in every engine of ours.
SINGLE_GROUPS = ("_PCP", "_DCP")

# Eight workers can cut these heads and groups. Two key heads, so that workers share one; ten experts, which eight do
# not divide.
HEADS: dict[str, object] = dict(num_attention_heads=8, num_key_value_heads=2)
HYBRID = HEADS | dict(hybrid_override_pattern="ME*-", num_hidden_layers=4, n_groups=8)
LATENT: dict[str, object] = dict(num_attention_heads=8, num_key_value_heads=8)
TWO_LAYERS = HEADS | dict(num_hidden_layers=2)
DELTA_NETS: dict[str, object] = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=8, linear_num_value_heads=16
)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "nemotron_h": ("nemotron_h", HYBRID | dict(n_routed_experts=10)),
    "nemotron_h, one group, as many key heads": ("nemotron_h", HYBRID | dict(n_groups=1, num_key_value_heads=8)),
    "nemotron_h, latent experts": ("nemotron_h", HYBRID | dict(moe_latent_size=32)),
    "qwen2": ("qwen2", TWO_LAYERS | dict(hidden_size=256)),
    "qwen2, tied": ("qwen2", TWO_LAYERS | dict(hidden_size=256, tie_word_embeddings=True)),
    "qwen3": ("qwen3", TWO_LAYERS | dict(tie_word_embeddings=False)),
    "qwen3, tied": ("qwen3", TWO_LAYERS | dict(tie_word_embeddings=True)),
    "qwen3_moe": ("qwen3_moe", TWO_LAYERS | dict(num_experts=10)),
    "qwen3_moe, a dense layer": ("qwen3_moe", TWO_LAYERS | dict(num_key_value_heads=1, mlp_only_layers=[0])),
    "llama": ("llama", TWO_LAYERS),
    "mixtral": ("mixtral", TWO_LAYERS | dict(num_local_experts=10)),
    "qwen2_moe": ("qwen2_moe", TWO_LAYERS | dict(hidden_size=256, num_experts=10, mlp_only_layers=[])),
    "glm4_moe": ("glm4_moe", TWO_LAYERS | dict(n_routed_experts=10)),
    "gpt_oss": ("gpt_oss", LATENT | dict(num_hidden_layers=2, num_local_experts=16)),
    "deepseek_v3": ("deepseek_v3", LATENT | dict(num_hidden_layers=2)),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", TWO_LAYERS | DELTA_NETS | dict(num_experts=10)),
    "qwen3_5_text": ("qwen3_5_text", TWO_LAYERS | DELTA_NETS),
    "qwen3_5_text, tied": ("qwen3_5_text", TWO_LAYERS | DELTA_NETS | dict(tie_word_embeddings=True)),
    "qwen3_next": ("qwen3_next", TWO_LAYERS | DELTA_NETS | dict(num_experts=10)),
    "deepseek_v3, queries of full rank": ("deepseek_v3", LATENT | dict(num_hidden_layers=2, q_lora_rank=None)),
}
# Three stages do not divide them; vLLM wants an attention or Mamba layer on each, and experts if the model has some.
MORE_LAYERS: dict[str, dict[str, object]] = {
    "nemotron_h": dict(hybrid_override_pattern="ME*-ME*E", num_hidden_layers=8),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        dict(layer_types=["linear_attention", "full_attention"] * 2, num_hidden_layers=4),
    ),
}
WITH_EXPERTS = (
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "nemotron_h",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)


def layouts(model_type: str) -> list[VllmParallel]:
    """Layouts of an engine of up to eight workers, cut by tensors and, where a family has them, by experts."""
    experts = [
        VllmParallel(tp=tp, ep=ep) for tp, ep in ((2, 2), (4, 4), (8, 8), (1, 2), (2, 4)) if model_type in WITH_EXPERTS
    ]
    return [VllmParallel(tp=size) for size in (1, 2, 4, 8)] + experts


def staged_layouts(model_type: str) -> list[VllmParallel]:
    """Layouts with pipeline stages: three that do not divide the layers, and two that are cut."""
    return [VllmParallel(pp=3), VllmParallel(tp=2, ep=2 if model_type in WITH_EXPERTS else 1, pp=2)]


def load(
    folder: Path,
    parallel: VllmParallel,
    worker: int,
    *,
    precision: EnginePrecision = "float32",
    quantization: str | None = None,
) -> dict[Slot, Tensor]:
    """Parameters and persistent buffers after vLLM's class was built for this worker and its loader read a checkpoint.

    Every element is NaN before the loader comes, so that what it leaves out differs from any table. `quantization` is
    the form of FP8 weights.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from mrl.rollout.worker import engine_tensors

    kwargs: dict[str, object] = {} if quantization is None else {"quantization": quantization}
    config = _engine_config(folder, parallel, worker, precision, kwargs)
    loader, device = get_model_loader(config.load_config), torch.device("cpu")
    with (
        set_ranks(parallel, worker),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        device,
    ):
        model = initialize_model(vllm_config=config)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        loader.load_weights(model, config.model_config)
        if quantization is not None:
            finalize_layerwise_processing(model, config.model_config)
        process_weights_after_loading(model, config.model_config, device)
    return engine_tensors(model)


def fp8_model(folder: Path, parallel: VllmParallel, worker: int) -> nn.Module:
    """The model of an engine in FP8 of a folder without weights, quantised by vLLM, on the meta device."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _engine_config(folder, parallel, worker, "fp8", {})
    with (
        pytest.MonkeyPatch.context() as patch,
        set_ranks(parallel, worker),
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
    ):
        # A line of the log, which reads values.
        patch.setattr(ExpertMapManager, "get_compressed_map_string", lambda self: "")
        model = initialize_model(vllm_config=config)
        finalize_layerwise_processing(model, config.model_config)
    return model


def _engine_config(
    folder: Path, parallel: VllmParallel, worker: int, precision: EnginePrecision, kwargs: dict[str, object]
) -> VllmEngineConfig:
    from vllm.model_executor.models import utils

    from mrl.rollout.engine_arguments import engine_arguments

    # Layers of other stages by a model's id(), which a later model in this process may have again.
    utils._model_to_pp_missing_layer_names.clear()
    vllm_cfg = VllmConfig(
        precision=precision,
        max_model_len=256,
        enforce_eager=True,
        tensor_parallel_size=parallel.tp,
        pipeline_parallel_size=parallel.pp,
        expert_parallel_size=parallel.ep,
    )
    generation = GenerationConfig(max_new_tokens=16, vllm_cfg=vllm_cfg, vllm_kwargs=kwargs)
    config = engine_arguments(str(folder), generation, seed=0).create_engine_config()
    config.parallel_config.data_parallel_rank = worker // parallel.tp if parallel.num_groups > 1 else 0
    return config


def differences(live: dict[Slot, Tensor], expected: dict[Slot, Tensor]) -> list[str]:
    """Slots that only one side has, or whose shape, dtype or bytes differ."""
    found = [f"{slot}: only in {'the table' if slot in expected else 'vLLM'}" for slot in live.keys() ^ expected.keys()]
    for slot in live.keys() & expected.keys():
        ours, theirs = expected[slot], live[slot].detach()
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            found.append(
                f"{slot}: {tuple(ours.shape)} {ours.dtype} in the table, {tuple(theirs.shape)} {theirs.dtype} in vLLM"
            )
        elif not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            found.append(f"{slot}: other bytes")
    return sorted(found)


@contextmanager
def set_ranks(parallel: VllmParallel, worker: int) -> Iterator[None]:
    """vLLM takes this process for one worker of an engine, inside the `with` block."""
    from vllm.distributed import parallel_state

    size, part = parallel.tp, worker // parallel.tp
    groups = {
        "_TP": (worker % size, size),
        "_ETP": (worker % size, size),
        "_EP": (worker % (size * parallel.num_groups), size * parallel.num_groups),
        "_DP": (part if parallel.num_groups > 1 else 0, parallel.num_groups),
        "_PP": (part if parallel.pp > 1 else 0, parallel.pp),
        "_WORLD": (worker, parallel.num_workers),
        **dict.fromkeys(SINGLE_GROUPS, (0, 1)),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, place in groups.items():
            patch.setattr(parallel_state, name, _group(*place))
        # Layers with experts of several groups ask it for its size only.
        patch.setattr(
            parallel_state._EP,
            "device_communicator",
            SimpleNamespace(all2all_manager=SimpleNamespace(world_size=groups["_EP"][1])),
        )
        yield


def _group(rank: int, size: int) -> object:
    from vllm.distributed.parallel_state import GroupCoordinator

    # Without its constructor, which waits for the other members.
    group = object.__new__(GroupCoordinator)
    group.rank = group.rank_in_group = group.local_rank = rank
    group.ranks, group.world_size = list(range(size)), size
    group.device_group = group.cpu_group = dist.ProcessGroup(dist.HashStore(), rank, size)
    group.device_communicator = None
    return group
