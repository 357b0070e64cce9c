# SPDX-License-Identifier: Apache-2.0
"""scripts/ray_node.sh on nodes of their own, with the variables that Kubernetes and Lepton set, and real Ray."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mrl.ops.launchers.kubernetes import KubernetesJob, render
from tests.cluster.nodes import missing, nodes_of
from tests.sources import ROOT
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.long("nodes"),
    pytest.mark.skipif(missing() is not None, reason=f"nodes of our own need {missing()}"),
]

COUNT = """
import ray
ray.init(log_to_driver=False)
resources = ray.cluster_resources()
print("counted", len(ray.nodes()), resources["worker_units"], resources["nrl_tag_ALL"], flush=True)
"""
# The name that other nodes are known by reaches them: the head still has them while it saves.
SAVE = """
import signal, sys, time
def save(*_):
    time.sleep(5)
    print("alive while saving:", sum(node["Alive"] for node in ray.nodes()), flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
time.sleep(300)
"""
TWO_NODES = [
    *SMALL,
    "cluster.cpu_units_per_node=1",
    "policy.generation.num_cpu_engines=1",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "grpo.max_num_steps=2",
    "grpo.val_at_start=false",
    "logger.tensorboard_enabled=false",
    "env.math.timeout_s=600",
]
PROBE = """
import os, sys
print("arguments", *sys.argv[1:])
print("interfaces", os.environ.get("NCCL_SOCKET_IFNAME"))
"""


def kubernetes_variables(
    folder: Path, command: list[str], *, num_nodes: int, num_graders: int = 0
) -> Callable[[int], dict[str, str]]:
    """Variables of each rank's pod, as the manifest gives them; the last ranks are those of pods that only grade."""
    job = KubernetesJob(
        command, num_nodes=num_nodes, gpus_per_node=0, slots_per_node=2, name="run", namespace="default", image="mrl",
        claim="fsx",
        mount_path="/shared", instance_type=None, num_efa=0, cpus=1, memory="1Gi", shared_memory="1Gi",
        num_graders=num_graders,
    )  # fmt: skip
    (token := folder / "token").write_text(os.urandom(32).hex())

    def variables(rank: int) -> dict[str, str]:
        is_grader = rank >= num_nodes
        manifest = list(yaml.safe_load_all(render(job)))[1 + is_grader]
        environment = manifest["spec"]["template"]["spec"]["containers"][0]["env"]
        given = {item["name"]: item["value"] for item in environment if "value" in item}
        given |= {"RAY_TOKEN_FILE": str(token), "HF_HOME": str(folder), "JOIN_TIMEOUT_S": "600"}
        return given | {"NODE_RANK" if is_grader else "JOB_COMPLETION_INDEX": str(rank)}

    return variables


def python(source: str) -> list[str]:
    return ["python", "-c", source]


def test_a_kubernetes_job_counts_its_nodes_and_ends_with_the_commands_code(tmp_path: Path):
    variables = kubernetes_variables(tmp_path, python(COUNT + "raise SystemExit(7)"), num_nodes=2)
    with nodes_of(tmp_path, "run", "run", num_nodes=2) as nodes:
        for rank in range(2):
            nodes.start(rank, variables(rank))
        assert nodes.end(0) == 7, nodes.explain()
        assert nodes.end(1) == 0, nodes.explain()
        head, worker = nodes.log(0), nodes.log(1)
    assert "counted 2 4.0 2.0" in head
    assert "Number of actors online: 4/4" in head
    assert "Cluster ready: 2 nodes, 0 GPUs" in head
    assert head.splitlines()[-1] == "Training exit code: 7"
    assert "Node 1 of 2: run-1 on pod-1, 10.79.0.2, 0 GPUs; head: run-0.run:6379" in worker
    assert "may run code here" not in head


def test_a_pod_that_only_grades_joins_without_slots_and_ends_with_the_head(tmp_path: Path):
    wait = COUNT.replace("resources =", "import time\nwhile len(ray.nodes()) < 2: time.sleep(0.5)\nresources =")
    variables = kubernetes_variables(tmp_path, python(wait), num_nodes=1, num_graders=1)
    with nodes_of(tmp_path, "run", "run", num_nodes=2) as nodes:
        for rank in range(2):
            nodes.start(rank, variables(rank))
        assert nodes.end(0) == 0, nodes.explain()
        assert nodes.end(1) == 0, nodes.explain()
        head, worker = nodes.log(0), nodes.log(1)
    assert "Number of actors online: 2/2" in head and "counted 2 2.0 2.0" in head
    assert "Node 1 of 2: run-1 on pod-1, 10.79.0.2, 0 GPUs; head: run-0.run:6379" in worker


def test_a_node_that_does_not_join_is_named_and_a_stranger_is_kept_out(tmp_path: Path):
    variables = kubernetes_variables(tmp_path, ["true"], num_nodes=4)
    stranger = tmp_path / "guessed"
    stranger.write_text(os.urandom(32).hex())
    with nodes_of(tmp_path, "run", "run", num_nodes=4) as nodes:
        nodes.start(0, variables(0) | {"JOIN_TIMEOUT_S": "60"})
        nodes.start(1, variables(1))
        nodes.start(2, variables(2) | {"RAY_TOKEN_FILE": str(stranger)})
        assert nodes.end(0) == 1, nodes.explain()
        assert nodes.end(2) != 0, nodes.explain()
        assert nodes.end(1) == 0, nodes.explain()
        head = nodes.log(0)
    assert "2 of 8" not in head and "4 of 8 slots are online after 60 s" in head
    assert "missing, see the logs: run-2, run-3" in head
    assert head.splitlines()[-1] == "ERROR: not all nodes joined; see above"
    assert "Cluster ready" not in head


def test_a_signal_lets_the_command_save_while_the_other_nodes_stay(tmp_path: Path):
    variables = kubernetes_variables(tmp_path, python(COUNT + SAVE), num_nodes=2)
    with nodes_of(tmp_path, "run", "run", num_nodes=2) as nodes:
        for rank in range(2):
            nodes.start(rank, variables(rank))
        wait_until(lambda: "training" in nodes.log(0).splitlines(), "training", explain=nodes.explain)
        for rank in range(2):
            nodes.signal(rank, signal.SIGTERM, "^bash /.*/scripts/ray_node.sh$")
        assert nodes.end(0) == 75, nodes.explain()
        assert nodes.end(1) == 0, nodes.explain()
        assert "alive while saving: 2" in nodes.log(0)


def test_a_node_whose_ray_dies_fails(tmp_path: Path):
    variables = kubernetes_variables(tmp_path, python(COUNT + SAVE), num_nodes=2)
    with nodes_of(tmp_path, "run", "run", num_nodes=2) as nodes:
        for rank in range(2):
            nodes.start(rank, variables(rank))
        wait_until(lambda: "training" in nodes.log(0).splitlines(), "training", explain=nodes.explain)
        nodes.signal(1, signal.SIGKILL, "raylet/raylet")
        assert nodes.end(1) == 1, nodes.explain()
        assert "while the head goes on" in nodes.log(1).splitlines()[-1]


def lepton_variables(folder: Path, *, num_nodes: int, **more: str) -> Callable[[int], dict[str, str]]:
    """Variables that Lepton gives each worker of a job, and those that its form asks the user for."""
    given = {
        "LEPTON_JOB_NAME": "grpo",
        "LEPTON_JOB_TOTAL_WORKERS": str(num_nodes),
        "LEPTON_RESOURCE_ACCELERATOR_NUM": "0",
        "NCCL_SOCKET_IFNAME": "eth9",
        "RAY_AUTH_TOKEN": os.urandom(32).hex(),
        "RAY_DASHBOARD_PORT": "8625",
        "CHECKPOINT_DIR": str(folder / "results"),
        "HF_HOME": str(folder),
    }
    return lambda rank: given | {"LEPTON_JOB_WORKER_INDEX": str(rank)} | more


def test_a_lepton_job_runs_its_script(tmp_path: Path):
    script = tmp_path / "probe.py"
    script.write_text(COUNT + PROBE)
    variables = lepton_variables(
        tmp_path, num_nodes=3, SCRIPT_PATH=str(script), CONFIG_PATH="examples/configs/grpo_math_8B.yaml"
    )
    with nodes_of(tmp_path, "grpo", "grpo-job-svc", num_nodes=3) as nodes:
        for rank in range(3):
            nodes.start(rank, variables(rank))
        assert nodes.end(0) == 0, nodes.explain()
        assert [nodes.end(rank) for rank in (1, 2)] == [0, 0], nodes.explain()
        head = nodes.log(0)
    assert "counted 3 3.0 3.0" in head
    overrides = f"cluster.num_nodes=3 cluster.gpus_per_node=0 checkpointing.checkpoint_dir={tmp_path}/results"
    assert f"arguments --config examples/configs/grpo_math_8B.yaml {overrides}" in head
    # The nodes do not have eight GPUs.
    assert "interfaces None" in head


def test_a_lepton_job_trains(tmp_path: Path):
    config: dict = {"defaults": str(ROOT / "configs" / "grpo_tiny.yaml")}
    for override in [*write_inputs(tmp_path), *TWO_NODES]:
        key, _, value = override.partition("=")
        *sections, last = key.lstrip("+").split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = yaml.safe_load(value)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    variables = lepton_variables(
        tmp_path, num_nodes=2, SCRIPT_PATH="examples/run_grpo_math.py", CONFIG_PATH=str(tmp_path / "run.yaml")
    )
    with nodes_of(tmp_path, "grpo", "grpo-job-svc", num_nodes=2) as nodes:
        for rank in range(2):
            nodes.start(rank, variables(rank))
        assert nodes.end(0, timeout_s=2 * HANG_S) == 0, nodes.explain()
        assert nodes.end(1) == 0, nodes.explain()
        assert "Step 2/2" in nodes.log(0)
    rows = [json.loads(line) for line in (tmp_path / "results" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["refit/verified_bytes"] > 0 for row in rows)
