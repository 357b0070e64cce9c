"""Schedules of small hand-made layouts. tests/proof checks them against dense copies at scale."""

from __future__ import annotations

import pickle

import pytest

from conversion.boxes import Box, Layout, Piece, Slot, SlotLayout, volume
from conversion.reshard import ALIGNMENT, ScheduleError, reshard, split


def rows(start: int, stop: int, width: int = 4) -> Box:
    return ((start, stop), (0, width))


def holder(*pieces: tuple[str, Box, Box], shape: tuple[int, ...], dtype: str = "float32", padding: tuple[Box, ...] = ()) -> Layout:
    return {Slot("w"): SlotLayout(shape, dtype, tuple(Piece(name, box, local) for name, box, local in pieces), padding)}


HALVES = {
    0: holder(("a", rows(0, 4), rows(0, 4)), shape=(4, 4)),
    1: holder(("a", rows(4, 8), rows(0, 4)), shape=(4, 4)),
}
WHOLE = holder(("a", rows(0, 8), rows(0, 8)), shape=(8, 4))


def test_one_half_comes_from_the_own_unit_and_one_from_the_other_rank():
    schedule = reshard(HALVES, {10: WHOLE}, unit_of={10: 0}, buffer_bytes=1024)
    assert schedule.num_rounds == 1
    local, remote = schedule.pulls(10, 0)
    assert (local.origin, local.source_rank, local.source_box, local.target_box) == ("arena", 0, rows(0, 4), rows(0, 4))
    assert (remote.origin, remote.source_rank, remote.source_box, remote.target_box) == ("exchange", 1, rows(0, 4), rows(4, 8))
    assert schedule.local_checksums(0, 0) == [local]
    (transfer,) = schedule.transfers(1, 0)
    assert schedule.receives(0, 0) == [transfer]
    assert (transfer.unit_rank, transfer.num_bytes, transfer.copy_index) == (0, 64, remote.copy_index)
    assert (transfer.offset, transfer.checksum_index) == (remote.offset, remote.checksum_index)
    assert (schedule.num_checksums(0), schedule.num_checksums(1)) == (2, 0)
    assert (schedule.copied_bytes(10), schedule.exchange_bytes()) == (128, 64)
    assert schedule.transfers(0, 0) == schedule.receives(1, 0) == []


def test_replicas_send_equally_much():
    replicas = {rank: WHOLE for rank in range(4)}
    lonely = {4 + index: holder(("b", ((0, 1),), ((0, 1),)), shape=(1,)) for index in range(4)}
    both: Layout = {**WHOLE, Slot("v"): SlotLayout((1,), "float32", (Piece("b", ((0, 1),), ((0, 1),)),))}
    schedule = reshard(
        replicas | lonely, {unit: both for unit in range(4, 8)}, unit_of={unit: unit for unit in range(4, 8)}, buffer_bytes=1024
    )
    assert [sum(transfer.num_bytes for transfer in schedule.transfers(rank, 0)) for rank in range(4)] == [128] * 4


def test_rounds_and_boxes_stay_within_the_buffer():
    schedule = reshard({0: holder(shape=(0,)), 1: WHOLE}, {0: WHOLE}, unit_of={0: 0}, buffer_bytes=96)
    assert schedule.num_rounds > 1
    boxes = []
    for round in range(schedule.num_rounds):
        end = 0
        for transfer in schedule.receives(0, round):
            assert transfer.offset % ALIGNMENT == 0
            assert transfer.offset >= end
            assert transfer.num_bytes == 4 * volume(transfer.box)
            end = transfer.offset + transfer.num_bytes
            boxes.append(transfer.box)
        assert end <= schedule.exchange_bytes() <= 96
    assert sum(map(volume, boxes)) == 32


def test_split_cuts_rows_first():
    assert list(split(((0, 1), (0, 4), (0, 8)), 16)) == [((0, 1), (0, 2), (0, 8)), ((0, 1), (2, 4), (0, 8))]
    assert list(split(((3, 5), (0, 4)), 3)) == [((row, row + 1), part) for row in (3, 4) for part in ((0, 3), (3, 4))]


def test_experts_are_stacked_by_a_leading_dimension():
    sources = {0: holder(("e0", rows(0, 2), rows(0, 2)), shape=(2, 4)), 1: holder(("e1", rows(0, 2), rows(0, 2)), shape=(2, 4))}
    target = holder(("e0", rows(0, 2), ((0, 1), *rows(0, 2))), ("e1", rows(0, 2), ((1, 2), *rows(0, 2))), shape=(2, 2, 4))
    schedule = reshard(sources, {0: target}, unit_of={0: 0}, buffer_bytes=64)
    first, second = schedule.pulls(0, 0)
    assert (first.source_box, first.target_box) == (rows(0, 2), ((0, 1), *rows(0, 2)))
    assert (second.source_box, second.target_box) == (rows(0, 2), ((1, 2), *rows(0, 2)))
    # The same with boxes that must be split.
    sources = {0: holder(shape=(0,)), 1: holder(("e0", rows(0, 2, 16), rows(0, 2, 16)), shape=(2, 16))}
    target = holder(("e0", rows(0, 2, 16), ((0, 1), *rows(0, 2, 16))), shape=(1, 2, 16))
    schedule = reshard(sources, {0: target}, unit_of={0: 0}, buffer_bytes=64)
    pulls = [pull for round in range(schedule.num_rounds) for pull in schedule.pulls(0, round)]
    assert [pull.target_box for pull in pulls] == [((0, 1), *pull.source_box) for pull in pulls]
    assert len(pulls) == schedule.num_rounds == 2


def test_dtypes_and_transforms_travel_with_the_copy():
    source = holder(("a", rows(0, 8), rows(0, 8)), shape=(8, 4), dtype="bfloat16")
    target: Layout = {Slot("A"): SlotLayout((8, 4), "float32", (Piece("a", rows(0, 8), rows(0, 8), "neg_exp"),))}
    schedule = reshard({0: holder(shape=(0,)), 1: source}, {0: target}, unit_of={0: 0}, buffer_bytes=1024)
    (pull,), (transfer,) = schedule.pulls(0, 0), schedule.transfers(1, 0)
    assert (pull.source_dtype, pull.target_dtype, pull.transform) == ("bfloat16", "float32", "neg_exp")
    assert (transfer.dtype, transfer.target_dtype, transfer.transform, transfer.num_bytes) == ("bfloat16", "float32", "neg_exp", 64)
    assert (schedule.copied_bytes(0), schedule.exchange_bytes()) == (128, 64)


def test_padding_is_listed_and_counts_as_covered():
    target = holder(("a", rows(0, 8), rows(0, 8)), shape=(10, 4), padding=(rows(8, 10),))
    schedule = reshard(HALVES, {0: target}, unit_of={0: 0}, buffer_bytes=1024)
    assert schedule.padding(0) == {Slot("w"): [rows(8, 10)]}


def test_a_schedule_pickles():
    schedule = reshard(HALVES, {0: WHOLE}, unit_of={0: 0}, buffer_bytes=1024)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert "2 copies to 1 engine workers in 1 rounds" in schedule.summary


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
        (holder(("a", rows(0, 9), rows(0, 9)), shape=(9, 4)), r"w needs box \(\(8, 9\), \(0, 4\)\) of a, which no source holds"),
        (holder(("b", rows(0, 8), rows(0, 8)), shape=(8, 4)), "w needs b, which no source holds"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(target: Layout, message: str):
    with pytest.raises(ScheduleError, match=message):
        reshard(HALVES, {0: target}, unit_of={0: 0}, buffer_bytes=1024)


def test_a_tensor_that_no_target_asks_for_is_refused():
    extra: Layout = {Slot("bias"): SlotLayout((2,), "float32", (Piece("b", ((0, 2),), ((0, 2),)),))}
    with pytest.raises(ScheduleError, match=r"box \(\(0, 2\),\) of b is held by ranks \[0\], but no target reads it"):
        reshard({0: {**HALVES[0], **extra}, 1: HALVES[1]}, {0: WHOLE}, unit_of={0: 0}, buffer_bytes=1024)


def test_a_transformed_source_is_refused():
    source: Layout = {Slot("A"): SlotLayout((8, 4), "float32", (Piece("a", rows(0, 8), rows(0, 8), "neg_exp"),))}
    with pytest.raises(ScheduleError, match="holds a transformed"):
        reshard({0: source}, {0: WHOLE}, unit_of={0: 0}, buffer_bytes=1024)


def test_a_buffer_smaller_than_its_alignment_is_refused():
    with pytest.raises(ValueError, match="refit buffer of 63 bytes is too small; it takes at least 64"):
        reshard(HALVES, {0: WHOLE}, unit_of={0: 0}, buffer_bytes=63)
