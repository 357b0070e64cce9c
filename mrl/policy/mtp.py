# SPDX-License-Identifier: Apache-2.0
"""Layers of multi-token prediction (MTP, arXiv:2412.19437, section 2.2) of Megatron's hybrid models, on the last stage.

megatron-core 0.16.1 has them for GPT models only. Names and keys here are those that its later versions give hybrid
models. Shape suffixes: T tokens of this rank's part of a row (of which a tp rank has its share under sequence
parallelism), D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mrl.policy import specs
from mrl.policy.moe import expect_passes
from mrl.policy.optimizer import main_gradient
from mrl.policy.versions import stack_arguments

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig


class MtpBlock(MegatronModule):
    """The MTP layers of a model: one `MtpStep` for each token beyond the next, or one for all of them."""

    def __init__(
        self,
        config: TransformerConfig,
        stack: ModuleSpec,
        *,
        pattern: str,
        num_steps: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """`config` is the model's, `stack` builds its hybrid stack, and `pattern` has a letter per layer of a step."""
        super().__init__(config)
        groups, config = copy.copy(pg_collection), copy.copy(config)
        # Layers of a stage are numbered within the model; MTP layers are all on the last stage.
        groups.pp = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # rank and size
        num_layers, config.num_layers = config.num_layers, len(pattern)
        config.pipeline_model_parallel_size = 1
        config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
        self.layers = nn.ModuleList(
            [MtpStep(config, stack, pattern, num_layers + index * len(pattern), groups) for index in range(num_steps)]
        )
        self.embedding: tuple[LanguageModelEmbedding, ...] = ()
        """Copy of the first stage's embedding on the last of several stages (`embedding_on_last_stage`); the tuple
        hides it from torch.
        """

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Entries of a Megatron checkpoint; called by the model's method of this name."""
        entries: ShardedStateDict = {}
        for index, step in enumerate(self.layers):
            assert isinstance(step, MtpStep)
            entries |= step.sharded_state_dict(f"{prefix}layers.{index}.", sharded_offsets, metadata)
        return entries


class MtpStep(MegatronModule):
    """An MTP step: combines a token's hidden state with a later embedding into the state predicting the token after."""

    def __init__(
        self,
        config: TransformerConfig,
        stack: ModuleSpec,
        pattern: str,
        first_layer: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """`first_layer` is the 0-based index of its first layer in expert statistics, behind the model's own layers."""
        super().__init__(config)
        hidden = config.hidden_size
        self.enorm, self.hnorm, self.final_layernorm = (
            specs.Norm(config=config, hidden_size=hidden, eps=config.layernorm_epsilon) for _ in range(3)
        )
        self.eh_proj = specs.ColumnLinear(
            2 * hidden,
            hidden,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )
        self.mtp_model_layer = build_module(
            stack, config, **stack_arguments(pattern), post_layer_norm=False, pg_collection=pg_collection
        )
        for index, layer in enumerate(self.mtp_model_layer.layers):
            if isinstance(layer.mlp, MoELayer):
                layer.mlp.set_layer_number(first_layer + index + 1)

    @property
    def transformer_layer(self) -> nn.Module:
        """Alias for megatron-core 0.16.1, whose schedules set the microbatch number there."""
        return self.mtp_model_layer

    def forward(self, hidden_T1D: Tensor, embedded_T1D: Tensor, packed: PackedSeqParams) -> Tensor:
        """The new hidden states [T, 1, D], normed for the output layer. Collective as the model's layers are.

        With gradient, `hidden_T1D` must require one; otherwise recomputed layers would get none.
        """
        if self.config.recompute_granularity == "full" and torch.is_grad_enabled():
            joined_T1D = tensor_parallel.checkpoint(
                self._join, self.config.distribute_saved_activations, hidden_T1D, embedded_T1D
            )
        else:
            joined_T1D = self._join(hidden_T1D, embedded_T1D)
        return self.final_layernorm(self.mtp_model_layer(joined_T1D, attention_mask=None, packed_seq_params=packed))

    def _join(self, hidden_T1D: Tensor, embedded_T1D: Tensor) -> Tensor:
        joined, _ = self.eh_proj(torch.cat([self.enorm(embedded_T1D), self.hnorm(hidden_T1D)], dim=-1))
        joined = gather_from_tensor_model_parallel_region(joined)
        if not self.config.sequence_parallel:
            return joined
        return scatter_to_sequence_parallel_region(joined).clone()


def attach_mtp(chunk: MegatronModule, stack: ModuleSpec, arguments: Mapping[str, Any]) -> None:
    """Gives a last-stage chunk the MTP layers of its model. `arguments` are the family's: `pattern` and `num_steps`."""
    chunk.config.num_layers_with_mtp = chunk.config.num_layers + arguments["num_steps"] * len(arguments["pattern"])
    if chunk.post_process:
        chunk.mtp = MtpBlock(chunk.config, stack, **arguments, pg_collection=chunk.pg_collection)


def prepare_mtp(chunk: MegatronModule, config: MegatronConfig, *, is_trained: bool) -> None:
    """Prepares the chunk's MTP layers for training, or freezes them. Before the optimizer copies Megatron's marks."""
    if (block := mtp_of(chunk)) is None:
        return
    if not is_trained:
        block.requires_grad_(False)
        return
    # More than one pass where the steps share a layer.
    expect_passes(block, config.mtp_num_layers // len(block.layers))
    if config.mtp_detach_heads:
        for parameter in mtp_parameters([chunk]):
            # This mark keeps their gradients out of Megatron's norm.
            setattr(parameter, "shared", True)  # noqa: B010


def mtp_of(chunk: nn.Module) -> MtpBlock | None:
    """The MTP layers of a chunk, in whatever wrappers; None on all but the last stage, and in models without."""
    return getattr(unwrap_model(chunk), "mtp", None)


def mtp_parameters(chunks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Lists the trained parameters of this rank's MTP layers."""
    blocks = filter(None, map(mtp_of, chunks))
    return [parameter for block in blocks for parameter in block.parameters() if parameter.requires_grad]


@contextmanager
def embedding_on_last_stage(chunks: Sequence[DistributedDataParallel], *, with_gradient: bool) -> Iterator[None]:
    """Gives MTP layers on the last stage the first stage's embedding in the `with` block. Collective over all ranks.

    `with_gradient` adds the copy's gradients, summed over all replicas, to the embedding's, which are summed by then.
    """
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    with_gradient = with_gradient and torch.is_grad_enabled()
    if is_first == is_last:
        yield
        return
    chunk = chunks[-1 if is_last else 0]
    group, bare = parallel_state.get_embedding_group(), unwrap_model(chunk)
    if is_first:
        weight = bare.embedding.word_embeddings.weight
        if chunk.ddp_config.overlap_param_gather and weight in chunk.param_to_bucket_group:
            # Otherwise the last step's updates from other ranks arrive only in the forward pass.
            chunk.param_to_bucket_group[weight].finish_param_sync(skip_next_bucket_dispatch=True)
        dist.broadcast(weight.detach(), group=group, group_src=0)
        yield
        if with_gradient:
            gradient = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            dist.broadcast(gradient, group=group, group_src=1)
            if weight.requires_grad:
                main_gradient(weight).add_(gradient)
        return
    copied = _embedding_like(bare)
    weight = copied.word_embeddings.weight
    dist.broadcast(weight.detach(), group=group, group_src=0)
    total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if with_gradient else None
    if total is not None:
        # One gradient after the other: sums of many rows would lose the small ones in bfloat16.
        weight.register_post_accumulate_grad_hook(lambda weight: _move_gradient(weight, total))
    weight.requires_grad_(total is not None)
    bare.mtp.embedding = (copied,)
    try:
        yield
    finally:
        bare.mtp.embedding = ()
    if total is not None:
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        dist.broadcast(total, group=group, group_src=1)


def _embedding_like(model: MegatronModule) -> LanguageModelEmbedding:
    config = copy.copy(model.config)
    config.perform_initialization = False
    embedding = LanguageModelEmbedding(
        config,
        model.vocab_size,
        model.max_sequence_length,
        position_embedding_type="none",
        tp_group=model.pg_collection.tp,
    )
    return embedding.to(device=next(model.parameters()).device, dtype=config.params_dtype)


def _move_gradient(weight: Tensor, total: Tensor) -> None:
    assert weight.grad is not None
    total.add_(weight.grad)
    weight.grad = None
