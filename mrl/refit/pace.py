# SPDX-License-Identifier: Apache-2.0
"""Round counters of a rank and its GPU's engine workers, in host memory: they wait for each other without the driver.

The owner fills the rounds of the exchange memory in turn; each worker counts the rounds it has read. A round may be
filled when its readers have verified the round before it in the same buffer. Every wait has a limit, and ends when the
attempt is abandoned.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from conversion.schedule import NUM_BUFFERS
from mrl.refit import GivenUp, RefitError
from mrl.refit.memory import MappedMemory, SharedMemory

# Words (int64): the newest abandoned attempt, the owner's counter, then each worker's counter.
_GIVEN_UP, _FILLED, _FIRST_READER = 0, 1, 2
_WORD_BYTES = 8
# A word has attempts in its upper half and rounds in its lower one: it only grows, and one write updates both.
_ATTEMPT = 1 << 32
_POLL_S = 0.0002
_LOOK_S = 0.5


class Pace:
    """View of one GPU's words, for the owner of the exchange memory or a worker."""

    def __init__(self, memory: SharedMemory | MappedMemory, gpu: int) -> None:
        self.memory = memory
        self._gpu = gpu
        self._words = memory.tensor.numpy().view("int64")
        self.attempt = 0

    @staticmethod
    def num_bytes(num_readers: int) -> int:
        """The size of the words for this many workers on the GPU."""
        return _WORD_BYTES * (_FIRST_READER + num_readers)

    @property
    def is_given_up(self) -> bool:
        """The owner has abandoned the present attempt."""
        return int(self._words[_GIVEN_UP]) >= self.attempt

    def give_up(self, attempt: int) -> None:
        """Ends the waits of an attempt."""
        self._words[_GIVEN_UP] = max(attempt, int(self._words[_GIVEN_UP]))

    def filled(self, num_rounds: int) -> None:
        """Sets the number of rounds that the owner has written."""
        self._words[_FILLED] = self.attempt * _ATTEMPT + num_rounds

    def begin(self, attempt: int) -> None:
        """Marks the owner's attempt as begun: its weights are settled, and it uses the GPU for nothing else."""
        self.attempt = attempt
        self.filled(0)

    def read(self, reader: int, num_rounds: int) -> None:
        """Marks these rounds as done by the `reader`-th worker of the GPU."""
        self._words[_FIRST_READER + reader] = self.attempt * _ATTEMPT + num_rounds

    def check_filled(self, round_index: int) -> None:
        """Raises RefitError unless the exchange memory holds the round."""
        num_filled = self._count(_FILLED)
        if not round_index < num_filled <= round_index + NUM_BUFFERS:
            raise RefitError(
                f"GPU {self._gpu} has not exchanged round {round_index} in attempt {self.attempt}, or no longer "
                f"holds it: it has exchanged {max(num_filled, 0)} rounds"
            )

    def wait_until_begun(self, deadline: float) -> None:
        """Returns when the owner has begun the attempt. Needs a mapped memory's owner to live."""
        self._wait_for_owner(
            0, f"policy rank {self._gpu} has not settled its weights and made room for the engine's", deadline
        )

    def wait_until_filled(self, round_index: int, deadline: float) -> None:
        """Returns when the owner has written the round. Needs a mapped memory's owner to live."""
        self._wait_for_owner(
            round_index + 1, f"policy rank {self._gpu} has not exchanged round {round_index} of its GPU", deadline
        )

    def wait_until_read(self, reader: int, worker: int, num_rounds: int, deadline: float) -> None:
        """Waits until the `reader`-th worker of the GPU, number `worker` in the schedule, has read this many rounds."""
        self._wait(
            lambda: self._count(_FIRST_READER + reader) >= num_rounds,
            f"the engine worker on slot {worker} has not verified round {num_rounds - 1} on GPU {self._gpu}",
            deadline,
        )

    def _wait_for_owner(self, num_rounds: int, what: str, deadline: float) -> None:
        look = self.memory.check if isinstance(self.memory, MappedMemory) else None
        self._wait(lambda: self._count(_FILLED) >= num_rounds, what, deadline, look)

    def _count(self, word: int) -> int:
        """Rounds of the present attempt; negative while the word belongs to an earlier one."""
        return int(self._words[word]) - self.attempt * _ATTEMPT

    def _wait(
        self, is_done: Callable[[], bool], what: str, deadline: float, look: Callable[[], None] | None = None
    ) -> None:
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
