# SPDX-License-Identifier: Apache-2.0
"""The end of the model: scores of a row's labels, or a reward model's head, computed from the model's output.

T packed tokens, V vocabulary columns of this rank, D hidden size.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from conversion.boxes import Layout, Piece, Slot, SlotLayout, full
from conversion.files import hf_folder
from mrl.data.packing import PackedRow
from mrl.policy.batch import own_positions
from mrl.policy.logprobs import OutputColumns, TokenDistribution, TokenScores, scores_of

REWARD_HEAD = "reward_head"
"""The attribute of a model that is its reward head."""
_INITIAL_STD = 0.02


class ChunkedOutputLayer(ColumnParallelLinear):
    """Megatron's output layer, but returns hidden states: `token_scores` multiplies `chunk_tokens` at a time."""

    def __init__(self, layer: ColumnParallelLinear, *, chunk_tokens: int) -> None:
        """Replaces `layer` and its weight, which is None where the embedding is tied and on the same rank."""
        super().__init__(
            layer.input_size,
            layer.output_size,
            config=layer.config,
            init_method=layer.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=layer.tp_group,
        )
        self.weight = layer.weight
        self.chunk_tokens = chunk_tokens

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return input_, None


def token_scores(model: nn.Module, output: Tensor, row: PackedRow, distribution: TokenDistribution) -> TokenScores:
    """Scores of this rank's row labels from model `output`: logits [1, T, V] or hidden states of `ChunkedOutputLayer`.

    Only on ranks of the last pipeline stage. Collective over the tensor-parallel group: every rank calls it, in the
    same order.
    """
    return scores_of(
        output_columns(model, output, distribution),
        row.labels_T[own_positions(row)].to(output.device),
        None if row.tree is None else row.tree.tokens_T.to(output.device),
    )


def output_columns(model: nn.Module, output: Tensor, distribution: TokenDistribution) -> OutputColumns:
    """This rank's columns of the logits of its tokens; else like `token_scores`."""
    group, bare = parallel_state.get_tensor_model_parallel_group(), _bare(model)
    layer = bare.output_layer
    if not isinstance(layer, ChunkedOutputLayer):
        return OutputColumns(
            output[0] if distribution.defer_fp32_logits else output[0].float(), None, distribution, group
        )
    weight_VD = bare.shared_embedding_or_output_weight() if bare.share_embeddings_and_output_weights else layer.weight
    # The backward pass sums the gradients of the vocabulary's parts; with sequence parallelism each rank gets its
    # tokens'.
    spread = gather_from_sequence_parallel_region if layer.sequence_parallel else copy_to_tensor_model_parallel_region
    return OutputColumns(spread(output[0], group=group), weight_VD, distribution, group, layer.chunk_tokens)


class RewardHead(nn.Module):
    """A reward model's head: one weight vector, the same on every rank of the last pipeline stage."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, seed: int) -> None:
        """Initial weights depend only on `seed`, not the layout; loading a model folder with a head replaces them."""
        super().__init__()
        start = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) * _INITIAL_STD
        self.weight = nn.Parameter(start.to(dtype))

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return (hidden_TD.float() @ self.weight.float().t())[:, 0]


def attach_reward_head(chunks: list[MegatronModule], *, seed: int) -> Layout:
    """Gives the last stage's chunk a head instead of logits, and returns the head's layout. Call it before DDP."""
    layout: Layout = {}
    for index, chunk in enumerate(chunks):
        model = _bare(chunk)
        if not model.post_process:
            continue
        if not isinstance(model.output_layer, ChunkedOutputLayer):
            model.output_layer = ChunkedOutputLayer(model.output_layer, chunk_tokens=1)
        if not model.share_embeddings_and_output_weights:
            # The layer keeps its unused weights. A tied embedding's copy follows the embedding: its own gradient is 0.
            model.output_layer.weight.requires_grad_(False)
        some = next(model.parameters())
        head = RewardHead(model.config.hidden_size, some.dtype, seed=seed).to(some.device)
        setattr(model, REWARD_HEAD, head)
        shape = tuple(head.weight.shape)
        pieces = (Piece(hf_folder.REWARD_HEAD, full(shape), full(shape)),)
        layout[Slot(f"{REWARD_HEAD}.weight", index)] = SlotLayout(shape, str(some.dtype).removeprefix("torch."), pieces)
    return layout


def token_rewards(model: nn.Module, output: Tensor) -> Tensor:
    """The head's score at each token of this rank's part of a row, float32 [T]; else like `token_scores`."""
    bare = _bare(model)
    hidden_TD = output[0]
    if bare.output_layer.sequence_parallel:
        group = parallel_state.get_tensor_model_parallel_group()
        hidden_TD = gather_from_sequence_parallel_region(hidden_TD, tensor_parallel_output_grad=False, group=group)
    return getattr(bare, REWARD_HEAD)(hidden_TD)


def _bare(model: nn.Module) -> MegatronModule:
    bare = unwrap_model(model)
    assert isinstance(bare, MegatronModule)
    return bare
