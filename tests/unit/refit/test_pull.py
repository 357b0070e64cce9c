# SPDX-License-Identifier: Apache-2.0
"""A refit inside one process: what is pulled and verified, and every fault that must be caught with its slot named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from conversion.boxes import Piece, Slot, SlotLayout, full
from conversion.reshard import reshard
from conversion.schedule import NUM_BUFFERS, Schedule
from mrl.policy.weights import Arena
from mrl.refit import RefitError
from mrl.refit.checksum import check_unchanged, digest
from mrl.refit.exchange import Exchange
from mrl.refit.pace import Pace
from mrl.refit.pull import Puller
from tests.schedules import drop_copies
from tests.waiting import HANG_S

W, STACK, DECAY, GATE = Slot("w"), Slot("experts"), Slot("A"), Slot("gate")
SOURCE = {
    Slot("w"): SlotLayout((6, 4), "float32", (Piece("w", full((6, 4)), full((6, 4))),)),
    Slot("expert0"): SlotLayout((3, 4), "float32", (Piece("e0", full((3, 4)), full((3, 4))),)),
    Slot("expert1"): SlotLayout((3, 4), "float32", (Piece("e1", full((3, 4)), full((3, 4))),)),
    Slot("A_log"): SlotLayout((5,), "bfloat16", (Piece("A_log", ((0, 5),), ((0, 5),)),)),
    Slot("gate"): SlotLayout((2, 4), "bfloat16", (Piece("gate", full((2, 4)), full((2, 4))),)),
}
TARGET = {
    W: SlotLayout((8, 4), "float32", (Piece("w", full((6, 4)), ((0, 6), (0, 4))),), (((6, 8), (0, 4)),)),
    STACK: SlotLayout(
        (2, 3, 4), "float32", tuple(Piece(f"e{i}", full((3, 4)), ((i, i + 1), (0, 3), (0, 4))) for i in range(2))
    ),
    DECAY: SlotLayout((5,), "float32", (Piece("A_log", ((0, 5),), ((0, 5),), "neg_exp"),)),
    GATE: SlotLayout((2, 4), "float32", (Piece("gate", full((2, 4)), full((2, 4))),)),
}


@dataclass
class OneGpu:
    """One trainer rank and one engine worker on its GPU."""

    schedule: Schedule
    weights: dict[Slot, Tensor]
    arena: Arena
    exchange: Exchange
    live: dict[Slot, Tensor]
    attempt: int = 0

    def begin(self, puller: Puller) -> None:
        """Both sides begin another attempt, and round 0 is there."""
        self.attempt += 1
        self.exchange.begin(self.attempt)
        puller.begin(self.attempt)
        self.exchange.fill(0, math.inf)

    def puller(self, *, without: Slot | None = None, addresses: Mapping[Slot, int] | None = None) -> Puller:
        schedule = drop_copies(self.schedule, lambda copy: copy.target == without)
        return Puller(lambda: self.live, schedule, 0, self.exchange.handles(), addresses=addresses)

    def expected(self) -> dict[Slot, Tensor]:
        weights = {slot.name: tensor for slot, tensor in self.weights.items()}
        return {
            W: torch.cat([weights["w"], torch.zeros(2, 4)]),
            STACK: torch.stack([weights["expert0"], weights["expert1"]]),
            DECAY: -torch.exp(weights["A_log"].float()),
            GATE: weights["gate"].float(),
        }


@pytest.fixture
def gpu() -> OneGpu:
    torch.manual_seed(0)
    schedule = reshard({0: SOURCE}, {0: TARGET}, gpu_of={0: 0}, buffer_bytes=1 << 20)
    weights = {slot: torch.randn(layout.shape).to(getattr(torch, layout.dtype)) for slot, layout in SOURCE.items()}
    arena = Arena(weights, name="test")
    exchange = Exchange(schedule, 0, weights, arena.handle(), group=None)
    live = {slot: torch.full(layout.shape, float("nan")) for slot, layout in TARGET.items()}
    return OneGpu(schedule, weights, arena, exchange, live)


def refit(gpu: OneGpu, puller: Puller) -> None:
    assert gpu.schedule.num_rounds <= NUM_BUFFERS
    gpu.attempt += 1
    gpu.exchange.run(gpu.attempt, [0], timeout_s=HANG_S)
    puller.run(gpu.attempt, timeout_s=HANG_S)


def test_every_live_byte_is_written_and_verified(gpu):
    puller = gpu.puller()
    for _ in range(2):
        refit(gpu, puller)
        report = puller.finish()
        assert all(torch.equal(gpu.live[slot], tensor) for slot, tensor in gpu.expected().items())
        assert report.padding_bytes == 2 * 4 * 4
        assert (
            report.num_bytes + report.padding_bytes
            == report.total_bytes
            == sum(tensor.nbytes for tensor in gpu.live.values())
        )
        # The next refit brings new weights.
        for tensor in gpu.weights.values():
            tensor.add_(1.0)


def test_pull_reports_the_bytes_of_the_schedule(gpu):
    puller = gpu.puller()
    gpu.begin(puller)
    assert puller.pull(0) == gpu.schedule.class_of(0).written_bytes


def test_a_byte_that_changes_after_the_pull_is_caught(gpu):
    puller = gpu.puller()
    gpu.begin(puller)
    puller.pull(0)
    gpu.live[STACK].view(torch.uint8).view(-1)[70] ^= 1
    mismatches = puller.verify(0).mismatches
    assert len(mismatches) == 1
    assert mismatches[0].startswith("experts box ((1, 2), (0, 3), (0, 4)) differs from source rank 0 (pulled on GPU 0)")
    with pytest.raises(RefitError, match="experts box"):
        puller.finish()


def test_a_byte_that_changes_before_the_pull_is_caught(gpu):
    puller = gpu.puller()
    gpu.begin(puller)
    gpu.weights[Slot("A_log")][2] += 1
    puller.pull(0)
    assert ["A box" in line for line in puller.verify(0).mismatches] == [True]


def test_padding_is_rewritten_and_verified(gpu):
    puller = gpu.puller()
    gpu.begin(puller)
    puller.pull(0)
    assert torch.equal(gpu.live[W][6:], torch.zeros(2, 4))
    gpu.live[W][7, 1] = -0.0
    assert [line.startswith("padding of w box ((6, 8), (0, 4))") for line in puller.verify(0).mismatches] == [True]
    with pytest.raises(RefitError, match="padding of w"):
        puller.finish()
    refit(gpu, puller)
    puller.finish()


def test_the_schedule_must_fit_the_live_model(gpu):
    with pytest.raises(RefitError, match=r"experts \(2, 3, 4\)"):
        gpu.puller(without=STACK)
    gpu.live[Slot("lora")] = torch.ones(2)
    with pytest.raises(RefitError, match=r"lora \(2,\)"):
        gpu.puller()
    del gpu.live[Slot("lora")]
    gpu.live[GATE] = gpu.live[GATE].bfloat16()
    with pytest.raises(RefitError, match="gate is torch.bfloat16 in the engine and float32 in the schedule"):
        gpu.puller()
    gpu.live[GATE] = torch.ones(3, 4)
    with pytest.raises(RefitError, match=r"gate \(3, 4\)"):
        gpu.puller()
    del gpu.live[GATE]
    with pytest.raises(RefitError, match="gate is not in the engine"):
        gpu.puller()


def test_live_tensors_must_stay_where_they_are(gpu):
    puller = gpu.puller()
    refit(gpu, puller)
    gpu.live[GATE] = gpu.live[GATE].clone()
    with pytest.raises(RefitError, match="rebound.*gate"):
        puller.finish()
    refit(gpu, puller)
    with pytest.raises(RefitError, match="rebound.*gate"):
        puller.finish()
    # What reads the old memory does so after another preparation too.
    with pytest.raises(RefitError, match="rebound.*gate"):
        gpu.puller(addresses=puller.addresses)


def test_an_engine_on_another_device_than_its_gpu_is_refused(gpu):
    gpu.live = {slot: tensor.to("meta") for slot, tensor in gpu.live.items()}
    with pytest.raises(RefitError, match=r"w of the engine is on meta, the memory of its GPU 0 on cpu.*device_ids"):
        gpu.puller()


def test_a_pull_needs_an_exchange_of_its_own(gpu):
    puller = gpu.puller()
    with pytest.raises(RefitError, match="has not exchanged round 0"):
        puller.pull(0)
    refit(gpu, puller)
    puller.begin(gpu.attempt + 1)
    with pytest.raises(RefitError, match="has not exchanged round 0 in attempt 2"):
        puller.pull(0)


def test_a_round_that_was_not_verified_is_no_refit(gpu):
    puller = gpu.puller()
    with pytest.raises(RefitError, match="0 of 1 rounds"):
        puller.finish()
    gpu.begin(puller)
    puller.pull(0)
    with pytest.raises(RefitError, match="0 of 1 rounds"):
        puller.finish()


def test_a_round_waits_until_its_buffer_was_read(gpu):
    schedule = replace(gpu.schedule, num_rounds=NUM_BUFFERS + 3)
    exchange = Exchange(schedule, 0, gpu.weights, gpu.arena.handle(), group=None)
    reader = Pace(exchange.pace.memory, 0)
    reader.begin(1)
    reader.read(0, 1)
    with pytest.raises(RefitError, match="has not verified round 1 on GPU 0"):
        exchange.run(1, [0], timeout_s=0.0)
    # Of what was filled in the place of round 0 nothing was read yet.
    reader.check_filled(1)
    reader.check_filled(NUM_BUFFERS)
    with pytest.raises(RefitError, match=f"it has exchanged {NUM_BUFFERS + 1} rounds"):
        reader.check_filled(0)


def test_an_old_handle_is_refused(gpu):
    puller = gpu.puller()
    gpu.arena._memory.bump_epoch()
    gpu.begin(puller)
    with pytest.raises(RefitError, match="stale handle"):
        puller.pull(0)


def test_refit_zero_names_what_the_tables_get_wrong(gpu):
    gpu.live = {slot: tensor.clone() for slot, tensor in gpu.expected().items()}
    before = digest(gpu.live)
    refit(gpu, gpu.puller())
    check_unchanged(before, digest(gpu.live))
    with pytest.raises(RefitError, match="changed 1 of 5 tensors.*on lora$"):
        check_unchanged({**before, Slot("lora"): 1}, digest(gpu.live))

    # Another layout that both sides agree on, but not vLLM's loader: the experts in another order.
    swapped = replace(
        TARGET[STACK], pieces=tuple(Piece(f"e{1 - i}", full((3, 4)), ((i, i + 1), (0, 3), (0, 4))) for i in range(2))
    )
    gpu.schedule = reshard({0: SOURCE}, {0: {**TARGET, STACK: swapped}}, gpu_of={0: 0}, buffer_bytes=1 << 20)
    gpu.exchange = Exchange(gpu.schedule, 0, gpu.weights, gpu.arena.handle(), group=None)
    puller = gpu.puller()
    refit(gpu, puller)
    puller.finish()
    with pytest.raises(RefitError, match="changed 1 of 4 tensors.*on experts$"):
        check_unchanged(before, digest(gpu.live))
    assert check_unchanged(before, digest(gpu.live), {STACK}) == [STACK], "the trainer is known to round it"
