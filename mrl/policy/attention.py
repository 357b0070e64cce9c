"""Core attention over packed rows by torch's SDPA, for hosts without Transformer Engine."""

from __future__ import annotations

import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.policy.context import zigzag_attention
from mrl.policy.packed import packed_layout


class PackedCoreAttention(MegatronModule):
    """Causal attention of each sequence of a packed row, grouped-query heads and context parallelism included."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self" and pg_collection is not None
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[tokens, heads, head_dim], from query [tokens, heads, head_dim] and key, value [tokens, groups, head_dim] of this cp rank.

        Collective over the cp group.
        """
        assert packed_seq_params is not None, "packed rows are the only batch format"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        if self.cp_group.size() == 1:
            return _whole_sequences(query, key, value, cu_seqlens, self.softmax_scale)
        # Keys and values are small beside the queries where heads share them; their gradients come back summed over the ranks.
        keys, values = (gather_from_sequence_parallel_region(t, group=self.cp_group) for t in (key, value))
        size, rank = self.cp_group.size(), self.cp_group.rank()
        return zigzag_attention(query, keys, values, cu_seqlens, cp_size=size, cp_rank=rank, scale=self.softmax_scale)


def _whole_sequences(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float | None) -> Tensor:
    # SDPA blocks its work itself, so long sequences need no coarser padding than short ones.
    layout = packed_layout(cu_seqlens.diff(), multiple=16, chunk=64)
    outputs = []
    for q, k, v in zip(*(layout.unpack(t) for t in (query, key, value)), strict=True):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        # Padding stands after a sequence's tokens, where the causal mask hides it from them.
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(output.transpose(1, 2))
    return layout.pack(outputs)
