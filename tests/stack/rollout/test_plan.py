# SPDX-License-Identifier: Apache-2.0
"""The plan's cache layout is the one that vLLM chooses, on this host and for sizes that it does not have."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.config.load import load_config
from mrl.plan.engine import cache_layout
from mrl.plan.facts import PlanModel, read_model
from mrl.plan.hardware import GPUS
from mrl.plan.memory import engine_memory
from tests import models
from tests.rollouts import MAX_MODEL_LEN, StartEngine
from tests.sources import ROOT

CACHE_MIB = 64
# Tokens of a block of vLLM's cache on a host without GPUs.
CPU_BLOCK = 128
MTP = {"method": "mtp", "num_speculative_tokens": 5}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FORESEEING = {"num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    ("name", "changes", "speculation", "shares_prefixes"),
    [
        ("nemotron_h", {}, None, False),
        ("nemotron_h", {}, None, True),
        # More Mamba layers than one group of them, and larger states than a block of keys and values.
        ("nemotron_h", dict(hybrid_override_pattern="MEM*MEMM", num_hidden_layers=8, ssm_state_size=128), None, False),
        ("nemotron_h", dict(hybrid_override_pattern="MEM*MEMM", num_hidden_layers=8, ssm_state_size=128), NGRAM, True),
        ("nemotron_h", FORESEEING, MTP, False),
        ("nemotron_h", FORESEEING, MTP, True),
        ("nemotron_h", FORESEEING | dict(hybrid_override_pattern="-*-*", num_hidden_layers=4), MTP, False),
        ("qwen3", {}, None, False),
        ("qwen3", {}, NGRAM, False),
        ("llama", dict(num_key_value_heads=4), None, False),
        ("qwen3_next", {}, None, False),
        ("qwen3_5_text", {}, None, False),
        ("qwen3_next", dict(layer_types=["linear_attention"] * 3 + ["full_attention"]), None, True),
    ],
)
def test_blocks_and_states_are_those_of_the_engine(
    start_engine: StartEngine,
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    speculation: dict[str, Any] | None,
    shares_prefixes: bool,
):
    folder = models.save_model(tmp_path, name, **changes)
    engine = start_engine(
        folder,
        kv_cache_memory_mib=CACHE_MIB,
        speculation=speculation,
        enable_prefix_caching=shares_prefixes,
        max_num_seqs=8,
    )
    config = engine.llm.vllm_config
    model, given = PlanModel(json.loads((folder / "config.json").read_text())), speculation or {}
    found = cache_layout(
        model.shape,
        1,
        element_bytes=4,
        ssm_bytes=4,
        shares_prefixes=shares_prefixes,
        kernel_block=CPU_BLOCK,
        num_proposed=given.get("num_speculative_tokens", 0),
        drafter=model.mtp_pattern if given.get("method") == "mtp" else "",
    )
    assert found.block_tokens == config.cache_config.block_size
    assert CACHE_MIB * 2**20 // found.block_bytes == config.cache_config.num_gpu_blocks
    assert found.concurrency(CACHE_MIB * 2**20, MAX_MODEL_LEN) == pytest.approx(
        config.cache_config.kv_cache_max_concurrency
    )


@pytest.mark.parametrize("num_proposed", [0, 1, 5])
@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_a_large_model_that_speculates_is_grouped_as_vllm_does(
    tmp_path: Path, num_proposed: int, shares_prefixes: bool
):
    """Sizes of Nemotron 3.5 Lightning, whose drafter is one attention and one expert layer, in four-worker engines."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.v1.core.kv_cache_utils import (
        _get_kv_cache_groups_uniform_page_size,
        get_max_concurrency_for_kv_cache_config,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec

    hf_config = json.loads((ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json").read_text())
    hf_config |= FORESEEING | {"mtp_hybrid_override_pattern": "*E"}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    words = [
        f"policy.model_name={tmp_path}",
        f"policy.generation.vllm_cfg.enable_prefix_caching={str(shares_prefixes).lower()}",
    ]
    if num_proposed:
        words += [
            (
                f"++policy.generation.vllm_kwargs.speculative_config={{method: mtp, num_speculative_tokens: "
                f"{num_proposed}}}"
            )
        ]
    run = load_config("grpo_nanov3.yaml", words)
    planned, length = engine_memory(run, read_model(run), GPUS["h100-80g"]), run.policy.max_total_sequence_length

    state = MambaStateShapeCalculator.mamba2_state_shape(
        tp_world_size=4,
        intermediate_size=64 * 64,
        n_groups=8,
        num_heads=64,
        head_dim=64,
        state_size=128,
        conv_kernel=4,
        num_spec=num_proposed,
    )
    dtypes = (torch.bfloat16, torch.float32)
    token = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=128, dtype=torch.bfloat16).page_size_bytes
    page = MambaSpec(shapes=state, dtypes=dtypes, block_size=-1).page_size_bytes
    block = 16 * -(-page // (16 * token))
    attention = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    mamba = MambaSpec(
        shapes=state,
        dtypes=dtypes,
        block_size=block if shares_prefixes else length,
        page_size_padded=block * token,
        mamba_cache_mode="align" if shares_prefixes else "none",
        num_speculative_blocks=num_proposed,
        # As `MambaMixer2.get_kv_cache_spec` says of each layer.
        num_prefill_checkpoint_blocks=1,
    )
    kinds: dict[str, KVCacheSpec] = {"M": mamba, "*": attention}
    letters = hf_config["hybrid_override_pattern"] + ("*E" if num_proposed else "")
    groups = _get_kv_cache_groups_uniform_page_size(
        {f"{place}": kinds[letter] for place, letter in enumerate(letters) if letter in kinds}
    )
    block_bytes = max(len(group.layer_names) for group in groups) * block * token
    vllm_config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode=mamba.mamba_cache_mode),
        model_config=SimpleNamespace(max_model_len=length),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    num_blocks = int(planned.cache // block_bytes)
    wanted = get_max_concurrency_for_kv_cache_config(vllm_config, KVCacheConfig(num_blocks, [], groups))
    assert (planned.layout.block_tokens, planned.layout.block_bytes) == (block, block_bytes)
    assert planned.layout.state_groups == sum(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
    assert planned.concurrency(length) == pytest.approx(wanted)
