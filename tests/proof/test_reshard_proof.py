"""Schedules of random models between random layouts, carried out on dense arrays: every element arrives where a direct cut puts it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from conversion.boxes import DTYPE_BYTES, Layout, Slot, volume
from conversion.families.common import Flavour, HfConfig, MegatronParallel, VllmParallel
from conversion.families.registry import family
from conversion.reshard import ScheduleError, reshard
from conversion.schedule import ALIGNMENT, CHECKSUM_BYTES, Message, RankPart, Route, Schedule
from tests.unit.conversion.dense import PADDING, TINY, UNWRITTEN, build, index_arrays, part

NUM_SEEDS = 300

Arrays = dict[Slot, np.ndarray]


class Case:
    """A random model, and random layouts of trainer and engines on the same units."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.hf_config, self.parallel, world_size = random_trainer(choose)
        found = family(self.hf_config)
        coords = [self.parallel.coords_of(rank, world_size) for rank in range(world_size)]
        flavour: Flavour = "te" if choose.random() < 0.5 else "local"
        by_coords = {key: found.megatron_layout(self.hf_config, self.parallel, key, "bfloat16", flavour) for key in set(coords)}
        self.sources = {rank: by_coords[key] for rank, key in enumerate(coords)}
        self.engine = random_engine(choose, self.hf_config, world_size)
        workers = [found.vllm_layout(self.hf_config, self.engine, worker, "bfloat16") for worker in range(self.engine.tp)]
        num_engines = choose.randint(1, world_size // self.engine.tp)
        self.targets = {unit: workers[unit % self.engine.tp] for unit in range(num_engines * self.engine.tp)}
        # A worker shares its unit with a trainer rank, or the engines have units of their own.
        first = choose.choice([0, 0, world_size])
        self.unit_of = {target: first + target for target in self.targets}
        per_node = choose.choice([1, 2, 4, 1000])
        self.node_of = {unit: unit // per_node for unit in (*self.sources, *self.unit_of.values())}
        self.buffer_bytes = choose.choice([128, 1024, 1 << 16, 1 << 20])
        self.canonical = index_arrays(found.canonical(self.hf_config))

    def reshard(self, targets: Mapping[int, Layout] | None = None) -> Schedule:
        targets = targets or self.targets
        return reshard(self.sources, targets, unit_of=self.unit_of, node_of=self.node_of, buffer_bytes=self.buffer_bytes)

    def __repr__(self) -> str:
        return f"{self.parallel} -> {self.engine}, pattern {self.hf_config['hybrid_override_pattern']}, buffer {self.buffer_bytes}"


def random_trainer(choose: random.Random) -> tuple[HfConfig, MegatronParallel, int]:
    pattern = "".join(choose.choice("MME*-") for _ in range(choose.randint(1, 5)))
    tp, pp, ep, etp = choose.choice([1, 2, 4]), choose.choice([1, 1, 2, 3]), choose.choice([1, 2, 4]), choose.choice([1, 1, 2])
    pp = min(pp, len(pattern))
    first = choose.randint(1, len(pattern) - pp + 1) if pp > 1 else None
    last = len(pattern) - first - (pp - 2) if first else None
    world_size = pp * max(tp, ep * etp) * choose.choice([1, 2])
    parallel = MegatronParallel(tp, pp, ep, etp, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    num_kv_heads = choose.choice([1, 2, 4])
    hf_config = TINY | dict(
        hybrid_override_pattern=pattern,
        num_hidden_layers=len(pattern),
        vocab_size=choose.choice([64, 100, 264]),
        hidden_size=choose.choice([4, 8]),
        num_attention_heads=4 * choose.choice([1, 2]),
        num_key_value_heads=num_kv_heads,
        head_dim=choose.choice([2, 4]),
        mamba_num_heads=8,
        mamba_head_dim=choose.choice([1, 2]),
        n_groups=tp * choose.choice([1, 2]),
        ssm_state_size=choose.choice([1, 3]),
        intermediate_size=8,
        n_routed_experts=choose.choice([4, 8]),
        moe_intermediate_size=4,
        moe_shared_expert_intermediate_size=8,
    )
    return hf_config, parallel, world_size


def random_engine(choose: random.Random, hf_config: HfConfig, world_size: int) -> VllmParallel:
    groups = hf_config["n_groups"]
    assert isinstance(groups, int)
    sizes = [tp for tp in (1, 2, 4) if world_size % tp == 0 and (groups == 1 or groups % tp == 0)]
    tp = choose.choice(sizes)
    return VllmParallel(tp, choose.choice([1, tp]))


def carry_out(case: Case, schedule: Schedule, sources: Mapping[int, Arrays]) -> dict[int, Arrays]:
    """Does what the schedule says, as trainer ranks and engine workers do it. Fails if an element is written twice."""
    targets = {
        target: {slot: np.full(content.shape, UNWRITTEN, dtype=np.int64) for slot, content in layout.items()}
        for target, layout in case.targets.items()
    }
    parts = {rank: schedule.rank_part(rank) for rank in {*case.sources, *case.unit_of.values()}}
    workers = {target: schedule.worker_part(target) for target in targets}
    for target, worker in workers.items():
        for slot, boxes in worker.padding.items():
            for box in boxes:
                write(targets[target][slot], box, np.array(PADDING))
    for round in range(schedule.num_rounds):
        memory = exchanged(case, parts, sources, round)
        for target, worker in workers.items():
            for pull in worker.pulls(round):
                if pull.origin == "arena":
                    values = part(sources[worker.unit][pull.source_slot], pull.source_box)
                else:
                    values = memory[worker.unit][pull.offset]
                write(targets[target][pull.target], pull.target_box, values)
    return targets


def exchanged(case: Case, parts: Mapping[int, RankPart], sources: Mapping[int, Arrays], round: int) -> dict[int, dict[int, np.ndarray]]:
    """Boxes in the exchange memory of every unit by offset, after one round.

    Fails if both ends do not agree on a message, boxes share bytes, or a buffer is too small.
    """
    sent: dict[tuple[int, int], list[tuple[Route, Message]]] = defaultdict(list)
    for rank, rank_part in parts.items():
        outgoing = rank_part.outgoing(round)
        assert sum(message.num_bytes for _, message in outgoing) <= min(case.buffer_bytes, rank_part.packed_bytes())
        for route, message in outgoing:
            sent[rank, route.peer].append((route, message))
    memory: dict[int, dict[int, np.ndarray]] = {}
    for unit, rank_part in parts.items():
        boxes, end = {}, sum(local.checksums_base for local in rank_part.locals[:1])
        incoming = rank_part.incoming(round)
        assert sum(message.num_bytes for _, message in incoming) <= case.buffer_bytes
        for route, message in sorted(incoming, key=lambda item: item[0].base + item[1].offset):
            assert route.base + message.offset >= end
            for item in (copy.transfer(route.source_class) for copy in message.copies):
                start = route.base + message.offset + item.offset
                assert start % ALIGNMENT == 0 and start >= end
                assert item.num_bytes == volume(item.box) * DTYPE_BYTES[item.dtype]
                end = start + item.num_bytes
                boxes[start] = part(sources[route.peer][item.slot], item.box)
            assert route.base + message.offset + message.checksums_offset >= end
            end = route.base + message.offset + message.checksums_offset + CHECKSUM_BYTES * len(message.copies)
            # What arrives is the next message that the peer sends here.
            theirs, theirs_message = sent[route.peer, unit].pop(0)
            assert theirs_message == message and theirs.source_class == route.source_class
        assert end <= rank_part.body_bytes
        memory[unit] = boxes
    assert not any(sent.values())
    return memory


def write(array: np.ndarray, box: tuple[tuple[int, int], ...], values: np.ndarray) -> None:
    target = part(array, box)
    assert (target == UNWRITTEN).all()
    target[...] = values.reshape(target.shape) if values.ndim else values


def source_arrays(case: Case) -> dict[int, Arrays]:
    by_layout = {id(layout): {slot: build(content, case.canonical) for slot, content in layout.items()} for layout in case.sources.values()}
    return {rank: by_layout[id(layout)] for rank, layout in case.sources.items()}


def faults(case: Case, schedule: Schedule) -> list[str]:
    """Slots whose values differ from a direct cut of the canonical tensors by the tables of `case`."""
    found = carry_out(case, schedule, source_arrays(case))
    expected = {id(layout): {slot: build(content, case.canonical) for slot, content in layout.items()} for layout in case.targets.values()}
    return [
        f"{target}: {slot}"
        for target, layout in case.targets.items()
        for slot, array in expected[id(layout)].items()
        if not np.array_equal(found[target][slot], array)
    ]


@pytest.mark.parametrize("block", range(10))
def test_every_element_arrives_exactly_once(block: int):
    for seed in range(block, NUM_SEEDS, 10):
        case = Case(seed)
        assert faults(case, case.reshard()) == [], f"seed {seed}: {case}"


def test_transforms_dtypes_and_tables_agree_on_both_sides():
    for seed in range(20):
        case = Case(seed)
        schedule = case.reshard()
        for target, layout in case.targets.items():
            checksums = []
            for pulls in schedule.worker_part(target).all_pulls():
                taken = [pull.checksum_offset for pull in pulls]
                assert len(set(taken)) == len(taken) and all(offset % CHECKSUM_BYTES == 0 for offset in taken)
                checksums += taken
                for pull in pulls:
                    assert pull.target_dtype == layout[pull.target].dtype
                    assert (pull.transform == "neg_exp") == pull.target.name.endswith(".A")
                    assert pull.source_dtype == case.sources[pull.source_rank][pull.source_slot].dtype
                    assert pull.origin == "exchange" or pull.source_rank == case.unit_of[target]
            assert len(checksums) == sum(len(content.pieces) for content in layout.values()) or len(checksums) > len(layout)


def mutate(layout: Layout, choose: random.Random, kind: str) -> Layout:
    """The layout with one error in one slot that has room for it."""
    slots = [slot for slot, content in layout.items() if len(content.pieces) > (1 if kind == "swap" else 0)]
    if not slots:
        return layout
    slot = choose.choice(slots)
    content = layout[slot]
    pieces = list(content.pieces)
    index = choose.randrange(len(pieces))
    if kind == "drop":
        del pieces[index]
    elif kind == "swap":
        other = (index + 1) % len(pieces)
        pieces[index], pieces[other] = replace(pieces[index], local=pieces[other].local), replace(pieces[other], local=pieces[index].local)
    else:
        (start, stop), *rest = pieces[index].local
        pieces[index] = replace(pieces[index], local=((start + 1, stop + 1), *rest))
    return {**layout, slot: replace(content, pieces=tuple(pieces))}


@pytest.mark.parametrize("kind", ["drop", "swap", "shift"])
def test_an_error_in_a_target_table_is_caught(kind: str):
    num_refused = num_wrong = 0
    for seed in range(40):
        case = Case(seed)
        layout = case.targets[0]
        mutated = mutate(layout, random.Random(seed), kind)
        if mutated == layout:
            continue
        try:
            schedule = case.reshard({**case.targets, 0: mutated})
        except ScheduleError:
            num_refused += 1
            continue
        # Only a table that is wrong but complete can pass: two boxes of one size in each other's place.
        assert kind == "swap"
        assert faults(case, schedule) != []
        num_wrong += 1
    assert num_refused + num_wrong >= 20
    assert (num_wrong > 0) == (kind == "swap")


@pytest.mark.parametrize("kind", ["drop", "shift"])
def test_an_error_in_a_source_table_is_caught(kind: str):
    num_caught = 0
    for seed in range(40):
        case = Case(seed)
        before = source_arrays(case)
        broken = mutate(case.sources[0], random.Random(seed), kind)
        if broken == case.sources[0]:
            continue
        case.sources = {rank: broken if layout is case.sources[0] else layout for rank, layout in case.sources.items()}
        try:
            schedule = case.reshard()
        except ScheduleError:
            num_caught += 1
            continue
        found = carry_out(case, schedule, before)
        expected = {slot: build(content, case.canonical) for slot, content in case.targets[0].items()}
        # Another rank may hold the same box, so that nobody reads the broken entry.
        num_caught += any(not np.array_equal(found[0][slot], array) for slot, array in expected.items())
    assert num_caught >= 10


def test_the_same_layouts_give_the_same_schedule():
    assert Case(3).reshard() == Case(3).reshard()
