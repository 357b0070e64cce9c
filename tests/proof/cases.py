# SPDX-License-Identifier: Apache-2.0
"""Random reshards, carried out on dense arrays as trainer ranks and engine workers do it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from conversion.boxes import ALIGNMENT, DTYPE_BYTES, Layout, Slot, SlotLayout, volume
from conversion.families.registry import family
from conversion.reshard import reshard
from conversion.schedule import CHECKSUM_BYTES, Delivery, Pull, Schedule
from tests.proof.models import random_case
from tests.unit.conversion.dense import PADDING, UNWRITTEN, index_arrays, part

Arrays = dict[Slot, np.ndarray]

# What a transform adds to a value: any wrong one shows, and two do not cancel.
TRANSFORMS = {None: 0, "neg_exp": 1 << 40}


class Case:
    """A random model, and random layouts of trainer and engines, on the same GPUs or on GPUs of their own."""

    def __init__(self, choose: random.Random) -> None:
        self.drawn = case = random_case(choose)
        self.family = found = family(case.hf_config)
        coords = [case.parallel.coords_of(rank, case.world_size) for rank in range(case.world_size)]
        by_coords = {
            key: found.megatron_layout(case.hf_config, case.parallel, key, "bfloat16", case.flavour)
            for key in set(coords)
        }
        self.sources = {rank: by_coords[key] for rank, key in enumerate(coords)}
        # A checkpoint is a layout like any other.
        self.to_checkpoint = choose.random() < 0.1
        if self.to_checkpoint:
            workers = [found.torch_dist_layout(case.hf_config, "bfloat16")]
        else:
            workers = [
                found.vllm_layout(case.hf_config, case.engine, worker, "bfloat16") for worker in range(case.engine.tp)
            ]
        num_engines = choose.randint(1, min(4, case.world_size // len(workers)))
        self.targets = {target: workers[target % len(workers)] for target in range(num_engines * len(workers))}
        first = choose.choice([0, 0, case.world_size])
        self.gpu_of = {target: first + target for target in self.targets}
        per_node = choose.choice([1, 2, 4, 1000])
        self.node_of = {gpu: gpu // per_node for gpu in (*self.sources, *self.gpu_of.values())}
        # Small buffers make hundreds of rounds, which take time and show little more.
        self.buffer_bytes = (
            choose.choice([128, 256]) if choose.random() < 0.02 else choose.choice([1 << 11, 1 << 13, 1 << 16, 1 << 20])
        )
        self.canonical = index_arrays(found.canonical(case.hf_config))

    def reshard(
        self, *, sources: Mapping[int, Layout] | None = None, targets: Mapping[int, Layout] | None = None
    ) -> Schedule:
        """The schedule, by tables that need not be the right ones."""
        return reshard(
            sources or self.sources,
            targets or self.targets,
            gpu_of=self.gpu_of,
            node_of=self.node_of,
            buffer_bytes=self.buffer_bytes,
        )

    def source_arrays(self, sources: Mapping[int, Layout]) -> dict[int, Arrays]:
        """Values that every rank holds by its layout."""
        by_layout = {id(layout): build_layout(layout, self.canonical) for layout in sources.values()}
        return {rank: by_layout[id(layout)] for rank, layout in sources.items()}

    def faults(self, schedule: Schedule, *, sources: Mapping[int, Layout] | None = None) -> list[str]:
        """Slots that differ from a direct canonical cut. `sources`: what ranks hold, if not what their tables say."""
        found = carry_out(self, schedule, self.source_arrays(sources or self.sources))
        expected = {id(layout): build_layout(layout, self.canonical) for layout in self.targets.values()}
        return [
            f"{target}: {slot}"
            for target, layout in self.targets.items()
            for slot, array in expected[id(layout)].items()
            if not np.array_equal(found[target][slot], array)
        ]

    def __repr__(self) -> str:
        kind = "checkpoint" if self.to_checkpoint else "engines"
        return (
            f"{self.drawn} to {kind} on GPUs {list(self.gpu_of.values())}, nodes {self.node_of}, buffer "
            f"{self.buffer_bytes}"
        )


def build(content: SlotLayout, canonical: Mapping[str, np.ndarray]) -> np.ndarray:
    """A slot put together piece by piece, transforms included."""
    array = np.full(content.shape, UNWRITTEN, dtype=np.int64)
    for piece in content.pieces:
        local = part(array, piece.local)
        local[...] = (part(canonical[piece.name], piece.box) + TRANSFORMS[piece.transform]).reshape(local.shape)
    for box in content.padding:
        part(array, box)[...] = PADDING
    return array


def build_layout(layout: Layout, canonical: Mapping[str, np.ndarray]) -> Arrays:
    """Every slot of a layout."""
    return {slot: build(content, canonical) for slot, content in layout.items()}


def carry_out(case: Case, schedule: Schedule, sources: Mapping[int, Arrays]) -> dict[int, Arrays]:
    """All workers' values after the schedule. Fails on double or out-of-bounds writes, or if a buffer is too small."""
    targets = {
        target: {slot: np.full(content.shape, UNWRITTEN, dtype=np.int64) for slot, content in layout.items()}
        for target, layout in case.targets.items()
    }
    gpus = sorted({*case.sources, *case.gpu_of.values()})
    sent = {gpu: schedule.sent_by(gpu) for gpu in gpus}
    received = {gpu: schedule.received_on(gpu) for gpu in gpus}
    for earlier, later in chain.from_iterable(pairwise(rounds) for rounds in received.values()):
        # One arrives while the other is read.
        spans = sorted((item.offset, item.offset + item.message.num_bytes) for item in [*earlier, *later])
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    pulls = {target: schedule.pulls(target) for target in targets}
    for target, live in targets.items():
        for slot, boxes in schedule.class_of(target).padding.items():
            for box in boxes:
                write(live[slot], box, np.array(PADDING))
    for round in range(schedule.num_rounds):
        leaving, arriving = ({gpu: rounds[round] for gpu, rounds in items.items()} for items in (sent, received))
        memory = exchanged(case, schedule, leaving, arriving, sources)
        for target, live in targets.items():
            pull(pulls[target][round], case.gpu_of[target], sources, memory, live)
    return targets


def pull(
    pulls: Sequence[Pull],
    gpu: int,
    sources: Mapping[int, Arrays],
    memory: Mapping[int, dict[int, np.ndarray]],
    live: Arrays,
) -> None:
    """One round of a worker."""
    checksums = set()
    for item in pulls:
        if item.offset is None:
            assert item.rank == gpu
            values = part(sources[gpu][item.holding.slot], item.holding.box)
        else:
            values = memory[gpu][item.offset]
        write(live[item.copy.target], item.copy.box, values + TRANSFORMS[item.copy.transform])
        assert item.checksum_offset % CHECKSUM_BYTES == 0 and item.checksum_offset not in checksums
        checksums.add(item.checksum_offset)


def exchanged(
    case: Case,
    schedule: Schedule,
    leaving: Mapping[int, Sequence[Delivery]],
    arriving: Mapping[int, Sequence[Delivery]],
    sources: Mapping[int, Arrays],
) -> dict[int, dict[int, np.ndarray]]:
    """Boxes in the exchange memory of every GPU by offset, after one round.

    Fails if both ends do not agree on a message, boxes share bytes, or a buffer is too small.
    """
    sent: dict[tuple[int, int], list[Delivery]] = defaultdict(list)
    for rank, deliveries in leaving.items():
        assert sum(delivery.message.num_bytes for delivery in deliveries) <= case.buffer_bytes, rank
        for delivery in deliveries:
            assert delivery.rank == rank
            sent[rank, delivery.gpu].append(delivery)
    memory: dict[int, dict[int, np.ndarray]] = {}
    for gpu, deliveries in arriving.items():
        boxes: dict[int, np.ndarray] = {}
        # Checksums of own copies come first.
        end = sum(CHECKSUM_BYTES * len(schedule.classes[worker.class_index].own) for worker in schedule.workers_on(gpu))
        assert sum(delivery.message.num_bytes for delivery in deliveries) <= case.buffer_bytes, gpu
        # What arrives is the next message that the rank sends here.
        for delivery in deliveries:
            assert delivery.gpu == gpu and sent[delivery.rank, gpu].pop(0) == delivery
        for delivery in sorted(deliveries, key=lambda delivery: delivery.offset):
            start, message = delivery.offset, delivery.message
            for copy, offset in zip(message.copies, message.copy_offsets, strict=True):
                slot, box, dtype = copy.holders[delivery.source_class]
                assert (start + offset) % ALIGNMENT == 0 and start + offset >= end
                assert copy.num_bytes == volume(box) * DTYPE_BYTES[dtype]
                end = start + offset + copy.num_bytes
                boxes[start + offset] = part(sources[delivery.rank][slot], box)
            assert start + message.checksums_offset >= end
            end = start + message.checksums_offset + CHECKSUM_BYTES * len(message.copies)
        assert end <= schedule.body_bytes.get(gpu, 0)
        memory[gpu] = boxes
    assert not any(sent.values())
    return memory


def write(array: np.ndarray, box: tuple[tuple[int, int], ...], values: np.ndarray) -> None:
    """Fills a box that nothing has been written to."""
    assert len(box) == array.ndim and all(
        0 <= start < stop <= size for (start, stop), size in zip(box, array.shape, strict=True)
    ), box
    target = part(array, box)
    assert (target == UNWRITTEN).all()
    target[...] = values.reshape(target.shape) if values.ndim else values
