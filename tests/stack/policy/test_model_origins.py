# SPDX-License-Identifier: Apache-2.0
"""The model that trains is megatron-core's, and what a host without CUDA replaces is known."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import models
from tests.stack.policy import layout_ranks, policy_ranks
from tests.stack.ranks import RankPool

OF_0_16 = {"MambaModel": "megatron.core.models.mamba", "MambaStack": "megatron.core.ssm"}
LATER = dict.fromkeys(("HybridModel", "HybridStack"), "megatron.core.models.hybrid")
HYBRID_CLASSES = OF_0_16 if version("megatron-core").startswith("0.16.") else LATER
MEGATRON_CLASSES = HYBRID_CLASSES | {
    "DistributedDataParallel": "megatron.core.distributed",
    "MambaLayer": "megatron.core.ssm",
    "MambaMixer": "megatron.core.ssm",
    "SelfAttention": "megatron.core.transformer",
    "MoELayer": "megatron.core.transformer.moe",
    "SequentialMLP": "megatron.core.transformer.moe",
    "ColumnParallelLinear": "megatron.core.tensor_parallel",
    "RowParallelLinear": "megatron.core.tensor_parallel",
    "ChainedOptimizer": "megatron.core.optimizer",
    "DistributedOptimizer": "megatron.core.optimizer",
    "OptimizerParamScheduler": "megatron.core.optimizer_param_scheduler",
}
TRANSFORMER_CLASSES = {
    "GPTModel": "megatron.core.models.gpt",
    "RotaryEmbedding": "megatron.core.models.common",
    "TransformerBlock": "megatron.core.transformer",
    "TransformerLayer": "megatron.core.transformer",
} | {name: package for name, package in MEGATRON_CLASSES.items() if not name.startswith(("Mamba", "Hybrid"))}
SCHEDULES = {"dp2": "forward_backward_no_pipelining", "pp2 dp2 ep2": "forward_backward_pipelining_without_interleaving"}
# Layers that Megatron takes through its specs, of which the router is a subclass of Megatron's, the norm whose base
# class it lacks without mamba_ssm, and the kernel for Apex's FusedAdam.
OURS = {"PackedCoreAttention", "PackedRouter", "ExtendedRMSNorm", "CpuFusedAdam"}


@pytest.mark.parametrize("layout", SCHEDULES)
def test_the_classes_are_those_of_megatron(ranks: RankPool, tmp_path: Path, layout: str):
    folder = models.save_nemotron_h(tmp_path)
    config = policy_ranks.run_config(folder, layout)
    origins, replaced = ranks.run(policy_ranks.class_origins, config, world_size=policy_ranks.world_size(layout))[0]
    assert origins[SCHEDULES[layout]] == "megatron.core.pipeline_parallel.schedules"
    for name, package in MEGATRON_CLASSES.items():
        assert origins[name].startswith(package), (name, origins[name])
    assert {name for name, module in origins.items() if module.startswith("mrl.")} == OURS
    for name, reason in sorted(replaced.items()):
        print(f"replaced: {name}: {reason}")
    assert not [name for name in replaced if not name.startswith(("torch.", "megatron.core."))]


def test_the_classes_of_transformers_are_those_of_megatron(ranks: RankPool, tmp_path: Path):
    folder, layout = models.save_model(tmp_path, "qwen3_moe"), "tp2 sp pp2 ep2"
    config = policy_ranks.run_config(folder, layout)
    origins, _ = ranks.run(policy_ranks.class_origins, config, world_size=policy_ranks.world_size(layout))[0]
    for name, package in TRANSFORMER_CLASSES.items():
        assert origins[name].startswith(package), (name, origins[name])
    assert {name for name, module in origins.items() if module.startswith("mrl.")} == OURS - {"ExtendedRMSNorm"}


def test_transformers_still_works_in_the_process(ranks: RankPool, tmp_path: Path):
    model = models.nemotron_h()
    model.save_pretrained(tmp_path)
    sequence = list(range(40))
    (logits,) = ranks.run(layout_ranks.transformers_beside_megatron, tmp_path, sequence, world_size=1)
    with torch.no_grad():
        expected = model(torch.tensor([sequence])).logits[0].numpy()
    assert np.array_equal(logits, expected)
