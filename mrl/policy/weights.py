"""The live weights of a rank by slot, and the proof that all copies of a weight over the ranks are the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from conversion.boxes import Box, Layout, Piece, Slot
from conversion.tensors import box_view
from mrl.policy.arena import live_tensors
from mrl.policy.reports import SettleReport
from mrl.refit.checksum import Checksums, Value


@dataclass(frozen=True)
class _Holder:
    """One rank's copy of a box."""

    rank: int
    index: int
    slot: Slot


def rank_tensors(chunks: list[nn.Module], layout: Layout) -> dict[Slot, Tensor]:
    """Every parameter and persistent buffer of this rank, by slot: the live tensors themselves.

    Raises:
        RuntimeError: the live model and its conversion table differ, so some weight would never be converted, saved or sent.
    """
    tensors: dict[Slot, Tensor] = {}
    for index, chunk in enumerate(chunks):
        tensors |= live_tensors(unwrap_model(chunk), index)
    if tensors.keys() != layout.keys():
        unknown, missing = tensors.keys() - layout.keys(), layout.keys() - tensors.keys()
        raise RuntimeError(f"weights that the conversion table lacks: {_names(unknown)}; that only the table has: {_names(missing)}")
    for slot, tensor in tensors.items():
        live = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if live != (layout[slot].shape, layout[slot].dtype):
            raise RuntimeError(f"{slot.name} is {live} in the model, but {layout[slot].shape, layout[slot].dtype} in the conversion table")
    return tensors


class CopyCheck:
    """Compares all copies of every box of every canonical tensor, whichever ranks hold them: dp replicas, tp duplicates, tied weights."""

    def __init__(self, tensors: Mapping[Slot, Tensor], layout: Layout) -> None:
        """Collective over all ranks."""
        self._views = [box_view(tensors[slot], piece.local) for slot, piece in _pieces(layout)]
        self._checksums = Checksums([Value(view) for view in self._views])
        mine = [(slot, piece.name, piece.box) for slot, piece in _pieces(layout)]
        everyone: list[list[tuple[Slot, str, Box]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self._num_slots = max(len(pieces) for pieces in everyone)
        holders: dict[tuple[str, Box], list[_Holder]] = defaultdict(list)
        for rank, pieces in enumerate(everyone):
            for index, (slot, name, box) in enumerate(pieces):
                holders[name, box].append(_Holder(rank, index, slot))
        self._shared = {key: copies for key, copies in holders.items() if len(copies) > 1}

    def run(self) -> SettleReport:
        """Checks the bytes as they are now. Collective over all ranks.

        Raises:
            RuntimeError: copies differ (on all ranks); it names slots and ranks.
        """
        sums = torch.full((self._num_slots,), -1, dtype=torch.int64)
        sums[: len(self._views)] = self._checksums.take()
        gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, sums)
        table = torch.stack(gathered).tolist()
        errors = []
        for (name, box), copies in self._shared.items():
            ranks_by_sum: dict[int, list[int]] = defaultdict(list)
            for copy in copies:
                ranks_by_sum[table[copy.rank][copy.index]].append(copy.rank)
            if len(ranks_by_sum) > 1:
                groups = " / ".join(str(ranks) for ranks in ranks_by_sum.values())
                errors.append(f"{copies[0].slot.name} ({name} {box}): ranks {groups}")
        if errors:
            raise RuntimeError(f"copies of {len(errors)} weights differ between ranks: {'; '.join(errors[:10])}")
        return SettleReport(sum(view.numel() * view.element_size() for view in self._views), len(self._shared))


def _pieces(layout: Layout) -> list[tuple[Slot, Piece]]:
    return [(slot, piece) for slot, tensor in layout.items() for piece in tensor.pieces]


def _names(slots: set[Slot]) -> str:
    names = sorted(map(str, slots))
    return ", ".join(names[:10]) or "none"
