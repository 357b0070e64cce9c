"""The model that trains is megatron-core's, and what a host without CUDA replaces is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests import models
from tests.stack.policy import layout_ranks
from tests.stack.ranks import RankPool

MEGATRON_CLASSES = {
    "DistributedDataParallel": "megatron.core.distributed",
    "MambaModel": "megatron.core.models.mamba",
    "MambaStack": "megatron.core.ssm",
    "MambaLayer": "megatron.core.ssm",
    "MambaMixer": "megatron.core.ssm",
    "SelfAttention": "megatron.core.transformer",
    "MoELayer": "megatron.core.transformer.moe",
    "TopKRouter": "megatron.core.transformer.moe",
    "SequentialMLP": "megatron.core.transformer.moe",
    "ColumnParallelLinear": "megatron.core.tensor_parallel",
    "RowParallelLinear": "megatron.core.tensor_parallel",
    "ChainedOptimizer": "megatron.core.optimizer",
    "schedule": "megatron.core.pipeline_parallel",
}
OURS = {"PackedCoreAttention", "ExtendedRMSNorm"}


@pytest.mark.parametrize("megatron", [{}, {"pipeline_model_parallel_size": 2}], ids=["pp1", "pp2"])
def test_the_classes_are_those_of_megatron(ranks: RankPool, tmp_path: Path, megatron: dict):
    folder = models.save_nemotron_h(tmp_path, hybrid_override_pattern="MEM*EME*", num_hidden_layers=8)
    world_size = megatron.get("pipeline_model_parallel_size", 1)
    origins, replaced = ranks.run(layout_ranks.class_origins, layout_ranks.policy_config(**megatron), folder, world_size=world_size)[0]
    for name, package in MEGATRON_CLASSES.items():
        assert origins[name].startswith(package), (name, origins[name])
    assert {name for name, module in origins.items() if module.startswith("mrl.")} == OURS
    for name, reason in sorted(replaced.items()):
        print(f"{name}: {reason}")
    assert not [name for name in replaced if not name.startswith(("torch.", "megatron.core."))]


def test_transformers_still_works_in_the_process(ranks: RankPool, tmp_path: Path):
    model = models.nemotron_h()
    model.save_pretrained(tmp_path)
    sequence = list(range(40))
    (logits,) = ranks.run(layout_ranks.transformers_beside_megatron, tmp_path, sequence, world_size=1)
    with torch.no_grad():
        expected = model(torch.tensor([sequence])).logits[0].numpy()
    assert np.array_equal(logits, expected)
