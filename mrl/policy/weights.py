"""The live weights of a rank by slot: finding them, proving that all copies over the ranks are equal, changing all of them at once.

Needs no Megatron.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conversion.boxes import Box, Layout, Piece, Slot, lengths
from conversion.tensors import box_view
from mrl.policy.arena import live_tensors
from mrl.refit.checksum import Checksums, Value

# How `perturb` changes a weight. Relative, well above bfloat16's resolution of 2^-8, so that nearly every element changes.
SCALE = 0.02
# Added on top, so that zeros change too (a fresh router bias is all zeros).
OFFSET = 1e-3

# Odd 64-bit constants of splitmix64 (https://prng.di.unimi.it/splitmix64.c), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_NUM_BITS = 24


def rank_tensors(models: Sequence[nn.Module], layout: Layout) -> dict[Slot, Tensor]:
    """Every parameter and persistent buffer of this rank, by slot: the live tensors themselves. `models` are bare of wrappers.

    Raises:
        RuntimeError: the live model and its conversion table differ, so some weight would never be converted, saved or sent.
    """
    tensors: dict[Slot, Tensor] = {}
    for index, model in enumerate(models):
        tensors |= live_tensors(model, index)
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
        everyone: list[list[tuple[str, str, Box]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, [(slot.name, piece.name, piece.box) for slot, piece in _pieces(layout)])
        self._max_pieces = max(len(pieces) for pieces in everyone)
        # By tensor and box: slot, rank and place among the rank's pieces of every copy.
        copies: dict[tuple[str, Box], list[tuple[str, int, int]]] = defaultdict(list)
        for rank, pieces in enumerate(everyone):
            for index, (slot_name, name, box) in enumerate(pieces):
                copies[name, box].append((slot_name, rank, index))
        self._shared = {key: held for key, held in copies.items() if len(held) > 1}

    def run(self) -> None:
        """Checks the bytes as they are now. Collective over all ranks.

        Raises:
            RuntimeError: copies differ (on all ranks); it names slots and ranks.
        """
        sums = torch.full((self._max_pieces,), -1, dtype=torch.int64)
        sums[: len(self._views)] = self._checksums.take()
        gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, sums)
        table = torch.stack(gathered).tolist()
        errors = []
        for (name, box), copies in self._shared.items():
            ranks_by_sum: dict[int, list[int]] = defaultdict(list)
            for _, rank, index in copies:
                ranks_by_sum[table[rank][index]].append(rank)
            if len(ranks_by_sum) > 1:
                errors.append(f"{copies[0][0]} ({name} {box}): ranks {' / '.join(map(str, ranks_by_sum.values()))}")
        if errors:
            raise RuntimeError(f"copies of {len(errors)} weights differ between ranks: {'; '.join(errors[:10])}")


@torch.no_grad()
def perturb(tensors: Mapping[Slot, Tensor], layout: Layout, *, seed: int) -> None:
    """Changes every element of the tensors that comes from a canonical one, in place; padding stays zero."""
    for slot, content in layout.items():
        for piece in content.pieces:
            view = box_view(tensors[slot], piece.local)
            noise = canonical_noise(piece.name, piece.box, seed=seed).view(view.shape).to(view.device)
            view.copy_(view.float() * (1 + SCALE * noise) + OFFSET * noise)


def canonical_noise(name: str, box: Box, *, seed: int) -> Tensor:
    """Numbers in [-1, 1), float32, of the box's shape: a function of seed, canonical name and position in the canonical tensor."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big", signed=True)
    state = torch.tensor(key)
    for start, stop in box:
        # Mixed dimension by dimension, so that no two positions of a tensor fall together.
        state = _mix(state[..., None] + torch.arange(start, stop) * _STEP)
    uniform = (state.view(lengths(box)) & ((1 << _NUM_BITS) - 1)).float() / (1 << _NUM_BITS)
    return 2 * uniform - 1


def _mix(values: Tensor) -> Tensor:
    # 64-bit arithmetic wraps around; the shift keeps the sign, which does no harm here.
    values = (values ^ (values >> 30)) * _MIX
    return values ^ (values >> 27)


def _pieces(layout: Layout) -> list[tuple[Slot, Piece]]:
    return [(slot, piece) for slot, tensor in layout.items() for piece in tensor.pieces]


def _names(slots: Iterable[Slot]) -> str:
    return ", ".join(sorted(map(str, slots))[:10]) or "none"
