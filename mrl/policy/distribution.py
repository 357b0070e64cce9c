"""The distribution that tokens are drawn from: temperature, top-k and top-p, in the order and by the rules of vLLM's sampler.

T packed tokens, V vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from mrl.config.schema.policy import PolicyConfig


@dataclass(frozen=True)
class TokenDistribution:
    """How logits become the distribution that tokens are drawn from."""

    vocab_size: int
    """Without the padding of the vocabulary."""
    temperature: float = 1.0
    top_k: int | None = None
    """Only the k likeliest tokens, and those as likely as the last of them; None = all."""
    top_p: float = 1.0
    """Of these, only the likeliest whose probabilities add up to `top_p`, and those as likely as the last of them."""
    defer_fp32_logits: bool = True
    """Logits become float32 in parts; false = those of a whole row at once. The values are the same."""

    @classmethod
    def of(cls, config: PolicyConfig, vocab_size: int) -> TokenDistribution:
        """The distribution of the configured sampler."""
        generation = config.generation
        return cls(
            vocab_size=vocab_size,
            temperature=generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
            defer_fp32_logits=config.megatron_cfg.defer_fp32_logits,
        )

    @classmethod
    def whole(cls, config: PolicyConfig, vocab_size: int) -> TokenDistribution:
        """The model's own distribution, for training without a sampler: temperature 1, every token."""
        return cls(vocab_size=vocab_size, defer_fp32_logits=config.megatron_cfg.defer_fp32_logits)

    @property
    def untruncated(self) -> TokenDistribution:
        """The same without top-k and top-p, for the reference model: it would rule out other tokens than the policy does."""
        return replace(self, top_k=None, top_p=1.0)

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens may have no probability."""
        return self.top_p < 1.0 or (self.top_k is not None and self.top_k < self.vocab_size)

    def least_kept(self, scaled_TV: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The smallest logit at each position that top-k and top-p keep, float32 [T], the same on every rank of `group`.

        `scaled_TV` are this rank's float32 logits after temperature, without padding. Ranks exchange sums over columns, never logits.
        Collective over `group` (tensor parallel): every rank calls it, in the same order.
        """
        least_T = scaled_TV.new_full(scaled_TV.shape[:1], torch.finfo(torch.float32).min)
        if self.top_k is not None and self.top_k < self.vocab_size:
            target_T = torch.full_like(least_T, self.top_k)
            least_T = _largest_reaching(lambda value_T: (scaled_TV >= value_T[:, None]).sum(dim=-1).float(), target_T, group)
        if self.top_p < 1.0:
            weights_TV = torch.exp(scaled_TV - largest_logit(scaled_TV, group)[:, None])
            weights_TV.masked_fill_(scaled_TV < least_T[:, None], 0.0)
            total_T = weights_TV.sum(dim=-1)
            dist.all_reduce(total_T, group=group)
            least_p_T = _largest_reaching(
                lambda value_T: torch.where(scaled_TV >= value_T[:, None], weights_TV, 0.0).sum(dim=-1), self.top_p * total_T, group
            )
            least_T = torch.maximum(least_T, least_p_T)
        return least_T


def largest_logit(scaled_TV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest logit at each position over all ranks of `group`, float32 [T]. Collective over `group`."""
    max_T = local_max(scaled_TV)
    dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
    return max_T


def local_max(scaled_TV: Tensor) -> Tensor:
    """The largest logit at each position, float32 [T]; the smallest finite number on a rank that has only padding."""
    if scaled_TV.shape[1] == 0:
        return torch.full((scaled_TV.shape[0],), torch.finfo(torch.float32).min, device=scaled_TV.device)
    return scaled_TV.amax(dim=-1).float()


def _largest_reaching(weight_from: Callable[[Tensor], Tensor], target_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest float32 at which the columns of all ranks that are not below it weigh at least `target_T`; the lowest if none does.

    `weight_from(value_T)` is the weight of this rank's columns of at least `value_T`. Bisects all finite floats, so the answer is one of
    the columns exactly, and neither a sort nor a gather of the vocabulary is needed.
    """
    limit = torch.finfo(torch.float32).max
    high_T = _ordered(torch.full_like(target_T, limit)).long()
    low_T = _ordered(torch.full_like(target_T, -limit)).long()
    for _ in range(32):
        # Rounded up, so that the loop ends with low == high at the answer.
        middle_T = low_T + (high_T - low_T + 1) // 2
        weight_T = weight_from(_ordered_to_float(middle_T))
        dist.all_reduce(weight_T, group=group)
        reaches_T = weight_T >= target_T
        low_T = torch.where(reaches_T, middle_T, low_T)
        high_T = torch.where(reaches_T, high_T, middle_T - 1)
    return _ordered_to_float(low_T)


def _ordered(values_T: Tensor) -> Tensor:
    """The values as int32 in the same order: negative numbers have the bits below their sign flipped."""
    bits_T = values_T.view(torch.int32)
    return bits_T ^ ((bits_T >> 31) & 0x7FFFFFFF)


def _ordered_to_float(ordered_T: Tensor) -> Tensor:
    bits_T = ordered_T.int()
    return (bits_T ^ ((bits_T >> 31) & 0x7FFFFFFF)).view(torch.float32)
