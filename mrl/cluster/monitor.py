"""Samples every node of a run for the loggers, beside the run: nobody waits for a sample, and a node that does not answer lacks some."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.cluster.hosts import HostLog, HostSampler, sample_until
from mrl.config.schema.run import RunConfig

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0


@contextmanager
def watch_hosts(config: RunConfig, log: HostLog) -> Iterator[None]:
    """Inside the `with` block every node is sampled every `collection_interval` seconds, if asked for and if somebody wants it."""
    settings = config.logger
    if not settings.monitor_gpus or log.is_empty:
        yield
        return
    nodes = Nodes(is_private=config.cluster.num_nodes == 1)
    intervals = settings.gpu_monitoring.collection_interval, settings.gpu_monitoring.flush_interval
    has_ended = threading.Event()
    thread = threading.Thread(target=sample_until, args=(has_ended, nodes.sample, log, *intervals), name="monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join(STOP_TIMEOUT_S)


class Nodes:
    """The nodes of a run. On one node the driver samples it itself; on several each has an actor."""

    def __init__(self, *, is_private: bool) -> None:
        """`is_private`: the driver is the parent of the only node's processes."""
        self._own = HostSampler(is_actor=False) if is_private else None
        self._actors = [] if is_private else [_start_sampler(str(node["NodeID"])) for node in alive_nodes()]

    def sample(self, timeout_s: float) -> dict[str, float]:
        """`node.I.<name>` of every node that answers within `timeout_s`, in the order in which Ray lists the nodes."""
        if self._own is not None:
            return {f"node.0.{name}": value for name, value in self._own.sample().items()}
        references = {actor.sample.remote(): index for index, actor in enumerate(self._actors)}
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


def alive_nodes() -> list[dict]:
    """Ray's records of the nodes that are up."""
    return [node for node in ray.nodes() if node["Alive"]]


def _start_sampler(node_id: str):  # the handle type is private to Ray
    """A sampler on a node, whose processes descend from that node's raylet, as the actor itself does."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(HostSampler).options(num_cpus=0, scheduling_strategy=strategy, max_restarts=-1).remote(is_actor=True)
