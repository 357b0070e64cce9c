"""Waits until every node of a launcher's Ray cluster has joined."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import datetime

import ray

logger = logging.getLogger(__name__)

UNIT_RESOURCE = "worker_units"
"""Ray resource of a launched node: as many as it has worker units."""
POLL_S = 1.0


def wait_for_nodes(num_nodes: int, num_units: int, *, names: Sequence[str], timeout_s: float) -> None:
    """Returns when the cluster at RAY_ADDRESS has `num_units` worker units on `num_nodes` nodes; logs whenever one has joined.

    `names` are those of the nodes, as far as the launcher knows them.

    Raises:
        RuntimeError: they are not online within `timeout_s`; says which nodes, or how many, are missing.
    """
    deadline = time.monotonic() + timeout_s
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    online = -1
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        units = {str(node["NodeManagerHostname"]): int(node["Resources"].get(UNIT_RESOURCE, 0)) for node in alive}
        if sum(units.values()) != online:
            online = sum(units.values())
            logger.info("[INFO][%s] Number of actors online: %d/%d", datetime.now().strftime("%F %T"), online, num_units)
        if online >= num_units and len(alive) >= num_nodes:
            return
        if time.monotonic() > deadline:
            missing = ", ".join(missing_nodes(names, units)) or f"{num_nodes - len(alive)} of {num_nodes} nodes"
            raise RuntimeError(
                f"{online} of {num_units} worker units are online after {timeout_s:g} s (JOIN_TIMEOUT_S); missing, see the logs: {missing}"
            )
        time.sleep(POLL_S)


def missing_nodes(names: Sequence[str], units: Mapping[str, int]) -> list[str]:
    """The nodes among `names`, as Slurm calls them, that are none of the hosts that have joined; hosts may carry a domain."""
    hosts = {host.split(".")[0] for host in units}
    return [name for name in names if name.split(".")[0] not in hosts]
