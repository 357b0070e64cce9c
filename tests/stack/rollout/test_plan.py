# SPDX-License-Identifier: Apache-2.0
"""The plan's cache layout is the one that vLLM chooses on this host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.plan.engine import cache_layout
from mrl.plan.inputs import Model
from tests import models
from tests.rollouts import StartEngine

CACHE_MIB = 64
# Tokens of a block of vLLM's cache on a host without GPUs.
CPU_BLOCK = 128


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nemotron_h", {}),
        # More Mamba layers than one group of them, and larger states than a block of keys and values.
        ("nemotron_h", dict(hybrid_override_pattern="MEM*MEMM", num_hidden_layers=8, ssm_state_size=128)),
        ("qwen3", {}),
        ("llama", dict(num_key_value_heads=4)),
    ],
)
def test_blocks_and_states_are_those_of_the_engine(start_engine: StartEngine, tmp_path: Path, name: str, changes: dict[str, Any]):
    folder = models.save_model(tmp_path, name, **changes)
    engine = start_engine(folder, kv_cache_memory_mib=CACHE_MIB)
    config = engine.llm.vllm_config
    shape = Model(json.loads((folder / "config.json").read_text())).shape
    found = cache_layout(shape, 1, element_bytes=4, ssm_bytes=4, shares_prefixes=False, kernel_block=CPU_BLOCK)
    assert found.block_tokens == config.cache_config.block_size
    assert CACHE_MIB * 2**20 // found.block_bytes == config.cache_config.num_gpu_blocks
