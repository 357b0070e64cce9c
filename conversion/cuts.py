# SPDX-License-Identifier: Apache-2.0
"""Cuts of canonical tensors by layer kind: for a Megatron rank or checkpoint, a vLLM worker. Standard library only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache

from conversion.boxes import Box, Piece, align, full

MEGATRON_VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tp."""
VLLM_VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Canonical:
    """A tensor as the Hugging Face checkpoint names and shapes it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AxisRank:
    """Part `rank` of `size` equal parts; `axis` names the parallel size in messages."""

    size: int
    rank: int
    axis: str = "tensor_model_parallel_size"

    def part(self, total: int, what: str) -> tuple[int, int]:
        """Range (start, stop) of this rank's part of `total`."""
        if total % self.size:
            raise ValueError(f"{self.axis}={self.size} does not divide the {total} {what}; use a divisor of {total}")
        step = total // self.size
        return self.rank * step, (self.rank + 1) * step


WHOLE = AxisRank(1, 0)


@dataclass(frozen=True, slots=True)
class Cutout:
    """Shape and contents of one tensor of a holder."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Cut(ABC):
    """Mapping from one or a few canonical tensors, the fields of each kind of cut, to one tensor of each holder."""

    @property
    def tensors(self) -> tuple[Canonical, ...]:
        """The canonical tensors, in the order of the Hugging Face checkpoint."""
        return tuple(value for value in vars(self).values() if isinstance(value, Canonical))

    @abstractmethod
    def megatron(self, shard: AxisRank) -> Cutout:
        """The tensor of a Megatron rank."""

    def vllm(self, shard: AxisRank) -> Cutout:
        """The tensor of a vLLM worker."""
        return self.megatron(shard)

    def checkpoint(self) -> dict[str, Cutout]:
        """The global tensors of a Megatron checkpoint, by suffix of the key."""
        return {"": self.megatron(WHOLE)}


@dataclass(frozen=True)
class Replicated(Cut):
    """A tensor that every rank holds whole."""

    tensor: Canonical

    def megatron(self, shard: AxisRank) -> Cutout:
        whole = _full(self.tensor.shape)
        return Cutout(self.tensor.shape, (Piece(self.tensor.name, whole, whole),))


@dataclass(frozen=True)
class ColumnParallel(Cut):
    """A tensor cut by rows (first dimension, outputs of a linear layer). `transform` is vLLM's."""

    tensor: Canonical
    transform: str | None = None
    unit: int = 1
    """Rows that stay together."""

    def megatron(self, shard: AxisRank) -> Cutout:
        what = f"{'rows' if self.unit == 1 else f'groups of {self.unit} rows'} of {self.tensor.name}"
        start, stop = shard.part(self.tensor.shape[0] // self.unit, what)
        return _rows((self.tensor, start * self.unit, stop * self.unit))

    def vllm(self, shard: AxisRank) -> Cutout:
        cut = self.megatron(shard)
        pieces = tuple(Piece(piece.name, piece.box, piece.local, self.transform) for piece in cut.pieces)
        return Cutout(cut.shape, pieces)


@dataclass(frozen=True)
class RowParallel(Cut):
    """A tensor cut by columns (second dimension, inputs of a linear layer)."""

    tensor: Canonical

    def megatron(self, shard: AxisRank) -> Cutout:
        rows, total = self.tensor.shape
        start, stop = shard.part(total, f"columns of {self.tensor.name}")
        shape = (rows, stop - start)
        return Cutout(shape, (Piece(self.tensor.name, ((0, rows), (start, stop)), _full(shape)),))


@dataclass(frozen=True)
class OnFirst(Cut):
    """A bias after a sum over the ranks: a Megatron rank holds it whole, of vLLM's workers the first; others zeros."""

    tensor: Canonical

    def megatron(self, shard: AxisRank) -> Cutout:
        return Replicated(self.tensor).megatron(shard)

    def vllm(self, shard: AxisRank) -> Cutout:
        return self.megatron(shard) if shard.rank == 0 else Cutout(self.tensor.shape, (), (_full(self.tensor.shape),))


@dataclass(frozen=True)
class Vocabulary(Cut):
    """An embedding cut by rows after padding; padding rows have no source."""

    tensor: Canonical
    padded_rows: int | None = None
    """Rows in a Megatron checkpoint; None for what Megatron pads to at tp 1."""

    def megatron(self, shard: AxisRank) -> Cutout:
        return self._padded(shard, align(self.tensor.shape[0], MEGATRON_VOCABULARY_MULTIPLE * shard.size))

    def vllm(self, shard: AxisRank) -> Cutout:
        return self._padded(shard, align(self.tensor.shape[0], VLLM_VOCABULARY_MULTIPLE))

    def checkpoint(self) -> dict[str, Cutout]:
        return {"": self.megatron(WHOLE) if self.padded_rows is None else self._padded(WHOLE, self.padded_rows)}

    def _padded(self, shard: AxisRank, padded_rows: int) -> Cutout:
        rows, *tail = self.tensor.shape
        start, stop = shard.part(padded_rows, f"padded rows of {self.tensor.name}")
        shape = (stop - start, *tail)
        num_real = max(0, min(stop, rows) - start)
        pieces = _rows((self.tensor, start, start + num_real)).pieces if num_real else ()
        padding = ((num_real, stop - start), *_full(tuple(tail)))
        return Cutout(shape, pieces, (padding,) if num_real < stop - start else ())


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive rows of a fused projection. They are cut at the borders of `num_units` heads or groups."""

    label: str
    rows: int
    num_units: int


@dataclass(frozen=True)
class Sections(Cut):
    """A tensor of consecutive sections of rows, each cut on its own (Mamba's in_proj z|x|B|C|dt and conv1d x|B|C)."""

    tensor: Canonical
    sections: tuple[Section, ...]

    def megatron(self, shard: AxisRank) -> Cutout:
        return self._cut(shard, share_single_units=False)

    def vllm(self, shard: AxisRank) -> Cutout:
        # vLLM gives every worker a copy of a single Mamba group.
        return self._cut(shard, share_single_units=True)

    def checkpoint(self) -> dict[str, Cutout]:
        cuts, offset = {}, 0
        for section in self.sections:
            cuts[f".{section.label}"] = _rows((self.tensor, offset, offset + section.rows))
            offset += section.rows
        return cuts

    def _cut(self, shard: AxisRank, *, share_single_units: bool) -> Cutout:
        ranges, offset = [], 0
        for section in self.sections:
            part = WHOLE if share_single_units and section.num_units == 1 else shard
            start, stop = part.part(
                section.num_units, f"heads or groups in section {section.label} of {self.tensor.name}"
            )
            unit = section.rows // section.num_units
            ranges.append((self.tensor, offset + start * unit, offset + stop * unit))
            offset += section.rows
        return _rows(*ranges)


@dataclass(frozen=True)
class Regrouped(Cut):
    """Two tensors of equal groups of rows, each with rows of every section; Megatron has the groups within a section.

    All sections have as many units as there are groups.
    """

    first: Canonical
    second: Canonical
    of_first: tuple[Section, ...]
    of_second: tuple[Section, ...]

    def megatron(self, shard: AxisRank) -> Cutout:
        return _rows(*(part for parts in self._sections(shard).values() for part in parts))

    def checkpoint(self) -> dict[str, Cutout]:
        return {f".{label}": _rows(*parts) for label, parts in self._sections(WHOLE).items()}

    def _sections(self, shard: AxisRank) -> dict[str, list[tuple[Canonical, int, int]]]:
        groups, found = self.of_first[0].num_units, {}
        ranks = range(*shard.part(groups, f"heads in {self.first.name}"))
        for tensor, sections in ((self.first, self.of_first), (self.second, self.of_second)):
            offset, stride = 0, tensor.shape[0] // groups
            for section in sections:
                rows = section.rows // groups
                found[section.label] = [
                    (tensor, group * stride + offset, group * stride + offset + rows) for group in ranks
                ]
                offset += rows
        return found


@dataclass(frozen=True)
class Joined(Cut):
    """Tensors one below the other, each cut in its own sections."""

    parts: tuple[Sections, ...]

    @property
    def tensors(self) -> tuple[Canonical, ...]:
        return tuple(part.tensor for part in self.parts)

    def megatron(self, shard: AxisRank) -> Cutout:
        cuts = zip(self.tensors, (part.megatron(shard) for part in self.parts), strict=True)
        return _rows(*((tensor, *piece.box[0]) for tensor, cut in cuts for piece in cut.pieces))

    def checkpoint(self) -> dict[str, Cutout]:
        return {suffix: cutout for part in self.parts for suffix, cutout in part.checkpoint().items()}


@dataclass(frozen=True)
class Qkv(Cut):
    """Query, key and value of grouped-query attention. Megatron interleaves them by group; vLLM concatenates them."""

    query: Canonical
    key: Canonical
    value: Canonical
    head_dim: int
    has_gate: bool = False
    """True if each head of the query has a gate below it; Megatron has a group's gates below all its queries."""

    def megatron(self, shard: AxisRank) -> Cutout:
        """Equal row blocks of [q of group 0 | k 0 | v 0 | q of group 1 | ...]; a block may begin inside of a head."""
        num_groups, parts = self.key.shape[0] // self.head_dim, list[tuple[Canonical, int, int]]()
        if self.has_gate:
            # With fewer groups than ranks, Megatron cuts a group's queries, and not its gates.
            shard.part(num_groups, f"heads of {self.key.name}")
        for group in range(num_groups):
            for tensor in self.tensors:
                rows = tensor.shape[0] // num_groups
                whole = (tensor, group * rows, (group + 1) * rows)
                parts += self._with_gates(*whole) if self.has_gate and tensor == self.query else [whole]
        low, high = shard.part(sum(stop - start for _, start, stop in parts), f"rows of the fused {self.query.name}")
        clipped, offset = [], 0
        for tensor, start, stop in parts:
            first, last = max(low, offset), min(high, offset + stop - start)
            if first < last:
                clipped.append((tensor, start + first - offset, start + last - offset))
            offset += stop - start
        return _rows(*clipped)

    def _with_gates(self, tensor: Canonical, start: int, stop: int) -> list[tuple[Canonical, int, int]]:
        dim = self.head_dim
        return [(tensor, row, row + dim) for first in (start, start + dim) for row in range(first, stop, 2 * dim)]

    def vllm(self, shard: AxisRank) -> Cutout:
        """[q of the worker | k | v]; with more workers than key heads, several workers hold the same key head."""
        num_heads, num_groups = (tensor.shape[0] // self.head_dim for tensor in (self.query, self.key))
        first, last = shard.part(num_heads, f"heads of {self.query.name}")
        if shard.size <= num_groups:
            low, high = shard.part(num_groups, f"heads of {self.key.name}")
        elif shard.size % num_groups:
            raise ValueError(
                f"{shard.axis}={shard.size} is no multiple of the {num_groups} heads of {self.key.name}; use a "
                "multiple or a divisor"
            )
        else:
            low = shard.rank // (shard.size // num_groups)
            high = low + 1
        dim = self.head_dim
        key_rows = (low * dim, high * dim)
        return _rows((self.query, first * dim, last * dim), (self.key, *key_rows), (self.value, *key_rows))


@dataclass(frozen=True)
class Gated(Cut):
    """Gate and up projection of a gated MLP: every rank and worker holds its gate rows above its up rows."""

    gate: Canonical
    up: Canonical

    def megatron(self, shard: AxisRank) -> Cutout:
        start, stop = shard.part(self.gate.shape[0], f"rows of {self.gate.name}")
        return _rows((self.gate, start, stop), (self.up, start, stop))


@dataclass(frozen=True)
class Stacked(Cut):
    """Two tensors, one below the other, which every rank or worker holds whole."""

    first: Canonical
    second: Canonical

    def megatron(self, shard: AxisRank) -> Cutout:
        return _rows(*((tensor, 0, tensor.shape[0]) for tensor in self.tensors))


@dataclass(frozen=True)
class Experts:
    """A linear layer of all experts. A Megatron rank keeps a tensor per own expert; checkpoint and vLLM stack them."""

    cut: Cut
    """Cut of one expert; "{expert}" in tensor names stands for the expert's index."""
    num_experts: int

    @property
    def tensors(self) -> tuple[Canonical, ...]:
        shapes = [tensor.shape for tensor in self.cut.tensors]
        names = zip(*(self._names[tensor.name] for tensor in self.cut.tensors), strict=True)
        return tuple(Canonical(name, shape) for expert in names for name, shape in zip(expert, shapes, strict=True))

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        return {
            tensor.name: [tensor.name.replace("{expert}", str(index)) for index in range(self.num_experts)]
            for tensor in self.cut.tensors
        }

    def megatron(self, expert_shard: AxisRank, shard: AxisRank) -> list[Cutout]:
        """The tensors of a rank, by local expert."""
        cut = self.cut.megatron(shard)
        pieces = [(self._names[piece.name], piece.box, piece.local, piece.transform) for piece in cut.pieces]
        return [
            Cutout(
                cut.shape,
                tuple(Piece(names[index], box, local, transform) for names, box, local, transform in pieces),
                cut.padding,
            )
            for index in range(*expert_shard.part(self.num_experts, "experts"))
        ]

    def checkpoint(self) -> dict[str, Cutout]:
        """The global tensor [experts, ...] of a Megatron checkpoint; see `Cut.checkpoint`."""
        return {"": self._stacked(self.cut.megatron(WHOLE), range(self.num_experts))}

    def vllm(self, expert_shard: AxisRank, shard: AxisRank) -> Cutout:
        """A worker's tensor [local experts, ...] under vLLM's linear placement: first workers may hold one more."""
        if expert_shard.size > self.num_experts:
            raise ValueError(f"{expert_shard.axis}={expert_shard.size} is more than the {self.num_experts} experts")
        base, remainder = divmod(self.num_experts, expert_shard.size)
        start = expert_shard.rank * base + min(expert_shard.rank, remainder)
        return self._stacked(self.cut.vllm(shard), range(start, start + base + (expert_shard.rank < remainder)))

    def _stacked(self, cut: Cutout, experts: range) -> Cutout:
        rows = [(index, ((place, place + 1),)) for place, index in enumerate(experts)]
        parts = [(self._names[piece.name], piece.box, piece.local, piece.transform) for piece in cut.pieces]
        pieces = [
            Piece(names[index], box, row + local, transform)
            for index, row in rows
            for names, box, local, transform in parts
        ]
        padding = tuple(row + box for _, row in rows for box in cut.padding)
        return Cutout((len(experts), *cut.shape), tuple(pieces), padding)


def _rows(*parts: tuple[Canonical, int, int]) -> Cutout:
    tail = parts[0][0].shape[1:]
    columns = _full(tail)
    pieces, offset = [], 0
    for tensor, start, stop in parts:
        pieces.append(Piece(tensor.name, ((start, stop), *columns), ((offset, offset + stop - start), *columns)))
        offset += stop - start
    return Cutout((offset, *tail), tuple(pieces))


_full = lru_cache(maxsize=4096)(full)
