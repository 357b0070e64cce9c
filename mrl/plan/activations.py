# SPDX-License-Identifier: Apache-2.0
"""Bytes Transformer Engine kernels keep of a packed row for the backward pass, by layer kind and recomputed modules.

Letters are those of `hybrid_override_pattern`: `*` attention, `-` MLP, `E` experts, `M` Mamba, `G` gated delta net. A
layer is a string of its parts, so that a decoder layer is `*-` or `*E`. A kept tensor counts once, where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.model import ModelSizes

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Row:
    """One microbatch on one rank, and how the rank computes it."""

    tokens: int
    tp: int = 1
    etp: int = 1
    is_sequence_parallel: bool = False
    imbalance: float = 1.0
    """Tokens that the busiest rank's experts get, over the mean."""
    recompute: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    """Tensors that wait on the host for the backward pass, as `letter.name`."""
    scores_length: int = 0
    """Keys per query with kept scores: a sequence's length without a fused attention kernel, else 0."""
    path_copies: float = 1.0
    """Keys and values that attention reads, over tokens: each continuation of a shared prefix reads its whole path."""
    hidden_dropout: bool = False
    attention_dropout: bool = False

    @property
    def sharded_tokens(self) -> float:
        """Tokens of the row between tensor-parallel regions."""
        return self.tokens / self.tp if self.is_sequence_parallel else self.tokens


RECOMPUTED = {
    "core_attn": ("*.scores", "*.softmax", "*.paths"),
    "mlp": ("-.fc1", "-.activation"),
    "moe_act": ("E.activation",),
    "moe": ("E.router", "E.dispatched", "E.fc1", "E.activation", "E.shared"),
    "shared_experts": ("E.shared",),
    "mla_up_proj": ("*.qkv",),
    # The other norms share a kernel with the projection after them.
    "layernorm": ("E.norm",),
}


def part_bytes(shape: ModelSizes, letter: str, row: Row) -> dict[str, float]:
    """Bytes of every tensor that a part of a layer keeps, by name, if nothing is recomputed."""
    stream = BF16 * row.sharded_tokens * shape.hidden
    tensors = {"input": stream, "norm": stream} | {
        **{"*": _attention, "-": _mlp, "E": _experts},
        **{"M": _mamba, "G": _delta_net},
    }[letter](shape, row)
    if row.hidden_dropout:
        tensors["dropout"] = row.sharded_tokens * shape.hidden
    return tensors


def kept_bytes(shape: ModelSizes, layer: str, row: Row) -> float:
    """Bytes that a layer keeps between its forward and its backward pass."""
    if "full" in row.recompute:
        return BF16 * row.sharded_tokens * shape.hidden
    left_out = row.offloaded.union(*(RECOMPUTED.get(module, ()) for module in row.recompute))
    return sum(
        size
        for letter in layer
        for name, size in part_bytes(shape, letter, row).items()
        if f"{letter}.{name}" not in left_out
    )


def backward_bytes(shape: ModelSizes, layer: str, row: Row) -> float:
    """Estimates a layer's backward pass beyond kept tensors: recomputed and fetched values, its widest part's
    gradients.
    """
    parts = [part_bytes(shape, letter, row) for letter in layer]
    again = sum(sum(tensors.values()) for tensors in parts) - kept_bytes(shape, layer, row)
    return (
        again
        + max(sum(size for name, size in tensors.items() if name in _WIDE) for tensors in parts)
        + parts[0]["input"]
    )


_WIDE = ("scores", "paths", "qkv", "fc1", "activation", "dispatched", "in_proj", "convolution", "scan")


def _attention(shape: ModelSizes, row: Row) -> dict[str, float]:
    heads, mla = shape.heads / row.tp, shape.mla
    tensors: dict[str, float] = {"softmax": FP32 * row.tokens * heads}
    if row.scores_length:
        tensors["scores"] = heads * row.tokens * row.scores_length * (BF16 + (3 if row.attention_dropout else 0))
    if mla is None:
        # With more tensor-parallel ranks than key heads, each holds a part of a head and computes with the whole.
        kv_heads = max(1.0, shape.kv_heads / row.tp)
        width = shape.head_dim
        if row.path_copies > 1:
            tensors["paths"] = BF16 * row.tokens * (row.path_copies - 1) * 2 * kv_heads * width
        gate = heads if shape.has_delta_nets else 0
        return tensors | {
            "qkv": BF16 * row.tokens * (heads + gate + 2 * kv_heads) * width,
            "core": BF16 * row.tokens * heads * width,
        }
    down = 2 * (mla.query_rank + mla.kv_rank) + mla.rotary
    return tensors | {
        "down": BF16 * row.sharded_tokens * down,
        "qkv": BF16 * row.tokens * heads * (2 * (mla.plain + mla.rotary) + mla.value),
        "core": BF16 * row.tokens * heads * mla.value,
    }


def _mlp(shape: ModelSizes, row: Row) -> dict[str, float]:
    width = BF16 * row.tokens * shape.ffn / row.tp
    return {"fc1": width * shape.fc1_factor, "activation": width}


def _experts(shape: ModelSizes, row: Row) -> dict[str, float]:
    received = row.sharded_tokens * shape.topk * row.etp * row.imbalance
    width, shared = BF16 * received * shape.expert_ffn / row.etp, BF16 * row.tokens * shape.shared_ffn / row.tp
    return {
        "router": 3 * FP32 * row.sharded_tokens * shape.experts,
        "dispatched": BF16 * received * (shape.latent or shape.hidden),
        "fc1": width * shape.fc1_factor,
        "activation": width,
        "shared": shared * (shape.fc1_factor + 1),
    }


def _mamba(shape: ModelSizes, row: Row) -> dict[str, float]:
    inner = BF16 * row.tokens * shape.mamba_inner / row.tp
    return {"in_proj": BF16 * row.tokens * shape.mamba_projection / row.tp, "scan": 2 * inner}


def _delta_net(shape: ModelSizes, row: Row) -> dict[str, float]:
    """Tensors of a delta net: input, three shifted ones and output of the convolution in float32; keys by head."""
    tokens = row.tokens / row.tp
    channels = shape.mamba_inner + 2 * shape.mamba_groups * shape.mamba_state
    heads = shape.mamba_heads * (2 * shape.mamba_state + 4 * shape.mamba_head_dim)
    return {
        "in_proj": BF16 * tokens * shape.mamba_projection,
        "convolution": 5 * FP32 * tokens * channels,
        "scan": BF16 * tokens * heads,
    }
