"""Changes every weight a little, by a rule of canonical elements: all copies stay equal, and any layout gives the same model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from conversion.boxes import Box, Layout, Slot, lengths
from conversion.tensors import box_view

# Relative, well above bfloat16's resolution of 2^-8, so that nearly every element changes.
SCALE = 0.02
# Added on top, so that zeros change too (a fresh router bias is all zeros).
OFFSET = 1e-3

# Odd 64-bit constants of splitmix64 (https://prng.di.unimi.it/splitmix64.c), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_NUM_BITS = 24


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
