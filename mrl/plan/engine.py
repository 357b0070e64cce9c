# SPDX-License-Identifier: Apache-2.0
"""Memory of a vLLM engine on one GPU: weights, KV cache and Mamba state, and how many sequences of a length fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.config.model import ModelSizes
from mrl.plan.activations import BF16, FP32

KERNEL_BLOCK = 16
_CONVOLUTION = 4


@dataclass(frozen=True)
class CacheLayout:
    """Blocks of vLLM's cache (vllm/v1/core/kv_cache_utils.py): all groups of layers draw equal blocks from one pool."""

    block_tokens: int
    block_bytes: int
    attention_groups: int
    state_groups: int
    states: int
    """Blocks of Mamba states of each sequence in each group of such layers, however long the sequence is."""

    @property
    def state_blocks(self) -> int:
        """Blocks of Mamba states of each sequence."""
        return self.state_groups * self.states

    def concurrency(self, cache_bytes: float, tokens: int) -> float:
        """Sequences of a length that fit at once."""
        blocks_of_each = self.attention_groups * -(-tokens // self.block_tokens) + self.state_blocks
        return int(cache_bytes // self.block_bytes) / blocks_of_each


def token_bytes(shape: ModelSizes, tp: int, element_bytes: int = BF16) -> int:
    """Keys and values of one token in one attention layer on a worker; several workers hold a shared key head."""
    return 2 * max(1, shape.kv_heads // tp) * shape.head_dim * element_bytes


def state_bytes(
    shape: ModelSizes, tp: int, element_bytes: int = BF16, ssm_bytes: int = BF16, num_proposed: int = 0
) -> int:
    """Mamba layer state of a sequence on a worker: the convolution input's end, also for proposed tokens, and
    scan's.
    """
    groups = shape.mamba_groups if shape.mamba_groups == 1 else shape.mamba_groups // tp
    channels = shape.mamba_inner // tp + 2 * groups * shape.mamba_state
    scan = shape.mamba_heads // tp * shape.mamba_head_dim * shape.mamba_state
    return (_CONVOLUTION - 1 + num_proposed) * channels * element_bytes + scan * ssm_bytes


def cache_layout(
    shape: ModelSizes,
    tp: int,
    *,
    element_bytes: int = BF16,
    ssm_bytes: int = BF16,
    shares_prefixes: bool = True,
    kernel_block: int = KERNEL_BLOCK,
    num_proposed: int = 0,
    drafter: str = "",
    pp: int = 1,
) -> CacheLayout:
    """The layout of a model's cache on a worker, with a drafter of layers with these letters.

    vLLM spreads the layers of each of the model's groups over `pp` stages: a worker's block has its part of a group. A
    sequence has a Mamba state, and one after each proposed token; with prefixes shared two more, of its last whole
    block and, but for gated delta nets, of the end of its prompt (`MambaSpec.max_memory_usage_bytes` of
    vllm/v1/kv_cache_interface.py).
    """
    letters = "".join(shape.layers) + drafter
    attention, mamba = letters.count("*"), letters.count("M") + letters.count("G")
    per_token = token_bytes(shape, tp, element_bytes)
    if not mamba:
        return CacheLayout(kernel_block, kernel_block * per_token * -(-attention // pp), 1, 0, 0)
    page = state_bytes(shape, tp, element_bytes, ssm_bytes, num_proposed)
    states = 1 + num_proposed + (shares_prefixes * (1 if shape.has_delta_nets else 2))
    if not attention:
        return CacheLayout(1, page * -(-mamba // pp), 0, 1, states)
    # Both kinds of blocks have one size: attention blocks grow to a state's size, and states are padded to theirs.
    block = kernel_block * math.ceil(page / (kernel_block * per_token))
    fewest, most = sorted((attention, mamba))
    group = most if most < 1.5 * fewest else fewest
    return CacheLayout(
        block, block * per_token * -(-group // pp), math.ceil(attention / group), math.ceil(mamba / group), states
    )


def forward_bytes(shape: ModelSizes, tp: int, *, batched_tokens: int, ep: int = 1, num_groups: int = 1) -> float:
    """Estimates a forward pass of `batched_tokens`, beyond weights, cache. Several groups gather tokens, sum results.

    Experts work in two buffers, each as wide as what goes in or comes out, for all tokens that were gathered, whoever
    holds their experts (`TritonExperts.workspace_shapes` of
    vllm/model_executor/layers/fused_moe/experts/triton_moe.py).
    """
    widths = [shape.ffn * (shape.fc1_factor + 1) / tp]
    if shape.experts:
        width, inner = shape.latent or shape.hidden, shape.expert_ffn / (tp if ep == 1 else 1)
        widths.append(num_groups * shape.topk * (max(inner, width) + max(shape.fc1_factor * inner, width)))
    if shape.mamba_heads:
        widths.append((shape.mamba_projection + 2 * shape.mamba_inner) / tp)
    exchanged = 2 * num_groups * (shape.latent or shape.hidden) if num_groups > 1 else 0
    return BF16 * batched_tokens * (4 * shape.hidden + max(widths) + exchanged)


def sampler_bytes(shape: ModelSizes, num_rows: int) -> float:
    """Logits of tokens that are drawn or checked at once, their float32 copy, and the sampler's sorted copy."""
    return 3.0 * FP32 * num_rows * shape.vocabulary
