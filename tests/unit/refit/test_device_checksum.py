# SPDX-License-Identifier: Apache-2.0
"""The device checksum on CPU tensors against arithmetic on Python's integers."""

from __future__ import annotations

import pytest
import torch

from mrl.refit import device_checksum
from mrl.refit.device_checksum import odd_weights, word_sum

MODULUS = 1 << 64
CPU = torch.device("cpu")


def splitmix64(num_values: int) -> list[int]:
    """Reference implementation (https://prng.di.unimi.it/splitmix64.c), from seed 0."""
    values, state = [], 0
    for _ in range(num_values):
        state = (state + 0x9E3779B97F4A7C15) % MODULUS
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
        values.append(z ^ (z >> 31))
    return values


def signed(value: int) -> int:
    return (value % MODULUS + (MODULUS >> 1)) % MODULUS - (MODULUS >> 1)


def slow_word_sum(raw: bytes, block_words: int) -> int:
    weights = [value | 1 for value in splitmix64(max(block_words, len(raw) // 4 + 2))]
    padded = raw + bytes(-len(raw) % 4)
    words = [int.from_bytes(padded[at : at + 4], "little", signed=True) for at in range(0, len(padded), 4)]
    blocks = [words[at : at + block_words] for at in range(0, len(words), block_words)]
    sums = [sum(word * weight for word, weight in zip(block, weights, strict=False)) for block in blocks]
    return signed(sum(value * weight for value, weight in zip([*sums, len(raw)], weights, strict=False)))


def test_weights_are_splitmix64_made_odd():
    # The first outputs of splitmix64 from seed 0, as published with other implementations of it.
    assert splitmix64(2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert odd_weights(1000, CPU).tolist() == [signed(value | 1) for value in splitmix64(1000)]


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 7, 64, 1000, 4096 * 3 + 5])
def test_equals_slow_arithmetic(num_bytes, monkeypatch):
    monkeypatch.setattr(device_checksum, "BLOCK_WORDS", 1024)
    raw = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    assert word_sum(raw).item() == slow_word_sum(raw.numpy().tobytes(), 1024)
    # The first byte of a view need not lie on a word.
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), raw])[1:]
    assert word_sum(shifted).item() == word_sum(raw).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_equal_bytes_in_c_order_have_equal_sums_whatever_the_strides(dtype):
    wide = torch.randint(0, 100, (6, 8, 10)).to(dtype)
    for view in (wide[1:5, :, 2:9], wide.transpose(0, 2), wide[3], wide[:, 3, 1], wide[2:3, 3, 1]):
        expected = word_sum(view.clone(memory_format=torch.contiguous_format).view(torch.uint8))
        assert word_sum(view) == expected
        assert word_sum(view.unsqueeze(0)) == expected


def test_every_flipped_bit_and_every_swap_changes_the_sum():
    # Distinct values: a swap of equal ones changes nothing.
    tensor = torch.linspace(-1.0, 2.0, 12).bfloat16()
    raw = tensor.view(torch.uint8)
    sums = {word_sum(tensor).item()}
    for index in range(len(raw)):
        for bit in range(8):
            raw[index] ^= 1 << bit
            sums.add(word_sum(tensor).item())
            raw[index] ^= 1 << bit
    assert len(sums) == 1 + 8 * len(raw)
    for first in range(12):
        for second in range(first):
            swapped = tensor.clone()
            swapped[[first, second]] = tensor[[second, first]]
            sums.add(word_sum(swapped).item())
    assert len(sums) == 1 + 8 * len(raw) + 12 * 11 // 2


def test_words_that_differ_in_their_sign_only_do_not_trade_places_unseen():
    zeros = torch.zeros(64, dtype=torch.int32)
    sums = set()
    for index in range(64):
        zeros[index] = -(1 << 31)
        sums.add(word_sum(zeros).item())
        zeros[index] = 0
    assert len(sums) == 64


def test_blocks_that_trade_places_and_lost_zeros_show(monkeypatch):
    monkeypatch.setattr(device_checksum, "BLOCK_WORDS", 8)
    first, second = torch.randn(8), torch.randn(8)
    assert word_sum(torch.cat([first, second])) != word_sum(torch.cat([second, first]))
    assert word_sum(torch.zeros(16)) != word_sum(torch.zeros(15))
