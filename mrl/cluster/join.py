"""Which nodes of a launcher's Ray cluster have joined."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import ray

UNIT_RESOURCE = "worker_units"
"""Ray resource of a launched node: as many as it has worker units."""


def connect() -> None:
    """Joins the cluster at RAY_ADDRESS, as the driver of no work."""
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)


def joined_nodes() -> list[tuple[str, int]]:
    """Name and worker units of every node that is online."""
    return [(_name(node), int(node["Resources"].get(UNIT_RESOURCE, 0))) for node in ray.nodes() if node["Alive"]]


def _name(node: Mapping[str, object]) -> str:
    """What the launcher calls a node: the name that it started Ray with, else that of the host."""
    # Ray calls a node that was given no name by its address.
    is_named = node["NodeName"] != node["NodeManagerAddress"]
    return str(node["NodeName"] if is_named else node["NodeManagerHostname"])
