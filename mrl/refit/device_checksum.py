# SPDX-License-Identifier: Apache-2.0
"""A checksum of bytes that a GPU takes without copies to the host, in torch operations; triton_kernels.py is faster.

The bytes in C order are 32-bit words x_0, x_1, ...; the sum of x_i * w_i modulo 2^64, with fixed odd random 64-bit
weights. An odd weight makes every change of a single word show; words that change places show because their weights
differ.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

BLOCK_WORDS = 1 << 13

# Blocks that torch adds up at a time: enough to keep a GPU busy.
_ROWS = 128

# Weyl increment and multipliers of splitmix64 (https://prng.di.unimi.it/splitmix64.c), as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27, 31)


def word_sum(tensor: Tensor) -> Tensor:
    """Checksum of the tensor's bytes in C order, whatever its dtype and strides: int64, no dimensions, on its device.

    Equal on every device. Blocks of `BLOCK_WORDS` words are summed with the same weights, and their sums with weights
    of their own.
    """
    words = _words(tensor.detach())
    weights = odd_weights(BLOCK_WORDS, words.device)
    num_whole = len(words) // BLOCK_WORDS * BLOCK_WORDS
    # Integer products and sums of torch wrap around: arithmetic modulo 2^64.
    sums = [(rows * weights).sum(1) for rows in words[:num_whole].view(-1, BLOCK_WORDS).split(_ROWS)]
    if num_whole < len(words) or not len(words):
        rest = words[num_whole:]
        sums.append((rest * weights[: len(rest)]).sum(0, keepdim=True))
    blocks = torch.cat(sums)
    outer = odd_weights(len(blocks) + 1, words.device)
    # The length counts too: a missing zero byte must change the checksum.
    return (blocks * outer[:-1]).sum() + outer[-1] * tensor.nbytes


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes in C order, uint8 [tensor.nbytes]: a view where they lie so."""
    contiguous = tensor.contiguous()
    # `view` refuses a dimension of length 1 with an odd stride.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
    raw = bytes_of(tensor)
    if len(raw) % 4 == 0 and raw.storage_offset() % 4 == 0:
        return raw.view(torch.int32)
    padded = torch.zeros(-(-len(raw) // 4) * 4, dtype=torch.uint8, device=raw.device)
    padded[: len(raw)] = raw
    return padded.view(torch.int32)


@lru_cache(maxsize=8)
def _weights(num_weights: int, device: torch.device) -> Tensor:
    state = torch.arange(1, num_weights + 1, device=device) * _INCREMENT
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        # Shifting a signed number keeps its sign; the mask makes the shift unsigned.
        state = (state ^ (state >> shift & (1 << 64 - shift) - 1)) * multiplier
    return state | 1


def odd_weights(num_weights: int, device: torch.device) -> Tensor:
    """The first outputs of splitmix64 from seed 0 with their lowest bit set, int64 [num_weights]."""
    # The next power of two, so that few sizes are kept.
    return _weights(1 << max(num_weights - 1, 0).bit_length(), device)[:num_weights]
