# SPDX-License-Identifier: Apache-2.0
"""Finds lost nodes of a launcher's cluster sooner than Ray, which takes a quarter of a minute. Needs no Ray."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address

from conversion.texts import listed

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Member:
    """A node, and where its daemon of Ray listens."""

    host: str
    address: str
    port: int
    daemon: str = "raylet"

    def loss(self) -> str:
        """Reason why nothing on the node can be reached any more; "" if the daemon takes connections."""
        try:
            socket.create_connection((self.address, self.port), timeout=CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return f"Ray's {self.daemon} on node {self.host} ({self.address}) died"
        except OSError as error:
            return f"node {self.host} ({self.address}) is down, or its network is ({error})"
        return ""


members: list[Member] = []
"""Nodes of the cluster that this process has joined; none of a private one."""
heads: list[Member] = []
"""The node of that cluster without whose daemon none of Ray's does anything new."""


def dead_head() -> str:
    """The cluster head's daemon, if its node answers that it is gone, for a message; "" if it lives or none answers."""
    return next((loss for head in heads if (loss := head.loss()).endswith(" died")), "")


def lost_nodes() -> str:
    """Lost nodes of the cluster, for a message; "" if none is."""
    if not members:
        return ""
    with ThreadPoolExecutor(len(members)) as pool:
        return " and ".join(filter(None, pool.map(Member.loss, members)))


def warn_of_public(found: Sequence[Member]) -> None:
    """Warns of nodes whose address in the cluster the whole internet may reach: torch's stores there know no secret."""
    public = [f"{member.host} ({member.address})" for member in found if ip_address(member.address).is_global]
    if public:
        logger.warning(
            "public addresses: %s. Stores of process groups, Gloo and NCCL listen there without a secret: start Ray "
            "with --node-ip-address of a private network (docs/security.md), or let a firewall keep others out",
            listed(public),
        )
