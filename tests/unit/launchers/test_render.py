"""What launchers are given says what the config says, and survives the shell and YAML."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from mrl.launch import main
from tests.sources import ROOT

TINY = ["grpo_tiny.yaml", "cluster.num_nodes=2", "cluster.gpus_per_node=8"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0, capsys.readouterr().out
    return capsys.readouterr().out


def test_the_script_hands_sbatch_what_the_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logs = tmp_path / "logs of runs"
    words = [
        "slurm",
        *TINY,
        "grpo.seed=7",
        "--account",
        "research",
        "--time",
        "4:00:00",
        "--log-dir",
        str(logs),
        "--container",
        "it's.sqsh",
    ]
    script = tmp_path / "submit.sh"
    script.write_text(printed(capsys, *words))
    # A sbatch that says what it was given.
    (tmp_path / "sbatch").write_text('#!/bin/sh\nprintf "%s\\n" "$COMMAND" "$CONTAINER" "$GPUS_PER_NODE" "$BASE_LOG_DIR" "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(["bash", script], capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}).stdout.splitlines()
    assert said[0] == "python -m mrl.train grpo_tiny.yaml cluster.num_nodes=2 cluster.gpus_per_node=8 grpo.seed=7"
    assert said[1:4] == ["it's.sqsh", "8", str(logs)]
    assert {"--nodes=2", "--gres=gpu:8", "--account=research", "--time=4:00:00", f"--output={logs}/slurm-%j.out"} < set(said)
    assert said[-1] == str(ROOT / "scripts" / "ray.sub")
    assert logs.is_dir()


def test_sites_without_gres_are_asked_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "slurm", *TINY, "--log-dir", str(tmp_path), "--gpus-per-node")
    assert "--gpus-per-node=8" in text and "--gres" not in text


def test_every_node_of_a_kubernetes_job_has_a_pod_and_none_is_privileged(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "k8s", *TINY, "--image", "registry/mrl:1", "--claim", "fsx", "--efa", "4", "--instance-type", "p4d.24xlarge")
    service, job = yaml.safe_load_all(text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    container = pod["containers"][0]
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert variables["HEAD_HOST"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert variables["FI_PROVIDER"] == "efa" and variables["NUM_NODES"] == "2" and variables["GPUS_PER_NODE"] == "8"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8" and container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "4"
    assert "privileged" not in text
    assert "EFA" not in printed(capsys, "k8s", *TINY, "--image", "registry/mrl:1", "--claim", "fsx").upper().replace("DEFAULT", "")


def test_a_config_with_an_unknown_key_is_not_launched(capsys: pytest.CaptureFixture[str]):
    assert main(["slurm", "grpo_tiny.yaml", "cluster.num_node=2"]) == 2
    assert "cluster.num_nodes" in capsys.readouterr().out


def test_without_sbatch_nothing_is_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["slurm", *TINY, "--log-dir", str(tmp_path), "--submit"]) == 1
    assert "sbatch is not on this host's PATH" in capsys.readouterr().out


def test_lepton_gets_the_command_and_the_size(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "lepton", *TINY, "--image", "registry/mrl:1")
    assert "CLUSTER_NUM_NODES=2" in text and "CLUSTER_GPU_PER_NODE=8" in text
    assert "COMMAND=python -m mrl.train grpo_tiny.yaml cluster.num_nodes=2 cluster.gpus_per_node=8" in text
