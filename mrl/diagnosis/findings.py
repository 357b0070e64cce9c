"""What the doctor says: one finding a line, as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]
"""`note`: nothing to worry about in every case; it does not count as a problem."""


@dataclass(frozen=True)
class Finding:
    """What was found about one thing, and what to do about it unless it is well."""

    check: str
    status: Status
    found: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()
    """Where, if on some nodes of a cluster only."""


def has_problem(findings: Sequence[Finding]) -> bool:
    """Whether any of them is a problem."""
    return any(finding.status == "problem" for finding in findings)


def merge_nodes(by_node: dict[str, list[Finding]]) -> list[Finding]:
    """The findings of all nodes: what is the same on several is said once, with their names, or with none if it is so on all."""
    nodes_of: dict[Finding, list[str]] = {}
    for node, findings in by_node.items():
        for finding in findings:
            nodes_of.setdefault(finding, []).append(node)
    order = list(dict.fromkeys(finding.check for finding in nodes_of))
    merged = [dataclasses.replace(finding, nodes=() if len(nodes) == len(by_node) else tuple(nodes)) for finding, nodes in nodes_of.items()]
    return sorted(merged, key=lambda finding: order.index(finding.check))


def table(findings: Sequence[Finding]) -> list[str]:
    """The findings as aligned lines; below each that has a remedy, what to do."""
    names = [f"{finding.check} ({_shortened(finding.nodes)})" if finding.nodes else finding.check for finding in findings]
    width = max(map(len, names), default=0)
    lines = []
    for name, finding in zip(names, findings, strict=True):
        lines.append(f"{name:<{width}}  {finding.status:<7}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<{width}}           -> {finding.remedy}")
    num_problems = sum(finding.status == "problem" for finding in findings)
    return [*lines, "", "All is well." if num_problems == 0 else f"Problems: {num_problems}."]


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as one JSON object: `is_ok`, and `findings` with the fields of `Finding`."""
    return json.dumps({"is_ok": not has_problem(findings), "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=1)


def _shortened(nodes: Sequence[str], limit: int = 3) -> str:
    return ", ".join(nodes[:limit]) + (f" and {len(nodes) - limit} more" if len(nodes) > limit else "")
