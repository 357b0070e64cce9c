# SPDX-License-Identifier: Apache-2.0
"""Scheduling decisions, without Ray: the load of each slot, and the restarts after a death.

A slot is a GPU, or a process on hosts without GPUs. Slots 0 to num_policy_ranks - 1 carry the policy rank of the same
number. Colocated engines share those slots. Then come the slots of teachers and judges with nodes of their own, and of
dedicated engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from mrl.cluster.errors import ActorLost, ActorName
from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName

ENGINE, JUDGE = "engine", "judge"
# A gateway's loop takes 10 ms for a turn of 30,000 characters: so many agents may think 5 s about each of their turns.
ROLLOUTS_PER_GATEWAY = 512
R = TypeVar("R")


@dataclass(frozen=True)
class EngineSlots:
    """The slots of one engine; `slots[i]` carries its worker `i`."""

    engine_index: int
    slots: tuple[int, ...]

    def parts(self, node_of: Mapping[int, int]) -> list[tuple[int, ...]]:
        """The slots on each of its nodes, in order; `node_of` by slot."""
        return [tuple(slots) for _, slots in itertools.groupby(self.slots, key=node_of.__getitem__)]


def device_ids(slots: Sequence[int], gpus_per_node: int) -> tuple[int, ...]:
    """GPU of each of these slots among those of its node, where its policy rank is too; empty on hosts without GPUs."""
    return tuple(slot % gpus_per_node for slot in slots) if gpus_per_node else ()


def engine_slots(config: RunConfig) -> tuple[EngineSlots, ...]:
    """The slots of every engine: consecutive, and spread evenly over those that may serve; on GPU hosts all do."""
    num_workers, num_engines = config.policy.generation.num_workers, config.num_engines
    if not num_engines:
        return ()
    num_serving = config.num_dedicated_slots or config.num_policy_ranks
    first = config.num_slots - num_serving if config.num_dedicated_slots else 0
    stride = num_serving // num_engines // num_workers * num_workers
    assert stride >= num_workers, "mrl.config.rules.layout refuses more engine workers than slots"
    starts = (first + index * stride for index in range(num_engines))
    return tuple(EngineSlots(index, tuple(range(start, start + num_workers))) for index, start in enumerate(starts))


def elastic_slots(config: RunConfig) -> list[range]:
    """The slots of dedicated engines that come and go, the last ones: of each whole node, or of each engine on others.

    Engines of one node stay together, as each has GPUs of its own there.
    """
    if config.policy.generation.min_num_engines is None:
        return []
    is_whole = config.cluster.gpus_per_node > 0 and config.cluster.num_nodes > 1
    size = config.cluster.gpus_per_node if is_whole else config.policy.generation.num_workers
    first = config.num_slots - config.num_dedicated_slots
    return [range(start, start + size) for start in range(first, config.num_slots, size)]


def num_gateways(config: RunConfig) -> int:
    """Gateways of a run: one for each node, as far as there are engines, and one for so many rollouts of agents.

    More than there are processes of agents would not share their work. 0: nobody asks over HTTP.
    """
    env, asked = config.env, -(-config.num_rollouts_at_once // ROLLOUTS_PER_GATEWAY)
    is_asked = env.has_agents or config.policy.generation.vllm_cfg.expose_http_server or bool(config.judges)
    if not config.has_engines or not is_asked:
        return 0
    if not env.remote:
        asked = min(asked, len(env.verifiers) + len(env.own.agents) * (env.own.num_workers or 1))
    return max(1, asked, min(config.cluster.num_nodes, config.num_engines))


def own_slots(config: RunConfig) -> dict[ModelName, range]:
    """The slots of each teacher, and of each judge (`judge:NAME`), with nodes of its own."""
    found, first = dict[ModelName, range](), config.num_policy_ranks
    nodes = config.own_nodes | {f"{JUDGE}:{name}": judge.num_nodes for name, judge in config.judges.items()}
    for model, number in nodes.items():
        found[model] = range(first, first := first + number * config.cluster.slots_per_node)
    return found


def judge_slots(config: RunConfig) -> dict[str, tuple[EngineSlots, ...]]:
    """The slots of the engines of each judge, by its name."""
    own, found = own_slots(config), dict[str, tuple[EngineSlots, ...]]()
    for name, judge in config.judges.items():
        slots, size = own[f"{JUDGE}:{name}"], judge.num_workers
        found[name] = tuple(EngineSlots(i, tuple(slots[i * size : (i + 1) * size])) for i in range(len(slots) // size))
    return found


def find_shared_node(node_of: Mapping[int, int], own: Mapping[ModelName, range], num_slots: int) -> ModelName | None:
    """A model with nodes of its own that would share one with another slot, or None."""
    for model, slots in own.items():
        mine = {node_of[slot] for slot in slots}
        if any(node_of[slot] in mine for slot in range(num_slots) if slot not in slots):
            return model
    return None


def slot_table(
    hosts: Sequence[str],
    num_policy_ranks: int,
    engines: Sequence[EngineSlots],
    own: Mapping[ModelName, range] = MappingProxyType({}),
) -> list[str]:
    """One line per slot: its host (`hosts[slot]`), rank of the policy or a teacher, engine and the engine's worker."""
    served = {slot: f"{engine.engine_index}.{worker}" for engine in engines for worker, slot in enumerate(engine.slots)}
    width = max(map(len, (*hosts, "node")))
    lines = [f"slot  {'node':<{width}}  rank  engine.worker"]
    for slot, host in enumerate(hosts):
        rank = str(slot) if slot < num_policy_ranks else "-"
        of_other = "".join(f"  {model} {slots.index(slot)}" for model, slots in own.items() if slot in slots)
        lines.append(f"{slot:<5} {host:<{width}}  {rank:<5} {served.get(slot, '-')}{of_other}")
    return lines


def share_of_cores(slot: int, node_of: Mapping[int, int], num_cores: Mapping[int, int]) -> int:
    """Cores of a slot's node for each of the node's slots, at least 1; `num_cores` by node."""
    node = node_of[slot]
    return max(1, num_cores[node] // sum(other == node for other in node_of.values()))


def find_uneven_engine(node_of: Mapping[int, int], engines: Sequence[EngineSlots]) -> EngineSlots | None:
    """An engine that would have more workers on one of its nodes than on another, which vLLM cannot; None if none."""
    return next((engine for engine in engines if len(set(map(len, engine.parts(node_of)))) > 1), None)


def lost_engine(lost: ActorLost) -> int:
    """Index of the engine that died; raises `lost` again if it names another actor."""
    if isinstance(lost.actor, ActorName) and lost.actor.kind == ENGINE:
        return lost.actor.index
    raise lost


async def until_no_engine_dies(
    attempt: Callable[[set[int]], Awaitable[R]], restart: Callable[[int], Awaitable[None]], *, died: int | None = None
) -> tuple[R, set[int]]:
    """Repeats `attempt(restarted)` until no engine dies in it; its result, and the engines that were started again.

    `restart(index)` comes before the next attempt, and may itself lose an engine. Every attempt gets all engines
    restarted so far. `died` is an engine that is dead before the first one.
    """
    restarted: set[int] = set()
    while True:
        try:
            if died is not None:
                restarted.add(died)
                await restart(died)
                died = None
            return await attempt(restarted), restarted
        except ActorLost as lost:
            died = lost_engine(lost)
