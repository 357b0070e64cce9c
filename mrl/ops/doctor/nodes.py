# SPDX-License-Identifier: Apache-2.0
"""Asks every node of the cluster at RAY_ADDRESS for facts, judges them together: which are missing, what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from conversion.files.owners import CANARIES, PATIENCE_S, answer_canary, is_answered, release_canary, retire_canary
from conversion.texts import listed
from mrl.ops.doctor.findings import Finding
from mrl.ops.doctor.gpus import PROBE_TIMEOUT_S
from mrl.ops.doctor.probe import HostFacts, probe_host

# A node's first task waits for a new process, which imports from a network file system.
ANSWER_TIMEOUT_S = PROBE_TIMEOUT_S + PATIENCE_S + 60.0
# Readers compare the nodes' log lines by time, tokens and certificates expire; NTP keeps hosts within milliseconds.
MAX_SKEW_S = 2.0


@dataclass(frozen=True)
class NodeLook:
    """A node's own report."""

    facts: HostFacts
    sees: Mapping[str, bool]
    """Folders whose file from the head the node sees, and could answer next to it."""


@dataclass(frozen=True)
class NodeReport:
    """Everything that the head knows about one node; `error` says why its own report is missing."""

    name: str
    look: NodeLook | None = None
    error: str = ""
    seen: Mapping[str, bool] | None = None
    clock_ahead_s: float | None = None
    clock_uncertainty_s: float = 0.0


def look_around(
    name: str, folders: Mapping[str, Path], canaries: Mapping[str, Path], patience_s: float, tries_imports: bool
) -> NodeLook:
    """Probes the node called `name`; runs there. `canaries` are files that the asking host has written, by folder."""
    facts = probe_host(folders, is_in_cluster=True, tries_imports=tries_imports)
    return NodeLook(
        facts, {folder: answer_canary(canary, name, patience_s=patience_s) for folder, canary in canaries.items()}
    )


def report_nodes(
    folders: Mapping[str, Path], shared: Sequence[Path], *, tries_imports: bool
) -> tuple[list[NodeReport], list[str]]:
    """A report of every node, and the names of those that left; all should share `shared`. NoCluster: there is none."""
    # Judging reports needs no Ray.
    from mrl.cluster.nodes import ask_nodes, clock_offsets, cluster_nodes

    with _released_canaries(shared) as canaries, cluster_nodes() as nodes:
        alive = [node for node in nodes if node.is_alive]
        replies = ask_nodes(
            alive, look_around, folders, canaries, PATIENCE_S, tries_imports, deadline_s=ANSWER_TIMEOUT_S
        )
        clocks = clock_offsets([node for node in alive if not replies[node.name].error], deadline_s=ANSWER_TIMEOUT_S)
        reports = []
        for name, reply in replies.items():
            look = reply.answer if isinstance(reply.answer, NodeLook) else None
            sees = look.sees if look is not None else {}
            seen = {
                folder: is_answered(canaries[folder], name, patience_s=PATIENCE_S)
                for folder, can_see in sees.items()
                if can_see
            }
            ahead_s, uncertainty_s = clocks.get(name, (None, 0.0))
            reports.append(NodeReport(name, look, reply.error, seen, ahead_s, uncertainty_s))
        return reports, [node.name for node in nodes if not node.is_alive]


@contextmanager
def _released_canaries(folders: Sequence[Path]) -> Iterator[dict[str, Path]]:
    canaries: dict[str, Path] = {}
    made = [path for folder in folders for path in (folder / CANARIES, folder, *folder.parents) if not path.exists()]
    try:
        for folder in folders:
            # A folder that cannot be written is a finding of its own, among the disks.
            with suppress(OSError):
                canaries[str(folder)] = release_canary(folder)
        yield canaries
    finally:
        for canary in canaries.values():
            retire_canary(canary)
        for path in made:
            with suppress(OSError):  # another process uses it by now
                path.rmdir()


def judge_cluster(
    reports: Sequence[NodeReport], *, lost: Sequence[str], num_expected: int | None, num_graders: int = 0
) -> list[Finding]:
    """Findings about all nodes. `lost` left the cluster; `num_expected` is None if neither config nor Slurm says it.

    `num_graders` nodes compute rewards alone, without GPUs.
    """
    names, gone = listed([report.name for report in reports]), f"; lost: {listed(lost)}" if lost else ""
    findings = [Finding("nodes", "ok", f"{len(reports)}: {names}")]
    if num_expected is not None and len(reports) < num_expected:
        found = f"{len(reports)} of {num_expected} have joined: {names}{gone}"
        remedy = "the missing nodes' ray-worker-*.log says why; docs/troubleshooting.md has the reasons"
        findings = [Finding("nodes", "problem", found, remedy)]
    elif lost:
        findings = [
            Finding("nodes", "problem", f"{names}{gone}", "see the logs of the lost nodes, and start the cluster again")
        ]
    remedy = (
        "every node needs the same installation of mrl: the same container, or VENV on a file system that all share"
    )
    findings += [
        Finding("node", "problem", report.error, remedy, (report.name,)) for report in reports if report.look is None
    ]
    facts = {report.name: report.look.facts for report in reports if report.look is not None}
    if facts:
        sources = _groups(facts, lambda of: f"{of.commit or 'no commit'} (files {of.source_digest})")
        is_same = len(_groups(facts, lambda of: of.source_digest)) == 1
        remedy = "bring all nodes to one commit, or let them share the folder"
        findings.append(
            _alike("mrl on the nodes", is_same, f"the same: {next(iter(sources))}", _differing(sources), remedy)
        )
        packages = sorted({name for of in facts.values() for name in of.packages})
        versions = {"python": _groups(facts, lambda of: of.python)}
        versions |= {name: _groups(facts, lambda of, name=name: of.packages.get(name, "missing")) for name in packages}
        differing = [f"{name} {_differing(nodes)}" for name, nodes in versions.items() if len(nodes) > 1]
        remedy = "use one container or one virtual environment for all nodes"
        findings.append(
            _alike("packages on the nodes", not differing, f"the same {len(packages)}", listed(differing), remedy)
        )
        on_gpus = {name: of for name, of in facts.items() if of.gpus is not None}
        compared = on_gpus if 0 < len(facts) - len(on_gpus) <= num_graders else facts
        gpus, remedy = _groups(compared, _spell_gpus), "ask for nodes of one kind, with one driver and one NCCL"
        findings.append(
            _alike("GPUs on the nodes", len(gpus) == 1, f"the same: {next(iter(gpus))}", _differing(gpus), remedy)
        )
    known = [(report, report.clock_ahead_s) for report in reports if report.clock_ahead_s is not None]
    off = [
        f"{report.name} {ahead_s:+.1f} s"
        for report, ahead_s in known
        if abs(ahead_s) - report.clock_uncertainty_s > MAX_SKEW_S
    ]
    if off:
        remedy = "start NTP (chronyc tracking, timedatectl) on these nodes"
        findings.append(Finding("clocks", "problem", f"apart from this host's: {listed(off)}", remedy))
    elif known:
        most_s = max(abs(ahead_s) for _, ahead_s in known) + max(report.clock_uncertainty_s for report, _ in known)
        findings.append(Finding("clocks", "ok", f"within {most_s:.3f} s of this host's"))
    folders = dict.fromkeys(folder for report in reports if report.look for folder in report.look.sees)
    return findings + [_shared(folder, reports) for folder in folders]


def _alike(check: str, is_same: bool, same: str, differing: str, remedy: str) -> Finding:
    return Finding(check, "ok", same) if is_same else Finding(check, "problem", differing, remedy)


def _spell_gpus(facts: HostFacts) -> str:
    if facts.gpus is None:
        return "none"
    if facts.gpus.driver is None:
        return "a driver that does not answer"
    gpus = facts.gpus.driver.gpus
    kinds = sorted({gpu.name for gpu in gpus})
    return (
        f"{len(gpus)} x {' and '.join(kinds)}, driver {facts.gpus.driver.version}, NCCL "
        f"{facts.gpus.probe.nccl or 'unknown'}"
    )


def _shared(folder: str, reports: Sequence[NodeReport]) -> Finding:
    name = "shared folder"
    blind = [report.name for report in reports if report.look and not report.look.sees.get(folder, False)]
    unseen = [
        report.name
        for report in reports
        if report.name not in blind and report.seen and not report.seen.get(folder, False)
    ]
    if not blind and not unseen:
        return Finding(name, "ok", f"{folder}: every node sees the others' files")
    reasons = [f"{listed(blind)} cannot see this host's files there, or cannot write"] if blind else []
    reasons += [f"this host does not see what {listed(unseen)} wrote"] if unseen else []
    remedy = "name a folder on a file system that all nodes share, and mount it into their containers (MOUNTS)"
    return Finding(name, "problem", f"{folder}: {'; '.join(reasons)}", remedy)


def _groups(looks: Mapping[str, HostFacts], value: Callable[[HostFacts], str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, facts in looks.items():
        found.setdefault(value(facts), []).append(name)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _differing(by: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{value} on {listed(nodes)}" for value, nodes in by.items())
