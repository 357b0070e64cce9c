"""Asks every node of the cluster at RAY_ADDRESS for its facts, and judges the nodes together: which are missing, what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from conversion.files.owners import CANARIES, PATIENCE_S, answer_canary, is_answered, release_canary, retire_canary
from mrl.doctor.findings import Finding, some
from mrl.doctor.gpus import PROBE_TIMEOUT_S
from mrl.doctor.probe import HostFacts, probe_host

# A node's first task waits for a new process, which imports from a network file system.
ANSWER_TIMEOUT_S = PROBE_TIMEOUT_S + PATIENCE_S + 60.0
# Readers compare the nodes' log lines by time, tokens and certificates expire; NTP keeps hosts within milliseconds.
MAX_SKEW_S = 2.0


@dataclass(frozen=True)
class NodeLook:
    """A node's own report."""

    facts: HostFacts
    sees: Mapping[str, bool]
    """By folder: whether the node sees the file that the head has written there, and could answer beside it."""


@dataclass(frozen=True)
class NodeReport:
    """Everything that the head knows about one node; `error` says why there is no look."""

    name: str
    look: NodeLook | None = None
    error: str = ""
    seen: Mapping[str, bool] | None = None
    """By folder: whether the head sees what the node has written there."""
    clock_ahead_s: float | None = None
    clock_uncertainty_s: float = 0.0


def look_around(name: str, folders: Mapping[str, Path], canaries: Mapping[str, Path], patience_s: float, tries_imports: bool) -> NodeLook:
    """Probes the node called `name`; runs there. `canaries` are files that the asking host has written, by folder."""
    facts = probe_host(folders, is_in_cluster=True, tries_imports=tries_imports)
    return NodeLook(facts, {folder: answer_canary(canary, name, patience_s=patience_s) for folder, canary in canaries.items()})


def report_nodes(
    folders: Mapping[str, Path], shared: Sequence[Path], *, tries_imports: bool, patience_s: float = PATIENCE_S
) -> tuple[list[NodeReport], list[str]]:
    """A report of every node, and the names of the nodes that have left. All nodes should share the folders `shared`.

    Raises:
        NoCluster: there is no such cluster.
    """
    # Judging reports needs no Ray.
    from mrl.cluster.nodes import ask_nodes, clock_offsets, joined_cluster

    with _released_canaries(shared) as canaries, joined_cluster() as nodes:
        alive = [node for node in nodes if node.is_alive]
        replies = ask_nodes(alive, look_around, folders, canaries, patience_s, tries_imports, deadline_s=ANSWER_TIMEOUT_S)
        clocks = clock_offsets([node for node in alive if not replies[node.name].error], deadline_s=ANSWER_TIMEOUT_S)
        reports = []
        for name, reply in replies.items():
            look = reply.answer if isinstance(reply.answer, NodeLook) else None
            sees = look.sees if look is not None else {}
            # A node that could not write has left nothing to see.
            seen = {folder: is_answered(canaries[folder], name, patience_s=patience_s) for folder, can_see in sees.items() if can_see}
            clock = clocks.get(name)
            ahead_s, uncertainty_s = (None, 0.0) if clock is None else (clock.seconds, clock.uncertainty_s)
            reports.append(NodeReport(name, look, reply.error, seen, ahead_s, uncertainty_s))
        return reports, [node.name for node in nodes if not node.is_alive]


@contextmanager
def _released_canaries(folders: Sequence[Path]) -> Iterator[dict[str, Path]]:
    """Writes a canary into each of these folders that can be written; they are there, by folder, inside the `with` block only."""
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


def judge_cluster(reports: Sequence[NodeReport], *, lost: Sequence[str], num_expected: int | None) -> list[Finding]:
    """Findings about the nodes as a whole. `lost` have left the cluster; `num_expected` is None where neither config nor Slurm says it."""
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
    gone = f"; lost: {some(lost)}" if lost else ""
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
    spelt = _groups(looks, lambda facts: f"{facts.commit or 'no commit'} (files {facts.source_digest})")
    if len(_groups(looks, lambda facts: facts.source_digest)) == 1:
        return Finding("mrl on the nodes", "ok", f"the same: {next(iter(spelt))}")
    return Finding("mrl on the nodes", "problem", _differing(spelt), "bring all nodes to one commit, or let them share the folder")


def _versions(looks: Mapping[str, HostFacts]) -> Finding:
    names = sorted({name for facts in looks.values() for name in facts.packages})
    by_name = {"python": _groups(looks, lambda facts: facts.python)}
    by_name |= {name: _groups(looks, lambda facts, name=name: facts.packages.get(name, "missing")) for name in names}
    differing = [f"{name} {_differing(by)}" for name, by in by_name.items() if len(by) > 1]
    if not differing:
        return Finding("packages on the nodes", "ok", f"the same {len(names)}")
    return Finding("packages on the nodes", "problem", some(differing), "use one container or one virtual environment for all nodes")


def _gpus(looks: Mapping[str, HostFacts]) -> Finding:
    by = _groups(looks, _spell_gpus)
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
    known = [(report, report.clock_ahead_s) for report in reports if report.clock_ahead_s is not None]
    if not known:
        return []
    # The question and its answer took time on their way, which is no fault of a clock.
    off = [(report, ahead_s) for report, ahead_s in known if abs(ahead_s) - report.clock_uncertainty_s > MAX_SKEW_S]
    if not off:
        most_s = max(abs(ahead_s) for _, ahead_s in known) + max(report.clock_uncertainty_s for report, _ in known)
        return [Finding("clocks", "ok", f"within {most_s:.3f} s of this host's")]
    found = some([f"{report.name} {ahead_s:+.1f} s" for report, ahead_s in off])
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


def _groups(looks: Mapping[str, HostFacts], value: Callable[[HostFacts], str]) -> dict[str, list[str]]:
    """The nodes of every value, the most frequent value first."""
    found: dict[str, list[str]] = {}
    for name, facts in looks.items():
        found.setdefault(value(facts), []).append(name)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _differing(by: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{value} on {some(nodes)}" for value, nodes in by.items())
