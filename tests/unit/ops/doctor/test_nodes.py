# SPDX-License-Identifier: Apache-2.0
"""Findings about clusters that this host cannot have: missing nodes, skewed clocks, folders that are not shared."""

from __future__ import annotations

import json
from dataclasses import replace

from mrl.ops.doctor.findings import Finding, as_json, merge_nodes, table
from mrl.ops.doctor.gpus import CudaProbe, Gpus
from mrl.ops.doctor.nodes import NodeLook, NodeReport, judge_cluster
from mrl.ops.doctor.probe import HostFacts


def report(name: str, facts: HostFacts, *, sees: bool = True, seen: bool = True, ahead_s: float = 0.0) -> NodeReport:
    return NodeReport(name, NodeLook(facts, {"/shared": sees}), "", {"/shared": seen}, ahead_s, 0.01)


def problems(
    reports: list[NodeReport], *, lost: tuple[str, ...] = (), num_expected: int | None = None
) -> list[tuple[str, str]]:
    findings = judge_cluster(reports, lost=lost, num_expected=num_expected)
    return [(finding.check, finding.found) for finding in findings if finding.status == "problem"]


def test_equal_nodes_are_well(gpu_host: HostFacts):
    findings = judge_cluster([report(f"n{i}", gpu_host) for i in range(4)], lost=[], num_expected=4)
    assert [finding.status for finding in findings] == ["ok"] * 6
    assert findings[0].found == "4: n0, n1, n2, n3"


def test_missing_lost_and_silent_nodes(gpu_host: HostFacts):
    two = [report("n0", gpu_host), report("n1", gpu_host)]
    assert problems(two, num_expected=4, lost=("n2",)) == [("nodes", "2 of 4 have joined: n0, n1; lost: n2")]
    assert problems(two, lost=("n2",)) == [("nodes", "n0, n1; lost: n2")]
    silent = NodeReport("n2", None, "ModuleNotFoundError: No module named 'mrl'")
    (finding,) = [f for f in judge_cluster([*two, silent], lost=[], num_expected=3) if f.status == "problem"]
    assert (
        finding.nodes == ("n2",) and "No module named 'mrl'" in finding.found and "same installation" in finding.remedy
    )


def test_nodes_for_rewards_need_no_gpus(gpu_host: HostFacts):
    three = [report("n0", gpu_host), report("n1", gpu_host), report("n2", replace(gpu_host, gpus=None))]
    for num_graders, expected in ((1, []), (0, ["GPUs on the nodes"])):
        findings = judge_cluster(three, lost=[], num_expected=3, num_graders=num_graders)
        assert [finding.check for finding in findings if finding.status == "problem"] == expected
    # One of two that have lost theirs is none of the nodes for rewards.
    two = [*three, report("n3", replace(gpu_host, gpus=None))]
    findings = judge_cluster(two, lost=[], num_expected=4, num_graders=1)
    assert [finding.check for finding in findings if finding.status == "problem"] == ["GPUs on the nodes"]


def test_what_differs_between_nodes_is_named(gpu_host: HostFacts):
    other = replace(gpu_host, packages={**gpu_host.packages, "ray": "2.59.0"}, source_digest="ffff", commit="")
    assert problems([report("n0", gpu_host), report("n1", other), report("n2", gpu_host)]) == [
        ("mrl on the nodes", "0123456789 (files abcdef012345) on n0, n2; no commit (files ffff) on n1"),
        ("packages on the nodes", "ray 2.60.0 on n0, n2; 2.59.0 on n1"),
    ]
    assert gpu_host.gpus is not None and gpu_host.gpus.driver is not None
    fewer = replace(gpu_host.gpus.driver, gpus=gpu_host.gpus.driver.gpus[:7])
    ((check, found),) = problems(
        [report("n0", gpu_host), report("n1", replace(gpu_host, gpus=Gpus(fewer, "", CudaProbe(nccl="2.27"))))]
    )
    assert check == "GPUs on the nodes" and "7 x NVIDIA H100 80GB HBM3, driver 580.65.06, NCCL 2.27 on n1" in found


def test_clocks(gpu_host: HostFacts):
    assert problems([report("n0", gpu_host), report("n1", gpu_host, ahead_s=1.9)]) == []
    skewed = [report("n0", gpu_host, ahead_s=-37.0), report("n1", gpu_host, ahead_s=2.5)]
    assert problems(skewed) == [("clocks", "apart from this host's: n0 -37.0 s, n1 +2.5 s")]
    slow = replace(skewed[1], clock_uncertainty_s=1.0)  # the answer may have taken the difference
    assert problems([report("n0", gpu_host), slow]) == []


def test_folders_that_are_not_shared(gpu_host: HostFacts):
    blind = [report("n0", gpu_host), report("n1", gpu_host, sees=False, seen=False)]
    assert problems(blind) == [("shared folder", "/shared: n1 cannot see this host's files there, or cannot write")]
    unseen = [report("n0", gpu_host), report("n1", gpu_host, seen=False)]
    assert problems(unseen) == [("shared folder", "/shared: this host does not see what n1 wrote")]


def test_findings_of_nodes_are_said_once():
    well, low = Finding("limits", "ok", "many"), Finding("limits", "problem", "few", "raise them")
    merged = merge_nodes({"n0": [Finding("python", "ok", "3.12"), well], "n1": [Finding("python", "ok", "3.12"), low]})
    assert [(f.check, f.status, f.nodes) for f in merged] == [
        ("python", "ok", ()),
        ("limits", "ok", ("n0",)),
        ("limits", "problem", ("n1",)),
    ]
    assert table(merged) == [
        "python       ok       3.12",
        "limits (n0)  ok       many",
        "limits (n1)  problem  few",
        "                      -> raise them",
        "",
        "Problems: 1.",
    ]
    said = json.loads(as_json(merged))
    assert said["is_ok"] is False
    assert said["findings"][2] == {
        "check": "limits",
        "status": "problem",
        "found": "few",
        "remedy": "raise them",
        "nodes": ["n1"],
    }
