# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from mrl.config.passthrough import (
    FIXED_ENGINE_ARGUMENTS,
    KEYS_OF_ENGINE_ARGUMENTS,
    OVERRIDABLE,
    RESERVED_VARIABLES,
    arguments_of,
)
from mrl.config.schema.run import KEYS
from mrl.rollout.environment import engine_environment
from tests.unit.config.problems import problems_of

ENGINE = "policy.generation.vllm_kwargs"
MODEL = "policy.megatron_cfg.model_overrides"
VARIABLES = "policy.megatron_cfg.env_vars"


@pytest.mark.parametrize(
    "override",
    [
        f"{ENGINE}={{mamba_ssm_cache_dtype: float32, compilation_config: {{backend: eager}}}}",
        f"{ENGINE}.compilation_config={{mode: 0, cudagraph_mode: NONE, cudagraph_capture_sizes: [1, 2]}}",
        f"{ENGINE}.max_num_queued_reqs=null",
        f"{ENGINE}.watermark=0",
        f"{ENGINE}={{moe_backend: triton, expert_placement_strategy: linear, enable_eplb: false}}",
        f"{MODEL}={{deterministic_mode: true, cp_comm_type: a2a, microbatch_group_size_per_vp_stage: 2}}",
        f"{VARIABLES}={{NCCL_DEBUG: INFO, N: 1}}",
        "policy.generation.vllm_cfg.env_vars={VLLM_LOGGING_LEVEL: INFO}",
        f"{ENGINE}.speculative_config={{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}}",
    ],
)
def test_arguments_of_the_libraries(workplace: Path, override: str):
    assert problems_of(override) == []


@pytest.mark.parametrize(
    ("override", "start", "part"),
    [
        (
            f"{ENGINE}.mamba_ssm_cache_dtyp=float32",
            f"{ENGINE}.mamba_ssm_cache_dtyp=float32: no argument",
            "nearest is mamba_ssm_cache_dtype",
        ),
        (f"{ENGINE}.mamba_ssm_cache_dtype=float8", f"{ENGINE}.mamba_ssm_cache_dtype=float8: not a value", "auto or bfloat16 or float16 or"),
        (f"{ENGINE}.block_size=many", f"{ENGINE}.block_size=many: not a value", "use null or whole number"),
        (f"{ENGINE}.enable_chunked_prefill=1", f"{ENGINE}.enable_chunked_prefill=1: not a value", "true or false"),
        (f"{ENGINE}.compilation_config.backends=eager", f"{ENGINE}.compilation_config.backends=eager: no", "nearest is backend"),
        (f"{ENGINE}.compilation_config=3", f"{ENGINE}.compilation_config=3: not a value", "use mapping"),
        (f"{ENGINE}.speculative_config=3", f"{ENGINE}.speculative_config=3: not a value", "use mapping"),
        (f"{ENGINE}.dtype=float32", f"{ENGINE}.dtype=float32: ", "set that"),
        (f"{ENGINE}.seed=1", f"{ENGINE}.seed=1: ", "grpo.seed"),
        (f"{ENGINE}.kv_cache_memory_bytes=1000", f"{ENGINE}.kv_cache_memory_bytes=1000: ", "kv_cache_memory_mib"),
        (f"{ENGINE}.moe_backend=cutlas", f"{ENGINE}.moe_backend=cutlas: not a value", "cutlass"),
        (f"{ENGINE}.enable_eplb=0", f"{ENGINE}.enable_eplb=0: ", "remove the key"),
        (f"{ENGINE}.quantization=fp8", f"{ENGINE}.quantization=fp8: ", "remove the key"),
        (f"{MODEL}.deterministic_mod=true", f"{MODEL}.deterministic_mod=true: ", "nearest is deterministic_mode"),
        (f"{MODEL}.deterministic_mode=1", f"{MODEL}.deterministic_mode=1: ", "true or false"),
        (f"{MODEL}.moe_permute_fusion=false", f"{MODEL}.moe_permute_fusion=false: ", "set policy.megatron_cfg.moe_permute_fusion"),
        (f"{MODEL}.hidden_size=128", f"{MODEL}.hidden_size=128: ", "config.json"),
        (f"{VARIABLES}.MASTER_PORT=1", f"{VARIABLES}.MASTER_PORT: ", "remove it"),
        (f"{VARIABLES}.RAY_ADDRESS=x", f"{VARIABLES}.RAY_ADDRESS: ", "remove it"),
        (f"{VARIABLES}={{'A B': x}}", f"{VARIABLES}.A B: ", "correct it"),
    ],
)
def test_what_is_refused(workplace: Path, override: str, start: str, part: str):
    (problem,) = problems_of(override)
    assert problem.startswith(start) and part in problem


def test_the_tables_name_what_there_is():
    engine = arguments_of("EngineArgs").keys()
    assert KEYS_OF_ENGINE_ARGUMENTS.keys() <= engine and FIXED_ENGINE_ARGUMENTS.keys() <= engine
    assert not KEYS_OF_ENGINE_ARGUMENTS.keys() & FIXED_ENGINE_ARGUMENTS.keys()
    assert set(KEYS_OF_ENGINE_ARGUMENTS.values()) <= KEYS.keys()
    assert OVERRIDABLE <= arguments_of("TransformerConfig").keys()


def test_what_keeps_an_engine_deterministic_cannot_be_changed():
    own = engine_environment(has_gpu=False).keys()
    assert {name for name in own if RESERVED_VARIABLES.fullmatch(name)} == {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_ATTN_SPLIT_KV"}
