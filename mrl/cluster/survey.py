"""The same question to every node of a launcher's Ray cluster, and how far the nodes' clocks are apart. Needs no placement and no run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.cluster.head import join_cluster

CLOCK_ROUNDS = 3


@dataclass(frozen=True)
class Node:
    """A node that has joined."""

    name: str
    node_id: str
    is_alive: bool


@dataclass(frozen=True)
class Reply:
    """What a node said."""

    answer: object = None
    error: str = ""
    """Why there is no answer."""


@dataclass(frozen=True)
class ClockOffset:
    """How far a node's clock is ahead of this process's, to within `uncertainty_s`."""

    seconds: float
    uncertainty_s: float


@contextmanager
def joined_cluster() -> Iterator[list[Node]]:
    """The nodes of the cluster at RAY_ADDRESS, which this process has joined inside the `with` block.

    Raises:
        NoCluster: there is none.
    """
    join_cluster()
    try:
        yield cluster_nodes()
    finally:
        ray.shutdown()


def cluster_nodes() -> list[Node]:
    """The nodes of the joined cluster, those that it has lost too; names of hosts with several nodes are numbered."""
    names: dict[str, int] = {}
    nodes = []
    for found in sorted(ray.nodes(), key=lambda node: str(node["NodeManagerHostname"])):
        host = str(found["NodeManagerHostname"])
        names[host] = names.get(host, 0) + 1
        nodes.append(Node(host if names[host] == 1 else f"{host}#{names[host]}", str(found["NodeID"]), bool(found["Alive"])))
    return nodes


def ask_nodes(nodes: list[Node], question: Callable[..., object], *arguments: object, deadline_s: float) -> dict[str, Reply]:
    """`question(name of the node, *arguments)` on all of these nodes at once, replies by name; a function of an importable module."""
    task = ray.remote(_answer)
    pending = {node.name: task.options(**_options(node)).remote(question, node.name, arguments) for node in nodes}
    end = time.monotonic() + deadline_s
    return {name: _reply(reference, end - time.monotonic(), deadline_s) for name, reference in pending.items()}


def clock_offsets(nodes: list[Node], *, deadline_s: float) -> dict[str, ClockOffset]:
    """The clocks of those nodes that answer, by name; each is read a few times, and the quickest answer counts."""
    task = ray.remote(read_clock)
    offsets: dict[str, ClockOffset] = {}
    for node in nodes:
        for _ in range(CLOCK_ROUNDS):
            asked = time.time()
            reply = _reply(task.options(**_options(node)).remote(), deadline_s, deadline_s)
            answered = time.time()
            if not isinstance(reply.answer, float):
                break
            found = ClockOffset(reply.answer - (asked + answered) / 2, (answered - asked) / 2)
            if node.name not in offsets or found.uncertainty_s < offsets[node.name].uncertainty_s:
                offsets[node.name] = found
    return offsets


def read_clock() -> float:
    """The clock of the node that runs it, in seconds since 1970."""
    return time.time()


def _answer(question: Callable[..., object], name: str, arguments: tuple[object, ...]) -> object:
    return question(name, *arguments)


def _options(node: Node) -> dict[str, object]:
    """Options of a task that runs on this node or not at all."""
    return {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False)}


def _reply(reference: ray.ObjectRef, timeout_s: float, deadline_s: float) -> Reply:
    try:
        return Reply(ray.get(reference, timeout=max(0.0, timeout_s)))
    except GetTimeoutError:
        return Reply(error=f"no answer within {deadline_s:g} s")
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        lines = [line for line in str(cause).splitlines() if line.strip()]
        return Reply(error=lines[-1].strip() if lines else type(cause).__name__)
