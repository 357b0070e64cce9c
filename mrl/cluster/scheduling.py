# SPDX-License-Identifier: Apache-2.0
"""The decisions of scheduling, without Ray: what each slot carries, which engine gets which request, what a death leads to.

A slot is a GPU, or a process on hosts without GPUs. Slots 0 to num_policy_ranks - 1 carry the policy rank of the same number. Colocated
engines share those slots; dedicated engines have the slots that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from mrl.cluster.errors import ActorLost, ActorName
from mrl.config.schema.run import RunConfig

ENGINE = "engine"
R = TypeVar("R")


class HasRequestId(Protocol):
    @property
    def request_id(self) -> str: ...


Q = TypeVar("Q", bound=HasRequestId)


@dataclass(frozen=True)
class EngineSlots:
    """The slots of one engine; `slots[i]` carries its worker `i`."""

    engine_index: int
    slots: tuple[int, ...]

    def device_ids(self, gpus_per_node: int) -> tuple[int, ...]:
        """GPU of each worker among those of its node, where its slot's policy rank is too; empty on hosts without GPUs."""
        return tuple(slot % gpus_per_node for slot in self.slots) if gpus_per_node else ()


def engine_slots(config: RunConfig) -> tuple[EngineSlots, ...]:
    """The slots of every engine: consecutive, and spread evenly over those that may serve; on GPU hosts all of these do."""
    tp, num_engines = config.policy.generation.vllm_cfg.tensor_parallel_size, config.num_engines
    if not num_engines:
        return ()
    num_serving = config.num_dedicated_slots or config.num_policy_ranks
    first = config.num_slots - num_serving
    stride = num_serving // num_engines // tp * tp
    assert stride >= tp, "mrl.config.rules.layout refuses more engine workers than slots"
    starts = (first + index * stride for index in range(num_engines))
    return tuple(EngineSlots(index, tuple(range(start, start + tp))) for index, start in enumerate(starts))


def slot_table(hosts: Sequence[str], num_policy_ranks: int, engines: Sequence[EngineSlots]) -> list[str]:
    """One line per slot: its host (`hosts[slot]`), policy rank, engine and the engine's worker."""
    served = {slot: f"{engine.engine_index}.{worker}" for engine in engines for worker, slot in enumerate(engine.slots)}
    width = max(map(len, (*hosts, "node")))
    lines = [f"slot  {'node':<{width}}  rank  engine.worker"]
    for slot, host in enumerate(hosts):
        rank = str(slot) if slot < num_policy_ranks else "-"
        lines.append(f"{slot:<5} {host:<{width}}  {rank:<5} {served.get(slot, '-')}")
    return lines


def share_of_cores(slot: int, node_of: Mapping[int, int], num_cores: Mapping[int, int]) -> int:
    """Cores of a slot's node for each of the node's slots, at least 1; `num_cores` by node."""
    node = node_of[slot]
    return max(1, num_cores[node] // sum(other == node for other in node_of.values()))


def find_engine_across_nodes(node_of: Mapping[int, int], engines: Sequence[EngineSlots]) -> EngineSlots | None:
    """An engine whose workers would be on several nodes; None if there is none."""
    return next((engine for engine in engines if len({node_of[slot] for slot in engine.slots}) > 1), None)


class RequestBook(Generic[Q]):
    """Requests by actor: of rollouts by engine, of verdicts by reward actor. Each goes to the actor with the fewest unfinished ones.

    A request stays on record until it is finished. An actor with requests is polled. Actors in `lost` died beside other work; they are not
    polled until they are restarted.
    """

    def __init__(self, kind: str, num_actors: int, *, max_fruitless_restarts: int) -> None:
        """An actor may die `max_fruitless_restarts` times in a row without finishing a rollout."""
        self.kind = kind
        self.num_restarts = 0
        self.lost: set[int] = set()
        self._max_fruitless = max_fruitless_restarts
        self._fruitless = [0] * num_actors
        self._unfinished: list[dict[str, Q]] = [{} for _ in range(num_actors)]
        # The next poll takes them along, so that whoever waits for the rollouts sees a refusal.
        self._unsent: list[list[Q]] = [[] for _ in range(num_actors)]

    @property
    def num_unfinished(self) -> int:
        return sum(map(len, self._unfinished))

    @property
    def num_expected(self) -> int:
        """Unfinished requests of the actors that are not lost."""
        return sum(len(requests) for index, requests in enumerate(self._unfinished) if index not in self.lost)

    def submit(self, requests: Iterable[Q]) -> None:
        """Assigns requests to actors."""
        loads = [(len(unfinished), index) for index, unfinished in enumerate(self._unfinished)]
        heapify(loads)
        for request in requests:
            load, index = loads[0]
            heapreplace(loads, (load + 1, index))
            self._unfinished[index][request.request_id] = request
            self._unsent[index].append(request)

    def to_poll(self, polled: set[int]) -> list[int]:
        """Actors with work that live and are not among those `polled` already."""
        return [index for index, requests in enumerate(self._unfinished) if requests and index not in self.lost | polled]

    def take_unsent(self, index: int) -> list[Q]:
        """The requests that the actor has not been given yet, each once."""
        requests, self._unsent[index] = self._unsent[index], []
        return requests

    def finish(self, index: int, request_ids: Iterable[str]) -> None:
        """Strikes off requests that an actor has answered."""
        for request_id in request_ids:
            del self._unfinished[index][request_id]
            self._fruitless[index] = 0

    def count_restart(self, index: int, *, log_file: Path) -> int:
        """Records that a dead actor is started again; returns how many requests it is asked again. RuntimeError: it dies too often."""
        self._fruitless[index] += 1
        if self._fruitless[index] > self._max_fruitless:
            times = f"{self._fruitless[index]} times in a row without finishing a rollout"
            raise RuntimeError(f"{self.kind} {index} died {times}; see {log_file}")
        self.num_restarts += 1
        self.lost.discard(index)
        return len(self._unfinished[index])

    def resubmit(self, index: int) -> None:
        """Has all unfinished requests of an actor sent again."""
        self._unsent[index] = list(self._unfinished[index].values())

    def missing(self) -> str:
        """The unfinished requests, for messages: `12 rollouts (0/train:7/3 of engine 0 and others)`."""
        first = next(f"{next(iter(requests))} of {self.kind} {index}" for index, requests in enumerate(self._unfinished) if requests)
        return f"{self.num_unfinished} rollouts ({first} and others)"


def lost_engine(lost: ActorLost) -> int:
    """Index of the engine that died; raises `lost` again if it names another actor."""
    if isinstance(lost.actor, ActorName) and lost.actor.kind == ENGINE:
        return lost.actor.index
    raise lost


def until_no_engine_dies(
    attempt: Callable[[set[int]], R], restart: Callable[[int], None], *, died: int | None = None
) -> tuple[R, set[int]]:
    """Repeats `attempt(restarted)` until no engine dies in it; its result, and the engines that were started again.

    `restart(index)` comes before the next attempt, and may itself lose an engine. Every attempt gets all engines restarted so far, because
    a new one has none of what earlier attempts did. `died` is an engine that is dead before the first attempt.
    """
    restarted: set[int] = set()
    while True:
        try:
            if died is not None:
                restarted.add(died)
                restart(died)
                died = None
            return attempt(restarted), restarted
        except ActorLost as lost:
            died = lost_engine(lost)
