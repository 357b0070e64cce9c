# SPDX-License-Identifier: Apache-2.0
"""One finding of a check, and how findings are printed: as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from conversion.texts import listed

Status = Literal["ok", "note", "problem"]
"""`note`: harmless in some cases; it does not count as a problem."""
MAX_NODES_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """The result of one check, and the remedy for a problem."""

    check: str
    status: Status
    found: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()
    """The nodes that it holds for, if only some nodes of a cluster."""


def has_problem(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "problem" for finding in findings)


def merge_nodes(by_node: dict[str, list[Finding]]) -> list[Finding]:
    """The findings of all nodes, each once: with the nodes that share it, or with none if all nodes do."""
    nodes_of: dict[Finding, list[str]] = {}
    for node, findings in by_node.items():
        for finding in findings:
            nodes_of.setdefault(finding, []).append(node)
    order = list(dict.fromkeys(finding.check for finding in nodes_of))
    merged = [
        dataclasses.replace(finding, nodes=() if len(nodes) == len(by_node) else tuple(nodes))
        for finding, nodes in nodes_of.items()
    ]
    return sorted(merged, key=lambda finding: order.index(finding.check))


def table(findings: Sequence[Finding]) -> list[str]:
    """The findings as aligned lines; a remedy stands on the line below."""
    names = [
        f"{finding.check} ({listed(finding.nodes, MAX_NODES_NAMED)})" if finding.nodes else finding.check
        for finding in findings
    ]
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
    return json.dumps(
        {"is_ok": not has_problem(findings), "findings": [dataclasses.asdict(finding) for finding in findings]},
        indent=1,
    )


def normalise(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
