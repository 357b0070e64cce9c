# SPDX-License-Identifier: Apache-2.0
"""Random small models between random layouts: every family a trainer and an engine both hold, every parallel size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from conversion.families.common import Flavour, HfConfig, MegatronParallel, VllmParallel

MAX_WORLD_SIZE = 12


@dataclass(frozen=True)
class RandomCase:
    """A model, the trainer's parallel sizes on `world_size` ranks, and an engine's that divide them into engines."""

    hf_config: HfConfig
    parallel: MegatronParallel
    world_size: int
    engine: VllmParallel
    flavour: Flavour

    def __repr__(self) -> str:
        return f"world {self.world_size}, {self.parallel} -> {self.engine}, {self.flavour}, {self.hf_config}"


def random_case(choose: random.Random) -> RandomCase:
    """A legal case of tiny tensors; a pure function of the generator's state."""
    model_type = choose.choice(sorted(MODELS))
    pp = choose.choice([1, 1, 2, 2, 3])
    vpp = choose.choice([1, 2]) if pp > 1 and model_type != "nemotron_h" else 1
    num_layers, first, last = _stages(choose, pp, vpp)
    hf_config = {"model_type": model_type, "num_hidden_layers": num_layers} | MODELS[model_type](choose, num_layers)
    # A single Mamba group cannot be cut over Megatron ranks.
    tp_sizes = [1] if hf_config.get("n_groups") == 1 else [1, 2, 4]
    tp, ep, etp, cp, replicas = _sizes(choose, tp_sizes)
    while pp * math.lcm(tp * cp, ep * etp) * replicas > MAX_WORLD_SIZE:
        tp, ep, etp, cp, replicas = _sizes(choose, tp_sizes)
    world_size = pp * math.lcm(tp * cp, ep * etp) * replicas
    engine_tp = choose.choice([size for size in (1, 2, 4) if world_size % size == 0])
    return RandomCase(
        hf_config=hf_config,
        parallel=MegatronParallel(tp, pp, ep, etp, cp, first, last, vpp),
        world_size=world_size,
        engine=VllmParallel(engine_tp, choose.choice([1, engine_tp])),
        flavour="te" if choose.random() < 0.5 else "local",
    )


def _sizes(choose: random.Random, tp_sizes: list[int]) -> tuple[int, int, int, int, int]:
    """tp, ep, etp, cp, and replicas of all of them."""
    return (
        choose.choice(tp_sizes),
        choose.choice([1, 2, 4]),
        choose.choice([1, 1, 2]),
        choose.choice([1, 1, 1, 2]),
        choose.choice([1, 1, 2]),
    )


def _stages(choose: random.Random, pp: int, vpp: int) -> tuple[int, int | None, int | None]:
    """Number of layers, and of those of the first and the last stage where they are given."""
    if pp == 1:
        return choose.randint(1, 4), None, None
    first = vpp * choose.randint(1, 2) if choose.random() < 0.5 else None
    # With both ends given, virtual stages need one between them.
    last = vpp * choose.randint(1, 2) if choose.random() < 0.5 and (first is None or vpp == 1 or pp > 2) else None
    num_even = pp - (first is not None) - (last is not None)
    return num_even * vpp + (first or 0) + (last or 0), first, last


def _decoder(choose: random.Random, num_layers: int) -> dict[str, object]:
    num_heads, head_dim = choose.choice([4, 8]), choose.choice([2, 4])
    return dict(
        vocab_size=choose.choice([5, 64, 100, 130]),
        hidden_size=choose.choice([4, 8]),
        intermediate_size=choose.choice([4, 8]),
        num_attention_heads=num_heads,
        num_key_value_heads=choose.choice([1, 2, 4]),
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=128,
        tie_word_embeddings=choose.random() < 0.5,
    )


def _qwen2(choose: random.Random, num_layers: int) -> dict[str, object]:
    return _decoder(choose, num_layers) | dict(hidden_size=8, num_attention_heads=4, head_dim=2)


def _mixtral(choose: random.Random, num_layers: int) -> dict[str, object]:
    return _decoder(choose, num_layers) | dict(num_local_experts=choose.choice([4, 8]), num_experts_per_tok=2)


def _qwen3_moe(choose: random.Random, num_layers: int) -> dict[str, object]:
    return _decoder(choose, num_layers) | dict(
        num_experts=choose.choice([4, 8]),
        num_experts_per_tok=2,
        moe_intermediate_size=choose.choice([4, 8]),
        norm_topk_prob=True,
        mlp_only_layers=[index for index in range(num_layers) if choose.random() < 0.25],
    )


def _nemotron_h(choose: random.Random, num_layers: int) -> dict[str, object]:
    return dict(
        hybrid_override_pattern="".join(choose.choice("MME*-") for _ in range(num_layers)),
        vocab_size=choose.choice([64, 100, 264]),
        hidden_size=choose.choice([4, 8]),
        num_attention_heads=4 * choose.choice([1, 2]),
        num_key_value_heads=choose.choice([1, 2, 4]),
        head_dim=choose.choice([2, 4]),
        mamba_num_heads=8,
        mamba_head_dim=choose.choice([1, 2]),
        n_groups=choose.choice([1, 4, 8]),
        ssm_state_size=choose.choice([1, 3]),
        conv_kernel=4,
        intermediate_size=8,
        n_routed_experts=choose.choice([4, 8]),
        num_experts_per_tok=2,
        moe_intermediate_size=4,
        moe_shared_expert_intermediate_size=8,
        layer_norm_epsilon=1e-5,
        moe_latent_size=choose.choice([None, None, 2]),
        max_position_embeddings=128,
    )


def _qwen2_moe(choose: random.Random, num_layers: int) -> dict[str, object]:
    sizes = dict(hidden_size=8, num_attention_heads=4, head_dim=2, shared_expert_intermediate_size=8)
    return _qwen3_moe(choose, num_layers) | sizes


def _glm4_moe(choose: random.Random, num_layers: int) -> dict[str, object]:
    return _decoder(choose, num_layers) | dict(
        n_routed_experts=choose.choice([4, 8]),
        num_experts_per_tok=2,
        moe_intermediate_size=choose.choice([4, 8]),
        n_shared_experts=choose.choice([1, 2]),
        first_k_dense_replace=choose.choice([0, 1]),
        attention_bias=choose.random() < 0.5,
        use_qk_norm=choose.random() < 0.5,
    )


def _deepseek_v3(choose: random.Random, num_layers: int) -> dict[str, object]:
    return _glm4_moe(choose, num_layers) | dict(
        attention_bias=False,
        num_key_value_heads=4,
        num_attention_heads=4,
        head_dim=4,
        q_lora_rank=choose.choice([None, 4]),
        kv_lora_rank=4,
        qk_nope_head_dim=2,
        qk_rope_head_dim=4,
        v_head_dim=2,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,
    )


def _qwen3_next(choose: random.Random, num_layers: int) -> dict[str, object]:
    return _qwen3_moe(choose, num_layers) | dict(
        num_key_value_heads=4,
        shared_expert_intermediate_size=8,
        tie_word_embeddings=False,
        layer_types=choose.choices(["linear_attention", "full_attention"], k=num_layers),
        linear_num_key_heads=4,
        linear_num_value_heads=choose.choice([4, 8]),
        linear_key_head_dim=choose.choice([2, 4]),
        linear_value_head_dim=2,
        linear_conv_kernel_dim=4,
    )


def _qwen3_5(choose: random.Random, num_layers: int) -> dict[str, object]:
    drawn = _qwen3_next(choose, num_layers)
    kept = ("linear_", "layer_types", "tie_word")
    return _decoder(choose, num_layers) | {
        key: value for key, value in drawn.items() if key.startswith(kept) or key == "num_key_value_heads"
    }


def _gpt_oss(choose: random.Random, num_layers: int) -> dict[str, object]:
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=64)
    return _decoder(choose, num_layers) | dict(
        num_local_experts=choose.choice([4, 8]),
        num_experts_per_tok=2,
        intermediate_size=choose.choice([4, 8]),
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        sliding_window=choose.choice([4, 8]),
        tie_word_embeddings=False,
    )


MODELS: dict[str, Callable[[random.Random, int], dict[str, object]]] = {
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama": _decoder,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron_h,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _decoder,
    "qwen3_moe": _qwen3_moe,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
}
"""A random config.json, but model_type and num_hidden_layers, by model_type."""
