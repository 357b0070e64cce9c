# SPDX-License-Identifier: Apache-2.0
"""Waiting for the nodes of a cluster: who is counted, who is named."""

from __future__ import annotations

import pytest

from mrl.ops.launch import missing_nodes, wait_for_nodes


def test_hosts_are_nodes_with_or_without_their_domain():
    assert missing_nodes(["a1", "a2.site", "a3"], ["a2", "a1.site", "b1"]) == ["a3"]


def test_units_of_one_node_do_not_stand_for_another():
    def wait(joined: list[tuple[str, int]], names: list[str]) -> None:
        wait_for_nodes(lambda: joined, num_nodes=2, num_slots=16, names=names, timeout_s=0)

    wait([("a1", 8), ("a2", 8)], ["a1", "a2"])
    with pytest.raises(RuntimeError, match="16 of 16 slots are online after 0 s .*: a2$"):
        wait([("a1", 16)], ["a1", "a2"])
    with pytest.raises(RuntimeError, match=": 1 of 2 nodes$"):
        wait([("a1", 8)], [])
