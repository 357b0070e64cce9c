# SPDX-License-Identifier: Apache-2.0
"""Settings of tiny models, as config.json has them: `tests/models.py` makes models of them. Imports no library."""

from __future__ import annotations

from collections.abc import Mapping

TINY_NEMOTRON_H = dict(
    vocab_size=264,
    hidden_size=64,
    hybrid_override_pattern="MEM*EME",
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=16,
    conv_kernel=4,
    chunk_size=16,
    intermediate_size=128,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    moe_shared_expert_intermediate_size=128,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    pad_token_id=256,
    bos_token_id=257,
    eos_token_id=258,
    max_position_embeddings=4096,
    mlp_hidden_act="relu2",
    tie_word_embeddings=False,
)

_TINY_DECODER = dict(
    vocab_size=264,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    pad_token_id=256,
    bos_token_id=257,
    eos_token_id=258,
    tie_word_embeddings=False,
)

_TINY_DELTA_NETS = _TINY_DECODER | dict(
    rope_parameters=dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.25),
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
)
_TINY_SHARED_EXPERT = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=96
)

TINY: Mapping[str, Mapping[str, object]] = {
    "llama": _TINY_DECODER
    | dict(
        max_position_embeddings=16384,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    # Not of mrl's: docs/extend/family.md adds it.
    "mistral": _TINY_DECODER | dict(sliding_window=None, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "mixtral": _TINY_DECODER
    | dict(num_local_experts=8, num_experts_per_tok=2, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "nemotron_h": TINY_NEMOTRON_H,
    # head_dim is no setting of qwen2; vLLM has kernels for 32 and up.
    "qwen2": {name: value for name, value in _TINY_DECODER.items() if name != "head_dim"} | dict(hidden_size=128),
    "qwen2_moe": {name: value for name, value in _TINY_DECODER.items() if name != "head_dim"}
    | dict(
        hidden_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=96,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
    "qwen3": _TINY_DECODER | dict(tie_word_embeddings=True),
    "qwen3_moe": _TINY_DECODER
    | dict(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen3_next": _TINY_DELTA_NETS
    | _TINY_SHARED_EXPERT
    | dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    "qwen3_5_text": _TINY_DELTA_NETS,
    "qwen3_5_moe_text": _TINY_DELTA_NETS | _TINY_SHARED_EXPERT,
    "gpt_oss": _TINY_DECODER
    | dict(
        rms_norm_eps=1e-5,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=128,
            truncate=False,
        ),
        # Shorter than the longest sequences of the tests, and no multiple of a block of the cache.
        sliding_window=12,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=64,
    ),
    "glm4_moe": _TINY_DECODER
    | dict(
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
    ),
    "deepseek_v3": {
        name: value for name, value in _TINY_DECODER.items() if name not in ("head_dim", "num_key_value_heads")
    }
    | dict(
        num_key_value_heads=4,
        q_lora_rank=48,
        # vLLM's kernel for CPUs knows these two alone, which are those of all published models.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=8,
        # Megatron rates a group by its best topk / topk_group experts, transformers by its best two.
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        num_nextn_predict_layers=0,
    ),
}
"""Settings of a tiny model by model_type."""

TINY_CONFIG: dict[str, object] = {"model_type": "nemotron_h", **TINY_NEMOTRON_H, "layer_norm_epsilon": 1e-5}
"""A whole config.json."""
