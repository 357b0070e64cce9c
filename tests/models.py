"""Tiny random Hugging Face checkpoints for tests. Weights are sharper than at initialisation, so that a wrong mapping shows."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

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


def nemotron_h(seed: int = 0, **overrides: object) -> NemotronHForCausalLM:
    """A tiny random float32 nemotron_h with Megatron's and vLLM's dt limits (transformers clamps dt at time_step_min)."""
    torch.manual_seed(seed)
    model = NemotronHForCausalLM(NemotronHConfig(**{**TINY_NEMOTRON_H, **overrides})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim >= 2 else parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return unclamp_dt(model)


def unclamp_dt(model: NemotronHForCausalLM) -> NemotronHForCausalLM:
    """Removes transformers' lower clamp of dt, which no other implementation has."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            setattr(module, "time_step_limit", (0.0, float("inf")))  # noqa: B010  torch types attributes of modules as tensors
    return model


def save_nemotron_h(folder: Path, seed: int = 0, **overrides: object) -> Path:
    """Writes `nemotron_h(seed)` as an ordinary Hugging Face folder and returns the folder."""
    nemotron_h(seed, **overrides).save_pretrained(folder)
    return folder
