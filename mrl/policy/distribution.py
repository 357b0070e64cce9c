"""The distribution that tokens are drawn from, as the trainer computes it. T packed tokens, V vocabulary columns of this rank."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core import parallel_state
from torch import Tensor

from mrl.policy.logprobs import vocab_parallel_logprobs


@dataclass(frozen=True)
class TokenDistribution:
    """How logits become the distribution that tokens are drawn from."""

    vocab_size: int
    """Without the padding of the vocabulary."""
    temperature: float

    def logprobs(self, logits: Tensor, labels_T: Tensor) -> Tensor:
        """Log-probability of each label, shape [T], from a row's logits [1, T, V]."""
        return vocab_parallel_logprobs(
            logits[0],
            labels_T,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
