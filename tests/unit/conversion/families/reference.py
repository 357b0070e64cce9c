# SPDX-License-Identifier: Apache-2.0
"""Slow literal versions of what Megatron's local GPTModel and vLLM's decoders hold: whole fused matrices, then cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.unit.conversion.dense import PADDING

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Names:
    """Names of a decoder family's experts."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""


NAMES = {
    "mixtral": Names("block_sparse_moe", "w1", "w3", "w2"),
    "glm4_moe": Names(shared="shared_experts"),
    "qwen2_moe": Names(shared="shared_expert"),
}


def padded(array: np.ndarray, multiple: int) -> np.ndarray:
    """The array with rows of padding up to a multiple."""
    missing = -len(array) % multiple
    return np.concatenate([array, np.full((missing, *array.shape[1:]), PADDING)]) if missing else array


def cut(array: np.ndarray, size: int, rank: int, axis: int = 0) -> np.ndarray:
    """Part `rank` of `size` equal ones."""
    return np.split(array, size, axis=axis)[rank]


def gated(gate: np.ndarray, up: np.ndarray, size: int, rank: int) -> np.ndarray:
    """The rank's rows of the gate projection above its rows of the up projection."""
    return np.concatenate([cut(gate, size, rank), cut(up, size, rank)])


def interleaved(query: np.ndarray, key: np.ndarray, value: np.ndarray, num_groups: int) -> np.ndarray:
    """Megatron's fused projection, group by group: its query heads, its key head, its value head."""
    parts = []
    for group in range(num_groups):
        parts += [cut(array, num_groups, group) for array in (query, key, value)]
    return np.concatenate(parts)


def megatron_chunk(
    weights: Mapping[str, np.ndarray],
    hf_config: Mapping[str, object],
    layers: Sequence[int],
    *,
    tp: tuple[int, int] = (1, 0),
    ep: tuple[int, int] = (1, 0),
    etp: tuple[int, int] = (1, 0),
    is_first: bool = True,
    is_last: bool = True,
) -> Arrays:
    """Every tensor of a chunk with these layers; sizes are (size, rank)."""
    num_groups, names = int(str(hf_config["num_key_value_heads"])), NAMES.get(str(hf_config["model_type"]), Names())
    found: Arrays = {}
    if is_first:
        found["embedding.word_embeddings.weight"] = cut(padded(weights["model.embed_tokens.weight"], 128 * tp[0]), *tp)
    for local, index in enumerate(layers):
        hf, here = f"model.layers.{index}.", f"decoder.layers.{local}."
        found[here + "input_layernorm.weight"] = weights[hf + "input_layernorm.weight"]
        found[here + "pre_mlp_layernorm.weight"] = weights[hf + "post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{hf}self_attn.q_proj.{kind}" in weights:
                query, key, value = (weights[f"{hf}self_attn.{name}_proj.{kind}"] for name in "qkv")
                found[f"{here}self_attention.linear_qkv.{kind}"] = cut(interleaved(query, key, value, num_groups), *tp)
        for name in "qk":
            if f"{hf}self_attn.{name}_norm.weight" in weights:
                found[f"{here}self_attention.{name}_layernorm.weight"] = weights[f"{hf}self_attn.{name}_norm.weight"]
        found[here + "self_attention.linear_proj.weight"] = cut(weights[hf + "self_attn.o_proj.weight"], *tp, axis=1)
        experts = experts_of(weights, hf, names)
        if experts:
            found[here + "mlp.router.weight"] = weights[f"{hf}{names.block}.gate.weight"]
            if f"{hf}mlp.gate.e_score_correction_bias" in weights:
                found[here + "mlp.router.expert_bias"] = weights[f"{hf}mlp.gate.e_score_correction_bias"]
            if f"{hf}mlp.shared_expert_gate.weight" in weights:
                found[here + "mlp.shared_experts.gate_weight"] = weights[f"{hf}mlp.shared_expert_gate.weight"]
            if names.shared:
                gate, up, down = (
                    weights[f"{hf}mlp.{names.shared}.{name}_proj.weight"] for name in ("gate", "up", "down")
                )
                found[here + "mlp.shared_experts.linear_fc1.weight"] = gated(gate, up, *tp)
                found[here + "mlp.shared_experts.linear_fc2.weight"] = cut(down, *tp, axis=1)
            for place, (gate, up, down) in enumerate(experts[part(len(experts), *ep)]):
                found[f"{here}mlp.experts.local_experts.{place}.linear_fc1.weight"] = gated(gate, up, *etp)
                found[f"{here}mlp.experts.local_experts.{place}.linear_fc2.weight"] = cut(down, *etp, axis=1)
        else:
            found[here + "mlp.linear_fc1.weight"] = gated(
                weights[hf + "mlp.gate_proj.weight"], weights[hf + "mlp.up_proj.weight"], *tp
            )
            found[here + "mlp.linear_fc2.weight"] = cut(weights[hf + "mlp.down_proj.weight"], *tp, axis=1)
    if is_last:
        found["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if not hf_config.get("tie_word_embeddings"):
            found["output_layer.weight"] = cut(padded(weights["lm_head.weight"], 128 * tp[0]), *tp)
        elif not is_first:
            found["output_layer.weight"] = cut(padded(weights["model.embed_tokens.weight"], 128 * tp[0]), *tp)
    return found


def vllm_worker(
    weights: Mapping[str, np.ndarray], hf_config: Mapping[str, object], tp: int, of_all: int, *, ep: int
) -> Arrays:
    """Every tensor of worker `of_all` of an engine; it holds whole experts with `ep` above 1, over groups of `tp`."""
    worker, has_ep = of_all % tp, ep > 1
    num_groups, names = int(str(hf_config["num_key_value_heads"])), NAMES.get(str(hf_config["model_type"]), Names())
    found: Arrays = {}
    vocabulary = (
        ["model.embed_tokens.weight"]
        if hf_config.get("tie_word_embeddings")
        else ["model.embed_tokens.weight", "lm_head.weight"]
    )
    for name in vocabulary:
        found[name] = cut(padded(weights[name], 64), tp, worker)
    found["model.norm.weight"] = weights["model.norm.weight"]
    for index in range(int(str(hf_config["num_hidden_layers"]))):
        hf = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if f"{hf}{name}.weight" in weights:
                found[f"{hf}{name}.weight"] = weights[f"{hf}{name}.weight"]
        for kind in ("weight", "bias"):
            if f"{hf}self_attn.q_proj.{kind}" in weights:
                query, key, value = (weights[f"{hf}self_attn.{name}_proj.{kind}"] for name in "qkv")
                repeats = max(1, tp // num_groups)
                keys, values = (
                    np.concatenate([head for head in np.split(array, num_groups) for _ in range(repeats)])
                    for array in (key, value)
                )
                found[f"{hf}self_attn.qkv_proj.{kind}"] = np.concatenate(
                    [cut(array, tp, worker) for array in (query, keys, values)]
                )
        found[hf + "self_attn.o_proj.weight"] = cut(weights[hf + "self_attn.o_proj.weight"], tp, worker, axis=1)
        experts = experts_of(weights, hf, names)
        if experts:
            found[f"{hf}{names.block}.gate.weight"] = weights[f"{hf}{names.block}.gate.weight"]
            for name in ("gate.e_score_correction_bias", "shared_expert_gate.weight"):
                if f"{hf}mlp.{name}" in weights:
                    found[f"{hf}mlp.{name}"] = weights[f"{hf}mlp.{name}"]
            if names.shared:
                gate, up, down = (
                    weights[f"{hf}mlp.{names.shared}.{name}_proj.weight"] for name in ("gate", "up", "down")
                )
                found[f"{hf}mlp.{names.shared}.gate_up_proj.weight"] = gated(gate, up, tp, worker)
                found[f"{hf}mlp.{names.shared}.down_proj.weight"] = cut(down, tp, worker, axis=1)
            mine = experts[part(len(experts), ep, of_all)] if has_ep else experts
            inner = (1, 0) if has_ep else (tp, worker)
            prefix = f"{hf}{names.block}.experts.routed_experts."
            found[prefix + "w13_weight"] = np.stack([gated(gate, up, *inner) for gate, up, _ in mine])
            found[prefix + "w2_weight"] = np.stack([cut(down, *inner, axis=1) for _, _, down in mine])
        else:
            gate, up = weights[hf + "mlp.gate_proj.weight"], weights[hf + "mlp.up_proj.weight"]
            found[hf + "mlp.gate_up_proj.weight"] = gated(gate, up, tp, worker)
            found[hf + "mlp.down_proj.weight"] = cut(weights[hf + "mlp.down_proj.weight"], tp, worker, axis=1)
    return found


def experts_of(
    weights: Mapping[str, np.ndarray], hf: str, names: Names
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Gate, up and down projection of each expert of a layer; empty for a dense one."""
    experts = []
    while f"{hf}{names.block}.experts.{len(experts)}.{names.gate}.weight" in weights:
        prefix = f"{hf}{names.block}.experts.{len(experts)}."
        experts.append(
            (
                weights[f"{prefix}{names.gate}.weight"],
                weights[f"{prefix}{names.up}.weight"],
                weights[f"{prefix}{names.down}.weight"],
            )
        )
    return experts


def part(total: int, size: int, rank: int) -> slice:
    """The rank's part of equal ones."""
    return slice(rank * total // size, (rank + 1) * total // size)
