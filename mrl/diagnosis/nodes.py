"""What the facts of all nodes of a cluster say: who is missing, and what differs that must not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mrl.diagnosis.facts import HostFacts
from mrl.diagnosis.findings import Finding
from mrl.diagnosis.software import some

# Log lines of nodes are read side by side, tokens and certificates have times; NTP keeps hosts within milliseconds.
MAX_SKEW_S = 2.0


@dataclass(frozen=True)
class NodeLook:
    """What a node says about itself."""

    facts: HostFacts
    sees: Mapping[str, bool]
    """By folder: whether the node sees what the head has written there, and could answer beside it."""


@dataclass(frozen=True)
class NodeReport:
    """What is known about one node."""

    name: str
    look: NodeLook | None = None
    error: str = ""
    """Why it did not say anything."""
    seen: Mapping[str, bool] | None = None
    """By folder: whether the head sees what the node has written there."""
    clock_ahead_s: float | None = None
    clock_uncertainty_s: float = 0.0


def judge_cluster(reports: Sequence[NodeReport], *, lost: Sequence[str], num_expected: int | None) -> list[Finding]:
    """One finding per question about the nodes as a whole. `lost` have left the cluster, `num_expected` is None where nobody says."""
    findings = [_presence(reports, lost, num_expected)]
    findings += [_silence(report) for report in reports if report.look is None]
    looks = {report.name: report.look.facts for report in reports if report.look is not None}
    if looks:
        findings += [_sources(looks), _versions(looks), _gpus(looks)]
    findings += _clocks(reports)
    folders = dict.fromkeys(folder for report in reports if report.look for folder in report.look.sees)
    return findings + [_shared(folder, reports) for folder in folders]


def _presence(reports: Sequence[NodeReport], lost: Sequence[str], num_expected: int | None) -> Finding:
    names = some([report.name for report in reports])
    gone = f"; lost: {some(list(lost))}" if lost else ""
    if num_expected is not None and len(reports) < num_expected:
        found = f"{len(reports)} of {num_expected} have joined: {names}{gone}"
        return Finding("nodes", "problem", found, "the missing nodes' ray-worker-*.log says why; docs/troubleshooting.md has the reasons")
    if lost:
        return Finding("nodes", "problem", f"{names}{gone}", "see the logs of the lost nodes, and start the cluster again")
    return Finding("nodes", "ok", f"{len(reports)}: {names}")


def _silence(report: NodeReport) -> Finding:
    remedy = "every node needs the same installation of mrl: the same container, or VENV on a file system that all share"
    return Finding("node", "problem", report.error, remedy, (report.name,))


def _sources(looks: Mapping[str, HostFacts]) -> Finding:
    spelt = groups(looks, lambda facts: f"{facts.commit or 'no commit'} (files {facts.source_digest})")
    if len(groups(looks, lambda facts: facts.source_digest)) == 1:
        return Finding("mrl on the nodes", "ok", f"the same: {next(iter(spelt))}")
    return Finding("mrl on the nodes", "problem", _differing(spelt), "bring all nodes to one commit, or let them share the folder")


def _versions(looks: Mapping[str, HostFacts]) -> Finding:
    names = sorted({name for facts in looks.values() for name in facts.packages})
    differing = {name: by for name in names if len(by := groups(looks, lambda facts, name=name: facts.packages.get(name, "missing"))) > 1}
    pythons = groups(looks, lambda facts: facts.python)
    if len(pythons) > 1:
        differing = {"python": pythons, **differing}
    if not differing:
        return Finding("packages on the nodes", "ok", f"the same {len(names)}")
    found = some([f"{name} {_differing(by)}" for name, by in differing.items()])
    return Finding("packages on the nodes", "problem", found, "use one container or one virtual environment for all nodes")


def _gpus(looks: Mapping[str, HostFacts]) -> Finding:
    by = groups(looks, _spell_gpus)
    if len(by) == 1:
        return Finding("GPUs on the nodes", "ok", f"the same: {next(iter(by))}")
    return Finding("GPUs on the nodes", "problem", _differing(by), "ask for nodes of one kind, with one driver and one NCCL")


def _spell_gpus(facts: HostFacts) -> str:
    if facts.gpus is None:
        return "none"
    if facts.gpus.driver is None:
        return "a driver that does not answer"
    gpus = facts.gpus.driver.gpus
    kinds = sorted({gpu.name for gpu in gpus})
    return f"{len(gpus)} x {' and '.join(kinds)}, driver {facts.gpus.driver.version}, NCCL {facts.gpus.probe.nccl or 'unknown'}"


def _clocks(reports: Sequence[NodeReport]) -> list[Finding]:
    known = [report for report in reports if report.clock_ahead_s is not None]
    if not known:
        return []
    # What the way of question and answer may have taken is nobody's fault.
    off = [report for report in known if abs(report.clock_ahead_s or 0.0) - report.clock_uncertainty_s > MAX_SKEW_S]
    if not off:
        largest = max(abs(report.clock_ahead_s or 0.0) for report in known)
        return [Finding("clocks", "ok", f"within {largest + max(report.clock_uncertainty_s for report in known):.3f} s of this host's")]
    found = some([f"{report.name} {report.clock_ahead_s:+.1f} s" for report in off])
    return [Finding("clocks", "problem", f"apart from this host's: {found}", "start NTP (chronyc tracking, timedatectl) on these nodes")]


def _shared(folder: str, reports: Sequence[NodeReport]) -> Finding:
    name = "shared folder"
    blind = [report.name for report in reports if report.look and not report.look.sees.get(folder, False)]
    unseen = [report.name for report in reports if report.name not in blind and report.seen and not report.seen.get(folder, False)]
    if not blind and not unseen:
        return Finding(name, "ok", f"{folder}: every node sees the others' files")
    reasons = [f"{some(blind)} cannot see this host's files there, or cannot write"] if blind else []
    reasons += [f"this host does not see what {some(unseen)} wrote"] if unseen else []
    remedy = "name a folder on a file system that all nodes share, and mount it into their containers (MOUNTS)"
    return Finding(name, "problem", f"{folder}: {'; '.join(reasons)}", remedy)


def groups(looks: Mapping[str, HostFacts], value: Callable[[HostFacts], str]) -> dict[str, list[str]]:
    """The nodes of every value, the most frequent value first."""
    found: dict[str, list[str]] = {}
    for name, facts in looks.items():
        found.setdefault(value(facts), []).append(name)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _differing(by: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{value} on {some(nodes)}" for value, nodes in by.items())
