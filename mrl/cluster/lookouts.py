# SPDX-License-Identifier: Apache-2.0
"""The watchdog's eyes on a launcher's cluster: an actor on each node reads its processes, and keeps their stacks."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.cluster.calls import ask, start_actor
from mrl.cluster.environment import signs_folder
from mrl.cluster.hangs import SILENT, ProcessReading
from mrl.cluster.watchdog import Stacks, read_all, read_signs, read_stacks
from mrl.signals import die_with_parent

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ANSWER_TIMEOUT_S = 5.0


class Lookout:
    """Looks at the node on which it runs, whose raylet is its parent."""

    def __init__(self, name: str) -> None:
        die_with_parent()
        self._folder = signs_folder(name)
        # Removes the folder when this process ends, in whatever way: no child of it, as Ray kills the children of its
        # workers.
        command = ["sh", "-c", 'exec 3<&0; { cat <&3 >/dev/null; rm -rf "$0"; } &', str(self._folder)]
        self._cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._cleaner.wait(ANSWER_TIMEOUT_S)

    def look(self) -> list[ProcessReading]:
        """Reads the node's processes."""
        return read_all(os.getppid(), read_signs(self._folder))

    def stacks(self) -> Stacks:
        """The stacks of the node's processes of the run."""
        return read_stacks(self._folder)


class Lookouts:
    """A lookout on every node, asked by a thread of its own: a call of Ray's may hang."""

    def __init__(self, name: str, interval_s: float) -> None:
        self._interval_s = interval_s
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._actors: dict[str, ActorHandle[Lookout]] = {}
        for number, node in enumerate(nodes):
            options = {
                "num_cpus": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(str(node["NodeID"]), soft=False),
            }
            self._actors[f"node {number} ({node['NodeManagerHostname']})"] = start_actor(Lookout, options, name)
        self._readings: dict[str, list[ProcessReading]] = dict.fromkeys(self._actors, [])
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="lookouts", daemon=True)
        self._thread.start()

    def readings(self) -> list[ProcessReading]:
        """Last readings of all nodes; a silent node has one reading that says so."""
        return [reading for readings in list(self._readings.values()) for reading in readings]

    def stacks(self) -> Stacks:
        """The stacks of all processes on nodes that answer."""
        references = [ask(actor, Lookout.stacks) for actor in self._actors.values()]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=ANSWER_TIMEOUT_S)
        return [stack for reference in ready for stack in _answer(lambda: ray.get(reference, timeout=ANSWER_TIMEOUT_S))]  # noqa: B023

    def stop(self) -> None:
        """Ends the thread, which must not call Ray once Ray is shut down: that would start it again."""
        self._is_over.set()
        self._thread.join(self._interval_s + ANSWER_TIMEOUT_S)

    def _ask(self) -> None:
        pending: dict[ray.ObjectRef, str] = {}
        heard = dict.fromkeys(self._actors, time.monotonic())
        while not self._is_over.wait(self._interval_s):
            for name in self._actors.keys() - set(pending.values()):
                pending[ask(self._actors[name], Lookout.look)] = name
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=self._interval_s)
            if self._is_over.is_set():
                return
            now = time.monotonic()
            for reference in ready:
                name = pending.pop(reference)
                try:
                    self._readings[name], heard[name] = ray.get(reference, timeout=ANSWER_TIMEOUT_S), now
                except RayActorError:  # its node is lost, as Ray has found out, and who needs that hears of it
                    self._readings[name] = []
                except RayError:
                    continue
            for name, since in heard.items():
                if self._readings[name] and now - since > ANSWER_TIMEOUT_S + 2 * self._interval_s:
                    self._readings[name] = [ProcessReading(name, 0, name, SILENT, 0.0, 0)]


def _answer(get: Callable[[], list]) -> list:
    try:
        return get()
    except RayError:
        return []
