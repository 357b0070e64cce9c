# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that transformers or vLLM reads and a family does not; keys that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from conversion.families.registry import FAMILIES, family
from conversion.families.settings import known_keys
from tests import models


def tiny(model_type: str, **changes: object) -> dict[str, object]:
    return {**models.TINY[model_type], "model_type": model_type, "rope_theta": 10000.0, **changes}


def rope(**changes: object) -> dict[str, object]:
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e6) | changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        # Their classes in transformers have no switch, and vLLM uses any window.
        ("llama", dict(sliding_window=64, use_sliding_window=False), "sliding_window=64 is in use.* set it to null"),
        ("glm4_moe", dict(sliding_window=64, use_sliding_window=False), "sliding_window=64 is in use"),
        ("mixtral", dict(sliding_window=64, max_window_layers=2), "sliding_window=64 is in use"),
        ("llama", dict(sliding_window=0), "sliding_window=0 is in use"),
        ("nemotron_h", dict(sliding_window=64), "sliding_window=64 is not supported"),
        (
            "qwen3_moe",
            dict(sliding_window=64, use_sliding_window=True),
            "sliding_window=64 is in use.* use_sliding_window to false",
        ),
        ("llama", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types="),
        ("llama", dict(logit_scale=0.5), "logit_scale=0.5 is not supported for llama: .* leave it out or set 1.0"),
        ("llama", dict(target_layer_count=2), "target_layer_count=2 is not supported"),
        ("qwen2", dict(qk_norm=True), "qk_norm=True is not supported"),
        ("qwen3", dict(attention_chunk_size=128), "attention_chunk_size=128 is not supported"),
        ("qwen3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        ("nemotron_h", dict(block_configs=[{}]), "block_configs="),
        ("nemotron_h", dict(hidden_dropout=0.1), "hidden_dropout=0.1 is not supported"),
        (
            "glm4_moe",
            dict(num_local_experts=4),
            "num_local_experts=4 and n_routed_experts=8 are one setting of glm4_moe",
        ),
        (
            "qwen3",
            rope(mrope_section=[8, 4, 4]),
            r"rotary positions: mrope_section=\[8, 4, 4\] is not supported for rope_type='default'",
        ),
        ("qwen3", rope(rope_dim=8), "rotary positions: rope_dim=8 is not supported"),
    ],
)
def test_a_key_that_others_read_is_refused(model_type: str, changes: dict[str, object], message: str):
    hf_config = tiny(model_type, **changes)
    for read in (family(hf_config).canonical, family(hf_config).megatron_arguments):
        with pytest.raises(ValueError, match=f"config.json: {message}"):
            read(hf_config)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", dict(logit_scale=1.0, is_causal=True, multi_query=None, attn_logit_softcapping=30.0)),
        ("llama", dict(unsloth_fixed=True, max_window_layers=2, mlp_bias=False)),
        (
            "llama",
            dict(layer_types=["full_attention"] * 4, temperature=0.6, pretraining_tp=2, _attn_implementation="eager"),
        ),
        (
            "qwen2",
            dict(sliding_window=64, use_sliding_window=False, max_window_layers=2, layer_types=["full_attention"] * 4),
        ),
        ("qwen2", dict(sliding_window=64)),
        ("qwen2_moe", dict(sliding_window=0, use_sliding_window=False)),  # as transformers saves it
        ("glm4_moe", dict(num_local_experts=8, n_routed_experts=8, sliding_window=None)),
        (
            "nemotron_h",
            dict(attention_head_dim=32, rope_theta=1e4, partial_rotary_factor=1.0, expand=4, time_step_min=0.01),
        ),
        ("qwen3", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, finetuned=True, factor=4.0))),
    ],
)
def test_keys_that_are_off_or_that_nobody_reads_do_no_harm(model_type: str, changes: dict[str, object]):
    hf_config = tiny(model_type, **changes)
    assert family(hf_config).megatron_arguments(hf_config) == family(hf_config).megatron_arguments(tiny(model_type))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_what_transformers_writes_is_accepted(model_type: str, tmp_path: Path):
    """With every key of the class, missing or at its default."""
    given = tiny(model_type)
    AutoConfig.for_model(**dict[str, Any](given)).save_pretrained(tmp_path)
    written = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert family(written).canonical(written) == family(given).canonical(given)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_missing_key_has_the_value_that_transformers_gives_it(model_type: str):
    given, keys = (
        tiny(model_type),
        known_keys()[model_type]["defaults"].keys() - known_keys()[model_type]["aliases"].keys(),
    )
    num_optional = 0
    for key in sorted(keys):
        without = {name: value for name, value in given.items() if name != key}
        config = AutoConfig.for_model(**dict[str, Any](without)).to_dict()
        value = {**(config.get("rope_parameters") or {}), **config}.get(key)
        try:
            found = family(without).megatron_arguments(without)
        except ValueError:
            continue  # a size that mrl wants to be told, or one that the defaults do not fit
        num_optional += 1
        assert found == family(given).megatron_arguments({**without, key: value}), key
    assert num_optional > 5
