"""Waits until every node of a launched cluster has joined; how it asks for them is in mrl/cluster/join.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

logger = logging.getLogger(__name__)

POLL_S = 1.0

Joined = Sequence[tuple[str, int]]
"""Host name and worker units of every node that is online."""


def wait_for_nodes(read: Callable[[], Joined], *, num_nodes: int, num_units: int, names: Sequence[str], timeout_s: float) -> None:
    """Returns when `read` gives `num_units` worker units on `num_nodes` nodes; logs whenever some have joined.

    `names` are those of the nodes, as far as the launcher knows them.

    Raises:
        RuntimeError: they are not online within `timeout_s`; says which nodes, or how many, are missing.
    """
    deadline = time.monotonic() + timeout_s
    online = -1
    while True:
        joined = read()
        units = sum(count for _, count in joined)
        if units != online:
            online = units
            logger.info("[INFO][%s] Number of actors online: %d/%d", datetime.now().strftime("%F %T"), online, num_units)
        if online >= num_units and len(joined) >= num_nodes:
            return
        if time.monotonic() > deadline:
            missing = ", ".join(missing_nodes(names, (host for host, _ in joined))) or f"{num_nodes - len(joined)} of {num_nodes} nodes"
            raise RuntimeError(
                f"{online} of {num_units} worker units are online after {timeout_s:g} s (JOIN_TIMEOUT_S); missing, see the logs: {missing}"
            )
        time.sleep(POLL_S)


def missing_nodes(names: Sequence[str], hosts: Iterable[str]) -> list[str]:
    """The nodes among `names`, as the scheduler calls them, that are none of the hosts that have joined; either may carry a domain."""
    found = {host.split(".")[0] for host in hosts}
    return [name for name in names if name.split(".")[0] not in found]
