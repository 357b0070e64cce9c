"""One low-rank adapter beside a parallel linear layer: its two factors, and what its ranks tell each other.

A is cut where columns of the weight are, B where rows are; what is not cut is whole on every rank. T tokens of this rank.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from conversion.adapters import Kind
from conversion.tensors import merge_lora
from mrl.config.schema.peft import PeftConfig


class Factor(nn.Module):
    """A or B of an adapter."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_cut: bool, is_expert: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.is_cut, self.is_expert = is_cut, is_expert
        # Each rank of an expert's group sees only its part of a factor's gradient that all of them hold.
        group = parallel_state.get_expert_tensor_parallel_group() if is_expert and not is_cut else None
        self._partial_group = group if group is not None and group.size() > 1 else None
        # Experts of other ranks are other experts, so that all count for the gradient norm, but copies of one count once.
        set_tensor_model_parallel_attributes(self.weight, is_cut or is_expert, 0, 1)
        if self._partial_group is not None and self._partial_group.rank() > 0:
            setattr(self.weight, "shared", True)  # noqa: B010  (Megatron's mark on a parameter)
        if is_expert:
            setattr(self.weight, "allreduce", False)  # noqa: B010  (Megatron's mark on a parameter)

    def forward(self, x: Tensor) -> Tensor:
        """The product with `x`, along its last dimension."""
        weight = self.weight
        if self._partial_group is not None:
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(weight, self._partial_group)
        return F.linear(x, weight)


class Adapter(nn.Module):
    """scale * B A x, to be added to what the linear layer makes of the same `x`."""

    def __init__(
        self,
        settings: PeftConfig,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        *,
        kind: Kind,
        dtype: torch.dtype,
        device: torch.device,
        is_expert: bool,
        sequence_parallel: bool,
    ) -> None:
        """`shapes` are those of this rank's A and B. The factors are not initialised."""
        super().__init__()
        self.linear_in = Factor(shapes[0], dtype, device, is_cut=kind == "row", is_expert=is_expert)
        self.linear_out = Factor(shapes[1], dtype, device, is_cut=kind == "column", is_expert=is_expert)
        self.is_enabled = True
        self._scale = settings.scale
        self._dropout, self._dropout_position = settings.dropout, settings.dropout_position
        # Experts get the tokens of all their ranks, and their dispatcher sums what comes out.
        self._kind: Kind = "whole" if is_expert else kind
        self._sequence_parallel = sequence_parallel
        # Masks of values that differ between tp ranks must differ too.
        self._has_own_input = is_expert or kind == "row" or sequence_parallel
        self._has_own_output = is_expert or kind == "column" or sequence_parallel
        if sequence_parallel and not is_expert:
            for factor in (self.linear_in, self.linear_out):
                # A cut factor sees all tokens; of the other, each rank has the gradient of its own tokens.
                setattr(factor.weight, "sequence_parallel", not factor.is_cut)  # noqa: B010  (Megatron's mark on a parameter)

    def forward(self, x: Tensor) -> Tensor:
        """What the adapter adds, in the dtype of `x`. Collective over the tp group where the linear layer is."""
        low = x.to(self.linear_in.weight.dtype)
        if self._dropout_position == "pre":
            low = self._drop(low, self._has_own_input)
        low = self.linear_in(low)
        if self._kind == "column" and self._sequence_parallel:
            low = tensor_parallel.gather_from_sequence_parallel_region(low)
        elif self._kind == "column":
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low)
        elif self._kind == "row" and self._sequence_parallel:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
        elif self._kind == "row":
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        output = self.linear_out(low)
        if self._dropout_position == "post":
            output = self._drop(output, self._has_own_output)
        return (output * self._scale).to(x.dtype)

    @torch.no_grad()
    def merge_into(self, base: Tensor, target: Tensor) -> None:
        """Writes what the layer's weight `base` is with the adapter; see `conversion.tensors.merge_lora`."""
        target.copy_(merge_lora(base, self.linear_in.weight, self.linear_out.weight, self._scale))

    def _drop(self, x: Tensor, is_own: bool) -> Tensor:
        if not self.training or not self._dropout:
            return x
        with tensor_parallel.get_cuda_rng_tracker().fork() if is_own else nullcontext():
            return F.dropout(x, self._dropout)
