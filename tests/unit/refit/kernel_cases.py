# SPDX-License-Identifier: Apache-2.0
"""The kernels of GPUs on tensors of any device, against torch. As a program, under Triton's interpreter: on the CPU."""

from __future__ import annotations

import random
import sys

import torch
from torch import Tensor

from mrl.refit import triton_kernels
from mrl.refit.device_checksum import BLOCK_WORDS, word_sum

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


def random_box(generator: random.Random, dtype: torch.dtype, device: str, shape: list[int] | None = None) -> Tensor:
    """A box of random bytes in a wider tensor, at any place in memory; of up to five dimensions, or of `shape`."""
    if shape is None:
        shape = [generator.randint(1, generator.choice([1, 3, 9, 40])) for _ in range(generator.randint(0, 5))]
    starts = [generator.choice([0, 0, 1, 2]) for _ in shape]
    wide = [start + length + generator.choice([0, 0, 1, 3]) for start, length in zip(starts, shape, strict=True)]
    order = sorted(range(len(shape)), key=lambda _: generator.random() if generator.random() < 0.3 else 0)
    shift = generator.choice([0, 0, 1, 3]) * dtype.itemsize
    num_bytes = torch.Size(wide).numel() * dtype.itemsize
    # One more, because a box may be empty and a buffer may not.
    memory = torch.frombuffer(bytearray(generator.randbytes(shift + num_bytes + 1)), dtype=torch.uint8).to(device)
    # Dimensions trade places in memory, as in a transposed view.
    inside = (
        memory[shift : shift + num_bytes]
        .view(dtype)
        .view([wide[dim] for dim in order])
        .permute([order.index(dim) for dim in range(len(shape))])
    )
    return inside[tuple(slice(start, start + length) for start, length in zip(starts, shape, strict=True))]


def check_copies(seed: int, *, num_boxes: int, device: str, large: list[int]) -> None:
    """One launch over random boxes, and some of `large`, writes what torch writes and nothing around it."""
    generator = random.Random(seed)
    sources = [random_box(generator, generator.choice(DTYPES), device) for _ in range(num_boxes)]
    sources += [random_box(generator, dtype, device, large) for dtype in DTYPES] + [torch.empty(0, 3, device=device)]
    targets = [random_box(generator, source.dtype, device, list(source.shape)) for source in sources]
    around = [target.untyped_storage() for target in targets]
    before = [torch.tensor([], dtype=torch.uint8, device=device).set_(storage).clone() for storage in around]
    expected = [whole.clone() for whole in before]
    for whole, target, source in zip(expected, targets, sources, strict=True):
        view = torch.tensor([], dtype=target.dtype, device=device).set_(whole.untyped_storage())
        view.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
    triton_kernels.BoxCopies(targets, sources).run()
    for index, (storage, whole) in enumerate(zip(around, expected, strict=True)):
        now = torch.tensor([], dtype=torch.uint8, device=device).set_(storage)
        assert torch.equal(now, whole), f"seed {seed}, box {index}: {targets[index].shape} {targets[index].stride()}"


def check_sums(seed: int, *, num_boxes: int, device: str, num_blocks: int) -> None:
    """One launch over random values gives the sums that torch gives, now and after the values have changed."""
    generator = random.Random(seed)
    values = [random_box(generator, generator.choice(DTYPES), device) for _ in range(num_boxes)]
    values += [random_box(generator, torch.bfloat16, device, [num_blocks, 2 * BLOCK_WORDS + odd]) for odd in (0, 1)]
    values += [torch.zeros(0, device=device), torch.zeros(4 * BLOCK_WORDS, dtype=torch.uint8, device=device)]
    values = [value for value in values if triton_kernels.is_summable(value)]
    prepared = triton_kernels.BoxSums(values)
    for _ in range(2):
        expected = torch.stack([word_sum(value) for value in values])
        taken = prepared.take()
        wrong = [index for index in range(len(values)) if taken[index] != expected[index]]
        assert not wrong, f"seed {seed}: " + "; ".join(
            f"{values[index].shape} {values[index].stride()}" for index in wrong
        )
        for value in values:
            value.add_(1)


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        check_copies(seed, num_boxes=12, device="cpu", large=[3, 2, 700])
        check_sums(seed, num_boxes=8, device="cpu", num_blocks=1)
