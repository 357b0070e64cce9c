# SPDX-License-Identifier: Apache-2.0
"""Layers of the hybrid stack and of transformers: Transformer Engine's on GPUs if installed, Megatron's own elsewhere.

This file has the modules that Megatron lacks without Transformer Engine: a norm for sequence parallelism, the linear
layer of latent experts, and core attention and the gated delta net over packed rows. Checkpoints use Transformer
Engine's names in both cases.

What differs between versions of megatron-core stands in versions.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE as IS_TE_IMPORTED
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mrl.gpus import on_gpu
from mrl.kernels import are_used, is_installed
from mrl.policy import versions
from mrl.policy.delta_torch import packed_convolution
from mrl.policy.packed import packed_attention, zigzag_attention
from mrl.policy.tree_layers import TreeParams
from mrl.policy.trees import tree_attention


class HeadNorm(MegatronModule):
    """RMS norm of each head's output, whole on every tp rank; its weight is the factor itself, as in the file.

    Megatron's spec takes the norm of the model there, whose weight is the factor less one.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x_THV: Tensor, gate_THV: Tensor) -> Tensor:
        """The normalized `x_THV` times silu of the gate, in its dtype. Its backward pass is collective over tp."""
        # Each rank has the gradient of its own heads.
        weight_V = copy_to_tensor_model_parallel_region(self.weight)
        normalized = F.rms_norm(x_THV.float(), weight_V.shape, eps=self.eps) * weight_V.float()
        return (normalized * F.silu(gate_THV.float())).to(x_THV.dtype)


class DeltaNet(gated_delta_net.GatedDeltaNet):
    """Megatron's gated delta net, its weights and checkpoints; each sequence of a packed row has a state of its own.

    TODO(when megatron-core 0.19 is the oldest supported, and computes rows of any host): take its forward pass.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and missing bias for hidden states [T / sp, 1, hidden] of this rank. Collective over the tp group."""
        assert packed_seq_params is not None, "packed rows are the only batch format"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        keys, values, heads = (size // self.tp_size for size in (self.qk_dim, self.v_dim, self.num_value_heads))
        projected, _ = self.in_proj(hidden_states)
        mixed_TC, gate_TC, beta_TH, alpha_TH = projected.squeeze(1).split(
            [2 * keys + values, values, heads, heads], dim=-1
        )
        mixed_TC = F.silu(packed_convolution(mixed_TC, self.conv1d.weight.squeeze(1), cu_seqlens)).to(mixed_TC.dtype)
        query, key, value = (
            part.unflatten(-1, (-1, width)).unsqueeze(0)
            for part, width in zip(
                mixed_TC.split([keys, keys, values], dim=-1),
                (self.key_head_dim, self.key_head_dim, self.value_head_dim),
                strict=True,
            )
        )
        shared = self.num_value_heads // self.num_key_heads
        decay_TH = -self.A_log.float().exp() * F.softplus(alpha_TH.float() + self.dt_bias.float())
        output, _ = gated_delta_net.chunk_gated_delta_rule(
            query.repeat_interleave(shared, dim=2),
            key.repeat_interleave(shared, dim=2),
            value.contiguous(),
            g=decay_TH.unsqueeze(0),
            beta=beta_TH.sigmoid().unsqueeze(0),
            cu_seqlens=cu_seqlens.long(),
            use_qk_l2norm_in_kernel=True,
        )
        output_THV = self.out_norm(output.squeeze(0), gate_TC.unflatten(-1, (-1, self.value_head_dim)))
        return self.out_proj(output_THV.flatten(1).unsqueeze(1))


logger = logging.getLogger(__name__)

HAVE_TE = are_used("transformer_engine", is_imported=IS_TE_IMPORTED)
"""True if this process builds Transformer Engine's layers, and false if it builds Megatron's own."""


def hybrid_stack_spec(*, is_recomputed: bool = False) -> ModuleSpec:
    """Spec of a stack of Mamba, attention, MLP and MoE layers that `is_recomputed` recomputes in the backward pass."""
    spec = versions.hybrid_stack_spec
    if not HAVE_TE:
        # Local modules in place of Transformer Engine's, which fuse a norm into the linear layer behind it.
        layers = spec.submodules
        mamba, attention, mlp, moe = (
            layer.submodules
            for layer in (layers.mamba_layer, layers.attention_layer, layers.mlp_layer, layers.moe_layer)
        )
        mamba.norm = attention.input_layernorm = mlp.pre_mlp_layernorm = moe.pre_mlp_layernorm = TorchNorm
        mixer = mamba.mixer.submodules
        heads = attention.self_attention.submodules
        dense = versions.submodules_of(mlp.mlp)
        mixer.in_proj = heads.linear_qkv = dense.linear_fc1 = ColumnParallelLinear
        mixer.out_proj = heads.linear_proj = dense.linear_fc2 = RowParallelLinear
        heads.core_attention = PackedCoreAttention
        # The config gives the number of experts; the spec only needs a value that is not None.
        moe.mlp = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=1, moe_grouped_gemm=False)
        mamba.sharded_state_dict_keys_map = {"norm.": "mixer.in_proj.layer_norm_"}
        attention.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        mlp.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    return replace(spec, module=RecomputedStack) if is_recomputed and versions.IS_OLD else spec


def gpt_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Specs of the transformer layers of a chunk of this pipeline stage (None: the whole stage) and the final norm."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=HAVE_TE, vp_stage=vp_stage)
    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = FullRankAttention
    if HAVE_TE:
        return _with_delta_nets(block, config, vp_stage)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedCoreAttention
        if config.multi_latent_attention:
            # Whole on every tp rank, as Transformer Engine's. Of Megatron's own, which are cut, each rank would get the
            # gradient of the keys' rotary part from its own heads alone.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = DuplicatedLinear
            attention.kv_layernorm = TorchNorm
            attention.q_layernorm = None if config.q_lora_rank is None else TorchNorm
            parts.sharded_state_dict_keys_map = {
                "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
                "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            }
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = TorchNorm
        if isinstance(versions.submodules_of(parts.mlp), MoESubmodules):
            # Megatron maps the norm before experts to a key that Transformer Engine's spec lacks: only dense layers
            # fuse that norm.
            parts.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    block.layer_norm = TorchNorm
    return _with_delta_nets(block, config, vp_stage)


def _with_delta_nets(
    block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The block with gated delta nets for attention in the layers that `linear_attention_freq` lists.

    Megatron builds such blocks of Transformer Engine's layers alone.
    """
    if config.linear_attention_freq is None:
        return block
    if on_gpu() and not is_installed("fla"):
        logger.warning(
            "flash-linear-attention is not installed: gated delta nets train in plain torch, many times slower; "
            "pip install flash-linear-attention"
        )
    column, row = (
        (TELayerNormColumnParallelLinear, TERowParallelLinear) if HAVE_TE else (ColumnParallelLinear, RowParallelLinear)
    )
    net = ModuleSpec(
        module=DeltaNet, submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=HeadNorm, out_proj=row)
    )
    offset, are_linear = get_transformer_layer_offset(config, vp_stage=vp_stage), config.linear_attention_freq
    assert isinstance(are_linear, list)
    for index, layer in enumerate(block.layer_specs):
        if are_linear[offset + index]:
            keys = dict(layer.submodules.sharded_state_dict_keys_map)
            if not HAVE_TE:
                keys["input_layernorm."] = "self_attention.in_proj.layer_norm_"
            # Megatron's layers of one kind share a spec.
            parts = replace(layer.submodules, self_attention=net, sharded_state_dict_keys_map=keys)
            block.layer_specs[index] = replace(layer, submodules=parts)
    return block


class TorchNorm:
    """Builds torch's RMS norm, marked so that under sequence parallelism its gradient is summed over the tp group."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float | None = None) -> nn.RMSNorm:
        assert config.normalization == "RMSNorm", config.normalization
        kind = ZeroCentredNorm if config.layernorm_zero_centered_gamma else nn.RMSNorm
        norm = kind(hidden_size, eps=config.layernorm_epsilon if eps is None else eps, dtype=config.params_dtype)
        setattr(norm.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron's mark on a parameter)
        return norm


class ZeroCentredNorm(nn.RMSNorm):
    """RMS norm whose weight is the factor less one."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


Norm = TENorm if HAVE_TE else TorchNorm
ColumnLinear = TEColumnParallelLinear if HAVE_TE else ColumnParallelLinear
"""Linear layer for layers that are in no spec; a norm is called with config, hidden_size and eps."""


class DuplicatedLinear(MegatronModule):
    """Latent projections: Transformer Engine's linear layer in mode "duplicated", whole on every tp rank."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        parallel_mode: str,
        name: str | None = None,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        **features: bool,
    ) -> None:
        super().__init__(config)
        assert parallel_mode == "duplicated" and tp_group is None and not any(features.values()), features
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron's mark on a parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        # The second value is the missing bias.
        return F.linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """None: Transformer Engine's layer insists on the key in a checkpoint."""

    def set_extra_state(self, state: object) -> None:
        """Ignores the state of Transformer Engine's layer."""


class PackedCoreAttention(MegatronModule):
    """Causal attention of each sequence of a packed row, grouped-query heads and context parallelism included."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.softmax_scale = softmax_scale
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        is_windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq or 1, layer_number)
        self.window = config.window_size[0] + 1 if is_windowed and config.window_size is not None else None
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: object,
        packed_seq_params: PackedSeqParams | None,
        **__: object,
    ) -> Tensor:
        """Attends from query [tokens, heads, head_dim] to key, value [tokens, groups, head_dim] of this cp rank.

        Collective over the cp group.
        """
        assert packed_seq_params is not None, "packed rows are the only batch format"
        if isinstance(packed_seq_params, TreeParams):
            return tree_attention(query, key, value, packed_seq_params.nodes, scale=self.softmax_scale)
        cu_seqlens, size, rank = packed_seq_params.cu_seqlens_q, self.cp_group.size(), self.cp_group.rank()
        if size == 1:
            return packed_attention(
                query,
                key,
                value,
                cu_seqlens,
                scale=self.softmax_scale,
                window=self.window,
                sinks_H=self.softmax_offset,
            )
        assert self.softmax_offset is None, "config rules refuse it"
        # Keys and values that heads share are small against the queries; the backward pass sums their gradients over
        # the ranks.
        keys, values = (gather_from_sequence_parallel_region(t, group=self.cp_group) for t in (key, value))
        return zigzag_attention(query, keys, values, cu_seqlens, cp_size=size, cp_rank=rank, scale=self.softmax_scale)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> dict[str, object]:
        """Checkpoint entries of the sinks, which are cut as heads are."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def part_pairs(chunk: nn.Module) -> None:
    """Makes experts' first linear layers, where gates and ups alternate, give all gates before all ups.

    Megatron's activations cut their input in two. Weights stay as files and engines have them.
    """

    def part(values_TF: Tensor) -> Tensor:
        return torch.cat([values_TF[..., ::2], values_TF[..., 1::2]], dim=-1)

    def give(module: nn.Module, inputs: object, result: tuple[Tensor, Tensor | None]) -> object:
        # Grouped layers of Transformer Engine have added their biases, and return none.
        output, bias = result
        return part(output), None if bias is None else part(bias)

    def copy(module: nn.Module, inputs: object, result: tuple[Tensor, Tensor]) -> object:
        # Megatron's local experts add their bias in place, which autograd forbids of what its linear layer returns.
        output, bias = result
        return output.clone(), bias

    for name, module in chunk.named_modules():
        if ".experts." in name and name.endswith(".linear_fc1"):
            module.register_forward_hook(give)
        elif ".local_experts." in name and name.endswith(".linear_fc2"):
            module.register_forward_hook(copy)


class FullRankAttention(MLASelfAttention):
    """Latent attention whose queries have full rank and no norm.

    From 0.17 on Megatron normalizes such queries wherever it normalizes keys, as no DeepSeek does.
    """

    def _resolve_qk_norm_config(self, submodules: object) -> dict[str, object]:
        # 0.16.1 has no such method.
        resolve: Callable[[object], dict[str, object]] = getattr(super(), "_resolve_qk_norm_config")  # noqa: B009
        return {**resolve(submodules), "linear_q_proj": ColumnLinear}


class RecomputedStack(versions.HybridStack):
    """Megatron's hybrid stack, which keeps only the inputs of groups of `recompute_num_layers`. No inference, no fp8.

    TODO(when megatron-core 0.17 is the oldest supported): drop it; only the stack of 0.16.1 silently ignores
    recompute_granularity="full".
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context: None = None,
        rotary_pos_emb: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the stage's layers, [tokens, 1, hidden]; recomputing a group repeats random numbers."""
        assert inference_context is None and not self.config.fp8
        hidden_states = hidden_states if self.pre_process else self.input_tensor
        whole = dict(
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            padding_mask=padding_mask,
        )

        def run_layers(layers: list[nn.Module], hidden_states: Tensor) -> Tensor:
            for layer in layers:
                if isinstance(layer, TransformerLayer):
                    hidden_states, _ = layer(hidden_states=hidden_states, **whole)
                else:
                    hidden_states = layer(
                        hidden_states=hidden_states, attention_mask=attention_mask, packed_seq_params=packed_seq_params
                    )
            return hidden_states

        group_size = self.config.recompute_num_layers
        for start in range(0, len(self.layers), group_size):
            run = partial(run_layers, list(self.layers)[start : start + group_size])
            if torch.is_grad_enabled():
                hidden_states = tensor_parallel.checkpoint(run, self.config.distribute_saved_activations, hidden_states)
            else:
                hidden_states = run(hidden_states)
        if self.post_process and self.post_layer_norm:
            hidden_states = self.final_norm(hidden_states)
        # Schedules free sent tensors, which therefore must not be views.
        return make_viewless_tensor(inp=hidden_states, requires_grad=hidden_states.requires_grad, keep_graph=True)
