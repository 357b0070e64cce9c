# SPDX-License-Identifier: Apache-2.0
"""The Megatron policy model: built from a Hugging Face config, checked for all layers, wrapped for data parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from conversion.boxes import Layout, Slot
from conversion.cuts import MEGATRON_VOCABULARY_MULTIPLE
from conversion.families.common import Flavour, HfConfig, MegatronCoords
from conversion.families.registry import family
from conversion.tensors import torch_dtype
from mrl.gpus import on_gpu
from mrl.policy import parallel, specs
from mrl.policy.fusions import fusion_arguments
from mrl.policy.moe import routing_arguments, use_row_dispatchers, with_packed_routers
from mrl.policy.mtp import attach_mtp, prepare_mtp
from mrl.policy.output import ChunkedOutputLayer
from mrl.policy.parallel import virtual_stages
from mrl.policy.specs import gpt_block_spec, hybrid_stack_spec
from mrl.policy.tree_layers import accept_trees
from mrl.policy.versions import build_hybrid
from mrl.policy.weights import table_name

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig
    from mrl.config.schema.policy import PolicyConfig

ModelClass = Literal["mamba", "gpt"]

ACTIVATIONS = {"squared_relu": squared_relu, "silu": F.silu, "quick_gelu": quick_gelu}
FLAVOUR: Flavour = "te" if specs.HAVE_TE else "local"
"""Kind of layers that `mrl.policy.specs` builds on this host, in the words of the conversion tables."""


def live_layout(config: PolicyConfig, hf_config: HfConfig, coords: MegatronCoords) -> Layout:
    """The conversion table of the live weights of the rank at `coords`."""
    return family(hf_config).megatron_layout(hf_config, config.megatron_cfg.parallel, coords, config.precision, FLAVOUR)


def build_model(
    config: PolicyConfig, hf_config: HfConfig, *, is_trained: bool = True, trains_mtp: bool = False
) -> list[MegatronModule]:
    """Builds this rank's model chunks, one per virtual pipeline stage, randomly initialised, bare of data parallelism.

    In bfloat16 a chunk is wrapped in Megatron's Float16Module. `hf_config` is the contents of a config.json. Without
    `is_trained`, no parameter takes a gradient, so that data parallelism and the optimizer keep nothing for it; so with
    MTP layers without `trains_mtp`.
    """
    model_family, megatron = family(hf_config), config.megatron_cfg
    arguments = model_family.megatron_arguments(hf_config)
    transformer_config = _transformer_config(config, arguments["transformer"])
    attributes = arguments.get("attributes", {})
    for name, value in attributes.items():
        setattr(transformer_config, name, value)
    if attributes:
        transformer_config.apply_rope_fusion = transformer_config.fused_single_qkv_rope = False
    multiple = MEGATRON_VOCABULARY_MULTIPLE * megatron.tensor_model_parallel_size
    model_arguments = dict(arguments["model"])
    model_arguments["vocab_size"] = -(-int(str(model_arguments["vocab_size"])) // multiple) * multiple
    chunks = [
        _build_chunk(
            transformer_config, model_family.model_class, index, megatron, model_arguments, arguments.get("mtp")
        )
        for index in range(megatron.parallel.vpp)
    ]
    _freeze(chunks, config, hf_config)
    for chunk in chunks:
        if not is_trained:
            chunk.requires_grad_(False)
        prepare_mtp(chunk, megatron, is_trained=trains_mtp)
        if config.share_prefixes:
            accept_trees(chunk, has_fused_attention=specs.HAVE_TE)
        if chunk.post_process and config.output_chunk_tokens is not None:
            chunk.output_layer = ChunkedOutputLayer(chunk.output_layer, chunk_tokens=config.output_chunk_tokens)
        if on_gpu():
            chunk.cuda()
    return [Float16Module(transformer_config, chunk) if transformer_config.bf16 else chunk for chunk in chunks]


def _build_chunk(
    config: TransformerConfig,
    model_class: ModelClass,
    index: int,
    megatron: MegatronConfig,
    arguments: Mapping[str, Any],
    mtp: Mapping[str, Any] | None,
) -> MegatronModule:
    vp_stage = index if virtual_stages(megatron) else None
    stage: dict[str, Any] = dict(
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
    )
    if model_class == "gpt":
        chunk = GPTModel(
            config, with_packed_routers(gpt_block_spec(config, vp_stage)), vp_stage=vp_stage, **stage, **arguments
        )
    else:
        assert vp_stage is None, "config rules and conversion tables refuse it"
        spec = with_packed_routers(hybrid_stack_spec(is_recomputed=config.recompute_granularity == "full"))
        stages = [megatron.parallel.layers_of(pp, config.num_layers, 0) for pp in range(megatron.parallel.pp)]
        chunk = build_hybrid(config, spec, stages, **stage, **arguments)
        if mtp is not None:
            attach_mtp(chunk, spec, mtp)
    # If stages do not divide the layers, Megatron's stack silently drops the rest.
    expected = megatron.parallel.layers_of(parallel_state.get_pipeline_model_parallel_rank(), config.num_layers, index)
    live = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    if live != list(expected):
        raise RuntimeError(
            f"chunk {index} of this pipeline stage should hold the layers {list(expected)}, but Megatron built {live}"
        )
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            # Megatron marks experts only at EP > 1: without EP, gradients would stay unsummed over tp, and checkpoints
            # would differ.
            parameter.allreduce = False
            # It marks their biases, too, and would sum those of other experts over the tp group.
            parameter.sequence_parallel = False
            # It leaves the second biases unmarked: their squares would count on the first tp rank alone, as copies do.
            parameter.tensor_model_parallel = True
    use_row_dispatchers(chunk, megatron)
    if config.activation_func is quick_gelu:
        specs.part_pairs(chunk)
    return chunk


def wrap_ddp(chunks: list[MegatronModule], config: PolicyConfig) -> list[DistributedDataParallel]:
    """The chunks with gradient buffers and data-parallel reduction. Collective over all ranks."""
    settings = config.megatron_cfg.distributed_data_parallel_config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        use_distributed_optimizer=config.megatron_cfg.optimizer.use_distributed_optimizer,
    )
    wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
    schedule_config = wrapped[0].config
    schedule_config.finalize_model_grads_func = sum_gradients
    # With overlap, only the last microbatch may start the reduction of a bucket.
    schedule_config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    return wrapped


def sum_gradients(
    chunks: list[DistributedDataParallel],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Megatron's finalize_model_grads without its division by `num_tokens`: the global denominator divides the loss."""
    finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def _transformer_config(config: PolicyConfig, from_model: Mapping[str, object]) -> TransformerConfig:
    megatron = config.megatron_cfg
    dtype = torch_dtype(config.precision)
    arguments = dict(from_model)
    arguments["activation_func"] = ACTIVATIONS[str(arguments["activation_func"])]
    if virtual_stages(megatron) is not None:
        # Batched transfers to one peer are matched by order: with two stages, activations would be taken for gradients.
        arguments |= dict(
            virtual_pipeline_model_parallel_size=virtual_stages(megatron), overlap_p2p_comm=True, batch_p2p_comm=False
        )
    if megatron.activation_checkpointing and megatron.recompute_granularity == "full":
        arguments |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif megatron.activation_checkpointing:
        arguments |= dict(recompute_granularity="selective", recompute_modules=megatron.recompute_modules)
    of_model = MLATransformerConfig if from_model.get("multi_latent_attention") else TransformerConfig
    return of_model(
        **arguments,
        **megatron.model_overrides,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_backend=AttnBackend[megatron.attention_backend],
        bf16=dtype is torch.bfloat16,
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
        **routing_arguments(megatron, has_experts="num_moe_experts" in from_model),
        use_cpu_initialization=not on_gpu(),
        **fusion_arguments(megatron, from_model),
        **_fp8_arguments(megatron),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def _fp8_arguments(megatron: MegatronConfig) -> dict[str, object]:
    if not megatron.fp8_cfg.enabled:
        return {}
    return dict(
        fp8=megatron.fp8_cfg.fp8,
        fp8_recipe=megatron.fp8_cfg.fp8_recipe,
        fp8_param=megatron.fp8_cfg.fp8_param,
        first_last_layers_bf16=megatron.first_last_layers_bf16,
        # Megatron's layers keep the FP8 weights of their first pass for all later ones, until a training loop of its
        # own tells them of a new step: those here would go on with the weights of before.
        disable_parameter_transpose_cache=True,
    )


def _freeze(chunks: list[MegatronModule], config: PolicyConfig, hf_config: HfConfig) -> None:
    """Freezes what `megatron_cfg.freeze_moe_router` and `freeze_config` name. The chunks have no wrappers yet."""
    patterns = config.megatron_cfg.freeze_config.modules
    # Rank 0 of tp never has only padding, so its parts make every rank freeze the same layers.
    layout = live_layout(config, hf_config, replace(parallel.coordinates(), tp=0, etp=0))
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            names = {piece.name for piece in layout[Slot(table_name(name), index)].pieces}
            matched = {tensor for tensor in names if any(fnmatchcase(tensor, pattern) for pattern in patterns)}
            is_router = (
                name.startswith("decoder.")
                and name.endswith("mlp.router.weight")
                and config.megatron_cfg.freeze_moe_router
            )
            if matched and matched != names and not is_router:
                raise ValueError(
                    f"policy.megatron_cfg.freeze_config.modules={patterns} names {', '.join(sorted(matched))}, "
                    f"which Megatron holds in one tensor with {', '.join(sorted(names - matched))}; name all of "
                    "them or none"
                )
            if is_router or matched:
                parameter.requires_grad_(False)
        keep_gradients_flowing(chunk)


def keep_gradients_flowing(chunk: MegatronModule) -> None:
    """Makes the output of a frozen embedding require a gradient; recomputed layers would get none otherwise."""

    def require_gradient(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    if chunk.pre_process and not any(parameter.requires_grad for parameter in chunk.embedding.parameters()):
        chunk.embedding.register_forward_hook(require_gradient)
