# SPDX-License-Identifier: Apache-2.0
"""The prompts by which trainer and engine are compared at the start."""

from __future__ import annotations

from mrl.cluster.agreement import MAX_NEW_TOKENS, compared_precision, long_prompt, requests
from mrl.config.load import load_config
from mrl.types import Prompt


def test_one_prompt_is_as_long_as_the_run_allows_and_repeats_no_text_before_it_must():
    config = load_config("grpo_tiny.yaml", [])
    prompts = [Prompt(str(index), tuple(range(100 * index, 100 * index + 100)), "", "", "math") for index in range(5)]
    found = long_prompt(config, prompts, MAX_NEW_TOKENS)
    assert len(found.token_ids) == config.policy.max_total_sequence_length - MAX_NEW_TOKENS == 1264
    assert found.token_ids[:500] == tuple(range(500)) and found.token_ids[500:1000] == tuple(range(500))
    asked = requests(config, [*prompts, found], MAX_NEW_TOKENS)
    assert len({request.request_id for request in asked}) == 6


def test_the_coarser_precision_of_trainer_and_engine_limits_how_well_they_agree():
    both = ("policy.precision", "policy.generation.vllm_cfg.precision")
    for precisions in (("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
        config = load_config("grpo_tiny.yaml", [f"{key}={value}" for key, value in zip(both, precisions, strict=True)])
        assert compared_precision(config) == "bfloat16"
    assert compared_precision(load_config("grpo_tiny.yaml", [])) == "float32"
    for rounded in (f"{both[1]}=fp8", "policy.megatron_cfg.fp8_cfg.enabled=true"):
        assert compared_precision(load_config("grpo_tiny.yaml", ["policy.precision=bfloat16", rounded])) == "fp8"
