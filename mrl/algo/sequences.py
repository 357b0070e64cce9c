"""Sums and means over the sequences of a packed row. S sequences, T packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """The sequence of each token of a row. Bounds as in `PackedRow.cu_seqlens`; tokens outside the mask belong to none."""

    index_T: Tensor
    """int64."""
    mask_T: Tensor
    """1 for the tokens that take part."""
    counts_S: Tensor
    """Their number in each sequence, at least 1."""

    @staticmethod
    def of(cu_seqlens: Tensor, mask_T: Tensor) -> Segments:
        """The segments of a whole row."""
        lengths = cu_seqlens.diff().long()
        index_T = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths, output_size=len(mask_T))
        counts_S = mask_T.new_zeros(len(lengths)).index_add_(0, index_T, mask_T)
        return Segments(index_T, mask_T, counts_S.clamp(min=1.0))

    def sum(self, values_T: Tensor) -> Tensor:
        """Sum over each sequence, [S]; `values_T` must be finite outside the mask too."""
        values_T = values_T * self.mask_T
        return values_T.new_zeros(len(self.counts_S)).index_add(0, self.index_T, values_T)

    def mean(self, values_T: Tensor) -> Tensor:
        """Mean over each sequence, [S]; 0 where none of its tokens takes part."""
        return self.sum(values_T) / self.counts_S

    def spread(self, values_S: Tensor) -> Tensor:
        """The value of each token's sequence, [T]."""
        return values_S[self.index_T]

    @property
    def weights_T(self) -> Tensor:
        """Weights with which a sum over tokens is the sum of the sequences' means."""
        return self.mask_T / self.spread(self.counts_S)
