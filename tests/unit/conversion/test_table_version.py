# SPDX-License-Identifier: Apache-2.0
"""Cache entries are found by TABLE_VERSION: it must change with the layout of hf-to-mcore checkpoints and manifests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields

import pytest

from conversion.boxes import Layout
from conversion.families.registry import FAMILIES, family
from conversion.files.manifest import TABLE_VERSION, FileRecord, Manifest, TensorRecord

_DECODER: dict[str, object] = dict(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=128,
    tie_word_embeddings=False,
)
HYBRID: dict[str, object] = dict(
    hybrid_override_pattern="ME*-",
    num_hidden_layers=4,
    vocab_size=100,
    hidden_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    mamba_num_heads=8,
    mamba_head_dim=2,
    n_groups=4,
    ssm_state_size=3,
    conv_kernel=4,
    intermediate_size=12,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    moe_shared_expert_intermediate_size=10,
    layer_norm_epsilon=1e-5,
    max_position_embeddings=128,
)
_LATENT: dict[str, object] = dict(
    num_key_value_heads=4,
    q_lora_rank=6,
    kv_lora_rank=5,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=3,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    n_shared_experts=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
)
_DELTA_NETS: dict[str, object] = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=2,
    linear_value_head_dim=3,
    linear_conv_kernel_dim=4,
)
_SHARED_EXPERT: dict[str, object] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=10
)


def _with(settings: dict[str, object], **changes: object) -> dict[str, object]:
    return settings | changes


CONFIGS: Mapping[str, list[dict[str, object]]] = {
    "deepseek_v3": [_DECODER | _LATENT, _with(_DECODER | _LATENT, q_lora_rank=None)],
    "glm4_moe": [
        _with(
            _DECODER,
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
        )
    ],
    "gpt_oss": [
        _with(
            _DECODER,
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "rms_norm_eps": 1e-5},
            rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=64),
        )
    ],
    "llama": [_DECODER, _with(_DECODER, tie_word_embeddings=True)],
    "mixtral": [_with(_DECODER, num_local_experts=4, num_experts_per_tok=2)],
    "nemotron_h": [HYBRID, _with(HYBRID, moe_latent_size=4)],
    "qwen2": [_DECODER],
    "qwen2_moe": [
        _with(
            _DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=10
        )
    ],
    "qwen3": [_DECODER, _with(_DECODER, tie_word_embeddings=True)],
    "qwen3_moe": [
        _with(
            _DECODER,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=6,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    ],
    "qwen3_5_moe_text": [_DECODER | _DELTA_NETS | _SHARED_EXPERT],
    "qwen3_5_text": [_DECODER | _DELTA_NETS, _with(_DECODER | _DELTA_NETS, tie_word_embeddings=True)],
    "qwen3_next": [_DECODER | _DELTA_NETS | _SHARED_EXPERT],
}

# By version, then by model_type. Versions that were published stay.
DIGESTS: Mapping[int, Mapping[str, str]] = {
    1: {
        "deepseek_v3": "2288fc0c2720d46c",
        "glm4_moe": "3090b836bd78befa",
        "gpt_oss": "40a41070f6d52b72",
        "llama": "10b294a1b8cb967f",
        "mixtral": "1c0723f15668b0a4",
        "nemotron_h": "d1b4ee38301e7ffb",
        "qwen2": "3524bbfbd9a0f3ac",
        "qwen2_moe": "8b7a927fc9de9dbe",
        "qwen3": "86c4ea8a4debb84d",
        "qwen3_moe": "bd510218b22f58cc",
        "qwen3_5_moe_text": "36028a634aa2d9ba",
        "qwen3_5_text": "c7981e1cf378fbf6",
        "qwen3_next": "c2c639ed9c12a070",
    },
}


def digest(model_type: str) -> str:
    """Digest of each Hugging Face checkpoint element's place, and of a manifest's keys, with the source's dtypes."""
    layouts = []
    for settings in CONFIGS[model_type]:
        config = {"model_type": model_type, **settings}
        layouts.append(described(family(config).torch_dist_layout(config, "float32")))
    records = [[field.name for field in fields(record)] for record in (Manifest, TensorRecord, FileRecord)]
    return hashlib.sha256(json.dumps([records, layouts]).encode()).hexdigest()[:16]


def described(layout: Layout) -> list[object]:
    return [
        [
            slot.name,
            content.shape,
            [[piece.name, piece.box, piece.local, piece.transform] for piece in content.pieces],
            content.padding,
        ]
        for slot, content in layout.items()
    ]


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_changed_layout_has_another_table_version(model_type: str):
    assert model_type in CONFIGS, "add configs of the new family here, and its digest to the current version"
    known = DIGESTS.get(TABLE_VERSION, {}).get(model_type)
    assert digest(model_type) == known, (
        "checkpoints of this family are laid out in another way than before, or manifests are: raise TABLE_VERSION of "
        "conversion.files.manifest, so that no run takes an old one out of the cache, and add the digests of the "
        "new version here"
    )


def test_a_moved_element_changes_the_digest(monkeypatch: pytest.MonkeyPatch):
    before = digest("qwen3")
    monkeypatch.setitem(CONFIGS["qwen3"][0], "num_key_value_heads", 1)
    assert digest("qwen3") != before
