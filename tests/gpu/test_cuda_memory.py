# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU shared by two real processes, and a refit through it. Needs a GPU; torch is the only library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from conversion.boxes import Layout, Piece, Slot, SlotLayout, full
from conversion.reshard import reshard
from conversion.schedule import Schedule
from mrl.policy.weights import Arena
from mrl.refit import RefitError
from mrl.refit.device_checksum import word_sum
from mrl.refit.exchange import Exchange, GpuHandles
from mrl.refit.memory import MappedMemory, MemoryHandle, SharedMemory
from mrl.refit.pull import Puller, VerifyReport
from tests.stack.refit.children import Child, State

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NUM_BYTES = 3 << 20
ROWS, COLUMNS = 96, 64
SOURCE: Layout = {
    Slot("w"): SlotLayout((ROWS, COLUMNS), "bfloat16", (Piece("w", full((ROWS, COLUMNS)), full((ROWS, COLUMNS))),)),
    Slot("A_log"): SlotLayout((5,), "bfloat16", (Piece("A_log", ((0, 5),), ((0, 5),)),)),
}
# A strided box, padding, a cast and a transform.
TARGET: Layout = {
    Slot("left"): SlotLayout((ROWS, 24), "bfloat16", (Piece("w", ((0, ROWS), (0, 24)), full((ROWS, 24))),)),
    Slot("right"): SlotLayout(
        (ROWS + 8, 40),
        "float32",
        (Piece("w", ((0, ROWS), (24, 64)), ((0, ROWS), (0, 40))),),
        (((ROWS, ROWS + 8), (0, 40)),),
    ),
    Slot("A"): SlotLayout((5,), "float32", (Piece("A_log", ((0, 5),), ((0, 5),), "neg_exp"),)),
}


class Gpu(State):
    """State that the two processes keep."""

    memory: SharedMemory | None
    mapped: MappedMemory


@pytest.fixture
def owner_and_reader() -> Iterator[tuple[Child, Child]]:
    owner, reader = Child(), Child()
    yield owner, reader
    owner.stop()
    reader.stop()


def own(state: Gpu, expandable_segments: bool) -> MemoryHandle:
    """Memory of 0, 1, 2 ... 250, 0 ..."""
    torch._C._accelerator_setAllocatorSettings(f"max_split_size_mb:512,expandable_segments:{expandable_segments}")
    # A cached block of such a segment would fit: it must not be taken.
    del_me = torch.empty(2 * NUM_BYTES, dtype=torch.uint8, device="cuda")
    del del_me
    state.memory = SharedMemory(NUM_BYTES, "test", torch.device("cuda", 0))
    settings = cast(dict[str, dict[str, object]], torch.cuda.memory._snapshot())["allocator_settings"]
    assert settings["max_split_size"] == 512 << 20 and settings["expandable_segments"] == expandable_segments
    assert not state.memory.tensor.any()
    state.memory.tensor.copy_(torch.arange(NUM_BYTES) % 251)
    torch.cuda.synchronize()
    return state.memory.handle()


def add_one(state: Gpu) -> None:
    assert state.memory
    state.memory.tensor += 1
    torch.cuda.synchronize()


def bump(state: Gpu) -> MemoryHandle:
    assert state.memory
    state.memory.bump_epoch()
    return state.memory.handle()


def release(state: Gpu) -> None:
    state.memory = None


def read(state: Gpu, handle: MemoryHandle) -> list[int]:
    state.mapped = MappedMemory(handle)
    return state.mapped.tensor[:500].tolist()


def read_again(state: Gpu) -> list[int]:
    state.mapped.check()
    return state.mapped.tensor[:500].tolist()


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_another_process_sees_the_bytes_as_they_are_now(owner_and_reader, expandable_segments):
    owner, reader = owner_and_reader
    handle = owner.call(own, expandable_segments)
    expected = [index % 251 for index in range(500)]
    assert reader.call(read, handle) == expected
    owner.call(add_one)
    assert reader.call(read_again) == [value + 1 for value in expected]


def test_old_handles_released_memory_and_dead_owners_are_refused(owner_and_reader):
    owner, reader = owner_and_reader
    old = owner.call(own, False)
    reader.call(read, old)
    new = owner.call(bump)
    with pytest.raises(RefitError, match="stale handle"):
        reader.call(read_again)
    with pytest.raises(RefitError, match="stale handle"):
        reader.call(read, old)
    reader.call(read, new)
    owner.call(release)
    with pytest.raises(RefitError, match="was released"):
        reader.call(read_again)
    owner.stop()
    with pytest.raises(RefitError, match="owner.*gone"):
        reader.call(read, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_the_device_checksum_is_that_of_the_host(dtype):
    tensor = torch.randint(0, 100, (3, 1000, 513)).to(dtype)
    for box in (tensor, tensor[1:, 5:900], tensor[..., 100:301], tensor.transpose(0, 2)):
        assert word_sum(box.cuda()).item() == word_sum(box).item()
        assert word_sum(tensor.cuda()[:, :7]).item() == word_sum(tensor[:, :7]).item()


def build_trainer(state: Gpu, schedule: Schedule) -> GpuHandles:
    generator = torch.Generator().manual_seed(0)
    weights = {slot: torch.randn(item.shape, generator=generator).bfloat16().cuda() for slot, item in SOURCE.items()}
    state.arena = Arena(weights, name="arena")
    state.exchange = Exchange(schedule, 0, weights, state.arena.handle(), group=None)
    return state.exchange.handles()


def exchange(state: Gpu, attempt: int) -> dict[str, torch.Tensor]:
    state.exchange.run(attempt, [0], timeout_s=60.0)
    return {slot.name: tensor.cpu() for slot, tensor in state.arena.tensors().items()}


def train(state: Gpu) -> None:
    for tensor in state.arena.tensors().values():
        tensor.add_(1.0)


def build_engine(state: Gpu, schedule: Schedule, handles: GpuHandles) -> None:
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    state.live = {
        slot: torch.full(item.shape, float("nan"), dtype=dtypes[item.dtype], device="cuda")
        for slot, item in TARGET.items()
    }
    state.puller = Puller(lambda: state.live, schedule, 0, handles)


def pull(state: Gpu, attempt: int) -> dict[str, torch.Tensor]:
    state.puller.begin(attempt)
    state.puller.pull(0)
    return {slot.name: tensor.cpu() for slot, tensor in state.live.items()}


def damage(state: Gpu) -> None:
    state.live[Slot("left")].view(torch.uint8)[50, 3] ^= 1


def verify(state: Gpu) -> VerifyReport:
    state.puller.verify(0)
    return state.puller.finish()


def test_a_refit_inside_one_gpu(owner_and_reader):
    trainer, engine = owner_and_reader
    schedule = reshard({0: SOURCE}, {0: TARGET}, gpu_of={0: 0}, buffer_bytes=1 << 20)
    handles = trainer.call(build_trainer, schedule)
    engine.call(build_engine, schedule, handles)
    for attempt in (1, 2):
        weights = trainer.call(exchange, attempt)
        live = engine.call(pull, attempt)
        assert torch.equal(live["left"], weights["w"][:, :24])
        assert torch.equal(live["right"][:ROWS], weights["w"][:, 24:].float()) and not live["right"][ROWS:].any()
        assert torch.allclose(live["A"], -torch.exp(weights["A_log"].float()), rtol=1e-6)
        report = engine.call(verify)
        assert report.num_bytes + report.padding_bytes == report.total_bytes
        trainer.call(train)
    trainer.call(exchange, 3)
    engine.call(pull, 3)
    engine.call(damage)
    with pytest.raises(RefitError, match=r"left box .* differs from source rank 0"):
        engine.call(verify)
