# SPDX-License-Identifier: Apache-2.0
"""Standard output that a pipe takes: jobs and JSON, and nothing beside them, of every packaged config."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from mrl.config.files import packaged_configs
from mrl.ops import launch
from mrl.ops.doctor import command as doctor

CONFIGS = sorted(path.name for path in packaged_configs().glob("*.yaml"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder without the files that configs name, and no Ray."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_slurm_job_is_a_script(config: str, capsys: pytest.CaptureFixture[str]):
    code = launch.main(["slurm", config, "checkpointing.checkpoint_dir=/shared/results"])
    said = capsys.readouterr()
    assert code == 0, said.err
    subprocess.run(["bash", "-n"], input=said.out, text=True, check=True)
    assert said.out.startswith("#!/usr/bin/env bash\n") and "sbatch " in said.out


@pytest.mark.parametrize("config", [name for name in CONFIGS if "tiny" not in name])
def test_a_manifest_is_yaml_with_kubernetes_keys(config: str, capsys: pytest.CaptureFixture[str]):
    words = ["cluster.gpus_per_node=8", "checkpointing.checkpoint_dir=/shared/results", "logger.log_dir=/shared/logs"]
    code = launch.main(["k8s", config, *words, "--image=mrl", "--claim=shared", "--efa=32"])
    said = capsys.readouterr()
    if code:  # a config that this many GPUs refuse is not printed at all
        assert said.out == "" and said.err.startswith("[ERROR] ")
        return
    documents = list(yaml.safe_load_all(said.out))
    assert documents and all(keys.keys() <= {"apiVersion", "kind", "metadata", "spec"} for keys in documents)


@pytest.mark.parametrize("config", ["grpo_math_8B.yaml", "grpo_tiny.yaml"])
def test_findings_are_json(config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mrl.ops.doctor.probe.IMPORTED", ("json",))
    doctor.main([config, "--json"])
    assert json.loads(capsys.readouterr().out).keys() >= {"is_ok", "findings"}
