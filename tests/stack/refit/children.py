# SPDX-License-Identifier: Apache-2.0
"""Child processes for trainer ranks and engine workers: each runs the functions it is sent, on a state of its own."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from conversion.boxes import Box, Layout, Slot
from conversion.schedule import Schedule
from conversion.tensors import box_view, torch_dtype
from mrl.policy.weights import Arena
from mrl.refit.copies import converted
from mrl.refit.exchange import Exchange, GpuHandles
from mrl.refit.group import ExchangeGroup, GroupAddress
from mrl.refit.pull import Puller, VerifyReport
from tests.stack import processes
from tests.waiting import HANG_S

DEADLINE_S = HANG_S


class State:
    """State that a child keeps between calls."""

    rank: int
    store: dist.TCPStore
    group: ExchangeGroup
    arena: Arena
    exchange: Exchange
    live: dict[Slot, Tensor]
    puller: Puller

    def __init__(self) -> None:
        # A worker of a colocated engine pulls from the memory of its trainer rank.
        self.is_dedicated = False


class Child:
    """A process that runs `function(state, *args)` on demand."""

    def __init__(self) -> None:
        # As the ranks of the other stack tests, so that both are forked from the same process.
        started = processes.context()
        self._connection, theirs = started.Pipe()
        self._process = started.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()

    def send(self, function: Callable, *args: object) -> None:
        self._connection.send((function, args))

    def result(self, timeout_s: float = HANG_S) -> object:
        """Result of the function; its error is raised here."""
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"child {self._process.pid} gave no result in {timeout_s} s")
        value = self._connection.recv()
        if isinstance(value, Exception):
            raise value
        return value

    def call(self, function: Callable, *args: object) -> object:
        self.send(function, *args)
        return self.result()

    @property
    def pid(self) -> int:
        return cast(int, self._process.pid)

    def stop(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE_S)


def call_all(children: Sequence[Child], function: Callable, *args: object) -> list[object]:
    """Runs one function in all children at the same time; every result is awaited before an error is raised."""
    for child in children:
        child.send(function, *args)
    results: list[object] = []
    for child in children:
        try:
            results.append(child.result())
        except Exception as error:
            results.append(error)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    state = State()
    while connection.poll(600):
        function, args = connection.recv()
        try:
            connection.send(function(state, *args))
        except Exception as error:
            traceback.print_exc()
            connection.send(error)


def fill(layout: Layout, canonical: Mapping[str, Tensor]) -> dict[Slot, Tensor]:
    """The tensors of a layout, built directly from canonical tensors: what any chain of copies must arrive at."""
    tensors = {}
    for slot, slot_layout in layout.items():
        tensors[slot] = torch.zeros(slot_layout.shape, dtype=torch_dtype(slot_layout.dtype))
        for piece in slot_layout.pieces:
            local = box_view(tensors[slot], piece.local)
            local.copy_(
                converted(box_view(canonical[piece.name], piece.box), piece.transform, local.dtype).view(local.shape)
            )
    return tensors


# Functions of trainer ranks.


def open_store(state: State) -> None:
    state.store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S)
    )


def count_group(state: State) -> tuple[int, int]:
    """Port of the store, and how many groups have met there."""
    return state.store.port, state.store.add("groups", 1)


def join_world(state: State, rank: int, address: GroupAddress, timeout_s: float) -> None:
    state.rank = rank
    state.group = ExchangeGroup(address, rank, device=torch.device("cpu"), timeout_s=timeout_s)


def join_again(state: State, rank: int, address: GroupAddress, timeout_s: float) -> None:
    """Another group for the exchange that is prepared."""
    join_world(state, rank, address, timeout_s)
    state.exchange.join(state.group)


def build_trainer(state: State, layouts: dict[int, Layout], canonical: dict[str, Tensor]) -> None:
    state.arena = Arena(fill(layouts[state.rank], canonical), name=f"mrl-arena-{state.rank}")


def train(state: State, layouts: dict[int, Layout], canonical: dict[str, Tensor]) -> None:
    """New weights in the same memory."""
    for slot, tensor in fill(layouts[state.rank], canonical).items():
        state.arena.tensors()[slot].copy_(tensor)


def prepare_exchange(state: State, schedule: Schedule) -> GpuHandles:
    state.exchange = Exchange(schedule, state.rank, state.arena.tensors(), state.arena.handle(), group=state.group)
    return state.exchange.handles()


def exchange(state: State, attempt: int, readers: Collection[int], timeout_s: float) -> None:
    state.exchange.run(attempt, readers, timeout_s=timeout_s)


def exchange_first(state: State, attempt: int, timeout_s: float = HANG_S) -> None:
    """Round 0 alone."""
    state.exchange.begin(attempt)
    state.exchange.fill(0, time.monotonic() + timeout_s)


def flip_exchanged_byte(state: State, offset: int) -> None:
    state.exchange.memory.tensor[offset] ^= 1


def flip_in_round(state: State, round_index: int, offset: int) -> None:
    """In the next attempt a byte of this round is damaged where it has arrived."""
    filled = state.exchange.pace.filled

    def damage(num_rounds: int) -> None:
        if num_rounds == round_index + 1:
            flip_exchanged_byte(state, offset)
            state.exchange.pace.filled = filled
        filled(num_rounds)

    state.exchange.pace.filled = damage


def signal_in_exchange(state: State, round_index: int, number: signal.Signals) -> None:
    """This rank gets the signal when it has filled a round."""
    filled = state.exchange.pace.filled

    def fill_and_signal(num_rounds: int) -> None:
        filled(num_rounds)
        if num_rounds == round_index + 1:
            state.exchange.pace.filled = filled
            os.kill(os.getpid(), number)

    state.exchange.pace.filled = fill_and_signal


def flip_weight_byte(state: State, slot: Slot, box: Box) -> None:
    box_view(state.arena.tensors()[slot], box).view(torch.uint8)[(0,) * len(box)] ^= 1


def bump_arena(state: State) -> None:
    state.arena._memory.bump_epoch()


# Functions of engine workers.


def build_engine(state: State, layout: Layout) -> None:
    state.live = {
        slot: torch.empty(item.shape, dtype=torch_dtype(item.dtype)).fill_(float("nan"))
        for slot, item in layout.items()
    }


def prepare_pull(state: State, schedule: Schedule, worker: int, handles: GpuHandles) -> None:
    own = state.exchange if state.is_dedicated else None
    state.puller = Puller(lambda: state.live, schedule, worker, handles, own=own)


def receive_alone(state: State, schedule: Schedule) -> GpuHandles:
    """A worker of a dedicated engine receives what it pulls; it has joined the group before."""
    state.exchange = Exchange(schedule, state.rank, {}, None, group=state.group)
    state.is_dedicated = True
    return state.exchange.handles()


def read_trainer(state: State) -> None:
    state.is_dedicated = False


def pull_all(state: State, attempt: int, timeout_s: float) -> int:
    return state.puller.run(attempt, timeout_s=timeout_s)


def pull_first(state: State, attempt: int) -> int:
    """Round 0 alone."""
    state.puller.begin(attempt)
    return state.puller.pull(0)


def signal_in_pull(state: State, round_index: int, number: signal.Signals) -> None:
    """This worker gets the signal in the middle of a round."""
    pull, signaled = state.puller.pull, round_index

    def pull_and_signal(round_index: int) -> int:
        num_bytes = pull(round_index)
        if round_index == signaled:
            state.puller.pull = pull
            os.kill(os.getpid(), number)
        return num_bytes

    state.puller.pull = pull_and_signal


def verify(state: State, round_index: int) -> VerifyReport:
    return state.puller.verify(round_index)


def finish(state: State) -> VerifyReport:
    return state.puller.finish()


def live(state: State) -> dict[Slot, Tensor]:
    # Sending a tensor to another process moves its storage to shared memory; these must stay where they are.
    return {slot: tensor.clone() for slot, tensor in state.live.items()}


def damage(state: State, slot: Slot, offset: int) -> None:
    state.live[slot].view(torch.uint8).view(-1)[offset] ^= 1
