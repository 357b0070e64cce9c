# SPDX-License-Identifier: Apache-2.0
"""Weights in FP8 as an engine keeps them: the form, and the layers that stay in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from mrl.config.model import ModelSizes
from mrl.config.schema.generation import GenerationConfig

MX = "mxfp8"
FORMS = ("fp8_per_block", "fp8_per_channel", "fp8_per_tensor", MX)
"""vLLM's names of its online methods: a scale for each block of 128 x 128, for each output, for a whole matrix, or a
power of two for each 32 inputs of an output.
"""

BLOCK = 128
MX_BLOCK = 32

KEPT = (
    "*.gate",
    "*.shared_expert_gate",
    "*.mixer.in_proj",
    "*.mixer.out_proj",
    "*.linear_attn.*",
    "*.conv1d",
    "*.kv_b_proj",
)
"""Linear layers that stay in bfloat16 in every model, by vLLM's names: routers, whose rounding would send tokens to
other experts; Mamba's and delta nets', whose state keeps every error; and the one that latent attention keeps a product
of.
"""


def form_of(generation: GenerationConfig, sizes: ModelSizes) -> str:
    """The form of an engine's FP8 weights: the chosen one, or blocks as in NeMo RL where experts are whole blocks."""
    chosen = generation.vllm_kwargs.get("quantization")
    if chosen is not None:
        return str(chosen)
    if generation.vllm_cfg.is_mx:
        return MX
    return "fp8_per_block" if has_whole_blocks(generation, sizes) else "fp8_per_channel"


def has_whole_blocks(generation: GenerationConfig, sizes: ModelSizes) -> bool:
    """True if a worker's part of each expert is of whole blocks; vLLM pads others, where no refit writes."""
    parallel = generation.parallel
    width = sizes.expert_ffn // (parallel.tp if parallel.ep == 1 else 1)
    return not sizes.experts or (width % BLOCK == 0 and (sizes.latent or sizes.hidden) % BLOCK == 0)


def input_widths(tp: int, sizes: ModelSizes) -> list[int]:
    """Inputs of linear layers that can be in FP8, as `tp` ranks or workers cut them; experts aside."""
    mla = sizes.mla
    heads = sizes.heads * (mla.value if mla else sizes.head_dim)
    lora = [mla.query_rank] if mla else []
    return [sizes.hidden, sizes.latent, *lora, heads // tp, sizes.ffn // tp, sizes.shared_ffn // tp]


def kept_layers(generation: GenerationConfig, sizes: ModelSizes) -> list[str]:
    """Patterns of the names of layers that stay in bfloat16, for vLLM's `ignore`."""
    vllm, num_layers = generation.vllm_cfg, len(sizes.layers)
    first = range(min(vllm.num_first_layers_in_bf16, num_layers))
    last = range(max(num_layers - vllm.num_last_layers_in_bf16, 0), num_layers)
    layers = [f"*.layers.{layer}.*" for layer in sorted({*first, *last})]
    return [*KEPT, *layers, *(f"*{part}*" for part in vllm.quantization_ignored_layer_kws or ())]


_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_NO_LINEAR = ("model.embed_tokens", "lm_head")


def quantised_bytes(name: str, shape: Sequence[int], form: str, kept: Sequence[str]) -> int | None:
    """Bytes of a tensor's FP8 values and scales in a worker of an engine; None: it stays as it is.

    `name` is vLLM's, `kept` are patterns of `kept_layers`. vLLM's own choice, as its models make it; the tests hold the
    two against each other.
    """
    module, _, leaf = name.rpartition(".")
    is_expert = leaf in ("w13_weight", "w2_weight")
    if module in _NO_LINEAR or not (is_expert or (leaf == "weight" and len(shape) == 2)):
        return None
    parent, _, last = module.rpartition(".")
    if any(fnmatchcase(f"{parent}.{part}", pattern) for part in _FUSED.get(last, (last,)) for pattern in kept):
        return None
    *experts, rows, columns = shape
    scale_bytes = {
        "fp8_per_tensor": 4,
        "fp8_per_channel": 4 * rows,
        "fp8_per_block": 4 * -(-rows // BLOCK) * -(-columns // BLOCK),
        MX: rows * columns // MX_BLOCK,
    }[form]
    return math.prod(experts) * (rows * columns + scale_bytes)
