# SPDX-License-Identifier: Apache-2.0
"""What a vLLM engine holds on one GPU: weights, KV cache and Mamba state, and how many sequences of a length fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.plan.activations import BF16, FP32, Shape

# Tokens of a block of the KV cache that vLLM's attention kernels take on a GPU.
KERNEL_BLOCK = 16
_CONVOLUTION = 4


@dataclass(frozen=True)
class CacheLayout:
    """How vLLM cuts its cache into blocks (vllm/v1/core/kv_cache_utils.py): all groups of layers draw blocks of one size from one pool."""

    block_tokens: int
    """Tokens of a sequence in one block of an attention group."""
    block_bytes: int
    """Of one block, over the layers of a group, on one worker."""
    attention_groups: int
    state_blocks: int
    """Blocks of Mamba states of each sequence, however long it is."""

    def blocks_of(self, tokens: int) -> int:
        """Blocks of a sequence."""
        return self.attention_groups * -(-tokens // self.block_tokens) + self.state_blocks

    def concurrency(self, cache_bytes: float, tokens: int) -> float:
        """Sequences of a length that fit at once."""
        return int(cache_bytes // self.block_bytes) / self.blocks_of(tokens)


def token_bytes(shape: Shape, tp: int, element_bytes: int = BF16) -> int:
    """Keys and values of one token in one attention layer on a worker; several workers hold a key head that they share."""
    return 2 * max(1, shape.kv_heads // tp) * shape.head_dim * element_bytes


def state_bytes(shape: Shape, tp: int, element_bytes: int = BF16, ssm_bytes: int = BF16) -> int:
    """State of one sequence in one Mamba layer on a worker: the end of the convolution's input, and the scan's."""
    # A single group is copied to every worker.
    groups = shape.mamba_groups if shape.mamba_groups == 1 else shape.mamba_groups // tp
    channels = shape.mamba_inner // tp + 2 * groups * shape.mamba_state
    scan = shape.mamba_heads // tp * shape.mamba_head_dim * shape.mamba_state
    return (_CONVOLUTION - 1) * channels * element_bytes + scan * ssm_bytes


def cache_layout(
    shape: Shape,
    tp: int,
    *,
    element_bytes: int = BF16,
    ssm_bytes: int = BF16,
    shares_prefixes: bool = True,
    kernel_block: int = KERNEL_BLOCK,
) -> CacheLayout:
    """The layout of a model's cache on a worker. With prefixes shared, a sequence has a second Mamba state, of its last whole block."""
    letters = "".join(shape.layers)
    attention, mamba = letters.count("*"), letters.count("M")
    per_token = token_bytes(shape, tp, element_bytes)
    if not mamba:
        return CacheLayout(kernel_block, kernel_block * per_token * attention, 1, 0)
    page = state_bytes(shape, tp, element_bytes, ssm_bytes)
    if not attention:
        return CacheLayout(1, page * mamba, 0, 1)
    # Blocks of both kinds have one size: attention blocks grow to that of a state, and states are padded to them.
    block = kernel_block * math.ceil(page / (kernel_block * per_token))
    fewest, most = sorted((attention, mamba))
    group = most if most < 1.5 * fewest else fewest
    states = math.ceil(mamba / group) * (2 if shares_prefixes else 1)
    return CacheLayout(block, block * per_token * group, math.ceil(attention / group), states)


def profiled_bytes(shape: Shape, tp: int, *, batched_tokens: int, num_seqs: int) -> float:
    """What vLLM measures beside the weights at its start: a forward pass of `batched_tokens`, and the sampler's logits."""
    widths = [shape.ffn * (shape.fc1_factor + 1) / tp]
    if shape.experts:
        widths.append(shape.topk * ((shape.latent or shape.hidden) + shape.expert_ffn * (shape.fc1_factor + 1) / tp))
    if shape.mamba_heads:
        widths.append((shape.mamba_projection + 2 * shape.mamba_inner) / tp)
    # Logits, their copy in float32, and the sorted one of the sampler.
    return BF16 * batched_tokens * (4 * shape.hidden + max(widths)) + 3 * FP32 * num_seqs * shape.vocabulary
