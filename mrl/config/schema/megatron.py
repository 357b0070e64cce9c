# SPDX-License-Identifier: Apache-2.0
"""Section `policy.megatron_cfg`: parallel sizes, trained parts, optimizer and schedule. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from conversion.families.common import MegatronParallel
from mrl.config.fields import (
    AboveZero,
    Count,
    NotNegative,
    Only,
    Positive,
    Precision,
    Range,
    Share,
    ShareBelowOne,
    follows,
)

FactorInit = Literal["xavier", "normal", "kaiming", "zero"]


@dataclass
class PeftConfig:
    enabled: bool = False
    """Train only low-rank adapters (LoRA) of the linear layers."""
    target_modules: list[str] = field(default_factory=list)
    """Layers with adapters: names such as linear_qkv, linear_fc1, in_proj, or full names with wildcards. Empty = all
    linear layers.
    """
    exclude_modules: list[str] = field(default_factory=list)
    """Linear layers without adapters, in the same form. Only with empty `target_modules`."""
    dim: Positive = 8
    """Rank of the adapters."""
    alpha: AboveZero = 32
    """The adapters' product is scaled by alpha / dim."""
    dropout: ShareBelowOne = 0.0
    """Share of values that adapters drop in training."""
    dropout_position: Literal["pre", "post"] = "post"
    """Drop the adapters' input (pre) or their output (post)."""
    lora_A_init_method: FactorInit = "xavier"
    """Start of A: Xavier or normal (deviation 0.2) or Kaiming numbers, or zeros."""
    lora_B_init_method: FactorInit = "zero"
    """Start of B, likewise. A or B starts as zeros, so that training starts from the model's own weights."""
    a2a_experimental: Annotated[
        bool, Only(False, "what adapters exchange is too small to gain by another way of communication")
    ] = False
    """Another way of communication in the adapters of Megatron-Bridge. Not supported: must be false."""
    lora_dtype: Literal["float32", "bfloat16", "None"] | None = None
    """Type of the adapters; null = `policy.precision`."""

    merge: bool = True
    """Engines get the weights with the adapters merged, all of them in each refit. false = engines hold the adapters
    beside the weights, and a refit moves the adapters alone: of the attention and the dense MLPs of llama, qwen2, qwen3
    and qwen3_moe.
    """

    @property
    def scale(self) -> float:
        return self.alpha / self.dim


@dataclass
class FreezeConfig:
    modules: list[str] = field(default_factory=list)
    """Tensors that are not trained, by their names in the Hugging Face checkpoint, with wildcards:
    backbone.embeddings.*
    """


@dataclass
class OptimizerConfig:
    optimizer: Literal["adam", "muon"] = "adam"
    """Megatron's optimizer. Muon updates the matrices of layers, and Adam all else; it needs megatron-core 0.19 and the
    package emerging-optimizers. Each rank keeps the whole state: NeMo RL's dist_muon, which spreads it, is not built.
    """
    lr: AboveZero = 5.0e-6
    """Peak learning rate."""
    min_lr: NotNegative = 5.0e-7
    """Learning rate at the end of the decay."""
    weight_decay: NotNegative = 0.01
    """AdamW's decay."""
    adam_beta1: ShareBelowOne = 0.9
    """Decay of the first moment."""
    adam_beta2: ShareBelowOne = 0.999
    """Decay of the second moment."""
    adam_eps: AboveZero = 1.0e-8
    """Added to the root of the second moment."""
    muon_momentum: ShareBelowOne = 0.95
    """Decay of Muon's momentum."""
    muon_nesterov: bool = False
    """Nesterov's momentum."""
    muon_num_ns_steps: Positive = 5
    """Newton-Schulz steps that make the momentum orthogonal."""
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Factor of an update of a matrix of r rows and c columns: sqrt(max(r, c)), sqrt(r / c), sqrt(max(1, r / c))."""
    muon_extra_scale_factor: AboveZero = 1.0
    """A further factor; 0.2 with spectral makes updates as large as Adam's."""
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = "medium"
    """Precision of these steps: medium is bfloat16."""
    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "blockwise"
    """Orthogonalise each tensor-parallel rank's part alone, or the whole matrix: on each rank, or spread over them."""
    muon_split_qkv: bool = True
    """Orthogonalise query, key and value apart."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    clip_grad: NotNegative = follows("policy.max_grad_norm")
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    use_precision_aware_optimizer: bool = True
    """Leave main parameters to Transformer Engine's FusedAdam; checkpoints stay float32. Needs GPUs, distributed
    optimizer and `bf16`.
    """
    optimizer_cpu_offload: bool = False
    """Update `optimizer_offload_fraction` of the optimizer's state on the host. Needs the distributed, precision-aware
    one and `bf16`.
    """
    optimizer_offload_fraction: Share = 0.0
    """Share of the parameters that the host updates if `optimizer_cpu_offload`."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    """Copy gradients and updated parameters while the host updates other parameters, if `optimizer_cpu_offload`."""
    params_dtype: Precision = "float32"
    """Type of the optimizer's main parameters."""
    bf16: bool = follows("equal:${policy.precision},bfloat16")
    """Weights and activations in bfloat16; must agree with `policy.precision`."""
    fp16: Annotated[bool, Only(False, "float16 is not supported, but policy.precision=bfloat16 and float32 are")] = (
        False
    )
    """Weights and activations in float16. Not supported: must be false."""

    @property
    def is_muon(self) -> bool:
        return self.optimizer == "muon"


@dataclass
class SchedulerConfig:
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the decay from `lr` to `min_lr`."""
    lr_decay_iters: Positive | None = None
    """Steps until `min_lr`, in PPO passes; null = all that the run takes."""
    lr_warmup_iters: Count = 0
    """Steps of linear warmup."""
    lr_warmup_init: NotNegative = 0.0
    """Learning rate at the start of the warmup."""
    start_weight_decay: NotNegative = follows("policy.megatron_cfg.optimizer.weight_decay")
    """Weight decay at the first step."""
    end_weight_decay: NotNegative = follows("policy.megatron_cfg.optimizer.weight_decay")
    """Weight decay at the last step."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape between the two."""


@dataclass
class DdpConfig:
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32."""
    overlap_grad_reduce: bool = True
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool = True
    """Gather updated parameters during the next forward pass; needs `use_distributed_optimizer`."""


@dataclass
class SaveConfig:
    async_save: bool = True
    """Write checkpoints from a copy in host memory while the next rollouts are generated; false = training waits until
    they are written.
    """


@dataclass
class Fp8Config:
    enabled: bool = False
    """Compute the products of linear layers in FP8, by Transformer Engine on GPUs. Weights, gradients and all else stay
    as they are. Not run on a GPU yet: see docs/fp8.md.
    """
    fp8: Literal["e4m3", "hybrid"] = "e4m3"
    """Type of weights and activations, and of their gradients; hybrid: gradients are in e5m2."""
    fp8_recipe: Literal["blockwise", "tensorwise", "delayed", "mxfp8"] = "blockwise"
    """Numbers that share a scale: blocks, or a whole matrix; mxfp8: 32 numbers, on Blackwell. `delayed` takes scales of
    earlier microbatches, so that the update gives other logprobs than the same weights gave before it, and is refused.
    """
    fp8_param: bool = False
    """Keep weights in FP8, too. Refused: optimizer, checkpoints and refits want them as they are."""


@dataclass
class MegatronConfig:
    enabled: Annotated[bool, Only(True, "Megatron-Core is the only training backend")] = True
    """Train with Megatron-Core, the only backend: must be true."""
    tensor_model_parallel_size: Positive = 1
    """TP: ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Positive = 1
    """PP: stages of consecutive layers."""
    context_parallel_size: Positive = 1
    """CP: ranks that share each sequence, padded to a multiple of 2 x CP tokens; rows are, under SP, to one of 2 x CP x
    TP.
    """
    expert_model_parallel_size: Positive = 1
    """EP: ranks over which the experts of a layer are spread."""
    expert_tensor_parallel_size: Positive = 1
    """ETP: ranks that share each expert's matrices."""
    num_layers_in_first_pipeline_stage: Positive | None = None
    """Layers of the first stage; null = as many as the others."""
    num_layers_in_last_pipeline_stage: Positive | None = None
    """Layers of the last stage; null = as many as the others."""
    virtual_pipeline_model_parallel_size: Positive | None = None
    """VPP: parts of each stage, interleaved over the stages to keep them busy; null = 1. Not for hybrid models."""
    use_gloo_process_groups: bool = False
    """Build Megatron's further groups for exchange over the hosts' network, which mrl does not need."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Attention kernels of Transformer Engine to use. No effect without a GPU and Transformer Engine."""
    env_vars: dict[str, str] | None = None
    """Environment variables of policy ranks. They win over mrl's own, such as PYTORCH_ALLOC_CONF and those that forbid
    TF32 in float32.
    """
    fp8_cfg: Fp8Config = field(default_factory=Fp8Config)
    first_last_layers_bf16: bool = False
    """Compute the first and last layers in bfloat16 beside `fp8_cfg.enabled`. Refused there; without it nothing is in
    FP8.
    """
    tune_kernels: bool = False
    """Let mamba_ssm time the configurations of its kernels on GPUs: minutes at each start, and a resumed run may round
    otherwise.
    """
    sequence_parallel: bool = False
    """Shard activations between the TP regions along the sequence. Required for mixture-of-experts models
    with TP > 1.
    """
    defer_fp32_logits: bool = False
    """Make float32 logits for some tokens at a time, with the same values. Always so with policy.logprob_chunk_size."""
    use_fused_linear_logprobs: bool = False
    """Compute logits of some tokens at a time, like policy.logprob_chunk_size, which then stays null."""
    fused_linear_logprobs_chunk_size: Positive = 256
    """Tokens whose logits are in memory at the same time if `use_fused_linear_logprobs`."""
    empty_unused_memory_level: Annotated[int, Range(0, 2)] = 1
    """Give unused memory back to the GPU: 1 = after the backward pass, 2 = also after the update, 0 = only between
    phases that need it.
    """
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: all that `recompute_granularity` names."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """Extent of `activation_checkpointing`: "full" keeps the inputs of layers only, "selective" recomputes parts of
    layers.
    """
    recompute_modules: list[str] | None = None
    """Parts that "selective" recomputes: any of core_attn, layernorm, mlp, moe, moe_act, shared_experts; null =
    core_attn.
    """
    freeze_moe_router: bool = True
    """Do not train the routers' weights."""
    freeze_config: FreezeConfig = field(default_factory=FreezeConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    moe_router_dtype: Literal["fp32", "fp64"] | None = "fp64"
    """Type in which routing scores are computed; null = that of the activations."""
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """Auxiliary loss that spreads tokens over experts: per packed row, per sequence, or over the global batch. Padding
    does not count.
    """
    moe_aux_loss_coeff: NotNegative = 0.0
    """Weight of the auxiliary loss, added to the policy's; 1 is its value at perfect balance."""
    moe_router_enable_expert_bias: bool | None = None
    """Add a bias per expert, by which routers choose. The model decides: false is refused if it has one, true has no
    effect if not.
    """
    moe_router_bias_update_rate: NotNegative = 0.0
    """Step of the expert-bias update after each train step, also of frozen routers; 0 = biases stay."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """Transport of tokens to their experts; `flex` is DeepEP or HybridEP, by `moe_flex_dispatcher_backend`."""
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "alltoall"] = "deepep"
    """Library of the dispatcher `flex`; no effect with another, beside which some recipes say `alltoall`. HybridEP
    needs megatron-core 0.19, and pads rows to a multiple of 128 tokens per rank. No run on GPUs has shown it.
    """
    moe_hybridep_num_sms: Positive | None = None
    """Multiprocessors of a GPU that HybridEP's kernels take; null = its own choice."""
    hybridep_num_ranks_per_nvlink_domain: Positive | None = None
    """Ranks of a group of experts within one NVLink domain; null = HybridEP finds them, where NeMo RL sets the smaller
    of expert_model_parallel_size and 64.
    """
    hybridep_use_mnnvl: bool | None = None
    """USE_MNNVL, which tells HybridEP that NVLink joins nodes; null = not set, where NeMo RL sets it with more than 4
    ranks of experts.
    """
    moe_enable_deepep: bool = False
    """Older name of `moe_token_dispatcher_type=flex`, which alone decides: true is refused with another dispatcher."""
    moe_shared_expert_overlap: bool = False
    """Compute shared experts while tokens travel, on GPUs. Needs the alltoall dispatcher."""
    track_moe_metrics: bool = True
    """Report how evenly tokens spread over experts, train/moe/*: mean over the layers, and the worst layer."""
    moe_per_layer_logging: bool = False
    """Report the metrics of `track_moe_metrics` for every layer, too."""
    moe_permute_fusion: bool = True
    """Order tokens by expert with Transformer Engine's kernel. No effect without a GPU and Transformer Engine."""
    apply_rope_fusion: bool = True
    """Apply rotary positions with Transformer Engine's kernel. No effect without a GPU and Transformer Engine, or with
    YaRN.
    """
    bias_activation_fusion: bool = True
    """Compile gate and activation of gated MLPs and experts into one kernel. No effect without a GPU, or with other
    activations.
    """
    use_fused_weighted_squared_relu: bool = False
    """Compile squared ReLU and router weights of Nemotron's experts into one kernel. No effect without a GPU and
    Transformer Engine.
    """
    model_overrides: dict[str, Any] = field(default_factory=dict)
    """Further arguments of Megatron's TransformerConfig that change how the model is computed; the model and other keys
    decide what.
    """
    mtp_num_layers: Count = 0
    """Tokens beyond the next that the policy's MTP layers learn to predict, of the tokens that it learns; 0 = do not
    train them.
    """
    mtp_loss_scaling_factor: NotNegative = 0.1
    """Weight of the MTP layers' mean loss, added to the policy's; 0 = do not train them."""
    mtp_use_repeated_layer: bool = False
    """Predict all these tokens with one MTP layer, each from its output for the one before; false = with a layer for
    each.
    """
    mtp_detach_heads: bool = False
    """Keep the MTP layers' loss from the rest of the model, and clip their gradients by a norm of their own."""
    gradient_accumulation_fusion: bool = False
    """Add weight gradients to their float32 sums within the matrix product. No effect without a GPU and NVIDIA Apex."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    distributed_data_parallel_config: DdpConfig = field(default_factory=DdpConfig)
    checkpoint: SaveConfig = field(default_factory=SaveConfig)

    @property
    def uses_hybridep(self) -> bool:
        """Tells whether HybridEP carries tokens to their experts."""
        return self.moe_token_dispatcher_type == "flex" and self.moe_flex_dispatcher_backend == "hybridep"

    @property
    def trains_mtp(self) -> bool:
        """Tells whether these keys train MTP layers."""
        return self.mtp_num_layers > 0 and self.mtp_loss_scaling_factor > 0

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the dense layers: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def parallel(self) -> MegatronParallel:
        """The parallel sizes, as the conversion tables take them."""
        return MegatronParallel(
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
            cp=self.context_parallel_size,
            num_layers_in_first_pipeline_stage=self.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=self.num_layers_in_last_pipeline_stage,
            vpp=self.virtual_pipeline_model_parallel_size or 1,
        )
