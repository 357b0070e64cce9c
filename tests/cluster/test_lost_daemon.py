# SPDX-License-Identifier: Apache-2.0
"""A run over two nodes that loses a daemon of Ray: the run names it and its node, and the next attempts go on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from mrl.store.checkpoints import newest_step
from tests.cluster.conftest import Scenario
from tests.cluster.nodes import missing, nodes_of
from tests.cluster.test_ray_node import TWO_NODES, kubernetes_variables
from tests.faults.attempts import is_trained, lineage
from tests.sources import ROOT
from tests.stack.loop.conftest import write_inputs
from tests.waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.long("cluster"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(missing() is not None, reason=f"nodes of our own need {missing()}"),
]
SETTINGS = ["cluster.num_nodes=2", "checkpointing.save_period=1"]


LOSSES = {
    # Node, process, what is said, exit codes.
    "another node's raylet is killed": (
        1,
        "raylet/raylet",
        r"The attempt ended: Ray's raylet on node pod-1 \(10\.79\.0\.2\) died, ",
        (1,),
    ),
    # The ranks live on, and save.
    "the head's gcs_server is killed": (
        0,
        "gcs/gcs_server",
        r"Ray's gcs_server on node pod-0 \(10\.79\.0\.1\) died",
        (1, 75),
    ),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_daemon_that_dies_is_named_and_costs_one_attempt(tmp_path: Path, scenario: Scenario, what: str):
    node, process, expected, codes = LOSSES[what]
    run_folder, inputs = tmp_path / "run", write_inputs(tmp_path)

    def attempt(steps: int, *, kills: bool = False) -> tuple[int, str]:
        """Exit code of an attempt, and what it printed."""
        overrides = [
            *inputs,
            *TWO_NODES,
            *SETTINGS,
            f"checkpointing.checkpoint_dir={run_folder}",
            f"grpo.max_num_steps={steps}",
        ]
        command = ["python", "-m", "mrl.train", str(ROOT / "configs" / "grpo_tiny.yaml"), *overrides]
        variables = kubernetes_variables(tmp_path, command, num_nodes=2)
        with nodes_of(tmp_path, "run", "run", num_nodes=2) as nodes:
            for rank in range(2):
                nodes.log_path(rank).unlink(missing_ok=True)
                nodes.start(rank, variables(rank) | {"UNITS_PER_NODE": "1"})
            if kills:
                wait_until(lambda: is_trained(run_folder, 2), "step 2", 3 * HANG_S, explain=nodes.explain)
                nodes.signal(node, signal.SIGKILL, process)
            return nodes.end(0, timeout_s=3 * HANG_S), nodes.log(0)

    with scenario(what, "node and daemon named, the attempt ends; two attempts go on"):
        code, said = attempt(10**6, kills=True)
        print(said[-600:])
        assert code in codes, said[-4000:]
        assert re.search(f"{expected}.*same command", said), said[-4000:]
        for _ in range(2):
            reached = newest_step(run_folder)
            code, said = attempt(reached + 2)
            assert code == 0 and f"Resuming from {run_folder}/step_{reached} " in said, said[-4000:]
            assert sorted(lineage(run_folder)) == list(range(1, reached + 3))
