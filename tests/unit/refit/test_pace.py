# SPDX-License-Identifier: Apache-2.0
"""The words by which a rank and the workers of its GPU wait for each other, across attempts."""

from __future__ import annotations

import time

import pytest
import torch

from mrl.refit import RefitError
from mrl.refit.memory import MappedMemory, SharedMemory
from mrl.refit.pace import Pace
from tests.waiting import HANG_S, SOON_S


@pytest.fixture
def pair() -> tuple[Pace, Pace]:
    """The words of a GPU with one worker, as its rank and as the worker see them."""
    memory = SharedMemory(Pace.num_bytes(1), "test-pace", torch.device("cpu"))
    return Pace(memory, 0), Pace(MappedMemory(memory.handle(), is_writable=True), 0)


def soon() -> float:
    return time.monotonic() + SOON_S


def test_an_attempt_begins_before_its_first_round(pair: tuple[Pace, Pace]):
    rank, worker = pair
    worker.attempt = 1
    with pytest.raises(RefitError, match="has not settled its weights"):
        worker.wait_until_begun(soon())
    rank.begin(1)
    worker.wait_until_begun(soon())
    with pytest.raises(RefitError, match="has not exchanged round 0"):
        worker.wait_until_filled(0, soon())
    rank.filled(1)
    worker.wait_until_filled(0, soon())


def test_what_an_earlier_attempt_did_is_no_beginning(pair: tuple[Pace, Pace]):
    rank, worker = pair
    rank.begin(1)
    rank.filled(5)
    worker.attempt = 2
    with pytest.raises(RefitError, match="has not settled its weights"):
        worker.wait_until_begun(soon())


def test_nobody_waits_for_an_attempt_that_never_began_and_was_given_up(pair: tuple[Pace, Pace]):
    rank, worker = pair
    worker.attempt = 1
    rank.give_up(1)
    with pytest.raises(RefitError, match="given up"):
        worker.wait_until_begun(time.monotonic() + HANG_S)
