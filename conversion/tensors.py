# SPDX-License-Identifier: Apache-2.0
"""Boxes of torch tensors: views, value changes, checksums, and reading them from files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from conversion.boxes import DTYPE_BYTES, Box, SlotLayout, full, lengths
from conversion.files.durable import IO_TIMEOUT_S
from conversion.files.manifest import FileChecksums

T = TypeVar("T")

BLOCK_BYTES = 4 << 20
"""Bytes read and hashed at once: small enough for the caches of a core, large enough to hide the cost of a call."""


class BoxSource(Protocol):
    """Tensors by name; any box of one can be read."""

    def shape(self, name: str, /) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def dtype(self, name: str, /) -> torch.dtype:
        """dtype of a tensor as it is stored."""
        ...

    def read_into(self, name: str, /, box: Box, target: Tensor) -> None:
        """Copies a box into a tensor of the box's lengths, cast to its dtype."""
        ...


def torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name} of a weight is not supported; use one of {sorted(DTYPE_BYTES)}")
    return getattr(torch, name)


def dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    torch_dtype(name)
    return name


def box_view(tensor: Tensor, box: Box) -> Tensor:
    """The elements of `box`, as a view without gradient."""
    return tensor.detach()[tuple(slice(start, stop) for start, stop in box)]


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which it shares."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def merge_lora(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns base + scale * B A, computed in float32, in the base's dtype; keeps its bits where the product is 0."""
    change = (b.float() @ a.float()).mul_(scale)
    # -0.0 + 0.0 would lose its sign.
    return torch.where(change == 0, base, (base.float() + change).to(base.dtype))


def transformed(tensor: Tensor, transform: str | None) -> Tensor:
    """Canonical values in the holder's form, not its dtype; `tensor` itself without a transform. See `Piece.transform`.

    `neg_exp` gives vLLM's Mamba decay A = -exp(A_log), computed in float32 as vLLM's loader does.
    """
    if transform is None:
        return tensor
    if transform != "neg_exp":
        raise ValueError(f"unknown transform {transform!r}; known: neg_exp")
    return -torch.exp(tensor.float())


@torch.no_grad()
def fill_from(tensor: Tensor, content: SlotLayout, source: BoxSource) -> None:
    """Reads every piece of a slot from its source into the slot's tensor, cast to its dtype; padding becomes zero."""
    for box in content.padding:
        box_view(tensor, box).zero_()
    for piece in content.pieces:
        extra = len(piece.local) - len(piece.box)
        target = box_view(tensor[tuple(start for start, _ in piece.local[:extra])], piece.local[extra:])
        if piece.transform is None:
            source.read_into(piece.name, piece.box, target)
        else:
            values = torch.empty(lengths(piece.box), dtype=source.dtype(piece.name))
            source.read_into(piece.name, piece.box, values)
            target.copy_(transformed(values, piece.transform))


def read_ahead(
    items: Iterable[T], like: Callable[[T], tuple[tuple[int, ...], torch.dtype]], fill: Callable[[T, Tensor], None]
) -> Iterator[Tensor]:
    """A tensor per item, of `like`'s shape and dtype, in order. A thread fills the next while the caller works on one.

    Asking for the next one ends a tensor: all share two buffers, as the pages of new ones take the kernel longer than
    reading does.
    """
    buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def filled(index: int, item: T) -> Tensor:
        shape, dtype = like(item)
        count, turn = math.prod(shape), index % 2
        if len(buffers[turn]) < count * dtype.itemsize:
            buffers[turn] = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        # torch.save writes all of a storage; that of a view would be the whole buffer.
        tensor = torch.frombuffer(buffers[turn].numpy(), dtype=dtype, count=count).view(shape)
        fill(item, tensor)
        return tensor

    following: Future[Tensor] | None = None
    with ThreadPoolExecutor(1) as pool:
        for index, item in enumerate(items):
            current, following = following, pool.submit(filled, index, item)
            if current is not None:
                yield current.result(IO_TIMEOUT_S)
        if following is not None:
            yield following.result(IO_TIMEOUT_S)


def read_whole(source: BoxSource, name: str) -> Tensor:
    tensor = torch.empty(source.shape(name), dtype=source.dtype(name))
    source.read_into(name, full(tensor.shape), tensor)
    return tensor


def blocks(shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Boxes of consecutive rows that tile the shape in order, of about `BLOCK_BYTES` each and of one row at least."""
    if not shape:
        yield ()
        return
    step = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * itemsize))
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *full(shape[1:]))


def content_checksums(source: BoxSource, name: str, dtype: torch.dtype) -> tuple[str, int]:
    """sha256 and CRC-32 of a tensor's content in a dtype, row by row, little-endian. Reads block by block."""
    checksums, block = FileChecksums(), torch.empty(0)
    for box in blocks(source.shape(name), dtype.itemsize):
        if block.shape != lengths(box):
            block = torch.empty(lengths(box), dtype=dtype)
        source.read_into(name, box, block)
        checksums.add(byte_view(block))
    return checksums.values()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A row-major tensor at a place in a file."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_stored(file: int, stored: StoredTensor, box: Box, target: Tensor) -> None:
    """Copies a box of a stored tensor into `target`, which has the box's lengths; casts to its dtype.

    `file` is a descriptor of `stored.path`. Reads whole rows, straight into `target` where that has the same layout.
    The file is not mapped: a mapping would count as memory of the process, and an error of the disk would kill it.
    """
    if not box:
        stored, box, target = StoredTensor(stored.path, stored.offset, stored.dtype, (1,)), ((0, 1),), target.view(1)
    (start, stop), *rest = box
    row_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize
    if len(box) > 1 and (stop - start == 1 or row_bytes > BLOCK_BYTES):
        for index in range(start, stop):
            row = StoredTensor(stored.path, stored.offset + index * row_bytes, stored.dtype, stored.shape[1:])
            read_stored(file, row, tuple(rest), target[index - start])
        return
    is_direct = (
        target.dtype == stored.dtype
        and target.device.type == "cpu"
        and target.is_contiguous()
        and full(stored.shape[1:]) == tuple(rest)
    )
    step = stop - start if is_direct else max(1, BLOCK_BYTES // max(1, row_bytes))
    for low in range(start, stop, step):
        part = target[low - start : min(low + step, stop) - start]
        rows = part if is_direct else torch.empty((len(part), *stored.shape[1:]), dtype=stored.dtype)
        content, offset, done = byte_view(rows), stored.offset + low * row_bytes, 0
        while done < len(content):
            num_bytes = os.preadv(file, [content[done:]], offset + done)
            if not num_bytes:
                raise ValueError(
                    f"{stored.path} ends at byte {offset + done}, before the tensor that it should hold; the file "
                    "is damaged"
                )
            done += num_bytes
        if not is_direct:
            part.copy_(box_view(rows, ((0, len(part)), *rest)))
