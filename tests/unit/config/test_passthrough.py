# SPDX-License-Identifier: Apache-2.0


from mrl.config.passthrough import (
    FIXED_ENGINE_ARGUMENTS,
    KEYS_OF_ENGINE_ARGUMENTS,
    OVERRIDABLE,
    RESERVED_VARIABLES,
    arguments_of,
)
from mrl.config.schema.keys import KEYS
from mrl.rollout.environment import engine_environment


def test_the_tables_name_what_there_is():
    engine = arguments_of("EngineArgs").keys()
    assert KEYS_OF_ENGINE_ARGUMENTS.keys() <= engine and FIXED_ENGINE_ARGUMENTS.keys() <= engine
    assert not KEYS_OF_ENGINE_ARGUMENTS.keys() & FIXED_ENGINE_ARGUMENTS.keys()
    assert set(KEYS_OF_ENGINE_ARGUMENTS.values()) <= KEYS.keys()
    assert OVERRIDABLE <= arguments_of("TransformerConfig").keys()


def test_what_keeps_an_engine_deterministic_cannot_be_changed():
    own = engine_environment(has_gpu=False).keys()
    assert {name for name in own if RESERVED_VARIABLES.fullmatch(name)} == {
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_CPU_ATTN_SPLIT_KV",
    }
