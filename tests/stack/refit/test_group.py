# SPDX-License-Identifier: Apache-2.0
"""The group of the exchange between three real processes over gloo, of which one never comes or dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import cast

import pytest
import torch

from mrl.refit import RefitError
from mrl.refit.group import GroupAddress, Incoming, Outgoing
from tests.stack.refit import children
from tests.stack.refit.children import Child, State
from tests.waiting import HANG_S

NUM_BYTES = 1 << 16
# gloo counts in whole seconds. One of the three never comes.
MEETING_S = 2.0


@pytest.fixture
def three() -> Iterator[list[Child]]:
    participants = [Child() for _ in range(3)]
    yield participants
    for child in participants:
        child.stop()


def join(participants: dict[int, Child], *, timeout_s: float, members: tuple[int, ...] = (0, 1, 2)) -> None:
    """Joins these participants, by number, into a group of such members."""
    participants[0].call(children.open_store)
    port, _ = cast(tuple[int, int], participants[0].call(children.count_group))
    for rank, child in participants.items():
        child.send(children.join_world, rank, GroupAddress("127.0.0.1", port, "group", members), timeout_s)
    for child in participants.values():
        child.result()


def send(state: State, peers: list[int]) -> list[int]:
    """Sends to peers; returns those whose message was packed."""
    packed = list[int]()
    messages = [
        Outgoing(peer, torch.full((NUM_BYTES,), peer, dtype=torch.uint8), partial(packed.append, peer))
        for peer in peers
    ]
    state.group.run(messages, [], what="round 7", meanwhile=lambda: None, deadline=time.monotonic() + HANG_S)
    return packed


def receive(state: State) -> list[int]:
    buffer = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    state.group.run(
        [], [Incoming(0, buffer)], what="round 7", meanwhile=lambda: None, deadline=time.monotonic() + HANG_S
    )
    return buffer.unique().tolist()


def send_what_cannot_be_packed(state: State) -> None:
    def pack() -> None:
        raise RuntimeError("no memory")

    state.group.run(
        [Outgoing(1, torch.zeros(1, dtype=torch.uint8), pack)],
        [],
        what="round 7",
        meanwhile=lambda: None,
        deadline=time.monotonic() + HANG_S,
    )


def test_a_participant_that_never_comes_ends_the_meeting_in_time(three):
    with pytest.raises(RefitError, match="participant 0 of 3 could not join 'group' at 127.0.0.1:.* within 2 s"):
        join(dict(enumerate(three[:2])), timeout_s=MEETING_S)
    with pytest.raises(RefitError, match="participant 1 of 3 could not join"):
        three[1].result()


def test_a_message_for_a_member_that_is_away_is_packed_and_not_sent(three):
    join({0: three[0], 2: three[2]}, timeout_s=HANG_S, members=(0, 2))
    three[2].send(receive)
    assert three[0].call(send, [1, 2]) == [1, 2]
    assert three[2].result() == [2]


def test_a_dead_receiver_keeps_nothing_from_the_living(three):
    join(dict(enumerate(three)), timeout_s=HANG_S)
    three[1].stop()
    three[2].send(receive)
    with pytest.raises(RefitError, match=r"did not finish round 7 .*sending to ranks \[1, 2\]"):
        three[0].call(send, [1, 2])
    assert three[2].result() == [2]


def test_only_errors_of_the_transport_are_called_so(three):
    join(dict(enumerate(three)), timeout_s=HANG_S)
    with pytest.raises(RuntimeError, match="^no memory$"):
        three[0].call(send_what_cannot_be_packed)
