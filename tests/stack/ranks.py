# SPDX-License-Identifier: Apache-2.0
"""Processes that run a function as the ranks of a process group, with a deadline. They stay, as starts cost seconds."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from tests.stack import processes
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig

# Each policy leaves some 50 threads of gloo behind: hooks of Megatron's DDP keep it alive, in a circle that Python's
# collector cannot see. A run has one policy a process; here, hundreds of them would slow each other down.
MAX_RUNS = 6


@dataclass(frozen=True)
class Rank:
    """Values with which a function joins the process group."""

    rank: int
    world_size: int
    master_port: int
    master_address: str = "127.0.0.1"

    @contextmanager
    def gloo(self) -> Iterator[None]:
        """A process group of all ranks."""
        import torch.distributed as dist

        method = f"tcp://{self.master_address}:{self.master_port}"
        dist.init_process_group("gloo", init_method=method, rank=self.rank, world_size=self.world_size)
        yield
        dist.destroy_process_group()

    def initialize(self, megatron: MegatronConfig) -> None:
        """Megatron's groups of these parallel sizes."""
        from mrl.policy import parallel

        meeting = parallel.Meeting(self.master_address, self.master_port)
        parallel.initialize(
            megatron, rank=self.rank, world_size=self.world_size, meeting=meeting, timeout_s=HANG_S, seed=1
        )


class RankPool:
    """Up to `num_ranks` processes. A failure, missed deadline or run `MAX_RUNS` ends all; the next call starts anew."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._members: list[tuple[BaseProcess, Connection]] = []
        self._num_runs = 0

    def run(
        self, function: Callable[..., object], *args: object, world_size: int, timeout_s: float = 3 * HANG_S
    ) -> list:
        """`function(rank, *args)` on ranks 0 to world_size - 1, and what each returned, in order of rank.

        Function, arguments and results are pickled: module-level functions, numpy arrays instead of tensors.

        Raises:
            RuntimeError: a rank failed; carries its traceback.
            TimeoutError: a rank did not answer within `timeout_s`.
        """
        assert world_size <= self._num_ranks
        if self._num_runs == MAX_RUNS:
            self.close()
        self._num_runs += 1
        while len(self._members) < world_size:
            self._members.append(_start())
        connections = [connection for _, connection in self._members[:world_size]]
        port = _free_port()
        for rank, connection in enumerate(connections):
            connection.send((function, Rank(rank, world_size, port), args))
        try:
            return _collect(connections, function.__name__, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in self._members:
            connection.close()
            process.kill()
        for process, _ in self._members:
            process.join(timeout=HANG_S)
        self._members = []
        self._num_runs = 0


def _start() -> tuple[BaseProcess, Connection]:
    started = processes.context()
    ours, theirs = started.Pipe()
    process = started.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _collect(connections: list[Connection], name: str, timeout_s: float) -> list:
    deadline = time.monotonic() + timeout_s
    answers: dict[Connection, object] = {}
    while len(answers) < len(connections):
        ready = wait(
            [connection for connection in connections if connection not in answers],
            timeout=max(0, deadline - time.monotonic()),
        )
        if not ready:
            silent = [rank for rank, connection in enumerate(connections) if connection not in answers]
            raise TimeoutError(f"{name}: ranks {silent} gave no answer within {timeout_s} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            failure, answers[connection] = connection.recv()
            if failure:
                raise RuntimeError(f"{name}: rank {connections.index(connection)} failed:\n{failure}")
    return [answers[connection] for connection in connections]


def _serve(connection: Connection) -> None:
    while True:
        try:
            if not connection.poll(timeout=3600):
                return
            function, rank, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (None, function(rank, *args))
        except Exception:
            answer = (traceback.format_exc(), None)
        connection.send(answer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
