# SPDX-License-Identifier: Apache-2.0
"""Schedules of small hand-made layouts. tests/proof checks them against dense copies at scale."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest

from conversion.boxes import Box, Layout, Piece, Slot, SlotLayout, volume
from conversion.reshard import ScheduleError, reshard
from conversion.rounds import split
from conversion.schedule import NUM_BUFFERS, Delivery, Pull, Schedule


def rows(start: int, stop: int, width: int = 4) -> Box:
    return ((start, stop), (0, width))


def holder(
    *pieces: tuple[str, Box, Box], shape: tuple[int, ...], dtype: str = "float32", padding: tuple[Box, ...] = ()
) -> Layout:
    return {Slot("w"): SlotLayout(shape, dtype, tuple(Piece(name, box, local) for name, box, local in pieces), padding)}


HALVES = {
    0: holder(("a", rows(0, 4), rows(0, 4)), shape=(4, 4)),
    1: holder(("a", rows(4, 8), rows(0, 4)), shape=(4, 4)),
}
WHOLE = holder(("a", rows(0, 8), rows(0, 8)), shape=(8, 4))


def pulls_of(schedule: Schedule, target: int) -> list[Pull]:
    return [pull for pulls in schedule.pulls(target) for pull in pulls]


def most_bytes(rounds: list[list[Delivery]]) -> int:
    """Bytes of the largest round."""
    return max(sum(delivery.message.num_bytes for delivery in deliveries) for deliveries in rounds)


def test_one_half_comes_from_the_own_gpu_and_one_from_the_other_rank():
    schedule = reshard(HALVES, {10: WHOLE}, gpu_of={10: 0}, buffer_bytes=1 << 16)
    assert schedule.num_rounds == 1
    local, remote = pulls_of(schedule, 10)
    assert (local.offset, local.rank, local.holding.box, local.copy.box) == (None, 0, rows(0, 4), rows(0, 4))
    assert (remote.rank, remote.holding.box, remote.copy.box) == (1, rows(0, 4), rows(4, 8))
    ((leaving,),) = schedule.sent_by(1)
    assert schedule.received_on(0) == [[leaving]]
    assert (leaving.rank, leaving.gpu) == (1, 0)
    # 64 bytes of checksums of own copies, 64 of the box, 64 of its checksum.
    assert (local.checksum_offset, remote.offset, remote.checksum_offset) == (0, 64, 128)
    assert (leaving.message.num_bytes, schedule.body_bytes, most_bytes(schedule.sent_by(1))) == (128, {0: 192}, 128)
    assert schedule.class_of(10).own_bytes == 64
    assert schedule.class_of(10).written_bytes == 128
    assert schedule.received_on(1) == schedule.sent_by(0) == [[]]
    assert schedule.link_bytes() == {"gpu": 64, "node": 64, "network": 0}


def test_what_a_process_has_frozen_stays_out_of_collections():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        reshard(HALVES, {10: WHOLE}, gpu_of={10: 0}, buffer_bytes=1 << 16)
        assert gc.isenabled() and gc.get_freeze_count() > frozen // 2
    finally:
        gc.unfreeze()


def test_replicas_send_equally_much():
    replicas = {rank: WHOLE for rank in range(4)}
    lonely = {4 + index: holder(("b", ((0, 1),), ((0, 1),)), shape=(1,)) for index in range(4)}
    both: Layout = {**WHOLE, Slot("v"): SlotLayout((1,), "float32", (Piece("b", ((0, 1),), ((0, 1),)),))}
    schedule = reshard(
        replicas | lonely,
        {gpu: both for gpu in range(4, 8)},
        gpu_of={gpu: gpu for gpu in range(4, 8)},
        buffer_bytes=1 << 16,
    )
    assert schedule.sent_bytes() == dict.fromkeys(range(4), 128) | dict.fromkeys(range(4, 8), 0)


def test_no_replica_serves_two_engines_while_another_idles():
    # Ranks 0 and 2 hold more than ranks 1 and 3, so that there are two classes; all hold `a`, which is a single box.
    more: Layout = {**WHOLE, Slot("v"): SlotLayout((1,), "float32", (Piece("b", ((0, 1),), ((0, 1),)),))}
    sources = {0: more, 1: WHOLE, 2: more, 3: WHOLE}
    targets: dict[int, Layout] = {10: more, 11: WHOLE, 12: WHOLE, 13: WHOLE}
    schedule = reshard(sources, targets, gpu_of={target: target for target in targets}, buffer_bytes=1 << 16)
    senders = {
        next(pull.rank for pull in pulls_of(schedule, target) if pull.copy.target == Slot("w")) for target in targets
    }
    assert senders == {0, 1, 2, 3}


def test_one_engine_draws_on_all_replicas():
    names = [f"t{index}" for index in range(8)]
    many: Layout = {Slot(name): SlotLayout((8, 4), "float32", (Piece(name, rows(0, 8), rows(0, 8)),)) for name in names}
    schedule = reshard(dict.fromkeys(range(4), many), {9: many}, gpu_of={9: 9}, buffer_bytes=1 << 16)
    assert schedule.sent_bytes() == dict.fromkeys(range(4), 256)


def test_the_own_node_comes_before_the_least_loaded_rank():
    # Node 0 has rank 0 and GPUs 4 and 5, node 1 has ranks 1 to 3.
    node_of = {0: 0, 4: 0, 5: 0, 1: 1, 2: 1, 3: 1}
    schedule = reshard(
        dict.fromkeys(range(4), WHOLE), {4: WHOLE, 5: WHOLE}, gpu_of={4: 4, 5: 5}, node_of=node_of, buffer_bytes=1 << 16
    )
    assert schedule.sent_bytes() == {0: 256, 1: 0, 2: 0, 3: 0}
    assert schedule.link_bytes() == {"gpu": 0, "node": 256, "network": 0}


def test_rounds_and_boxes_stay_within_the_buffer():
    schedule = reshard({0: holder(shape=(0,)), 1: WHOLE}, {0: WHOLE}, gpu_of={0: 0}, buffer_bytes=128)
    assert schedule.num_rounds == 2
    boxes = []
    for (delivery,) in schedule.received_on(0):
        assert delivery.message.num_bytes <= 128
        boxes += [copy.box for copy in delivery.message.copies]
    assert sum(map(volume, boxes)) == 32
    assert schedule.body_bytes[0] <= NUM_BUFFERS * 128
    # One arrives while the other is read.
    (first,), (second,) = schedule.received_on(0)
    assert first.offset + first.message.num_bytes <= second.offset


def test_workers_take_turns_where_one_rank_serves_many():
    targets = dict.fromkeys(range(4), WHOLE)
    schedule = reshard({9: WHOLE}, targets, gpu_of={target: target for target in targets}, buffer_bytes=256)
    assert most_bytes(schedule.sent_by(9)) <= 256
    assert sorted(delivery.gpu for deliveries in schedule.sent_by(9) for delivery in deliveries) == [0, 1, 2, 3]


def test_split_cuts_rows_first():
    assert list(split(((0, 1), (0, 4), (0, 8)), 16)) == [((0, 1), (0, 2), (0, 8)), ((0, 1), (2, 4), (0, 8))]
    assert list(split(((3, 5), (0, 4)), 3)) == [((row, row + 1), part) for row in (3, 4) for part in ((0, 3), (3, 4))]


def test_dtypes_and_transforms_travel_with_the_copy():
    source = holder(("a", rows(0, 8), rows(0, 8)), shape=(8, 4), dtype="bfloat16")
    target: Layout = {Slot("A"): SlotLayout((8, 4), "float32", (Piece("a", rows(0, 8), rows(0, 8), "neg_exp"),))}
    schedule = reshard({0: holder(shape=(0,)), 1: source}, {0: target}, gpu_of={0: 0}, buffer_bytes=1024)
    (pull,) = pulls_of(schedule, 0)
    ((leaving,),) = schedule.sent_by(1)
    assert leaving.message.copies == (pull.copy,) and pull.holding == pull.copy.holders[leaving.source_class]
    assert (pull.holding.dtype, pull.copy.dtype, pull.copy.transform, pull.copy.num_bytes) == (
        "bfloat16",
        "float32",
        "neg_exp",
        64,
    )
    assert schedule.class_of(0).written_bytes == 128


def test_casts_are_told_by_kind_of_tensor_and_roundings_by_another_word():
    def layout(**dtypes: str) -> Layout:
        """Two layers of a tensor of each name."""
        return {
            Slot(f"layers.{index}.{name}"): SlotLayout((1,), dtype, (Piece(f"{name}{index}", ((0, 1),), ((0, 1),)),))
            for index in range(2)
            for name, dtype in dtypes.items()
        }

    def casts(source: Layout, target: Layout) -> list[str]:
        return reshard({0: source}, {0: target}, gpu_of={0: 0}, buffer_bytes=1024).casts()

    trainer = layout(gate="float32", A="bfloat16", norm="bfloat16")
    assert casts(trainer, trainer) == []
    assert casts(trainer, layout(gate="bfloat16", A="float32", norm="bfloat16")) == [
        "Engines keep as float32 what the trainer holds as bfloat16: layers.*.A",
        "Engines round to bfloat16 what the trainer holds as float32: layers.*.gate",
    ]
    many = "Engines round to bfloat16 what the trainer holds as float32: " + ", ".join(
        f"layers.*.{name}" for name in "abcdef"
    )
    wide, narrow = (layout(**dict.fromkeys("abcdefghi", dtype)) for dtype in ("float32", "bfloat16"))
    assert casts(wide, narrow) == [many + " and 3 more"]


def test_a_summary_counts_copies_workers_and_rounds():
    schedule = reshard(HALVES, {0: WHOLE}, gpu_of={0: 0}, buffer_bytes=1 << 16)
    assert "2 copies to 1 engine worker in 1 round:" in schedule.summary


def test_equal_layouts_need_not_be_one_object():
    sources = {rank: pickle.loads(pickle.dumps(WHOLE)) for rank in range(4)}
    schedule = reshard(sources, {8: WHOLE, 9: WHOLE}, gpu_of={8: 8, 9: 9}, buffer_bytes=1 << 16)
    assert set(schedule.source_class.values()) == {0}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            holder(("a", rows(0, 7), rows(0, 7)), shape=(8, 4)),
            r"box \(\(7, 8\), \(0, 4\)\) of a is held by ranks \[1\], but no target reads it",
        ),
        (
            holder(("a", rows(0, 8), rows(0, 8)), shape=(9, 4)),
            r"w of engine worker 0 \(made of a\): box \(\(8, 9\), \(0, 4\)\) is not written",
        ),
        (
            holder(("a", rows(0, 8), rows(0, 8)), ("a", rows(0, 1), rows(7, 8)), shape=(8, 4)),
            r"w of engine worker 0 \(made of a\): boxes .* overlap",
        ),
        (holder(("a", rows(0, 8), rows(0, 8)), shape=(8, 4), padding=(rows(7, 8),)), "overlap"),
        (holder(("a", rows(0, 8), rows(1, 9)), shape=(8, 4)), r"w: box .* of a does not fit box .* of shape \(8, 4\)"),
        (holder(("a", rows(0, 8), rows(0, 7)), shape=(8, 4)), "does not fit"),
        (
            holder(("a", rows(0, 9), rows(0, 9)), shape=(9, 4)),
            r"w needs box \(\(8, 9\), \(0, 4\)\) of a, which no source holds",
        ),
        (holder(("b", rows(0, 8), rows(0, 8)), shape=(8, 4)), "w needs b, which no source holds"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(target: Layout, message: str):
    with pytest.raises(ScheduleError, match=message):
        reshard(HALVES, {0: target}, gpu_of={0: 0}, buffer_bytes=1024)


def test_a_transformed_source_is_refused():
    source: Layout = {Slot("A"): SlotLayout((8, 4), "float32", (Piece("a", rows(0, 8), rows(0, 8), "neg_exp"),))}
    with pytest.raises(ScheduleError, match="holds a transformed"):
        reshard({0: source}, {0: WHOLE}, gpu_of={0: 0}, buffer_bytes=1024)


def test_a_buffer_smaller_than_a_message_is_refused():
    with pytest.raises(ValueError, match="refit buffer of 127 bytes is too small; it takes at least 128"):
        reshard(HALVES, {0: WHOLE}, gpu_of={0: 0}, buffer_bytes=127)


def test_garbage_is_not_frozen_with_a_schedule():
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    gc.freeze()
    try:
        garbage = weakref.ref(Circle())
        reshard(HALVES, {10: WHOLE}, gpu_of={10: 0}, buffer_bytes=1 << 16)
        assert garbage() is None
    finally:
        gc.unfreeze()
    reshard(HALVES, {10: WHOLE}, gpu_of={10: 0}, buffer_bytes=1 << 16)
    assert gc.get_freeze_count() == 0, "a process that freezes nothing is left so"
