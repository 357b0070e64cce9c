# SPDX-License-Identifier: Apache-2.0
"""Bytes Transformer Engine kernels keep of a packed row for the backward pass, by layer kind and recomputed modules.

Letters are those of `hybrid_override_pattern`: `*` attention, `-` MLP, `E` experts, `M` Mamba, `G` gated delta net. A
layer is a string of its parts, so that a decoder layer is `*-` or `*E`. A kept tensor counts once, where it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrl.config.model import ModelSizes

BF16, FP32 = 2, 4
# Transformer Engine's layouts (transformer_engine/pytorch/tensor): values of 8 bits, and a scale in float32 for 128
# inputs, or for 128 x 128 weights; in MXFP8 one of 8 bits for 32; in a tensorwise cast one for all.
_FP8_INPUT = {"blockwise": 1 + FP32 / 128, "mxfp8": 1 + 1 / 32}
_FP8_WEIGHT = {"blockwise": 1 + FP32 / 128**2, "mxfp8": 1 + 1 / 32}
_EXPERT_ROWS = {"mxfp8": 32}
"""Tokens of each expert are padded to multiples of this, or of 16 (megatron/core/fp8_utils.py)."""


@dataclass(frozen=True)
class Row:
    """One microbatch on one rank, and how the rank computes it."""

    tokens: int
    tp: int = 1
    ep: int = 1
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
    fp8: str = ""
    """`fp8_recipe` of the products; "" where they are in bfloat16."""

    @property
    def sharded_tokens(self) -> float:
        """Tokens of the row between tensor-parallel regions."""
        return self.tokens / self.tp if self.is_sequence_parallel else self.tokens

    @property
    def input_bytes(self) -> float:
        """Bytes of an element of a product's input, as they wait for the gradient of its weights."""
        return _FP8_INPUT.get(self.fp8, 1.0) if self.fp8 else BF16

    @property
    def weight_copy_bytes(self) -> float:
        """Bytes of the FP8 copies of a weight, which wait with each row: one for each of the two passes."""
        return 2 * _FP8_WEIGHT.get(self.fp8, 1.0) if self.fp8 else 0.0


RECOMPUTED = {
    "core_attn": ("*.scores", "*.softmax", "*.paths"),
    "mlp": ("-.fc1", "-.activation", "-.weights"),
    "moe_act": ("E.activation",),
    "moe": ("E.router", "E.dispatched", "E.fc1", "E.activation", "E.shared", "E.weights", "E.shared_weights"),
    "shared_experts": ("E.shared", "E.shared_weights"),
    "mla_up_proj": ("*.qkv",),
    # The other norms share a kernel with the projection after them.
    "layernorm": ("E.norm",),
}


def part_bytes(shape: ModelSizes, letter: str, row: Row) -> dict[str, float]:
    """Bytes of every tensor that a part of a layer keeps, by name, if nothing is recomputed."""
    stream, norm = row.sharded_tokens * shape.hidden, BF16
    if row.fp8 and letter in "*-":
        # Each product keeps what it reads; latent attention begins with two.
        norm = row.input_bytes * (2 if letter == "*" and shape.mla else 1)
    tensors = {"input": BF16 * stream, "norm": norm * stream} | {
        **{"*": _attention, "-": _mlp, "E": _experts},
        **{"M": _mamba, "G": _delta_net},
    }[letter](shape, row)
    if row.hidden_dropout:
        tensors["dropout"] = stream
    if row.fp8:
        tensors |= _weight_copies(shape, letter, row)
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
    kept = kept_bytes(shape, layer, row)
    again = sum(sum(part_bytes(shape, letter, row).values()) for letter in layer) - kept
    # Gradients are in bfloat16; those of a product's output are rounded, too, once for each of its two products.
    parts = [part_bytes(shape, letter, replace(row, fp8="")) for letter in layer]
    widest = max(sum(size for name, size in tensors.items() if name in _WIDE) for tensors in parts)
    outputs = [size for tensors in parts for name, size in tensors.items() if name in ("input", "qkv", "fc1")]
    rounded = row.input_bytes * max(outputs) if row.fp8 else 0.0
    return again + widest + parts[0]["input"] + rounded


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
    ranks = mla.query_rank + mla.kv_rank
    return tensors | {
        "down": row.sharded_tokens * (BF16 * (ranks + mla.rotary) + row.input_bytes * ranks),
        "qkv": BF16 * row.tokens * heads * (2 * (mla.plain + mla.rotary) + mla.value),
        "core": BF16 * row.tokens * heads * mla.value,
    }


def _mlp(shape: ModelSizes, row: Row) -> dict[str, float]:
    width = row.tokens * shape.ffn / row.tp
    return {"fc1": BF16 * width * shape.fc1_factor, "activation": row.input_bytes * width}


def _experts(shape: ModelSizes, row: Row) -> dict[str, float]:
    received = row.sharded_tokens * shape.topk * row.etp * row.imbalance
    if row.fp8:
        received += shape.experts / row.ep * (_EXPERT_ROWS.get(row.fp8, 16) - 1) / 2
    width, shared = received * shape.expert_ffn / row.etp, row.tokens * shape.shared_ffn / row.tp
    return {
        "router": 3 * FP32 * row.sharded_tokens * shape.experts,
        "dispatched": row.input_bytes * received * (shape.latent or shape.hidden),
        "fc1": BF16 * width * shape.fc1_factor,
        "activation": row.input_bytes * width,
        "shared": shared * (BF16 * shape.fc1_factor + row.input_bytes),
    }


def _weight_copies(shape: ModelSizes, letter: str, row: Row) -> dict[str, float]:
    """Bytes of the FP8 copies of a part's weights: no training loop tells Transformer Engine when to keep them."""
    hidden, mla = shape.hidden, shape.mla
    of_mlp = (shape.fc1_factor + 1) * hidden
    found = {
        "*": {"weights": 2 * (shape.heads + shape.kv_heads) * shape.head_dim * hidden / row.tp},
        "-": {"weights": of_mlp * shape.ffn / row.tp},
        "E": {
            "weights": of_mlp * shape.experts / row.ep * shape.expert_ffn / row.etp,
            "shared_weights": of_mlp * shape.shared_ffn / row.tp,
        },
    }.get(letter, {})  # the others are refused in FP8
    if letter == "*" and mla is not None:
        queries, width = shape.heads * (mla.plain + mla.rotary) / row.tp, mla.kv_rank + mla.rotary
        asked = mla.query_rank * (hidden + queries) if mla.query_rank else hidden * queries
        values = shape.heads / row.tp * (mla.kv_rank * (mla.plain + mla.value) + mla.value * hidden)
        found = {"weights": asked + hidden * width + values}
    return {name: row.weight_copy_bytes * size for name, size in found.items()}


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
