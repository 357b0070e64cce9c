# SPDX-License-Identifier: Apache-2.0
"""Samplers on the nodes of a cluster."""

from __future__ import annotations

from mrl.cluster.hosts import HostSampler
from mrl.cluster.nodes import NodeSamplers
from tests.stack.loop.conftest import DEADLINE_S, LiveRun


def test_every_node_has_a_sampler_that_sees_the_ranks_memory(live: LiveRun):
    sample = NodeSamplers(is_private=False).sample(DEADLINE_S)
    own = HostSampler(is_actor=False).sample()
    assert sample.keys() == {f"node.0.{name}" for name in own}
    assert abs(sample["node.0.mem_total_gb"] - own["mem_total_gb"]) < 1e-6
    # Four ranks and two engines, torch in each of them.
    assert sample["node.0.rss_gb"] > 1.0
