"""The head of a reward model: one weight vector beside the language model, whose own output layer is not used. T tokens, D hidden size."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from conversion.boxes import Layout, Piece, Slot, SlotLayout, full
from mrl.policy.output import ChunkedOutputLayer

ATTRIBUTE = "reward_head"
"""Of a model: its head."""
CANONICAL = "score.weight"
"""What transformers calls it in models for sequence classification."""
# What transformers' classification heads start with, for want of a model that says otherwise.
INITIAL_STD = 0.02


class RewardHead(nn.Module):
    """The same weight on every rank of the last pipeline stage."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, seed: int) -> None:
        """Starts as a function of `seed` alone, whatever the layout."""
        super().__init__()
        start = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) * INITIAL_STD
        self.weight = nn.Parameter(start.to(dtype))

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """A score for each token, float32 [T]."""
        return (hidden_TD.float() @ self.weight.float().t())[:, 0]


def attach_reward_head(chunks: list[MegatronModule], *, seed: int) -> Layout:
    """Gives the last stage's chunk a head, so that it returns hidden states in place of logits; comes before DDP. Layout of the head.

    The output layer keeps its weights, which no longer change unless they are the embedding's.
    """
    layout: Layout = {}
    for index, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        assert isinstance(model, MegatronModule)
        if not model.post_process:
            continue
        if not isinstance(model.output_layer, ChunkedOutputLayer):
            model.output_layer = ChunkedOutputLayer(model.output_layer, chunk_tokens=1)
        if not model.share_embeddings_and_output_weights:
            model.output_layer.weight.requires_grad_(False)
        some = next(model.parameters())
        head = RewardHead(model.config.hidden_size, some.dtype, seed=seed).to(some.device)
        setattr(model, ATTRIBUTE, head)
        shape = tuple(head.weight.shape)
        piece = Piece(CANONICAL, full(shape), full(shape))
        layout[Slot(f"{ATTRIBUTE}.weight", index)] = SlotLayout(shape, str(some.dtype).removeprefix("torch."), (piece,))
    return layout


def token_rewards(model: nn.Module, output: Tensor) -> Tensor:
    """The head's score at each token of this rank's part of a row, float32 [T], from the hidden states that `model` returned.

    On ranks of the last pipeline stage. Collective over the tensor-parallel group, whose ranks compute the same.
    """
    bare = unwrap_model(model)
    assert isinstance(bare, MegatronModule)
    hidden_TD = output[0]
    if bare.output_layer.sequence_parallel:
        # Every rank computes the whole gradient, so each takes its part of it and none are summed.
        group = parallel_state.get_tensor_model_parallel_group()
        hidden_TD = gather_from_sequence_parallel_region(hidden_TD, tensor_parallel_output_grad=False, group=group)
    return getattr(bare, ATTRIBUTE)(hidden_TD)
