# SPDX-License-Identifier: Apache-2.0
"""Round counters of a refit on one GPU, in host memory: a trainer rank and the engine workers there wait for each other by them, without
the driver.

The owner fills round after round of the exchange memory; every worker says how many it has read. A round may be filled when those that read
have verified the one that had its place. Nobody waits without a limit, or for an attempt that was given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from conversion.schedule import NUM_BUFFERS
from mrl.refit import GivenUp, RefitError
from mrl.refit.memory import MappedMemory, SharedMemory

# Words (int64): the newest attempt that was given up, how far the owner is, and then how far each worker is.
_GIVEN_UP, _FILLED, _FIRST_READER = 0, 1, 2
_WORD_BYTES = 8
# A word counts rounds in its lower half and attempts in its upper one, so that it never goes back and is written at once.
_ATTEMPT = 1 << 32
# Pause between two looks: small against a round, and few of them make a core busy.
_POLL_S = 0.0002
# Pause between two looks whether who is waited for still lives.
_LOOK_S = 0.5


class Pace:
    """The words of one GPU, as the owner of its exchange memory or one of its workers sees them."""

    def __init__(self, memory: SharedMemory | MappedMemory, gpu: int) -> None:
        self.memory = memory
        self._gpu = gpu
        self._words = memory.tensor.numpy().view("int64")
        self.attempt = 0

    @staticmethod
    def num_bytes(num_readers: int) -> int:
        """Returns the size of the words for this many workers on the GPU."""
        return _WORD_BYTES * (_FIRST_READER + num_readers)

    @property
    def is_given_up(self) -> bool:
        """The owner, or who shares this object with it, has left the present attempt."""
        return int(self._words[_GIVEN_UP]) >= self.attempt

    def give_up(self, attempt: int) -> None:
        """Ends the waits of an attempt."""
        self._words[_GIVEN_UP] = max(attempt, int(self._words[_GIVEN_UP]))

    def filled(self, num_rounds: int) -> None:
        """The owner has written so many rounds."""
        self._words[_FILLED] = self.attempt * _ATTEMPT + num_rounds

    def begin(self, attempt: int) -> None:
        """The owner begins an attempt: its weights are settled, and nothing else of it is in the GPU's way."""
        self.attempt = attempt
        self.filled(0)

    def read(self, reader: int, num_rounds: int) -> None:
        """The `reader`-th worker of the GPU needs these rounds no more."""
        self._words[_FIRST_READER + reader] = self.attempt * _ATTEMPT + num_rounds

    def check_filled(self, round_index: int) -> None:
        """Returns if the exchange memory holds the round."""
        num_filled = self._count(_FILLED)
        if not round_index < num_filled <= round_index + NUM_BUFFERS:
            raise RefitError(
                f"GPU {self._gpu} has not exchanged round {round_index} in attempt {self.attempt}, or no longer holds it: "
                f"it has exchanged {max(num_filled, 0)} rounds"
            )

    def wait_until_begun(self, deadline: float) -> None:
        """Returns when the owner has begun the attempt. Needs a mapped memory's owner to live."""
        self._wait_for_owner(0, f"policy rank {self._gpu} has not settled its weights and made room for the engine's", deadline)

    def wait_until_filled(self, round_index: int, deadline: float) -> None:
        """Returns when the owner has written the round. Needs a mapped memory's owner to live."""
        self._wait_for_owner(round_index + 1, f"policy rank {self._gpu} has not exchanged round {round_index} of its GPU", deadline)

    def wait_until_read(self, reader: int, worker: int, num_rounds: int, deadline: float) -> None:
        """Returns when the `reader`-th worker of the GPU, whose number is `worker`, has read so many rounds."""
        self._wait(
            lambda: self._count(_FIRST_READER + reader) >= num_rounds,
            f"the engine worker on slot {worker} has not verified round {num_rounds - 1} on GPU {self._gpu}",
            deadline,
        )

    def _wait_for_owner(self, num_rounds: int, what: str, deadline: float) -> None:
        look = self.memory.check if isinstance(self.memory, MappedMemory) else None
        self._wait(lambda: self._count(_FILLED) >= num_rounds, what, deadline, look)

    def _count(self, word: int) -> int:
        """Rounds of the present attempt; negative while the word is of an earlier one."""
        return int(self._words[word]) - self.attempt * _ATTEMPT

    def _wait(self, is_done: Callable[[], bool], what: str, deadline: float, look: Callable[[], None] | None = None) -> None:
        next_look = time.monotonic() + _LOOK_S
        while not is_done():
            if self.is_given_up:
                raise GivenUp(f"attempt {self.attempt} at the refit was given up while {what}")
            now = time.monotonic()
            if now > deadline:
                raise RefitError(f"{what} in time (deadlines.refit_s)")
            if look is not None and now > next_look:
                look()
                next_look = now + _LOOK_S
            time.sleep(_POLL_S)
