# SPDX-License-Identifier: Apache-2.0
"""Nodes of the Ray cluster: which joined, what each answers, how far clocks differ, and samples of their hosts."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.cluster.calls import ask, start_actor
from mrl.cluster.hosts import HostLog, HostSampler, sample_until
from mrl.cluster.runtime import SLOT_RESOURCE, join_cluster
from mrl.config.schema.run import RunConfig
from mrl.config.texts import rounded

logger = logging.getLogger(__name__)

CLOCK_ROUNDS = 3
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Node:
    name: str
    node_id: str
    is_alive: bool


@dataclass(frozen=True)
class Reply:
    answer: object = None
    error: str = ""


def connect() -> None:
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)


def joined_nodes() -> list[tuple[str, int]]:
    """Name and slots of every node that is online."""
    found = []
    for node in _alive():
        # The name that the launcher started Ray with, else the host's: Ray calls a node that was given no name by its
        # address.
        is_named = node["NodeName"] != node["NodeManagerAddress"]
        name = str(node["NodeName"] if is_named else node["NodeManagerHostname"])
        found.append((name, int(node["Resources"].get(SLOT_RESOURCE, 0))))
    return found


@contextmanager
def cluster_nodes() -> Iterator[list[Node]]:
    """Joins the cluster at RAY_ADDRESS for the `with` block; its nodes, lost too; numbered where a host has several."""
    join_cluster()
    try:
        hosts: Counter[str] = Counter()
        nodes = []
        for found in sorted(ray.nodes(), key=lambda node: str(node["NodeManagerHostname"])):
            host = str(found["NodeManagerHostname"])
            hosts[host] += 1
            nodes.append(
                Node(host if hosts[host] == 1 else f"{host}#{hosts[host]}", str(found["NodeID"]), bool(found["Alive"]))
            )
        yield nodes
    finally:
        ray.shutdown()


def _alive() -> list[dict]:
    return [node for node in ray.nodes() if node["Alive"]]


def ask_nodes(
    nodes: list[Node], question: Callable[..., object], *arguments: object, deadline_s: float
) -> dict[str, Reply]:
    """Runs `question(name of the node, *arguments)`, an importable function, on all nodes at once; replies by name."""
    task = ray.remote(_answer)
    pending = {
        node.name: task.options(**_options(node.node_id, max_retries=0)).remote(question, node.name, arguments)
        for node in nodes
    }
    end = time.monotonic() + deadline_s
    return {name: _reply(reference, end - time.monotonic(), deadline_s) for name, reference in pending.items()}


def _answer(question: Callable[..., object], name: str, arguments: tuple[object, ...]) -> object:
    return question(name, *arguments)


def clock_offsets(nodes: list[Node], *, deadline_s: float) -> dict[str, tuple[float, float]]:
    """Clock offset of each node from this host in seconds, and its uncertainty, by the quickest answer."""
    task = ray.remote(read_clock)
    offsets: dict[str, tuple[float, float]] = {}
    for node in nodes:
        for _ in range(CLOCK_ROUNDS):
            asked = time.time()
            reply = _reply(task.options(**_options(node.node_id, max_retries=0)).remote(), deadline_s, deadline_s)
            answered = time.time()
            if not isinstance(reply.answer, float):
                break
            uncertainty_s = (answered - asked) / 2
            if node.name not in offsets or uncertainty_s < offsets[node.name][1]:
                offsets[node.name] = reply.answer - (asked + answered) / 2, uncertainty_s
    return offsets


def read_clock() -> float:
    return time.time()


@contextmanager
def watch_hosts(config: RunConfig, log: HostLog | None) -> Iterator[None]:
    """Samples all nodes for the loggers, every `collection_interval` seconds in the `with` block; None: no samples."""
    settings = config.logger
    if not settings.monitor_gpus or log is None:
        yield
        return
    samplers = NodeSamplers(is_private=config.cluster.num_nodes == 1)
    intervals = settings.gpu_monitoring.collection_interval, settings.gpu_monitoring.flush_interval
    has_ended = threading.Event()
    thread = threading.Thread(
        target=sample_until, args=(has_ended, samplers.sample, log, *intervals), name="monitor", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(STOP_TIMEOUT_S)


class NodeSamplers:
    """Samples the nodes of a run. On one node the driver does it itself; on several each has an actor."""

    def __init__(self, *, is_private: bool) -> None:
        """`is_private`: the driver is the parent of the only node's processes."""
        self._own = HostSampler(is_actor=False) if is_private else None
        # Each actor is a child of its node's raylet, as the node's ranks and engines are.
        self._actors = []
        if not is_private:
            options = [_options(str(node["NodeID"]), max_restarts=-1) for node in _alive()]
            self._actors = [start_actor(HostSampler, of_node, True) for of_node in options]

    def sample(self, timeout_s: float) -> dict[str, float]:
        """`node.I.<name>` of every node that answers within `timeout_s`, in the order in which Ray lists the nodes."""
        if self._own is not None:
            return {f"node.0.{name}": value for name, value in self._own.sample().items()}
        references = {ask(actor, HostSampler.sample): index for index, actor in enumerate(self._actors)}
        ready, _ = ray.wait(list(references), num_returns=len(references), timeout=timeout_s)
        found: dict[str, float] = {}
        for reference in ready:
            try:
                values = ray.get(reference, timeout=timeout_s)
            except RayError as error:
                logger.debug("node %d gave no sample: %s", references[reference], error)
                continue
            found |= {f"node.{references[reference]}.{name}": value for name, value in values.items()}
        return found


def _options(node_id: str, **more: int) -> dict[str, object]:
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False), **more}


def _reply(reference: ray.ObjectRef, timeout_s: float, deadline_s: float) -> Reply:
    try:
        return Reply(ray.get(reference, timeout=max(0.0, timeout_s)))
    except GetTimeoutError:
        return Reply(error=f"no answer within {rounded(deadline_s)} s")
    except RayError as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        lines = [line for line in str(cause).splitlines() if line.strip()]
        return Reply(error=lines[-1].strip() if lines else type(cause).__name__)
