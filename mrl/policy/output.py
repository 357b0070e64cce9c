"""The end of the model: scores of a row's labels from what the model returns, with or without the logits of the whole row."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrl.policy.distribution import TokenDistribution
from mrl.policy.logprobs import TokenScores, scores_of_hidden, scores_of_logits


class ChunkedOutputLayer(ColumnParallelLinear):
    """Megatron's output layer, except that the model returns hidden states: `token_scores` multiplies `chunk_tokens` of them at a time."""

    def __init__(self, layer: ColumnParallelLinear, *, chunk_tokens: int) -> None:
        """Takes the place of `layer`, and its weight, which is None where the embedding is tied and on the same rank."""
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
        """The hidden states as they are, [T / tp, 1, D] under sequence parallelism, and no bias."""
        return input_, None


def token_scores(model: torch.nn.Module, output: Tensor, labels_T: Tensor, distribution: TokenDistribution) -> TokenScores:
    """Scores of a row's labels from what `model` returned for it: logits [1, T, V], or hidden states if it has a `ChunkedOutputLayer`.

    On ranks of the last pipeline stage. Collective over the tensor-parallel group: every rank calls it, in the same order.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    bare = unwrap_model(model)
    assert isinstance(bare, MegatronModule)
    layer = bare.output_layer
    if not isinstance(layer, ChunkedOutputLayer):
        logits_TV = output[0] if distribution.defer_fp32_logits else output[0].float()
        return scores_of_logits(logits_TV, labels_T, distribution, group)
    weight_VD = bare.shared_embedding_or_output_weight() if bare.share_embeddings_and_output_weights else layer.weight
    # Backward, the gradients of the vocabulary's parts are summed, and with sequence parallelism each rank gets its tokens'.
    spread = gather_from_sequence_parallel_region if layer.sequence_parallel else copy_to_tensor_model_parallel_region
    hidden_TD = spread(output[0], group=group)
    return scores_of_hidden(hidden_TD, weight_VD, labels_T, distribution, group, chunk_tokens=layer.chunk_tokens)
