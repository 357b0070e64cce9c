"""Layer specs of the hybrid stack and of transformers: Transformer Engine's where it is installed, Megatron's own modules elsewhere.

Megatron lacks three modules without Transformer Engine: a norm that knows of sequence parallelism and the linear layer of latent experts,
which are here, and a core attention over packed sequences. Checkpoints use Transformer Engine's names in both cases.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from mrl.policy import compat
from mrl.policy.attention import PackedCoreAttention


def hybrid_stack_spec() -> ModuleSpec:
    """The spec of a stack of Mamba, attention, MLP and MoE layers."""
    if compat.HAVE_TE:
        from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

        return mamba_stack_spec
    return _local_stack_spec()


def gpt_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The specs of the transformer layers of a chunk of this pipeline stage (None: of the whole stage), and of the final norm."""
    if compat.HAVE_TE:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    start = get_transformer_layer_offset(config, vp_stage)
    chunk = _has_experts(config)[start : start + get_num_layers_to_build(config, vp_stage)]
    specs = {has_experts: _local_gpt_layer_spec(config, has_experts) for has_experts in set(chunk)}
    return TransformerBlockSubmodules(layer_specs=[specs[has_experts] for has_experts in chunk], layer_norm=TorchNorm)


class TorchNorm:
    """Builds torch's RMS norm, marked so that under sequence parallelism its gradient is summed over the tp group."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float | None = None) -> nn.RMSNorm:
        assert config.normalization == "RMSNorm", config.normalization
        norm = nn.RMSNorm(hidden_size, eps=config.layernorm_epsilon if eps is None else eps, dtype=config.params_dtype)
        setattr(norm.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron's mark on a parameter)
        return norm


class DuplicatedLinear(MegatronModule):
    """The projections of latent experts: Transformer Engine's linear layer in its mode "duplicated", whole on every tp rank."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        parallel_mode: str,
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        is_expert: bool,
    ) -> None:
        super().__init__(config)
        assert parallel_mode == "duplicated" and not (bias or skip_bias_add or skip_weight_param_allocation or is_expert)
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (Megatron's mark on a parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The projection of `x`, and None for the bias."""
        return F.linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """Nothing; Transformer Engine's layer insists on the key in a checkpoint."""

    def set_extra_state(self, state: object) -> None:
        """Ignores what Transformer Engine's layer has written."""


class _LocalSpecProvider(LocalSpecProvider):
    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return PackedCoreAttention


def _local_stack_spec() -> ModuleSpec:
    """megatron.core.models.mamba.mamba_layer_specs.mamba_stack_spec, of local modules."""
    backend = _LocalSpecProvider()
    column, row, norm = backend.column_parallel_linear(), backend.row_parallel_linear(), backend.layer_norm()
    mamba_layer = ModuleSpec(
        module=compat.MambaLayer,
        submodules=compat.MambaLayerSubmodules(
            norm=norm,
            mixer=ModuleSpec(module=compat.MambaMixer, submodules=compat.MambaMixerSubmodules(in_proj=column, out_proj=row)),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )
    attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(linear_qkv=column, core_attention=backend.core_attention(), linear_proj=row),
            ),
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
        ),
    )
    mlp_layer = ModuleSpec(
        module=compat.MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
        ),
    )
    moe_layer = ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm,
            # The number of experts comes from the config; the spec only asks that it is not None.
            mlp=get_moe_module_spec_for_backend(backend, num_experts=1, moe_grouped_gemm=False),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return ModuleSpec(
        module=compat.MambaStack,
        submodules=compat.MambaStackSubmodules(
            mamba_layer=mamba_layer, attention_layer=attention_layer, mlp_layer=mlp_layer, moe_layer=moe_layer
        ),
    )


def _has_experts(config: TransformerConfig) -> list[bool]:
    """By layer of the whole model; `moe_layer_freq` lists the layers, or says that every n-th one has experts."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(config.num_layers)]
    return [value == 1 for value in frequency]


def _local_gpt_layer_spec(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    """megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec with this module's norm and core attention.

    Megatron's maps the norm before experts to a key that Transformer Engine's spec does not have; only dense layers fuse that norm.
    """
    backend = _LocalSpecProvider()
    norm = backend.layer_norm()
    qk_norm = norm if config.qk_layernorm else IdentityOp
    keys = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not has_experts:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(backend, num_experts=config.num_moe_experts if has_experts else None),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )
