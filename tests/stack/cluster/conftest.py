# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this host."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]  compiled, without stubs
from ray.cluster_utils import Cluster

from tests.sources import search_path
from tests.waiting import HANG_S


@contextmanager
def ray_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *processors: int, last_gpus: int = 0
) -> Iterator[Cluster]:
    """A cluster of nodes of so many processors, inside the `with` block.

    Their processes find modules in the test's folder. The last one says that it has `last_gpus`.
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), search_path()]))
    # A run of one node, earlier in this process, keeps Ray on 127.0.0.1, where runs of other processes do not find it.
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    # An earlier test of this process may have had a cluster, whose token is gone.
    (token := tmp_path / "token").write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    AuthenticationTokenLoader.instance().reset_cache()
    head: dict[str, object] = {"num_cpus": processors[0], "include_dashboard": False}
    # A node whose raylet a busy host starves is not lost; one that has ended is noticed all the same.
    head["_system_config"] = {"health_check_timeout_ms": round(HANG_S * 1000)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for place, number in enumerate(processors[1:], 2):
        cluster.add_node(num_cpus=number, num_gpus=last_gpus if place == len(processors) else 0)
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two nodes of one processor each."""
    with ray_nodes(tmp_path, monkeypatch, 1, 1):
        yield
