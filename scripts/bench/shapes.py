"""Shapes of Nemotron-3-Nano-30B-A3B, as its config.json has them, and the same model made narrower."""

from __future__ import annotations

from conversion.families.common import HfConfig

NANO_30B: HfConfig = dict(
    model_type="nemotron_h",
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    num_hidden_layers=52,
    vocab_size=131072,
    max_position_embeddings=262144,
    hidden_size=2688,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    mamba_num_heads=64,
    mamba_head_dim=64,
    n_groups=8,
    ssm_state_size=128,
    conv_kernel=4,
    intermediate_size=1856,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=6,
    moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    mlp_hidden_act="relu2",
    tie_word_embeddings=False,
)

# What a matrix is wide and high; how many there are of each (layers, experts, heads) stays.
_WIDTHS = (
    "vocab_size",
    "hidden_size",
    "head_dim",
    "mamba_head_dim",
    "ssm_state_size",
    "intermediate_size",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
)


def narrowed(factor: int) -> HfConfig:
    """Nemotron-3-Nano-30B-A3B with every width divided by `factor`: as many tensors, about `factor` squared times fewer bytes.

    Raises:
        ValueError: `factor` does not divide a width.
    """
    for key in _WIDTHS:
        if int(str(NANO_30B[key])) % factor:
            raise ValueError(f"--divide {factor} does not divide {key}={NANO_30B[key]}; use a power of two up to 32")
    return {**NANO_30B, **{key: int(str(NANO_30B[key])) // factor for key in _WIDTHS}}
