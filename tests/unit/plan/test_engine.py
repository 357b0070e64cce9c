# SPDX-License-Identifier: Apache-2.0
"""Speculating engines' memory besides their cache. tests/stack/rollout/test_plan.py compares the cache with vLLM's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.schema.generation import EngineLimits
from mrl.plan.engine import CacheLayout, forward_bytes
from mrl.plan.facts import PlanModel, read_model
from mrl.plan.hardware import GPUS
from mrl.plan.memory import EngineMemory, describe_limits, engine_memory, rank_memory, with_limits
from mrl.plan.times import decode_seconds
from tests.sources import ROOT

H100 = GPUS["h100-80g"]
NANO = json.loads((ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json").read_text())


def engine_of(folder: Path, speculation: str | None, **changes: object) -> tuple[EngineMemory, float]:
    """The engine of the packaged run, and its activations while a rank samples."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NANO | changes))
    words = [f"policy.model_name={folder}"]
    words += [f"++policy.generation.vllm_kwargs.speculative_config={{{speculation}}}"] if speculation else []
    config = load_config("grpo_nanov3.yaml", words)
    engine = engine_memory(config, model := read_model(config), H100)
    return engine, rank_memory(config, model, 0, engine).phases["generate"]["engine activations"]


def test_proposed_tokens_have_logits(tmp_path: Path):
    plain, sampling = engine_of(tmp_path / "plain", None)
    assert sampling == plain.activations and plain.unmeasured == 0
    # Of 128 sequences, three float32 copies of a row of 131,072 logits: vLLM measures two rows of each, and six are
    # checked.
    rows = 3 * 4 * 128 * 131072
    speculating, sampling = engine_of(tmp_path / "ngram", "method: ngram, num_speculative_tokens: 5")
    assert speculating.activations - plain.activations == pytest.approx(rows)
    assert sampling - plain.activations == pytest.approx(5 * rows)
    assert plain.cache - speculating.cache == pytest.approx(rows)


@pytest.mark.parametrize(
    ("gpu", "words", "limits"),
    [
        # 64 engines share 2,048 rollouts, and all rows of a validation whose number the config does not say.
        ("h100-80g", [], (128, 16384)),
        (
            "h100-80g",
            ["grpo.num_prompts_per_step=512", "policy.generation.vllm_cfg.expose_http_server=true"],
            (512, 16384),
        ),
        ("h100-80g", ["grpo.num_prompts_per_step=4096"], (528, 16384)),
        ("h100-80g", ["policy.generation.vllm_cfg.max_num_seqs=700"], (700, 16384)),
        ("h100-80g", ["policy.generation.vllm_cfg.max_num_batched_tokens=100"], (100, 100)),
        ("h100-80g", ["grpo.max_val_samples=64"], (32, 16384)),
        ("a100-40g", [], (41, 16384)),
        ("a100-40g", ["policy.generation.vllm_cfg.gpu_memory_utilization=0.44"], (7, 4096)),
    ],
)
def test_limits_are_what_rollouts_need_and_the_cache_holds(
    tmp_path: Path, gpu: str, words: list[str], limits: tuple[int, int]
):
    (tmp_path / "config.json").write_text(json.dumps(NANO))
    config = load_config("grpo_nanov3.yaml", [f"policy.model_name={tmp_path}", *words])
    engine = engine_memory(config, read_model(config), GPUS[gpu])
    assert (engine.limits.num_seqs, engine.limits.num_tokens) == limits
    vllm = with_limits(config, GPUS[gpu]).policy.generation.vllm_cfg
    assert (vllm.max_num_seqs, vllm.max_num_batched_tokens) == limits
    if limits[0] < config.engine_limits.num_seqs:
        # A sequence more would find no block for its first tokens.
        assert engine.concurrency(1) >= limits[0] > engine.concurrency(1) - 1
    assert (
        describe_limits(config, GPUS[gpu])
        == f"up to {limits[0]} rollouts at once in steps of up to {limits[1]:,} tokens"
    )


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        ([], (512, 4096)),
        (["policy.generation.num_cpu_engines=2"], (256, 4096)),
        (["grpo.num_prompts_per_step=1", "grpo.max_val_samples=1"], (16, 4096)),
        (["grpo.num_prompts_per_step=1", "grpo.max_val_samples=null"], (128, 4096)),
        (["grpo.val_num_generations_per_prompt=8"], (1024, 4096)),
        (["grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=2", "grpo.max_val_samples=1"], (2, 2560)),
        (["grpo.async_grpo.enabled=true"], (1024, 4096)),
    ],
)
def test_hosts_without_gpus_take_what_their_rollouts_need(words: list[str], limits: tuple[int, int]):
    given = [] if "grpo.async_grpo.enabled=true" not in words else ["policy.generation.colocated.enabled=false"]
    vllm = with_limits(load_config("grpo_tiny.yaml", [*words, *given]), None).policy.generation.vllm_cfg
    assert (vllm.max_num_seqs, vllm.max_num_batched_tokens) == limits


def test_states_have_the_type_of_the_model_where_the_run_names_none(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(NANO | {"mamba_ssm_cache_dtype": "bfloat16"}))
    words = [f"policy.model_name={tmp_path}", "~policy.generation.vllm_kwargs.mamba_ssm_cache_dtype"]
    given, own = (load_config("grpo_nanov3.yaml", words[:count]) for count in (1, 2))
    blocks = [engine_memory(config, read_model(config), H100).layout.block_tokens for config in (given, own)]
    # 16 heads of 64 x 128 in float32 or bfloat16, and 3 x 1536 inputs of the convolution: 533,504 or 271,360 bytes, in
    # 16 tokens of 512.
    assert blocks == [1056, 544]


def decode(states: int = 1, num_nodes: int = 1) -> float:
    """Seconds of 1,000 steps of 64 rollouts on an engine of 4 workers."""
    engine = EngineMemory(
        1e9, 0.0, 0.0, 0.0, 1e10, CacheLayout(1056, 3_244_032, 1, 4, states), EngineLimits(128, 4096), 0.5
    )
    sizes = dict(rollouts=64, at_once=64, mean=1000, longest=1000, num_nodes=num_nodes)
    return decode_seconds(PlanModel(NANO).shape, H100, engine, tp=4, **sizes).low


def test_a_decode_step_reads_and_writes_one_state_whatever_is_kept():
    assert decode(1) == decode(9)


def test_the_tail_is_priced_by_its_own_batch(tmp_path: Path):
    engine = EngineMemory(
        15e9, 0.0, 0.0, 0.0, 1e10, CacheLayout(1056, 3_244_032, 1, 4, 1), EngineLimits(128, 4096), 0.5
    )
    shape = PlanModel(NANO).shape

    def decoded(rollouts: int, at_once: int, mean: float, longest: float) -> float:
        return decode_seconds(
            shape, H100, engine, tp=4, rollouts=rollouts, at_once=at_once, mean=mean, longest=longest
        ).low

    # One after another there is no tail; rollouts of one length end together.
    assert decoded(10, 1, 100, 1000) == pytest.approx(10 * decoded(1, 1, 100, 100))
    assert decoded(64, 64, 1000, 1000) == pytest.approx(2 * decoded(64, 64, 500, 500), rel=0.1)
    # A rollout of 8,000 tokens among others of 1,000: more than those, and less than 8,000 steps of the full batch.
    assert decoded(64, 64, 1000, 1000) < decoded(64, 64, 1000, 8000) < 0.8 * decoded(64, 64, 8000, 8000)
    assert decoded(64, 64, 1000, 8000) > decoded(1, 1, 8000, 8000)


def test_stages_share_weights_and_cache_and_wait_for_each_other(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(NANO))
    words = [f"policy.model_name={tmp_path}", "policy.generation.vllm_cfg.tensor_parallel_size=1"]
    configs = [
        load_config("grpo_nanov3.yaml", [*words, f"policy.generation.vllm_cfg.pipeline_parallel_size={pp}"])
        for pp in (1, 2)
    ]
    whole, stage = (engine_memory(config, read_model(config), H100) for config in configs)
    # vLLM builds embedding and output, of 131,072 x 2,688 in bfloat16 each, on both stages.
    ends = 2 * 131072 * 2688 * 2
    assert stage.weights - ends == pytest.approx((whole.weights - ends) / 2, rel=0.05)
    assert (stage.layout.block_bytes, stage.layout.block_tokens) == (
        whole.layout.block_bytes / 2,
        whole.layout.block_tokens,
    )
    shape, sizes = PlanModel(NANO).shape, dict(rollouts=64, at_once=64, mean=1000, longest=1000)
    staged, alone = (
        decode_seconds(shape, H100, engine, tp=1, pp=pp, **sizes) for engine, pp in ((stage, 2), (whole, 1))
    )
    # Stages in turn take as long as one GPU, and read the ends twice; on halves of the batch both read their weights
    # twice.
    assert alone.high < staged.high < 1.1 * alone.high
    assert alone.low / 2 < staged.low < staged.high


def test_groups_share_experts_and_reach_those_of_all(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(NANO))
    words = [
        f"policy.model_name={tmp_path}",
        "policy.generation.vllm_cfg.tensor_parallel_size=1",
        "grpo.max_val_samples=1",
    ]
    sizes = [[], ["policy.generation.vllm_cfg.expert_parallel_size=8"]]
    whole, groups = (load_config("grpo_nanov3.yaml", [*words, *more]) for more in sizes)
    assert (groups.num_engines, groups.policy.generation.vllm_cfg.num_groups) == (whole.num_engines // 8, 8)
    assert groups.engine_limits == whole.engine_limits
    alone, one = (engine_memory(config, read_model(config), H100) for config in (whole, groups))
    # 23 layers of 128 experts, each of two matrices of 1,856 x 2,688 in bfloat16.
    assert alone.weights - one.weights == pytest.approx(7 / 8 * 23 * 128 * 2 * 1856 * 2688 * 2)
    shape, rest = PlanModel(NANO).shape, dict(rollouts=8, at_once=8, mean=1000, longest=1000)
    # What the tokens of all eight bring to the experts and take from there, and two buffers for their six experts each,
    # in bfloat16.
    of_one, of_all = (forward_bytes(shape, 1, batched_tokens=100, ep=size, num_groups=size) for size in (1, 8))
    assert of_all - of_one == 100 * 2688 * 2 * (8 * 2 + (8 - 1) * 6 * 2)
    alone_s, together_s = (decode_seconds(shape, H100, one, tp=1, num_groups=size, **rest).low for size in (1, 8))
    # The tokens of all groups leave fewer of a worker's experts idle.
    assert alone_s < together_s


def test_an_engine_over_nodes_sums_over_the_network():
    # Of each of 52 layers twice: 64 tokens of 2,688 bfloat16 go and come at 0.97 of 50 GB/s, after 20 us.
    assert decode(num_nodes=2) - decode() == pytest.approx(1000 * 104 * (2 * 64 * 2688 * 2 / (0.97 * 50e9) + 20e-6))
