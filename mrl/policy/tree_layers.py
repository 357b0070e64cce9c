# SPDX-License-Identifier: Apache-2.0
"""Megatron's attention and Mamba layers on prefix trees, which come as parameters of packed rows.

U tokens of a tree (`mrl.data.prefixes`), P tokens of paths, C channels, H heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import Attention, SelfAttention
from torch import Tensor, nn

from mrl.policy.mamba_torch import MAX_CHUNK, Mixer
from mrl.policy.trees import tree_mix

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mrl.data.packing import PrefixTree


@dataclass
class TreeParams(PackedSeqParams):
    """Parameters of a tree for Megatron's layers, to which it is one sequence: rotary positions are looked up."""

    tree: PrefixTree | None = None
    depths_U: Tensor = field(default_factory=lambda: torch.empty(0))
    """int64, place of each token in its path."""

    @property
    def nodes(self) -> PrefixTree:
        assert self.tree is not None
        return self.tree


def tree_params(tree: PrefixTree, position_ids_T: Tensor, device: torch.device, **further: object) -> TreeParams:
    """The parameters of a tree for Megatron's layers; `position_ids_T` are those of its row."""
    bounds = torch.tensor([0, len(tree.positions_U)], dtype=torch.int32, device=device)
    depths_U = position_ids_T[tree.positions_U]
    longest = max(len(tree.positions_U), int(depths_U.max()) + 1)
    return TreeParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tree=tree,
        depths_U=depths_U.to(device),
        **further,
    )


def accept_trees(model: nn.Module, *, has_fused_attention: bool) -> None:
    """Lets the layers of a chunk compute trees, too; rows without one are computed as before.

    `has_fused_attention`: Transformer Engine computes attention, which gets the keys and values of every path.
    """
    for module in list(model.modules()):
        if isinstance(module, MambaMixer):
            _accept_states(module)
        elif isinstance(module, SelfAttention):
            module.register_forward_pre_hook(_look_up_rotary, with_kwargs=True)
            if has_fused_attention:
                core = cast("nn.Module", module.core_attention)
                core.register_forward_pre_hook(_gather_paths, with_kwargs=True)
        elif isinstance(module, Attention):
            raise RuntimeError(f"policy.share_prefixes=true, and {type(module).__name__} does not compute trees")


def _look_up_rotary(
    module: nn.Module, arguments: tuple[object, ...], named: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Gives attention the rotary embedding of each token's place in its path, in place of the first U places."""
    params, rotary = named.get("packed_seq_params"), named.get("rotary_pos_emb")
    if not isinstance(params, TreeParams) or rotary is None:
        return arguments, dict(named)
    return arguments, {**named, "rotary_pos_emb": cast("Tensor", rotary).index_select(0, params.depths_U)}


def _gather_paths(
    module: nn.Module, arguments: tuple[Tensor, ...], named: Mapping[str, object]
) -> tuple[tuple[Tensor, ...], dict[str, object]]:
    """Gives Transformer Engine each node as a sequence whose keys and values are those of its path."""
    params = named.get("packed_seq_params")
    if not isinstance(params, TreeParams):
        return arguments, dict(named)
    tree, (query, key, value, *others) = params.nodes, arguments
    paths = [tree.path_tokens(node) for node in range(len(tree.lengths))]
    tokens_P = torch.cat(paths).to(query.device)
    bounds = [
        torch.tensor([0, *lengths], device=query.device).cumsum(0).int()
        for lengths in (tree.lengths, [len(path) for path in paths])
    ]
    of_nodes = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds[0],
        cu_seqlens_kv=bounds[1],
        cu_seqlens_q_padded=bounds[0],
        cu_seqlens_kv_padded=bounds[1],
        max_seqlen_q=max(tree.lengths),
        max_seqlen_kv=max(map(len, paths)),
    )
    # Megatron hands the name on, and has no member of this name: the last query sees all keys.
    mask = SimpleNamespace(name="padding_causal_bottom_right")
    gathered = (query, key.index_select(0, tokens_P), value.index_select(0, tokens_P), *others)
    return gathered, {**named, "packed_seq_params": of_nodes, "attn_mask_type": mask}


def _accept_states(mixer: MambaMixer) -> None:
    plain = mixer._ssm_training

    def train(zxbcdt: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        if isinstance(packed_seq_params, TreeParams):
            return _mamba(mixer, zxbcdt, packed_seq_params.nodes)
        return plain(zxbcdt, packed_seq_params)

    mixer._ssm_training = train


def _mamba(mixer: MambaMixer, zxbcdt_U1C: Tensor, tree: PrefixTree) -> Tensor:
    """Convolution, scan, gate and norm of `MambaMixer`, [U, 1, H * D], before the output projection."""
    parts = mixer.cp
    D = parts.get_D().float()
    weights = Mixer(
        parts.get_conv1d_weight().squeeze(1).float(),
        parts.get_conv1d_bias().float(),
        parts.get_dt_bias().float(),
        -torch.exp(parts.get_A_log().float()),
        D.unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else D,
        num_groups=parts.ngroups_local_tpcp,
        head_dim=mixer.headdim,
        chunk=min(mixer.chunk_size, MAX_CHUNK),
    )
    inner = len(weights.dt_bias_H) * weights.head_dim
    z, xbcdt = zxbcdt_U1C.squeeze(1).split([inner, zxbcdt_U1C.shape[-1] - inner], dim=-1)
    y = (tree_mix(weights, xbcdt.float(), tree) * F.silu(z.float())).to(zxbcdt_U1C.dtype).unsqueeze(1)
    return mixer.norm(y) if mixer.rmsnorm else y
