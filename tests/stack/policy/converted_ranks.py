# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks of the test of models only converted: Megatron's own model, filled by our layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from conversion.boxes import lengths
from conversion.families.common import MegatronCoords, MegatronParallel
from conversion.families.registry import family
from conversion.tensors import box_view
from mrl.config.schema.megatron import MegatronConfig
from tests.stack.ranks import Rank


def latent_attention_logits(rank: Rank, tp: int, folder: Path, sequence: list[int]) -> np.ndarray:
    """This rank's columns of a deepseek_v3 folder's logits, [tokens, vocabulary / tp], by Megatron's local GPTModel."""
    from mrl.policy import parallel
    from mrl.policy.weights import live_tensors

    megatron = MegatronConfig(tensor_model_parallel_size=tp)
    rank.initialize(megatron)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    if not isinstance(multi_latent_attention.TELinear, type):
        # Asked for by isinstance() even where Transformer Engine is absent.
        multi_latent_attention.TELinear = type("TELinear", (), {})

    class CoreAttention(DotProductAttention):
        """Megatron's own but for two arguments, which only Transformer Engine's takes."""

        def __init__(
            self, *args: object, k_channels: int | None = None, v_channels: int | None = None, **kwargs: object
        ) -> None:
            super().__init__(*args, **kwargs)

    hf_config = json.loads((folder / "config.json").read_text())
    found = family(hf_config)
    arguments = found.megatron_arguments(hf_config)
    config = MLATransformerConfig(
        **arguments["transformer"] | dict(activation_func=torch.nn.functional.silu),
        tensor_model_parallel_size=tp,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    model_arguments = arguments["model"]
    vocabulary = -(-int(str(model_arguments.pop("vocab_size"))) // (128 * tp)) * 128 * tp
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
    model = GPTModel(config, spec, vocabulary, **model_arguments).eval()
    layout = found.megatron_layout(hf_config, MegatronParallel(tp=tp), MegatronCoords(tp=rank.rank), "float32")
    tensors, weights = live_tensors(model, 0), load_file(folder / "model.safetensors")
    assert tensors.keys() == layout.keys(), tensors.keys() ^ layout.keys()
    with torch.no_grad():
        for slot, content in layout.items():
            assert tuple(tensors[slot].shape) == content.shape, slot
            tensors[slot].zero_()
            for piece in content.pieces:
                box_view(tensors[slot], piece.local).copy_(
                    box_view(weights[piece.name], piece.box).view(lengths(piece.local))
                )
        tokens = torch.tensor([sequence])
        mask = torch.ones(len(sequence), len(sequence)).tril()[None, None] < 0.5
        logits = model(tokens, torch.arange(len(sequence))[None], mask)
    parallel.shutdown()
    return logits[0].numpy()
