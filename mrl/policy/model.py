"""The policy's Megatron model: built from a Hugging Face config, checked to hold every layer, wrapped for data parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.policy import compat
from mrl.policy.specs import hybrid_stack_spec

if TYPE_CHECKING:
    from mrl.config.schema import PolicyConfig

# Megatron's vocabulary is padded so that every rank's part is a multiple of this: the width that its GPU kernels like.
VOCABULARY_MULTIPLE = 128

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ACTIVATIONS = {"squared_relu": squared_relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}


def build_model(config: PolicyConfig, hf_config: dict[str, object]) -> list[MegatronModule]:
    """This rank's chunks of the model (one without virtual pipeline stages), randomly initialised, bare of data parallelism.

    In bfloat16 each chunk is wrapped in Megatron's Float16Module. Collective over the pp group.

    Raises:
        ValueError: the pipeline layout does not hold every layer exactly once.
    """
    arguments = megatron_arguments(hf_config)
    transformer_config = _transformer_config(config, arguments)
    model = compat.MambaModel(
        transformer_config,
        hybrid_stack_spec(),
        vocab_size=padded_vocabulary(int(hf_config["vocab_size"]), config.megatron_cfg.tensor_model_parallel_size),
        max_sequence_length=config.max_total_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        hybrid_override_pattern=arguments["hybrid_override_pattern"],
        position_embedding_type="none",
        parallel_output=True,
        share_embeddings_and_output_weights=arguments["share_embeddings_and_output_weights"],
    )
    _check_layers(model, transformer_config.num_layers)
    _mark_parameters(model, config)
    if torch.device("cpu") != torch.device(torch.cuda.current_device()):
        model.cuda()
    return [Float16Module(transformer_config, model) if transformer_config.bf16 else model]


def padded_vocabulary(vocab_size: int, tp_size: int) -> int:
    """Rows of Megatron's embedding and output layer over all tp ranks."""
    multiple = VOCABULARY_MULTIPLE * tp_size
    return -(-vocab_size // multiple) * multiple


def wrap_ddp(chunks: list[MegatronModule], config: PolicyConfig) -> list[DistributedDataParallel]:
    """The chunks with gradient buffers and data-parallel reduction, configured so that gradients are summed, never averaged.

    Collective over all ranks.
    """
    settings = config.megatron_cfg.distributed_data_parallel_config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        use_distributed_optimizer=config.megatron_cfg.optimizer.use_distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    wrapped = [
        # Buckets overlap with the backward pass of the first chunk only; later chunks reduce in one piece, as Megatron's training does.
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    transformer_config = chunks[0].config
    transformer_config.finalize_model_grads_func = sum_gradients
    if settings.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        transformer_config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    return wrapped


def sum_gradients(
    chunks: list[MegatronModule],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Megatron's finalize_model_grads without its division: the loss comes divided by the global denominator, gradients are summed.

    Called by the schedule after the last backward pass. Collective over all ranks.
    """
    finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def _transformer_config(config: PolicyConfig, arguments: dict[str, object]) -> TransformerConfig:
    megatron = config.megatron_cfg
    dtype = DTYPES[config.precision]
    on_cpu = not torch.cuda.is_available()
    from_model = {
        key: value for key, value in arguments.items() if key not in ("hybrid_override_pattern", "share_embeddings_and_output_weights")
    }
    from_model["activation_func"] = ACTIVATIONS[str(from_model["activation_func"])]
    return TransformerConfig(
        **from_model,
        is_hybrid_model=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        context_parallel_size=megatron.context_parallel_size,
        expert_model_parallel_size=megatron.expert_model_parallel_size,
        expert_tensor_parallel_size=megatron.expert_tensor_parallel_size,
        sequence_parallel=megatron.sequence_parallel,
        num_layers_in_first_pipeline_stage=megatron.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=megatron.num_layers_in_last_pipeline_stage,
        # Packed rows differ in length, so stages tell each other the shape first.
        variable_seq_lengths=True,
        # Keeps DDP from scaling gradients by 1 / dp, and the schedule from dividing the loss by the number of rows.
        calculate_per_token_loss=True,
        moe_router_dtype=megatron.moe_router_dtype,
        moe_router_load_balancing_type=megatron.moe_router_load_balancing_type,
        moe_router_bias_update_rate=megatron.moe_router_bias_update_rate,
        moe_token_dispatcher_type=megatron.moe_token_dispatcher_type,
        **_recompute_arguments(config),
        # Megatron's fused kernels, and its grouped GEMM of experts, need a GPU.
        use_cpu_initialization=on_cpu,
        moe_grouped_gemm=not on_cpu,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _recompute_arguments(config: PolicyConfig) -> dict[str, object]:
    if not config.megatron_cfg.activation_checkpointing:
        return {}
    if compat.STACK_RECOMPUTES_FULLY:
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"])


def _check_layers(model: MegatronModule, num_layers: int) -> None:
    # With an uneven split MambaStack drops the remainder without a word.
    group = parallel_state.get_pipeline_model_parallel_group()
    numbers: list[list[int]] = [[] for _ in range(group.size())]
    dist.all_gather_object(numbers, [layer.layer_number for layer in model.decoder.layers], group=group)
    if [number for stage in numbers for number in stage] != list(range(1, num_layers + 1)):
        raise ValueError(
            f"policy.megatron_cfg.pipeline_model_parallel_size={group.size()} gives the stages {[len(stage) for stage in numbers]} of the "
            f"model's {num_layers} layers; set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage so that they add up"
        )


def _mark_parameters(model: MegatronModule, config: PolicyConfig) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Megatron marks experts only where EP > 1, so that at TP 2, EP 1 their gradients would stay unsummed over tp,
            # and optimizer checkpoints would differ in form between EP 1 and EP 2.
            parameter.allreduce = False
        if name.endswith("mlp.router.weight") and config.megatron_cfg.freeze_moe_router:
            parameter.requires_grad_(False)


def megatron_arguments(hf_config: dict[str, object]) -> dict[str, object]:
    symbols = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    pattern = hf_config.get("hybrid_override_pattern") or "".join(symbols[kind] for kind in hf_config["layers_block_type"])
    return dict(
        num_layers=len(pattern),
        hybrid_override_pattern=pattern,
        share_embeddings_and_output_weights=hf_config["tie_word_embeddings"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config["num_key_value_heads"],
        kv_channels=hf_config["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=hf_config["layer_norm_epsilon"],
        add_bias_linear=False,
        activation_func="squared_relu",
        gated_linear_unit=False,
        mamba_num_heads=hf_config["mamba_num_heads"],
        mamba_head_dim=hf_config["mamba_head_dim"],
        mamba_num_groups=hf_config["n_groups"],
        mamba_state_dim=hf_config["ssm_state_size"],
        num_moe_experts=hf_config["n_routed_experts"],
        moe_router_topk=hf_config["num_experts_per_tok"],
        moe_ffn_hidden_size=hf_config["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=hf_config["moe_shared_expert_intermediate_size"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=hf_config["routed_scaling_factor"],
        moe_router_pre_softmax=False,
    )
