"""Which nodes of a launcher's Ray cluster have joined."""

from __future__ import annotations

import logging

import ray

UNIT_RESOURCE = "worker_units"
"""Ray resource of a launched node: as many as it has worker units."""


def connect() -> None:
    """Joins the cluster at RAY_ADDRESS, as the driver of no work."""
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)


def joined_nodes() -> list[tuple[str, int]]:
    """Host name and worker units of every node that is online."""
    return [(str(node["NodeManagerHostname"]), int(node["Resources"].get(UNIT_RESOURCE, 0))) for node in ray.nodes() if node["Alive"]]
