# SPDX-License-Identifier: Apache-2.0
"""Weights that the model's last stage carries beside Megatron's modules, such as layers of multi-token prediction. They are never trained.

Megatron-core 0.16.1 builds no MTP layers in its hybrid models. Their weights are read, cut, saved, refitted and exported like any others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule
from torch import nn

from conversion.boxes import Layout, Slot, SlotLayout, full
from conversion.families.common import CARRIED, HfConfig
from conversion.families.registry import family
from conversion.tensors import torch_dtype
from mrl.policy.checkpoint_entries import LayoutEntries

_EXPERTS = ".local_experts."


def attach_carried(chunk: MegatronModule, index: int, layout: Layout, hf_config: HfConfig, dtype: str) -> None:
    """Gives a chunk the weights that `layout`, of the whole rank, has for it beside Megatron's, zero until they are loaded.

    `chunk` is bare of wrappers, and has its dtype and device: what casts a model must not cast these. `dtype` is the model's.
    """
    slots = {
        slot.name.removeprefix(CARRIED): content
        for slot, content in layout.items()
        if slot.chunk == index and slot.name.startswith(CARRIED)
    }
    if not slots:
        return
    model, device = family(hf_config), next(chunk.parameters()).device
    canonical = model.canonical(hf_config)
    entries = LayoutEntries(layout, model.torch_dist_layout(hf_config, dtype))
    setattr(chunk, CARRIED.removesuffix("."), _Carried(slots, canonical, entries, index, device))


class _Carried(nn.Module):
    """Tensors under the names of their slots, none of which requires a gradient."""

    def __init__(
        self,
        slots: Mapping[str, SlotLayout],
        canonical: Mapping[str, tuple[int, ...]],
        entries: LayoutEntries,
        chunk: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._entries, self._chunk = entries, chunk
        # Tensors that every rank of the tp or etp group holds whole; one of them writes each into a checkpoint.
        self._copied = {
            name for name, content in slots.items() if all(piece.box == full(canonical[piece.name]) for piece in content.pieces)
        }
        for name, content in slots.items():
            *path, last = name.split(".")
            node: nn.Module = self
            for part in path:
                if part not in node._modules:
                    node.add_module(part, nn.Module())
                node = node.get_submodule(part)
            weight = nn.Parameter(torch.zeros(content.shape, dtype=torch_dtype(content.dtype), device=device), requires_grad=False)
            if _EXPERTS in name:
                setattr(weight, "allreduce", False)  # noqa: B010  (Megatron's mark on a parameter)
            node.register_parameter(last, weight)

    def sharded_state_dict(self, prefix: str, sharded_offsets: object, metadata: object) -> ShardedStateDict:
        """Entries of a Megatron checkpoint; called by the model's method of this name."""
        return {
            f"{prefix}{name}": self._entries.entry(Slot(f"{CARRIED}{name}", self._chunk), weight, self._replica_id(name))
            for name, weight in self.named_parameters()
        }

    def _replica_id(self, name: str) -> tuple[int, int, int]:
        """Zeros on the rank that writes the weight."""
        if _EXPERTS in name:
            rank, replica = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_data_parallel_rank()
        else:
            rank = parallel_state.get_tensor_model_parallel_rank()
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return 0, rank if name in self._copied else 0, replica
